"""A study from a TOML file: every mistake is found before any work, and named with its line.

model = "mini"                       # or models = [...]
shards = [8200, 8210]
samples = 16
judges = ["mini-judge"]              # or {name = ..., convention = "text"}; none for an exact source

[policy]                             # what the arms have in common
nfe = 16

[arms.native]
horizon = 0

[arms.CRS]                           # horizon = inf is for ever

[[contrasts]]
of = "CRS"
against = "native"
measure = "nll"
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from limpet.compare import SHARDS
from limpet.errors import LimpetError
from limpet.lab.bench import Bench
from limpet.lab.page import Contrast, Entry, Page, Table, entry
from limpet.lab.results import Results
from limpet.lab.study import DIVERSITY, Cell, Judging, Prompts, Study
from limpet.policy import Policy

FIELDS = (
    "name", "title", "model", "models", "shards", "samples", "length", "judges", "metrics", "policy", "prompts", "arms",
    "contrasts",
)  # fmt: skip
HEADER = re.compile(r"^\s*(\[\[?)([^\[\]]+)\]\]?\s*(?:#.*)?$")
ASSIGNMENT = re.compile(r"""^\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")


class Located(LimpetError):
    """An error that already says its line."""


@dataclass(frozen=True)
class Source:
    """A file and the line of each of its fields."""

    path: Path
    lines: dict[tuple[Any, ...], int]

    @contextmanager
    def at(self, *field: Any) -> Iterator[None]:
        """Errors inside are of this field: say where it stands."""
        try:
            yield
        except Located:
            raise
        except LimpetError as error:
            known = (self.lines.get(field[:end]) for end in range(len(field), 0, -1))
            line = next((line for line in known if line), 1)
            raise Located(f"{self.path}, line {line}: {error}") from error


def load(path: str | Path, bench: Bench | None = None) -> Study:
    """Read a study; with a bench, its models and judges are loaded too, so that a missing one is found here."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        document = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise LimpetError(f"the study {path} cannot be read ({error})") from error
    except tomllib.TOMLDecodeError as error:
        raise LimpetError(f"{path} is not TOML: {error}") from error
    source = Source(path, _lines(text))
    _known(source, (), document, FIELDS)
    models = _models(source, document)
    shards = tuple(_take(source, document, "shards", list(SHARDS), [int]))
    samples = _take(source, document, "samples", 16, int)
    length = _take(source, document, "length", None, int)
    judges = _judges(source, document)
    prompts = _prompts(source, document)
    arms = _arms(source, document)
    contrasts = _contrasts(source, document, arms)
    metrics = tuple(_take(source, document, "metrics", list(DIVERSITY), [str]))

    def named(model: str, arm: str) -> str:
        return arm if len(models) == 1 else f"{model}/{arm}"

    cells = tuple(
        Cell(named(model, arm), model, policy, samples, length, prompts, replay and named(model, replay))
        for model in models
        for arm, (policy, replay) in arms.items()
    )

    def show(results: Results) -> Page:
        differences = tuple(
            Contrast(
                f"{measure}: {named(model, of)} less {named(model, against)}",
                results.contrast(named(model, of), named(model, against), measure),
            )
            for model in models
            for of, against, measure in contrasts
        )
        return Page(tables=(_table(results),), contrasts=differences)

    name = _take(source, document, "name", path.stem, str)
    with source.at("name"):
        if not re.fullmatch(r"[\w.-]+", name):
            raise LimpetError(f"name is {name!r}; it takes letters, digits, dots and dashes")
    with source.at("arms"):
        study = Study(name, _take(source, document, "title", name, str), cells, shards, show, judges, metrics)
    if bench is not None:
        for model in models:
            with source.at("models" if "models" in document else "model"):
                bench.model(model)
        for judging in judges:
            with source.at("judges"):
                bench.judge(judging.name)
    return study


def _table(results: Results) -> Table:
    measures = [f"ppl:{judge}" for judge in results.judges] + list(results.study.metrics)
    rows = tuple(
        (Entry(cell.name), *(entry(results(cell.name, measure), 2 if measure.startswith("ppl") else 4)
                             for measure in measures), entry(results(cell.name, "selected"), 1))
        for cell in results.study.cells
    )  # fmt: skip
    head = ("Cell", *(f"GenPPL ({judge})" for judge in results.judges), *results.study.metrics, "selected")
    return Table("cells", "Every cell: mean ± standard error over shards.", head, (rows,))


# The parts of a file


def _models(source: Source, document: dict[str, Any]) -> list[str]:
    with source.at("models" if "models" in document else "model"):
        if ("model" in document) == ("models" in document):
            raise LimpetError("a study has either model, one name, or models, a list of names")
    if "model" in document:
        return [_take(source, document, "model", None, str)]
    return list(_take(source, document, "models", [], [str]))


def _judges(source: Source, document: dict[str, Any]) -> tuple[Judging, ...]:
    given = document.get("judges", [])
    with source.at("judges"):
        if not isinstance(given, list):
            raise LimpetError(f"judges is {given!r}; it takes a list of names, or of {{name, convention}}")
        found = []
        for judge in given:
            if isinstance(judge, dict):
                _known(source, ("judges",), judge, ("name", "convention"))
            fields = {"name": judge} if isinstance(judge, str) else judge
            if not isinstance(fields, dict) or not isinstance(fields.get("name"), str):
                raise LimpetError(f"a judge is {judge!r}; it takes a name, or {{name, convention}}")
            found.append(Judging(**fields))
    return tuple(found)


def _prompts(source: Source, document: dict[str, Any]) -> Prompts | None:
    given = document.get("prompts")
    if given is None:
        return None
    with source.at("prompts"):
        if not isinstance(given, dict) or "texts" not in given:
            raise LimpetError("prompts is a table with texts (a file, one prompt a line), tokens and each")
        _known(source, ("prompts",), given, ("texts", "tokens", "each"))
        texts = given["texts"]
        beside = source.path.parent / str(texts)
        return Prompts(**{**given, "texts": str(beside) if beside.is_file() else str(texts)})


def _arms(source: Source, document: dict[str, Any]) -> dict[str, tuple[Policy, str | None]]:
    """Each arm's policy, the common fields under its own, and what it replays."""
    common, given = document.get("policy", {}), document.get("arms", {})
    with source.at("arms"):
        if not isinstance(given, dict) or not given or not isinstance(common, dict):
            raise LimpetError("a study has one table for each arm, [arms.NAME], and may have [policy]")
    _policy(source, ("policy",), common)
    found = {}
    for name, fields in given.items():
        with source.at("arms", name):
            if not isinstance(fields, dict):
                raise LimpetError(f"arm {name} is {fields!r}; it takes a table of policy fields")
        own = {key: value for key, value in fields.items() if key != "replay"}
        found[name] = _policy(source, ("arms", name), own, common), fields.get("replay")
    for name, (_, replay) in found.items():
        with source.at("arms", name, "replay"):
            if replay is not None and replay not in found:
                raise LimpetError(f"arm {name} replays {replay!r}; there are {', '.join(found)}")
    return found


def _policy(source: Source, where: tuple[str, ...], own: dict[str, Any], common: Mapping[str, Any] = {}) -> Policy:
    for key, value in own.items():  # one at a time, so that the line is the field's own
        with source.at(*where, key):
            Policy.from_dict({key: _ever(key, value)})
    with source.at(*where):
        return Policy.from_dict({key: _ever(key, value) for key, value in {**common, **own}.items()})


def _ever(key: str, value: Any) -> Any:
    """TOML has no null: a horizon of inf is for ever."""
    return None if key == "horizon" and value == math.inf else value


def _contrasts(source: Source, document: dict[str, Any], arms: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    given = document.get("contrasts", [])
    found = []
    for i, fields in enumerate(given if isinstance(given, list) else [given]):
        with source.at("contrasts", i):
            if not isinstance(fields, dict) or not {"of", "against"} <= set(fields):
                raise LimpetError("a contrast has of and against, two arms, and may have measure")
            _known(source, ("contrasts", i), fields, ("of", "against", "measure"))
        for end in ("of", "against"):
            with source.at("contrasts", i, end):
                if fields[end] not in arms:
                    raise LimpetError(f"{end} is {fields[end]!r}; there are the arms {', '.join(arms)}")
        found.append((fields["of"], fields["against"], fields.get("measure", "nll")))
    return found


def _known(source: Source, where: tuple[Any, ...], table: Mapping[str, Any], fields: Sequence[str]) -> None:
    for name in table:
        with source.at(*where, name):
            if name not in fields:
                near = difflib.get_close_matches(name, fields, 1)
                hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(fields)}"
                raise LimpetError(f"a study has no field {name!r} here; {hint}")


def _take(source: Source, document: dict[str, Any], name: str, default: Any, kind: Any) -> Any:
    """A field of a kind: int, str, or a list of one of them."""
    value = document.get(name, default)
    if name not in document:
        return value
    of = kind[0] if isinstance(kind, list) else kind
    values = value if isinstance(kind, list) and isinstance(value, list) else [value]
    good = isinstance(value, list) == isinstance(kind, list)
    good = good and bool(values) and all(isinstance(one, of) and not isinstance(one, bool) for one in values)
    with source.at(name):
        if not good:
            what = {int: "a whole number", str: "a text"}[of]
            raise LimpetError(
                f"{name} is {value!r}; it takes {f'a list, each {what}' if isinstance(kind, list) else what}"
            )
    return value


def _lines(text: str) -> dict[tuple[Any, ...], int]:
    """Where each table and field begins. tomllib does not tell, so headers and keys are found line by line."""
    lines: dict[tuple[Any, ...], int] = {}
    table: tuple[Any, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        header, assignment = HEADER.match(line), ASSIGNMENT.match(line)
        if header:
            table = _path(header[2])
            if header[1] == "[[":
                table = *table, sum(1 for known in lines if known[:-1] == table and isinstance(known[-1], int))
            for end in range(1, len(table) + 1):
                lines.setdefault(table[:end], number)
        elif assignment:
            lines.setdefault((*table, *_path(assignment[1])), number)
    return lines


def _path(key: str) -> tuple[str, ...]:
    """A dotted key, read by TOML's own rules."""
    try:
        node: Any = tomllib.loads(f"{key} = 0")
    except tomllib.TOMLDecodeError:
        return (key,)
    path = []
    while isinstance(node, dict):
        (name, node) = next(iter(node.items()))
        path.append(name)
    return tuple(path)
