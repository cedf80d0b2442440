"""MAUVE between two sets of texts: the area under their divergence frontier, for several k-means seeds."""

import numpy as np
from numpy.typing import ArrayLike

from limpet.errors import LimpetError
from limpet.evaluation.metrics.ngrams import Floats, Ints

SCALE = 5.0  # the c of exp(-c KL)
NODES = 25  # mixture weights along the frontier
VARIANCE = 0.9  # share of the variance that the principal components keep


def _reduce(features: Floats) -> Floats:
    """The rows scaled to unit norm, centred, on the fewest principal axes that keep VARIANCE of the variance."""
    norms = np.linalg.norm(features, axis=1, keepdims=True)
    centred = features / np.where(norms > 0, norms, 1)
    centred = centred - centred.mean(0)
    _, scale, axes = np.linalg.svd(centred, full_matrices=False)
    share = np.cumsum(scale**2) / max(float((scale**2).sum()), np.finfo(float).tiny)
    kept = min(int((share < VARIANCE).sum()) + 1, len(scale))
    reduced: Floats = centred @ axes[:kept].T
    return reduced


def _nearest(points: Floats, centres: Floats) -> tuple[Ints, Floats]:
    square = (points**2).sum(1)[:, None] - 2 * points @ centres.T + (centres**2).sum(1)
    cluster = square.argmin(1)
    return cluster, np.maximum(square[np.arange(len(points)), cluster], 0)


def _k_means(points: Floats, k: int, random: np.random.Generator, rounds: int) -> tuple[Ints, float]:
    """Lloyd's algorithm from a k-means++ start; an empty cluster moves to the point farthest from its centre."""
    centres = points[random.integers(len(points))][None]
    square = ((points - centres) ** 2).sum(1)
    while len(centres) < k:
        # Probability proportional to squared distance; uniform if every point is a centre already.
        weight = square / square.sum() if square.sum() > 0 else np.full(len(points), 1 / len(points))
        centre = points[random.choice(len(points), p=weight)]
        centres = np.vstack([centres, centre])
        square = np.minimum(square, ((points - centre) ** 2).sum(1))
    cluster, square = _nearest(points, centres)
    for _ in range(rounds):
        sums = np.zeros_like(centres)
        np.add.at(sums, cluster, points)
        size = np.bincount(cluster, minlength=k)
        centres = np.where(size[:, None] > 0, sums / np.maximum(size, 1)[:, None], centres)
        empty = np.flatnonzero(size == 0)
        centres[empty] = points[np.argsort(-square)[: len(empty)]]
        before, (cluster, square) = cluster, _nearest(points, centres)
        if (cluster == before).all():
            break
    return cluster, float(square.sum())


def _divergence(probs: Floats, mixture: Floats) -> float:
    held = probs > 0
    return float((probs[held] * np.log(probs[held] / mixture[held])).sum())


def frontier_area(p: ArrayLike, q: ArrayLike) -> float:
    """MAUVE of two histograms: the area under (exp(-c KL(q|r)), exp(-c KL(p|r))), r running from q to p."""
    p, q = np.asarray(p, dtype=np.float64), np.asarray(q, dtype=np.float64)
    mixtures = [w * p + (1 - w) * q for w in np.linspace(1e-6, 1 - 1e-6, NODES)]
    x = np.exp([-SCALE * _divergence(q, r) for r in mixtures])
    y = np.exp([-SCALE * _divergence(p, r) for r in mixtures])
    x, y = np.concatenate([[1.0], x, [0.0]]), np.concatenate([[0.0], y, [1.0]])
    return float((-np.diff(x) * (y[1:] + y[:-1]) / 2).sum())


def mauve(
    generated: ArrayLike,
    real: ArrayLike,
    buckets: int | None = None,
    seeds: int = 5,
    starts: int = 5,
    rounds: int = 500,
) -> Floats:
    """MAUVE for each k-means seed, from features of both sets; report the spread over seeds with the mean.

    generated: (n, D) features. real: (m, D) features. buckets: clusters (default: a tenth of the smaller set).
    starts: clusterings of each seed; the tightest is kept. rounds: limit on the steps of Lloyd's algorithm."""
    a, b = np.asarray(generated, dtype=np.float64), np.asarray(real, dtype=np.float64)
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1] or not len(a) or not len(b):
        raise LimpetError(f"MAUVE takes (n, D) and (m, D) features with n and m above 0, not {a.shape} and {b.shape}")
    k = buckets or max(2, round(min(len(a), len(b)) / 10))
    if k > len(a) + len(b):
        raise LimpetError(f"MAUVE cannot put {len(a) + len(b)} texts into {k} buckets; give fewer buckets")
    points = _reduce(np.vstack([a, b]))
    scores = []
    for seed in range(seeds):
        random = np.random.default_rng(seed)
        cluster, _ = min((_k_means(points, k, random, rounds) for _ in range(starts)), key=lambda result: result[1])
        p, q = (np.bincount(part, minlength=k) / len(part) for part in (cluster[: len(a)], cluster[len(a) :]))
        scores.append(frontier_area(p, q))
    return np.array(scores)
