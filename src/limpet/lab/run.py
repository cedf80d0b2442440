"""Run a study: resolve it, find what is done, hand the rest to a place, and say what happened."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from limpet.errors import LimpetError
from limpet.lab import units
from limpet.lab.bench import Bench
from limpet.lab.places import Place
from limpet.lab.store import Damaged, Store
from limpet.lab.study import Study
from limpet.lab.worker import Event, Job


class Progress(NamedTuple):
    """How far a run is: told before the first unit and after each."""

    event: Event | None
    done: int  # units, with those found done
    total: int
    left: float | None  # seconds, once it can be told


@dataclass
class Summary:
    """What a run did."""

    found: int = 0
    made: int = 0
    damaged: dict[str, str] = field(default_factory=dict)  # "cell, seed" -> what was wrong; made again
    failed: dict[str, str] = field(default_factory=dict)  # "cell, seed" -> why

    def to_dict(self) -> dict[str, Any]:
        return {"found": self.found, "made": self.made, "damaged": self.damaged, "failed": self.failed}


def run(
    study: Study,
    store: Store,
    place: Place,
    bench: Bench,
    *,
    part: tuple[int, int] = (1, 1),
    threads: int | None = None,
    tell: Callable[[Progress], None] = lambda progress: None,
) -> Summary:
    """Make every unit that is not in the store, or the i-th of n parts of them. Nothing finished is made again."""
    index, parts = part
    if not 1 <= index <= parts:
        raise LimpetError(f"shard {index}/{parts}: give i/n with i from 1 to n")
    store.sweep()
    plan = units.resolve(study, bench)
    store.write_plan(units.name(study), plan.to_dict())  # also finds out, before any work, whether the store takes it
    groups = plan.groups()[index - 1 :: parts]
    summary = Summary()
    missing = []
    for group in groups:
        left = []
        for unit in group:
            try:
                found = store.read(unit.key) is not None
            except Damaged as damage:
                summary.damaged[f"{unit.cell.name}, seed {unit.seed}"] = str(damage)
                found = False
            summary.found += found
            left += [] if found else [unit]
        missing += [left] if left else []
    # Runners on one store begin at different places, so that they meet late.
    start = random.randrange(len(missing)) if missing else 0
    missing = missing[start:] + missing[:start]

    total, cost = summary.found + sum(map(len, missing)), sum(unit.cost for group in missing for unit in group)
    begun, spent = time.monotonic(), 0
    tell(Progress(None, summary.found, total, None))
    job = Job(store.path, study.judges, study.metrics, bench.precision, threads)
    for event in place(job, missing) if missing else ():
        if event.fatal:
            raise LimpetError(str(event.error))
        spent += event.cost
        if event.error is None:
            summary.made += 1
        else:
            summary.failed[f"{event.cell}, seed {event.seed}"] = event.error
        left_over = (time.monotonic() - begun) / spent * (cost - spent)
        tell(Progress(event, summary.found + summary.made, total, left_over))
    return summary


def status(store: Store, name: str) -> dict[str, Any]:
    """How much of a study, as it was last run, is in the store: no model is needed."""
    plan = store.read_plan(name)
    if plan is None:
        raise LimpetError(f"the store {store.path} holds no run of {name}: limpet study run it first")
    cells, damaged = [], {}
    for cell in plan["cells"]:
        done = 0
        for key, seed in zip(cell["keys"], plan["shards"], strict=True):
            try:
                done += store.read(key) is not None
            except Damaged as damage:
                damaged[f"{cell['name']}, seed {seed}"] = str(damage)
        cells.append({"name": cell["name"], "done": done, "units": len(cell["keys"])})
    finished, total = sum(cell["done"] for cell in cells), sum(cell["units"] for cell in cells)
    return {"study": name, "done": finished, "units": total, "cells": cells, "damaged": damaged}
