"""Late top-p by visibility, the complete unconditional factorial (appendix D.5; table 8)."""

from __future__ import annotations

from itertools import pairwise

from limpet.lab.claims import Claim, Finding, below, claim
from limpet.lab.page import Entry, Page, Table, entry
from limpet.lab.results import Results
from limpet.lab.study import DIVERSITY, Cell, Study
from limpet.studies.presets import Preset
from limpet.studies.published import nll_difference

MASSES = (1.0, 0.9, 0.85, 0.8)
HORIZONS = ("0", "short", "ever")

PAPER = {
    (1.0, "0"): ("41.79", "5.351", "0.9483", "0.0272", "0.2113"),
    (1.0, "short"): ("33.84", "5.317", "0.9405", "0.0330", "0.2205"),
    (1.0, "ever"): ("28.27", "5.317", "0.9359", "0.0367", "0.2248"),
    (0.9, "0"): ("32.79", "5.332", "0.9432", "0.0306", "0.2207"),
    (0.9, "short"): ("26.94", "5.303", "0.9346", "0.0368", "0.2294"),
    (0.9, "ever"): ("26.40", "5.302", "0.9323", "0.0389", "0.2292"),
    (0.85, "0"): ("30.58", "5.321", "0.9415", "0.0316", "0.2235"),
    (0.85, "short"): ("25.66", "5.293", "0.9328", "0.0388", "0.2293"),
    (0.85, "ever"): ("25.74", "5.292", "0.9328", "0.0391", "0.2285"),
    (0.8, "0"): ("28.38", "5.302", "0.9388", "0.0334", "0.2275"),
    (0.8, "short"): ("24.51", "5.279", "0.9308", "0.0399", "0.2331"),
    (0.8, "ever"): ("24.89", "5.283", "0.9299", "0.0414", "0.2305"),
}


def cells(preset: Preset) -> tuple[Cell, ...]:
    """Cells late/MASS/HORIZON: full support until the first selection, then MASS."""
    steps = {"0": 0, "short": preset.horizon, "ever": None}
    return tuple(
        Cell(f"late/{p}/{name}", preset.distilled, preset.policy.but(late_top_p=p, horizon=steps[name]), preset.n)
        for p in MASSES
        for name in HORIZONS
    )


def study(preset: Preset) -> Study:
    def show(results: Results) -> Page:
        return Page(tables=(_table(results, preset),), claims=_claims(results, preset))

    return Study(
        "factorial", "Late top-p by visibility", cells(preset), preset.shards, show, preset.judges, preset=preset.name
    )


def _table(results: Results, preset: Preset) -> Table:
    shown = {"0": "0", "short": str(preset.horizon), "ever": "∞"}

    def row(p: float, horizon: str) -> tuple[Entry, ...]:
        cell, paper = f"late/{p}/{horizon}", PAPER[p, horizon]
        measures = [("ppl", 2), *((name, 3 if name == "entropy" else 4) for name in DIVERSITY)]
        entries = (
            entry(results(cell, measure), digits, value)
            for (measure, digits), value in zip(measures, paper, strict=True)
        )
        return Entry(f"{p:g}"), Entry(shown[horizon]), *entries

    return Table(
        "factorial",
        f"{preset.labels['distilled']}: top-p after a full-support warmup, by visibility; {preset.nfe} calls.",
        ("Late p", "H", "GenPPL", "Entropy", "Dist-4", "Rep-4", "Self-BLEU"),
        tuple(tuple(row(p, horizon) for horizon in HORIZONS) for p in MASSES),
        labels=2,
    )


def _claims(results: Results, preset: Preset) -> tuple[Claim, ...]:
    def lower(label: str, cell: tuple[float, str], against: tuple[float, str]) -> Finding:
        estimate = results.contrast(*(f"late/{p}/{horizon}" for p, horizon in (cell, against)))
        return below(f"NLL of {label}", estimate, paper=nll_difference(PAPER[cell][0], PAPER[against][0]))

    return (
        claim(
            "appendix D.7",
            f"Temporary context, {preset.horizon} steps long, remains useful at every late top-p",
            [lower(f"H={preset.horizon} less H=0, late p={p:g}", (p, "short"), (p, "0")) for p in MASSES],
        ),
        claim(
            "appendix D.5",
            "Persistent context lowers NLL against none at every late top-p",
            [lower(f"H=∞ less H=0, late p={p:g}", (p, "ever"), (p, "0")) for p in MASSES],
        ),
        claim(
            "appendix D.5",
            "Stronger restriction lowers NLL where nothing is selected",
            [lower(f"late p={b:g} less {a:g}, H=0", (b, "0"), (a, "0")) for a, b in pairwise(MASSES)],
        ),
    )
