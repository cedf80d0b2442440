"""What visibility gains as support shrinks (appendix D.7; figure 4): the factorial and the fixed-prefix cells again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from limpet.lab.claims import Claim, above, below, claim
from limpet.lab.page import Contrast, Figure, Panel, Series, series
from limpet.lab.study import Cell
from limpet.studies import factorial, prefix
from limpet.studies.factorial import MASSES
from limpet.studies.prefix import ENDS, STEPS, gain
from limpet.studies.presets import Preset
from limpet.studies.published import Beside, printed, ticks

TITLE = "What visibility gains as support shrinks"


def cells(preset: Preset) -> Iterable[Cell]:
    return *factorial.cells(preset), *prefix.cells(preset)


def figures(results: Beside, preset: Preset) -> Iterator[Figure]:
    def gains(name: str, family: str, masses: tuple[float, ...], step: tuple[str, str]) -> Series:
        found = [results.difference(*gain(family, step, p)) for p in masses]
        return series(name, masses, found, joined=family == "late")

    def panel(title: str, step: tuple[str, str]) -> Panel:
        lines = gains("unconditional", "late", MASSES, step), gains("fixed prefix", "prefix", ENDS, step)
        return Panel(title, "late top-p", "gain in NLL, nats per token", lines, ticks(MASSES), reverse_x=True)

    titles = f"0 to {preset.horizon} steps", f"{preset.horizon} steps to for ever"
    caption = "Gain from keeping labels visible, by late top-p; moving right is stronger restriction."
    yield Figure("interaction", caption, tuple(map(panel, titles, STEPS)))


def contrasts(results: Beside, preset: Preset) -> Iterator[Contrast]:
    for step in STEPS:
        shorter, longer = (preset.shown[horizon] for horizon in step)
        for p in MASSES[1:]:
            cells = gain("late", step, 1.0, p)
            name = f"gain of H={shorter} to {longer} at late p=1 less late p={p:g}"
            yield Contrast(name, results.difference(*cells), f"{printed('nll', *cells):+.3f}")


def claims(results: Beside, preset: Preset) -> Iterator[Claim]:
    longer, last = f"H={preset.horizon} to ∞", STEPS[-1]
    yield claim(
        "appendix D.7",
        "The gain of extending visibility to for ever shrinks as support restriction becomes stronger",
        [results.finding(above, f"gain of {longer} at late p=1 less p={p:g}", *gain("late", last, 1.0, p))
         for p in MASSES[1:]],
    )  # fmt: skip
    yield claim(
        "appendix D.7",
        "The gain of extending visibility to for ever becomes slightly negative at late p=0.8",
        [results.finding(below, f"gain of {longer} at late p=0.8", *gain("late", last, 0.8))],
    )
    yield claim(
        "appendix D.7",
        "In fixed-prefix continuation the long-horizon gain is smaller at p=0.8 than at p=1, and stays positive",
        [results.finding(above, f"gain of {longer} at p=1 less p=0.8", *gain("prefix", last, *ENDS)),
         results.finding(above, f"gain of {longer} at p=0.8", *gain("prefix", last, 0.8))],
    )  # fmt: skip
