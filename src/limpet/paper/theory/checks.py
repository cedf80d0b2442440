"""Checks of a statement: the two sides of a relation, and the verdict that follows from them."""

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from limpet.evaluation import mean_se
from limpet.experiments import Series

TOLERANCE = 1e-10  # rounding error allowed in float64, relative to the larger side or to 1
SMALL = 1e-6  # a case whose sides are both smaller than this is not shown as the tightest one
STANDARD_ERRORS = 4.0  # how many of them a Monte Carlo estimate may be off

Relation = Literal["<=", "<", "=", "~"]  # ~ compares two measured values and claims nothing
Verdict = Literal["holds", "equal", "VIOLATED", "below", "above"]


class Check(NamedTuple):
    """left RELATION right, for one source or for the worst case of many."""

    statement: str
    source: str
    left: float
    relation: Relation
    right: float
    error: float = 0.0  # standard error of right - left, where it is a Monte Carlo estimate

    @property
    def slack(self) -> float:
        """right - left."""
        return self.right - self.left if self.right != self.left else 0.0  # also where both are infinite

    @property
    def margin(self) -> float:
        """The slack that rounding or chance can explain."""
        finite = [abs(side) for side in (self.left, self.right) if math.isfinite(side)]
        return TOLERANCE * max([1.0, *finite]) + STANDARD_ERRORS * self.error

    @property
    def verdict(self) -> Verdict:
        """Whether the claim holds; for a comparison, how the left side lies to the right one."""
        if self.relation == "<":
            return "holds" if self.slack > STANDARD_ERRORS * self.error else "VIOLATED"
        if abs(self.slack) <= self.margin:
            return "equal"
        if self.relation == "~":
            return "below" if self.slack > 0 else "above"
        return "holds" if self.relation == "<=" and self.slack > 0 else "VIOLATED"


def worst_case(statement: str, source: str, left: Tensor, relation: Relation, right: Tensor | float) -> Check:
    """The check of many cases at once: the largest violation or, if there is none, the tightest case."""
    left, right = left.double(), torch.as_tensor(right, dtype=torch.float64)
    same = left == right  # in the shape that both broadcast to
    left, right = left.expand(same.shape).flatten(), right.expand(same.shape).flatten()
    slack = torch.where(same.flatten(), 0.0, right - left)  # infinities of one sign are equal
    if relation == "=":
        slack = -slack.abs()
    size = torch.stack([left, right]).abs().nan_to_num(posinf=0.0).amax(0)

    def case_with_least(slack: Tensor) -> Check:
        """A slack that is not a number counts as the largest violation."""
        least = int(slack.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf).argmin())
        return Check(statement, source, float(left[least]), relation, float(right[least]))

    largest_violation = case_with_least(slack / size.clamp(min=1.0))
    if largest_violation.verdict == "VIOLATED" or relation in ("=", "<"):
        return largest_violation
    # A case that is nearly zero on both sides is always tight, so it is shown only if all cases are like that.
    return case_with_least(torch.where(size > SMALL, slack / size, math.inf))


def compare_means(statement: str, source: str, left: Tensor, relation: Relation, right: Tensor | float) -> Check:
    """The check of the mean of (n,) values against a number, or against the mean of n values paired with them."""
    right = torch.as_tensor(right, dtype=torch.float64)
    error = mean_se(right - left).se
    return Check(statement, source, float(left.mean()), relation, float(right.mean()), error)


def line(name: str, x: Iterable[float | Tensor], y: Iterable[float | Tensor], style: str = "-") -> Series:
    """A line of a figure, in matplotlib's short style."""
    return Series(name, tuple(map(float, x)), tuple(map(float, y)), style=style)
