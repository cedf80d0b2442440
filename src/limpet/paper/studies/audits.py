"""What makes a look inside paths an audit: its presets, its cells, and its rows as a table and as bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from textwrap import fill
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from limpet.evaluation.comparison import SHARDS
from limpet.evaluation.statistics import Estimate
from limpet.experiments.claims import Printed, difference
from limpet.experiments.contents import PAPER, Entry, Panel, Table, number, series
from limpet.experiments.results import Results, Row
from limpet.experiments.study import Judging, Look, Probe
from limpet.files import Toml
from limpet.models.duo import Precision
from limpet.paper.studies.published import read
from limpet.paper.studies.trajectories import Forward, Settings

READING = "The paper's figures are of Duo and Duo-distilled, at its own sizes."
HEAD = ("model", "quantity", "at", "here", "events", PAPER)

FILE = Toml(Path(__file__).with_name("audits.toml"), "it comes with limpet")

S = TypeVar("S", bound=Settings)


@dataclass(frozen=True)
class Preset(Generic[S]):
    """How much of an audit is done, on what, and in what the networks run."""

    name: str
    settings: S
    precision: Precision = "float32"
    shards: tuple[int, ...] = SHARDS
    models: tuple[str, ...] = ()
    judges: ClassVar[tuple[Judging, ...]] = ()  # nothing is scored


def presets(name: str, settings: type[S]) -> dict[str, Preset[S]]:
    """The sizes of an audit, as they are written down."""
    own, found = FILE.content[name], {}
    for size, told in own["presets"].items():
        made = FILE.build(settings, told["settings"], name, "presets", size, "settings")
        whole = {"name": size, "models": own["models"], **told, "settings": made}
        found[size] = FILE.build(Preset, whole, name, "presets", size)
    return found


def checkpoint(model: str) -> str:
    """Which of the paper's two checkpoints a model stands beside; none for an exact source."""
    if model.startswith("exact:"):
        return ""
    return "Duo-distilled" if "distilled" in model else "Duo"


def each(look: Look) -> Callable[[Preset[Any]], list[Probe]]:
    """The cells of an audit: a probe for each model."""
    return lambda preset: [
        Probe(model, (model,), look, preset.settings, cost(preset.settings)) for model in preset.models
    ]


def cost(settings: Settings) -> int:
    """Tokens through a network in a shard, roughly: a path is walked once, a forward state is looked at once."""
    calls = len(settings.times) if isinstance(settings, Forward) else settings.nfe
    return settings.paths * calls * (settings.length or 1024)


def percent(hits: float | Tensor, of: float) -> tuple[float, str, int]:
    """The rest of a `Seen`: 100 hits / of, its unit, and how many events that is of; NaN where there is none."""
    return 100 * float(hits) / of if of else math.nan, "%", int(of)


# What the paper claims of it


def beside(results: Results, which: str) -> list[str]:
    """The models here that stand beside one of the paper's checkpoints."""
    return [model for model in dict.fromkeys(row.model for row in results.rows()) if checkpoint(model) == which]


def figure(name: str, quantity: str, **at: Any) -> Printed | None:
    """What the paper gives for a quantity, as a number."""
    told = FILE.content[name]["paper"].get(quantity, "")
    return read(str(told.get(" ".join(map(str, at.values())), "") if isinstance(told, dict) else told))


def less(name: str, one: str, other: str, **at: Any) -> Printed | None:
    """A figure of the paper less another, at the same place."""
    first, second = figure(name, one, **at), figure(name, other, **at)
    return first and second and difference(first, second)


# A table


def tables(results: Results, preset: Any) -> list[Table]:
    """One line a row: where, ours with its error, how many events, and what the paper publishes for its counterpart."""
    own = FILE.content[results.study.name]

    def paper(row: Row) -> str:
        figure = own["paper"].get(row.quantity, "")
        if isinstance(figure, dict):
            figure = figure.get(" ".join(map(str, row.at.values())), "")
        return str(figure) if checkpoint(row.model) in own.get("checkpoints", [checkpoint(row.model)]) else ""

    def line(row: Row) -> tuple[Entry, ...]:
        at = ", ".join(f"{name} {value}" for name, value in row.at.items())
        unit = f" {row.unit}" if row.unit else ""
        events = "" if row.events is None else f"{row.events:,}"
        return tuple(map(Entry, (row.model, row.quantity, at, with_error(row.estimate) + unit, events, paper(row))))

    groups = tuple(tuple(map(line, rows)) for _, rows in groupby(results.rows(), lambda row: row.model))
    caption = own["asks"] if results.study.toy else f"{own['asks']} {READING}"
    return [Table(results.study.name, caption, HEAD, groups, names=3)]


def with_error(estimate: Estimate) -> str:
    """41.79 ± 0.84: the error to two digits, the mean to the same place."""
    if not math.isfinite(estimate.mean):
        return "none"
    if not math.isfinite(estimate.se) or estimate.se == 0:
        return f"{estimate.mean:.4g}"
    return number(estimate, max(0, 1 - math.floor(math.log10(estimate.se))))


# A figure


def models_of(results: Results, quantity: str) -> list[str]:
    """The models that a quantity was seen of."""
    return list(dict.fromkeys(row.model for row in results.of(quantity)))


def one(results: Results, quantity: str, model: str | None = None, **at: Any) -> Estimate:
    """The only row of a quantity there."""
    (row,) = results.of(quantity, model, **at)
    return row.estimate


def bars(results: Results, quantities: Sequence[str], groups: Mapping[str, tuple[str, Mapping[str, Any]]]) -> Panel:
    """For each quantity a bar of every group, which is a model at some place."""
    places = range(len(quantities))
    lines = [
        series(name, places, [one(results, quantity, model, **at) for quantity in quantities])
        for name, (model, at) in groups.items()
    ]
    names = [fill(quantity, 48 // len(quantities), break_long_words=False) for quantity in quantities]
    return Panel("", "", "%", tuple(lines), tuple(zip(places, names, strict=True)), bars=True)
