"""What a study is: cells, their shards, and what judges and measures the samples.

A cell is one of two kinds: samples of one sampler on one model, or a probe, which looks inside paths or states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from limpet.errors import LimpetError
from limpet.evaluation.metrics import METRICS
from limpet.evaluation.scoring import AUTO
from limpet.models import Denoiser
from limpet.samplers import Sampler

if TYPE_CHECKING:
    from limpet.experiments.contents import Page
    from limpet.experiments.results import Results

DIVERSITY = ("entropy", "dist-4", "rep-4", "self-bleu")  # the paper's, in its order
TRUE_DISTRIBUTION = "true distribution"  # what tables call the judge of a model whose distribution is known
# What a replay shares with its cell
TERMS = attrgetter("model", "n", "first", "length", "prompts", "sampler.nfe", "warmup_calls")


@dataclass(frozen=True)
class Prompts:
    """Prefixes to continue: `tokens` ids of each text, `each` continuations of every one.

    `texts` is a file with one text a line, or "source" for prefixes drawn from an exact source's own distribution."""

    texts: str
    tokens: int = 50
    each: int = 5


@dataclass(frozen=True)
class Cell:
    """One sampler on one model, in every shard."""

    name: str
    model: str
    sampler: Sampler
    n: int  # samples in a shard
    length: int | None = None  # the model's own unless told
    prompts: Prompts | None = None
    replay: str | None = None  # the cell whose selection this one replays: same positions, same calls
    first: int = 0  # the index of its first sample: cells with no index in common share no randomness

    @property
    def warmup_calls(self) -> int:
        """How many first calls select nothing, as far as the sampler tells."""
        return getattr(self.sampler, "warmup_calls", 0)


class Seen(NamedTuple):
    """One figure of one shard: of which model, what, where, and how many events it is a mean over."""

    model: str
    quantity: str
    at: dict[str, Any]
    value: float
    unit: str = ""
    events: int | None = None


# (models, settings, which shard, the seeds of all) -> what was seen in that shard
Look = Callable[[Sequence[Denoiser], Any, int, tuple[int, ...]], Iterable[Seen]]


@dataclass(frozen=True)
class Probe:
    """A look inside paths or forward states, in every shard: a function of a module, and a dataclass of settings.

    A setting `text` is a file; its content counts, not its name."""

    name: str
    models: tuple[str, ...]
    look: Look
    settings: Any
    cost: int = 2**16  # tokens through the network in a shard, roughly


@dataclass(frozen=True)
class Judging:
    """A judge by name, and how it reads a sample: by a convention, or by the one that fits the model."""

    name: str
    convention: str = AUTO

    @property
    def caption(self) -> str:
        """What tables call it."""
        return self.name if self.convention in (AUTO, "ids") else f"{self.name} ({self.convention})"


@dataclass(frozen=True)
class Study:
    """Cells and shards, and `show`, which turns their results into tables, figures and claims.

    A model whose true distribution is known is scored by that distribution where there are no judges."""

    name: str
    title: str
    cells: tuple[Cell | Probe, ...]
    shards: tuple[int, ...]
    show: Callable[[Results], Page] = field(repr=False)
    judges: tuple[Judging, ...] = ()
    metrics: tuple[str, ...] = DIVERSITY
    preset: str = ""
    real: str | None = None  # a text file, plain or .xz, that samples are held against by MAUVE
    shown: int = 0  # samples of a cell that its report keeps as text, 2 at most
    digits: int | None = None  # significant ones of a number in its report; all unless told
    conventions: Mapping[str, str] = field(default_factory=dict)  # how each quantity of its probes is taken
    toy: bool = False  # too small, or of too simple a language, to stand beside the paper

    def __post_init__(self) -> None:
        if not self.cells or not self.shards:
            raise LimpetError(f"study {self.name} has {len(self.cells)} cells and {len(self.shards)} shards; give both")
        _distinct(f"shard of study {self.name}", self.shards)
        _distinct(f"cell of study {self.name}", [cell.name for cell in self.cells])
        _distinct(f"judge of study {self.name}", [judging.caption for judging in self.judges])
        known = [metric.name for metric in METRICS]
        for name in self.metrics:
            if name not in known:
                raise LimpetError(f"there is no metric {name!r}; there are {', '.join(known)}")
        for cell in self.samples:
            _check(self, cell)

    @property
    def samples(self) -> tuple[Cell, ...]:
        """The cells that are made of samples."""
        return tuple(cell for cell in self.cells if isinstance(cell, Cell))

    @property
    def captions(self) -> list[str]:
        """What tables call the judges."""
        return [judging.caption for judging in self.judges] or [TRUE_DISTRIBUTION]

    def cell(self, name: str) -> Cell | None:
        return next((cell for cell in self.samples if cell.name == name), None)


def _distinct(what: str, names: Iterable[object]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise LimpetError(f"{what} {name!r} is there twice; give each once")


def _check(study: Study, cell: Cell) -> None:
    if cell.n < 1:
        raise LimpetError(f"cell {cell.name} has {cell.n} samples in a shard; ask for at least one")
    if cell.prompts is not None and (cell.prompts.each < 1 or cell.n % cell.prompts.each):
        raise LimpetError(f"cell {cell.name} has {cell.n} samples, {cell.prompts.each} of each prompt; give a multiple")
    if getattr(cell.sampler, "values", None) == "recorded" and cell.replay is None:
        raise LimpetError(f"cell {cell.name} has values='recorded'; say which cell it replays")
    if cell.replay is None:
        return
    recorded = study.cell(cell.replay)
    if recorded is None or recorded.replay is not None:
        raise LimpetError(f"cell {cell.name} replays {cell.replay!r}, which is no cell that selects for itself")
    if type(cell.sampler).replay is Sampler.replay:
        raise LimpetError(f"cell {cell.name} replays {cell.replay}, but {cell.sampler.name} replays nothing")
    if TERMS(recorded) != TERMS(cell):
        raise LimpetError(
            f"cell {cell.name} replays {cell.replay}, so they must agree on model, samples, length, prompts, nfe and "
            "the calls before the first selection"
        )
