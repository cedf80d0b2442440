"""Sudoku: the checker `sudoku`, the rules, an exact solver, and generators of boards and of puzzles with one solution.

A board is 81 numbers in reading order. 0 is a blank."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from limpet.errors import LimpetError
from limpet.models.prompt_layouts import BOXES, CELLS, COLUMNS, PUZZLE, ROWS, SOLUTION

ROW = [cell // 9 for cell in range(CELLS)]
COLUMN = [cell % 9 for cell in range(CELLS)]
BOX = [3 * (cell // 27) + cell % 9 // 3 for cell in range(CELLS)]
HOUSES = [*ROWS, *COLUMNS, *BOXES]
DIGITS = 0b1111111110  # bit d is set where digit d is possible
COUNTS = [bits.bit_count() for bits in range(1 << 10)]
ATTEMPTS = 200  # boards tried for one puzzle


# The rules


def is_valid(boards: np.ndarray | Sequence[Sequence[int]]) -> np.ndarray:
    """Whether boards are full and no row, column or box holds a digit twice: (n, 81) -> (n,) bool."""
    valid: np.ndarray = wrong_units(boards) == 0
    return valid


def wrong_units(boards: np.ndarray | Sequence[Sequence[int]]) -> np.ndarray:
    """How many of the 27 rows, columns and boxes do not hold every digit once: (n, 81) -> (n,)."""
    cells = np.asarray(boards, dtype=np.int64).reshape(-1, CELLS)
    bits = np.left_shift(1, np.where((cells < 1) | (cells > 9), 0, cells))[:, HOUSES]  # (n, 27, 9)
    wrong: np.ndarray = (np.bitwise_or.reduce(bits, axis=2) != DIGITS).sum(1)
    return wrong


# The solver


def solutions(puzzle: Sequence[int], limit: int = 2, rng: random.Random | None = None) -> list[list[int]]:
    """The solutions of a puzzle of 81 numbers, at most `limit` of them; none if its clues clash.

    Two are enough to know that a solution is not the only one. `rng` shuffles the order in which digits are tried.
    Backtracking goes over the blank cell with the fewest candidates, which are kept as bits of rows, columns, boxes."""
    if len(puzzle) != CELLS or not all(0 <= digit <= 9 for digit in puzzle):
        raise LimpetError(f"a puzzle is 81 numbers from 0 (blank) to 9, not {len(puzzle)} of {min(puzzle, default=0)} "
                          f"to {max(puzzle, default=0)}")  # fmt: skip
    board, found = [int(digit) for digit in puzzle], list[list[int]]()
    rows, columns, boxes = [DIGITS] * 9, [DIGITS] * 9, [DIGITS] * 9
    blanks = [cell for cell, digit in enumerate(board) if digit == 0]

    def candidates(cell: int) -> int:
        return rows[ROW[cell]] & columns[COLUMN[cell]] & boxes[BOX[cell]]

    def toggle(cell: int, digit: int) -> None:
        """Use a digit up in the three houses of a cell, or give it back."""
        rows[ROW[cell]] ^= 1 << digit
        columns[COLUMN[cell]] ^= 1 << digit
        boxes[BOX[cell]] ^= 1 << digit

    def descend() -> None:
        if not blanks:
            found.append(board.copy())
            return
        fewest, chosen = 10, 0
        for place, cell in enumerate(blanks):
            if (count := COUNTS[candidates(cell)]) < fewest:
                fewest, chosen = count, place
                if fewest <= 1:
                    break
        cell = blanks[chosen]
        blanks[chosen] = blanks[-1]
        blanks.pop()
        digits = [digit for digit in range(1, 10) if candidates(cell) >> digit & 1]
        if rng is not None:
            rng.shuffle(digits)
        for digit in digits:
            board[cell] = digit
            toggle(cell, digit)
            descend()
            toggle(cell, digit)
            if len(found) >= limit:
                break
        blanks.append(cell)
        blanks[chosen], blanks[-1] = blanks[-1], blanks[chosen]

    for cell, digit in enumerate(board):
        if digit and not candidates(cell) >> digit & 1:
            return []
        if digit:
            toggle(cell, digit)
    descend()
    return found


# Boards and puzzles


def base_boards(count: int, seed: int) -> np.ndarray:
    """Boards solved independently of each other, as (count, 81) uint8.

    Three boxes that share no unit are filled at random; backtracking with shuffled digits fills the rest."""
    rng = random.Random(seed)
    boards = []
    for _ in range(count):
        board = [0] * CELLS
        for box in (0, 4, 8):
            for cell, digit in zip(HOUSES[18 + box], rng.sample(range(1, 10), 9), strict=True):
                board[cell] = digit
        boards += solutions(board, limit=1, rng=rng)
    return np.array(boards, dtype=np.uint8)


def random_symmetries(boards: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Boards under a random symmetry each: (n, 81) or, for several boards that share one, (n, k, 81); same shape back.

    A symmetry exchanges digits (blanks stay blank), bands, stacks, rows of a band, columns of a stack, and perhaps
    rows with columns. It keeps valid boards valid and the number of solutions the same."""
    count, device = len(boards), boards.device
    draws = torch.rand(count, 34, device=device, generator=generator)
    bands, inner = draws[:, :6].view(count, 2, 3).argsort(-1), draws[:, 6:24].view(count, 2, 3, 3).argsort(-1)
    lines = (3 * bands[..., None] + inner).flatten(2)  # (n, 2, 9): where each row and each column comes from
    cells = 9 * lines[:, 0, :, None] + lines[:, 1, None, :]
    cells = torch.where(draws[:, 24, None, None] < 0.5, cells, cells.transpose(1, 2)).flatten(1)
    digits = torch.zeros(count, 10, dtype=torch.int64, device=device)
    digits[:, 1:] = 1 + draws[:, 25:].argsort(-1)
    flat = boards.long().view(count, -1, CELLS)
    moved = flat.gather(2, cells[:, None].expand_as(flat))
    return digits[:, None].expand(-1, flat.shape[1], -1).gather(2, moved).view(boards.shape).to(boards.dtype)


def random_puzzles(count: int, clues: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Puzzles with exactly `clues` clues and one solution, and the solutions: two (count, 81) uint8.

    Each comes from a board of its own, whose cells are emptied in random order as long as the solution stays the only
    one. Fewer than about 24 clues are rarely reached this way."""
    if not 17 <= clues <= CELLS:
        raise LimpetError(f"clues is {clues}; a puzzle with one solution has 17 to 81")
    rng, puzzles, boards = random.Random(seed), [], []
    for _ in range(count):
        for _ in range(ATTEMPTS):
            board = base_boards(1, rng.getrandbits(63))[0].tolist()
            puzzle = _emptied(board, clues, rng)
            if puzzle is not None:
                break
        else:
            raise LimpetError(f"no puzzle with {clues} clues was found among {ATTEMPTS} boards: ask for more clues")
        puzzles.append(puzzle)
        boards.append(board)
    return np.array(puzzles, dtype=np.uint8), np.array(boards, dtype=np.uint8)


def _emptied(board: list[int], clues: int, rng: random.Random) -> list[int] | None:
    """The board with cells emptied down to this many clues, or None where it cannot go that far in this order."""
    puzzle, left = board.copy(), CELLS
    for cell in rng.sample(range(CELLS), CELLS):
        if left == clues:
            break
        puzzle[cell] = 0
        if len(solutions(puzzle, limit=2)) == 1:
            left -= 1
        else:
            puzzle[cell] = board[cell]
    return puzzle if left == clues else None


def puzzles(count: int, clues: int = 32, seed: int = 0) -> list[str]:
    """Puzzles with exactly `clues` clues and one solution, as the usual lines of 81 cells with "." for a blank.

    A line is a prompt of the model `sudoku`; a file of such lines is what `--prompts` reads."""
    rows, _ = random_puzzles(count, clues, seed)
    return ["".join(map(str, row)).replace("0", ".") for row in rows.tolist()]


# The checker


class SudokuChecker:
    """Checks boards of 81 digits, alone or after their puzzle ("?" puzzle "=" board, a row of the model `sudoku`)."""

    conventions: ClassVar[Mapping[str, str]] = {
        "valid": "share of boards without a clash in any row, column or box",
        "solved": "share of puzzles whose board is valid and keeps every clue",
        "clues kept": "share of puzzles whose board keeps every clue",
        "wrong units": "rows, columns and boxes of 27 that do not hold every digit once, on average",
        "distinct": "different boards among the valid ones of a seed that were drawn without clues, as a share",
    }

    def check(self, text: str) -> dict[str, bool | float]:
        """Values of one board; those about clues only where there are clues."""
        puzzle, board = read_row(text)
        if board is None:
            checks: dict[str, bool | float] = {"valid": False, "wrong units": math.nan}
            return checks | ({"solved": False, "clues kept": False} if puzzle is None or any(puzzle) else {})
        wrong = int(wrong_units([board])[0])
        if puzzle is not None and not any(puzzle):
            return {"valid": wrong == 0, "wrong units": wrong}
        kept = puzzle is not None and all(clue in (0, digit) for clue, digit in zip(puzzle, board, strict=True))
        return {"solved": wrong == 0 and kept, "valid": wrong == 0, "clues kept": kept, "wrong units": wrong}

    def check_set(self, texts: Sequence[str]) -> dict[str, float]:
        """The share of different boards among the valid ones without clues, where a seed has such samples."""
        rows = [read_row(text) for text in texts]
        boards = [board for puzzle, board in rows if puzzle is not None and not any(puzzle)]
        if not boards:
            return {}
        valid = [tuple(board) for board in boards if board is not None and is_valid([board])[0]]
        return {"distinct": len(set(valid)) / len(valid) if valid else math.nan}


def read_row(text: str) -> tuple[list[int] | None, list[int] | None]:
    """The puzzle and the board of a text; None for what is not 81 digits. A board alone has the empty puzzle."""
    cells = "".join(text.split())
    puzzle, mark, board = cells.rpartition(SOLUTION)
    return _digits(puzzle.removeprefix(PUZZLE) if mark else "0" * CELLS), _digits(board)


def _digits(cells: str) -> list[int] | None:
    is_digits = len(cells) == CELLS and cells.isascii() and cells.replace(".", "0").isdigit()
    return [int(cell) for cell in cells.replace(".", "0")] if is_digits else None
