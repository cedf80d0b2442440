"""What visibility gains as support shrinks (appendix D.7; figure 4): the factorial and the fixed-prefix cells again."""

from __future__ import annotations

from limpet.lab.claims import Claim, above, below, claim
from limpet.lab.page import Contrast, Figure, Page, Panel, Series
from limpet.lab.results import Results
from limpet.lab.study import Study
from limpet.studies import factorial, prefix
from limpet.studies.factorial import MASSES
from limpet.studies.presets import Preset
from limpet.studies.published import nll_difference, value

STEPS = {"short": ("0", "short"), "ever": ("short", "ever")}  # the gain of each is the NLL of the first less the second
ENDS = (1.0, 0.8)  # late top-p that fixed-prefix continuation has all horizons for


def study(preset: Preset) -> Study:
    def show(results: Results) -> Page:
        return Page(
            figures=(_figure(results, preset),), contrasts=_contrasts(results, preset), claims=_claims(results, preset)
        )

    return Study(
        "interaction", "What visibility gains as support shrinks", (*factorial.cells(preset), *prefix.cells(preset)),
        preset.shards, show, preset.judges, preset=preset.name,
    )  # fmt: skip


def _figure(results: Results, preset: Preset) -> Figure:
    def series(name: str, family: str, masses: tuple[float, ...], step: str) -> Series:
        shorter, longer = STEPS[step]
        gains = [results.contrast(f"{family}/{p}/{shorter}", f"{family}/{p}/{longer}") for p in masses]
        joined = family == "late"
        return Series(name, masses, tuple(g.mean for g in gains), tuple(g.se for g in gains), joined=joined)

    def panel(step: str, title: str) -> Panel:
        ticks = tuple((p, f"{p:g}") for p in MASSES)
        return Panel(
            title, "late top-p", "gain in NLL, nats per token",
            (series("unconditional", "late", MASSES, step), series("fixed prefix", "prefix", ENDS, step)),
            ticks, reverse_x=True,
        )  # fmt: skip

    h = preset.horizon
    caption = "Gain from keeping labels visible, by late top-p; moving right is stronger restriction."
    panels = panel("short", f"0 to {h} steps"), panel("ever", f"{h} steps to for ever")
    return Figure("interaction", caption, panels)


def _contrasts(results: Results, preset: Preset) -> tuple[Contrast, ...]:
    names = {"short": f"0 to {preset.horizon}", "ever": f"{preset.horizon} to ∞"}
    return tuple(
        Contrast(
            f"gain of H={names[step]} at late p=1 less late p={p:g}",
            results.interaction(
                *(f"late/1.0/{h}" for h in STEPS[step]), *(f"late/{p}/{h}" for h in STEPS[step])
            ),
            f"{_printed(step, 1.0) - _printed(step, p):+.3f}",
        )
        for step in STEPS
        for p in MASSES[1:]
    )  # fmt: skip


def _printed(step: str, p: float) -> float:
    """The gain that the paper's table of the factorial gives."""
    shorter, longer = STEPS[step]
    return nll_difference(factorial.PAPER[p, shorter][0], factorial.PAPER[p, longer][0])


def _claims(results: Results, preset: Preset) -> tuple[Claim, ...]:
    longer = f"H={preset.horizon} to ∞"
    prefixed = [value(prefix.PAPER_GAINS["short", "ever", p][0]) for p in ENDS]
    return (
        claim(
            "appendix D.7",
            "The gain of extending visibility to for ever shrinks as support restriction becomes stronger",
            [above(f"gain of {longer} at late p=1 less p={p:g}",
                   results.interaction("late/1.0/short", "late/1.0/ever", f"late/{p}/short", f"late/{p}/ever"),
                   paper=_printed("ever", 1.0) - _printed("ever", p))
             for p in MASSES[1:]],
        ),
        claim(
            "appendix D.7",
            "The gain of extending visibility to for ever becomes slightly negative at late p=0.8",
            [below(f"gain of {longer} at late p=0.8", results.contrast("late/0.8/short", "late/0.8/ever"),
                   paper=_printed("ever", 0.8))],
        ),
        claim(
            "appendix D.7",
            "In fixed-prefix continuation the long-horizon gain is smaller at p=0.8 than at p=1, and stays positive",
            [
                above(f"gain of {longer} at p=1 less p=0.8",
                      results.interaction(*(f"prefix/{p}/{h}" for p in ENDS for h in STEPS["ever"])),
                      paper=prefixed[0] - prefixed[1]),
                above(f"gain of {longer} at p=0.8", results.contrast("prefix/0.8/short", "prefix/0.8/ever"),
                      paper=prefixed[1]),
            ],
        ),
    )  # fmt: skip
