"""Continuations of fixed prefixes (appendix D.6; table 9 and its contrasts)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from limpet.lab.claims import Finding, above, below, within
from limpet.lab.page import Contrast, Table
from limpet.lab.study import DIVERSITY, Cell
from limpet.samplers import CRS
from limpet.studies.presets import Preset
from limpet.studies.published import NAMES, Beside, Claims, Side, row

ROWS = (  # the table's: late top-p and horizon; the last applies p at every step
    ("1.0", "0"), ("1.0", "short"), ("1.0", "ever"), ("0.9", "short"), ("0.8", "0"), ("0.8", "short"), ("0.8", "ever"),
    ("all 0.8", "0"),
)  # fmt: skip
ENDS = (1.0, 0.8)  # late top-p with all horizons
STEPS = (("0", "short"), ("short", "ever"))  # of the horizon; the gain of each is the NLL of the first less the second
ALIKE = 0.05  # nats: the reach of the paper's 95% intervals for its second judge, and a little


def cells(preset: Preset) -> tuple[Cell, ...]:
    """Cells prefix/LATE/HORIZON."""

    def crs(late: str) -> CRS:
        every = late.startswith("all ")
        return preset.crs.but(**{"top_p" if every else "late_top_p": float(late.removeprefix("all "))})

    return tuple(
        Cell(
            f"prefix/{late}/{horizon}", preset.distilled, preset.horizons(crs(late))[horizon], preset.prompted_n,
            preset.prompted_length, preset.prompts,
        )
        for late, horizon in ROWS
    )  # fmt: skip


def tables(results: Beside, preset: Preset) -> Iterator[Table]:
    def named(late: str, horizon: str) -> tuple[str, str]:
        return late.capitalize() if late.startswith("all") else f"Late {late}", preset.shown[horizon]

    groups = [{f"prefix/{late}/{h}": named(late, h) for late, h in rows} for rows in (ROWS[:-1], ROWS[-1:])]
    yield results.measured("prefix", groups, (*(f"ppl:{judge}" for judge in results.judges), *DIVERSITY[:3]))
    arms = {"prefix/all 0.8/0": ("p=0.8 at every step, H=0",)}
    arms |= {f"prefix/0.8/{h}": (f"late p=0.8, H={preset.shown[h]}",) for h in ("short", "ever")}
    yield results.measured("prefix-self-bleu", [arms], ["self-bleu"])


Differences = Mapping[str, tuple[str, ...]]  # of two cells, or of two such differences, by name


def gain(family: str, step: tuple[str, str], *masses: float) -> tuple[str, ...]:
    """The cells whose difference is what a step of the horizon gains, at one mass or at the first less the second."""
    return tuple(f"{family}/{p}/{horizon}" for p in masses for horizon in step)


def differences(preset: Preset) -> tuple[Differences, Differences, Differences]:
    """What a longer horizon gains; how much more it does at p=1 than at p=0.8; selection less p at every step."""
    steps = {f"gain of H={preset.shown[a]} to {preset.shown[b]}": (a, b) for a, b in STEPS}
    gains = {f"{name}, late p={p:g}": gain("prefix", step, p) for name, step in steps.items() for p in ENDS}
    more = {f"{name}, late p=1 less 0.8": gain("prefix", step, *ENDS) for name, step in steps.items()}
    against = {
        f"NLL of late p=0.8, H={preset.shown[h]} less p=0.8 at every step": (f"prefix/0.8/{h}", "prefix/all 0.8/0")
        for h in ("short", "ever")
    }
    return gains, more, against


def contrasts(results: Beside, preset: Preset) -> Iterator[Contrast]:
    for measure, judge in ((f"nll:{judge}", judge) for judge in results.judges):
        for some in differences(preset):
            for name, cells in some.items():
                estimate, paper = results.contrast(*cells, measure=measure), results.paper(row(*cells), measure)
                yield Contrast(f"{name} ({judge})", estimate, paper)


def claims(results: Beside, preset: Preset) -> Claims:
    def positive(some: Differences) -> list[Finding]:
        return [results.finding(above, name, *cells) for name, cells in some.items()]

    def persistent(side: Side, measure: str) -> Finding:
        name, cells = f"{NAMES[measure]}, H=∞ less H=0, late p=1", ("prefix/1.0/ever", "prefix/1.0/0")
        return results.finding(side, name, *cells, measure=measure)

    gains, more, against = differences(preset)
    found = {
        "visible": positive(gains),
        "attenuated": positive(more),
        "first-judge": positive(against),
        "repeats": [persistent(below, "dist-4"), persistent(above, "rep-4")],
    }
    for judge in results.judges[1:2]:
        found["second-judge"] = [
            results.finding(within, f"{name} ({judge})", *cells, measure=f"nll:{judge}", bound=ALIKE)
            for name, cells in against.items()
        ]
    return found
