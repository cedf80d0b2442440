"""`limpet paper reproduce`: everything that the paper measures in one command, ending with the table of claims."""

import json as json_module
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import tyro
from rich.markup import escape
from rich.table import Table

from limpet import __version__, sample
from limpet.cli.common import DEFAULT_RUNNING, Json, LoadOptions, Running, err, show
from limpet.cli.study import DEFAULT_EXECUTING, Executing, compute
from limpet.errors import LimpetError
from limpet.evaluation.judges import BUILTIN, Judge
from limpet.experiments import ModelCache, Plan, Probe, Results, SamplingUnit, Store, Study, collect, report, resolve
from limpet.files import write_file
from limpet.generation import default_batch_size
from limpet.models import Denoiser
from limpet.models.model_files import BUILTIN_FOLDER, builtin_folder
from limpet.paper import studies
from limpet.samplers import CRS

FILE = "reproduction.json"  # every number and every verdict, to be sent
REHEARSAL_MODELS = {  # built-in models in place of those of the hub
    "s-sahoo/duo": "mini",
    "s-sahoo/duo-distilled": "mini-distilled",
    "gpt2-large": BUILTIN,
    "EleutherAI/pythia-1.4b": BUILTIN,
}


def run(
    preset: str = "paper",
    rehearse: bool = False,
    prompts: str | None = None,
    store: str = "limpet-store",
    out_folder: Annotated[Path, tyro.conf.arg(name="out")] = Path("limpet-reproduction"),
    from_folder: Annotated[Path | None, tyro.conf.arg(name="from")] = None,
    executing: Executing = DEFAULT_EXECUTING,
    running: Running = DEFAULT_RUNNING,
    json: Json = False,
) -> int:
    """Run everything that the paper measures: check what is needed, estimate the time, compute what the store does not
    hold, and print every claim with the paper's number beside ours.

    The same command resumes an interrupted run. The output folder gets the reports, the page of claims, and
    reproduction.json with every number.

    $ limpet paper reproduce --rehearse
    $ limpet paper reproduce --prompts openwebtext-prompts.txt
    $ limpet paper reproduce --preset mini-gpu --precision bfloat16
    $ limpet paper reproduce --preset mini-gpu --from docs/reports/mini

    Args:
        preset: paper has the released checkpoints and judges; mini-gpu and mini have the built-in ones
        rehearse: the same steps at tiny size on two cores without a network; built-in models replace those of the hub
        prompts: a text file of prompts for the continuations; the paper preset needs one
        store: where results live: a folder, or any path that fsspec knows
        out_folder: where reports, claims and reproduction.json are written
        from_folder: make the page of claims from reports that were written before
    """
    report.write_files({}, out_folder)  # errors of the folder are reported before any work
    size = studies.preset("rehearsal" if rehearse else preset, prompts=prompts)
    every = studies.all_studies(size, hub_replacements(out_folder / "hub") if rehearse else {})
    if rehearse:
        every = [studies.with_length(one, size.lengths["base"]) for one in every]
    failed: dict[str, str] = {}
    if from_folder is not None:
        found = [report.read_report(one, from_folder / one.full_name) for one in every]
    else:
        models, kept, found = executing.models(LoadOptions(running.device, running.precision)), Store(store), []
        executor, threads = executing.executor(running.device, models)
        plans = resolve_all(every, models)
        err.print(str(estimate_cost(plans, kept, models if executing.on == "local" else None)), markup=False)
        for one in every:
            summary = compute(one, kept, executor, models, threads=threads)
            failed |= summary.failed
            if not summary.failed:
                found.append(collect(one, kept))
    return publish(found, failed, size.name, out_folder, json)


# What is needed


def hub_replacements(folder: Path) -> dict[str, str]:
    """The built-in models in folders with the names of the hub: what loads there loads here."""
    for name, builtin in REHEARSAL_MODELS.items():
        if not (folder / name / "config.json").is_file():
            shutil.copytree(builtin_folder(builtin), folder / name, dirs_exist_ok=True)
            shutil.copy(BUILTIN_FOLDER / "tokenizer.json", folder / name)  # the built-in models share it
    return {name: str(folder / name) for name in REHEARSAL_MODELS}


def resolve_all(every: Sequence[Study], models: ModelCache) -> list[Plan]:
    """Load the models, judges and prompts of every study; everything that is missing is reported at once."""
    plans, reasons = [], {}
    for one in every:
        try:
            plans.append(resolve(one, models))
        except LimpetError as error:
            reasons[str(error)] = one.name
    for reason, name in reasons.items():
        err.print(f"{name}: {reason}", style="yellow", markup=False, soft_wrap=True)
    if reasons:
        raise LimpetError(f"{len(reasons)} of the things needed are missing, as listed above: nothing was computed")
    return plans


# What it costs


class CostEstimate(NamedTuple):
    """What is still to be computed: units, tokens through the models and through each judge, seconds on this device."""

    units: int
    found: int
    tokens: int
    judged: int
    seconds: float | None

    def __str__(self) -> str:
        if not self.units:
            return f"all {self.found} units are in the store"
        length = "" if self.seconds is None else f", about {timedelta(seconds=round(self.seconds))} in one process here"
        return (
            f"{self.units} units to compute, {self.found} found: {self.tokens:,} tokens through the models and "
            f"{self.judged:,} through each judge{length}"
        )


def estimate_cost(plans: Sequence[Plan], kept: Store, models: ModelCache | None) -> CostEstimate:
    """The cost of all units that the store does not hold. models: time a few calls of each on this device."""
    every = {unit.key: unit for plan in plans for unit in plan.units}
    left = [unit for key, unit in every.items() if kept.inspect(key)[0] is None]
    tokens: Counter[str] = Counter()
    judged = 0
    for unit in left:
        tokens[unit.cell.models[0] if isinstance(unit.cell, Probe) else unit.cell.model] += unit.cost
        judged += unit.cell.n * unit.length if isinstance(unit, SamplingUnit) else 0
    seconds = None
    if models is not None:
        judges = dict.fromkeys(judge["name"] for plan in plans for judge in plan.document["judges"]) if judged else ()
        seconds = sum(count * _seconds_per_token(models.model(name)) for name, count in tokens.items())
        seconds += judged * sum(_seconds_per_judged_token(models.judge(name)) for name in judges)
    return CostEstimate(len(left), len(every) - len(left), tokens.total(), judged, seconds)


TIMED_CALLS = 4
BATCH_SHARE = 8  # the timed batch is this part of a full one


def _seconds_per_token(model: Denoiser) -> float:
    """Seconds for a token and call of CRS."""
    n = max(1, default_batch_size(model.device, model.length) // BATCH_SHARE)
    sampler = CRS(nfe=TIMED_CALLS)
    return _time_second_run(lambda: sample(model, sampler, n=n), model.device) / (TIMED_CALLS * n * model.length)


def _seconds_per_judged_token(judge: Judge) -> float:
    length = min(judge.context, 256)
    n = max(1, default_batch_size(judge.device, length) // BATCH_SHARE)
    rows = torch.zeros(n, length, dtype=torch.long)
    return _time_second_run(lambda: judge.nll(list(rows)), judge.device) / rows.numel()


def _time_second_run(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a second run, after the first has compiled and cached what it needs."""
    for _ in range(2):
        begin = time.monotonic()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return time.monotonic() - begin


# What it finds


def publish(found: Sequence[Results], failed: Mapping[str, str], preset: str, folder: Path, json: bool) -> int:
    """Write every report, the page of claims and reproduction.json, and print the claims."""
    for results in found:
        report.write_report(results, folder / results.study.full_name)
    entries = [report.index_entry(results) for results in found]
    page = report.write_index(entries, folder)
    document = {
        "limpet": __version__,
        "preset": preset,
        "tally": report.count_verdicts(entries),
        "failed": dict(failed),
        "studies": [report.to_dict(results, results.study.build_report(report.rounded(results))) for results in found],
    }
    write_file(folder / FILE, json_module.dumps(document, ensure_ascii=False, allow_nan=False).encode())
    show(json, document, (_claims_table(entries), document["tally"]))
    for unit, reason in failed.items():
        err.print(f"{unit} failed: {reason}", style="red", markup=False)
    err.print(f"claims: {page}", f"every number, to be sent: {folder / FILE}", sep="\n", markup=False)
    return int(bool(failed))


def _claims_table(entries: Sequence[report.IndexEntry]) -> Table:
    """Every claim in the order of the paper."""
    table = Table(show_lines=True)
    for head in report.CLAIM_COLUMNS:
        table.add_column(head, ratio=3 if head == "Claim" else 2 if head in ("Paper", "Here") else 1)
    for claim, *_ in report.in_paper_order(entries):
        verdict = f"{claim.verdict}, {claim.count}"
        row = claim.where, claim.text, claim.published, claim.paper_verdict, claim.measured, verdict
        table.add_row(*map(escape, row))
    return table
