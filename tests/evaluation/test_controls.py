"""Controls are what they say, stand in a comparison beside the samplers, and novelty exposes the copied one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import limpet
from limpet import LimpetError
from limpet.evaluation import control_sets, reference_set
from limpet.evaluation.controls import COPIES, NGRAMS, ORDER, SHIFTS, SLACK
from limpet.evaluation.metrics import entropy, novelty

ROWS = st.lists(st.lists(st.integers(0, 2), max_size=9), min_size=1, max_size=4)


@given(ROWS, ROWS, st.integers(1, 4))
def test_novelty_is_the_share_of_unknown_n_grams(tokens: list[list[int]], known: list[list[int]], n: int) -> None:
    real = {tuple(row[i : i + n]) for row in known for i in range(len(row) - n + 1)}
    for row, found in zip(tokens, novelty(tokens, known, n), strict=True):
        grams = [tuple(row[i : i + n]) for i in range(len(row) - n + 1)]
        expected = sum(gram not in real for gram in grams) / len(grams) if grams else np.nan
        assert found == pytest.approx(expected, nan_ok=True)


@pytest.fixture(scope="module")
def mini() -> limpet.Denoiser:
    return limpet.load("mini", device="cpu")


@pytest.mark.parametrize("wanted", [3.9, 4.2])
def test_controls_are_made_of_the_reference_at_the_wanted_entropy(mini: limpet.Denoiser, wanted: float) -> None:
    length = 96
    real = [ids for _, ids in reference_set(mini, length).ids or ()]
    sets = control_sets(mini, None, 16, (1, 2), length, wanted)
    rows = {name: [[ids for _, ids in one.ids or ()] for one in parts] for name, parts in sets.items()}
    assert [*rows] == [NGRAMS, SHIFTS, COPIES]
    assert all(len(row) == length for parts in rows.values() for part in parts for row in part)
    assert all(parts[0] != parts[1] for parts in rows.values())  # another seed, other texts
    assert abs(entropy(rows[NGRAMS][0]).mean() - wanted) < 0.15
    grams = {tuple(row[i : i + ORDER]) for row in real for i in range(length - ORDER + 1)}
    assert all(tuple(row[i : i + ORDER]) in grams for row in rows[NGRAMS][0] for i in range(0, length, ORDER))
    passage = min(real, key=lambda row: abs(float(entropy([row])[0]) - (wanted - SLACK)))
    for row in rows[SHIFTS][0]:
        differ = (sum(a != b for a, b in zip(np.roll(passage, k), row, strict=True)) for k in range(length))
        assert min(differ) <= length // 4
    assert abs(entropy(rows[SHIFTS][0]).mean() - wanted) < 0.15
    assert all(row in real for row in rows[COPIES][0])
    assert (novelty(rows[COPIES][0], real) == 0).all()
    assert novelty(rows[NGRAMS][0], real).mean() > 0.8


def test_a_comparison_has_a_row_for_each_control() -> None:
    model = limpet.load("exact:words")
    result = limpet.compare(model, ["native", "crs"], nfe=6, n=3, seeds=(1, 2), controls=True)
    rows = {row[0]: row[1:] for row in result.table().rows}
    assert [*rows][2:] == [NGRAMS, SHIFTS, COPIES, "true distribution"]
    assert result.table().head[-1].startswith("novelty-8")
    assert rows[COPIES][-1] == "0.0000 ± 0.0000"
    assert result.controls[COPIES].estimate("novelty-8").mean < min(
        one.scores.estimate("novelty-8").mean for one in result.samplers
    )
    assert set(result.to_dict()["controls"]) == {NGRAMS, SHIFTS, COPIES}


def test_without_controls_a_comparison_is_as_before() -> None:
    model = limpet.load("exact:words")
    plain, controlled = (
        limpet.compare(model, ["native"], nfe=4, n=2, seeds=(1,), controls=some) for some in (False, True)
    )
    assert plain.table().head[-1].startswith("rep-4")
    assert "controls" not in plain.to_dict()
    assert np.array_equal(plain.samplers[0].scores.nll, controlled.samplers[0].scores.nll)


@pytest.mark.long
def test_mauve_is_a_column_of_enough_samples() -> None:
    model = limpet.load("mini", device="cpu")
    judge = limpet.load_judge("mini-judge", device="cpu")
    result = limpet.compare(
        model, ["native"], nfe=2, n=64, seeds=(1,), length=16, judge=judge, metrics=["mauve"], controls=True
    )
    assert result.table().head[-1].startswith("MAUVE")
    values = {row[0]: float(row[-1].split()[0]) for row in result.table().rows}
    assert 0 <= values["native"] < values[COPIES] <= 1


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("exact:words", {"metrics": ["mauve"]}, "at least 64 samples of each sampler, not 2"),
        ("exact:words", {"metrics": ["novel"]}, "there is no metric"),
        ("exact:words", {"controls": True, "prompt": "the "}, "controls have no prompt"),
        ("sudoku", {"controls": True}, "does not write prose"),
    ],
)
def test_what_cannot_be_controlled_is_one_sentence(name: str, more: dict, message: str) -> None:
    with pytest.raises(LimpetError, match=message):
        limpet.compare(limpet.load(name, device="cpu"), ["native"], nfe=2, n=2, seeds=(1,), **more)
