"""`limpet study`: list, run, resume and report studies."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import torch
import tyro
from rich.markup import escape
from rich.table import Table

from limpet.commands import IN_FLOAT32, Somewhere, err, out, print_json, progress_bar
from limpet.errors import LimpetError
from limpet.lab import files, report, units
from limpet.lab.places import Place
from limpet.lab.places.local import local
from limpet.lab.places.processes import processes
from limpet.lab.places.ray import on_ray
from limpet.lab.results import collect
from limpet.lab.run import Progress, Summary
from limpet.lab.run import run as run_study
from limpet.lab.run import status as study_status
from limpet.lab.shelf import Shelf
from limpet.lab.store import Store
from limpet.lab.study import Study
from limpet.studies import PRESETS, STUDIES, sized, study

T = TypeVar("T")


def run(
    action: Annotated[Literal["list", "run", "status", "report"], tyro.conf.Positional],
    name: Annotated[str, tyro.conf.Positional] = "all",
    /,
    preset: str = "mini",
    store: str = "limpet-store",
    on: Literal["local", "processes", "ray"] = "local",
    workers: int | None = None,
    address: str | None = None,
    shard: str = "1/1",
    where: Somewhere = IN_FLOAT32,
    n: int | None = None,
    prompts: str | None = None,
    threads: int | None = None,
    from_folder: Annotated[Path | None, tyro.conf.arg(name="from")] = None,
    out_folder: Annotated[Path, tyro.conf.arg(name="out")] = Path("limpet-reports"),
    json: bool = False,
) -> int:
    """Run the paper's studies, or your own: every finished unit stays in the store and is never made again.

    $ limpet study list
    $ limpet study run nfe-scaling --preset mini
    $ limpet study status nfe-scaling
    $ limpet study report nfe-scaling
    $ limpet study run my-study.toml --on processes --workers 2
    $ limpet study run all --preset paper --on ray --address auto --store s3://bucket/store
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
        prompts: a text file, one prompt a line, for the fixed-prefix studies
        threads: of torch in each worker on the CPU
        from_folder: reports that were written before, to write them anew from their numbers instead of the store
        out_folder: where reports are written
        json: print one JSON document
    """
    if action == "list":
        return _list(json)
    # Where workers load their own models, these are only looked at: they need no GPU.
    device = where.device
    shelf = Shelf(device if on == "local" else "cpu", where.resolved)
    names = list(STUDIES) if name == "all" else [name]
    chosen = [
        files.load(one, shelf if action == "run" else None) if one.endswith(".toml") else
        study(one, sized(preset, n, prompts))
        for one in names
    ]  # fmt: skip
    place = _place(on, workers, address, device, shelf)
    kept = Store(store)
    if action == "status":
        return _status(kept, chosen, json)
    if action == "report":
        return _report(kept, chosen, from_folder, out_folder, json)
    part = _part(shard)
    if threads is None and on == "processes":
        threads = max(1, (os.cpu_count() or 1) // len(_devices(workers, device)))
    for one in chosen:  # what is missing for the last is said before the first is begun
        units.resolve(one, shelf)
    summaries = {units.name(one): _run(one, kept, place, shelf, part, threads) for one in chosen}
    if json:
        print_json({name: asdict(summary) for name, summary in summaries.items()})
    return int(any(summary.failed for summary in summaries.values()))


def _run(one: Study, kept: Store, place: Place, shelf: Shelf, part: tuple[int, int], threads: int | None) -> Summary:
    begun = time.monotonic()
    with progress_bar() as bar:
        task = bar.add_task(one.name, total=None, detail="")
        cells: set[str] = set()  # that are worked on

        def tell(progress: Progress) -> None:
            detail = "units"
            if (event := progress.event) is not None:
                if event.error is None:
                    cells.add(event.cell)
                else:
                    err.print(f"{event.cell}, seed {event.seed} failed: {event.error}", style="red", markup=False)
                left = "" if progress.left is None else f" · {_time(progress.left)} left"
                detail = f"units · {len(cells)} cells worked on · {escape(event.cell)}{left}"
            bar.update(task, completed=progress.done, total=progress.total, detail=detail)

        try:
            summary = run_study(one, kept, place, shelf, part=part, threads=threads, tell=tell)
        except KeyboardInterrupt:
            err.print("stopped: every finished unit is kept, and the same command goes on from there", markup=False)
            raise
    for unit, damage in summary.damaged.items():
        err.print(f"{unit} was damaged ({damage}) and made again", style="yellow", markup=False)
    failed = f", {len(summary.failed)} failed" if summary.failed else ""
    spent = _time(time.monotonic() - begun)
    err.print(f"{units.name(one)}: {summary.made} units made, {summary.found} found{failed}, in {spent}", markup=False)
    return summary


def _list(json: bool) -> int:
    sizes = {name: preset.about for name, preset in PRESETS.items()}
    if json:
        print_json({"studies": STUDIES, "presets": sizes})
        return 0
    for title, rows in (("study", STUDIES), ("preset", sizes)):
        view = Table(title, "what it is", box=None)
        for row in rows.items():
            view.add_row(*map(escape, row))
        out.print(view, "")
    return 0


def _each(chosen: list[Study], find: Callable[[Study], T]) -> tuple[list[T], list[str]]:
    """What is found of each study, and why of others nothing is; of a single one, that is an error."""
    found, skipped = [], []
    for one in chosen:
        try:
            found.append(find(one))
        except LimpetError as error:
            if len(chosen) == 1:
                raise
            skipped.append(str(error))
    return found, skipped


def _status(kept: Store, chosen: list[Study], json: bool) -> int:
    found, _ = _each(chosen, lambda one: study_status(kept, units.name(one)))
    if json:
        print_json(found)
        return 0
    for entry in found:
        out.print(f"{entry['study']}: {entry['done']} of {entry['units']} units", markup=False)
        for cell in entry["cells"]:
            if cell["done"] < cell["units"]:
                out.print(f"  {cell['name']}: {cell['done']} of {cell['units']}", markup=False)
        for unit, damage in entry["damaged"].items():
            out.print(f"  {unit} is damaged: {damage}", markup=False)
    return 0


def _report(kept: Store, chosen: list[Study], written: Path | None, folder: Path, json: bool) -> int:
    """From the store, or from reports that were written."""
    found, skipped = _each(
        chosen, lambda one: report.read(one, written / units.name(one)) if written else collect(one, kept)
    )
    pages = [report.write(results, folder / units.name(results.study)) for results in found]
    if len(chosen) > 1:
        sections = [report.section(results) for results in found]
        pages.append(report.write_index([*sections, *report.beside(folder, sections)], folder))
    for reason in skipped:
        err.print(reason, style="yellow", markup=False)
    if json:
        print_json([report.to_dict(results, results.study.show(results)) for results in found])
    else:
        for page in pages:
            out.print(str(page), markup=False)
    return int(bool(skipped))


def _place(on: str, workers: int | None, address: str | None, device: str | None, shelf: Shelf) -> Place:
    if workers is not None and workers < 1:
        raise LimpetError(f"workers is {workers}; it takes one or more")
    if on == "local":
        return local(device, shelf)
    return on_ray(address, workers, device) if on == "ray" else processes(_devices(workers, device))


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


def _time(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds))).removeprefix("0:")
