"""Late top-p by visibility, the complete unconditional factorial (appendix D.5; table 8)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from limpet.lab.claims import Claim, Finding, below, claim
from limpet.lab.page import Table
from limpet.lab.study import DIVERSITY, Cell
from limpet.studies.presets import Preset
from limpet.studies.published import Beside

TITLE = "Late top-p by visibility"
MASSES = (1.0, 0.9, 0.85, 0.8)


def cells(preset: Preset) -> tuple[Cell, ...]:
    """Cells late/MASS/HORIZON: full support until the first selection, then MASS."""
    return tuple(
        Cell(f"late/{p}/{horizon}", preset.distilled, sampler, preset.n)
        for p in MASSES
        for horizon, sampler in preset.horizons(preset.crs.but(late_top_p=p)).items()
    )


def tables(results: Beside, preset: Preset) -> Iterator[Table]:
    model = preset.captions["distilled"]
    caption = f"{model}: top-p after a full-support warmup, by visibility; {preset.nfe} calls."
    groups = [{f"late/{p}/{horizon}": (f"{p:g}", h) for horizon, h in preset.shown.items()} for p in MASSES]
    yield results.table("factorial", caption, ("Late p", "H"), groups, ("ppl", *DIVERSITY))


def claims(results: Beside, preset: Preset) -> Iterator[Claim]:
    def lower(what: str, cell: str, against: str) -> Finding:
        return results.finding(below, f"NLL of {what}", f"late/{cell}", f"late/{against}")

    h = preset.horizon
    useful = [lower(f"H={h} less H=0, late p={p:g}", f"{p}/short", f"{p}/0") for p in MASSES]
    yield claim("appendix D.7", f"Temporary context, {h} steps long, remains useful at every late top-p", useful)
    persistent = [lower(f"H=∞ less H=0, late p={p:g}", f"{p}/ever", f"{p}/0") for p in MASSES]
    yield claim("appendix D.5", "Persistent context lowers NLL against none at every late top-p", persistent)
    stronger = [lower(f"late p={b:g} less {a:g}, H=0", f"{b}/0", f"{a}/0") for a, b in pairwise(MASSES)]
    yield claim("appendix D.5", "Stronger restriction lowers NLL where nothing is selected", stronger)
