"""A training run written down: every choice that decides the weights, read from one TOML file."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Literal, get_type_hints

from limpet.errors import LimpetError
from limpet.files import Toml
from limpet.models.prompt_layouts import SUDOKU
from limpet.samplers.params import Param, param


class Part:
    """A table of the file: a number whose field says its range lies in it."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for one in fields(self):  # type: ignore[arg-type]
            held, value = Param(one.name, hints[one.name], (), False, None, **one.metadata), getattr(self, one.name)
            if one.metadata and not held.accepts(value):
                raise LimpetError(f"{one.name} is {value!r}; it takes {held.takes}")


@dataclass(frozen=True)
class Clues(Part):
    """Which cells of a sudoku board are given in training: a uniform number from `fewest` to `most`, or none at all."""

    fewest: int = param(17, "the fewest clues of a puzzle", low=0, high=81)
    most: int = param(60, "the most clues of a puzzle", low=0, high=81)
    none: float = param(0.15, "share of the rows without any clue", low=0, high=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fewest > self.most:
            raise LimpetError(f"fewest is {self.fewest} and most is {self.most}: give fewest <= most")


@dataclass(frozen=True)
class Data(Part):
    """What is learned and how it is cut into rows; `folder` keeps it as tokens, for every recipe that names it.

    "text" is documents, packed into rows. "lines" is one row per line of the files, filled with spaces; characters are
    the tokens. "sudoku" and "sudoku-6x6" are written by a program: puzzle and solution in 164 and 74 tokens."""

    files: list[str]
    folder: str
    format: Literal["text", "lines", "sudoku", "sudoku-6x6"] = "text"
    vocab_size: int = param(
        4096, 'tokens of the tokenizer; for "text" every byte, the end of a text, and merges', low=2, high=2**16
    )
    length: int = param(256, "tokens of a row", low=3)
    validation: float = 0.03
    test: float = 0.03
    split_seed: int = param(0, "seed of the choice of held-out lines, or of the sudoku boards", low=0, high=2**63)
    boards: int = param(20_000, "sudoku boards solved independently; symmetries make all others", low=100)
    clues: Clues = field(default_factory=Clues)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format == "text" and self.vocab_size < 257:
            raise LimpetError(f"vocab_size is {self.vocab_size}; it takes a whole number from 257 for text")
        if (layout := SUDOKU.get(self.format)) is None:
            return
        wanted = len(layout.characters), layout.length
        if (self.vocab_size, self.length) != wanted:
            sizes = f"vocab_size is {self.vocab_size} and length is {self.length}"
            raise LimpetError(f"{sizes}: {self.format} takes {wanted[0]} and {wanted[1]}")
        if self.clues.most > layout.board.cells:
            raise LimpetError(f"most is {self.clues.most}; a {layout.board.name} board has {layout.board.cells} cells")


@dataclass(frozen=True)
class Sizes(Part):
    """The network's sizes; vocabulary and length come with the data."""

    hidden: int
    width: int = param(MISSING, "of the residual stream", low=1)
    blocks: int = param(MISSING, "transformer blocks", low=1)
    heads: int = param(MISSING, "of attention, each of even width", low=1)
    cond: int = 128
    learned_positions: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % (2 * self.heads):
            raise LimpetError(f"width is {self.width} with {self.heads} heads; it takes heads of even width")


@dataclass(frozen=True)
class Run(Part):
    """How long and how fast. Exactly one of `steps` and `seconds` ends the run and schedules its decay.

    A run in steps gives the same weights every time on one machine; one in seconds fills the time that there is."""

    rate: float
    warmup: int
    batch: int = param(MISSING, "rows a step", low=1)
    steps: int = 0
    seconds: float = 0.0
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    decay: float = param(1.0, "the share of the run over which the rate falls to nothing", above=0, high=1)
    weight_decay: float = 0.0
    clip: float = 1.0
    average: float = 0.999
    precision: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False
    graph: bool = False  # replay each step as one CUDA graph; without effect on a CPU
    validate_every: int = param(500, "steps between looks at held-out rows", low=1)
    validate_rows: int = param(1024, "how many of them are looked at", low=1)
    save_every: int = param(1000, "steps between checkpoints", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.steps > 0) == (self.seconds > 0):
            raise LimpetError(f"steps is {self.steps} and seconds is {self.seconds}: give exactly one")
        if len(self.betas) != 2:
            raise LimpetError(f"betas is {self.betas}; it takes two numbers")


@dataclass(frozen=True)
class Distil(Part):
    """Consistency distillation: the student at t learns from the teacher at t - delta; each round has its own delta."""

    teacher: str
    deltas: list[float]
    clean: float = 0.999
    noisy: float = 0.006

    def __post_init__(self) -> None:
        if not all(0 < delta < 1 for delta in self.deltas or [0]):
            raise LimpetError(f"deltas is {self.deltas}; it takes one or more in (0, 1)")


@dataclass(frozen=True)
class Recipe(Part):
    """Everything `limpet train` needs to know; `folder` is where checkpoint, log and weights go."""

    name: str
    folder: str
    kind: Literal["duo", "causal", "distil"]
    data: Data
    run: Run
    seed: int = param(1, "", low=0, high=2**63)
    sizes: Sizes | None = None
    distil: Distil | None = None
    checker: str = ""  # the name of the checker of the model's samples, which its config.json then names

    def __post_init__(self) -> None:
        super().__post_init__()
        wants = "distil" if self.kind == "distil" else "sizes"
        if [table for table in ("distil", "sizes") if getattr(self, table) is not None] != [wants]:
            raise LimpetError(f"a recipe of kind {self.kind!r} takes, of [sizes] and [distil], [{wants}] alone")


def shipped() -> dict[str, Path]:
    """The recipes that are part of limpet, by name."""
    return {file.stem: file for file in sorted((Path(__file__).parent / "recipes").glob("*.toml"))}


def read(name: str | Path) -> Recipe:
    """The recipe in a TOML file, or the one of a name; what it does not know or does not fit is one sentence."""
    known = shipped()
    if str(name) in known and not Path(name).exists():
        name = known[str(name)]
    return Toml(name, f"name a TOML file, or one of {', '.join(known)}").build(Recipe)
