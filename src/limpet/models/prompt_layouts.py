"""Prompt layouts: how a prompt is written for a model whose rows are no plain text.

A model names its layout in config.json ("layout": "sudoku"). The layout turns what a user writes into the text that
the tokenizer reads, says what stands there without a prompt, and prints a sample readably."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from limpet.errors import LimpetError, one_line

CELLS = 81
DIGITS = tuple("123456789")
ROWS = [[9 * row + column for column in range(9)] for row in range(9)]
COLUMNS = [[9 * row + column for row in range(9)] for column in range(9)]
BOXES = [
    [27 * (box // 3) + 3 * (box % 3) + 9 * row + column for row in range(3) for column in range(3)] for box in range(9)
]
UNITS = {  # the cells of each row, column and box, in which no digit may stand twice
    **{f"row {i + 1}": cells for i, cells in enumerate(ROWS)},
    **{f"column {i + 1}": cells for i, cells in enumerate(COLUMNS)},
    **{f"box {i + 1}": cells for i, cells in enumerate(BOXES)},
}
PUZZLE, SOLUTION = "?", "="  # stand before the two halves of a sudoku row


class PromptLayout(ABC):
    """The form of a model's rows: a prompt of fixed length, then what is generated."""

    name: str
    length: int  # tokens of a row
    empty: str  # the prompt of a sample that has none, as the tokenizer reads it

    @abstractmethod
    def write(self, prompt: str) -> str:
        """A user's prompt as the tokenizer reads it. Raises where it is none."""

    @abstractmethod
    def display(self, text: str) -> str:
        """The text of a sample, to be read by people."""


class SudokuLayout(PromptLayout):
    """A mark, 81 cells of a puzzle with 0 for a blank, a mark, 81 cells of the solution."""

    name = "sudoku"
    length = 2 * (CELLS + 1)
    empty = PUZZLE + "0" * CELLS + SOLUTION

    def write(self, prompt: str) -> str:
        """The usual line of 81 cells, "." or 0 for a blank; white space and the marks of a row may stand in it."""
        cells = "".join(prompt.split()).removeprefix(PUZZLE).removesuffix(SOLUTION).replace(".", "0")
        strange = sorted({cell for cell in cells if cell not in "0123456789"})
        if strange:
            raise LimpetError(
                f"the puzzle {one_line(ascii(prompt), 40)} holds {''.join(strange)[:20]!r}: "
                "write 81 digits, row by row, with . or 0 for a blank"
            )
        if len(cells) != CELLS:
            raise LimpetError(f"the puzzle has {len(cells)} cells: write 81, row by row, with . or 0 for a blank")
        for name, unit in UNITS.items():
            clues = [cells[cell] for cell in unit if cells[cell] != "0"]
            twice = next((clue for clue in clues if clues.count(clue) > 1), None)
            if twice is not None:
                raise LimpetError(f"the clues clash: {twice} stands twice in {name}; correct the puzzle")
        return PUZZLE + cells + SOLUTION

    def display(self, text: str) -> str:
        """The solution as a grid of nine lines; a text of another form as it is."""
        board = text.rpartition(SOLUTION)[2]
        return grid(board) if len(board) == CELLS else text


def grid(cells: str) -> str:
    """The 81 cells of a board as lines, with lines between the boxes; a blank is a dot."""
    lines = []
    for row in range(9):
        if row in (3, 6):
            lines.append("------+-------+------")
        shown = cells[9 * row : 9 * row + 9].replace("0", ".")
        lines.append(" | ".join(" ".join(shown[start : start + 3]) for start in (0, 3, 6)))
    return "\n".join(lines)


def clashes(puzzle: Sequence[str], board: Sequence[str]) -> list[bool]:
    """Which of the 81 cells of a board are wrong: an equal digit in a row, column or box, or another than the clue."""
    wrong = [clue in DIGITS and clue != cell for clue, cell in zip(puzzle, board, strict=True)]
    for unit in UNITS.values():
        digits = [board[cell] for cell in unit]
        for cell in unit:
            wrong[cell] |= board[cell] in DIGITS and digits.count(board[cell]) > 1
    return wrong


LAYOUTS: dict[str, PromptLayout] = {"sudoku": SudokuLayout()}
