"""The finished units of a study as numbers: one value for each cell, measure and shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from limpet import stats
from limpet.errors import LimpetError
from limpet.lab import units
from limpet.lab.measure import TRUE_LAW
from limpet.lab.store import Damaged, Store
from limpet.lab.study import Study
from limpet.stats import Estimate, Floats


@dataclass(frozen=True)
class Results:
    """What `show` reads. Measures: nll and ppl (of the first judge, or nll:JUDGE), any metric, selected, visible,
    nfe. A cell's value in a shard is over its samples; errors are over shards."""

    study: Study
    plan: dict[str, Any]
    units: dict[str, list[dict[str, Any]]]  # cell -> the rows of each shard

    @cached_property
    def judges(self) -> list[str]:
        return [judging.label for judging in self.study.judges] or [TRUE_LAW]

    def values(self, cell: str, measure: str) -> Floats:
        """(shards,)"""
        if cell not in self.units:
            raise LimpetError(f"study {self.study.name} has no cell {cell!r}; it has {', '.join(self.units)}")
        return np.array([self._value(rows, measure) for rows in self.units[cell]])

    def _value(self, rows: dict[str, Any], measure: str) -> float:
        name, _, judge = measure.partition(":")
        if name == "ppl":
            return float(np.exp(self._value(rows, f"nll:{judge}" if judge else "nll")))
        if name == "nll":
            judge = judge or self.judges[0]
            if judge not in self.judges:
                raise LimpetError(f"{judge!r} did not judge study {self.study.name}; {', '.join(self.judges)} did")
            nll, tokens = (rows["columns"][f"{column}:{self.judges.index(judge)}"] for column in ("nll", "tokens"))
            return float(np.sum(nll) / np.sum(tokens))
        if name == "nfe":
            return float(rows["nfe"])
        if name in rows["sets"]:
            return _number(rows["sets"][name])
        if name not in rows["columns"]:
            raise LimpetError(f"study {self.study.name} has no measure {measure!r}")
        values = [value for value in rows["columns"][name] if value is not None]
        return float(np.mean(values)) if values else float("nan")

    def __call__(self, cell: str, measure: str) -> Estimate:
        return stats.mean_se(self.values(cell, measure))

    def contrast(self, cell: str, against: str, measure: str = "nll") -> Estimate:
        """cell - against, paired by shard."""
        return stats.paired(self.values(cell, measure), self.values(against, measure))

    def interaction(self, a: str, b: str, c: str, d: str, measure: str = "nll") -> Estimate:
        """(a - b) - (c - d), by shard."""
        return stats.difference_of_differences(*(self.values(cell, measure) for cell in (a, b, c, d)))

    def matched(self, cell: str, curve: Sequence[str], on: str, measure: str = "nll") -> Estimate:
        """The cell's measure less that of a curve of cells at the cell's own `on`, by shard."""
        nodes = [np.stack([self.values(node, what) for node in curve], 1) for what in (on, measure)]
        return stats.matched(nodes[0], nodes[1], self.values(cell, on), self.values(cell, measure))


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def collect(study: Study, store: Store) -> Results:
    """Read a study's finished units; all of them must be there."""
    name = units.name(study)
    plan = store.read_plan(name)
    if plan is None:
        raise LimpetError(f"the store {store.path} holds no run of {name}: run the study first")
    keys = {cell["name"]: cell["keys"] for cell in plan["cells"]}
    if set(keys) != {cell.name for cell in study.cells} or plan["shards"] != list(study.shards):
        raise LimpetError(f"{name} was another study when it ran in {store.path}: run it again")
    found: dict[str, list[dict[str, Any]]] = {}
    missing = 0
    for cell, cell_keys in keys.items():
        for key in cell_keys:
            try:
                result = store.read(key)
            except Damaged:
                result = None
            if result is None:
                missing += 1
            else:
                found.setdefault(cell, []).append(result.rows)
    if missing:
        raise LimpetError(f"{missing} units of {name} are missing or damaged: run the study again, it makes only those")
    return Results(study, plan, found)
