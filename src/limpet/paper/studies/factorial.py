"""Late top-p by visibility, the complete unconditional factorial (appendix D.5; table 8)."""

from __future__ import annotations

from collections.abc import Iterator

from limpet.experiments import DIVERSITY_METRICS, Cell, Table
from limpet.paper.studies.presets import Preset
from limpet.paper.studies.published import PaperResults

TOP_PS = (1.0, 0.9, 0.85, 0.8)


def cells(preset: Preset) -> tuple[Cell, ...]:
    """Cells late/TOP_P/HORIZON: full support until the first selection, then TOP_P."""
    return tuple(
        Cell(f"late/{p}/{horizon}", preset.distilled, sampler, preset.n)
        for p in TOP_PS
        for horizon, sampler in preset.horizons(preset.crs.replace(late_top_p=p)).items()
    )


def tables(results: PaperResults, preset: Preset) -> Iterator[Table]:
    captions = preset.horizon_captions.items()
    groups = [{f"late/{p}/{horizon}": (f"{p:g}", caption) for horizon, caption in captions} for p in TOP_PS]
    yield results.measure_table("factorial", groups, ("ppl", *DIVERSITY_METRICS))
