"""CRS against top-p at equal diversity, by four statistics (appendix E.4): the frontier's distilled cells again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from limpet.evaluation.statistics import Estimate
from limpet.experiments.claims import Printed, above, below, within
from limpet.experiments.contents import Entry, Table, signed
from limpet.experiments.study import DIVERSITY, Cell
from limpet.paper.studies import frontier
from limpet.paper.studies.presets import Preset
from limpet.paper.studies.published import NAMES, Beside, Claims, printed


def cells(preset: Preset) -> Iterable[Cell]:
    return frontier.sweep(preset, "distilled")


def tables(results: Beside, preset: Preset) -> Iterator[Table]:
    def residual(cell: str, on: str) -> Entry:
        estimate = frontier.residual(results, preset, cell, on)
        return Entry(signed(estimate, 3), results.paper(f"{cell} at equal {on}", "nll"))

    rows = ((Entry(f"D={d:g}L"), *(residual(f"distilled/D/{d}", on) for on in DIVERSITY)) for d in frontier.BUDGETS)
    yield results.table("matched", [rows], *(NAMES[on] for on in DIVERSITY))


def claims(results: Beside, preset: Preset) -> Claims:
    def residual(on: str) -> tuple[str, Estimate, Printed | None]:
        cell = "distilled/D/0.5"
        estimate, paper = frontier.residual(results, preset, cell, on), printed("nll", f"{cell} at equal {on}")
        return f"NLL residual, matched on {NAMES[on]}", estimate, paper

    (bleu, lower, its), (dist, near, at_dist), (rep, higher, at_rep) = map(residual, ("self-bleu", "dist-4", "rep-4"))
    effect = residual("entropy")[2]
    assert effect is not None
    return {
        "lower": [below(bleu, lower, paper=its)],
        "close": [within(dist, near, abs(effect.mean) / 2, at_dist)],
        "higher": [above(rep, higher, paper=at_rep)],
    }
