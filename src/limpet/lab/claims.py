"""What the paper claims, as functions of results: a verdict is computed, never typed.

Each claim rests on findings: estimates with the side of a bound on which they should fall. A finding holds when the
whole 95% interval (Student's, over shards) is on that side, fails when the whole interval is on the other, and is
open in between. A claim is supported when all of its findings hold, not supported when one fails, and else
inconclusive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from limpet.errors import extra
from limpet.stats import Estimate

LEVEL = 0.95
FEW = 3  # values that a summary names one by one

Outcome = Literal["holds", "fails", "open"]
Verdict = Literal["supported", "not supported", "inconclusive"]


def student(df: int, level: float = LEVEL) -> float:
    """The two-sided quantile of Student's t."""
    return float(extra("scipy.stats", "lab").t.ppf((1 + level) / 2, df))


def interval(estimate: Estimate) -> tuple[float, float]:
    """Where the mean lies, with confidence LEVEL; everywhere for a single shard or a missing value."""
    n = len(estimate.values)
    if n < 2 or math.isnan(estimate.mean):
        return -math.inf, math.inf
    half = student(n - 1) * estimate.se
    return estimate.mean - half, estimate.mean + half


class Finding(NamedTuple):
    """One number that a claim rests on, and the paper's where it prints one."""

    name: str
    estimate: Estimate
    wanted: str  # in words
    outcome: Outcome
    paper: float | None = None

    @property
    def here(self) -> str:
        if math.isnan(self.estimate.mean):
            reason = next((reason for reason in self.estimate.reasons if reason), "")
            return f"no value ({reason})" if reason else "no value"
        error = "" if math.isnan(self.estimate.se) else f" ± {self.estimate.se:.2g}"
        return _signed(self.estimate.mean) + error

    @property
    def there(self) -> str:
        """What the paper gives: a number, or else the side."""
        return self.wanted if self.paper is None else _signed(self.paper)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name, **self.estimate.to_dict(), "reasons": list(self.estimate.reasons),
            "wanted": self.wanted, "outcome": self.outcome, "paper": self.paper,
        }  # fmt: skip


def _signed(value: float) -> str:
    return f"{value:+#.3g}"


def below(name: str, estimate: Estimate, bound: float = 0.0, paper: float | None = None) -> Finding:
    return _finding(name, estimate, f"below {bound:g}", (-math.inf, bound), paper)


def above(name: str, estimate: Estimate, bound: float = 0.0, paper: float | None = None) -> Finding:
    return _finding(name, estimate, f"above {bound:g}", (bound, math.inf), paper)


def within(name: str, estimate: Estimate, bound: float, paper: float | None = None) -> Finding:
    """No further than `bound` from zero."""
    return _finding(name, estimate, f"within {bound:g} of 0", (-bound, bound), paper)


def _finding(name: str, estimate: Estimate, words: str, side: tuple[float, float], paper: float | None) -> Finding:
    low, high = interval(estimate)
    holds, fails = side[0] < low and high < side[1], low > side[1] or high < side[0]
    return Finding(name, estimate, words, "holds" if holds else "fails" if fails else "open", paper)


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, where it stands, and what these results say of it."""

    where: str
    text: str
    findings: Sequence[Finding]

    @property
    def verdict(self) -> Verdict:
        outcomes = {finding.outcome for finding in self.findings}
        if "fails" in outcomes:
            return "not supported"
        return "supported" if outcomes == {"holds"} else "inconclusive"

    @property
    def count(self) -> str:
        held = sum(finding.outcome == "holds" for finding in self.findings)
        return f"{held} of {len(self.findings)} hold"

    @property
    def here(self) -> str:
        """Our numbers in short: each of a few, or the range of many."""
        if len(self.findings) <= FEW:
            return "; ".join(finding.here for finding in self.findings)
        return _range([finding.estimate.mean for finding in self.findings])

    @property
    def there(self) -> str:
        """The paper's numbers in short."""
        if len(self.findings) <= FEW:
            return "; ".join(dict.fromkeys(finding.there for finding in self.findings))
        known = [finding.paper for finding in self.findings if finding.paper is not None]
        return _range(known) if known else "; ".join(dict.fromkeys(finding.wanted for finding in self.findings))

    def to_dict(self) -> dict[str, Any]:
        findings = [finding.to_dict() for finding in self.findings]
        return {"where": self.where, "text": self.text, "verdict": self.verdict, "findings": findings}


def _range(values: Sequence[float]) -> str:
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return "no value"
    missing = f", {len(values) - len(known)} without a value" if len(known) < len(values) else ""
    return f"{_signed(min(known))} to {_signed(max(known))}{missing}"
