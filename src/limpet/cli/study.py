"""`limpet study`: list, run, resume and report studies."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
import tyro
from rich.markup import escape

from limpet import experiments
from limpet.cli.common import HERE, Json, On, Somewhere, err, progress, show
from limpet.errors import LimpetError
from limpet.experiments import Progress, Results, Shelf, Store, Study, Summary, report, study_files, units
from limpet.experiments.executors import Place, local
from limpet.experiments.executors.processes import processes
from limpet.experiments.executors.ray import on_ray
from limpet.paper import studies
from limpet.paper.studies import PRESETS, STUDIES, study

S = TypeVar("S")
T = TypeVar("T")


def run(
    action: Annotated[Literal["list", "run", "status", "report"], tyro.conf.Positional],
    name: Annotated[str, tyro.conf.Positional] = "all",
    /,
    preset: str = "mini",
    store: str = "limpet-store",
    on: On = "local",
    workers: int | None = None,
    address: str | None = None,
    shard: str = "1/1",
    where: Somewhere = HERE,
    n: int | None = None,
    prompts: str | None = None,
    threads: int | None = None,
    from_folder: Annotated[Path | None, tyro.conf.arg(name="from")] = None,
    out_folder: Annotated[Path, tyro.conf.arg(name="out")] = Path("limpet-reports"),
    json: Json = False,
) -> int:
    """Run the paper's studies, or your own: every finished unit stays in the store and is never made again.

    $ limpet study list
    $ limpet study run nfe-scaling --preset mini
    $ limpet study status nfe-scaling
    $ limpet study report nfe-scaling
    $ limpet study run my-study.toml --on processes --workers 2
    $ limpet study run all --preset paper --on ray --address auto \\
        --store s3://bucket/store
    $ limpet study run all --preset paper --shard 3/8

    Args:
        action: list what there is; run, or go on with, a study; its status; its report
        name: a study of the paper, a .toml file, or all
        preset: paper, mini, mini-gpu or smoke; a .toml file has its own sizes
        store: where results live: a folder, or any path that fsspec knows
        on: in this process, in processes (one a GPU, or as many as --workers), or on a Ray cluster
        workers: how many; as many as there are devices unless told
        address: of a running Ray cluster; one is started here unless told
        shard: i/n runs the i-th of n parts, for any scheduler
        n: samples in a shard, in place of the preset's
        prompts: a text file, one prompt a line, or JSON lines, for the fixed-prefix studies
        threads: of torch in each worker on the CPU
        from_folder: reports that were written before, to write them anew from their numbers instead of the store
        out_folder: where reports are written
    """
    if action == "list":
        return _list(json)
    # Where workers load their own models, these are only looked at: they need no GPU.
    device = where.device
    shelf = Shelf(device if on == "local" else "cpu", where.resolved, where.which)
    names = list(STUDIES) if name == "all" else [name]
    listed = [
        study_files.load(one, shelf if action == "run" else None) if one.endswith(".toml") else
        study(one, studies.preset(preset, n, prompts))
        for one in names
    ]  # fmt: skip
    chosen = {units.name(one): one for one in listed}
    place, threads = placed(on, workers, address, device, threads, shelf)
    kept = Store(store)
    if action == "status":
        return _status(kept, chosen, json)
    if action == "report":
        return _report(kept, chosen, from_folder, out_folder, json)
    part = _part(shard)
    for one in listed:  # what is missing for the last is said before the first is begun
        units.resolve(one, shelf)
    summaries = {name: make(one, kept, place, shelf, part, threads) for name, one in chosen.items()}
    show(json, {name: asdict(summary) for name, summary in summaries.items()}, ())
    return int(any(summary.failed for summary in summaries.values()))


def make(
    one: Study, kept: Store, place: Place, shelf: Shelf, part: tuple[int, int] = (1, 1), threads: int | None = None
) -> Summary:
    """Make what the store does not hold yet of a study, and say how far that is and what came of it."""
    begun = time.monotonic()
    cells: set[str] = set()  # that are worked on
    with progress() as update:

        def tell(now: Progress) -> None:
            detail = f"units of {one.name}"
            if (event := now.event) is not None:
                cell = event.unit.name.rpartition(", seed ")[0]
                if event.error is not None:
                    err.print(f"{event.unit.name} failed: {event.error}", style="red", markup=False)
                elif cell not in cells:
                    cells.add(cell)
                    if not err.is_terminal:
                        err.print(f"{cell}: {now.done} of {now.total} units", markup=False)
                left = "" if now.left is None else f" · {clock(now.left)} left"
                detail += f" · {len(cells)} cells worked on · {escape(cell)}{left}"
            update(completed=now.done, total=now.total, detail=detail)

        try:
            summary = experiments.run(one, kept, place, shelf, part=part, threads=threads, tell=tell)
        except KeyboardInterrupt:
            err.print("stopped: every finished unit is kept, and the same command goes on from there", markup=False)
            raise
    summed_up(units.name(one), "units", summary, begun)
    return summary


def summed_up(name: str, what: str, summary: Summary, begun: float, then: str = "") -> None:
    """Say what came of a run: what was damaged, and how many were made, found and failed; `then` what to do."""
    for unit, damage in summary.damaged.items():
        err.print(f"{unit} was damaged ({damage}) and made again", style="yellow", markup=False)
    failed = f", {len(summary.failed)} failed{then}" if summary.failed else ""
    spent = clock(time.monotonic() - begun)
    said = f"{name}: {summary.made} {what} made, {summary.found} found{failed}, in {spent}"
    err.print(said, markup=False, soft_wrap=True)


def _list(json: bool) -> int:
    sizes = {name: preset.about for name, preset in PRESETS.items()}
    lines = []
    for title, rows in (("study", STUDIES), ("preset", sizes)):
        wide = max(map(len, rows))
        lines += [*(f"{name:<{wide}} {what}" for name, what in {title: "what it is", **rows}.items()), ""]
    show(json, {"studies": STUDIES, "presets": sizes}, lines)
    return 0


def each(chosen: Mapping[str, S], find: Callable[[S], T]) -> list[T]:
    """What is found of each of several; why nothing is of the others is said, and of a single one it is an error."""
    found = []
    for name, one in chosen.items():
        try:
            found.append(find(one))
        except LimpetError as error:
            if len(chosen) == 1:
                raise
            err.print(f"{name}: {error}", style="yellow", markup=False, soft_wrap=True)
    return found


def written(found: list[Results], folder: Path, index: bool) -> list[Path]:
    """A report of each in a folder of its own, and an index over all that lie there."""

    def tell(remark: str) -> None:
        err.print(remark, markup=False, soft_wrap=True)

    among = index or (folder / "index.html").is_file()
    pages = [report.write(results, folder / units.name(results.study), among, tell) for results in found]
    if index:
        pages.append(report.write_index([report.section(results) for results in found], folder))
    return pages


def documents(found: list[Results]) -> list[dict[str, Any]]:
    return [report.to_dict(results, report.shown(results)) for results in found]


def _status(kept: Store, chosen: dict[str, Study], json: bool) -> int:
    found, lines = each(chosen, lambda one: experiments.status(kept, one)), []
    for entry in found:
        lines.append(f"{entry['study']}: {entry['done']} of {entry['units']} units")
        short = [cell for cell in entry["cells"] if cell["done"] < cell["units"]]
        lines += [f"  {cell['name']}: {cell['done']} of {cell['units']}" for cell in short]
        lines += [f"  {unit} is damaged: {damage}" for unit, damage in entry["damaged"].items()]
    show(json, found, lines)
    return 0


def _report(kept: Store, chosen: dict[str, Study], before: Path | None, folder: Path, json: bool) -> int:
    """From the store, or from reports that were written before."""
    found = each(
        chosen, lambda one: report.read(one, before / units.name(one)) if before else experiments.collect(one, kept)
    )
    pages = written(found, folder, len(chosen) > 1)
    show(json, documents(found), map(str, pages))
    return int(len(found) < len(chosen))


def placed(
    on: On, workers: int | None, address: str | None, device: str | None, threads: int | None, shelf: Shelf
) -> tuple[Place, int | None]:
    """Where units are worked, and with how many threads each: processes share this machine's cores."""
    if workers is not None and workers < 1:
        raise LimpetError(f"workers is {workers}; it takes one or more")
    if on == "local":
        return local(device, shelf), threads
    if on == "ray":
        return on_ray(address, workers, device), threads
    devices = _devices(workers, device)
    return processes(devices), threads or max(1, (os.cpu_count() or 1) // len(devices))


def _devices(workers: int | None, device: str | None) -> list[str | None]:
    """One for each process: every GPU once, or the CPU as often as told."""
    gpus = torch.cuda.device_count() if device in (None, "cuda") else 0
    if gpus:
        return [f"cuda:{i % gpus}" for i in range(workers or gpus)]
    return [device] * (workers or os.cpu_count() or 1)


def _part(shard: str) -> tuple[int, int]:
    index, _, parts = shard.partition("/")
    if not (index.isdigit() and parts.isdigit()):
        raise LimpetError(f"shard is {shard!r}; it takes i/n, say 2/8")
    return int(index), int(parts)


def clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds))).removeprefix("0:")
