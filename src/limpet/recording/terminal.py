"""A frame of one or more arms as rich text: words as they are marked, counts, and a sparkline of the mean deficit."""

from __future__ import annotations

import re

import numpy as np
from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from limpet.recording.trajectory import GIVEN, Trajectory

BARS = "▁▂▃▄▅▆▇█"
STYLES = {  # the later goes over the earlier; a mark that is not here is underlined, and goes over "changed" alone
    "changed": "yellow",
    "committed": "magenta underline",
    "visible": "green underline",
    "chosen": "bold black on green",
    "mended": "bold black on yellow",
    GIVEN: "bold",
}
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def kinds(path: Trajectory, r: int) -> list[str]:
    """What each position is at frame r: a mark, "changed" for another token than the frame before had, or ""."""
    header, frame = path.header, path.frames[r]
    found = np.where(frame.input != path.frames[max(0, r - 1)].input, "changed", "").astype(object)
    others = [mark for mark in header.marks if mark not in STYLES]
    for mark in [*others, *list(STYLES)[1:]]:
        found[header.marked(frame, mark)] = mark
    return [str(kind) for kind in found]


def style(kind: str) -> str:
    return STYLES.get(kind, "underline") if kind else ""


def word(text: str) -> str:
    """A token as a terminal may print it: line breaks seen, control characters harmless."""
    return CONTROL.sub(lambda c: "↵\n" if c.group() == "\n" else "␣", text) or "·"


def sparkline(values: list[float], width: int, top: float = 1.0) -> str:
    """The values as bars, at most `width` of them, the last always among them."""
    if len(values) > width:
        values = [values[i] for i in np.linspace(0, len(values) - 1, width).round().astype(int)]
    return "".join(BARS[min(len(BARS) - 1, int(value / top * len(BARS)))] for value in values)


def render(paths: list[Trajectory], r: int, width: int = 100) -> Group:
    """Frame r of every arm, side by side where there is more than one, and what the marks look like."""
    grid, legend = Table.grid(expand=True, padding=(0, 1)), Text()
    for _ in paths:
        grid.add_column(ratio=1)
    grid.add_row(*(_panel(path, min(r, len(path.frames) - 1), width // len(paths)) for path in paths))
    for mark in dict.fromkeys(["changed", *(mark for path in paths for mark in path.header.marks)]):
        legend.append(word(mark), style(mark)).append("   ")
    return Group(grid, legend)


def _panel(path: Trajectory, r: int, width: int) -> Panel:
    header, frame, text = path.header, path.frames[r], Text(overflow="fold")
    for token, kind in zip(frame.input, kinds(path, r), strict=True):
        text.append(word(path.words.get(int(token), "\ufffd")), style(kind))
    calls = header.calls
    counts = [f" · {int(header.marked(frame, mark).sum())} {word(mark)}" for mark in header.marks if mark != GIVEN]
    deficits = [each.mean_deficit for each in path.frames[: min(r + 1, calls)]]
    when = f"output after {calls} calls" if r == calls else f"call {r + 1}/{calls} · t {frame.t:.3f}"
    facts = Text(f"{when}{''.join(counts)}\ndeficit ", style="dim")
    facts.append(sparkline(deficits, max(8, width - 22)), "cyan").append(f" {deficits[-1]:.3f}")
    return Panel(Group(facts, Text(), text), title=Text(word(header.arm), style="bold"), title_align="left")
