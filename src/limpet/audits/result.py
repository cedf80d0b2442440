"""What an audit returns: rows with an estimate over shards, the events they rest on, and the paper's figure beside."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from limpet.denoisers import Denoiser
from limpet.denoisers.exact import Source
from limpet.stats import Estimate, mean_se

T = TypeVar("T")

Progress = Callable[[int, int], None]  # (units of work done, units in all)
Published = Mapping[tuple[Any, ...], str]  # (checkpoint, quantity, *where) -> the figure as the paper prints it
At = Mapping[str, float | int | str]

SHARDS = (8200, 8210, 8220, 8230)  # the paper's seeds


@dataclass(frozen=True, kw_only=True)
class Preset:
    """How much of an audit is done; every audit adds what it alone asks for."""

    shards: tuple[int, ...] = SHARDS
    paths: int  # paths, or clean sequences, in each shard
    nfe: int = 64
    length: int | None = None  # tokens in a path, where the model leaves a choice
    precision: Literal["float32", "bfloat16"] = "float32"  # what the network should be loaded in


@dataclass(frozen=True)
class Row:
    """One figure: of which model, what, where, in the paper's unit."""

    model: str
    quantity: str
    at: dict[str, Any]
    estimate: Estimate
    unit: str = ""
    events: int | None = None  # how many events it is a mean over, where it is a mean over events
    paper: str = ""

    def __str__(self) -> str:
        return with_error(self.estimate)

    def to_dict(self) -> dict[str, Any]:
        one = len(self.estimate.values) < 2
        return {
            "model": self.model,
            "quantity": self.quantity,
            "at": self.at,
            "mean": _number(self.estimate.mean),
            "se": None if one else _number(self.estimate.se),
            "shards": [_number(value) for value in self.estimate.values.tolist()],
            "unit": self.unit,
            "events": self.events,
            "paper": self.paper,
        }


@dataclass(frozen=True)
class Result:
    """An audit done: what on, how much, what was found, by which conventions."""

    audit: str
    settings: dict[str, Any]  # of the preset
    models: dict[str, str]  # name -> digest
    rows: list[Row]
    conventions: dict[str, str]

    def of(self, quantity: str, model: str | None = None, **at: Any) -> list[Row]:
        """The rows of a quantity, of one model or of all, wherever `at` holds."""
        return [
            row
            for row in self.rows
            if row.quantity == quantity
            and (model is None or row.model == model)
            and all(row.at.get(name) == value for name, value in at.items())
        ]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "rows": [row.to_dict() for row in self.rows]}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Result:
        """A result read back, to be drawn or set beside another; whatever else is kept with it is left alone."""
        rows = []
        for row in stored["rows"]:
            values = [math.nan if value is None else value for value in row["shards"]]
            rest = {name: row[name] for name in ("model", "quantity", "at", "unit", "events", "paper")}
            rows.append(Row(estimate=mean_se(values), **rest))
        rest = {name: stored[name] for name in ("audit", "settings", "models", "conventions")}
        return cls(rows=rows, **rest)


def checkpoint(model: Denoiser) -> str:
    """Which of the paper's two checkpoints a model stands beside; none for an exact source."""
    if isinstance(model, Source):
        return ""
    return "Duo-distilled" if "distilled" in model.name else "Duo"


def row(
    model: Denoiser, quantity: str, at: At, values: ArrayLike, published: Published, unit: str = "",
    events: int | None = None,
) -> Row:  # fmt: skip
    """A row of one model, with what the paper publishes for its counterpart at the same place."""
    paper = published.get((checkpoint(model), quantity, *at.values()), "")
    return Row(model.name, quantity, dict(at), mean_se(values), unit, events, paper)


def percent(hits: Sequence[float], of: Sequence[float]) -> np.ndarray:
    """100 hits / of, shard by shard; NaN in a shard that has no event."""
    total = np.asarray(of, dtype=np.float64)
    return 100 * np.asarray(hits, dtype=np.float64) / np.where(total > 0, total, np.nan)


def each(units: Sequence[T], progress: Progress) -> Iterator[T]:
    """Units of work one by one, telling how far it has come."""
    for done, unit in enumerate(units):
        progress(done, len(units))
        yield unit
    progress(len(units), len(units))


def with_error(estimate: Estimate) -> str:
    """41.79 ± 0.84: the error to two digits, the mean to the same place."""
    mean, error = estimate.mean, estimate.se
    if not math.isfinite(mean):
        return "none"
    if not math.isfinite(error) or error == 0:
        return f"{mean:.4g}"
    places = max(0, 1 - math.floor(math.log10(error)))
    return f"{mean:.{places}f} ± {error:.{places}f}"


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
