"""Sudoku: the checker `sudoku`, the rules, an exact solver, and generators of boards and of puzzles with one solution.

A board is 81, 36 or 16 numbers in reading order: 9x9, 6x6 with boxes of 2 rows and 3 columns, or 4x4. 0 is a blank.
The number of cells tells the size."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from limpet.errors import LimpetError
from limpet.models.prompt_layouts import BOARDS, PUZZLE, SOLUTION, Board

NINE, SIX = BOARDS[81], BOARDS[36]
COUNTS = [bits.bit_count() for bits in range(1 << 10)]
ATTEMPTS = 200  # boards tried for one puzzle


# The rules


def is_valid(boards: np.ndarray | Sequence[Sequence[int]]) -> np.ndarray:
    """Whether boards are full and no row, column or box holds a digit twice: (n, cells) -> (n,) bool."""
    valid: np.ndarray = wrong_units(boards) == 0
    return valid


def wrong_units(boards: np.ndarray | Sequence[Sequence[int]]) -> np.ndarray:
    """How many rows, columns and boxes do not hold every digit once: (n, cells) -> (n,)."""
    cells = np.asarray(boards, dtype=np.int64)
    board = BOARDS[cells.shape[-1]]
    bits = np.left_shift(1, np.where((cells < 1) | (cells > board.side), 0, cells))
    units = bits[:, list(board.units.values())]  # (n, units, side)
    wrong: np.ndarray = (np.bitwise_or.reduce(units, axis=2) != all_digits(board)).sum(1)
    return wrong


def all_digits(board: Board) -> int:
    """The digits of a board as bits: bit d is set for digit d."""
    return (2 << board.side) - 2


# The solver


@cache
def units_of(board: Board) -> list[list[int]]:
    """For each cell, the numbers of its row, its column and its box among the units of a board."""
    units = list(board.units.values())
    return [[i for i, unit in enumerate(units) if cell in unit] for cell in range(board.cells)]


def solutions(puzzle: Sequence[int], limit: int = 2, rng: random.Random | None = None) -> list[list[int]]:
    """The solutions of a puzzle, at most `limit` of them; none if its clues clash.

    Two are enough to know that a solution is not the only one. `rng` shuffles the order in which digits are tried.
    Backtracking goes over the blank cell with the fewest candidates, which are kept as bits of rows, columns, boxes."""
    size = BOARDS.get(len(puzzle))
    if size is None or not all(0 <= digit <= size.side for digit in puzzle):
        raise LimpetError(f"a puzzle is 81 numbers from 0 (blank) to 9, 36 to 6 or 16 to 4, not {len(puzzle)} of "
                          f"{min(puzzle, default=0)} to {max(puzzle, default=0)}")  # fmt: skip
    board, found = [int(digit) for digit in puzzle], list[list[int]]()
    free = [all_digits(size)] * (3 * size.side)  # of each row, column and box
    units = units_of(size)
    blanks = [cell for cell, digit in enumerate(board) if digit == 0]

    def candidates(cell: int) -> int:
        row, column, box = units[cell]
        return free[row] & free[column] & free[box]

    def toggle(cell: int, digit: int) -> None:
        """Use a digit up in the row, column and box of a cell, or give it back."""
        for unit in units[cell]:
            free[unit] ^= 1 << digit

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
        digits = [digit for digit in range(1, size.side + 1) if candidates(cell) >> digit & 1]
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


def base_boards(count: int, seed: int, size: Board = NINE) -> np.ndarray:
    """Boards solved independently of each other, as (count, cells) uint8.

    Boxes on a diagonal share no unit and are filled at random; backtracking with shuffled digits fills the rest."""
    rng = random.Random(seed)
    stacks, bands = size.side // size.width, size.side // size.height
    boards = []
    for _ in range(count):
        board = [0] * size.cells
        for place in range(min(bands, stacks)):
            box = size.units[f"box {place * (stacks + 1) + 1}"]
            for cell, digit in zip(box, rng.sample(range(1, size.side + 1), size.side), strict=True):
                board[cell] = digit
        boards += solutions(board, limit=1, rng=rng)
    return np.array(boards, dtype=np.uint8)


def random_symmetries(boards: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Boards under a random symmetry each: (n, cells) or, for several that share one, (n, k, cells); same shape back.

    A symmetry exchanges digits (blanks stay blank), bands, stacks, rows of a band, columns of a stack, and perhaps
    rows with columns where boxes are square. It keeps valid boards valid and the number of solutions the same."""
    size = BOARDS[boards.shape[-1]]
    draws = torch.rand(len(boards), places_drawn(size) + size.side, device=boards.device, generator=generator)
    digits = torch.zeros(len(boards), size.side + 1, dtype=torch.int64, device=boards.device)
    digits[:, 1:] = 1 + draws[:, places_drawn(size) :].argsort(-1)
    flat = boards.long().view(len(boards), -1, size.cells)
    moved = flat.gather(2, cell_orders(size, draws)[:, None].expand_as(flat))
    return digits[:, None].expand(-1, flat.shape[1], -1).gather(2, moved).view(boards.shape).to(boards.dtype)


def places_drawn(size: Board) -> int:
    """How many random numbers decide where the cells of a board go."""
    return size.side // size.height + size.side // size.width + 2 * size.side + 1


def cell_orders(size: Board, draws: Tensor) -> Tensor:
    """The cell that each cell of a board comes from under a random symmetry: (n, numbers) uniform -> (n, cells)."""
    side, height, width = size.side, size.height, size.width
    sizes = [side // height, side // width, side, side, 1]
    bands, stacks, rows, columns, turn = torch.split(draws[:, : sum(sizes)], sizes, 1)

    def lines(outer: Tensor, inner: Tensor) -> Tensor:
        """Where each line comes from: some numbers order the bands, and others the lines of each."""
        within = inner.reshape(len(inner), outer.shape[1], -1).argsort(-1)
        return (within.shape[2] * outer.argsort(-1)[..., None] + within).flatten(1)

    cells = side * lines(bands, rows)[:, :, None] + lines(stacks, columns)[:, None, :]
    if height == width:
        cells = torch.where(turn[..., None] < 0.5, cells, cells.transpose(1, 2))
    return cells.flatten(1)


def random_puzzles(count: int, clues: int, seed: int, size: Board = NINE) -> tuple[np.ndarray, np.ndarray]:
    """Puzzles with exactly `clues` clues and one solution, and the solutions: two (count, cells) uint8.

    Each comes from a board of its own, whose cells are emptied in random order as long as the solution stays the only
    one. Fewer than about 24 clues of 9x9, or 10 of 6x6, are rarely reached this way."""
    if not size.fewest <= clues <= size.cells:
        raise LimpetError(f"clues is {clues}; a {size.name} puzzle with one solution has {size.fewest} to {size.cells}")
    rng, puzzles, boards = random.Random(seed), [], []
    for _ in range(count):
        for _ in range(ATTEMPTS):
            board = base_boards(1, rng.getrandbits(63), size)[0].tolist()
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
    puzzle, left = board.copy(), len(board)
    for cell in rng.sample(range(left), left):
        if left == clues:
            break
        puzzle[cell] = 0
        if len(solutions(puzzle, limit=2)) == 1:
            left -= 1
        else:
            puzzle[cell] = board[cell]
    return puzzle if left == clues else None


def puzzles(count: int, clues: int = 32, seed: int = 0, size: Board = NINE) -> list[str]:
    """Puzzles with exactly `clues` clues and one solution, as the usual lines of cells with "." for a blank.

    A line is a prompt of the model `sudoku` or `sudoku-6x6`; a file of such lines is what `--prompts` reads."""
    rows, _ = random_puzzles(count, clues, seed, size)
    return ["".join(map(str, row)).replace("0", ".") for row in rows.tolist()]


# The checker


class SudokuChecker:
    """Checks boards of any size, alone or after their puzzle ("?" puzzle "=" board, a row of a sudoku model)."""

    conventions: ClassVar[Mapping[str, str]] = {
        "valid": "share of boards without a clash in any row, column or box",
        "solved": "share of puzzles whose board is valid and keeps every clue",
        "clues kept": "share of puzzles whose board keeps every clue",
        "wrong units": "rows, columns and boxes that do not hold every digit once, on average",
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
    """The puzzle and the board of a text; None for what is no board. A board alone has the empty puzzle."""
    cells = "".join(text.split())
    before, mark, after = cells.rpartition(SOLUTION)
    board = _digits(after)
    puzzle = _digits(before.removeprefix(PUZZLE)) if mark else [0] * len(after)
    return puzzle, board if board is None or puzzle is None or len(puzzle) == len(board) else None


def _digits(cells: str) -> list[int] | None:
    board, digits = BOARDS.get(len(cells)), cells.replace(".", "0")
    return [int(cell) for cell in digits] if board and not set(digits) - set("0" + board.digits) else None
