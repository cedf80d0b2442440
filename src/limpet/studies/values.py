"""Other tokens at the selected positions (section 5.2, appendix E.2): all else is replayed."""

from __future__ import annotations

from collections.abc import Callable

from limpet.lab.claims import Claim, Finding, above, below, claim
from limpet.lab.page import Contrast, Entry, Page, Table, entry
from limpet.lab.results import Results
from limpet.lab.study import Cell, Study
from limpet.studies.presets import Preset
from limpet.studies.published import nll_difference

ARMS = {"argmax": "argmax", "second": "second-ranked", "nucleus": "top-p=0.9 alternative", "refreshed": "refreshed"}
PAPER = {
    "argmax": "28.27 ± 0.53", "second": "77.75 ± 1.80", "nucleus": "78.36 ± 1.56", "refreshed": "26.42 ± 0.39",
    "native": "41.79 ± 0.84",
}  # fmt: skip


def study(preset: Preset) -> Study:
    cells = [
        Cell("native", preset.distilled, preset.native, preset.n),
        Cell("argmax", preset.distilled, preset.policy, preset.n),
        *(
            Cell(values, preset.distilled, preset.policy.but(values=values), preset.n, replay="argmax")
            for values in ARMS
            if values != "argmax"
        ),
    ]

    def show(results: Results) -> Page:
        return Page(tables=(_table(results, preset),), contrasts=_contrasts(results), claims=_claims(results))

    return Study(
        "values", "Do the values of selected tokens matter?", tuple(cells), preset.shards, show, preset.judges,
        preset=preset.name,
    )  # fmt: skip


def _table(results: Results, preset: Preset) -> Table:
    rows = tuple(
        (Entry(label), entry(results(cell, "ppl"), 2, PAPER[cell]), entry(results(cell, "entropy"), 3))
        for cell, label in {**ARMS, "native": "none (native)"}.items()
    )
    caption = f"{preset.labels['distilled']}: selected positions of one CRS run with other values; {preset.nfe} calls."
    return Table("values", caption, ("Value of a label", "GenPPL", "Entropy"), (rows,))


def _contrasts(results: Results) -> tuple[Contrast, ...]:
    return tuple(
        Contrast(
            f"NLL of {ARMS[arm]} less argmax",
            results.contrast(arm, "argmax"),
            f"{nll_difference(PAPER[arm], PAPER['argmax']):+.3f}",
        )
        for arm in ARMS
        if arm != "argmax"
    )


def _claims(results: Results) -> tuple[Claim, ...]:
    def less(side: Callable[..., Finding], arm: str, against: str) -> Finding:
        label = {**ARMS, "native": "native"}
        return side(
            f"NLL of {label[arm]} less {label[against]}",
            results.contrast(arm, against),
            paper=nll_difference(PAPER[arm], PAPER[against]),
        )

    return (
        claim(
            "section 5.2",
            "Replacing stored argmax labels by nearby alternatives reverses the likelihood gain over native sampling",
            [less(above, arm, "native") for arm in ("second", "nucleus")],
        ),
        claim(
            "appendix E.2",
            "Token identity matters: nearby alternatives at the same positions have higher NLL than argmax labels",
            [less(above, arm, "argmax") for arm in ("second", "nucleus")],
        ),
        claim(
            "appendix E.2",
            "Immutable identity is not required: values refreshed from each current argmax keep the gain over native",
            [less(below, "refreshed", "native")],
        ),
        claim("appendix E.2", "Refreshed values have lower NLL than stored ones", [less(below, "refreshed", "argmax")]),
    )
