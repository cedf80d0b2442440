"""`limpet paper theory`: what it prints and writes, and its exit codes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from limpet import LimpetError
from limpet.cli.paper import theory
from limpet.paper.theory import STATEMENTS, Check

QUICK = "diminishing-returns"


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The command sets one thread for itself; the tests after it get theirs back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert theory.run(QUICK) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in (QUICK, "corollary 4", "verdict", "holds", "equal"))


def test_json_has_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert theory.run("separated-modes", json=True) == 0
    (statement,) = json.loads(capsys.readouterr().out)["statements"]
    assert statement["name"] == "separated-modes"
    assert len(statement["rows"]) == len(STATEMENTS["separated-modes"].checks())
    for row in statement["rows"]:
        assert set(row) == {"statement", "source", "left", "relation", "right", "error", "slack", "verdict"}
    assert statement["rows"][0]["left"] == "-inf"  # the logarithm of 0, without noise


def test_a_violation_is_shown_and_sets_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = [Check("one <= zero", "nowhere", 1.0, "<=", 0.0), Check("zero <= one", "here", 0.0, "<=", 1.0)]
    monkeypatch.setitem(STATEMENTS, QUICK, STATEMENTS[QUICK]._replace(checks=lambda: wrong))
    assert theory.run(QUICK) == 1
    assert "VIOLATED" in capsys.readouterr().out


def test_an_unknown_statement_is_named() -> None:
    with pytest.raises(LimpetError, match="did you mean shared-modes"):
        theory.run("shared-mode")
    with pytest.raises(LimpetError, match="it takes leave-one-out"):
        theory.run("zzz")


def test_a_file_in_place_of_the_folder_of_figures_is_refused_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    monkeypatch.setitem(STATEMENTS, QUICK, STATEMENTS[QUICK]._replace(checks=lambda: pytest.fail("computed")))
    for figures in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(LimpetError, match=r"--figures takes a folder; .*file"):
            theory.run(QUICK, figures=figures)
    assert (tmp_path / "file").read_text() == "mine"


def draw(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STATEMENTS, name, STATEMENTS[name]._replace(checks=list))
    assert theory.run(name, figures=folder / "new") == 0
    assert (folder / "new" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", [name for name in STATEMENTS if not name.startswith("closed-loop")])
def test_figures_are_drawn(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw(name, tmp_path, monkeypatch)


def test_a_closed_loop_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw("closed-loop-interleave", tmp_path, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("name", ["closed-loop", "closed-loop-exact", "closed-loop-mend"])
def test_closed_loops_are_drawn(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw(name, tmp_path, monkeypatch)
