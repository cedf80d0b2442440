"""What a statement comes to: both sides of its relation with the verdict that follows, and lines of figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from limpet.evaluation import statistics
from limpet.experiments.contents import Series

TOLERANCE = 1e-10  # of float64 enumeration, relative to the larger side or to 1
TELLING = 1e-6  # sides smaller than this are not shown as the tightest case
ERRORS = 4.0  # standard errors that a Monte Carlo figure may be off

Relation = Literal["<=", "<", "=", "~"]  # ~ compares two measured figures and claims nothing
Points = Sequence[float] | Tensor
Verdict = Literal["holds", "equal", "VIOLATED", "below", "above"]


class Sides(NamedTuple):
    """left RELATION right, for one source or for the worst of many."""

    statement: str
    source: str
    left: float
    relation: Relation
    right: float
    error: float = 0.0  # standard error of right - left, where it is Monte Carlo

    @property
    def slack(self) -> float:
        return self.right - self.left if self.right != self.left else 0.0  # also where both are infinite

    @property
    def margin(self) -> float:
        """How much slack is no more than rounding or chance."""
        finite = [abs(side) for side in (self.left, self.right) if math.isfinite(side)]
        return TOLERANCE * max([1.0, *finite]) + ERRORS * self.error

    @property
    def verdict(self) -> Verdict:
        if self.relation == "<":
            return "holds" if self.slack > ERRORS * self.error else "VIOLATED"
        if abs(self.slack) <= self.margin:
            return "equal"
        if self.relation == "~":
            return "below" if self.slack > 0 else "above"
        return "holds" if self.relation == "<=" and self.slack > 0 else "VIOLATED"


def worst(statement: str, source: str, left: Tensor, relation: Relation, right: Tensor | float) -> Sides:
    """The case that goes farthest into a violation or, where none does, the tightest one."""
    left, right = left.double(), torch.as_tensor(right, dtype=torch.float64)
    same = left == right  # in the shape that both broadcast to
    left, right = left.expand(same.shape).flatten(), right.expand(same.shape).flatten()
    slack = torch.where(same.flatten(), 0.0, right - left)  # infinities of one sign are equal
    if relation == "=":
        slack = -slack.abs()
    size = torch.stack([left, right]).abs().nan_to_num(posinf=0.0).amax(0)

    def at(slack: Tensor) -> Sides:
        """The case with the least slack; what is not a number counts as none at all."""
        least = int(slack.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf).argmin())
        return Sides(statement, source, float(left[least]), relation, float(right[least]))

    farthest = at(slack / size.clamp(min=1.0))
    if farthest.verdict == "VIOLATED" or relation in ("=", "<"):
        return farthest
    # What is nearly zero on both sides is tight for no good reason: leave it out, unless all of it is.
    return at(torch.where(size > TELLING, slack / size, math.inf))


def measured(statement: str, source: str, left: Tensor, relation: Relation, right: Tensor | float) -> Sides:
    """Means of (n,) values that are paired, or of the left ones against a number; the error is their difference's."""
    right = torch.as_tensor(right, dtype=torch.float64)
    error = statistics.mean_se(right - left).se
    return Sides(statement, source, float(left.mean()), relation, float(right.mean()), error)


def line(name: str, x: Points, y: Points, style: str = "-") -> Series:
    """Points of a figure, in matplotlib's short style."""
    return Series(name, tuple(map(float, x)), tuple(map(float, y)), style=style)
