"""`limpet paper audit`: what the paper measures inside a trajectory, beside the paper's values."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, get_args

import tyro
from rich.markup import escape
from rich.table import Table

from limpet.cli.common import Device, Json, LoadOptions, Revision, Weights, err, out, show
from limpet.cli.study import compute, for_each, report_documents, write_reports
from limpet.errors import LimpetError
from limpet.evaluation.judges import BUILTIN
from limpet.experiments import PAPER, JudgeSpec, ModelCache, Results, Store, Study, collect, local, report
from limpet.models.networks import Precision
from limpet.paper import studies

Name = Literal[
    "singleton", "final-step", "selection", "temperature", "values", "hidden", "storage", "risk", "revision", "all"
]
Size = Literal["smoke", "mini", "paper"]
MEANS = "Mean ± standard error over seeds."


def run(
    name: tyro.conf.Positional[Name],
    /,
    *,
    preset: Size = "mini",
    model: tuple[str, ...] = (),
    n: int | None = None,
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
    """Look inside trajectories: singleton, final-step, selection, temperature, values, hidden, storage, risk, revision,
    or all.

    $ limpet paper audit temperature --preset smoke
    $ limpet paper audit hidden --model mini-distilled
    $ limpet paper audit all --out limpet-reports
    $ limpet paper audit values --preset paper --model runs/duo --json

    Args:
        name: an audit, or all; docs/audits.md explains what each shows
        preset: smoke takes seconds; mini suits the built-in models; paper has the paper's sizes
        model: one or more models (default: the preset's); final-step takes the base model and the distilled one,
            storage and values use the latter
        n: trajectories, or clean texts, per seed (default: the preset's)
        nfe: network calls of a trajectory (default: the preset's)
        judge: a judge for audits that score texts (default: the preset's; mini-judge for models that you name; exact
            sources score their own samples)
        text: clean text for selection, risk and revision, documents separated by blank lines, or JSON lines (default:
            held-out pages)
        precision: of the networks (default: the preset's)
        store: folder of finished results, as for `limpet paper study`; nothing is computed twice
        out_folder: write a report of each audit into a folder of its own here
    """
    if n is not None and n < 1:
        raise LimpetError(f"n is {n}; ask for at least one trajectory per seed")
    if nfe is not None and nfe < 4:
        raise LimpetError(f"nfe is {nfe}; an audit needs at least 4 calls, so that there are steps after the warmup")
    if out_folder is not None:
        report.write_files({}, out_folder)  # errors of the folder are reported before any work
    kept, names = Store(store), get_args(Name)[:-1] if name == "all" else (name,)
    options = LoadOptions(weights=weights, revision=revision).weight_options

    def audit(one: str) -> Results:
        study, preset_precision = _study(one, preset, model, n, nfe, judge, text)
        models = ModelCache(device, precision or preset_precision, options)
        for reason in compute(study, kept, local(models=models), models).failed.values():
            raise LimpetError(reason)
        results = collect(study, kept)
        if not json:
            _print_tables(results)
        return results

    found = for_each({one: one for one in names}, audit)
    for page in write_reports(found, out_folder, name == "all") if out_folder else ():
        err.print(str(page), markup=False)
    documents = report_documents(found)
    show(json, documents if name == "all" else documents[0], ())
    return int(len(found) < len(names))


def _study(
    name: str,
    size: Size,
    models: tuple[str, ...],
    n: int | None,
    nfe: int | None,
    judge: str | None,
    text: Path | None,
) -> tuple[Study, Precision]:
    """An audit at a preset's size with the caller's changes, and the preset's precision."""
    if name in studies.STUDIES:  # its presets have roles and judges
        preset = studies.preset(size, n)
        if len(models) > 2:
            raise LimpetError(f"{name} takes a base model and a distilled one, and was given {len(models)}: name two")
        if models:
            judges = () if all(one.startswith("exact:") for one in models) else (JudgeSpec(BUILTIN),)
            captions = {"base": models[0], "distilled": models[-1]}
            preset = replace(preset, base=models[0], distilled=models[-1], judges=judges, captions=captions)
        if judge is not None and preset.judges:
            preset = replace(preset, judges=(JudgeSpec(judge),))
        if nfe is not None:
            preset = replace(preset, nfe=nfe, final_step_nfe=nfe)
        return studies.study(name, preset), "float32"
    own = studies.audit_presets(name)[size]
    options = {"n": n, "nfe": nfe, "text": text and str(text)}
    changes = {field: value for field, value in options.items() if value is not None and hasattr(own.settings, field)}
    changed = replace(own, settings=replace(own.settings, **changes), models=models or own.models)
    return studies.study(name, changed), own.precision


def _print_tables(results: Results) -> None:
    """Print the tables of the report."""
    study = results.study
    for shown in report.content_of(results).tables:
        table = Table(title=f"{study.title} ({study.preset})", caption=f"{shown.caption} {MEANS}")
        for i, head in enumerate(shown.head):
            is_text = i < shown.names or head == PAPER
            table.add_column(head, justify="left" if is_text else "right", no_wrap=i >= shown.names)
        for group in shown.groups:
            for entries in group:
                table.add_row(*(escape(f"{one.text} [{one.paper}]" if one.paper else one.text) for one in entries))
            table.add_section()
        out.print(table, soft_wrap=not out.is_terminal)
    for quantity, convention in study.conventions.items():
        err.print(f"{quantity}: {convention}", style="dim", markup=False)
