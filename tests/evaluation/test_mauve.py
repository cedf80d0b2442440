"""MAUVE beside its authors' package, mauve-text: the area of equal histograms exactly, the whole over k-means seeds."""

from __future__ import annotations

import sys

import mauve as reference
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from limpet.evaluation import metrics
from limpet.evaluation.metrics.mauve import NODES, SCALE, _reduce
from thinned import thinned

parts = sys.modules["mauve.compute_mauve"]  # the package gives its function the module's name


def theirs(generated, real, seeds, buckets="auto"):
    """One score a seed, and the histograms."""
    return [
        reference.compute_mauve(p_features=generated, q_features=real, seed=seed, num_buckets=buckets)
        for seed in range(seeds)
    ]


def clouds(shift, seed=3, n=400, width=12):
    random = np.random.default_rng(seed)
    return random.normal(size=(n, width)) + shift, random.normal(size=(n, width))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12))
def test_the_area_of_equal_histograms_is_theirs(counts):
    p, q = (np.array([pair[side] + (i == side) for i, pair in enumerate([(0, 0), (0, 0), *counts])]) for side in (0, 1))
    p, q = p / p.sum(), q / q.sum()
    x, y = parts.get_divergence_curve_for_multinomials(p, q, np.linspace(1e-6, 1 - 1e-6, NODES), SCALE).T
    along, across = np.argsort(x), np.argsort(y)
    area = parts.compute_area_under_curve(x[along], y[along]) + parts.compute_area_under_curve(y[across], x[across])
    assert metrics.frontier_area(p, q) == pytest.approx(area / 2, abs=1e-12)


@pytest.mark.parametrize("shift", [0.0, 0.3, 2.0])
def test_their_histograms_have_their_score(shift):
    for found in theirs(*clouds(shift), seeds=2):
        assert metrics.frontier_area(found.p_hist, found.q_hist) == pytest.approx(found.mauve, abs=1e-12)
        assert found.num_buckets == len(found.p_hist) == 40  # a tenth of the smaller set, as here


def test_the_principal_axes_are_theirs():
    """Up to the sign of each, which moves no distance."""
    generated, real = clouds(0.3)
    points = np.vstack([generated, real]) * np.linspace(3, 0.1, 12)
    unit = parts.normalize(points, norm="l2", axis=1)
    pca = parts.PCA().fit(unit)
    kept = int(np.argmax(np.cumsum(pca.explained_variance_ratio_) >= 0.9)) + 1
    ours = _reduce(points)
    assert ours.shape[1] == kept < 12
    np.testing.assert_allclose(np.abs(ours), np.abs(pca.transform(unit)[:, :kept]), atol=1e-10)


def test_clear_clusters_do_not_depend_on_the_seed():
    """Four tight clusters of unequal sizes: every clustering finds the same histograms."""
    random = np.random.default_rng(5)
    shares = ([90, 60, 40, 10], [20, 50, 60, 70])
    ours, real = (np.repeat(np.eye(4), share, axis=0) + random.normal(size=(200, 4)) * 0.01 for share in shares)
    (found,) = theirs(ours, real, 1, buckets=4)
    p, q = (np.array(share) / 200 for share in shares)
    assert found.mauve == pytest.approx(metrics.frontier_area(p, q), abs=1e-12)
    np.testing.assert_allclose(metrics.mauve(ours, real, buckets=4), found.mauve, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shift", thinned([0.3, 0.0, 0.15, 0.5]))
def test_over_seeds_the_whole_agrees(shift):
    """The two draw different clusterings, and scores differ by .01 to .04 between seeds. Over 30 seeds each, the means
    are within .03, and within four standard errors of their difference."""
    generated, real = clouds(shift)
    ours = metrics.mauve(generated, real, seeds=30)
    other = np.array([found.mauve for found in theirs(generated, real, 30)])
    error = np.sqrt((ours.var(ddof=1) + other.var(ddof=1)) / 30)
    assert abs(ours.mean() - other.mean()) < min(0.03, 4 * error)
    assert 0.5 < ours.std(ddof=1) / other.std(ddof=1) < 2
