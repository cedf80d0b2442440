"""How a puzzle is written and read: by the layout, in sampling, and on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import limpet
from limpet.cli.main import main
from limpet.errors import LimpetError
from limpet.evaluation.checkers import sudoku
from limpet.models.prompt_layouts import BOARDS, LAYOUTS

LAYOUT = LAYOUTS["sudoku"]
KNOWN = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"
ROW = f"?{KNOWN.replace('.', '0')}="


@pytest.fixture(scope="module")
def model():
    return limpet.load("sudoku", device="cpu")


@pytest.mark.parametrize(
    "text",
    [KNOWN, KNOWN.replace(".", "0"), f" {KNOWN}\n", ROW, "\n".join(KNOWN[i : i + 9] for i in range(0, 81, 9))],
)
def test_a_puzzle_may_be_written_in_the_usual_ways(text: str) -> None:
    assert LAYOUT.write(text) == ROW


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (KNOWN[:-1], "the puzzle has 80 cells: write 81"),
        (KNOWN * 2, "the puzzle has 162 cells: write 81"),
        ("", "the puzzle has 0 cells"),
        (KNOWN[:-1] + "x", "holds 'x': write 81 digits from 1 to 9, row by row, with . or 0 for a blank"),
        ("puzzle.txt", "holds 'elptuxz'"),
        ("55" + KNOWN[2:], "the clues clash: 5 stands twice in row 1"),
        (KNOWN[:-9] + "5" + KNOWN[-8:], "the clues clash: 5 stands twice in column 1"),
        (KNOWN[:10] + "3" + KNOWN[11:], "the clues clash: 3 stands twice in (column 2|box 1)"),
        ("\u0665" + KNOWN[1:], r"holds '\u0665'"),
    ],
)
def test_what_is_no_puzzle_is_one_sentence(model, text: str, sentence: str) -> None:
    for call in (lambda: LAYOUT.write(text), lambda: limpet.sample(model, "native nfe=2", n=1, prompt=text)):
        with pytest.raises(LimpetError, match=sentence) as caught:
            call()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("cells", "height", "width"), [(81, 3, 3), (36, 2, 3), (16, 2, 2)])
def test_the_units_are_rows_columns_and_boxes(cells: int, height: int, width: int) -> None:
    board = BOARDS[cells]
    assert len(board.units) == 3 * board.side
    for name, unit in board.units.items():
        assert len(set(unit)) == board.side
        kind, number = name.split()
        for cell in unit:
            row, column = divmod(cell, board.side)
            box = row // height * (board.side // width) + column // width
            assert {"row": row, "column": column, "box": box}[kind] + 1 == int(number)


def test_a_sample_begins_with_its_puzzle(model) -> None:
    lines = sudoku.puzzles(2, 40, seed=1)
    out = limpet.sample(model, "mend nfe=8", n=2, prompt=lines)
    assert [one.prompt for one in out] == [LAYOUT.write(line) for line in lines]
    assert out.prompt_length == 83
    assert out == limpet.sample(model, "mend nfe=8", n=2, prompt=[LAYOUT.write(line) for line in lines])
    assert len(out.texts[0]) == 164


def test_without_a_prompt_the_puzzle_is_empty_and_clean_in_every_call(model) -> None:
    for step in limpet.steps(model, "native nfe=3", n=2):
        assert step.text()[:83] == LAYOUT.empty
        assert step.model_input[:, :83].tolist() == [model.tokenizer.encode(LAYOUT.empty)] * 2


def test_what_is_fixed_within_the_puzzle_is_completed_by_blanks(model) -> None:
    five = model.tokenizer.encode("5")[0]
    out = limpet.sample(model, "native nfe=2", n=1, fixed={1: five, 90: five})
    assert out[0].prompt == "?5" + "0" * 80 + "="
    assert out[0].tokens[90] == five
    clues = torch.tensor(model.tokenizer.encode(ROW)[:40])
    assert limpet.sample(model, "native nfe=2", n=1, prompt=clues)[0].prompt == ROW[:40] + "0" * 42 + "="


def test_another_length_is_refused(model) -> None:
    with pytest.raises(LimpetError, match="sudoku knows rows of 164 tokens: leave length out"):
        limpet.sample(model, "native nfe=2", n=1, length=100)


def test_a_sample_is_printed_as_a_grid() -> None:
    board = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"
    lines = LAYOUT.display(ROW + board).split("\n")
    assert lines[0] == "5 3 4 | 6 7 8 | 9 1 2"
    assert lines[3] == "------+-------+------"
    assert len(lines) == 11
    assert LAYOUT.display("something else") == "something else"


def test_a_saved_model_keeps_its_layout_and_checker(model, tmp_path: Path) -> None:
    model.save(tmp_path / "copy", storage="bfloat16")
    again = limpet.load(tmp_path / "copy", device="cpu")
    assert (again.prompt_layout, again.checker) == (LAYOUT, "sudoku")
    assert again.digest == model.digest


@pytest.mark.parametrize(
    ("key", "value"), [("checker", "./mine.py:Mine"), ("checker", 3), ("layout", "chess"), ("layout", None)]
)
def test_a_config_names_no_file_and_no_unknown_layout(model, tmp_path: Path, key: str, value: object) -> None:
    model.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(LimpetError, match=f"has {key} .*, and a model takes"):
        limpet.load(tmp_path, device="cpu")


def test_a_puzzle_of_6x6_has_36_cells_and_digits_to_6() -> None:
    layout = LAYOUTS["sudoku-6x6"]
    line = "123456" + "." * 30
    assert layout.write(line) == "?123456" + "0" * 30 + "="
    assert len(layout.empty) == 38
    for text, sentence in (
        (line[:-1], "the puzzle has 35 cells: write 36"),
        (line[:-1] + "7", "holds '7': write 36 digits from 1 to 6"),
        (line[:-1] + "x", "holds 'x': write 36 digits"),
        (line[:6] + "1" + line[7:], "the clues clash: 1 stands twice in (column 1|box 1)"),
    ):
        with pytest.raises(LimpetError, match=sentence):
            layout.write(text)
    lines = layout.display(layout.empty + "123456" * 6).split("\n")
    assert (lines[0], lines[2], len(lines)) == ("1 2 3 | 4 5 6", "------+------", 8)


# The command line


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("puzzle.txt").write_text(KNOWN + "\n")
    Path("two.txt").write_text("\n".join(sudoku.puzzles(2, 40, seed=0)) + "\n")
    Path("short.txt").write_text(KNOWN[:-1])
    Path("six.txt").write_text(sudoku.puzzles(1, 14, seed=0, size=sudoku.SIX)[0] + "\n")
    return tmp_path


def test_a_puzzle_on_the_command_line_is_a_text_or_a_file(files: Path, capsys) -> None:
    common = ["sample", "--model", "sudoku", "--device", "cpu", "--n", "1", "--sampler", "mend", "--nfe", "8"]
    assert main([*common, "--prompt", "puzzle.txt", "--json"]) == 0
    from_file = json.loads(capsys.readouterr().out)
    assert main([*common, "--prompt", KNOWN, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == from_file
    assert from_file["prompt"] == ROW
    assert main([*common, "--prompt", "puzzle.txt"]) == 0
    assert "------+-------+------" in capsys.readouterr().out
    assert main([*common, "--prompts", "two.txt", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["prompt"] for row in rows] == [LAYOUT.write(line) for line in Path("two.txt").read_text().split()]
    assert main([*common, "--prompt", "short.txt"]) == 2
    assert "the puzzle has 80 cells" in capsys.readouterr().err
    common[2] = "sudoku-6x6"
    assert main([*common, "--prompt", "short.txt"]) == 2
    assert "holds '789': write 36 digits from 1 to 6" in capsys.readouterr().err
    assert main([*common, "--prompt", "six.txt"]) == 0
    assert "------+------\n" in capsys.readouterr().out


def test_puzzles_are_compared_without_a_judge(files: Path, capsys) -> None:
    common = ["compare", "--model", "sudoku", "--device", "cpu", "--nfe", "4", "--n", "1", "--seeds", "1", "2"]
    chosen = ["--sampler", "native", "--sampler", "mend"]
    assert main([*common, *chosen, "--prompt", "puzzle.txt", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["judge"] is None
    assert list(document["samplers"][0]["measures"])[:3] == ["solved", "valid", "clues kept"]
    assert "delta_nll" not in document["samplers"][1]
    assert main([*common, *chosen, "--prompts", "two.txt"]) == 0
    printed = capsys.readouterr().out
    assert "2 seeds x 2 samples" in printed
    assert "solved" in printed
    assert "------+-------+------" in printed
    assert main([*common, "--prompt", "short.txt"]) == 2
    assert main([*common, "--prompt", "puzzle.txt", "--prompts", "two.txt"]) == 2
    assert "both prompt and prompts" in capsys.readouterr().err
