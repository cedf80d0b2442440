"""The numbers of a finished study: one value for each cell, measure and seed, and one row for each probed quantity."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from limpet.errors import LimpetError
from limpet.evaluation import statistics
from limpet.evaluation.statistics import Estimate, Floats
from limpet.experiments import units
from limpet.experiments.store import Store, canonical_json
from limpet.experiments.study import Cell, Study

OF_A_JUDGE = ("nll:", "tokens:", "dropped:")  # how stored columns of the i-th judge begin; i follows


@dataclass(frozen=True)
class ProbeRow:
    """One quantity of a probe over all seeds."""

    model: str
    quantity: str
    at: dict[str, Any]
    estimate: Estimate
    unit: str = ""
    events: int | None = None  # how many events it is a mean over, if it is one

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as a report stores them."""
        place = {"model": self.model, "quantity": self.quantity, "at": self.at}
        return {**place, **self.estimate.to_dict(), "unit": self.unit, "events": self.events}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> ProbeRow:
        """The row that `to_dict` wrote."""
        estimate = Estimate.from_dict(stored)
        return cls(stored["model"], stored["quantity"], stored["at"], estimate, stored["unit"], stored["events"])


@dataclass(frozen=True)
class Results:
    """The numbers that a report is built from; `results(cell, measure)` is an estimate over seeds.

    Measures of a cell are those of the checker, nll and ppl (of the first judge, or nll:JUDGE), any metric, committed,
    visible and nfe."""

    study: Study
    provenance: dict[str, Any]  # what these numbers were computed from, and where
    cells: dict[str, dict[str, Estimate]]  # cell -> measure
    probes: dict[str, list[ProbeRow]] = field(default_factory=dict)
    texts: dict[str, list[str]] = field(default_factory=dict)  # cell -> its first samples as text

    @property
    def judges(self) -> list[str]:
        """The judges' names in tables."""
        return self.study.judge_captions

    @property
    def checks(self) -> list[str]:
        """The measures that are a checker's, of all cells together."""
        return list(self.provenance.get("checks", ()))

    def __call__(self, cell: str, measure: str) -> Estimate:
        if cell not in self.cells:
            raise LimpetError(f"study {self.study.name} has no cell {cell!r}; it has {', '.join(self.cells)}")
        name, _, judge = measure.partition(":")
        if name == "ppl":
            nll = self(cell, f"nll:{judge}" if judge else "nll")
            return Estimate(np.exp(nll.values), nll.reasons)
        if measure in self.cells[cell]:
            return self.cells[cell][measure]
        if judge and judge not in self.judges:
            raise LimpetError(f"{judge!r} did not judge study {self.study.name}; {', '.join(self.judges)} did")
        measure = name if judge == self.judges[0] else measure
        if measure not in self.cells[cell]:
            raise LimpetError(f"study {self.study.name} has no measure {measure!r}")
        return self.cells[cell][measure]

    def values(self, cell: str, measure: str) -> Floats:
        """(seeds,) the values of a cell."""
        return self(cell, measure).values

    def contrast(self, *cells: str, measure: str = "nll") -> Estimate:
        """a - b of two cells, or (a - b) - (c - d) of four, paired by seed."""
        compared = statistics.paired if len(cells) == 2 else statistics.difference_of_differences
        return compared(*(self.values(cell, measure) for cell in cells))

    def matched(self, cell: str, curve: Sequence[str], on: str, measure: str = "nll") -> Estimate:
        """The cell's measure minus that of a curve of cells at the cell's own value of `on`, seed by seed."""
        nodes = [np.stack([self.values(node, what) for node in curve], 1) for what in (on, measure)]
        return statistics.matched(nodes[0], nodes[1], self.values(cell, on), self.values(cell, measure))

    def rows(self, cell: str | None = None) -> list[ProbeRow]:
        """The rows of one probe, or of all, in the order in which they first appeared."""
        return [row for name, rows in self.probes.items() if cell in (None, name) for row in rows]

    def find(self, quantity: str, model: str | None = None, **at: Any) -> list[ProbeRow]:
        """The rows of a quantity, of one model or of all, at the places that agree with `at`."""
        return [
            row
            for row in self.rows()
            if row.quantity == quantity and model in (None, row.model) and at.items() <= row.at.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        """Every number, as a report stores it."""
        cells = {
            cell: {name: _stored(self(cell, name)) for name in (*(("ppl",) if "nll" in measures else ()), *measures)}
            for cell, measures in self.cells.items()
        }
        rows = {probe: [row.to_dict() for row in rows] for probe, rows in self.probes.items()}
        return {"provenance": self.provenance, "cells": cells, "rows": rows}

    @classmethod
    def from_dict(cls, study: Study, stored: Mapping[str, Any]) -> Results:
        """The numbers of a stored report."""
        cells = {
            cell: {name: Estimate.from_dict(estimate) for name, estimate in measures.items()}
            for cell, measures in stored["cells"].items()
        }
        probes = {probe: list(map(ProbeRow.from_dict, rows)) for probe, rows in stored.get("rows", {}).items()}
        return cls(study, stored["provenance"], cells, probes)


def _stored(estimate: Estimate) -> dict[str, Any]:
    return {**estimate.to_dict(), **({"reasons": list(estimate.reasons)} if any(estimate.reasons) else {})}


def collect(study: Study, store: Store) -> Results:
    """The results of a study whose units are all finished."""
    plan = store.read_plan(units.plan_name(study))
    keys = {cell["name"]: cell["keys"] for cell in plan["cells"]}
    rows = {cell: [one for one in map(store.rows, own) if one is not None] for cell, own in keys.items()}
    if missing := sum(map(len, keys.values())) - sum(map(len, rows.values())):
        raise LimpetError(
            f"{missing} units of {study.full_name} are missing or damaged: run the study again, which computes only "
            "those"
        )
    cells = {cell.name: _measures(study, cell, rows[cell.name]) for cell in study.sample_cells}
    probes = {cell.name: _probe_rows(rows[cell.name]) for cell in study.cells if not isinstance(cell, Cell)}
    wanted = study.sample_cells if study.texts_per_cell else ()
    texts = {cell.name: rows[cell.name][0]["texts"][: study.texts_per_cell] for cell in wanted}
    return Results(study, _provenance(study, plan, rows), cells, probes, texts)


def _measures(study: Study, cell: Cell, seeds: Sequence[Mapping[str, Any]]) -> dict[str, Estimate]:
    """Every measure of a cell: the checker's first, then the judges', masks that the paper does not count last."""
    steps = max(1, cell.sampler.nfe - 1 - cell.warmup_calls)  # that may commit

    def column(rows: Mapping[str, Any], name: str) -> Floats:
        known = {"nfe": rows["nfe"], **rows["sets"], **rows["columns"]}
        return np.atleast_1d(np.array(known.get(name, 0), dtype=np.float64))  # NaN for None

    def measured(name: str) -> Estimate:
        what, _, judge = name.partition(":")
        if what != "nll":
            divisor = steps if name == "visible" else 1  # the paper counts visible positions per step
            return statistics.mean_se([statistics.mean(column(rows, name) / divisor) for rows in seeds])
        i = study.judge_captions.index(judge) if judge else 0
        nll, tokens = (np.array([column(rows, f"{what}:{i}").sum() for rows in seeds]) for what in ("nll", "tokens"))
        # The score of an impossible sample is infinite, which JSON cannot hold.
        reason = f"a sample is impossible under {study.judge_captions[i]}"
        reasons = tuple(reason if lost else None for lost in np.isnan(nll))
        return Estimate(nll / tokens, reasons if any(reasons) else ())

    is_judged = "nll:0" in seeds[0]["columns"]
    judged, others = (["nll"], [f"nll:{judge}" for judge in study.judge_captions[1:]]) if is_judged else ([], [])
    names = [*_checks(seeds), *judged, *study.metrics, "committed", "visible", "nfe", *others]
    stored = {name for rows in seeds for name in (*rows["sets"], *rows["columns"]) if not name.startswith(OF_A_JUDGE)}
    names += sorted(stored - set(names))
    return {name: measured(name) for name in names}


def _checks(seeds: Iterable[Mapping[str, Any]]) -> list[str]:
    """The measures of some units that are a checker's, in its order."""
    return list(dict.fromkeys(name for rows in seeds for name in rows.get("checks", ())))


def _probe_rows(seeds: Sequence[Mapping[str, Any]]) -> list[ProbeRow]:
    """The values of a probe over seeds; NaN under a seed without a value."""
    by_place: dict[bytes, dict[int, dict[str, Any]]] = {}
    for index, rows in enumerate(seeds):
        for value in rows["values"]:
            place = canonical_json([value["model"], value["quantity"], value["at"]])
            by_place.setdefault(place, {})[index] = value
    found = []
    for by_seed in by_place.values():
        one = next(iter(by_seed.values()))
        values = [by_seed[index]["value"] if index in by_seed else None for index in range(len(seeds))]
        events = [value["events"] for value in by_seed.values() if value["events"] is not None]
        estimate, total = Estimate(np.array(values, dtype=np.float64)), sum(events) if events else None
        found.append(ProbeRow(one["model"], one["quantity"], dict(one["at"]), estimate, one["unit"], total))
    return found


def _provenance(study: Study, plan: Mapping[str, Any], found: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """What decided these numbers, and every machine that computed some of them."""
    rows = [rows for cell in found.values() for rows in cell]
    counted = {
        judge: int(sum(sum(one["columns"].get(f"tokens:{i}", ())) for one in rows if "columns" in one))
        for i, judge in enumerate(study.judge_captions)
    }
    settings = dict.fromkeys(json.dumps(cell["settings"]) for cell in plan["cells"] if "settings" in cell)
    machines = sorted({json.dumps(one, sort_keys=True) for row in rows for one in row["provenance"]})
    return {
        "models": plan["models"],
        "judges": plan["judges"],
        "conventions": plan["conventions"],
        **({"checks": checks} if (checks := _checks(rows)) else {}),
        "counted tokens": counted if study.sample_cells and plan["judges"] else {},
        "seeds": plan["seeds"],
        "samples per seed": sorted({cell.n for cell in study.sample_cells}),
        "settings": [json.loads(one) for one in settings],
        "units": len(rows),
        "result version": plan["result_version"],
        "computed on": [json.loads(one) for one in machines],
    }
