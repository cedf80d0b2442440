"""Later selection, by how long committed tokens stay visible (section 5.2, appendix D.4; tables 6, 7; figure 3)."""

from collections.abc import Iterator
from itertools import pairwise

from limpet.diffusion.process import warmup_steps
from limpet.experiments import Contrast, Entry, Panel, Table, format_signed
from limpet.paper.studies.presets import Preset
from limpet.paper.studies.published import PaperResults, row_name, ticks

WARMUPS = (0.016, 0.17, 0.33, 0.5)
SAMPLERS = {"native": "native", "unlimited": "CRS"}  # the two ends of the horizons


def tables(results: PaperResults, preset: Preset) -> Iterator[Table]:
    def by_sampler(f: float) -> Iterator[Entry]:
        for measure in ("ppl", "entropy"):
            for sampler in SAMPLERS:
                yield from results.entries(f"{f}/{sampler}", [measure])

    def by_horizon(f: float) -> Iterator[Entry]:
        for shorter, longer in pairwise(("native", "short", "unlimited")):
            cells = f"{f}/{longer}", f"{f}/{shorter}"
            for measure, digits in (("nll", 3), ("entropy", 4)):
                difference = format_signed(results.contrast(*cells, measure=measure), digits)
                yield Entry(difference, results.paper_text(row_name(*cells), measure))

    for name, entries in (("warmup", by_sampler), ("warmup-horizons", by_horizon)):
        yield results.table(name, [[(Entry(str(warmup_steps(preset.nfe, f))), *entries(f)) for f in WARMUPS]])


def panels(results: PaperResults, preset: Preset) -> Iterator[Panel]:
    steps = [float(warmup_steps(preset.nfe, f)) for f in WARMUPS]
    lines = []
    for sampler, caption in SAMPLERS.items():
        cells = [f"{f}/{sampler}" for f in WARMUPS]
        lines.append(results.annotated_series(caption, cells, steps, "entropy", note="ppl"))
    axes = preset.captions["distilled"], "steps before the first selection", "unigram entropy, nats"
    yield Panel(*axes, lines, ticks(steps))


def contrasts(results: PaperResults, preset: Preset) -> Iterator[Contrast]:
    """What unigram entropy does not show, at the paper's warmup."""
    short, unlimited = "0.33/short", "0.33/unlimited"
    for measure in ("dist-4", "rep-4", "self-bleu"):
        paper = " to ".join(results.paper_text(cell, measure) for cell in (short, unlimited))
        name = f"{measure}, H=∞ minus H={preset.horizon}, warmup 0.33"
        yield Contrast(name, results.contrast(unlimited, short, measure=measure), paper)
