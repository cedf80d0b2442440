"""Late top-p by visibility, the complete unconditional factorial (appendix D.5; table 8)."""

from __future__ import annotations

from collections.abc import Iterator

from limpet.experiments import DIVERSITY_METRICS, Table
from limpet.paper.studies.presets import Preset, defined_cells
from limpet.paper.studies.published import PaperResults

TOP_PS = (1.0, 0.9, 0.85, 0.8)


cells = defined_cells("factorial")


def tables(results: PaperResults, preset: Preset) -> Iterator[Table]:
    captions = preset.horizon_captions.items()
    groups = [{f"late/{p}/{horizon}": (f"{p:g}", caption) for horizon, caption in captions} for p in TOP_PS]
    yield results.measure_table("factorial", groups, ("ppl", *DIVERSITY_METRICS))
