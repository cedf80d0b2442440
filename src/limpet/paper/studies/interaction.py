"""What visibility gains as support shrinks (appendix D.7; figure 4): the factorial and the fixed-prefix cells again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from limpet.experiments.contents import Contrast, Panel, Series, series
from limpet.experiments.study import Cell
from limpet.paper.studies import factorial, prefix
from limpet.paper.studies.factorial import MASSES
from limpet.paper.studies.prefix import ENDS, STEPS, gain
from limpet.paper.studies.presets import Preset
from limpet.paper.studies.published import Beside, printed, ticks


def cells(preset: Preset) -> Iterable[Cell]:
    return *factorial.cells(preset), *prefix.cells(preset)


def panels(results: Beside, preset: Preset) -> Iterator[Panel]:
    def gains(name: str, family: str, masses: tuple[float, ...], step: tuple[str, str]) -> Series:
        found = [results.contrast(*gain(family, step, p)) for p in masses]
        return series(name, masses, found, joined=family == "late")

    def panel(title: str, step: tuple[str, str]) -> Panel:
        lines = gains("unconditional", "late", MASSES, step), gains("fixed prefix", "prefix", ENDS, step)
        return Panel(title, "late top-p", "gain in NLL, nats per token", lines, ticks(MASSES), reverse_x=True)

    return map(panel, (f"0 to {preset.horizon} steps", f"{preset.horizon} steps to for ever"), STEPS)


def contrasts(results: Beside, preset: Preset) -> Iterator[Contrast]:
    for step in STEPS:
        shorter, longer = (preset.shown[horizon] for horizon in step)
        for p in MASSES[1:]:
            cells = gain("late", step, 1.0, p)
            name = f"gain of H={shorter} to {longer} at late p=1 less late p={p:g}"
            paper = printed("nll", *cells)
            yield Contrast(name, results.contrast(*cells), f"{paper.mean:+.3f}" if paper else "")
