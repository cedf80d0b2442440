"""The finished units of a study as numbers: one value for each cell, measure and shard; one row for each figure that
its probes saw."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from limpet.errors import LimpetError
from limpet.evaluation import statistics
from limpet.evaluation.statistics import Estimate, Floats
from limpet.experiments import units
from limpet.experiments.store import Store, canonical
from limpet.experiments.study import Cell, Study


@dataclass(frozen=True)
class Row:
    """One figure of a probe, over shards: of which model, what, where, in which unit."""

    model: str
    quantity: str
    at: dict[str, Any]
    estimate: Estimate
    unit: str = ""
    events: int | None = None  # how many events it is a mean over, where it is a mean over events

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model, "quantity": self.quantity, "at": self.at, **self.estimate.to_dict(), "unit": self.unit,
            "events": self.events,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Row:
        model, quantity, at = stored["model"], stored["quantity"], stored["at"]
        return cls(model, quantity, at, Estimate.from_dict(stored), stored["unit"], stored["events"])


@dataclass(frozen=True)
class Results:
    """What `show` reads. Measures of a cell: nll and ppl (of the first judge, or nll:JUDGE), any metric, committed,
    visible, nfe. A cell's value in a shard is over its samples; errors are over shards."""

    study: Study
    provenance: dict[str, Any]  # what made these numbers
    cells: dict[str, dict[str, Estimate]]  # cell -> measure
    probes: dict[str, list[Row]] = field(default_factory=dict)
    texts: dict[str, list[str]] = field(default_factory=dict)  # cell -> its first samples, where they are texts

    @property
    def judges(self) -> list[str]:
        """What tables call them."""
        return self.study.captions

    def __call__(self, cell: str, measure: str) -> Estimate:
        if cell not in self.cells:
            raise LimpetError(f"study {self.study.name} has no cell {cell!r}; it has {', '.join(self.cells)}")
        name, _, judge = measure.partition(":")
        if name == "ppl":
            nll = self(cell, f"nll:{judge}" if judge else "nll")
            return Estimate(np.exp(nll.values), nll.reasons)
        if judge and judge not in self.judges:
            raise LimpetError(f"{judge!r} did not judge study {self.study.name}; {', '.join(self.judges)} did")
        measure = name if judge == self.judges[0] else measure
        if measure not in self.cells[cell]:
            raise LimpetError(f"study {self.study.name} has no measure {measure!r}")
        return self.cells[cell][measure]

    def values(self, cell: str, measure: str) -> Floats:
        """(shards,)"""
        return self(cell, measure).values

    def contrast(self, *cells: str, measure: str = "nll") -> Estimate:
        """a - b of two cells, or (a - b) - (c - d) of four, paired by shard."""
        compared = statistics.paired if len(cells) == 2 else statistics.difference_of_differences
        return compared(*(self.values(cell, measure) for cell in cells))

    def matched(self, cell: str, curve: Sequence[str], on: str, measure: str = "nll") -> Estimate:
        """The cell's measure less that of a curve of cells at the cell's own `on`, by shard."""
        nodes = [np.stack([self.values(node, what) for node in curve], 1) for what in (on, measure)]
        return statistics.matched(nodes[0], nodes[1], self.values(cell, on), self.values(cell, measure))

    def rows(self, cell: str | None = None) -> list[Row]:
        """What a probe saw, or all of them, in the order of first appearance."""
        return [row for name, rows in self.probes.items() if cell in (None, name) for row in rows]

    def of(self, quantity: str, model: str | None = None, **at: Any) -> list[Row]:
        """The rows of a quantity, of one model or of all, wherever `at` holds."""
        return [
            row
            for row in self.rows()
            if row.quantity == quantity and model in (None, row.model) and at.items() <= row.at.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        """Every number, as a report keeps it."""
        cells = {
            cell: {name: _stored(self(cell, name)) for name in ("ppl", *measures)}
            for cell, measures in self.cells.items()
        }
        rows = {probe: [row.to_dict() for row in rows] for probe, rows in self.probes.items()}
        return {"provenance": self.provenance, "cells": cells, "rows": rows}

    @classmethod
    def from_dict(cls, study: Study, stored: Mapping[str, Any]) -> Results:
        """The numbers of a report that was written."""
        cells = {
            cell: {name: Estimate.from_dict(one) for name, one in measures.items()}
            for cell, measures in stored["cells"].items()
        }
        probes = {probe: list(map(Row.from_dict, rows)) for probe, rows in stored.get("rows", {}).items()}
        return cls(study, stored["provenance"], cells, probes)


def _stored(estimate: Estimate) -> dict[str, Any]:
    return {**estimate.to_dict(), **({"reasons": list(estimate.reasons)} if any(estimate.reasons) else {})}


def collect(study: Study, store: Store) -> Results:
    """Read a study's finished units; all of them must be there."""
    name = units.name(study)
    plan = store.read_plan(units.filed(study))
    keys = {cell["name"]: cell["keys"] for cell in plan["cells"]}
    rows = {cell: [unit.rows for unit, _ in map(store.look, own) if unit] for cell, own in keys.items()}
    if missing := sum(map(len, keys.values())) - sum(map(len, rows.values())):
        raise LimpetError(f"{missing} units of {name} are missing or damaged: run the study again, it makes only those")
    try:
        cells = {cell.name: _measures(study, cell, rows[cell.name]) for cell in study.samples}
        probes = {cell.name: _rows(rows[cell.name]) for cell in study.cells if not isinstance(cell, Cell)}
        texts = {cell.name: rows[cell.name][0]["texts"][: study.shown] for cell in study.samples if study.shown}
        return Results(study, _provenance(study, plan, rows), cells, probes, texts)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:  # sealed, and yet no worker's
        raise LimpetError(
            f"the store {store.path} holds units of {name} that no worker wrote ({error!r}): run it in another store"
        ) from error


def _measures(study: Study, cell: Cell, shards: Sequence[Mapping[str, Any]]) -> dict[str, Estimate]:
    """Every measure of a cell: its judges' first, marks that are not the paper's last."""
    steps = max(1, cell.sampler.nfe - 1 - cell.warmup_calls)  # that may select

    def column(rows: Mapping[str, Any], name: str) -> Floats:
        known = {"nfe": rows["nfe"], **rows["sets"], **rows["columns"]}
        return np.atleast_1d(np.array(known.get(name, 0), dtype=np.float64))  # NaN for None

    def measured(name: str) -> Estimate:
        what, _, judge = name.partition(":")
        if what != "nll":
            at_once = steps if name == "visible" else 1  # as the paper counts
            return statistics.mean_se([statistics.mean(column(rows, name) / at_once) for rows in shards])
        i = study.captions.index(judge) if judge else 0
        nll, tokens = (np.array([column(rows, f"{what}:{i}").sum() for rows in shards]) for what in ("nll", "tokens"))
        # An impossible sample's score is infinite, for which JSON has no word.
        reasons = tuple(f"a sample is impossible under {study.captions[i]}" if lost else None for lost in np.isnan(nll))
        return Estimate(nll / tokens, reasons if any(reasons) else ())

    names = ["nll", *study.metrics, "committed", "visible", "nfe", *(f"nll:{judge}" for judge in study.captions[1:])]
    seen = {name for rows in shards for name in (*rows["sets"], *rows["columns"]) if ":" not in name}
    names += sorted(seen - set(names))
    return {name: measured(name) for name in names}


def _rows(shards: Sequence[Mapping[str, Any]]) -> list[Row]:
    """What a probe saw in each shard, shard by shard put together; NaN in one that did not see it."""
    found: dict[bytes, dict[int, dict[str, Any]]] = {}
    for shard, rows in enumerate(shards):
        for seen in rows["seen"]:
            found.setdefault(canonical([seen["model"], seen["quantity"], seen["at"]]), {})[shard] = seen
    made = []
    for by_shard in found.values():
        one = next(iter(by_shard.values()))
        values = [by_shard[shard]["value"] if shard in by_shard else None for shard in range(len(shards))]
        events = [seen["events"] for seen in by_shard.values() if seen["events"] is not None]
        estimate, total = Estimate(np.array(values, dtype=np.float64)), sum(events) if events else None
        made.append(Row(one["model"], one["quantity"], dict(one["at"]), estimate, one["unit"], total))
    return made


def _provenance(study: Study, plan: Mapping[str, Any], found: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """What made these numbers: what decided them, and every distinct machine."""
    rows = [rows for cell in found.values() for rows in cell]
    counted = {
        judge: int(sum(sum(one["columns"][f"tokens:{i}"]) for one in rows if "columns" in one))
        for i, judge in enumerate(study.captions)
    }
    settings = dict.fromkeys(json.dumps(cell["settings"]) for cell in plan["cells"] if "settings" in cell)
    made = sorted({json.dumps(one, sort_keys=True) for row in rows for one in row["provenance"]})
    return {
        "models": plan["models"],
        "judges": plan["judges"],
        "conventions": plan["conventions"],
        "counted tokens": counted if study.samples else {},
        "shards": plan["shards"],
        "samples in a shard": sorted({cell.n for cell in study.samples}),
        "settings": [json.loads(entry) for entry in settings],
        "units": len(rows),
        "exact": plan["exact"],
        "made on": [json.loads(entry) for entry in made],
    }
