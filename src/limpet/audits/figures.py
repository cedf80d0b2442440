"""What the figures of audits share: grouped bars, lines with errors, and a drawing made without global state."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from limpet.errors import extra
from limpet.stats import Estimate


def panels(count: int, title: str) -> tuple[Any, list[Any]]:
    """A matplotlib Figure and its axes, side by side."""
    drawing = extra("matplotlib.figure", "figures").Figure(figsize=(4.8 * count, 3.8), layout="constrained")
    drawing.suptitle(title)
    axes = list(drawing.subplots(1, count, squeeze=False)[0])
    for one in axes:
        one.grid(alpha=0.3)
        one.set_axisbelow(True)
    return drawing, axes


def bars(panel: Any, ticks: Sequence[str], groups: Mapping[str, Sequence[Estimate]]) -> None:
    """For each tick a bar of every group, with its standard error."""
    width = 0.8 / len(groups)
    for i, (label, found) in enumerate(groups.items()):
        places = np.arange(len(ticks)) + (i - (len(groups) - 1) / 2) * width
        panel.bar(
            places, [one.mean for one in found], width, yerr=[one.se for one in found], error_kw={"capsize": 2},
            label=label,
        )  # fmt: skip
    names = [textwrap.fill(tick, 48 // len(ticks), break_long_words=False) for tick in ticks]
    panel.set_xticks(range(len(ticks)), names, fontsize="small")


def look(i: int) -> dict[str, str]:
    """The colour of a figure's i-th model and its marker, which tells it apart in grey too."""
    return {"color": f"C{i}", "marker": "os^D"[i % 4]}


def line(panel: Any, x: Sequence[float], found: Sequence[Estimate], label: str, **style: Any) -> None:
    """Means over x with their standard errors."""
    style = {"marker": "o", "markersize": 4, "capsize": 2, **style}
    panel.errorbar(x, [one.mean for one in found], [one.se for one in found], label=label, **style)
