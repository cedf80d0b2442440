"""What visibility gains as support shrinks (appendix D.7; figure 4): the factorial and the fixed-prefix cells again."""

from __future__ import annotations

from limpet.lab.claims import Claim, above, below, claim
from limpet.lab.page import Contrast, Figure, Page, Panel, Series
from limpet.lab.results import Results
from limpet.lab.study import Study
from limpet.studies import factorial, prefix
from limpet.studies.factorial import MASSES
from limpet.studies.presets import Preset

STEPS = {"short": ("0", "short"), "ever": ("short", "ever")}  # the gain of each is the NLL of the first less the second
ENDS = (1.0, 0.8)  # late top-p that fixed-prefix continuation has all horizons for


def study(preset: Preset) -> Study:
    def show(results: Results) -> Page:
        return Page(figures=(_figure(results, preset),), contrasts=_contrasts(results), claims=_claims(results))

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


def _contrasts(results: Results) -> tuple[Contrast, ...]:
    return tuple(
        Contrast(
            f"gain of {step} visibility at late p=1 less late p={p:g}",
            results.interaction(
                *(f"late/1.0/{h}" for h in STEPS[step]), *(f"late/{p}/{h}" for h in STEPS[step])
            ),
        )
        for step in STEPS
        for p in MASSES[1:]
    )  # fmt: skip


def _claims(results: Results) -> tuple[Claim, ...]:
    return (
        claim(
            "appendix D.7",
            "The gain of extending visibility to for ever shrinks as support restriction becomes stronger",
            [above(f"gain at late p=1 less p={p:g}",
                   results.interaction("late/1.0/short", "late/1.0/ever", f"late/{p}/short", f"late/{p}/ever"))
             for p in MASSES[1:]],
        ),
        claim(
            "appendix D.7",
            "and becomes slightly negative at late p=0.8",
            [below("gain at late p=0.8", results.contrast("late/0.8/short", "late/0.8/ever"))],
        ),
        claim(
            "appendix D.7",
            "In fixed-prefix continuation the long-horizon gain is smaller at p=0.8 than at p=1, and stays positive",
            [
                above("gain at p=1 less p=0.8",
                      results.interaction(*(f"prefix/{p}/{h}" for p in ENDS for h in STEPS["ever"]))),
                above("gain at p=0.8", results.contrast("prefix/0.8/short", "prefix/0.8/ever")),
            ],
        ),
    )  # fmt: skip
