"""`limpet reproduce`: everything that the paper measures in one command, from what it needs to the table of claims."""

from __future__ import annotations

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

from limpet import __version__, experiments, sample
from limpet.cli.common import ANYWHERE, Json, On, Running, err, show
from limpet.cli.study import make, placed
from limpet.errors import LimpetError
from limpet.evaluation.judges import BUILTIN, Judge
from limpet.experiments import Probe, Results, Shelf, Store, Study, report, units
from limpet.experiments.report import Section
from limpet.experiments.units import Plan, Walk
from limpet.files import write_whole
from limpet.generation import at_once
from limpet.models import Denoiser
from limpet.models.model_files import MINIS
from limpet.paper import studies
from limpet.samplers import CRS

FILE = "reproduction.json"  # every number and every verdict: what to send
STAND_INS = {  # of a rehearsal, by the hub's name
    "s-sahoo/duo": "mini", "s-sahoo/duo-distilled": "mini-distilled", "gpt2-large": BUILTIN,
    "EleutherAI/pythia-1.4b": BUILTIN,
}  # fmt: skip


def run(
    preset: str = "paper",
    rehearse: bool = False,
    prompts: str | None = None,
    store: str = "limpet-store",
    out_folder: Annotated[Path, tyro.conf.arg(name="out")] = Path("limpet-reproduction"),
    from_folder: Annotated[Path | None, tyro.conf.arg(name="from")] = None,
    on: On = "local",
    workers: int | None = None,
    where: Running = ANYWHERE,
    json: Json = False,
) -> int:
    """Run all that the paper measures, in order: check what is needed, say how much it is and how long it takes, make
    what the store does not hold yet, and end with every claim, the paper's number beside ours.

    Stopped at any moment, the same command goes on. The reports, the page of claims and one file with every number,
    reproduction.json, are written to a folder.

    $ limpet reproduce --rehearse
    $ limpet reproduce --prompts openwebtext-prompts.txt
    $ limpet reproduce --preset mini-gpu --precision bfloat16
    $ limpet reproduce --preset mini-gpu --from docs/reports/mini

    Args:
        preset: paper has the released checkpoints and judges; mini-gpu and mini the built-in ones
        rehearse: the same order at tiny size on two cores, without a network: folders stand for the hub's names
        prompts: a text file of prompts for the fixed-prefix studies; the paper preset needs one
        store: where results live: a folder, or any path that fsspec knows
        out_folder: where reports, the claims and the file to send are written
        from_folder: reports that were written before, to make the page of claims from their numbers alone
        on: in this process, in processes (one a GPU, or as many as --workers), or on a Ray cluster
        workers: how many; as many as there are devices unless told
    """
    report.write_files({}, out_folder)  # what is wrong with it is said before any work
    size = studies.preset("rehearsal" if rehearse else preset, prompts=prompts)
    made = studies.whole(size, stand=stand_ins(out_folder / "hub") if rehearse else {})
    if rehearse:
        made = [studies.shortened(one, size.lengths["base"]) for one in made]
    failed: dict[str, str] = {}
    if from_folder is not None:
        found = [report.read(one, from_folder / units.name(one)) for one in made]
    else:
        shelf, kept = Shelf(where.device if on == "local" else "cpu", where.resolved), Store(store)
        place, threads = placed(on, workers, None, where.device, None, shelf)
        err.print(str(bill(needed(made, shelf), kept, shelf if on == "local" else None)), markup=False)
        found = []
        for one in made:
            summary = make(one, kept, place, shelf, threads=threads)
            failed |= summary.failed
            if not summary.failed:
                found.append(experiments.collect(one, kept))
    return told(found, failed, size.name, out_folder, json)


# What is needed


def stand_ins(folder: Path) -> dict[str, str]:
    """The built-in models as folders with the hub's names: what loads there loads here."""
    for name, builtin in STAND_INS.items():
        if not (folder / name / "config.json").is_file():
            shutil.copytree(MINIS / builtin, folder / name, dirs_exist_ok=True)
    return {name: str(folder / name) for name in STAND_INS}


def needed(made: Sequence[Study], shelf: Shelf) -> list[Plan]:
    """Every study with its models, judges and prompts at hand; all that is not is said at once."""
    plans, reasons = [], {}
    for one in made:
        try:
            plans.append(units.resolve(one, shelf))
        except LimpetError as error:
            reasons[str(error)] = one.name
    for reason, name in reasons.items():
        err.print(f"{name}: {reason}", style="yellow", markup=False, soft_wrap=True)
    if reasons:
        raise LimpetError(f"of what is needed, {len(reasons)} cannot be had, as said above: nothing was begun")
    return plans


# What it costs


class Bill(NamedTuple):
    """What is still to be made: units, tokens through the models and through each judge, and seconds on this device."""

    units: int
    found: int
    tokens: int
    judged: int
    seconds: float | None

    def __str__(self) -> str:
        if not self.units:
            return f"all {self.found} units are there"
        length = "" if self.seconds is None else f", about {timedelta(seconds=round(self.seconds))} in one process here"
        return (
            f"{self.units} units to make, {self.found} found: {self.tokens:,} tokens through the models and "
            f"{self.judged:,} through each judge{length}"
        )


def bill(plans: Sequence[Plan], kept: Store, shelf: Shelf | None) -> Bill:
    """Of all units that the store does not hold, each counted once; with a shelf, timed by what a few calls take."""
    every = {unit.key: unit for plan in plans for unit in plan.units}
    left = [unit for key, unit in every.items() if kept.look(key)[0] is None]
    models: Counter[str] = Counter()
    judged = 0
    for unit in left:
        models[unit.cell.models[0] if isinstance(unit.cell, Probe) else unit.cell.model] += unit.cost
        judged += unit.cell.n * unit.length if isinstance(unit, Walk) else 0
    seconds = None
    if shelf is not None:
        judges = dict.fromkeys(judge["name"] for plan in plans for judge in plan.document["judges"]) if judged else ()
        seconds = sum(tokens * _pace(shelf.model(name)) for name, tokens in models.items())
        seconds += judged * sum(_judge_pace(shelf.judge(name)) for name in judges)
    return Bill(len(left), len(every) - len(left), models.total(), judged, seconds)


CALLS = 4  # of a sample that is timed
PART = 8  # of a full batch


def _pace(model: Denoiser) -> float:
    """Seconds for a token and call, of CRS on a part of a batch."""
    n = max(1, at_once(model.device, model.length) // PART)
    return _timed(lambda: sample(model, CRS(nfe=CALLS), n=n), model.device) / (CALLS * n * model.length)


def _judge_pace(judge: Judge) -> float:
    """Seconds for a token that is scored."""
    length = min(judge.context, 256)
    rows = torch.zeros(max(1, at_once(judge.device, length) // PART), length, dtype=torch.long)
    return _timed(lambda: judge.nll(list(rows)), judge.device) / rows.numel()


def _timed(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds that it takes, once it has been done."""
    for _ in range(2):
        begun = time.monotonic()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return time.monotonic() - begun


# What comes of it


def told(found: Sequence[Results], failed: Mapping[str, str], preset: str, folder: Path, json: bool) -> int:
    """Every report, the page of claims, the file to send, and the claims on standard output."""
    for results in found:
        report.write(results, folder / units.name(results.study))
    sections = [report.section(results) for results in found]
    page = report.write_index(sections, folder)
    document = {
        "limpet": __version__,
        "preset": preset,
        "tally": report.tally(sections),
        "failed": dict(failed),
        "studies": [report.to_dict(results, results.study.show(report.kept(results))) for results in found],
    }
    write_whole(folder / FILE, json_module.dumps(document, ensure_ascii=False, allow_nan=False).encode())
    show(json, document, (_table(sections), document["tally"]))
    for unit, reason in failed.items():
        err.print(f"{unit} failed: {reason}", style="red", markup=False)
    err.print(f"{page} has the claims, and {folder / FILE} every number: that is the file to send", markup=False)
    return int(bool(failed))


def _table(sections: Sequence[Section]) -> Table:
    """Every claim in the order of the paper."""
    made = Table(show_lines=True)
    for head in report.HEAD:
        made.add_column(head, ratio=3 if head == "Claim" else 2 if head in ("Paper", "Here") else 1)
    for claim, *_ in report.in_order(sections):
        row = claim.where, claim.text, claim.there, claim.paper_verdict, claim.here, f"{claim.verdict}, {claim.count}"
        made.add_row(*map(escape, row))
    return made
