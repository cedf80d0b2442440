"""A study from a TOML file: every mistake is found before any work, and named with its line.

A file holds the fields of `Document`; docs/reproduce.md shows one."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from limpet import registry
from limpet.errors import LimpetError
from limpet.evaluation.comparison import SHARDS
from limpet.experiments import units
from limpet.experiments.contents import Contrast, Entry, Page, Table, number
from limpet.experiments.resources import Shelf
from limpet.experiments.results import Results
from limpet.experiments.study import DIVERSITY, Cell, Judging, Prompts, Study
from limpet.files import Toml
from limpet.samplers import Sampler, available, find, params


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
    common: dict[str, Any] = field(default_factory=dict)  # parameters of every arm that has them
    prompts: Prompts | None = None
    # By name, each as on the command line, "native top_p=0.9", or a table: `sampler`, which may be ./mine.py:Mine
    # beside the file, its parameters (`horizon = inf` is for ever), and `replay`, an arm to select as.
    arms: dict[str, Any] = field(default_factory=dict)
    contrasts: tuple[Difference, ...] = ()


def load(path: str | Path, shelf: Shelf | None = None) -> Study:
    """Read a study; with a shelf, its models and judges are loaded too, so that a missing one is found here."""
    file = Toml(path, "name a study's file")
    given = file.build(Document)
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
        found = []
        for model in models:
            for one in given.contrasts:
                of, against = named(model, one.of), named(model, one.against)
                estimate = results.contrast(of, against, measure=one.measure)
                found.append(Contrast(f"{one.measure}: {of} less {against}", estimate))
        return Page(tables=(_table(results),), contrasts=tuple(found))

    cells = tuple(
        Cell(named(model, arm), _beside(file, model), sampler, given.samples, given.length, prompts,
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
    digits = {**scores, **dict.fromkeys(results.study.metrics, 4), "committed": 1}
    rows = tuple(
        (Entry(cell.name), *(Entry(number(results(cell.name, measure), count)) for measure, count in digits.items()))
        for cell in results.study.samples
    )
    head = ("Cell", *(f"GenPPL ({judge})" for judge in results.judges), *results.study.metrics, "committed")
    return Table("cells", "Every cell: mean ± standard error over shards.", head, (rows,))


def _beside(file: Toml, name: str) -> str:
    """A Python file that a study names stands beside the study."""
    return str(file.path.parent / name) if registry.is_file(name) else name


def _arms(file: Toml, given: Document) -> dict[str, tuple[Sampler, str | None]]:
    """Each arm's sampler, and what it replays; all that names an arm names one of them."""
    with file.at("arms"):
        if not given.arms:
            raise LimpetError("a study has one table for each arm, [arms.NAME], and may have [common]")
    found = {name: _arm(file, name, arm, given.common) for name, arm in given.arms.items()}
    there = dict.fromkeys(param for sampler, _ in found.values() for param in params(type(sampler)))
    for param in given.common:
        file.hold(there, "no arm has a parameter", param, "common", param)
    for name, (_, replay) in found.items():
        if replay is not None:
            file.hold(found, f"arm {name} replays", str(replay), "arms", name, "replay")
    for i, one in enumerate(given.contrasts):
        file.hold(found, "of is", one.of, "contrasts", i, "of")
        file.hold(found, "against is", one.against, "contrasts", i, "against")
    return found


def _arm(file: Toml, name: str, arm: Any, common: Mapping[str, Any]) -> tuple[Sampler, str | None]:
    """An arm's table, or its line as on the command line, and the common parameters under its own."""
    table = arm
    if isinstance(arm, str):
        first, *settings = arm.split() or [""]
        table = {"sampler": first, **dict(setting.partition("=")[::2] for setting in settings)}
    with file.at("arms", name):
        if not isinstance(table, dict) or not isinstance(table.get("sampler"), str):
            raise LimpetError(f"arm {name} names no sampler; it takes {', '.join(available())}, or ./file.py:Name")
    with file.at("arms", name, "sampler"):
        kind = find(_beside(file, table["sampler"]))
    there, values = params(kind), {}
    shared = {key: ("common", key) for key in common if key in there}
    own = {key: ("arms", name, key) for key in table if key not in ("sampler", "replay")}
    for key, where in {**shared, **own}.items():  # one at a time, so that the line is the parameter's own
        file.hold(there, f"{table['sampler']} has no parameter", key, *where)
        with file.at(*where):
            value = table[key] if key in own else common[key]
            value = there[key].read(value) if key in own and isinstance(arm, str) else value
            # TOML has no null: an infinite whole number is none.
            values[key] = None if value == math.inf and there[key].kind is int else value
            if not there[key].accepts(values[key]):
                raise LimpetError(f"{table['sampler']} has {key} {value!r}; it takes {there[key].takes}")
    with file.at("arms", name):
        return kind(**values), table.get("replay")
