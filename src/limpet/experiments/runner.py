"""Runs a study: resolves it, finds what is finished, gives the rest to an executor, and reports what happened."""

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from limpet.errors import LimpetError
from limpet.experiments import units
from limpet.experiments.executors import Executor
from limpet.experiments.model_cache import ModelCache
from limpet.experiments.store import Store
from limpet.experiments.study import Study
from limpet.experiments.units import Unit
from limpet.experiments.worker import UnitEvent, WorkerConfig

READERS = 8  # threads that check finished units: they wait for files, and hashing releases the interpreter


class RunProgress(NamedTuple):
    """How far a run is: reported before the first unit and after each."""

    event: UnitEvent | None
    done: int  # units, or samples of a bulk request, with those that were finished before
    total: int
    rate: float  # of those a second in this run, whichever runner computed them
    seconds_left: float | None  # None before the first unit


@dataclass
class RunSummary:
    """What a run did. Units are named "cell, seed"."""

    found: int = 0  # units that were finished before, or that another runner finished
    computed: int = 0
    damaged: dict[str, str] = field(default_factory=dict)  # unit -> what was wrong; it was computed again
    failed: dict[str, str] = field(default_factory=dict)  # unit -> the reason


def run(
    study: Study,
    store: Store,
    executor: Executor,
    models: ModelCache,
    *,
    part: tuple[int, int] = (1, 1),
    threads: int | None = None,
    on_progress: Callable[[RunProgress], None] = lambda progress: None,
) -> RunSummary:
    """Compute every unit of a study that is not in the store.

    executor: where units are computed. models: loads the models and judges that the study is resolved on.
    part: (i, n) computes the i-th of n parts. threads: of torch in each worker on the CPU. on_progress: called before
    the first unit and after each."""
    index, parts = part
    if not 1 <= index <= parts:
        raise LimpetError(f"part {index}/{parts}: give i/n with i from 1 to n")
    store.remove_partial_files()
    plan = units.resolve(study, models)
    store.write_plan(units.plan_name(study), plan.document)  # fails before any work if the store cannot be written
    text = units.read_reference_text(study)
    config = WorkerConfig(
        store.path, study.judges, study.metrics, models.precision, text, study.checker, threads, models.load_options
    )
    return run_groups(plan.groups()[index - 1 :: parts], store, executor, config, on_progress)


def run_groups(
    groups: Sequence[Sequence[Unit]],
    store: Store,
    executor: Executor,
    config: WorkerConfig,
    on_progress: Callable[[RunProgress], None] = lambda progress: None,
) -> RunSummary:
    """Compute every unit of some groups that is not in the store; arguments as in `run`."""
    every = [unit for group in groups for unit in group]
    with ThreadPoolExecutor(READERS) as pool:
        checks = pool.map(lambda unit: _is_finished(store, unit), every)
        finished = dict(zip((unit.key for unit in every), checks, strict=True))
    missing = [left for group in groups if (left := [unit for unit in group if not finished[unit.key][0]])]
    damaged = {unit.name: damage for unit in every if (damage := finished[unit.key][1])}
    summary = RunSummary(len(every) - sum(map(len, missing)), damaged=damaged)
    # Runners on one store begin at different groups, so that they meet late.
    start = random.randrange(len(missing)) if missing else 0
    missing = missing[start:] + missing[:start]

    total, cost = sum(unit.size for unit in every), sum(unit.cost for group in missing for unit in group)
    done = found = total - sum(unit.size for group in missing for unit in group)
    begun, spent, reported = time.monotonic(), 0, set[str]()
    on_progress(RunProgress(None, done, total, 0.0, None))
    for event in executor(config, missing) if missing else ():
        if event.fatal:
            raise LimpetError(str(event.error))
        if event.unit.key in reported:  # its worker died over the rest of the group, which was computed again
            continue
        reported.add(event.unit.key)
        spent += event.unit.cost
        if event.error is not None:
            summary.failed[event.unit.name] = event.error
        else:
            summary.computed, summary.found = summary.computed + event.computed, summary.found + (not event.computed)
            done += event.unit.size
        seconds = max(1e-9, time.monotonic() - begun)
        on_progress(RunProgress(event, done, total, (done - found) / seconds, seconds / spent * (cost - spent)))
    return summary


def _is_finished(store: Store, unit: Unit) -> tuple[bool, str]:
    """Whether a unit is there and whole, and what was wrong with a damaged one, whose rows are removed."""
    found, damage = store.inspect(unit.key, unit.paths)
    if damage:
        store.remove(unit.paths.rows)
    return found is not None, damage


def status(store: Store, study: Study) -> dict[str, Any]:
    """How much of a study, as it was last run, is in the store. No model is needed."""
    plan = store.read_plan(units.plan_name(study))
    cells: list[dict[str, Any]] = []
    damaged: dict[str, str] = {}
    with ThreadPoolExecutor(READERS) as pool:
        for cell in plan["cells"]:
            found = list(pool.map(store.inspect, cell["keys"]))
            names = (f"{cell['name']}, seed {seed}" for seed in plan["seeds"])
            damaged |= {name: damage for name, (_, damage) in zip(names, found, strict=True) if damage}
            done = sum(unit is not None for unit, _ in found)
            cells.append({"name": cell["name"], "done": done, "units": len(cell["keys"])})
    finished, total = (sum(cell[count] for cell in cells) for count in ("done", "units"))
    return {"study": study.full_name, "done": finished, "units": total, "cells": cells, "damaged": damaged}
