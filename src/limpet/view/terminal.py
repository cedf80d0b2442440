"""A frame of one or more arms as rich text: marked words, counts, and a sparkline of the mean deficit."""

from __future__ import annotations

import re

import numpy as np
from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from limpet.view.trajectory import GIVEN, SELECTED, VISIBLE, Array, Frame, Header

BARS = "▁▂▃▄▅▆▇█"
STYLES = {
    "new": "bold black on green",
    "visible": "green underline",
    "expired": "magenta underline",
    "given": "bold",
    "changed": "yellow",
    "plain": "",
}
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class Reel:
    """One arm's frames as far as they have come."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.frames: list[Frame] = []
        self.words: dict[int, str] = {}

    def add(self, frame: Frame, words: dict[int, str]) -> None:
        self.frames.append(frame)
        self.words |= words

    def kinds(self, r: int) -> list[str]:
        """What each position is at frame r: one of STYLES."""
        frame = self.frames[r]
        before = self.frames[r - 1] if r else frame
        old, changed = before.marks, self.shown(r) != (self.shown(r - 1) if r else self.shown(r))
        kinds = np.where(changed, "changed", "plain").astype(object)
        kinds[(frame.marks & SELECTED) > 0] = "expired"
        kinds[(frame.marks & VISIBLE) > 0] = "visible"
        kinds[((frame.marks & SELECTED) > 0) & ((old & SELECTED) == 0)] = "new"
        kinds[(frame.marks & GIVEN) > 0] = "given"
        return [str(kind) for kind in kinds]

    def shown(self, r: int) -> Array:
        """The input of call r; at the end, the output."""
        frame = self.frames[r]
        return frame.state if r == self.header.frames - 1 else frame.input


def word(text: str) -> str:
    """A token as a terminal may print it: line breaks seen, control characters harmless."""
    return CONTROL.sub(lambda c: "↵\n" if c.group() == "\n" else "␣", text) or "·"


def sparkline(values: list[float], width: int, top: float = 1.0) -> str:
    """The values as bars, at most `width` of them, the last always among them."""
    if len(values) > width:
        values = [values[i] for i in np.linspace(0, len(values) - 1, width).round().astype(int)]
    return "".join(BARS[min(len(BARS) - 1, int(value / top * len(BARS)))] for value in values)


def render(reels: list[Reel], r: int, width: int = 100) -> Group:
    """Frame r of every arm, side by side where there is more than one."""
    grid = Table.grid(expand=True, padding=(0, 1))
    for _ in reels:
        grid.add_column(ratio=1)
    grid.add_row(*(_panel(reel, min(r, len(reel.frames) - 1), width // len(reels)) for reel in reels))
    return Group(grid, legend())


def legend() -> Text:
    names = {
        "new": "newly selected",
        "visible": "visible",
        "expired": "expired",
        "changed": "changed",
        "given": "given",
    }
    line = Text()
    for kind, name in names.items():
        line.append(name, STYLES[kind]).append("   ")
    return line


def _panel(reel: Reel, r: int, width: int) -> Panel:
    text = Text(overflow="fold")
    for token, kind in zip(reel.shown(r), reel.kinds(r), strict=True):
        text.append(word(reel.words.get(int(token), "\ufffd")), STYLES[kind])
    calls, frame = len(reel.header.times), reel.frames[r]
    deficits = [each.mean_deficit for each in reel.frames[: min(r + 1, calls)]]
    when = f"output after {calls} calls" if r == calls else f"step {r + 1}/{calls} · t {reel.header.times[r]:.3f}"
    facts = Text(f"{when} · {frame.selected} selected\ndeficit ", style="dim")
    facts.append(sparkline(deficits, max(8, width - 22)), "cyan").append(f" {deficits[-1]:.3f}")
    return Panel(Group(facts, Text(), text), title=Text(word(reel.header.arm), style="bold"), title_align="left")
