"""Statistics over seeds: means and standard errors, paired differences, matched interpolation, bootstrap.

Samplers that are compared share their seeds, so they are paired: the error of a difference is taken over the
differences seed by seed, never from two separate errors."""

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
    """One value per seed, their mean, and its standard error: standard deviation (ddof 1) over the root of the count.

    A seed without a value holds NaN, and so does the mean: a mean over the remaining seeds would belong to another
    comparison. `reasons` then says why, seed by seed."""

    values: Floats
    reasons: tuple[str | None, ...] = ()

    @property
    def mean(self) -> float:
        return float(self.values.mean())

    @property
    def se(self) -> float:
        """The standard error; NaN for a single seed or an infinite value."""
        n = len(self.values)
        with np.errstate(invalid="ignore"):
            return float(self.values.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan

    def to_dict(self) -> dict[str, Any]:
        """The mean, its standard error and the values of the seeds; None where a number is not finite."""
        mean, se, *values = numbers([self.mean, self.se, *self.values])
        return {"mean": mean, "se": se, "values": values}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Estimate:
        """The estimate that `to_dict` wrote."""
        values = [math.nan if value is None else value for value in stored["values"]]
        return cls(np.array(values, dtype=np.float64), tuple(stored.get("reasons", ())))

    def __str__(self) -> str:
        return f"{self.mean:.4g} ± {self.se:.2g}"

    def __format__(self, form: str) -> str:
        """Both numbers in one format, as in "41.79 ± 0.84" for .2f; without the error if there is a single seed."""
        if not form or math.isnan(self.mean):
            return str(self) if not form else "n/a"
        error = f" ± {self.se:{form}}" if len(self.values) > 1 else ""
        return f"{self.mean:{form}}{error}"


class GeometricMean(Estimate):
    """The exponential of the mean logarithm, and its standard error by the delta method.

    Perplexities use it, so that GenPPL orders samplers exactly as the mean NLL does."""

    @property
    def _logs(self) -> Estimate:
        return Estimate(np.log(self.values))

    @property
    def mean(self) -> float:
        return float(np.exp(self._logs.mean))

    @property
    def se(self) -> float:
        return self.mean * self._logs.se


def numbers(values: ArrayLike) -> list[float | None]:
    """Plain numbers for JSON, None where a value is not finite."""
    return [value if math.isfinite(value) else None for value in np.asarray(values, dtype=np.float64).tolist()]


def mean(values: ArrayLike | Sequence[float | None]) -> float:
    """The mean over the samples that have a value; NaN if none has one."""
    array = np.asarray(values, dtype=np.float64)
    held = array[~np.isnan(array)]
    return float(held.mean()) if held.size else math.nan


def mean_se(values: ArrayLike) -> Estimate:
    """The mean of the seeds' values and its standard error."""
    array = np.atleast_1d(np.asarray(values, dtype=np.float64))
    if array.ndim != 1 or not array.size:
        raise LimpetError(f"an estimate takes one value for each of one or more seeds, not an array of {array.shape}")
    return Estimate(array)


def _aligned(*samples: ArrayLike) -> list[Floats]:
    values = [mean_se(one).values for one in samples]
    if len({len(one) for one in values}) > 1:
        counts = " and ".join(str(len(one)) for one in values)
        raise LimpetError(f"a paired difference needs one value for each of the same seeds, but there are {counts}")
    return values


def paired(a: ArrayLike, b: ArrayLike) -> Estimate:
    """a - b, seed by seed; NaN between two infinities."""
    left, right = _aligned(a, b)
    with np.errstate(invalid="ignore"):
        return Estimate(left - right)


def difference_of_differences(a: ArrayLike, b: ArrayLike, c: ArrayLike, d: ArrayLike) -> Estimate:
    """(a - b) - (c - d), seed by seed: the interaction of two changes."""
    a, b, c, d = _aligned(a, b, c, d)
    return Estimate((a - b) - (c - d))


FOLD = "the curve folds there: more than one of its segments passes this value"


def interpolate(curve_x: ArrayLike, curve_y: ArrayLike, x: float) -> tuple[float, str | None]:
    """The curve's y at x, linear between neighbouring nodes, or NaN and the reason why there is none.

    Nodes are in the order of the parameter of the curve (top-p, say), not of x. Two segments over the same range of x
    are a fold, and neither is read. The paper does the same: it keeps p <= 0.9 of base Duo's curve, which turns back
    between p = 1 and p = 0.95. Nothing is extrapolated."""
    xs, ys = np.asarray(curve_x, dtype=np.float64), np.asarray(curve_y, dtype=np.float64)
    if xs.shape != ys.shape or xs.ndim != 1 or len(xs) < 2:
        raise LimpetError(f"a curve needs two or more nodes, an x and a y each, not {xs.shape} and {ys.shape}")
    if not (np.isfinite(xs).all() and np.isfinite(ys).all() and math.isfinite(x)):
        return math.nan, "a node or the value to match is not a number"
    if not xs.min() <= x <= xs.max():
        return math.nan, f"{x:.6g} is outside the curve, {xs.min():.6g} to {xs.max():.6g}"
    low, high = np.minimum(xs[:-1], xs[1:]), np.maximum(xs[:-1], xs[1:])
    shared = np.minimum(high[:, None], high) > np.maximum(low[:, None], low)  # two segments over one range of x
    np.fill_diagonal(shared, False)
    here = (low <= x) & (x <= high)
    clear = np.flatnonzero(here & ~shared.any(1))
    if not len(clear) or (here & (low == high)).any():  # a vertical segment is a fold by itself
        return math.nan, FOLD
    i = clear[0]  # at a node two segments meet and agree
    return float(ys[i] + (ys[i + 1] - ys[i]) * (x - xs[i]) / (xs[i + 1] - xs[i])), None


def lowest(curves: Sequence[tuple[ArrayLike, ArrayLike]], x: float) -> tuple[int, float, str | None]:
    """The index of the curve that is lowest at x and its y there; NaN and the first curve's reason if none has a y."""
    found = [interpolate(xs, ys, x) for xs, ys in curves]
    known = [(y, i) for i, (y, reason) in enumerate(found) if reason is None]
    return (min(known)[1], min(known)[0], None) if known else (0, *found[0])


def hull(x: ArrayLike, y: ArrayLike) -> tuple[Floats, Floats]:
    """The corners of the points' lower convex hull, left to right: the least y that a mixture of two points reaches."""
    corners: list[tuple[float, float]] = []
    for x3, y3 in sorted(np.stack([np.asarray(x), np.asarray(y)], -1).astype(float).tolist()):
        if corners and x3 == corners[-1][0]:  # not below the corner at the same x
            continue
        while len(corners) > 1:
            (x1, y1), (x2, y2) = corners[-2:]
            if (y2 - y1) * (x3 - x1) < (y3 - y1) * (x2 - x1):
                break
            corners.pop()  # on the chord or above it
        corners.append((x3, y3))
    xs, ys = np.array(corners).reshape(-1, 2).T
    return xs, ys


def branches(curve_x: ArrayLike, curve_y: ArrayLike) -> list[tuple[Floats, Floats]]:
    """A curve cut where it turns back, so that no part folds; non-finite nodes are left out."""
    xs, ys = np.asarray(curve_x, dtype=np.float64), np.asarray(curve_y, dtype=np.float64)
    held = np.isfinite(xs) & np.isfinite(ys)
    xs, ys = xs[held], ys[held]
    direction = np.sign(np.diff(xs))
    cuts = [0, *(np.flatnonzero(direction[1:] != direction[:-1]) + 1), len(xs) - 1]
    return [(xs[a : b + 1], ys[a : b + 1]) for a, b in itertools.pairwise(cuts) if b > a]


def jackknife(statistic: Callable[[NDArray[np.int64]], float], count: int) -> Estimate:
    """A statistic of all `count` seeds together, with its jackknife error: each seed is left out once.

    It is for a statistic that is not the mean of the seeds' own values. The estimate's values are pseudovalues, whose
    mean and standard error are the jackknife's. A single seed has no error."""
    every = np.arange(count)
    whole = statistic(every)
    if count == 1:
        return Estimate(np.array([whole]))
    without = np.array([statistic(np.delete(every, i)) for i in every])
    return Estimate(count * whole - (count - 1) * without)


def matched(curve_x: ArrayLike, curve_y: ArrayLike, x: ArrayLike, y: ArrayLike) -> Estimate:
    """y minus the baseline curve at the same x, seed by seed: GenNLL against a sweep at matched diversity.

    Curves are (seeds, nodes) and points (seeds,); one curve and one point are one seed."""
    xs, ys = (np.atleast_2d(np.asarray(curve, dtype=np.float64)) for curve in (curve_x, curve_y))
    points, values = _aligned(x, y)
    if xs.shape != ys.shape or len(xs) != len(points):
        raise LimpetError(f"matching needs a curve for each seed: {xs.shape} and {ys.shape} for {len(points)} seeds")
    pairs = [interpolate(nodes_x, nodes_y, float(p)) for nodes_x, nodes_y, p in zip(xs, ys, points, strict=True)]
    baseline = np.array([value for value, _ in pairs])
    return Estimate(values - baseline, tuple(reason for _, reason in pairs))


class Interval(NamedTuple):
    """A bootstrap interval of a statistic."""

    low: float
    high: float


def bootstrap(
    values: ArrayLike,
    statistic: Callable[[Floats], float] = mean,
    groups: Sequence[Any] | None = None,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """The percentile interval of a statistic when samples are drawn again with replacement.

    values: one row per sample. Rows stay whole, so columns that belong together (both samplers of a pair, a sum and its
    count) are drawn together. groups: the group of each sample, its seed for example; samples are drawn within their
    group. level: the probability mass of the interval. resamples: the number of draws. seed: of the draws."""
    array = np.asarray(values, dtype=np.float64)
    if not array.ndim or not len(array):
        raise LimpetError("a bootstrap needs one sample or more")
    if not 0 < level < 1:
        raise LimpetError(f"a bootstrap level lies between 0 and 1, not {level}")
    names = np.zeros(len(array)) if groups is None else np.asarray(groups)
    _, group, sizes = np.unique(names, return_inverse=True, return_counts=True)
    order = np.argsort(group, kind="stable")  # group by group: each sample knows where its group starts and its size
    start, size = np.repeat(sizes.cumsum() - sizes, sizes), np.repeat(sizes, sizes)
    random = np.random.default_rng(seed)
    picks = (order[start + (random.random(len(array)) * size).astype(np.int64)] for _ in range(resamples))
    draws = np.array([statistic(array[pick]) for pick in picks])
    with np.errstate(invalid="ignore"):  # a draw may be infinite
        low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high))
