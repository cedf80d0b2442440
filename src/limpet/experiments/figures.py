"""Figures as SVG and PNG in the colours of the pages. Each family of samplers has a colour, a marker and a line style,
so that figures can be read in grey. Legends stand below the panels."""

import io
import re
from collections.abc import Sequence
from typing import Any

from limpet import style
from limpet.errors import import_extra
from limpet.experiments.report_content import Figure, Panel, Series

MARKERS = (
    ("o", "-"),
    ("s", "--"),
    ("^", "-."),
    ("D", ":"),
    ("v", (0, (5, 1))),
    ("P", (0, (3, 1, 1, 1))),
    ("X", (0, (1, 1))),
    ("*", (0, (8, 2, 2, 2))),
)
STYLES = dict(zip(style.COLOURS, MARKERS, strict=True))  # a marker and a line style for each colour
SIZE = (4.6, 3.6)  # inches, one panel


def draw(figure: Figure) -> dict[str, bytes]:
    """{"svg": ..., "png": ...} of a figure; equal figures give equal bytes. Needs matplotlib."""
    matplotlib, canvas = import_extra("matplotlib", "figures"), import_extra("matplotlib.figure", "figures")
    columns, rows = min(len(figure.panels), figure.columns), -(-len(figure.panels) // figure.columns)
    files = {}
    with matplotlib.rc_context({"svg.hashsalt": figure.name, **_rc()}):
        drawing = canvas.Figure(figsize=(SIZE[0] * columns, SIZE[1] * rows), layout="constrained")
        if figure.title:
            drawing.suptitle(figure.title)
        places = drawing.subplots(rows, columns, squeeze=False).ravel()
        for axes, panel in zip(places, figure.panels, strict=False):
            _draw_panel(axes, panel)
        _draw_legends(drawing, [axes for axes, panel in zip(places, figure.panels, strict=False) if panel.legend])
        for axes in places[len(figure.panels) :]:
            axes.set_axis_off()
        for kind, metadata in (("svg", {"Date": None, "Creator": None}), ("png", {"Software": None})):
            file = io.BytesIO()
            drawing.savefig(file, format=kind, dpi=150, metadata=metadata)
            files[kind] = file.getvalue()
    return files | {"svg": _minified(files["svg"].decode()).encode()}


def _minified(svg: str) -> str:
    """The same drawing in fewer bytes.

    Coordinates are rounded to a hundredth of a point. Indents, metadata, unused names and rotations by zero go, and a
    style that all marks of a series share stands once."""

    def rounded(attribute: re.Match[str]) -> str:
        return re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", attribute[0])

    def share_style(group: re.Match[str]) -> str:
        styles = set(re.findall(r' style="[^"]*"', group[2]))
        if len(styles) != 1 or group[2].count(style := styles.pop()) != group[2].count("<use"):
            return group[0]
        return f"{group[1]}{style}>{group[2].replace(style, '')}</g>"

    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\s*\n\s*", "\n", re.sub(r'\b(?:d|x|y|transform)="[^"]*"', rounded, svg))
    svg = re.sub(r' id="[\w.]+_\d+"| transform="rotate\(-0 [^"]*"', "", svg)
    svg = re.sub(r'style="[^"]*"', lambda style: re.sub(r"([:;]) ", r"\1", style[0]), svg)
    svg = re.sub(r"(<g[^>]*)>((?:\n<use [^>]*/>)+\n)</g>", share_style, svg)
    return re.sub(r"<g>\n((?:<path [^>]*/>|<text [^>]*>[^<]*</text>)\n)</g>\n", r"\1", svg)


def _rc() -> dict[str, Any]:
    """Matplotlib's settings: the colours of the pages, plain axes."""
    page = style.colours()
    cycle = import_extra("cycler", "figures").cycler(color=[page[name] for name in style.COLOURS[::-1]])
    return {
        "svg.fonttype": "none",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 9,
        "figure.facecolor": page["card"],
        "axes.facecolor": page["card"],
        "text.color": page["ink"],
        "axes.labelcolor": page["ink"],
        "axes.edgecolor": page["soft"],
        "xtick.color": page["soft"],
        "ytick.color": page["soft"],
        "grid.color": page["line"],
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "axes.prop_cycle": cycle,
    }


def styled(panel: Panel) -> list[tuple[str, str, Any]]:
    """The colour, marker and line style of each series.

    The colour is its family's. So are the other two, unless an earlier series of the panel has them."""
    keys = [str(series.style) if isinstance(series.style, int) else series.name for series in panel.series]
    found = []
    taken: dict[str, str] = {}
    for key, name in zip(keys, style.assign_colours(keys), strict=True):
        if key not in taken:
            free = [one for one in (name, *STYLES) if one not in taken.values()]
            taken[key] = (free or [name])[0]
        found.append((style.colours()[name], *STYLES[taken[key]]))
    return found


def _draw_legends(drawing: Any, places: Sequence[Any]) -> None:
    """One legend under all panels if the longest has every name, else one under each panel."""
    named = [axes.get_legend_handles_labels() for axes in places]
    small = {"fontsize": 7.5, "handlelength": 3}
    handles, longest = max(named, key=lambda one: len(one[1]), default=([], []))
    if all(set(names) <= set(longest) for _, names in named):
        drawing.legend(handles, longest, loc="outside lower center", ncols=max(1, min(4, len(longest))), **small)
        return
    for axes in places:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2, **small)


def _draw_panel(axes: Any, panel: Panel) -> None:
    noted = [series for series in panel.series if series.notes]
    for i, (series, (colour, marker, line)) in enumerate(zip(panel.series, styled(panel), strict=True)):
        error = [0.0 if e != e else e for e in series.y_error] or None
        if isinstance(series.style, str):
            _draw_short_form(axes, series, series.style, error, colour)
        elif panel.bars:
            width = 0.8 / len(panel.series)
            x = [tick + (i - (len(panel.series) - 1) / 2) * width for tick in series.x]
            grey = {"ecolor": style.colours()["soft"], "capsize": 2}
            axes.bar(x, series.y, width, yerr=error, error_kw=grey, label=series.name, color=colour)
        else:
            axes.errorbar(
                series.x,
                series.y,
                error,
                label=series.name,
                color=colour,
                marker=marker,
                markersize=5,
                capsize=2,
                linestyle=line if series.joined else "none",
                markerfacecolor=style.colours()["card"] if series.open else colour,
            )
            if series.notes:
                _draw_notes(axes, series, colour, above=noted.index(series) < len(noted) / 2)
    _scale(axes, panel)


def _draw_short_form(axes: Any, series: Series, form: str, error: list[float] | None, colour: str) -> None:
    """A series in matplotlib's short form; a family keeps its colour."""
    if style.family(series.name):
        form, tint = re.sub(r"^(k|C\d)", "", form), {"color": colour}
    else:
        tint = {}
    axes.errorbar(series.x, series.y, error, fmt=form, label=series.name, markersize=4, capsize=2, **tint)


def _scale(axes: Any, panel: Panel) -> None:
    ticker = import_extra("matplotlib.ticker", "figures")
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
    axes.grid(alpha=0.6)


def _draw_notes(axes: Any, series: Series, colour: str, above: bool) -> None:
    """Notes beside the points, on the side away from the line."""
    rises = (series.x[-1] > series.x[0]) == (series.y[-1] > series.y[0])
    right = rises != above
    offset = 4 if right else -4, 3 if above else -3
    place = {"ha": "left" if right else "right", "va": "bottom" if above else "top"}
    for x, y, note in zip(series.x, series.y, series.notes, strict=True):
        axes.annotate(note, (x, y), offset, textcoords="offset points", fontsize=6.5, color=colour, **place)
