"""`limpet theory`: what it prints and writes, and its exit codes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from limpet import LimpetError
from limpet.cli import theory
from limpet.paper.theory import STATEMENTS, Sides, Statement, closed_loop

QUICK = "diminishing-returns"


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The command takes one thread for itself; the tests after it get theirs back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert theory.run(QUICK) == 0
    printed = capsys.readouterr().out
    for word in (QUICK, "corollary 4", "verdict", "holds", "equal"):
        assert word in printed


def test_json_holds_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert theory.run("separated-modes", json=True) == 0
    (statement,) = json.loads(capsys.readouterr().out)["statements"]
    assert statement["name"] == "separated-modes"
    assert len(statement["rows"]) == len(STATEMENTS["separated-modes"].sides())
    for row in statement["rows"]:
        assert set(row) == {"statement", "source", "left", "relation", "right", "error", "slack", "verdict"}
    assert statement["rows"][0]["left"] == "-inf"  # no noise, no error: its logarithm


def test_a_violation_is_shown_and_sets_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = [Sides("one <= zero", "nowhere", 1.0, "<=", 0.0), Sides("zero <= one", "here", 0.0, "<=", 1.0)]
    monkeypatch.setitem(STATEMENTS, QUICK, STATEMENTS[QUICK]._replace(sides=lambda: wrong))
    assert theory.run(QUICK) == 1
    assert "VIOLATED" in capsys.readouterr().out


def test_an_unknown_statement_is_named() -> None:
    with pytest.raises(LimpetError, match="did you mean shared-modes"):
        theory.run("shared-mode")
    with pytest.raises(LimpetError, match="it takes leave-one-out"):
        theory.run("zzz")


@pytest.mark.parametrize("name", [name for name in STATEMENTS if not name.startswith("closed-loop")])
def test_figures_are_drawn(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STATEMENTS, name, STATEMENTS[name]._replace(sides=list))
    assert theory.run(name, figures=tmp_path / "new") == 0
    assert (tmp_path / "new" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_closed_loop_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closed_loop, "SEQUENCES", 8)
    statement: Statement = STATEMENTS["closed-loop"]._replace(sides=list)
    monkeypatch.setitem(STATEMENTS, "closed-loop", statement)
    theory.run("closed-loop", figures=tmp_path)
    assert (tmp_path / "closed-loop.png").exists()


@pytest.mark.long
def test_the_exact_closed_loop_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "closed-loop-exact"
    monkeypatch.setitem(STATEMENTS, name, STATEMENTS[name]._replace(sides=list))
    theory.run(name, figures=tmp_path)
    assert (tmp_path / f"{name}.png").exists()
