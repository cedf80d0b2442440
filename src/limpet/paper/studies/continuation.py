"""Continuations of fixed prompts (appendix D.6; table 9 and its contrasts)."""

from __future__ import annotations

from collections.abc import Iterator

from limpet.experiments import DIVERSITY_METRICS, Cell, Table
from limpet.paper.studies.presets import Preset
from limpet.paper.studies.published import PaperResults
from limpet.samplers import CRS, Sampler

ROWS = (  # late top-p and horizon of the table's rows; the last has top-p at every step
    ("1.0", "0"),
    ("1.0", "short"),
    ("1.0", "unlimited"),
    ("0.9", "short"),
    ("0.8", "0"),
    ("0.8", "short"),
    ("0.8", "unlimited"),
    ("all 0.8", "0"),
)


def cells(preset: Preset) -> tuple[Cell, ...]:
    """Cells prompt/LATE/HORIZON, and Mend with its defaults."""

    def crs(late: str) -> CRS:
        is_global = late.startswith("all ")
        return preset.crs.replace(**{"top_p" if is_global else "late_top_p": float(late.removeprefix("all "))})

    samplers: dict[str, Sampler] = {
        f"prompt/{late}/{horizon}": preset.horizons(crs(late))[horizon] for late, horizon in ROWS
    }
    return tuple(
        Cell(name, preset.distilled, sampler, preset.prompted_n, preset.prompted_length, preset.prompts)
        for name, sampler in {**samplers, "prompt/mend": preset.mend}.items()
    )


def tables(results: PaperResults, preset: Preset) -> Iterator[Table]:
    captions = preset.horizon_captions

    def names(late: str, horizon: str) -> tuple[str, str]:
        return late.capitalize() if late.startswith("all") else f"Late {late}", captions[horizon]

    groups = [{f"prompt/{late}/{h}": names(late, h) for late, h in rows} for rows in (ROWS[:-1], ROWS[-1:])]
    groups.append({"prompt/mend": ("Mend", captions["unlimited"])})
    measures = (*(f"ppl:{judge}" for judge in results.judges), *DIVERSITY_METRICS[:3])
    yield results.measure_table("continuation", groups, measures)
    policies = {"prompt/all 0.8/0": ("p=0.8 at every step, H=0",)}
    policies |= {f"prompt/0.8/{h}": (f"late p=0.8, H={captions[h]}",) for h in ("short", "unlimited")}
    yield results.measure_table("continuation-self-bleu", [policies], ["self-bleu"])
