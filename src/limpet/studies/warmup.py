"""Selection that starts later, by how long labels stay visible (section 5.2, appendix D.4; tables 6, 7; figure 3)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

from limpet.engine.process import warmup_steps
from limpet.lab.claims import Claim, Finding, above, below, claim, within
from limpet.lab.page import Contrast, Entry, Figure, Panel, Table, signed
from limpet.lab.study import Cell
from limpet.studies.presets import Preset
from limpet.studies.published import NAMES, Beside, Side, row, ticks

TITLE = "What changes when selection starts later?"
WARMUPS = (0.016, 0.17, 0.33, 0.5)
ENDS = {"native": "native", "ever": "CRS"}  # of the horizons
STABLE = 0.05  # nats: the paper's native GenPPL moves by 1% over the warmups, so five times that is still stable
STABLE_ENTROPY = 0.02  # its native entropy moves by 0.008
UNCHANGED = 0.01  # nats: a third of what the first steps of visibility cost there


def cells(preset: Preset) -> Iterable[Cell]:
    return (
        Cell(f"{f}/{'native' if horizon == '0' else horizon}", preset.distilled, sampler, preset.fine_n)
        for f in WARMUPS
        for horizon, sampler in preset.horizons(preset.crs.but(warmup=f)).items()
    )


def tables(results: Beside, preset: Preset) -> Iterator[Table]:
    def table(name: str, caption: str, head: Iterable[str], entries: Callable[[float], Iterable[Entry]]) -> Table:
        rows = tuple((Entry(str(warmup_steps(preset.nfe, f))), *entries(f)) for f in WARMUPS)
        return Table(name, caption, ("Warmup steps", *head), (rows,))

    def ends(f: float) -> Iterator[Entry]:
        for measure in ("ppl", "entropy"):
            for end in ENDS:
                yield from results.entries(f"{f}/{end}", [measure])

    def horizons(f: float) -> Iterator[Entry]:
        for shorter, longer in pairwise(("native", "short", "ever")):
            for measure, digits in (("nll", 3), ("entropy", 4)):
                cells = f"{f}/{longer}", f"{f}/{shorter}"
                yield Entry(signed(results.contrast(*cells, measure), digits), results.paper(row(*cells), measure))

    h = preset.horizon
    caption = f"{preset.captions['distilled']}: native sampling and CRS by warmup, {preset.nfe} calls."
    yield table("warmup", caption, ("Native GenPPL", "CRS GenPPL", "Native entropy", "CRS entropy"), ends)
    caption = "Longer less shorter visibility, paired by shard; negative is lower under longer visibility."
    steps = (f"{h} - 0", f"∞ - {h}")
    head = (f"{what} ({step})" for step in steps for what in ("ΔGenNLL", "Δentropy"))
    yield table("warmup-horizons", caption, head, horizons)


def figures(results: Beside, preset: Preset) -> Iterator[Figure]:
    steps = [float(warmup_steps(preset.nfe, f)) for f in WARMUPS]
    lines = tuple(
        results.noted(name, [f"{f}/{end}" for f in WARMUPS], steps, "entropy", note="ppl") for end, name in ENDS.items()
    )
    axes = preset.captions["distilled"], "steps before the first selection", "unigram entropy"
    caption = f"The CRS tradeoff as selection starts later, {preset.nfe} calls; parentheses give GenPPL."
    yield Figure("warmup", caption, (Panel(*axes, lines, ticks(steps)),))


def contrasts(results: Beside, preset: Preset) -> Iterator[Contrast]:
    """What unigram entropy does not see, at the paper's warmup."""
    short, ever = "0.33/short", "0.33/ever"
    for measure in ("dist-4", "rep-4", "self-bleu"):
        paper = " to ".join(results.paper(cell, measure) for cell in (short, ever))
        name = f"{measure}, visible for ever less {preset.horizon} steps, warmup 0.33"
        yield Contrast(name, results.contrast(ever, short, measure), paper)


def claims(results: Beside, preset: Preset) -> Iterator[Claim]:
    later = list(pairwise(WARMUPS))
    h = preset.horizon

    def gain(what: str, measure: str) -> list[Finding]:
        """What native sampling has less CRS, as the warmup grows."""
        return [
            results.finding(below, f"{what}, warmup {b:g} less {a:g}", *(f"{f}/{end}" for f in (b, a) for end in ENDS),
                            measure=measure) for a, b in later
        ]  # fmt: skip

    def stable(what: str, measure: str, bound: float) -> list[Finding]:
        return [
            results.finding(within, f"{what} of native, warmup {f:g} less 0.33", f"{f}/native", "0.33/native",
                            measure=measure, bound=bound) for f in WARMUPS if f != 0.33
        ]  # fmt: skip

    def for_ever(side: Side, measure: str, **bound: float) -> Finding:
        name = f"{'entropy' if measure == 'entropy' else NAMES[measure]}, H=∞ less H={h}"
        return results.finding(side, name, "0.33/ever", "0.33/short", measure=measure, **bound)

    recovered = [
        results.finding(above, f"entropy of CRS, warmup {b:g} less {a:g}", f"{b}/ever", f"{a}/ever", measure="entropy")
        for a, b in later
    ]
    yield claim("section 5.2", "Later selection recovers unigram entropy", recovered)
    retained = [
        results.finding(below, f"NLL of CRS less native, warmup {f:g}", f"{f}/ever", f"{f}/native") for f in WARMUPS
    ]
    text = "Later selection retains a substantial likelihood gain over native sampling"
    yield claim("section 5.2", text, retained)
    where = "appendix D.4"
    text = "Delaying selection reduces the likelihood gain of persistent context"
    yield claim(where, text, gain("gain (NLL of native less CRS)", "nll"))
    text = "Delaying selection reduces the entropy cost of persistent context"
    yield claim(where, text, gain("entropy cost (native less CRS)", "entropy"))
    text = "Native GenPPL is stable under the split of the time grid"
    yield claim(where, text, stable("NLL", "nll", STABLE))
    text = "Native entropy is stable under the split of the time grid"
    yield claim(where, text, stable("entropy", "entropy", STABLE_ENTROPY))
    text = f"At warmup 0.33, extending H={h} to H=∞ leaves unigram entropy nearly unchanged"
    yield claim(where, text, [for_ever(within, "entropy", bound=UNCHANGED)])
    text = f"At warmup 0.33, extending H={h} to H=∞ lowers Dist-4 and raises Rep-4 and Self-BLEU"
    yield claim(where, text, [for_ever(below, "dist-4"), for_ever(above, "rep-4"), for_ever(above, "self-bleu")])
