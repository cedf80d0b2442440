"""What a study is: cells (one policy on one model each), their shards, and what judges and measures the samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from limpet.errors import LimpetError
from limpet.judges import CONVENTIONS
from limpet.metrics import METRICS
from limpet.policy import Policy

if TYPE_CHECKING:
    from limpet.lab.page import Page
    from limpet.lab.results import Results

DIVERSITY = ("entropy", "dist-4", "rep-4", "self-bleu")  # the paper's, in its order


@dataclass(frozen=True)
class Prompts:
    """Prefixes to continue: `tokens` ids of each text, `each` continuations of every one.

    `texts` is a file with one text a line, or "source" for prefixes drawn from an exact source's own law."""

    texts: str
    tokens: int = 50
    each: int = 5


@dataclass(frozen=True)
class Cell:
    """One policy on one model, in every shard."""

    name: str
    model: str
    policy: Policy
    n: int  # samples in a shard
    length: int | None = None  # the model's own unless told
    prompts: Prompts | None = None
    replay: str | None = None  # the cell whose selection this one replays: same positions, same steps

    @property
    def trunk(self) -> tuple[object, ...]:
        """What cells must have in common to share the beginning of a path."""
        policy = self.policy
        start = (policy.nfe, policy.warmup, policy.grid, policy.top_p, policy.boundary)
        return self.model, self.n, self.length, self.prompts, start


@dataclass(frozen=True)
class Judging:
    """A judge by name, and how it reads a sample."""

    name: str
    convention: str = "ids"

    @property
    def label(self) -> str:
        """What tables call it."""
        return self.name if self.convention == "ids" else f"{self.name} ({self.convention})"


@dataclass(frozen=True)
class Study:
    """Cells and shards, and `show`, which turns their results into tables, figures and claims.

    A model whose true law is known is scored by that law where there are no judges."""

    name: str
    title: str
    cells: tuple[Cell, ...]
    shards: tuple[int, ...]
    show: Callable[[Results], Page] = field(repr=False)
    judges: tuple[Judging, ...] = ()
    metrics: tuple[str, ...] = DIVERSITY
    preset: str = ""

    def __post_init__(self) -> None:
        if not self.cells or not self.shards:
            raise LimpetError(f"study {self.name} has {len(self.cells)} cells and {len(self.shards)} shards; give both")
        _distinct(f"shard of study {self.name}", self.shards)
        _distinct(f"cell of study {self.name}", [cell.name for cell in self.cells])
        _distinct(f"judge of study {self.name}", [judging.label for judging in self.judges])
        known = [metric.name for metric in METRICS]
        for name in self.metrics:
            if name not in known:
                raise LimpetError(f"there is no metric {name!r}; there are {', '.join(known)}")
        for judging in self.judges:
            if judging.convention not in CONVENTIONS:
                raise LimpetError(f"convention {judging.convention!r} is none of {', '.join(CONVENTIONS)}")
        for cell in self.cells:
            _check(self, cell)

    def cell(self, name: str) -> Cell:
        return next(cell for cell in self.cells if cell.name == name)


def _distinct(what: str, names: Iterable[object]) -> None:
    seen = set()
    for name in names:
        if name in seen:
            raise LimpetError(f"{what} {name!r} is there twice; give each once")
        seen.add(name)


def _check(study: Study, cell: Cell) -> None:
    if cell.n < 1:
        raise LimpetError(f"cell {cell.name} has {cell.n} samples in a shard; ask for at least one")
    if cell.prompts is not None and cell.n % cell.prompts.each:
        raise LimpetError(f"cell {cell.name} has {cell.n} samples, {cell.prompts.each} of each prompt; give a multiple")
    if cell.policy.values == "recorded" and cell.replay is None:
        raise LimpetError(f"cell {cell.name} has values='recorded'; say which cell it replays")
    if cell.replay is None:
        return
    source = next((other for other in study.cells if other.name == cell.replay), None)
    if source is None or source.replay is not None:
        raise LimpetError(f"cell {cell.name} replays {cell.replay!r}, which is no cell that selects for itself")
    if source.trunk != cell.trunk:
        raise LimpetError(
            f"cell {cell.name} replays {cell.replay}, so they must agree on model, samples, length, prompts, nfe, "
            "warmup, grid, top_p and boundary"
        )
