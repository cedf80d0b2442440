"""Labels copied to the output, or also shown to the denoiser (appendix D.8; figure 5).

Final-only replays the positions, steps and labels of a CRS run on a path that never sees them, and copies them to
the output, as does the CRS arm beside it: only the input differs. Beside them, and not in the paper, CRS with the same
parameters whose labels may be mended."""

from __future__ import annotations

from collections.abc import Iterator

from limpet.experiments.contents import Contrast, Panel, Series, Table
from limpet.experiments.study import Cell
from limpet.paper.studies.presets import Preset
from limpet.paper.studies.published import Beside, ticks
from limpet.samplers import Mend

MASSES = (1.0, 0.9, 0.85, 0.8)  # after a warmup at 0.9; the paper does not list its sweep
ARMS = {"revisable": "revisable", "final-only": "final-only", "CRS": "CRS, copied", "mend": "the same, mended"}


def cells(preset: Preset) -> Iterator[Cell]:
    for p in MASSES:
        crs = preset.crs.replace(top_p=0.9, late_top_p=p, write="both")
        final_only = crs.replace(write="output", values="recorded")
        yield Cell(f"{p}/CRS", preset.distilled, crs, preset.n)
        yield Cell(f"{p}/final-only", preset.distilled, final_only, preset.n, replay=f"{p}/CRS")
        params = {param: value for param, value in crs.to_dict().items() if param != "sampler"}
        yield Cell(f"{p}/mend", preset.distilled, Mend(**params), preset.n)
        yield Cell(f"{p}/revisable", preset.distilled, preset.horizons(crs)["0"], preset.n)


def tables(results: Beside, preset: Preset) -> Iterator[Table]:
    groups = [{f"{p}/{arm}": (f"{p:g}", name) for arm, name in ARMS.items()} for p in MASSES]
    yield results.measured("storage", groups)


def panels(results: Beside, preset: Preset) -> Iterator[Panel]:
    def series(over: str | tuple[float, ...]) -> list[Series]:
        return [results.series(name, [f"{p}/{arm}" for p in MASSES], over) for arm, name in ARMS.items()]

    yield Panel("over diversity", "unigram entropy", "GenPPL", series("entropy"), log_y=True)
    yield Panel("over late top-p", "late top-p", "GenPPL", series(MASSES), ticks(MASSES), log_y=True, reverse_x=True)


def contrasts(results: Beside, preset: Preset) -> Iterator[Contrast]:
    for p in MASSES:
        for arm, against in (("CRS", "final-only"), ("final-only", "revisable"), ("mend", "CRS")):
            estimate = results.contrast(f"{p}/{arm}", f"{p}/{against}")
            yield Contrast(f"NLL of {arm} less {against}, late p={p:g}", estimate)
