"""A training run written down: every choice that decides the weights, read from one TOML file."""

from __future__ import annotations

import tomllib
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from limpet.errors import LimpetError, unknown
from limpet.samplers.knobs import Knob, knob


@dataclass(frozen=True)
class Data:
    """Which text, and how it is cut: `folder` keeps it tokenised, for every recipe that names it."""

    files: list[str]
    folder: str
    vocab_size: int = knob(
        4096, "tokens of the tokenizer: every byte, the end of a text, and merges", low=257, high=2**16
    )
    length: int = knob(256, "tokens of a row, its two ends included", low=3)
    validation: float = 0.03
    test: float = 0.03


@dataclass(frozen=True)
class Sizes:
    """The network's sizes; vocabulary and length come with the data."""

    hidden: int
    width: int = knob(MISSING, "of the residual stream", low=1)
    blocks: int = knob(MISSING, "transformer blocks", low=1)
    heads: int = knob(MISSING, "of attention, each of even width", low=1)
    cond: int = 128
    dropout: float = 0.0


@dataclass(frozen=True)
class Run:
    """How long and how fast. Exactly one of `steps` and `seconds` ends the run and schedules its decay.

    A run in steps gives the same weights every time on one machine; one in seconds fills the time that there is."""

    rate: float
    warmup: int
    batch: int = knob(MISSING, "rows a step", low=1)
    steps: int = 0
    seconds: float = 0.0
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    decay: float = knob(1.0, "the share of the run over which the rate falls to nothing", above=0, high=1)
    weight_decay: float = 0.0
    clip: float = 1.0
    average: float = 0.999
    precision: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False
    validate_every: int = knob(500, "steps between looks at held-out rows", low=1)
    validate_rows: int = knob(1024, "how many of them are looked at", low=1)
    save_every: int = knob(1000, "steps between checkpoints", low=1)


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
    seed: int = knob(1, "", low=0, high=2**63)
    sizes: Sizes | None = None
    distil: Distil | None = None


TABLES = {"data": Data, "run": Run, "sizes": Sizes, "distil": Distil}


def read(file: Path) -> Recipe:
    """The recipe in a TOML file; anything it does not know or that does not fit is refused in one sentence."""
    try:
        return from_dict(tomllib.loads(file.read_text()), str(file))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise LimpetError(f"{file} is not a TOML file that can be read: {error}") from error


def from_dict(given: dict[str, Any], where: str = "the recipe") -> Recipe:
    """The recipe of a parsed TOML document."""
    recipe: Recipe = _table(Recipe, given, where)
    _check(recipe, where)
    return recipe


def _table(kind: type, given: dict[str, Any], where: str) -> Any:
    """One table of the file as its dataclass, or a sentence on the first thing that does not fit."""
    hints, values = get_type_hints(kind), dict(given)
    for name in given:
        if name not in hints:
            raise unknown(f"{where} does not know", name, hints)
    for one in fields(kind):
        name, hint = one.name, hints[one.name]
        if name not in given:
            if one.default is MISSING and one.default_factory is MISSING:
                raise LimpetError(f"{where} lacks {name!r}")
        elif name in TABLES:
            if not isinstance(given[name], dict):
                raise LimpetError(f"{where} has {name} = {given[name]!r}: it takes a table, [{name}]")
            values[name] = _table(TABLES[name], given[name], f"[{name}] of {where}")
        else:
            choices, listed = (get_args(hint) if get_origin(hint) is of else () for of in (Literal, list))
            item = Knob(name, str if choices else listed[0] if listed else hint, choices, False, None, **one.metadata)
            items = given[name] if listed else [given[name]]
            if not isinstance(items, list) or not all(map(item.accepts, items)):
                takes = f"a list, each {item.takes}" if listed else item.takes
                raise LimpetError(f"{where} has {name} = {given[name]!r}: it takes {takes}")
    return kind(**values)


def _check(recipe: Recipe, where: str) -> None:
    """What one field cannot say of itself."""
    run, sizes, distil = recipe.run, recipe.sizes, recipe.distil
    if (run.steps > 0) == (run.seconds > 0):
        raise LimpetError(f"[run] of {where} has steps = {run.steps} and seconds = {run.seconds}: give exactly one")
    if len(run.betas) != 2:
        raise LimpetError(f"[run] of {where} has betas = {run.betas}: it takes two numbers")
    wants = "distil" if recipe.kind == "distil" else "sizes"
    if [table for table in ("distil", "sizes") if getattr(recipe, table) is not None] != [wants]:
        raise LimpetError(f"{where} is of kind {recipe.kind!r}: of [sizes] and [distil] it takes [{wants}] alone")
    if distil is not None and not all(0 < delta < 1 for delta in distil.deltas or [0]):
        raise LimpetError(f"[distil] of {where} has deltas = {distil.deltas}: it takes one or more in (0, 1)")
    if sizes is not None and sizes.width % (2 * sizes.heads):
        raise LimpetError(f"[sizes] of {where} has width {sizes.width} and {sizes.heads} heads: heads of even width")
