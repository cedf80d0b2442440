"""Continuations of fixed prompts (appendix D.6; table 9 and its contrasts)."""

from __future__ import annotations

from collections.abc import Iterator

from limpet.experiments import DIVERSITY_METRICS, Table
from limpet.paper.studies.presets import Preset, defined_cells
from limpet.paper.studies.published import PaperResults

ROWS = {"1.0": ("0", "short", "unlimited"), "0.9": ("short",), "0.8": ("0", "short", "unlimited")}  # horizons by late p

cells = defined_cells("continuation")


def tables(results: PaperResults, preset: Preset) -> Iterator[Table]:
    captions = preset.horizon_captions
    late = {f"prompt/{p}/{h}": (f"Late {p}", captions[h]) for p, horizons in ROWS.items() for h in horizons}
    others = {"prompt/all 0.8/0": ("All 0.8", captions["0"])}, {"prompt/mend": ("Mend", captions["unlimited"])}
    measures = (*(f"ppl:{judge}" for judge in results.judges), *DIVERSITY_METRICS[:3])
    yield results.measure_table("continuation", [late, *others], measures)
    policies = {"prompt/all 0.8/0": ("p=0.8 at every step, H=0",)}
    policies |= {f"prompt/0.8/{h}": (f"late p=0.8, H={captions[h]}",) for h in ("short", "unlimited")}
    yield results.measure_table("continuation-self-bleu", [policies], ["self-bleu"])
