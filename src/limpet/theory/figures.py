"""What every figure of the theory is: panels of lines as plain data, drawn in a grid without global state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from limpet.errors import extra

Points = Sequence[float] | Tensor


class Line(NamedTuple):
    """Points in matplotlib's short style ("-" joins them, "." does not, "k:" is a dotted black line), with errors."""

    name: str
    x: Points
    y: Points
    style: str = "-"
    error: Sequence[float] | None = None


class Panel(NamedTuple):
    x: str
    y: str
    lines: Sequence[Line]
    title: str = ""
    axes: dict[str, Any] | None = None  # what else matplotlib is told of its axes: scales, limits, ticks


def draw(title: str, *panels: Panel) -> Any:
    """A matplotlib Figure, its panels row by row, three to a row."""
    columns, rows = min(len(panels), 3), -(-len(panels) // 3)
    size = (4.6 * columns, 3.6 * rows + 0.3)
    drawing = extra("matplotlib.figure", "figures").Figure(figsize=size, layout="constrained")
    drawing.suptitle(title)
    for axes, panel in zip(drawing.subplots(rows, columns, squeeze=False).flat, panels, strict=True):
        for name, x, y, style, error in panel.lines:
            axes.errorbar(x, y, error, fmt=style, label=name, markersize=4, capsize=2)
        axes.set(xlabel=panel.x, ylabel=panel.y, title=panel.title, **(panel.axes or {}))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, handlelength=3.5)
    return drawing
