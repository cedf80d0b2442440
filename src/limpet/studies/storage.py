"""Labels copied to the output, or also shown to the denoiser (appendix D.8; figure 5).

Final-only replays the positions, steps and labels of a CRS run on a path that never sees them, and copies them to
the output, as does the CRS arm beside it: only the input differs."""

from __future__ import annotations

from limpet.lab.claims import Claim, below, claim
from limpet.lab.page import Contrast, Entry, Figure, Page, Panel, Series, Table, entry
from limpet.lab.results import Results
from limpet.lab.study import Cell, Study
from limpet.studies.presets import Preset

MASSES = (1.0, 0.9, 0.85, 0.8)  # after a warmup at 0.9; the paper does not list its sweep
ARMS = {"revisable": "revisable", "final-only": "final-only", "CRS": "CRS, copied"}


def study(preset: Preset) -> Study:
    cells: list[Cell] = []
    for p in MASSES:
        crs = preset.policy.but(top_p=0.9, late_top_p=p, write="both")
        final_only = crs.but(write="output", values="recorded")
        cells += [
            Cell(f"{p}/CRS", preset.distilled, crs, preset.n),
            Cell(f"{p}/final-only", preset.distilled, final_only, preset.n, replay=f"{p}/CRS"),
            Cell(f"{p}/revisable", preset.distilled, crs.but(horizon=0, write="input"), preset.n),
        ]

    def show(results: Results) -> Page:
        return Page(
            tables=(_table(results, preset),), figures=(_figure(results),), contrasts=_contrasts(results),
            claims=_claims(results),
        )  # fmt: skip

    return Study(
        "storage", "Stored labels, or visible ones?", tuple(cells), preset.shards, show, preset.judges,
        preset=preset.name,
    )  # fmt: skip


def _table(results: Results, preset: Preset) -> Table:
    def row(p: float, arm: str) -> tuple[Entry, ...]:
        cell = f"{p}/{arm}"
        return Entry(f"{p:g}"), Entry(ARMS[arm]), entry(results(cell, "ppl"), 2), entry(results(cell, "entropy"), 3)

    return Table(
        "storage",
        f"{preset.labels['distilled']}: warmup at p=0.9, then the late p; {preset.nfe} calls.",
        ("Late p", "Arm", "GenPPL", "Entropy"),
        tuple(tuple(row(p, arm) for arm in ARMS) for p in MASSES),
        labels=2,
    )


def _figure(results: Results) -> Figure:
    def series(arm: str, over: str) -> Series:
        ppl = [results(f"{p}/{arm}", "ppl") for p in MASSES]
        entropy = tuple(results(f"{p}/{arm}", "entropy").mean for p in MASSES)
        return Series(ARMS[arm], entropy if over == "entropy" else MASSES,
                      tuple(e.mean for e in ppl), tuple(e.se for e in ppl))  # fmt: skip

    ticks = tuple((p, f"{p:g}") for p in MASSES)
    panels = (
        Panel("over diversity", "unigram entropy", "GenPPL", tuple(series(arm, "entropy") for arm in ARMS),
              log_y=True),
        Panel("over late top-p", "late top-p", "GenPPL", tuple(series(arm, "p") for arm in ARMS), ticks,
              log_y=True, reverse_x=True),
    )  # fmt: skip
    return Figure("storage", "The storage-output control.", panels)


def _contrasts(results: Results) -> tuple[Contrast, ...]:
    return tuple(
        Contrast(f"NLL of {name}, late p={p:g}", results.contrast(f"{p}/{a}", f"{p}/{b}"))
        for p in MASSES
        for name, a, b in (("CRS less final-only", "CRS", "final-only"),
                           ("final-only less revisable", "final-only", "revisable"))
    )  # fmt: skip


def _claims(results: Results) -> tuple[Claim, ...]:
    return (
        claim(
            "appendix D.8",
            "Repeated input visibility improves likelihood beyond storing the same labels in the output",
            [below(f"NLL of CRS less final-only, late p={p:g}", results.contrast(f"{p}/CRS", f"{p}/final-only"))
             for p in MASSES],
        ),
    )  # fmt: skip
