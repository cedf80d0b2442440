"""Selection that starts later, by how long labels stay visible (section 5.2, appendix D.4; tables 6, 7; figure 3)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from limpet.diffusion.process import warmup_steps
from limpet.experiments.contents import Contrast, Entry, Panel, Table, signed
from limpet.experiments.study import Cell
from limpet.paper.studies.presets import Preset
from limpet.paper.studies.published import Beside, row, ticks

WARMUPS = (0.016, 0.17, 0.33, 0.5)
ENDS = {"native": "native", "ever": "CRS"}  # of the horizons


def cells(preset: Preset) -> Iterable[Cell]:
    return (
        Cell(f"{f}/{'native' if horizon == '0' else horizon}", preset.distilled, sampler, preset.fine_n)
        for f in WARMUPS
        for horizon, sampler in preset.horizons(preset.crs.replace(warmup=f)).items()
    )


def tables(results: Beside, preset: Preset) -> Iterator[Table]:
    def ends(f: float) -> Iterator[Entry]:
        for measure in ("ppl", "entropy"):
            for end in ENDS:
                yield from results.entries(f"{f}/{end}", [measure])

    def horizons(f: float) -> Iterator[Entry]:
        for shorter, longer in pairwise(("native", "short", "ever")):
            for measure, digits in (("nll", 3), ("entropy", 4)):
                cells = f"{f}/{longer}", f"{f}/{shorter}"
                yield Entry(
                    signed(results.contrast(*cells, measure=measure), digits), results.paper(row(*cells), measure)
                )

    for name, entries in (("warmup", ends), ("warmup-horizons", horizons)):
        yield results.table(name, [[(Entry(str(warmup_steps(preset.nfe, f))), *entries(f)) for f in WARMUPS]])


def panels(results: Beside, preset: Preset) -> Iterator[Panel]:
    steps = [float(warmup_steps(preset.nfe, f)) for f in WARMUPS]
    lines = tuple(
        results.noted(name, [f"{f}/{end}" for f in WARMUPS], steps, "entropy", note="ppl") for end, name in ENDS.items()
    )
    axes = preset.captions["distilled"], "steps before the first selection", "unigram entropy"
    yield Panel(*axes, lines, ticks(steps))


def contrasts(results: Beside, preset: Preset) -> Iterator[Contrast]:
    """What unigram entropy does not see, at the paper's warmup."""
    short, ever = "0.33/short", "0.33/ever"
    for measure in ("dist-4", "rep-4", "self-bleu"):
        paper = " to ".join(results.paper(cell, measure) for cell in (short, ever))
        name = f"{measure}, visible for ever less {preset.horizon} steps, warmup 0.33"
        yield Contrast(name, results.contrast(ever, short, measure=measure), paper)
