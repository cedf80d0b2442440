"""A training run written down: every choice that decides the weights, read from one TOML file."""

from __future__ import annotations

import tomllib
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_type_hints

from limpet.errors import LimpetError


@dataclass(frozen=True)
class Data:
    """Which text, and how it is cut: `folder` keeps it tokenised, for every recipe that names it."""

    files: list[str]
    folder: str
    vocab_size: int = 4096
    length: int = 256
    validation: float = 0.03
    test: float = 0.03


@dataclass(frozen=True)
class Sizes:
    """The network's sizes; vocabulary and length come with the data."""

    width: int
    blocks: int
    heads: int
    hidden: int
    cond: int = 128
    dropout: float = 0.0


@dataclass(frozen=True)
class Run:
    """How long and how fast. Exactly one of `steps` and `seconds` ends the run and schedules its decay.

    A run in steps gives the same weights every time on one machine; one in seconds fills the time that there is."""

    batch: int
    rate: float
    warmup: int
    steps: int = 0
    seconds: float = 0.0
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    decay: float = 1.0  # the share of the run over which the rate falls to nothing
    weight_decay: float = 0.0
    clip: float = 1.0
    average: float = 0.999
    precision: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False
    validate_every: int = 500
    validate_rows: int = 1024
    save_every: int = 1000


@dataclass(frozen=True)
class Distil:
    """Consistency distillation: the student at t learns from the teacher at t - delta; each round has its own delta."""

    teacher: str
    deltas: list[float]
    clean: float = 0.999
    noisy: float = 0.006


@dataclass(frozen=True)
class Recipe:
    """Everything `limpet train` needs to know; `folder` is where checkpoint, log and weights go."""

    name: str
    folder: str
    kind: Literal["duo", "causal", "distil"]
    data: Data
    run: Run
    seed: int = 1
    sizes: Sizes | None = None
    distil: Distil | None = None


_TABLES = {"data": Data, "run": Run, "sizes": Sizes, "distil": Distil}


def _build(kind: type, given: dict[str, Any], where: str) -> Any:
    """One table of the file as its dataclass, or a sentence on the first thing that does not fit."""
    known = {f.name: f for f in fields(kind)}
    hints = get_type_hints(kind)
    for key, value in given.items():
        if key not in known:
            raise LimpetError(f"{where} does not know {key!r}: it takes {', '.join(known)}")
        hint = hints[key]
        if getattr(hint, "__origin__", None) is Literal:
            if value not in hint.__args__:
                raise LimpetError(f"{where} has {key} = {value!r}: it takes {' or '.join(map(repr, hint.__args__))}")
        elif hint in (int, float, str, bool):
            good = isinstance(value, (int, float) if hint is float else hint) and (
                hint is bool or not isinstance(value, bool)
            )
            if not good:
                raise LimpetError(f"{where} has {key} = {value!r}: it takes one {hint.__name__}")
        elif hint in (list[str], list[float]):
            inside = str if hint == list[str] else (int, float)
            if not isinstance(value, list) or not all(isinstance(item, inside) for item in value):
                raise LimpetError(f"{where} has {key} = {value!r}: it takes a list of {hint.__args__[0].__name__}s")
    for key, f in known.items():
        if key not in given and f.default is MISSING and f.default_factory is MISSING:
            raise LimpetError(f"{where} lacks {key!r}")
    return kind(**given)


def read(file: Path) -> Recipe:
    """The recipe in a TOML file; anything it does not know or that does not fit is refused in one sentence."""
    try:
        given = tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise LimpetError(f"{file} is not a TOML file that can be read: {error}") from error
    return from_dict(given, str(file))


def from_dict(given: dict[str, Any], where: str = "the recipe") -> Recipe:
    """The recipe of a parsed TOML document."""
    given = dict(given)
    for table, kind in _TABLES.items():
        if table in given:
            if not isinstance(given[table], dict):
                raise LimpetError(f"{where} has {table} = {given[table]!r}: it takes a table, [{table}]")
            given[table] = _build(kind, given[table], f"[{table}] of {where}")
    recipe: Recipe = _build(Recipe, given, where)
    _check(recipe, where)
    return recipe


def _check(recipe: Recipe, where: str) -> None:
    """What one table cannot say of itself."""
    run, data = recipe.run, recipe.data
    if (run.steps > 0) == (run.seconds > 0):
        raise LimpetError(f"[run] of {where} has steps = {run.steps} and seconds = {run.seconds}: give exactly one")
    least = {"batch": 1, "save_every": 1, "validate_every": 1, "validate_rows": 1, "vocab_size": 257, "length": 3}
    for key, smallest in least.items():
        value = getattr(run if hasattr(run, key) else data, key)
        if value < smallest:
            raise LimpetError(f"{where} has {key} = {value}: it takes {smallest} or more")
    if data.vocab_size > 2**16:
        raise LimpetError(f"{where} has vocab_size = {data.vocab_size}: it takes {2**16} or fewer")
    if not 0 < run.decay <= 1 or len(run.betas) != 2:
        raise LimpetError(f"[run] of {where} has decay = {run.decay} and betas = {run.betas}: a share and two numbers")
    wants = "distil" if recipe.kind == "distil" else "sizes"
    if [table for table in ("distil", "sizes") if getattr(recipe, table) is not None] != [wants]:
        raise LimpetError(f"{where} is of kind {recipe.kind!r}: of [sizes] and [distil] it takes [{wants}] alone")
    if recipe.distil is not None and not all(0 < delta < 1 for delta in recipe.distil.deltas or [0]):
        raise LimpetError(f"[distil] of {where} has deltas = {recipe.distil.deltas}: it takes one or more in (0, 1)")
    sizes = recipe.sizes
    if sizes is not None and (min(sizes.width, sizes.heads, sizes.blocks) < 1 or sizes.width % (2 * sizes.heads)):
        raise LimpetError(f"[sizes] of {where} has width {sizes.width} and {sizes.heads} heads: heads of even width")
