"""What every figure of the theory shares: a drawing with a grid of panels, made without global state."""

from __future__ import annotations

from typing import Any

from limpet.errors import extra


def panels(title: str, columns: int = 1, rows: int = 1) -> tuple[Any, list[Any]]:
    """A matplotlib Figure and its axes, row by row."""
    size = (4.6 * columns, 3.6 * rows + 0.3)
    drawing = extra("matplotlib.figure", "figures").Figure(figsize=size, layout="constrained")
    drawing.suptitle(title)
    axes = drawing.subplots(rows, columns, squeeze=False).ravel()
    for one in axes:
        one.grid(alpha=0.3)
    return drawing, list(axes)
