"""Late top-p by visibility, the complete unconditional factorial (appendix D.5; table 8)."""

from __future__ import annotations

from collections.abc import Iterator

from limpet.experiments.contents import Table
from limpet.experiments.study import DIVERSITY, Cell
from limpet.paper.studies.presets import Preset
from limpet.paper.studies.published import Beside

MASSES = (1.0, 0.9, 0.85, 0.8)


def cells(preset: Preset) -> tuple[Cell, ...]:
    """Cells late/MASS/HORIZON: full support until the first selection, then MASS."""
    return tuple(
        Cell(f"late/{p}/{horizon}", preset.distilled, sampler, preset.n)
        for p in MASSES
        for horizon, sampler in preset.horizons(preset.crs.replace(late_top_p=p)).items()
    )


def tables(results: Beside, preset: Preset) -> Iterator[Table]:
    groups = [{f"late/{p}/{horizon}": (f"{p:g}", h) for horizon, h in preset.shown.items()} for p in MASSES]
    yield results.measured("factorial", groups, ("ppl", *DIVERSITY))
