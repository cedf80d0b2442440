"""A figure as SVG and PNG, in the colours of the pages: a family of samplers has one, and a marker and a line that
survive grey; a legend stands under what it names, never over it."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

from limpet import style as looks
from limpet.errors import extra
from limpet.experiments.contents import Figure, Panel, Series

# A marker and a line for each colour
STYLES = dict(zip(
    looks.COLOURS,
    (("o", "-"), ("s", "--"), ("^", "-."), ("D", ":"), ("v", (0, (5, 1))), ("P", (0, (3, 1, 1, 1))),
     ("X", (0, (1, 1))), ("*", (0, (8, 2, 2, 2)))),
    strict=True,
))  # fmt: skip
SIZE = (4.6, 3.6)  # inches, one panel


def draw(figure: Figure) -> dict[str, bytes]:
    """{"svg": ..., "png": ...} of a figure: equal figures give equal bytes."""
    matplotlib, canvas = extra("matplotlib", "figures"), extra("matplotlib.figure", "figures")
    out, columns, rows = {}, min(len(figure.panels), figure.columns), -(-len(figure.panels) // figure.columns)
    with matplotlib.rc_context({"svg.hashsalt": figure.name, **_rc()}):
        made = canvas.Figure(figsize=(SIZE[0] * columns, SIZE[1] * rows), layout="constrained")
        if figure.title:
            made.suptitle(figure.title)
        places = made.subplots(rows, columns, squeeze=False).ravel()
        for axes, panel in zip(places, figure.panels, strict=False):
            _panel(axes, panel)
        _legends(made, [axes for axes, panel in zip(places, figure.panels, strict=False) if panel.legend])
        for axes in places[len(figure.panels) :]:
            axes.set_axis_off()
        for kind, metadata in (("svg", {"Date": None, "Creator": None}), ("png", {"Software": None})):
            file = io.BytesIO()
            made.savefig(file, format=kind, dpi=150, metadata=metadata)
            out[kind] = file.getvalue()
    return out | {"svg": _small(out["svg"].decode()).encode()}


def _small(svg: str) -> str:
    """The same drawing in fewer letters: to a hundredth of a point, no indents, nothing about the file itself, no names
    that nothing refers to, no turns by nothing, and what all marks of a series are drawn with said once."""

    def place(attribute: re.Match[str]) -> str:
        return re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", attribute[0])

    def said_once(group: re.Match[str]) -> str:
        styles = set(re.findall(r' style="[^"]*"', group[2]))
        if len(styles) != 1 or group[2].count(style := styles.pop()) != group[2].count("<use"):
            return group[0]
        return f"{group[1]}{style}>{group[2].replace(style, '')}</g>"

    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\s*\n\s*", "\n", re.sub(r'\b(?:d|x|y|transform)="[^"]*"', place, svg))
    svg = re.sub(r' id="[\w.]+_\d+"| transform="rotate\(-0 [^"]*"', "", svg)
    svg = re.sub(r'style="[^"]*"', lambda style: re.sub(r"([:;]) ", r"\1", style[0]), svg)
    svg = re.sub(r"(<g[^>]*)>((?:\n<use [^>]*/>)+\n)</g>", said_once, svg)
    return re.sub(r"<g>\n((?:<path [^>]*/>|<text [^>]*>[^<]*</text>)\n)</g>\n", r"\1", svg)


def _rc() -> dict[str, Any]:
    """What matplotlib is told of paper, ink and colours."""
    paper = looks.colours()
    ink, soft, card = paper["ink"], paper["soft"], paper["card"]
    return {
        "svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"], "font.size": 9, "figure.facecolor": card,
        "axes.facecolor": card, "text.color": ink, "axes.labelcolor": ink, "axes.edgecolor": soft,
        "xtick.color": soft, "ytick.color": soft, "grid.color": paper["line"],
        "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
        "axes.prop_cycle": extra("cycler", "figures").cycler(color=[paper[name] for name in looks.COLOURS[::-1]]),
    }  # fmt: skip


def styled(panel: Panel) -> list[tuple[str, str, Any]]:
    """Of each series its colour, marker and line: the colour is its family's, and the other two are too, unless one
    before it has them."""
    keys = [series.name if not isinstance(series.style, int) else str(series.style) for series in panel.series]
    names, found = looks.coloured(keys), []
    taken: dict[str, str] = {}
    for key, name in zip(keys, names, strict=True):
        if key not in taken:
            free = [one for one in (name, *STYLES) if one not in taken.values()]
            taken[key] = (free or [name])[0]
        found.append((looks.colours()[name], *STYLES[taken[key]]))
    return found


def _legends(made: Any, places: Sequence[Any]) -> None:
    """One under all panels where the panel that names most names what the others do, else one under each."""
    named = [axes.get_legend_handles_labels() for axes in places]
    small = {"fontsize": 7.5, "handlelength": 3}
    handles, most = max(named, key=lambda one: len(one[1]), default=([], []))
    if all(set(labels) <= set(most) for _, labels in named):
        made.legend(handles, most, loc="outside lower center", ncols=max(1, min(4, len(most))), **small)
        return
    for axes in places:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2, **small)


def _panel(axes: Any, panel: Panel) -> None:
    ticker = extra("matplotlib.ticker", "figures")
    noted = [series for series in panel.series if series.notes]
    for i, (series, (colour, marker, line)) in enumerate(zip(panel.series, styled(panel), strict=True)):
        error = [0.0 if e != e else e for e in series.y_error] or None
        if isinstance(series.style, str):
            own = looks.family(series.name)  # its colour, whatever it asks for
            form = re.sub(r"^(k|C\d)", "", series.style) if own else series.style
            tint = {"color": colour} if own else {}
            axes.errorbar(series.x, series.y, error, fmt=form, label=series.name, markersize=4, capsize=2, **tint)
            continue
        if panel.bars:
            width = 0.8 / len(panel.series)
            x = [tick + (i - (len(panel.series) - 1) / 2) * width for tick in series.x]
            grey = {"ecolor": looks.colours()["soft"], "capsize": 2}
            axes.bar(x, series.y, width, yerr=error, error_kw=grey, label=series.name, color=colour)
            continue
        axes.errorbar(
            series.x, series.y, error, label=series.name, color=colour, marker=marker, markersize=5, capsize=2,
            linestyle=line if series.joined else "none",
            markerfacecolor=looks.colours()["card"] if series.open else colour,
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
    axes.grid(alpha=0.6)


def _notes(axes: Any, series: Series, colour: str, above: bool) -> None:
    """Beside the points, on the side away from where the line goes."""
    rises = (series.x[-1] > series.x[0]) == (series.y[-1] > series.y[0])
    right = rises != above
    for x, y, note in zip(series.x, series.y, series.notes, strict=True):
        axes.annotate(
            note, (x, y), (4 if right else -4, 3 if above else -3), textcoords="offset points", fontsize=6.5,
            color=colour, ha="left" if right else "right", va="bottom" if above else "top",
        )  # fmt: skip
