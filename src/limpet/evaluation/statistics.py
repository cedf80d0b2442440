"""From values of shards to conclusions: means and errors, paired contrasts, matched interpolation, bootstrap.

A shard is one seed's worth of samples. Arms that share their seeds are paired, so an error is taken over the
shards' own differences, never over two separate errors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from limpet.errors import LimpetError

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Estimate:
    """One value per shard, their mean, and its standard error: std with ddof 1 over the root of the count.

    A shard without a value holds NaN, and so does the mean: a mean over the other shards would be of another
    comparison. `reasons` then says why, shard by shard."""

    values: Floats
    reasons: tuple[str | None, ...] = ()

    @property
    def mean(self) -> float:
        return float(self.values.mean())

    @property
    def se(self) -> float:
        """NaN for a single shard: one value says nothing about its error."""
        n = len(self.values)
        with np.errstate(invalid="ignore"):  # nor does an infinite one
            return float(self.values.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Mean, error and shards as plain numbers, None where there is none."""
        mean, se, *shards = numbers([self.mean, self.se, *self.values])
        return {"mean": mean, "se": se, "shards": shards}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Estimate:
        values = [math.nan if value is None else value for value in stored["shards"]]
        return cls(np.array(values, dtype=np.float64), tuple(stored.get("reasons", ())))

    def __str__(self) -> str:
        return f"{self.mean:.4g} ± {self.se:.2g}"

    def __format__(self, form: str) -> str:
        """Both numbers in one form, 41.79 ± 0.84 in .2f; no error for one shard alone, no number where one has none."""
        if not form or math.isnan(self.mean):
            return str(self) if not form else "n/a"
        error = f" ± {self.se:{form}}" if len(self.values) > 1 else ""
        return f"{self.mean:{form}}{error}"


def numbers(values: ArrayLike) -> list[float | None]:
    """Plain numbers for JSON, None where there is none."""
    return [value if math.isfinite(value) else None for value in np.asarray(values, dtype=np.float64).tolist()]


def mean(values: ArrayLike | Sequence[float | None]) -> float:
    """Of the samples that have a value; NaN where none has."""
    array = np.asarray(values, dtype=np.float64)
    held = array[~np.isnan(array)]
    return float(held.mean()) if held.size else math.nan


def mean_se(values: ArrayLike) -> Estimate:
    """The shards' mean and its standard error."""
    array = np.atleast_1d(np.asarray(values, dtype=np.float64))
    if array.ndim != 1 or not array.size:
        raise LimpetError(f"an estimate takes one value for each of one or more shards, not an array of {array.shape}")
    return Estimate(array)


def _aligned(*arms: ArrayLike) -> list[Floats]:
    values = [mean_se(arm).values for arm in arms]
    if len({len(arm) for arm in values}) > 1:
        counts = " and ".join(str(len(arm)) for arm in values)
        raise LimpetError(f"paired arms need the same shards, one value each, but have {counts}")
    return values


def paired(a: ArrayLike, b: ArrayLike) -> Estimate:
    """a - b, shard by shard."""
    left, right = _aligned(a, b)
    with np.errstate(invalid="ignore"):  # between two infinities there is no difference
        return Estimate(left - right)


def difference_of_differences(a: ArrayLike, b: ArrayLike, c: ArrayLike, d: ArrayLike) -> Estimate:
    """(a - b) - (c - d), shard by shard: how much less c -> d gains than a -> b."""
    a, b, c, d = _aligned(a, b, c, d)
    return Estimate((a - b) - (c - d))


FOLD = "the curve folds there: more than one of its segments passes this value"


def interpolate(curve_x: ArrayLike, curve_y: ArrayLike, x: float) -> tuple[float, str | None]:
    """The curve's y at x, linear between neighbouring nodes, or NaN and the reason why there is none.

    Nodes stand in the order of the parameter that made the curve (top-p, say), not of x. Two segments over the same
    stretch of x are a fold, and neither is read: so the paper keeps only p <= 0.9 of base Duo's curve, which turns
    back between p = 1 and p = 0.95. Nothing is extrapolated."""
    xs, ys = np.asarray(curve_x, dtype=np.float64), np.asarray(curve_y, dtype=np.float64)
    if xs.shape != ys.shape or xs.ndim != 1 or len(xs) < 2:
        raise LimpetError(f"a curve needs two or more nodes, an x and a y each, not {xs.shape} and {ys.shape}")
    if not (np.isfinite(xs).all() and np.isfinite(ys).all() and math.isfinite(x)):
        return math.nan, "a node or the value to match is not a number"
    if not xs.min() <= x <= xs.max():
        return math.nan, f"{x:.6g} is outside the curve, {xs.min():.6g} to {xs.max():.6g}"
    low, high = np.minimum(xs[:-1], xs[1:]), np.maximum(xs[:-1], xs[1:])
    shared = np.minimum(high[:, None], high) > np.maximum(low[:, None], low)  # two segments over a stretch of x
    np.fill_diagonal(shared, False)
    here = (low <= x) & (x <= high)
    clear = np.flatnonzero(here & ~shared.any(1))
    if not len(clear) or (here & (low == high)).any():  # straight up, a segment is a fold by itself
        return math.nan, FOLD
    i = clear[0]  # at a node two segments meet and agree
    return float(ys[i] + (ys[i + 1] - ys[i]) * (x - xs[i]) / (xs[i + 1] - xs[i])), None


def lowest(curves: Sequence[tuple[ArrayLike, ArrayLike]], x: float) -> tuple[int, float, str | None]:
    """Which of some curves lies lowest at x, and its y there; NaN and the first one's reason where none can be read."""
    found = [interpolate(xs, ys, x) for xs, ys in curves]
    known = [(y, i) for i, (y, reason) in enumerate(found) if reason is None]
    return (min(known)[1], min(known)[0], None) if known else (0, *found[0])


def hull(x: ArrayLike, y: ArrayLike) -> tuple[Floats, Floats]:
    """The corners of points' lower convex hull, from left to right: the least y that mixing two of them reaches."""
    corners: list[tuple[float, float]] = []
    for x3, y3 in sorted(np.stack([np.asarray(x), np.asarray(y)], -1).astype(float).tolist()):
        if corners and x3 == corners[-1][0]:  # above the corner that is there
            continue
        while len(corners) > 1:
            (x1, y1), (x2, y2) = corners[-2:]
            if (y2 - y1) * (x3 - x1) < (y3 - y1) * (x2 - x1):
                break
            corners.pop()  # it lies on the chord or above it
        corners.append((x3, y3))
    xs, ys = np.array(corners).reshape(-1, 2).T
    return xs, ys


def branches(curve_x: ArrayLike, curve_y: ArrayLike) -> list[tuple[Floats, Floats]]:
    """A curve cut where it turns back, so that none of its parts folds; nodes that are no numbers are left out."""
    xs, ys = np.asarray(curve_x, dtype=np.float64), np.asarray(curve_y, dtype=np.float64)
    held = np.isfinite(xs) & np.isfinite(ys)
    xs, ys = xs[held], ys[held]
    way = np.sign(np.diff(xs))
    cuts = [0, *(np.flatnonzero(way[1:] != way[:-1]) + 1), len(xs) - 1]
    return [(xs[a : b + 1], ys[a : b + 1]) for a, b in itertools.pairwise(cuts) if b > a]


def jackknife(statistic: Callable[[NDArray[np.int64]], float], shards: int) -> Estimate:
    """A statistic of all shards together, with the error that leaving out each of them in turn gives it.

    For what is no mean of the shards' own values: the values here are pseudovalues, whose mean and standard error are
    the jackknife's. One shard has the statistic and no error."""
    every = np.arange(shards)
    whole = statistic(every)
    if shards == 1:
        return Estimate(np.array([whole]))
    without = np.array([statistic(np.delete(every, i)) for i in every])
    return Estimate(shards * whole - (shards - 1) * without)


def matched(curve_x: ArrayLike, curve_y: ArrayLike, x: ArrayLike, y: ArrayLike) -> Estimate:
    """y minus the baseline curve at the same x, shard by shard: GenNLL against a sweep at matched diversity.

    Curves are (shards, nodes) and points (shards,); one curve and one point are one shard."""
    xs, ys = (np.atleast_2d(np.asarray(curve, dtype=np.float64)) for curve in (curve_x, curve_y))
    points, values = _aligned(x, y)
    if xs.shape != ys.shape or len(xs) != len(points):
        raise LimpetError(f"matching needs a curve for each shard: {xs.shape} and {ys.shape} for {len(points)} shards")
    pairs = [interpolate(nodes_x, nodes_y, float(p)) for nodes_x, nodes_y, p in zip(xs, ys, points, strict=True)]
    baseline = np.array([value for value, _ in pairs])
    return Estimate(values - baseline, tuple(reason for _, reason in pairs))


class Interval(NamedTuple):
    """Where a statistic falls when the samples are drawn again."""

    low: float
    high: float


def bootstrap(
    values: ArrayLike,
    statistic: Callable[[Floats], float] = mean,
    shards: Sequence[Any] | None = None,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """The percentile interval of a statistic over samples drawn again with replacement, within shards if given.

    `values` has one row per sample; rows stay whole, so columns that belong together (both arms of a pair, a sum and
    its count) are drawn together."""
    array = np.asarray(values, dtype=np.float64)
    if not array.ndim or not len(array):
        raise LimpetError("a bootstrap needs one sample or more")
    if not 0 < level < 1:
        raise LimpetError(f"a bootstrap level lies between 0 and 1, not {level}")
    labels = np.zeros(len(array)) if shards is None else np.asarray(shards)
    _, shard, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    order = np.argsort(shard, kind="stable")  # samples shard by shard, each shard from its start for its size
    start, size = np.repeat(sizes.cumsum() - sizes, sizes), np.repeat(sizes, sizes)
    random = np.random.default_rng(seed)
    picks = (order[start + (random.random(len(array)) * size).astype(np.int64)] for _ in range(resamples))
    draws = np.array([statistic(array[pick]) for pick in picks])
    with np.errstate(invalid="ignore"):  # a draw may be infinite
        low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high))
