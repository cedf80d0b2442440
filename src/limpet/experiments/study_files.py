"""Studies from TOML files. Every mistake is found before any work and is reported with its place in the file.

A file has the fields of `StudyFile`; docs/reproduce.md shows one."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from limpet import registry
from limpet.errors import LimpetError
from limpet.experiments import units
from limpet.experiments.model_cache import ModelCache
from limpet.experiments.report_content import Contrast, Entry, ReportContent, Table, format_estimate
from limpet.experiments.results import Results
from limpet.experiments.study import DIVERSITY_METRICS, Cell, JudgeSpec, Prompts, Study
from limpet.files import Toml
from limpet.generation import SEEDS
from limpet.samplers import Sampler, available, find, params

COLUMNS = 4  # of numbers in a table
UNITS = {  # of each measure, and the better direction where there is one
    "entropy": "entropy (nats)",
    "dist-4": "dist-4 (higher is better)",
    "rep-4": "rep-4 (lower is better)",
    "self-bleu": "self-bleu (lower is better)",
    "committed": "committed (tokens)",
}


@dataclass(frozen=True)
class ContrastSpec:
    """One sampler minus another, in a measure."""

    of: str
    against: str
    measure: str = "nll"


@dataclass(frozen=True)
class StudyFile:
    """The fields of a file."""

    name: str = ""
    title: str = ""
    model: str = ""  # one name, or
    models: tuple[str, ...] = ()  # several, each with every sampler
    seeds: tuple[int, ...] = SEEDS
    samples: int = 16  # per seed
    length: int | None = None
    judges: tuple[JudgeSpec, ...] = ()  # names, or {name = "gpt2-large", convention = "text"}
    metrics: tuple[str, ...] = DIVERSITY_METRICS
    checker: str | None = None  # a name, or ./file.py:Name beside the file; default: each model's own
    common: dict[str, Any] = field(default_factory=dict)  # parameters of every sampler that has them
    prompts: Prompts | None = None
    # By name, each a text as on the command line, "native top_p=0.9", or a table: `sampler`, which may be
    # ./mine.py:Mine beside the file, its parameters (`horizon = inf` is no limit), and `replay`, another of these
    # names whose selection is repeated.
    samplers: dict[str, Any] = field(default_factory=dict)
    contrasts: tuple[ContrastSpec, ...] = ()


def load(path: str | Path, models: ModelCache | None = None) -> Study:
    """Read a study from a file.

    models: where its models and judges are loaded, so that a missing one is reported; default: they are not loaded."""
    file = Toml(path, "name a study's file")
    spec = file.build(StudyFile)
    which, name, prompts = "models" if spec.models else "model", spec.name or file.path.stem, spec.prompts
    with file.at(which):
        if bool(spec.model) == bool(spec.models):
            raise LimpetError("a study has either model, one name, or models, a list of names")
    with file.at("name"):
        if not re.fullmatch(r"[\w.-]+", name):
            raise LimpetError(f"name is {name!r}; it takes letters, digits, dots and dashes")
    names, samplers = spec.models or (spec.model,), _read_samplers(file, spec)
    if prompts and (beside := file.path.parent / prompts.texts).is_file():
        prompts = replace(prompts, texts=str(beside))

    def cell_name(model: str, sampler: str) -> str:
        return sampler if len(names) == 1 else f"{model}/{sampler}"

    def build_report(results: Results) -> ReportContent:
        contrasts = []
        for model in names:
            for one in spec.contrasts:
                of, against = cell_name(model, one.of), cell_name(model, one.against)
                estimate = results.contrast(of, against, measure=one.measure)
                contrasts.append(Contrast(f"{one.measure}: {of} minus {against}", estimate))
        return ReportContent(tables=_tables(results), contrasts=tuple(contrasts))

    cells = tuple(
        Cell(
            cell_name(model, sampler_name),
            _beside(file, model),
            sampler,
            spec.samples,
            spec.length,
            prompts,
            replay and cell_name(model, replay),
        )
        for model in names
        for sampler_name, (sampler, replay) in samplers.items()
    )
    with file.at("samplers"):
        study = Study(
            name,
            spec.title or name,
            cells,
            spec.seeds,
            build_report,
            spec.judges,
            spec.metrics,
            checker=spec.checker and _beside(file, spec.checker),
        )
    for model in dict.fromkeys(cell.model for cell in cells) if models is not None else ():
        assert models is not None
        with file.at(which):
            loaded = models.model(model)
        with file.at("judges"):
            units.resolve_judges(study, loaded, models)
    return study


def _tables(results: Results) -> tuple[Table, ...]:
    """Every cell in every measure, a few columns in each table."""
    columns = [(name, name, 3) for name in results.checks]
    if results.provenance.get("judges", True):
        columns += [(f"ppl:{judge}", f"GenPPL, {judge} (lower is better)", 2) for judge in results.judges]
    columns += [(metric, UNITS.get(metric, metric), 4) for metric in results.study.metrics]
    columns.append(("committed", UNITS["committed"], 1))
    tables: list[Table] = []
    for start in range(0, len(columns), COLUMNS):
        part = columns[start : start + COLUMNS]
        rows = tuple(
            (Entry(cell.name), *(_entry(results, cell.name, name, digits) for name, _, digits in part))
            for cell in results.study.sample_cells
        )
        head = ("cell", *(title for _, title, _ in part))
        tables.append(Table(f"cells-{len(tables) + 1}", "Mean ± standard error over seeds.", head, (rows,)))
    return tuple(tables)


def _entry(results: Results, cell: str, measure: str, digits: int) -> Entry:
    """A measure of a cell; nothing where the cell has none, as its model has another checker or no judge."""
    stored = measure.replace("ppl:", "nll:").replace(f"nll:{results.judges[0]}", "nll")
    known = results.cells[cell]
    return Entry(format_estimate(results(cell, measure), digits) if stored in known else "")


def _beside(file: Toml, name: str) -> str:
    """The path of a Python file that stands beside the study's file."""
    return str(file.path.parent / name) if registry.is_file(name) else name


def _read_samplers(file: Toml, spec: StudyFile) -> dict[str, tuple[Sampler, str | None]]:
    """Each sampler and what it replays; every reference to a sampler is checked."""
    with file.at("samplers"):
        if not spec.samplers:
            raise LimpetError("a study has one table for each sampler, [samplers.NAME], and may have [common]")
    found = {name: _read_sampler(file, name, value, spec.common) for name, value in spec.samplers.items()}
    known = dict.fromkeys(param for sampler, _ in found.values() for param in params(type(sampler)))
    for param in spec.common:
        file.check_name(known, "no sampler has a parameter", param, "common", param)
    for name, (_, replay) in found.items():
        if replay is not None:
            file.check_name(found, f"sampler {name} replays", str(replay), "samplers", name, "replay")
    for i, one in enumerate(spec.contrasts):
        file.check_name(found, "of is", one.of, "contrasts", i, "of")
        file.check_name(found, "against is", one.against, "contrasts", i, "against")
    return found


def _read_sampler(file: Toml, name: str, value: Any, common: Mapping[str, Any]) -> tuple[Sampler, str | None]:
    """A sampler from its table or its text. Its own parameters replace the common ones."""
    is_text, table = isinstance(value, str), value
    if is_text:
        first, *settings = value.split() or [""]
        table = {"sampler": first, **dict(setting.partition("=")[::2] for setting in settings)}
    with file.at("samplers", name):
        if not isinstance(table, dict) or not isinstance(table.get("sampler"), str):
            raise LimpetError(f"{name} names no sampler; it takes {', '.join(available())}, or ./file.py:Name")
    with file.at("samplers", name, "sampler"):
        kind = find(_beside(file, table["sampler"]))
    known, values = params(kind), {}
    places = {key: ("common", key) for key in common if key in known}
    places |= {key: ("samplers", name, key) for key in table if key not in ("sampler", "replay")}
    for key, place in places.items():  # one at a time, so that a mistake is reported with its own place
        file.check_name(known, f"{table['sampler']} has no parameter", key, *place)
        with file.at(*place):
            setting = table[key] if place[0] == "samplers" else common[key]
            if is_text and place[0] == "samplers":
                setting = known[key].read(setting)
            # TOML has no null: an infinite whole number stands for None.
            values[key] = None if setting == math.inf and known[key].kind is int else setting
            if not known[key].accepts(values[key]):
                raise LimpetError(f"{table['sampler']} has {key} {setting!r}; it takes {known[key].takes}")
    with file.at("samplers", name):
        return kind(**values), table.get("replay")
