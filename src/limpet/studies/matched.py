"""CRS against top-p at equal diversity, by four statistics (appendix E.4): the frontier's distilled cells again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from limpet.lab.claims import Finding, above, alike, below
from limpet.lab.page import Entry, Table, signed
from limpet.lab.study import DIVERSITY, Cell
from limpet.studies import frontier
from limpet.studies.presets import Preset
from limpet.studies.published import NAMES, Beside, Claims, Side, printed


def cells(preset: Preset) -> Iterable[Cell]:
    return frontier.sweep(preset, "distilled")


def tables(results: Beside, preset: Preset) -> Iterator[Table]:
    def residual(cell: str, on: str) -> Entry:
        estimate = frontier.residual(results, preset, cell, on)
        return Entry(signed(estimate, 3), results.paper(f"{cell} at equal {on}", "nll"))

    rows = ((Entry(f"D={d:g}L"), *(residual(f"distilled/D/{d}", on) for on in DIVERSITY)) for d in frontier.BUDGETS)
    yield results.table("matched", [rows], *(NAMES[on] for on in DIVERSITY))


def claims(results: Beside, preset: Preset) -> Claims:
    def residual(side: Side, on: str) -> Finding:
        cell = "distilled/D/0.5"
        estimate, paper = frontier.residual(results, preset, cell, on), printed("nll", f"{cell} at equal {on}")
        return side(f"NLL residual, matched on {NAMES[on]}", estimate, paper=paper)

    return {
        "lower": [residual(below, "self-bleu")],
        "close": [residual(alike, "dist-4")],
        "higher": [residual(above, "rep-4")],
    }
