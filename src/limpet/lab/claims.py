"""What the paper claims, as functions of results: a verdict is computed, never typed.

Each claim rests on findings: estimates with the side of a bound on which they should fall. A finding holds when the
whole 95% interval (Student's, over shards) is on that side, fails when the whole interval is on the other, and is
open in between. A claim is supported when all of its findings hold, not supported when one fails, and else
inconclusive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from limpet.stats import Estimate

LEVEL = 0.95

Outcome = Literal["holds", "fails", "open"]
Verdict = Literal["supported", "not supported", "inconclusive"]


def student(df: int, level: float = LEVEL) -> float:
    """The two-sided quantile of Student's t: with t = sqrt(df) tan a, the density of a is cos(a)^(df - 1)."""
    angle = np.linspace(0, np.pi / 2, 200_001)
    mass = np.cos(angle) ** (df - 1)
    cumulated = np.concatenate([[0.0], np.cumsum((mass[1:] + mass[:-1]) / 2)])
    return math.sqrt(df) * math.tan(float(np.interp(level * cumulated[-1], cumulated, angle)))


def interval(estimate: Estimate) -> tuple[float, float]:
    """Where the mean lies, with confidence LEVEL; everywhere for a single shard or a missing value."""
    n = len(estimate.values)
    if n < 2 or math.isnan(estimate.mean):
        return -math.inf, math.inf
    half = student(n - 1) * estimate.se
    return estimate.mean - half, estimate.mean + half


class Finding(NamedTuple):
    """One number that a claim rests on."""

    name: str
    estimate: Estimate
    wanted: str  # in words
    outcome: Outcome

    @property
    def text(self) -> str:
        reason = next((reason for reason in self.estimate.reasons if reason), "")
        value = f"no value ({reason})" if math.isnan(self.estimate.mean) else _signed(self.estimate)
        return f"{self.name}: {value}, wanted {self.wanted}: {self.outcome}"


def _signed(estimate: Estimate) -> str:
    error = "" if math.isnan(estimate.se) else f" ± {estimate.se:.2g}"
    return f"{estimate.mean:+.4g}{error}"


def below(name: str, estimate: Estimate, bound: float = 0.0) -> Finding:
    low, high = interval(estimate)
    return Finding(name, estimate, f"below {bound:g}", _outcome(high < bound, low > bound))


def above(name: str, estimate: Estimate, bound: float = 0.0) -> Finding:
    low, high = interval(estimate)
    return Finding(name, estimate, f"above {bound:g}", _outcome(low > bound, high < bound))


def within(name: str, estimate: Estimate, bound: float) -> Finding:
    """No further than `bound` from zero."""
    low, high = interval(estimate)
    return Finding(
        name, estimate, f"within {bound:g} of 0", _outcome(max(-low, high) < bound, low > bound or high < -bound)
    )


def _outcome(holds: bool, fails: bool) -> Outcome:
    return "holds" if holds else "fails" if fails else "open"


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, where it stands, and what these results say of it."""

    where: str
    text: str
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> Verdict:
        outcomes = {finding.outcome for finding in self.findings}
        if "fails" in outcomes:
            return "not supported"
        return "supported" if outcomes == {"holds"} else "inconclusive"

    @property
    def paragraph(self) -> str:
        count = sum(finding.outcome == "holds" for finding in self.findings)
        details = "; ".join(finding.text for finding in self.findings)
        return f"{self.text} ({self.where}). Here: {self.verdict}, {count} of {len(self.findings)} hold. {details}."


def claim(where: str, text: str, findings: Sequence[Finding]) -> Claim:
    return Claim(where, text, tuple(findings))
