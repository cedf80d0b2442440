"""The dial: a smooth monotone rule, one default everywhere, and the dials that `limpet tune` saves."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import limpet
from limpet import LimpetError
from limpet.cli import bulk, compare, infill, main, sample, serve, watch
from limpet.paper.studies import interleave
from limpet.samplers import parse
from limpet.samplers.recommended import NFE, SHARPNESS, Dial, SavedDial, dial_path

CALLS = st.integers(2, 1000)
SHARP = st.floats(0, 1)
TUNED = Dial(top_p=0.7, sharp_top_p=0.5, budget=0.2, sharp_budget=0.4)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("LIMPET_HOME", str(tmp_path))


@given(CALLS, SHARP, SHARP)
def test_a_sharper_sampler_draws_from_less_and_commits_more(nfe, one, other):
    diverse, sharp = (limpet.recommended(nfe, s) for s in sorted([one, other]))
    assert diverse.late_top_p >= sharp.late_top_p
    assert diverse.budget <= sharp.budget
    assert diverse.spacing >= sharp.spacing
    assert diverse.nfe == sharp.nfe == nfe


@given(CALLS, st.floats(0, 0.99))
def test_a_small_turn_changes_little(nfe, sharpness):
    here, next_to = limpet.recommended(nfe, sharpness), limpet.recommended(nfe, sharpness + 0.01)
    assert abs(here.late_top_p - next_to.late_top_p) <= 0.01
    assert abs(np.log(here.budget / next_to.budget)) <= 0.05
    changed = {name for name in here.to_dict() if getattr(here, name, 0) != getattr(next_to, name, 0)}
    assert changed <= {"late_top_p", "budget"} | ({"spacing"} if sharpness <= 0.5 < sharpness + 0.01 else set())


def test_its_ends_are_measured_samplers():
    """Of the study `interleave`, which chose them on seeds 1, 2 and 5000 and reported them on others."""
    ends = (interleave.SAMPLERS["interleaved"][0], interleave.SAMPLERS["mend"][1])
    assert [parse(text)[1].replace(nfe=12) for text in ends] == [limpet.recommended(12, s) for s in (0, 1)]


@given(CALLS, SHARP)
def test_without_a_budget_it_is_native_sampling(nfe, sharpness):
    sampler = Dial(budget=0.0, sharp_budget=0.0).sampler(nfe, sharpness)
    assert type(sampler) is limpet.Native
    committing = limpet.recommended(nfe, sharpness)
    assert {name: getattr(committing, name) for name in vars(sampler)} == vars(sampler) | {"final_step": "keep"}


@given(CALLS, CALLS, SHARP)
def test_many_calls_inspect_half_as_often_and_nothing_else_depends_on_the_calls(few, many, sharpness):
    samplers = [limpet.recommended(nfe, sharpness) for nfe in (few, many)]
    assert [one.own_turn for one in samplers] == [nfe >= 16 for nfe in (few, many)]
    assert samplers[0].replace(nfe=many, own_turn=many >= 16) == samplers[1]


def test_from_sixteen_calls_on_fewer_rows_of_the_head_are_computed():
    model = limpet.load("exact:words")
    rows = [limpet.sample(model, limpet.recommended(nfe, 0), n=4, seed=0).head_rows for nfe in (15, 16)]
    assert rows[1] < 0.85 * rows[0]


def test_entropy_falls_with_sharpness_where_the_distribution_is_known():
    """4 seeds x 32 samples, 8 calls. Each step lowers the mean entropy by more than two of its standard errors."""
    model = limpet.load("exact:words")
    samplers = {f"{s}": limpet.recommended(8, s) for s in (0.0, 0.5, 1.0)}
    result = limpet.compare(model, samplers, n=32)
    values = [one.scores.values["entropy"] for one in result.samplers]
    for diverse, sharp in itertools.pairwise(values):
        fall = diverse - sharp
        assert fall.mean() > 2 * fall.std(ddof=1) / np.sqrt(len(fall))


def test_the_default_is_one(capsys):
    model = limpet.load("exact:chain")
    default = limpet.recommended()
    assert (default.nfe, default) == (NFE, limpet.recommended(NFE, SHARPNESS))
    assert limpet.sample(model, n=1).sampler == default
    assert next(limpet.steps(model, trace=False)).context.model is model
    for command in (sample, compare, serve, watch, bulk, infill):
        arguments = inspect.signature(command.run).parameters
        assert arguments["sharpness"].default is None
        assert arguments["sampler"].default in (None, ())
    assert limpet.compare(model, nfe=4, n=1, seeds=[1]).samplers[-1].sampler == limpet.recommended(4)
    assert main.main("sample --model exact:chain --nfe 4 --n 1 --json".split()) == 0
    printed = capsys.readouterr()
    assert f"sharpness {SHARPNESS:g}, 4 network calls: {limpet.recommended(4).caption}" in " ".join(printed.err.split())
    assert limpet.sample(model, n=1, nfe=4).lines() == printed.out


def test_a_sampler_without_sharpness_is_what_it_was():
    model = limpet.load("exact:chain")
    assert limpet.sample(model, "crs nfe=4", n=1, nfe=8).sampler == limpet.CRS(nfe=4)
    assert limpet.sample(model, "crs", n=1, nfe=8).sampler == limpet.CRS(nfe=8)
    assert limpet.sample(model, limpet.CRS(nfe=4), n=1).sampler == limpet.CRS(nfe=4)
    with pytest.raises(LimpetError, match="nfe is 8, and the sampler makes 4 calls"):
        limpet.sample(model, limpet.CRS(nfe=4), n=1, nfe=8)


@pytest.mark.parametrize(
    "line", ["sample --sampler crs", "compare --sampler crs", "watch --sampler crs", "bulk out --sampler crs"]
)
def test_a_sampler_and_a_sharpness_are_one_plain_error(line, capsys):
    assert main.main([*line.split(), "--sharpness", "0.5"]) == 2
    assert "both a sampler and a sharpness are given" in " ".join(capsys.readouterr().err.split())


def test_in_python_too():
    model = limpet.load("exact:chain")
    for draw in (limpet.sample, limpet.steps):
        with pytest.raises(LimpetError, match="leave one out"):
            draw(model, "crs", sharpness=0.5)
    with pytest.raises(LimpetError, match="leave one out"):
        limpet.compare(model, ["crs"], sharpness=0.5)


@pytest.mark.parametrize("sharpness", [-0.1, 1.1, float("nan"), "sharp", True])
@pytest.mark.parametrize("nfe", [16])
def test_a_wrong_sharpness_is_refused(nfe, sharpness):
    with pytest.raises(LimpetError, match=r"takes a number from 0 \(diverse\) to 1 \(sharp\)"):
        limpet.recommended(nfe, sharpness)


@pytest.mark.parametrize("nfe", [1, 0, 2.5, None, True])
def test_wrong_calls_are_refused(nfe):
    with pytest.raises(LimpetError, match="takes a whole number from 2"):
        limpet.recommended(nfe, 0.5)


def save(model, digest, **changes):
    saved = SavedDial(model, digest, "for a test", TUNED)
    path = dial_path(digest)
    path.parent.mkdir(exist_ok=True)
    path.write_text(replace(saved, **changes).toml())
    return path


def test_a_saved_dial_is_found_for_its_model_alone():
    model, other = limpet.load("exact:chain"), limpet.load("exact:words")
    save(model.name, model.digest)
    assert limpet.recommended(8, 0.5, model) == TUNED.sampler(8, 0.5) != limpet.recommended(8, 0.5)
    assert limpet.sample(model, n=1, nfe=8, sharpness=0.5).sampler == TUNED.sampler(8, 0.5)
    assert limpet.recommended(8, 0.5, other) == limpet.recommended(8, 0.5)


def test_a_foreign_or_edited_dial_is_refused():
    model, other = limpet.load("exact:chain"), limpet.load("exact:words")
    path = save(model.name, model.digest)
    text = path.read_text()
    path.write_text(text.replace("0.7", "0.8"))
    with pytest.raises(LimpetError, match="edited after limpet tune wrote it: run limpet tune again"):
        limpet.recommended(8, 0.5, model)
    path.write_text(text.replace("0.7", "7"))
    with pytest.raises(LimpetError, match="top_p is 7"):
        limpet.recommended(8, 0.5, model)
    dial_path(other.digest).write_text(text)
    with pytest.raises(LimpetError, match=r"is the dial of exact:chain \(.*\), not of exact:words"):
        limpet.recommended(8, 0.5, other)
