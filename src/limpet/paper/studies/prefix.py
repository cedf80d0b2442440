"""Continuations of fixed prefixes (appendix D.6; table 9 and its contrasts)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from limpet.experiments.claims import Finding, above, alike, below
from limpet.experiments.contents import Contrast, Table
from limpet.experiments.study import DIVERSITY, Cell
from limpet.paper.studies.presets import Preset
from limpet.paper.studies.published import NAMES, Beside, Claims, Side, printed, row
from limpet.samplers import CRS, Sampler

ROWS = (  # the table's: late top-p and horizon; the last applies p at every step
    ("1.0", "0"), ("1.0", "short"), ("1.0", "ever"), ("0.9", "short"), ("0.8", "0"), ("0.8", "short"), ("0.8", "ever"),
    ("all 0.8", "0"),
)  # fmt: skip
ENDS = (1.0, 0.8)  # late top-p with all horizons
STEPS = (("0", "short"), ("short", "ever"))  # of the horizon; the gain of each is the NLL of the first less the second


def cells(preset: Preset) -> tuple[Cell, ...]:
    """Cells prefix/LATE/HORIZON, and Mend as it comes."""

    def crs(late: str) -> CRS:
        every = late.startswith("all ")
        return preset.crs.replace(**{"top_p" if every else "late_top_p": float(late.removeprefix("all "))})

    samplers: dict[str, Sampler] = {
        f"prefix/{late}/{horizon}": preset.horizons(crs(late))[horizon] for late, horizon in ROWS
    }
    return tuple(
        Cell(name, preset.distilled, sampler, preset.prompted_n, preset.prompted_length, preset.prompts)
        for name, sampler in {**samplers, "prefix/mend": preset.mend}.items()
    )


def tables(results: Beside, preset: Preset) -> Iterator[Table]:
    def named(late: str, horizon: str) -> tuple[str, str]:
        return late.capitalize() if late.startswith("all") else f"Late {late}", preset.shown[horizon]

    groups = [{f"prefix/{late}/{h}": named(late, h) for late, h in rows} for rows in (ROWS[:-1], ROWS[-1:])]
    groups.append({"prefix/mend": ("Mend", preset.shown["ever"])})
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

    def second(side: Side, some: Differences) -> list[Finding]:
        """The same for the paper's second judge, whether there is one here or not."""
        found = []
        for name, cells in some.items():
            judge = results.judges[1] if len(results.judges) > 1 else ""
            estimate = results.contrast(*cells, measure=f"nll:{judge}") if judge else results.missing("one judge here")
            found.append(side(f"{name} ({judge or 'second judge'})", estimate, paper=printed("nll:2", *cells)))
        return found

    def compared(side: Side, measure: str, a: str, b: str, name: str) -> Finding:
        cells = f"prefix/{a}", f"prefix/{b}"
        return results.finding(side, f"{NAMES[measure]}, {name}", *cells, measure=measure)

    gains, more, against = differences(preset)
    short, ever = positive(against)
    at = preset.shown
    return {
        "visible": positive(gains),
        "attenuated": positive(more),
        "attenuated-second": second(above, more),
        "first-judge": [short],
        "first-judge-ever": [ever],
        "second-judge": second(alike, against),
        "self-bleu": [
            compared(
                above, "self-bleu", "all 0.8/0", "0.8/ever", f"p=0.8 at every step less late p=0.8, H={at['ever']}"
            ),
            compared(above, "self-bleu", "0.8/ever", "0.8/short", f"late p=0.8, H={at['ever']} less H={at['short']}"),
        ],
        "repeats": [
            compared(below, "dist-4", "1.0/ever", "1.0/0", "H=∞ less H=0, late p=1"),
            compared(above, "rep-4", "1.0/ever", "1.0/0", "H=∞ less H=0, late p=1"),
        ],
    }
