"""A study from a TOML file: every mistake is found before any work, and named with its line.

A file holds the fields of `Document`; docs/reproduce.md shows one."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from limpet import registry
from limpet.compare import SHARDS
from limpet.errors import LimpetError, unknown
from limpet.files import read_text
from limpet.lab import units
from limpet.lab.page import Contrast, Entry, Page, Table, entry
from limpet.lab.results import Results
from limpet.lab.shelf import Shelf
from limpet.lab.study import DIVERSITY, Cell, Judging, Prompts, Study
from limpet.samplers import Sampler, available, find, knobs

WORDS = {int: "a whole number", str: "a text", dict: "a table"}


@dataclass(frozen=True)
class Difference:
    """An arm less another, in a measure."""

    of: str
    against: str
    measure: str = "nll"


@dataclass(frozen=True)
class Document:
    """The fields of a file."""

    name: str = ""
    title: str = ""
    model: str = ""  # a name, or
    models: tuple[str, ...] = ()  # several, each with every arm
    shards: tuple[int, ...] = SHARDS
    samples: int = 16
    length: int | None = None
    judges: tuple[Judging, ...] = ()  # names, or {name = "gpt2-large", convention = "text"}; none for an exact source
    metrics: tuple[str, ...] = DIVERSITY
    common: dict[str, Any] = field(default_factory=dict)  # knobs of every arm that has them
    prompts: Prompts | None = None
    # By name, each as on the command line, "native top_p=0.9", or a table: `sampler`, which may be ./mine.py:Mine
    # beside the file, its knobs (`horizon = inf` is for ever), and `replay`, an arm to select as.
    arms: dict[str, Any] = field(default_factory=dict)
    contrasts: tuple[Difference, ...] = ()


def load(path: str | Path, shelf: Shelf | None = None) -> Study:
    """Read a study; with a shelf, its models and judges are loaded too, so that a missing one is found here."""
    file = File(Path(path))
    given: Document = file.build(Document, file.content)
    which, name, prompts = "models" if given.models else "model", given.name or file.path.stem, given.prompts
    with file.at(which):
        if bool(given.model) == bool(given.models):
            raise LimpetError("a study has either model, one name, or models, a list of names")
    with file.at("name"):
        if not re.fullmatch(r"[\w.-]+", name):
            raise LimpetError(f"name is {name!r}; it takes letters, digits, dots and dashes")
    models, arms = given.models or (given.model,), _arms(file, given)
    if prompts and (beside := file.path.parent / prompts.texts).is_file():
        prompts = replace(prompts, texts=str(beside))

    def named(model: str, arm: str) -> str:
        return arm if len(models) == 1 else f"{model}/{arm}"

    def show(results: Results) -> Page:
        pairs = [(named(model, one.of), named(model, one.against), one.measure)
                 for model in models for one in given.contrasts]  # fmt: skip
        differences = (Contrast(f"{pair[2]}: {pair[0]} less {pair[1]}", results.contrast(*pair)) for pair in pairs)
        return Page(tables=(_table(results),), contrasts=tuple(differences))

    cells = tuple(
        Cell(named(model, arm), file.beside(model), sampler, given.samples, given.length, prompts,
             replay and named(model, replay))
        for model in models
        for arm, (sampler, replay) in arms.items()
    )  # fmt: skip
    with file.at("arms"):
        study = Study(name, given.title or name, cells, given.shards, show, given.judges, given.metrics)
    if shelf is not None:
        for one in dict.fromkeys(cell.model for cell in cells):
            with file.at(which):
                model = shelf.model(one)
            with file.at("judges"):
                units.judges_of(study, model, shelf)
    return study


def _table(results: Results) -> Table:
    scores = dict.fromkeys((f"ppl:{judge}" for judge in results.judges), 2)
    digits = {**scores, **dict.fromkeys(results.study.metrics, 4), "selected": 1}
    rows = tuple(
        (Entry(cell.name), *(entry(results(cell.name, measure), count) for measure, count in digits.items()))
        for cell in results.study.samples
    )
    head = ("Cell", *(f"GenPPL ({judge})" for judge in results.judges), *results.study.metrics, "selected")
    return Table("cells", "Every cell: mean ± standard error over shards.", head, (rows,))


class File:
    """A study's file: what it holds, and the line of each of its fields."""

    def __init__(self, path: Path) -> None:
        text = read_text(path, "name a study's file")
        try:
            self.path, self.content, self.lines = path, tomllib.loads(text), _lines(text)
        except tomllib.TOMLDecodeError as error:
            raise LimpetError(f"{path} is not TOML: {error}") from error

    @contextmanager
    def at(self, *field: Any) -> Iterator[None]:
        """Errors inside are of this field: say where it stands."""
        try:
            yield
        except LimpetError as error:
            line = next(self.lines[field[:n]] for n in range(len(field), -1, -1) if field[:n] in self.lines)
            raise LimpetError(f"{self.path}, line {line}: {error}") from error

    def beside(self, name: str) -> str:
        """A Python file that a study names stands beside the study."""
        return str(self.path.parent / name) if registry.is_file(name) else name

    def hold(self, known: Mapping[str, Any], what: str, name: str, *where: Any) -> None:
        """Raise where a name is none of those known."""
        with self.at(*where):
            if name not in known:
                raise unknown(what, name, known)

    def build(self, kind: Any, value: Any, *where: Any) -> Any:
        """A value as its type has it: a table as a dataclass, whose first field may stand alone; a list as a tuple."""
        kind = get_args(kind)[0] if isinstance(kind, UnionType) else kind
        if is_dataclass(kind):
            return self._table(kind, value, *where)
        plain, (item, *_) = get_origin(kind) or kind, get_args(kind) or (None,)
        with self.at(*where):
            if plain is not tuple:
                if type(value) is not plain:
                    raise LimpetError(f"{where[-1]} is {value!r}; it takes {WORDS[plain]}")
                return value
            if not isinstance(value, list) or (item in WORDS and {type(one) for one in value} != {item}):
                raise LimpetError(f"{where[-1]} is {value!r}; it takes a list, each {WORDS.get(item, 'a table')}")
        return tuple(self.build(item, one, *where, i) for i, one in enumerate(value))

    def _table(self, kind: Any, value: Any, *where: Any) -> Any:
        hints = get_type_hints(kind)
        needed = [one.name for one in fields(kind) if one.default is one.default_factory is MISSING]
        table = {needed[0]: value} if isinstance(value, str) else value
        with self.at(*where):
            if not isinstance(table, dict) or not set(needed) <= set(table):
                raise LimpetError(f"{where[0]} has {value!r}; it takes {' and '.join(needed)}, of {', '.join(hints)}")
        for name in table:
            self.hold(hints, "a study has no field", name, *where, name)
        return kind(**{name: self.build(hints[name], one, *where, name) for name, one in table.items()})


def _arms(file: File, given: Document) -> dict[str, tuple[Sampler, str | None]]:
    """Each arm's sampler, and what it replays; all that names an arm names one of them."""
    with file.at("arms"):
        if not given.arms:
            raise LimpetError("a study has one table for each arm, [arms.NAME], and may have [common]")
    found = {name: _arm(file, name, arm, given.common) for name, arm in given.arms.items()}
    there = dict.fromkeys(knob for sampler, _ in found.values() for knob in knobs(type(sampler)))
    for knob in given.common:
        file.hold(there, "no arm has a knob", knob, "common", knob)
    for name, (_, replay) in found.items():
        if replay is not None:
            file.hold(found, f"arm {name} replays", str(replay), "arms", name, "replay")
    for i, one in enumerate(given.contrasts):
        file.hold(found, "of is", one.of, "contrasts", i, "of")
        file.hold(found, "against is", one.against, "contrasts", i, "against")
    return found


def _arm(file: File, name: str, arm: Any, common: Mapping[str, Any]) -> tuple[Sampler, str | None]:
    """An arm's table, or its line as on the command line, and the common knobs under its own."""
    table = arm
    if isinstance(arm, str):
        first, *settings = arm.split() or [""]
        table = {"sampler": first, **dict(setting.partition("=")[::2] for setting in settings)}
    with file.at("arms", name):
        if not isinstance(table, dict) or not isinstance(table.get("sampler"), str):
            raise LimpetError(f"arm {name} names no sampler; it takes {', '.join(available())}, or ./file.py:Name")
    with file.at("arms", name, "sampler"):
        kind = find(file.beside(table["sampler"]))
    there, values = knobs(kind), {}
    shared = {key: ("common", key) for key in common if key in there}
    own = {key: ("arms", name, key) for key in table if key not in ("sampler", "replay")}
    for key, where in {**shared, **own}.items():  # one at a time, so that the line is the knob's own
        file.hold(there, f"{table['sampler']} has no knob", key, *where)
        with file.at(*where):
            value = table[key] if key in own else common[key]
            value = there[key].read(value) if key in own and isinstance(arm, str) else value
            # TOML has no null: an infinite whole number is none.
            values[key] = None if value == math.inf and there[key].kind is int else value
            if not there[key].accepts(values[key]):
                raise LimpetError(f"{table['sampler']} has {key} {value!r}; it takes {there[key].takes}")
    with file.at("arms", name):
        return kind(**values), table.get("replay")


def _lines(text: str) -> dict[tuple[Any, ...], int]:
    """Where each table and field begins. tomllib does not tell, so ever more lines are read: what is new whenever they
    make a whole began after those that made one before."""
    found: dict[tuple[Any, ...], int] = {(): 1}
    lines, start = text.split("\n"), 1
    for end in range(1, len(lines) + 1):
        try:
            document = tomllib.loads("\n".join([*lines[:end], ""]))
        except tomllib.TOMLDecodeError:
            continue
        for path in _paths(document):
            found.setdefault(path, start)
        start = end + 1
    return found


def _paths(node: Any, *path: Any) -> Iterator[tuple[Any, ...]]:
    """The way to every table, list and value."""
    yield path
    within = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, child in within:
        yield from _paths(child, *path, name)
