"""`limpet study`: run, resume and report a study of your own."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
import tyro
from rich.markup import escape

from limpet import experiments
from limpet.cli.common import DEFAULT_LOADING, UNSET, Json, Loading, err, progress, show
from limpet.errors import LimpetError
from limpet.experiments import (
    Executor,
    ModelCache,
    Results,
    RunProgress,
    RunSummary,
    Store,
    Study,
    local,
    on_ray,
    processes,
    report,
    study_files,
)

S = TypeVar("S")
T = TypeVar("T")
Action = Literal["run", "status", "report"]


@dataclass(frozen=True)
class ExecutorOptions:
    """Where units are computed: options of several commands."""

    on: Literal["local", "processes", "ray"] = "local"
    """here, in processes (see --workers), or on a Ray cluster"""
    workers: Annotated[int | None, UNSET] = None
    """how many processes (default: one for each device)"""
    address: Annotated[str | None, UNSET] = None
    """of a running Ray cluster (default: start one here)"""
    threads: Annotated[int | None, UNSET] = None
    """of torch in each worker on the CPU"""

    def models(self, loading: Loading) -> ModelCache:
        """Where models are loaded. If workers load their own, these are only inspected and need no GPU."""
        device = loading.device if self.on == "local" else "cpu"
        return ModelCache(device, loading.resolved, loading.weight_options)

    def executor(self, device: str | None, models: ModelCache) -> tuple[Executor, int | None]:
        """The executor, and the number of threads of each worker: processes share this machine's cores."""
        if self.workers is not None and self.workers < 1:
            raise LimpetError(f"workers is {self.workers}; it takes one or more")
        if self.on == "local":
            return local(device, models), self.threads
        if self.on == "ray":
            return on_ray(self.address, self.workers, device), self.threads
        gpus = torch.cuda.device_count() if device in (None, "cuda") else 0
        devices = [f"cuda:{i % gpus}" if gpus else device for i in range(self.workers or gpus or os.cpu_count() or 1)]
        return processes(devices), self.threads or max(1, (os.cpu_count() or 1) // len(devices))


Executing = Annotated[ExecutorOptions, tyro.conf.arg(name="")]
DEFAULT_EXECUTING = ExecutorOptions()


@dataclass(frozen=True)
class StudyOptions:
    """Options of every command that runs studies."""

    store: str = "limpet-store"
    """where results live: a folder, or any address that fsspec knows"""
    part: str = "1/1"
    """i/n computes the i-th of n parts, for any scheduler"""
    executing: Executing = DEFAULT_EXECUTING
    loading: Loading = DEFAULT_LOADING
    from_folder: Annotated[Path | None, tyro.conf.arg(name="from"), UNSET] = None
    """build reports again from the numbers of earlier reports, instead of the store"""
    out_folder: Annotated[Path, tyro.conf.arg(name="out")] = Path("limpet-reports")
    """where reports are written"""


Options = Annotated[StudyOptions, tyro.conf.arg(name="")]
DEFAULT_OPTIONS = StudyOptions()


def run(
    action: Annotated[Action, tyro.conf.Positional],
    file: Annotated[Path, tyro.conf.Positional],
    /,
    options: Options = DEFAULT_OPTIONS,
    json: Json = False,
) -> int:
    """Run a study of your own. Finished units stay in the store and are never computed again.

    $ limpet study run my-study.toml
    $ limpet study run my-study.toml --on processes --workers 2
    $ limpet study status my-study.toml
    $ limpet study report my-study.toml

    Args:
        action: run or resume a study; show its status; write its report
        file: a .toml file; docs/reproduce.md shows one
    """
    models = options.executing.models(options.loading) if action == "run" else None
    return run_action(action, [study_files.load(file, models)], options, json, models)


def run_action(
    action: Action, studies: Sequence[Study], options: StudyOptions, json: bool, models: ModelCache | None = None
) -> int:
    """Run studies, or print their status or their reports."""
    store = Store(options.store)
    if action == "status":
        return _status(store, studies, json)
    if action == "report":
        return _report(store, studies, options, json)
    part = _parse_part(options.part)
    models = models or options.executing.models(options.loading)
    executor, threads = options.executing.executor(options.loading.device, models)
    for study in studies:  # what the last one lacks is reported before the first begins
        experiments.resolve(study, models)
    summaries = {study.full_name: compute(study, store, executor, models, part, threads) for study in studies}
    show(json, {name: asdict(summary) for name, summary in summaries.items()}, ())
    return int(any(summary.failed for summary in summaries.values()))


def compute(
    study: Study,
    store: Store,
    executor: Executor,
    models: ModelCache,
    part: tuple[int, int] = (1, 1),
    threads: int | None = None,
) -> RunSummary:
    """Compute what the store does not hold of a study, with progress on standard error."""
    begun = time.monotonic()
    cells: set[str] = set()  # that units have been reported of
    with progress() as update:

        def on_progress(now: RunProgress) -> None:
            detail = f"units of {study.name}"
            if (event := now.event) is not None:
                cell = event.unit.name.rpartition(", seed ")[0]
                if event.error is not None:
                    err.print(f"{event.unit.name} failed: {event.error}", style="red", markup=False)
                elif cell not in cells:
                    cells.add(cell)
                    if not err.is_terminal:
                        err.print(f"{cell}: {now.done} of {now.total} units", markup=False)
                left = "" if now.seconds_left is None else f" · {clock(now.seconds_left)} left"
                detail += f" · {len(cells)} cells · {escape(cell)}{left}"
            update(completed=now.done, total=now.total, detail=detail)

        with resumable("unit"):
            summary = experiments.run(
                study, store, executor, models, part=part, threads=threads, on_progress=on_progress
            )
    print_summary(study.full_name, "units", summary, begun)
    return summary


@contextmanager
def resumable(what: str) -> Iterator[None]:
    """Say after Ctrl-C that nothing finished is lost."""
    try:
        yield
    except KeyboardInterrupt:
        err.print(f"stopped: every finished {what} is kept; the same command continues", markup=False)
        raise


def print_summary(name: str, what: str, summary: RunSummary, begun: float, advice: str = "") -> None:
    """Print what a run did: which units were damaged, and how many were computed, found and failed."""
    for unit, damage in summary.damaged.items():
        err.print(f"{unit} was damaged ({damage}) and is computed again", style="yellow", markup=False)
    failed = f", {len(summary.failed)} failed{advice}" if summary.failed else ""
    counts = f"{summary.computed} {what} computed, {summary.found} found{failed}"
    err.print(f"{name}: {counts}, in {clock(time.monotonic() - begun)}", markup=False, soft_wrap=True)


def for_each(named: Mapping[str, S], function: Callable[[S], T]) -> list[T]:
    """The function's results. An error for one of several is printed; an error for a single one is raised."""
    found = []
    for name, one in named.items():
        try:
            found.append(function(one))
        except LimpetError as error:
            if len(named) == 1:
                raise
            err.print(f"{name}: {error}", style="yellow", markup=False, soft_wrap=True)
    return found


def write_reports(found: list[Results], folder: Path, with_index: bool) -> list[Path]:
    """Write each report into a folder of its own, and an index over all that are there; returns the pages."""
    warn = partial(err.print, markup=False, soft_wrap=True)
    in_index = with_index or (folder / "index.html").is_file()
    pages = [report.write_report(results, folder / results.study.full_name, in_index, warn) for results in found]
    if with_index:
        pages.append(report.write_index([report.index_entry(results) for results in found], folder))
    return pages


def report_documents(found: list[Results]) -> list[dict[str, Any]]:
    """Every number of each report."""
    return [report.to_dict(results, report.content_of(results)) for results in found]


def _status(store: Store, studies: Sequence[Study], json: bool) -> int:
    named = {study.full_name: study for study in studies}
    found, lines = for_each(named, lambda study: experiments.status(store, study)), []
    for entry in found:
        lines.append(f"{entry['study']}: {entry['done']} of {entry['units']} units")
        unfinished = [cell for cell in entry["cells"] if cell["done"] < cell["units"]]
        lines += [f"  {cell['name']}: {cell['done']} of {cell['units']}" for cell in unfinished]
        lines += [f"  {unit} is damaged: {damage}" for unit, damage in entry["damaged"].items()]
    show(json, found, lines)
    return 0


def _report(store: Store, studies: Sequence[Study], options: StudyOptions, json: bool) -> int:
    def results_of(study: Study) -> Results:
        if options.from_folder is not None:
            return report.read_report(study, options.from_folder / study.full_name)
        return experiments.collect(study, store)

    found = for_each({study.full_name: study for study in studies}, results_of)
    pages = write_reports(found, options.out_folder, len(studies) > 1)
    show(json, report_documents(found), map(str, pages))
    return int(len(found) < len(studies))


def _parse_part(text: str) -> tuple[int, int]:
    index, _, parts = text.partition("/")
    if not (index.isdigit() and parts.isdigit()):
        raise LimpetError(f"part is {text!r}; it takes i/n, such as 2/8")
    return int(index), int(parts)


def clock(seconds: float) -> str:
    """Seconds as 1:02:03."""
    return str(timedelta(seconds=round(seconds))).removeprefix("0:")
