"""Frames of trajectories in the terminal: tokens styled by their masks, counts, and a sparkline of the mean deficit."""

import re

import numpy as np
from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from limpet.models.prompt_layouts import SUDOKU, Board, clashes, line_between
from limpet.recording.trajectory import FIXED, Trajectory

CLUE, CLASH = "bold", "red"  # added to the styles of the cells of a sudoku
BARS = "▁▂▃▄▅▆▇█"
CHANGED = "changed"  # no mask: a token other than in the frame before
STYLES = {  # a later mask is drawn over an earlier one; any other mask is underlined, below these but over "changed"
    CHANGED: "yellow",
    "committed": "magenta underline",
    "visible": "green underline",
    "chosen": "bold black on green",
    "revised": "bold black on yellow",
    FIXED: "bold",
}
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def mask_names(trajectory: Trajectory, r: int) -> list[str]:
    """The mask that each position of frame r is drawn with: its uppermost one, else "changed" or ""."""
    header, frame, before = trajectory.header, trajectory.frames[r], trajectory.frames[max(0, r - 1)]
    names = np.where(frame.model_input != before.model_input, CHANGED, "").astype(object)
    others = [name for name in header.masks if name not in STYLES]
    for name in [*others, *list(STYLES)[1:]]:
        names[header.mask(frame, name)] = name
    return [str(name) for name in names]


def style(name: str) -> str:
    return STYLES.get(name, "underline") if name else ""


def printable(text: str) -> str:
    """The text of a token with line breaks made visible and control characters replaced."""
    return CONTROL.sub(lambda c: "↵\n" if c.group() == "\n" else "␣", text) or "·"


def sparkline(values: list[float], width: int, top: float = 1.0) -> str:
    """The values as at most `width` bars; the last value is always shown."""
    if len(values) > width:
        values = [values[i] for i in np.linspace(0, len(values) - 1, width).round().astype(int)]
    return "".join(BARS[min(len(BARS) - 1, int(value / top * len(BARS)))] for value in values)


def render(trajectories: list[Trajectory], r: int, width: int = 100) -> Group:
    """Frame r of every trajectory, side by side, and a legend of the masks."""
    grid, legend = Table.grid(expand=True, padding=(0, 1)), Text()
    for _ in trajectories:
        grid.add_column(ratio=1)
    panels = (_panel(one, min(r, len(one.frames) - 1), width // len(trajectories)) for one in trajectories)
    grid.add_row(*panels)
    for name in dict.fromkeys([CHANGED, *(name for one in trajectories for name in one.header.masks)]):
        legend.append(printable(name), style(name)).append("   ")
    if any(map(_board_of, trajectories)):
        legend.append("clue", CLUE).append("   ").append("clash", CLASH)
    return Group(grid, legend)


def _panel(trajectory: Trajectory, r: int, width: int) -> Panel:
    header, frame = trajectory.header, trajectory.frames[r]
    tokens = [printable(trajectory.token_texts.get(int(token), "\ufffd")) for token in frame.model_input]
    styles = [style(name) for name in mask_names(trajectory, r)]
    if board := _board_of(trajectory):
        text = _grid(board, tokens, styles)
    else:
        text = Text.assemble(*zip(tokens, styles, strict=True), overflow="fold")
    calls = header.calls
    counts = [f" · {int(header.mask(frame, name).sum())} {printable(name)}" for name in header.masks if name != FIXED]
    deficits = [one.mean_deficit for one in trajectory.frames[: min(r + 1, calls)]]
    when = f"output after {calls} calls" if r == calls else f"call {r + 1}/{calls} · t {frame.t:.3f}"
    facts = Text(f"{when}{''.join(counts)}\ndeficit ", style="dim")
    facts.append(sparkline(deficits, max(8, width - 22)), "cyan").append(f" {deficits[-1]:.3f}")
    return Panel(Group(facts, Text(), text), title=Text(printable(header.name), style="bold"), title_align="left")


def _board_of(trajectory: Trajectory) -> Board | None:
    """The sudoku that a trajectory's rows hold, if they hold one."""
    layout = SUDOKU.get(trajectory.header.layout or "")
    return layout.board if layout and layout.length == trajectory.header.length else None


def _grid(size: Board, tokens: list[str], styles: list[str]) -> Text:
    """The solution half of a sudoku row as a grid: clues bold, clashes red."""
    puzzle, board = tokens[1 : 1 + size.cells], tokens[-size.cells :]
    text, wrong = Text(), clashes(puzzle, board)
    for cell in range(size.cells):
        row, column = divmod(cell, size.side)
        if column == 0 and row and row % size.height == 0:
            text.append(line_between(size) + "\n")
        added = [CLUE] * (puzzle[cell] in size.digits) + [CLASH] * wrong[cell]
        text.append(board[cell], " ".join([styles[cell - size.cells], *added]))
        text.append("\n" if column == size.side - 1 else " | " if (column + 1) % size.width == 0 else " ")
    text.rstrip()
    return text
