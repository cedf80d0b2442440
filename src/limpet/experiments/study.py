"""The definition of a study: its cells, the seeds of each, and how its samples are scored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from limpet.errors import LimpetError
from limpet.evaluation.judges import AUTO
from limpet.evaluation.metrics import METRICS
from limpet.models import Denoiser
from limpet.samplers import Sampler

if TYPE_CHECKING:
    from limpet.experiments.report_content import ReportContent
    from limpet.experiments.results import Results

DIVERSITY_METRICS = ("entropy", "dist-4", "rep-4", "self-bleu")  # the paper's, in the paper's order
TRUE_DISTRIBUTION = "true distribution"  # the caption of a judge that is the model's own known distribution
# A cell that replays another one agrees with it on all of these.
REPLAY_TERMS = attrgetter("model", "n", "first", "length", "prompts", "sampler.nfe", "warmup_calls")


@dataclass(frozen=True)
class Prompts:
    """Texts to continue.

    texts: a file with one text per line, "source" to draw prompts from an exact source's own distribution, or
    "sudoku 32" or "sudoku-6x6 14" to write puzzles with so many clues and one solution. tokens: how many tokens of
    each text are the prompt. each: continuations of every prompt."""

    texts: str
    tokens: int = 50
    each: int = 5


@dataclass(frozen=True)
class Cell:
    """One sampler on one model, sampled under every seed of the study."""

    name: str
    model: str
    sampler: Sampler
    n: int  # samples per seed
    length: int | None = None  # default: the model's own length
    prompts: Prompts | None = None
    replay: str | None = None  # the cell whose selected positions and calls this one repeats
    first: int = 0  # index of the first sample: cells that share no index share no randomness

    @property
    def warmup_calls(self) -> int:
        """How many first calls commit nothing, if the sampler has a warmup."""
        return getattr(self.sampler, "warmup_calls", 0)


class ProbeValue(NamedTuple):
    """One number that a probe measured under one seed."""

    model: str
    quantity: str
    at: dict[str, Any]  # where it was measured, such as {"t": 0.5}
    value: float
    unit: str = ""
    events: int | None = None  # how many events the number is a mean over


# (models, settings, the index of the seed, all seeds) -> the values under that seed
ProbeFunction = Callable[[Sequence[Denoiser], Any, int, tuple[int, ...]], Iterable[ProbeValue]]


@dataclass(frozen=True)
class Probe:
    """A measurement inside trajectories or of forward states, made under every seed of the study.

    `settings` is a dataclass. If it has a field `text`, that is a file, and the probe depends on the file's content."""

    name: str
    models: tuple[str, ...]
    function: ProbeFunction
    settings: Any
    cost: int = 2**16  # tokens through the network per seed, roughly


@dataclass(frozen=True)
class JudgeSpec:
    """A judge by name, and the convention by which it reads samples (default: the one that fits the model)."""

    name: str
    convention: str = AUTO

    @property
    def caption(self) -> str:
        """The judge's name in tables."""
        return self.name if self.convention in (AUTO, "ids") else f"{self.name} ({self.convention})"


@dataclass(frozen=True)
class Study:
    """Cells and seeds, and a function that turns their results into tables, figures and claims.

    Without judges, samples are scored by the model's own distribution, where it is known. The checker of a model also
    scores its samples."""

    name: str
    title: str
    cells: tuple[Cell | Probe, ...]
    seeds: tuple[int, ...]
    build_report: Callable[[Results], ReportContent] = field(repr=False)
    judges: tuple[JudgeSpec, ...] = ()
    metrics: tuple[str, ...] = DIVERSITY_METRICS
    preset: str = ""
    reference_text: str | None = None  # a text file, plain or .xz, that MAUVE compares samples with
    texts_per_cell: int = 0  # samples of each cell that the report shows as text, 2 at most
    digits: int | None = None  # significant digits of the numbers in the report; default: all
    conventions: Mapping[str, str] = field(default_factory=dict)  # how each quantity of its probes is defined
    checker: str | None = None  # a checker of every model's samples; default: each model's own, if it names one
    is_toy: bool = False  # too small, or of too simple a language, to be compared with the paper

    def __post_init__(self) -> None:
        if not self.cells or not self.seeds:
            raise LimpetError(f"study {self.name} has {len(self.cells)} cells and {len(self.seeds)} seeds; give both")
        _check_distinct(f"seed of study {self.name}", self.seeds)
        _check_distinct(f"cell of study {self.name}", [cell.name for cell in self.cells])
        _check_distinct(f"judge of study {self.name}", [judge.caption for judge in self.judges])
        for name in self.metrics:
            if name not in METRICS:
                raise LimpetError(f"there is no metric {name!r}; there are {', '.join(METRICS)}")
        for cell in self.sample_cells:
            _check_cell(self, cell)

    @property
    def full_name(self) -> str:
        """The name of the study in a store and among reports: with the preset, if it has one."""
        return f"{self.name}-{self.preset}" if self.preset else self.name

    @property
    def sample_cells(self) -> tuple[Cell, ...]:
        """The cells that consist of samples."""
        return tuple(cell for cell in self.cells if isinstance(cell, Cell))

    @property
    def judge_captions(self) -> list[str]:
        """The judges' names in tables."""
        return [judge.caption for judge in self.judges] or [TRUE_DISTRIBUTION]

    def cell(self, name: str) -> Cell | None:
        """The sample cell of this name, if there is one."""
        return next((cell for cell in self.sample_cells if cell.name == name), None)


def _check_distinct(what: str, names: Iterable[object]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise LimpetError(f"{what} {name!r} is there twice; give each once")


def _check_cell(study: Study, cell: Cell) -> None:
    if cell.n < 1:
        raise LimpetError(f"cell {cell.name} has {cell.n} samples per seed; ask for at least one")
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
        raise LimpetError(f"cell {cell.name} replays {cell.replay}, but {cell.sampler.name} cannot replay")
    if REPLAY_TERMS(recorded) != REPLAY_TERMS(cell):
        raise LimpetError(
            f"cell {cell.name} replays {cell.replay}, so they must agree on model, samples, length, prompts, nfe and "
            "the calls before the first selection"
        )
