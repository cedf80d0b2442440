"""Prompt layouts: how a prompt is written for a model whose rows are no plain text.

A model names its layout in config.json ("layout": "sudoku"). The layout turns what a user writes into the text that
the tokenizer reads, says what stands there without a prompt, and prints a sample readably."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from limpet.errors import LimpetError, one_line

PUZZLE, SOLUTION = "?", "="  # stand before the two halves of a sudoku row


@dataclass(frozen=True)
class Board:
    """A size of sudoku: `side` rows, columns and digits, and boxes of `height` rows and `width` columns."""

    side: int
    height: int
    width: int
    fewest: int  # clues of a puzzle that has one solution

    @property
    def name(self) -> str:
        return f"{self.side}x{self.side}"

    @property
    def cells(self) -> int:
        return self.side**2

    @cached_property
    def digits(self) -> str:
        """The digits that fill a board; 0 is a blank."""
        return "123456789"[: self.side]

    @cached_property
    def units(self) -> dict[str, list[int]]:
        """The cells of each row, column and box, in which no digit may stand twice."""
        row, column = zip(*(divmod(cell, self.side) for cell in range(self.cells)), strict=True)
        box = [i // self.height * self.height + j // self.width for i, j in zip(row, column, strict=True)]
        kinds = {"row": row, "column": column, "box": box}
        return {
            f"{kind} {i + 1}": [cell for cell, place in enumerate(places) if place == i]
            for kind, places in kinds.items()
            for i in range(self.side)
        }


BOARDS = {board.cells: board for board in (Board(9, 3, 3, 17), Board(6, 2, 3, 8), Board(4, 2, 2, 4))}


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
    """A mark, the cells of a puzzle with 0 for a blank, a mark, the cells of the solution."""

    def __init__(self, name: str, board: Board) -> None:
        self.name, self.board = name, board
        self.length = 2 * (board.cells + 1)
        self.empty = PUZZLE + "0" * board.cells + SOLUTION
        self.characters = "0" + board.digits + PUZZLE + SOLUTION

    def write(self, prompt: str) -> str:
        """The usual line of cells, "." or 0 for a blank; white space and the marks of a row may stand in it."""
        cells = "".join(prompt.split()).removeprefix(PUZZLE).removesuffix(SOLUTION).replace(".", "0")
        count, digits = self.board.cells, self.board.digits
        strange = sorted({cell for cell in cells if cell not in "0" + digits})
        if strange:
            raise LimpetError(
                f"the puzzle {one_line(ascii(prompt), 40)} holds {''.join(strange)[:20]!r}: write {count} digits from "
                f"1 to {digits[-1]}, row by row, with . or 0 for a blank"
            )
        if len(cells) != count:
            raise LimpetError(f"the puzzle has {len(cells)} cells: write {count}, row by row, with . or 0 for a blank")
        for name, unit in self.board.units.items():
            clues = [cells[cell] for cell in unit if cells[cell] != "0"]
            twice = next((clue for clue in clues if clues.count(clue) > 1), None)
            if twice is not None:
                raise LimpetError(f"the clues clash: {twice} stands twice in {name}; correct the puzzle")
        return PUZZLE + cells + SOLUTION

    def display(self, text: str) -> str:
        """The solution as a grid of lines; a text of another form as it is."""
        board = text.rpartition(SOLUTION)[2]
        return grid(board) if len(board) == self.board.cells else text


def grid(cells: str) -> str:
    """The cells of a board as lines, with lines between the boxes; a blank is a dot."""
    board, lines = BOARDS[len(cells)], []
    for row in range(board.side):
        if row and row % board.height == 0:
            lines.append(line_between(board))
        shown = cells[board.side * row :][: board.side].replace("0", ".")
        lines.append(" | ".join(" ".join(shown[start:][: board.width]) for start in range(0, board.side, board.width)))
    return "\n".join(lines)


def line_between(board: Board) -> str:
    """The line of a grid between two bands of boxes."""
    return "-+-".join("-" * (2 * board.width - 1) for _ in range(board.side // board.width))


def clashes(puzzle: Sequence[str], board: Sequence[str]) -> list[bool]:
    """Which cells of a board are wrong: an equal digit in a row, column or box, or another than the clue."""
    size = BOARDS[len(board)]
    wrong = [clue in size.digits and clue != cell for clue, cell in zip(puzzle, board, strict=True)]
    for unit in size.units.values():
        digits = [board[cell] for cell in unit]
        for cell in unit:
            wrong[cell] |= board[cell] in size.digits and digits.count(board[cell]) > 1
    return wrong


SUDOKU = {
    name: SudokuLayout(name, BOARDS[cells]) for name, cells in {"sudoku": 81, "sudoku-6x6": 36}.items()
}  # the layouts of sudoku models
LAYOUTS: dict[str, PromptLayout] = {**SUDOKU}
