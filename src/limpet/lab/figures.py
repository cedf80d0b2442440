"""A figure as SVG and PNG: colours that the colour-blind tell apart, markers and lines that survive grey."""

from __future__ import annotations

import io
from typing import Any

from limpet.errors import extra
from limpet.lab.page import Figure, Panel, Series

# Okabe and Ito's colours, dark before light; each with a marker and a line of its own
STYLES = (
    ("#000000", "o", "-"),
    ("#0072B2", "s", "--"),
    ("#009E73", "^", "-."),
    ("#D55E00", "D", ":"),
    ("#CC79A7", "v", (0, (5, 1))),
    ("#56B4E9", "P", (0, (3, 1, 1, 1))),
    ("#E69F00", "X", (0, (1, 1))),
)
SIZE = (4.6, 3.6)  # inches, one panel


def draw(figure: Figure) -> dict[str, bytes]:
    """{"svg": ..., "png": ...} of a figure: equal figures give equal bytes."""
    matplotlib, canvas = extra("matplotlib", "figures"), extra("matplotlib.figure", "figures")
    out, columns, rows = {}, min(len(figure.panels), figure.columns), -(-len(figure.panels) // figure.columns)
    with matplotlib.rc_context({"svg.hashsalt": figure.name, "svg.fonttype": "path", "font.size": 9}):
        made = canvas.Figure(figsize=(SIZE[0] * columns, SIZE[1] * rows), layout="constrained")
        if figure.title:
            made.suptitle(figure.title)
        places = made.subplots(rows, columns, squeeze=False).flat
        for axes, panel in zip(places, figure.panels, strict=False):
            _panel(axes, panel)
        for axes in places[len(figure.panels) :]:
            axes.set_axis_off()
        for kind, metadata in (("svg", {"Date": None, "Creator": None}), ("png", {"Software": None})):
            file = io.BytesIO()
            made.savefig(file, format=kind, dpi=150, metadata=metadata)
            out[kind] = file.getvalue()
    return out


def _panel(axes: Any, panel: Panel) -> None:
    ticker = extra("matplotlib.ticker", "figures")
    noted = [series for series in panel.series if series.notes]
    for i, series in enumerate(panel.series):
        error = [0.0 if e != e else e for e in series.y_error] or None
        if isinstance(series.style, str):
            axes.errorbar(series.x, series.y, error, fmt=series.style, label=series.name, markersize=4, capsize=2)
            continue
        colour, marker, line = STYLES[(i if series.style is None else series.style) % len(STYLES)]
        if panel.bars:
            width = 0.8 / len(panel.series)
            x = [tick + (i - (len(panel.series) - 1) / 2) * width for tick in series.x]
            grey = {"ecolor": "#666666", "capsize": 2}  # seen on black, too
            axes.bar(x, series.y, width, yerr=error, error_kw=grey, label=series.name, color=colour)
            continue
        axes.errorbar(
            series.x, series.y, error, label=series.name, color=colour, marker=marker, markersize=5, capsize=2,
            linestyle=line if series.joined else "none", markerfacecolor="white" if series.open else colour,
        )  # fmt: skip
        if series.notes:
            _notes(axes, series, colour, above=noted.index(series) < len(noted) / 2)
    axes.margins(0.14, 0.1)
    if panel.log_x:
        axes.set_xscale("log", base=2)
    if panel.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 3, 5)))
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda y, _: f"{y:g}"))
        axes.yaxis.set_minor_locator(ticker.NullLocator())
    if panel.ticks:
        axes.set_xticks([x for x, _ in panel.ticks], [text for _, text in panel.ticks])
    if panel.reverse_x:
        axes.invert_xaxis()
    axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y, **panel.axes)
    axes.grid(alpha=0.25)
    if panel.legend:
        axes.legend(fontsize=7.5)


def _notes(axes: Any, series: Series, colour: str, above: bool) -> None:
    """Beside the points, on the side away from where the line goes."""
    rises = (series.x[-1] > series.x[0]) == (series.y[-1] > series.y[0])
    right = rises != above
    for x, y, note in zip(series.x, series.y, series.notes, strict=True):
        axes.annotate(
            note, (x, y), (4 if right else -4, 3 if above else -3), textcoords="offset points", fontsize=6.5,
            color=colour, ha="left" if right else "right", va="bottom" if above else "top",
        )  # fmt: skip
