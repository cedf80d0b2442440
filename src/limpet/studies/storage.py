"""Labels copied to the output, or also shown to the denoiser (appendix D.8; figure 5).

Final-only replays the positions, steps and labels of a CRS run on a path that never sees them, and copies them to
the output, as does the CRS arm beside it: only the input differs."""

from __future__ import annotations

from collections.abc import Iterator

from limpet.lab.claims import Claim, below, claim
from limpet.lab.page import Contrast, Figure, Panel, Series, Table
from limpet.lab.study import Cell
from limpet.studies.presets import Preset
from limpet.studies.published import Beside, ticks

TITLE = "Stored labels, or visible ones?"
MASSES = (1.0, 0.9, 0.85, 0.8)  # after a warmup at 0.9; the paper does not list its sweep
ARMS = {"revisable": "revisable", "final-only": "final-only", "CRS": "CRS, copied"}


def cells(preset: Preset) -> Iterator[Cell]:
    for p in MASSES:
        crs = preset.crs.but(top_p=0.9, late_top_p=p, write="both")
        final_only = crs.but(write="output", values="recorded")
        yield Cell(f"{p}/CRS", preset.distilled, crs, preset.n)
        yield Cell(f"{p}/final-only", preset.distilled, final_only, preset.n, replay=f"{p}/CRS")
        yield Cell(f"{p}/revisable", preset.distilled, preset.horizons(crs)["0"], preset.n)


def tables(results: Beside, preset: Preset) -> Iterator[Table]:
    caption = f"{preset.captions['distilled']}: warmup at p=0.9, then the late p; {preset.nfe} calls."
    groups = [{f"{p}/{arm}": (f"{p:g}", name) for arm, name in ARMS.items()} for p in MASSES]
    yield results.table("storage", caption, ("Late p", "Arm"), groups)


def figures(results: Beside, preset: Preset) -> Iterator[Figure]:
    def series(over: str | tuple[float, ...]) -> tuple[Series, ...]:
        return tuple(results.series(name, [f"{p}/{arm}" for p in MASSES], over) for arm, name in ARMS.items())

    panels = (
        Panel("over diversity", "unigram entropy", "GenPPL", series("entropy"), log_y=True),
        Panel("over late top-p", "late top-p", "GenPPL", series(MASSES), ticks(MASSES), log_y=True, reverse_x=True),
    )
    yield Figure("storage", "The storage-output control.", panels)


def contrasts(results: Beside, preset: Preset) -> Iterator[Contrast]:
    for p in MASSES:
        for arm, against in (("CRS", "final-only"), ("final-only", "revisable")):
            estimate = results.contrast(f"{p}/{arm}", f"{p}/{against}")
            yield Contrast(f"NLL of {arm} less {against}, late p={p:g}", estimate)


def claims(results: Beside, preset: Preset) -> Iterator[Claim]:
    yield claim(
        "appendix D.8",
        "Repeated input visibility improves likelihood beyond storing the same labels in the output",
        [results.finding(below, f"NLL of CRS less final-only, late p={p:g}", f"{p}/CRS", f"{p}/final-only")
         for p in MASSES],
    )  # fmt: skip
