"""Sudoku: rules, solver and generators against a second solver by exact cover, and the checker's values."""

from __future__ import annotations

import random
from itertools import permutations, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from limpet.errors import LimpetError
from limpet.evaluation import evaluate
from limpet.evaluation.checkers import find_checker, sudoku
from limpet.models.prompt_layouts import BOARDS

KNOWN = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"
SIZES = {81: (9, 3, 3), 36: (6, 2, 3), 16: (4, 2, 2)}  # cells: side, height and width of a box
SOLVED = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"


def cells(text: str) -> list[int]:
    return [int(cell) for cell in text.replace(".", "0")]


def is_solved(boards: np.ndarray, puzzles: np.ndarray) -> bool:
    """Whether all boards are valid and keep every clue of their puzzles."""
    return bool(sudoku.is_valid(boards).all() and ((puzzles == 0) | (boards == puzzles)).all())


def covers(columns: dict[object, set[object]], rows: dict[object, list[object]], limit: int) -> list[list[object]]:
    """All choices of rows that contain every column once (Knuth's algorithm X), at most `limit`."""
    if not columns:
        return [[]]
    found: list[list[object]] = []
    narrowest = min(columns, key=lambda column: len(columns[column]))
    for row in sorted(columns[narrowest], key=str):
        left = {
            column: {other for other in holders if not set(rows[other]) & set(rows[row])}
            for column, holders in columns.items()
            if column not in rows[row]
        }
        found += [[row, *rest] for rest in covers(left, rows, limit - len(found))]
        if len(found) >= limit:
            break
    return found


def by_exact_cover(puzzle: list[int], limit: int) -> set[tuple[int, ...]]:
    """The solutions of a puzzle, found without any part of the solver under test."""
    side, height, width = SIZES[len(puzzle)]
    rows: dict[object, list[object]] = {}
    for cell, clue in enumerate(puzzle):
        row, column = divmod(cell, side)
        for digit in [clue] if clue else range(1, side + 1):
            box = row // height * (side // width) + column // width
            rows[cell, digit] = [("cell", cell), ("row", row, digit), ("column", column, digit), ("box", box, digit)]
    columns: dict[object, set[object]] = {
        (name, house, digit): set()
        for name in ("row", "column", "box")
        for house in range(side)
        for digit in range(1, side + 1)
    }
    columns |= {("cell", cell): set() for cell in range(len(puzzle))}
    for choice, parts in rows.items():
        for part in parts:
            columns[part].add(choice)
    return {tuple(digit for _, digit in sorted(choice)) for choice in covers(columns, rows, limit)}


def test_a_known_puzzle_has_its_known_solution() -> None:
    assert sudoku.solutions(cells(KNOWN)) == [cells(SOLVED)]
    assert by_exact_cover(cells(KNOWN), 2) == {tuple(cells(SOLVED))}


@pytest.mark.parametrize(("size", "seed"), [*((81, seed) for seed in range(4)), (36, 0), (36, 1), (36, 2), (16, 0)])
def test_both_solvers_find_the_same_solutions(size: int, seed: int) -> None:
    """Of puzzles with one solution and with several, as cells are emptied one after the other."""
    rng = random.Random(seed)
    puzzle = sudoku.base_boards(1, seed, BOARDS[size])[0].tolist()
    counts = []
    for n, cell in enumerate(rng.sample(range(size), 52 * size // 81 + (size < 81) * 4)):
        puzzle[cell] = 0
        if n >= size // 2 + 4 * (size == 81) and n % 2:
            ours = {tuple(board) for board in sudoku.solutions(puzzle, limit=40)}
            theirs = by_exact_cover(puzzle, 40)
            counts.append(len(theirs))
            assert len(ours) == len(theirs)
            assert ours == theirs or len(theirs) == 40
    assert max(counts) > 1


def test_the_solver_stops_at_its_limit_and_sees_a_clash() -> None:
    assert len(sudoku.solutions([0] * 81, limit=5)) == 5
    assert sudoku.solutions(cells("11" + "." * 79)) == []
    nowhere = cells("12345678." + "." * 71 + "9")  # the first row lacks a 9
    nowhere[17] = 9
    assert sudoku.solutions(nowhere) == []
    for wrong in ([0] * 80, [10] + [0] * 80):
        with pytest.raises(LimpetError, match="a puzzle is 81 numbers"):
            sudoku.solutions(wrong)


def test_the_rules() -> None:
    """Against sets of digits, on valid boards with a few cells changed."""
    rng = np.random.default_rng(0)
    boards = sudoku.base_boards(60, 5).astype(int)
    for board in boards[20:]:
        for cell in rng.integers(0, 81, rng.integers(1, 4)):
            board[cell] = rng.integers(0, 11)
    squares = boards.reshape(-1, 9, 9)
    digits = set(range(1, 10))

    def wrong(square: np.ndarray) -> int:
        boxes = [square[r : r + 3, c : c + 3].ravel() for r in (0, 3, 6) for c in (0, 3, 6)]
        return sum(set(unit.tolist()) != digits for unit in [*square, *square.T, *boxes])

    assert sudoku.wrong_units(boards).tolist() == [wrong(square) for square in squares]
    valid = sudoku.is_valid(boards)
    assert valid[:20].all()
    assert valid.tolist() == [wrong(square) == 0 for square in squares]


@pytest.mark.parametrize("cells", [81, 36])
def test_boards_are_valid_distinct_and_a_function_of_the_seed(cells: int) -> None:
    boards = sudoku.base_boards(200, 3, BOARDS[cells])
    assert sudoku.is_valid(boards).all()
    assert len(np.unique(boards, axis=0)) == 200
    assert np.array_equal(boards[:20], sudoku.base_boards(20, 3, BOARDS[cells]))
    assert not np.array_equal(boards[:20], sudoku.base_boards(20, 4, BOARDS[cells]))


def test_all_boards_of_4x4_are_found_and_their_symmetries_are_boards() -> None:
    """By trying all rows that are permutations: there are 288. Two orbits of the symmetries cover them, one of 96."""
    lines = list(permutations(range(1, 5)))
    every = {
        sum(rows, ())
        for rows in product(lines, repeat=4)
        if all(len({row[i] for row in rows}) == 4 for i in range(4))
        and all(len({*rows[r][c : c + 2], *rows[r + 1][c : c + 2]}) == 4 for r in (0, 2) for c in (0, 2))
    }
    assert len(every) == 288
    assert {tuple(board) for board in sudoku.solutions([0] * 16, limit=1000)} == every
    orbits = []
    for board in (sudoku.solutions([0] * 16, limit=1)[0], *map(list, sorted(every))):
        if not any(tuple(board) in orbit for orbit in orbits):
            moved = sudoku.random_symmetries(torch.tensor([board]).expand(4000, -1), torch.Generator().manual_seed(0))
            orbits.append({tuple(one) for one in moved.tolist()})
    assert set.union(*orbits) == every
    assert sorted(map(len, orbits)) == [96, 192]


@pytest.fixture(scope="module")
def boards_of_6x6() -> np.ndarray:
    """All boards whose first row is 1 to 6, by trying every row below it against the rows above: (n, 36)."""
    lines = np.array(list(permutations(range(1, 7))))
    may_follow = (lines[:, None] != lines).all(2)
    halves = lines.reshape(-1, 2, 3)
    share_boxes = (halves[:, None, :, :, None] != halves[None, :, :, None]).all((2, 3, 4))
    rows = np.zeros((1, 1), int)
    for row in range(1, 6):
        fits = may_follow[rows].all(1) & (share_boxes[rows[:, -1]] if row % 2 else True)
        place, choice = fits.nonzero()
        rows = np.column_stack([rows[place], choice])
    return lines[rows].reshape(-1, 36)


def test_the_solver_finds_all_boards_of_6x6_below_two_rows(boards_of_6x6: np.ndarray) -> None:
    assert len(boards_of_6x6) * 720 == 28_200_960  # the known number of boards
    assert sudoku.is_valid(boards_of_6x6).all()
    band = [1, 2, 3, 4, 5, 6, 4, 6, 5, 2, 1, 3]
    expected = {tuple(board) for board in boards_of_6x6.tolist() if board[:12] == band}
    assert len(expected) > 900
    assert {tuple(board) for board in sudoku.solutions([*band, *[0] * 24], limit=5000)} == expected


def test_there_are_49_kinds_of_6x6_boards(boards_of_6x6: np.ndarray) -> None:
    """Boards are of one kind if a symmetry turns one into the other. The card of `sudoku-6x6` counts them."""

    def relabelled(boards: np.ndarray) -> list[bytes]:
        """With the first row 1 to 6."""
        digits = boards[:, :6].argsort(1) + 1
        return [row.tobytes() for row in np.take_along_axis(digits, boards - 1, 1)]

    number = {board: i for i, board in enumerate(relabelled(boards_of_6x6))}
    squares, kind = boards_of_6x6.reshape(-1, 6, 6), np.arange(len(number))
    swaps = {1: ([1, 0, 2, 3, 4, 5], [2, 3, 0, 1, 4, 5], [0, 1, 4, 5, 2, 3]),
             2: ([1, 0, 2, 3, 4, 5], [0, 2, 1, 3, 4, 5], [3, 4, 5, 0, 1, 2])}  # fmt: skip
    moves = [
        np.array([number[board] for board in relabelled(squares.take(order, axis).reshape(-1, 36))])
        for axis, orders in swaps.items()
        for order in orders
    ]
    while True:
        least = np.minimum.reduce([kind, *(kind[move] for move in moves)])
        if (least == kind).all():
            break
        kind = least[least]
    assert len(np.unique(kind)) == 49


def test_symmetries_of_6x6_are_all_that_keep_its_units() -> None:
    """3! 2!^3 orders of rows times 2! 3!^2 of columns. A transposition would turn boxes of 2x3 into boxes of 3x2."""
    size = BOARDS[36]
    draws = torch.rand(60_000, sudoku.places_drawn(size), generator=torch.Generator().manual_seed(0))
    orders = torch.unique(sudoku.cell_orders(size, draws), dim=0)
    assert len(orders) == 48 * 72
    assert torch.equal(orders.sort(1).values, torch.arange(36).expand_as(orders))
    boards = torch.from_numpy(sudoku.base_boards(1, 0, size)).long().expand(len(orders), -1)
    assert sudoku.is_valid(boards.gather(1, orders).numpy()).all()


@pytest.mark.parametrize(("size", "clues"), [(81, 34), (36, 14)])
def test_symmetries_keep_validity_blanks_and_the_number_of_solutions(size: int, clues: int) -> None:
    puzzles, boards = sudoku.random_puzzles(6, clues, 2, BOARDS[size])
    pairs = torch.from_numpy(np.stack([puzzles, boards], 1))  # a puzzle moves with its board
    moved = sudoku.random_symmetries(pairs, torch.Generator().manual_seed(0)).numpy()
    assert is_solved(moved[:, 1], moved[:, 0])
    assert ((moved[:, 0] > 0).sum(1) == clues).all()
    assert (moved != pairs.numpy()).any((1, 2)).all()
    for puzzle, board in moved[:3]:
        assert by_exact_cover(puzzle.tolist(), 2) == {tuple(board.tolist())}
    single = torch.from_numpy(boards[:1]).expand(500, -1)
    kinds = sudoku.random_symmetries(single, torch.Generator().manual_seed(1))
    assert len(torch.unique(kinds, dim=0)) >= (500 if size == 81 else 480)  # of 6x6 there are not many more


@pytest.mark.parametrize(("clues", "size"), [(26, 81), (32, 81), (50, 81), (10, 36), (14, 36), (8, 16)])
def test_generated_puzzles_have_one_solution_and_the_stated_number_of_clues(clues: int, size: int) -> None:
    puzzles, boards = sudoku.random_puzzles(3, clues, clues, BOARDS[size])
    assert ((puzzles > 0).sum(1) == clues).all()
    assert is_solved(boards, puzzles)
    for puzzle, board in zip(puzzles.tolist(), boards.tolist(), strict=True):
        assert by_exact_cover(puzzle, 2) == {tuple(board)}
    lines = sudoku.puzzles(3, clues, clues, BOARDS[size])
    assert [cells(line) for line in lines] == puzzles.tolist()
    assert all(len(line) == size and line.count(".") == size - clues for line in lines)
    assert len(set(lines)) == 3


def test_an_impossible_number_of_clues_is_a_sentence() -> None:
    with pytest.raises(LimpetError, match="clues is 16; a 9x9 puzzle with one solution has 17 to 81"):
        sudoku.puzzles(1, 16)


# The checker


def test_the_checker_of_a_puzzle() -> None:
    checker = find_checker("sudoku")
    row = f"?{KNOWN.replace('.', '0')}={SOLVED}"
    assert checker.check(row) == {"solved": True, "valid": True, "clues kept": True, "wrong units": 0}
    other = row[:-1] + "1"  # a clash in three units, and a clue is gone
    assert checker.check(other) == {"solved": False, "valid": False, "clues kept": False, "wrong units": 3}
    relabelled = SOLVED.translate(str.maketrans("123456789", "234567891"))
    found = checker.check(f"?{KNOWN.replace('.', '0')}={relabelled}")
    assert found == {"solved": False, "valid": True, "clues kept": False, "wrong units": 0}
    assert checker.check(f"?{KNOWN.replace('.', '0')}={SOLVED[:-1]}?")["solved"] is False
    assert checker.check("no board at all")["valid"] is False


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 80), st.integers(1, 9)), max_size=4), st.sets(st.integers(0, 80)))
def test_a_changed_board_is_judged_as_by_the_rules_alone(changes, given_cells) -> None:
    board, solved = cells(SOLVED), cells(SOLVED)
    for cell, digit in changes:
        board[cell] = digit
    puzzle = [solved[cell] if cell in given_cells else 0 for cell in range(81)]
    houses = [
        *([(row, i) for i in range(9)] for row in range(9)),
        *([(i, column) for i in range(9)] for column in range(9)),
        *([(a + i // 3, b + i % 3) for i in range(9)] for a in (0, 3, 6) for b in (0, 3, 6)),
    ]
    wrong = sum(len({board[9 * row + column] for row, column in house}) < 9 for house in houses)
    kept = all(board[cell] == solved[cell] for cell in given_cells)
    found = find_checker("sudoku").check("?{}={}".format(*("".join(map(str, one)) for one in (puzzle, board))))
    about_clues = {"solved": kept and not wrong, "clues kept": kept} if given_cells else {}
    assert found == {"valid": not wrong, "wrong units": wrong, **about_clues}


def test_the_checker_of_boards_without_clues() -> None:
    blank = "?" + "0" * 81 + "="
    values = evaluate([blank + SOLVED, SOLVED, SOLVED[::-1], SOLVED[1:] + "5"], metrics=(), checker="sudoku").values
    assert {name: column.tolist() for name, column in values.items()} == {
        "valid": [0.75],
        "wrong units": [pytest.approx(np.mean([0, 0, 0, sudoku.wrong_units([cells(SOLVED[1:] + "5")])[0]]))],
        "distinct": [pytest.approx(2 / 3)],  # the reversed board is another valid one
    }
    assert "distinct" not in evaluate([f"?{KNOWN}={SOLVED}"], metrics=(), checker="sudoku").values
    assert np.isnan(evaluate([blank + "1" * 81], metrics=(), checker="sudoku").values["distinct"]).all()
