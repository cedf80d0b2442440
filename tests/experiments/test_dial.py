"""The fit of the dial: its ends, and `limpet tune`, which saves it where sharpness finds it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import limpet
from limpet import LimpetError
from limpet.cli.main import main
from limpet.experiments import dial
from limpet.experiments.dial import DialCandidate, choose_ends
from limpet.samplers.recommended import dial_path

RELEASED = 4.0
MEASURED = st.tuples(st.floats(3, 4.5), st.floats(0, 5))
GRID = [(p, b) for p in dial.TOP_P for b in dial.BUDGETS]


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("LIMPET_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_each_end_is_the_best_candidate_that_is_diverse_enough():
    found = [
        DialCandidate(0.9, 0.06, 4.1, 3.0),
        DialCandidate(0.8, 0.25, 4.0, 2.5),
        DialCandidate(0.7, 0.06, 3.99, 2.2),  # as diverse up to rounding, and better
        DialCandidate(0.7, 1.0, 3.8, 2.0),
        DialCandidate(0.6, 1.0, 3.77, 1.5),
        DialCandidate(0.5, 1.0, 3.7, 1.0),  # gives up more than 6%
        DialCandidate(0.8, 1.0, 3.9, 0.5),  # higher top-p than the diverse end
    ]
    chosen = choose_ends(found, RELEASED)
    assert (chosen.top_p, chosen.budget, chosen.sharp_top_p, chosen.sharp_budget) == (0.7, 0.06, 0.6, 1.0)


@given(st.lists(MEASURED, min_size=len(GRID), max_size=len(GRID)))
def test_every_measurement_gives_a_dial_that_falls(measured):
    found = [DialCandidate(*at, *values) for at, values in zip(GRID, measured, strict=True)]
    chosen = choose_ends(found, RELEASED)
    ends = {(one.top_p, one.budget): one for one in found}
    diverse = ends[chosen.top_p, chosen.budget]
    low = RELEASED * (1 - dial.ROUNDING)
    assert diverse.entropy >= low or diverse.entropy == max(one.entropy for one in found)
    assert all(one.error >= diverse.error for one in found if min(one.entropy, diverse.entropy) >= low)
    assert chosen.sharp_top_p <= chosen.top_p
    assert chosen.sharp_budget >= chosen.budget
    assert bool(chosen.sharp_budget) == bool(chosen.budget)


def test_the_report_needs_fresh_seeds():
    with pytest.raises(LimpetError, match="seeds that no choice has used"):
        dial.fit(4, [1, 2], [2], None)


def test_the_command_saves_a_dial_that_sharpness_finds(home, capsys):
    call = ["tune", "exact:words", "--nfe", "4", "--n", "2", "--n-seeds", "2", "--json"]
    assert main(call) == 0
    found = json.loads(capsys.readouterr().out)
    model = limpet.load("exact:words")
    assert found["file"] == str(dial_path(model.digest))
    assert dial_path(model.digest).parent.parent == home
    assert found["fresh"]["seeds"] == [5001, 5003]
    assert len(found["candidates"]) == len(GRID)
    tuned = dial.Dial(**found["dial"])
    for sharpness in (0.0, 0.5, 1.0):
        assert limpet.recommended(4, sharpness, model) == tuned.sampler(4, sharpness)
    assert main(["tune", "exact:words", "--nfe", "4", "--n", "2", "--n-seeds", "2"]) == 0
    assert f"saved: {dial_path(model.digest)}" in capsys.readouterr().out.replace("\n", "")


@pytest.mark.long
def test_a_checker_decides_where_the_model_has_one(home, capsys):
    assert main(["tune", "sudoku", "--nfe", "4", "--n", "2", "--n-seeds", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["quality"] == "valid"
    assert all(0 <= one["error"] <= 1 for one in found["candidates"])
    assert dial_path(limpet.load("sudoku").digest).is_file()


def test_a_search_over_a_space_takes_no_checker(home, capsys):
    assert main(["tune", "exact:words", "--space", "crs", "--checker", "sudoku"]) == 2
    assert "leave checker out" in " ".join(capsys.readouterr().err.split())
