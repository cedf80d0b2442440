"""`limpet audit NAME`: what the paper measures inside a trajectory, beside what it found."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal, get_args

import tyro
from rich.markup import escape
from rich.table import Table

from limpet.cli.common import Device, Json, Revision, Weights, Where, err, out, show
from limpet.cli.study import documents, each, make, written
from limpet.errors import LimpetError
from limpet.evaluation.judges import BUILTIN
from limpet.experiments import Judging, Results, Shelf, Store, Study, collect, report
from limpet.experiments.contents import PAPER
from limpet.experiments.executors import local
from limpet.models.duo import Precision
from limpet.paper import studies

Name = Literal[
    "singleton", "final_step", "selection", "temperature", "values", "hidden", "storage", "risk", "mending", "all"
]
Size = Literal["smoke", "mini", "paper"]
READING = "Mean ± standard error over shards."


def run(
    name: tyro.conf.Positional[Name],
    /,
    *,
    preset: Size = "mini",
    model: tuple[str, ...] = (),
    paths: int | None = None,
    nfe: int | None = None,
    judge: str | None = None,
    text: Path | None = None,
    device: Device = None,
    precision: Precision | None = None,
    weights: Weights = "ema",
    revision: Revision = None,
    store: str = "limpet-store",
    json: Json = False,
    out_folder: Annotated[Path | None, tyro.conf.arg(name="out")] = None,
) -> int:
    """Look inside trajectories: singleton, final_step, selection, temperature, values, hidden, storage, risk, mending,
    or all.

    $ limpet audit temperature --preset smoke
    $ limpet audit hidden --model mini-distilled
    $ limpet audit all --out limpet-reports
    $ limpet audit values --preset paper --model runs/duo --judge gpt2-large --json

    Args:
        name: which audit, or all; docs/audits.md says what each shows and what it does not
        preset: smoke takes seconds; mini suits the built-in models; paper has the paper's counts
        model: one or more, in place of the preset's; final_step takes the base model and the distilled one, storage and
            values look at the latter
        paths: paths, or clean texts, in each of the preset's shards; the preset's own number unless told
        nfe: network calls of a path; the preset's own number unless told
        judge: what scores texts, where an audit does: the preset's own, or mini-judge for models that are named; an
            exact source scores its own
        text: clean text for the audits of forward states (selection, risk, mending); held-out pages unless given;
            documents apart by a blank line, or JSON lines
        precision: what the networks run in; the preset's own unless told
        store: where finished shards live, as for `limpet study`: nothing is made twice
        out_folder: where a report is written, in a folder of its own for each audit
    """
    if paths is not None and paths < 1:
        raise LimpetError(f"paths is {paths}; ask for at least one in each shard")
    if nfe is not None and nfe < 4:
        raise LimpetError(f"nfe is {nfe}; an audit needs at least 4 calls, to have steps on both sides of the warmup")
    if out_folder is not None:
        report.write_files({}, out_folder)  # what is wrong with it is said before any work
    kept, names = Store(store), get_args(Name)[:-1] if name == "all" else (name,)

    def audit(one: str) -> Results:
        study, own = _study(one, preset, model, paths, nfe, judge, text)
        shelf = Shelf(device, precision or own, Where(weights=weights, revision=revision).which)
        for reason in make(study, kept, local(shelf=shelf), shelf).failed.values():
            raise LimpetError(reason)
        results = collect(study, kept)
        if not json:
            _show(results)
        return results

    found = each({one: one for one in names}, audit)
    for page in written(found, out_folder, name == "all") if out_folder else ():
        err.print(str(page), markup=False)
    made = documents(found)
    show(json, made if name == "all" else made[0], ())
    return int(len(found) < len(names))


def _study(
    name: str, preset: Size, model: tuple[str, ...], paths: int | None, nfe: int | None, judge: str | None,
    text: Path | None,
) -> tuple[Study, Precision]:  # fmt: skip
    """An audit at a preset's size with what the caller asked for in its place, and the preset's own precision."""
    if name in studies.STUDIES:  # of the paper's tables: its presets have roles and judges
        size = studies.preset(preset, paths)
        if len(model) > 2:
            raise LimpetError(f"{name} takes a base model and a distilled one, and was given {len(model)}: name two")
        if model:
            exact = all(one.startswith("exact:") for one in model)
            size = replace(
                size, base=model[0], distilled=model[-1], judges=() if exact else (Judging(BUILTIN),),
                captions={"base": model[0], "distilled": model[-1]},
            )  # fmt: skip
        if judge is not None and size.judges:
            size = replace(size, judges=(Judging(judge),))
        return studies.study(name, replace(size, nfe=nfe or size.nfe, audit_nfe=nfe or size.audit_nfe)), "float32"
    own = import_module(f"limpet.paper.studies.{name}").PRESETS[preset]
    asked = {"paths": paths, "nfe": nfe, "text": text and str(text)}
    known = {field: value for field, value in asked.items() if value is not None and hasattr(own.settings, field)}
    told = replace(own, settings=replace(own.settings, **known), models=model or own.models)
    return studies.study(name, told), own.precision


def _show(results: Results) -> None:
    """The report's tables in a terminal."""
    study = results.study
    for shown in report.shown(results).tables:
        view = Table(title=f"{study.title} ({study.preset})", caption=f"{shown.caption} {READING}")
        for i, head in enumerate(shown.head):
            view.add_column(
                head, justify="left" if i < shown.names or head == PAPER else "right", no_wrap=i >= shown.names
            )
        for group in shown.groups:
            for entries in group:
                view.add_row(*(escape(f"{one.text} [{one.paper}]" if one.paper else one.text) for one in entries))
            view.add_section()
        out.print(view, soft_wrap=not out.is_terminal)
    for what, convention in study.conventions.items():
        err.print(f"{what}: {convention}", style="dim", markup=False)
