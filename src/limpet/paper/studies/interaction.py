"""What visibility gains as support shrinks (appendix D.7; figure 4): cells of `factorial` and `continuation`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from limpet.experiments import Cell, Contrast, Panel, Series, estimate_series
from limpet.paper.studies import continuation, factorial
from limpet.paper.studies.continuation import HORIZON_STEPS, LATE_TOP_PS, gain_cells
from limpet.paper.studies.factorial import TOP_PS
from limpet.paper.studies.presets import Preset
from limpet.paper.studies.published import PaperResults, published, ticks


def cells(preset: Preset) -> Iterable[Cell]:
    return *factorial.cells(preset), *continuation.cells(preset)


def panels(results: PaperResults, preset: Preset) -> Iterator[Panel]:
    def gains(name: str, family: str, top_ps: tuple[float, ...], step: tuple[str, str]) -> Series:
        found = [results.contrast(*gain_cells(family, step, p)) for p in top_ps]
        return estimate_series(name, top_ps, found, joined=family == "late")

    titles = f"horizon 0 to {preset.horizon}", f"horizon {preset.horizon} to ∞"
    for title, step in zip(titles, HORIZON_STEPS, strict=True):
        lines = gains("unconditional", "late", TOP_PS, step), gains("after a prompt", "prompt", LATE_TOP_PS, step)
        yield Panel(title, "late top-p", "gain in NLL, nats/token", lines, ticks(TOP_PS), reverse_x=True)


def contrasts(results: PaperResults, preset: Preset) -> Iterator[Contrast]:
    for step in HORIZON_STEPS:
        shorter, longer = (preset.horizon_captions[horizon] for horizon in step)
        for p in TOP_PS[1:]:
            cells = gain_cells("late", step, 1.0, p)
            name = f"likelihood gain of H={shorter} to {longer} at late p=1 minus late p={p:g}"
            paper = published("nll", *cells)
            yield Contrast(name, results.contrast(*cells), f"{paper.mean:+.3f}" if paper else "")
