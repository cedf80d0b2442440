"""Statistics against literal formulas and the paper's own published numbers."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from limpet.errors import LimpetError
from limpet.evaluation import statistics

# The paper's frontier table: (GenPPL, entropy) at 64 NFE. Controls run from p = 1.0 down to 0.75.
DISTILLED = {
    "curve": [(41.79, 5.351), (34.34, 5.326), (29.76, 5.296), (25.94, 5.251), (23.34, 5.205), (20.38, 5.148)],
    128: (33.09, 5.336),
    256: (30.54, 5.328),
    512: (28.27, 5.317),
    1024: (27.62, 5.312),
}
BASE = {
    "curve": [(80.35, 5.233), (59.53, 5.250), (48.42, 5.221), (39.86, 5.195), (32.34, 5.114), (28.33, 5.075)],
    128: (51.96, 5.243),
    256: (41.99, 5.216),
    512: (35.75, 5.184),
    1024: (34.60, 5.170),
}
REPORTED = {128: (-0.089, 0.029), 256: (-0.130, 0.038), 512: (-0.154, 0.031), 1024: (-0.155, 0.030)}


def residual(table, budget):
    ppl, entropy = zip(*table["curve"], strict=True)
    return statistics.matched(entropy, np.log(ppl), table[budget][1], math.log(table[budget][0]))


@pytest.mark.parametrize("budget", REPORTED)
def test_every_published_residual_is_met_within_its_error(budget):
    """The means of the table are not the means of residuals per seed, but must be within one reported error."""
    reported, se = REPORTED[budget]
    assert abs(residual(DISTILLED, budget).mean - reported) < se


def test_base_duos_fold_is_refused_as_the_paper_does():
    """The curve turns back between p = 1 and 0.95: the paper reads p <= 0.9 only, at budgets 256 and above."""
    for budget in (256, 512, 1024):
        assert residual(BASE, budget).mean < 0
    refused = residual(BASE, 128)
    assert math.isnan(refused.mean)
    assert refused.reasons == (statistics.FOLD,)
    ppl, entropy = zip(*BASE["curve"], strict=True)
    whole = statistics.interpolate(entropy, ppl, 5.1)
    assert whole == statistics.interpolate(entropy[2:], ppl[2:], 5.1)
    assert statistics.interpolate(entropy, ppl, 5.225) == pytest.approx((math.nan, statistics.FOLD), nan_ok=True)
    assert statistics.interpolate(entropy, ppl, 5.221) == (48.42, None)  # the end of the branch


@given(st.lists(st.integers(0, 9), min_size=2, max_size=7), st.floats(-1, 10), st.integers(0, 99))
def test_a_value_is_given_only_where_the_curve_passes_once(nodes, x, seed):
    ys = np.random.default_rng(seed).normal(size=len(nodes))
    value, reason = statistics.interpolate(nodes, ys, x)
    assert (reason is None) != math.isnan(value)
    passes = set()
    for i in range(len(nodes) - 1):
        low, high = sorted(nodes[i : i + 2])
        if low == high == x:
            passes |= {round(ys[i], 9), round(ys[i + 1], 9)}
        elif low != high and low <= x <= high:
            passes.add(round(ys[i] + (ys[i + 1] - ys[i]) * (x - nodes[i]) / (nodes[i + 1] - nodes[i]), 9))
    if reason is None:
        assert passes == {round(value, 9)}
    if not min(nodes) <= x <= max(nodes):
        assert "outside the curve" in reason


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(-9, 9)), min_size=1, max_size=9))
def test_a_hull_is_the_least_that_mixing_two_points_reaches(points):
    """Whole numbers, so that points on chords are there; every pair of points, by the formula of a chord."""
    xs, ys = statistics.hull(*zip(*points, strict=True))
    assert (np.diff(xs) > 0).all()
    slopes = np.diff(ys) / np.diff(xs)
    assert (np.diff(slopes) > 0).all()
    for x in np.linspace(min(x for x, _ in points), max(x for x, _ in points), 7):
        chords = [y1 if x1 == x2 else y1 + (y2 - y1) * (x - x1) / (x2 - x1)
                  for x1, y1 in points for x2, y2 in points if x1 <= x <= x2]  # fmt: skip
        assert np.interp(x, xs, ys) == pytest.approx(min(chords), abs=1e-9)


def test_matching_is_per_seed_and_one_seed_without_a_value_leaves_no_mean():
    curves_x, curves_y = [[1.0, 2.0], [1.0, 2.0], [3.0, 4.0]], [[0.0, 1.0], [0.0, 2.0], [0.0, 1.0]]
    inside = statistics.matched(curves_x[:2], curves_y[:2], [1.5, 1.25], [0.0, 0.0])
    assert inside.values.tolist() == [-0.5, -0.5]
    assert (inside.mean, inside.se) == (-0.5, 0.0)
    part = statistics.matched(curves_x, curves_y, [1.5, 1.25, 1.5], [0.0, 0.0, 0.0])
    assert math.isnan(part.mean)
    assert part.values[:2].tolist() == [-0.5, -0.5]
    assert part.reasons == (None, None, "1.5 is outside the curve, 3 to 4")
    assert "not a number" in statistics.matched([[1, math.nan]], [[0, 1]], [1.0], [0.0]).reasons[0]


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=9))
def test_mean_and_error_are_their_formulas(values):
    estimate = statistics.mean_se(values)
    mean = sum(values) / len(values)
    assert estimate.mean == pytest.approx(mean, abs=1e-9)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    assert estimate.se == pytest.approx(math.sqrt(variance / len(values)), abs=1e-9)


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=6))
def test_the_perplexity_of_several_seeds_is_exp_of_the_mean_nll(nll):
    """So the order by GenPPL is the order by NLL."""
    found, logs = statistics.GeometricMean(np.exp(nll)), statistics.mean_se(nll)
    assert found.mean == pytest.approx(math.exp(logs.mean))
    assert found.se == pytest.approx(found.mean * logs.se, abs=1e-12)
    assert statistics.GeometricMean(np.array([np.inf, 1.0])).mean == math.inf


def test_one_seed_has_no_error():
    assert math.isnan(statistics.mean_se([3.0]).se)
    assert statistics.mean_se(3.0).mean == 3.0


@given(st.integers(2, 6), st.integers(0, 99))
def test_differences_are_taken_seed_by_seed(n, seed):
    a, b, c, d = np.random.default_rng(seed).normal(size=(4, n)) + np.random.default_rng(seed).normal(size=n)
    difference = statistics.paired(a, b)
    np.testing.assert_allclose(difference.values, [x - y for x, y in zip(a, b, strict=True)])
    interaction = statistics.difference_of_differences(a, b, c, d)
    np.testing.assert_allclose(interaction.values, (a - b) - (c - d), atol=1e-12)
    assert interaction.mean == pytest.approx(difference.mean - statistics.paired(c, d).mean)


def test_bootstrap_covers_the_mean_as_often_as_it_says():
    """400 normal samples of 60: a 90% interval misses about 40 times; outside 20 to 64 has chance below 1e-3."""
    random = np.random.default_rng(3)
    misses = 0
    for trial in range(400):
        interval = statistics.bootstrap(random.normal(size=60), level=0.9, resamples=200, seed=trial)
        misses += not interval.low < 0 < interval.high
    assert 20 <= misses <= 64


def test_bootstrap_draws_whole_rows_within_groups():
    random = np.random.default_rng(0)
    pairs = np.stack([values := random.normal(size=50), values + 1], -1)
    interval = statistics.bootstrap(pairs, lambda rows: float((rows[:, 1] - rows[:, 0]).mean()))
    assert interval.low == pytest.approx(1)
    assert interval.high == pytest.approx(1)
    apart = np.repeat([0.0, 100.0], 25)  # no variation within groups
    assert statistics.bootstrap(apart, groups=apart.tolist())[:2] == (50, 50)
    assert statistics.bootstrap(apart).low < 45
    shuffled = random.permutation(50)
    assert statistics.bootstrap(apart[shuffled], groups=apart[shuffled].tolist())[:2] == (50, 50)
    unequal = np.array([0.0] * 5 + [1.0] * 20)
    assert statistics.bootstrap(unequal, groups=unequal.tolist())[:2] == pytest.approx((0.8, 0.8))
    assert statistics.bootstrap(values) == statistics.bootstrap(values)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: statistics.paired([1, 2, 3], [1, 2]), "3 and 2"),
        (lambda: statistics.difference_of_differences([1], [1], [1], [1, 2]), "1 and 1 and 1 and 2"),
        (lambda: statistics.mean_se([]), "one or more seeds"),
        (lambda: statistics.matched([[1, 2]], [[1, 2]], [1, 2], [1, 2]), "curve for each seed"),
        (lambda: statistics.matched([[1]], [[1]], [1], [1]), "two or more nodes"),
        (lambda: statistics.bootstrap([]), "one sample or more"),
        (lambda: statistics.bootstrap([1.0], level=1.5), "between 0 and 1"),
    ],
)
def test_errors_are_sentences(call, words):
    with pytest.raises(LimpetError) as raised:
        call()
    assert words in str(raised.value)


def test_infinities_are_values_like_others():
    """An impossible sample has an infinite NLL, and so has its seed, without a warning; JSON has None for it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert statistics.mean_se([1, np.inf]).mean == np.inf
        assert statistics.mean_se([1, np.inf]).to_dict() == {"mean": None, "se": None, "values": [1, None]}
        assert np.isnan(statistics.paired([np.inf, 1], [np.inf, 1]).mean)
        statistics.bootstrap([1, np.inf, 2], resamples=50)
