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
    name = "closed-loop-interleave"
    monkeypatch.setitem(STATEMENTS, name, STATEMENTS[name]._replace(checks=lambda: pytest.fail("computed")))
    for figures in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(LimpetError, match=r"--figures takes a folder; .*file"):
            theory.run(name, figures=figures)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    "name",
    [
        "closed-loop-interleave",
        pytest.param("closed-loop", marks=pytest.mark.long),
        pytest.param("closed-loop-exact", marks=pytest.mark.long),
    ],
)
def test_figures_are_drawn(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STATEMENTS, name, STATEMENTS[name]._replace(checks=list))
    assert theory.run(name, figures=tmp_path / "new") == 0
    assert (tmp_path / "new" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_statement_without_a_figure_is_not_drawn(tmp_path: Path) -> None:
    with pytest.raises(LimpetError, match="separated-modes has no figure; closed-loop, "):
        theory.run("separated-modes", figures=tmp_path / "new")
    assert not (tmp_path / "new").exists()
