"""Run a study: resolve it, find what is done, hand the rest to a place, and say what happened."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from limpet.errors import LimpetError
from limpet.experiments import units
from limpet.experiments.executors import Place
from limpet.experiments.resources import Shelf
from limpet.experiments.store import Spot, Store
from limpet.experiments.study import Study
from limpet.experiments.units import Unit
from limpet.experiments.worker import Event, Job


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


def run(
    study: Study,
    store: Store,
    place: Place,
    shelf: Shelf,
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
    plan = units.resolve(study, shelf)
    store.write_plan(units.filed(study), plan.document)  # also finds out, before any work, whether the store takes it
    job = Job(store.path, study.judges, study.metrics, shelf.precision, units.real(study), threads, shelf.which)
    return work(plan.groups()[index - 1 :: parts], store, place, job, tell)


def work(
    groups: Sequence[Sequence[Unit]],
    store: Store,
    place: Place,
    job: Job,
    tell: Callable[[Progress], None] = lambda progress: None,
) -> Summary:
    """Make every unit of some groups that is not in the store."""
    summary, missing = Summary(), []
    for group in groups:
        left = [unit for unit in group if not _there(store, unit.key, unit.name, summary.damaged, unit.at)]
        summary.found += len(group) - len(left)
        missing += [left] if left else []
    # Runners on one store begin at different groups, so that they meet late.
    start = random.randrange(len(missing)) if missing else 0
    missing = missing[start:] + missing[:start]

    total, cost = summary.found + sum(map(len, missing)), sum(unit.cost for group in missing for unit in group)
    begun, spent, told = time.monotonic(), 0, set[str]()
    tell(Progress(None, summary.found, total, None))
    for event in place(job, missing) if missing else ():
        if event.fatal:
            raise LimpetError(str(event.error))
        if event.unit.key in told:  # and handed out again, as its worker died over the rest of its group
            continue
        told.add(event.unit.key)
        spent += event.unit.cost
        if event.error is not None:
            summary.failed[event.unit.name] = event.error
        elif event.made:
            summary.made += 1
        else:
            summary.found += 1
        left_over = (time.monotonic() - begun) / spent * (cost - spent)
        tell(Progress(event, summary.found + summary.made, total, left_over))
    return summary


def status(store: Store, study: Study) -> dict[str, Any]:
    """How much of a study, as it was last run, is in the store: no model is needed."""
    plan = store.read_plan(units.filed(study))
    cells: list[dict[str, Any]] = []
    damaged: dict[str, str] = {}
    for cell in plan["cells"]:
        name, keys = cell["name"], cell["keys"]
        named = zip(keys, (f"{name}, seed {seed}" for seed in plan["shards"]), strict=True)
        done = sum(_there(store, key, unit, damaged) for key, unit in named)
        cells.append({"name": name, "done": done, "units": len(keys)})
    finished, total = (sum(cell[count] for cell in cells) for count in ("done", "units"))
    return {"study": units.name(study), "done": finished, "units": total, "cells": cells, "damaged": damaged}


def _there(store: Store, key: str, unit: str, damaged: dict[str, str], at: Spot | None = None) -> bool:
    """Whether a unit is done; what is wrong with a damaged one is noted."""
    found, damage = store.look(key, at)
    if damage:
        damaged[unit] = damage
    return found is not None
