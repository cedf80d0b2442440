"""What the paper claims, as functions of results: a verdict is computed, never typed, and by one rule for the paper's
own numbers and for ours.

A claim rests on findings: estimates with the side of a bound on which they should fall. Each asks one question in one
direction, so each is judged by one-sided bounds of confidence LEVEL (Student's t over shards): it holds when the bound
towards the other side is still on the wanted one, fails when the bound from the other side is on the wrong one, and is
open in between. Two things are alike when both bounds lie within a tolerance. A claim is supported when all of its
findings hold, not supported when one fails, not tested when none has a value, and else inconclusive.

At the usual two-sided interval four shards would leave open what the paper reads as decided; at this level they decide
where the paper decides, and leave open where it says that its errors do not tell (appendix D.6)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from limpet.errors import extra
from limpet.evaluation.statistics import Estimate

LEVEL = 0.95
SHARDS = 4  # of every error that the paper prints
FEW = 3  # values that a summary names one by one

Outcome = Literal["holds", "fails", "open"]
Verdict = Literal["supported", "not supported", "inconclusive", "not tested"]
PaperOutcome = Literal["holds", "fails", "open", "right sign", "wrong sign", ""]
PaperVerdict = Literal["supported", "not supported", "inconclusive", "by sign", "in words"]


def student(df: int, level: float = LEVEL) -> float:
    """The one-sided quantile of Student's t."""
    return float(extra("scipy.stats", "lab").t.ppf(level, df))


def bounds(mean: float, se: float, shards: int) -> tuple[float, float]:
    """What the mean is above, and what it is below, each with confidence LEVEL; none where there is no error."""
    if shards < 2 or math.isnan(mean) or math.isnan(se):
        return -math.inf, math.inf
    reach = student(shards - 1) * se
    return mean - reach, mean + reach


class Printed(NamedTuple):
    """What the paper gives: one number, the ends of a range, and the error over its shards where it prints one."""

    least: float
    most: float
    se: float = math.nan

    @property
    def mean(self) -> float:
        return (self.least + self.most) / 2

    def __str__(self) -> str:
        if self.least != self.most:
            return f"{_signed(self.least)} to {_signed(self.most)}"
        return _signed(self.mean) + ("" if math.isnan(self.se) else f" ± {self.se:.2g}")


def difference(one: Printed, other: Printed) -> Printed:
    """Of two numbers whose errors are taken as independent; those of arms that share their randomness are smaller, as
    the paper's own tables 6 and 7 show."""
    return Printed(one.least - other.most, one.most - other.least, math.hypot(one.se, other.se))


class Side(NamedTuple):
    """Where a finding should fall, in words and as an interval."""

    words: str
    low: float = -math.inf
    high: float = math.inf
    unless: bool = False  # asked only not to be on the other side: then it holds unless it fails

    def judge(self, low: float, high: float) -> Outcome:
        """Of an estimate that lies between two bounds. A finite interval contains its ends, a half-line does not."""
        if low > self.high or high < self.low:
            return "fails"
        if self.unless:
            return "holds" if math.isfinite(high - low) else "open"
        closed = math.isfinite(self.high - self.low)
        inside = self.low <= low and high <= self.high if closed else self.low < low and high < self.high
        return "holds" if inside else "open"


class Finding(NamedTuple):
    """One number that a claim rests on, and the paper's where it prints one."""

    name: str
    estimate: Estimate
    side: Side
    paper: Printed | None = None

    @property
    def wanted(self) -> str:
        return self.side.words

    @property
    def outcome(self) -> Outcome:
        return self.side.judge(*bounds(self.estimate.mean, self.estimate.se, len(self.estimate.values)))

    @property
    def paper_outcome(self) -> PaperOutcome:
        """The same rule on the paper's number; its sign alone where it prints no error; nothing where no number."""
        if self.paper is None:
            return ""
        if not math.isnan(self.paper.se):
            return self.side.judge(*bounds(self.paper.mean, self.paper.se, SHARDS))
        return "right sign" if self.side.judge(self.paper.least, self.paper.most) == "holds" else "wrong sign"

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
        return self.wanted if self.paper is None else str(self.paper)

    def to_dict(self) -> dict[str, Any]:
        paper = self.paper and {"least": self.paper.least, "most": self.paper.most, "se": _known(self.paper.se)}
        return {
            "name": self.name, **self.estimate.to_dict(), "reasons": list(self.estimate.reasons),
            "wanted": self.wanted, "outcome": self.outcome, "paper": paper, "paper_outcome": self.paper_outcome,
        }  # fmt: skip


def _signed(value: float) -> str:
    return f"{value:+#.3g}"


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def below(name: str, estimate: Estimate, bound: float = 0.0, paper: Printed | None = None) -> Finding:
    return Finding(name, estimate, Side(f"below {bound:g}", high=bound), paper)


def above(name: str, estimate: Estimate, bound: float = 0.0, paper: Printed | None = None) -> Finding:
    return Finding(name, estimate, Side(f"above {bound:g}", low=bound), paper)


def not_below(name: str, estimate: Estimate, bound: float = 0.0, paper: Printed | None = None) -> Finding:
    """For a step of a trend that its ends decide: it must not go back."""
    return Finding(name, estimate, Side(f"not below {bound:g}", low=bound, unless=True), paper)


def not_above(name: str, estimate: Estimate, bound: float = 0.0, paper: Printed | None = None) -> Finding:
    return Finding(name, estimate, Side(f"not above {bound:g}", high=bound, unless=True), paper)


def within(name: str, estimate: Estimate, bound: float, paper: Printed | None = None) -> Finding:
    """No further than `bound` from zero."""
    return Finding(name, estimate, Side(f"within {bound:.3g} of 0", -bound, bound), paper)


def between(name: str, estimate: Estimate, low: float, high: float, paper: Printed | None = None) -> Finding:
    return Finding(name, estimate, Side(f"{low:g} to {high:g}", low, high), paper)


def alike(name: str, estimate: Estimate, paper: Printed) -> Finding:
    """For what the paper's errors do not tell apart: no further from zero than the paper itself can have seen, which is
    where its own bounds end. So precision is not held against us, and a larger difference is."""
    return within(name, estimate, max(map(abs, bounds(paper.mean, paper.se, SHARDS))), paper)


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, where it stands, what these results say of it, and the reasons for its bounds."""

    where: str
    text: str
    findings: Sequence[Finding]
    why: str = ""

    @property
    def verdict(self) -> Verdict:
        if all(math.isnan(finding.estimate.mean) for finding in self.findings):
            return "not tested"
        outcomes = {finding.outcome for finding in self.findings}
        if "fails" in outcomes:
            return "not supported"
        return "supported" if outcomes == {"holds"} else "inconclusive"

    @property
    def paper_verdict(self) -> PaperVerdict:
        """The same rule on the numbers that the paper prints for it: by sign where some have no error and all that have
        hold, in words where there is no number."""
        outcomes = {finding.paper_outcome for finding in self.findings} - {""}
        if not outcomes:
            return "in words"
        if outcomes & {"fails", "wrong sign"}:
            return "not supported"
        return "inconclusive" if "open" in outcomes else "by sign" if "right sign" in outcomes else "supported"

    @property
    def count(self) -> str:
        held = sum(finding.outcome == "holds" for finding in self.findings)
        return f"{held} of {len(self.findings)} hold"

    @property
    def here(self) -> str:
        """Our numbers in short: each of a few, or the range of many with the largest error."""
        if len(self.findings) <= FEW:
            return "; ".join(dict.fromkeys(finding.here for finding in self.findings))
        values = [(one.estimate.mean, one.estimate.mean, one.estimate.se) for one in self.findings]
        return _range([Printed(*value) for value in values])

    @property
    def there(self) -> str:
        """The paper's numbers in short."""
        if len(self.findings) <= FEW:
            return "; ".join(dict.fromkeys(finding.there for finding in self.findings))
        known = [finding.paper for finding in self.findings if finding.paper is not None]
        return _range(known) if known else "; ".join(dict.fromkeys(finding.wanted for finding in self.findings))

    def to_dict(self) -> dict[str, Any]:
        findings = [finding.to_dict() for finding in self.findings]
        return {
            "where": self.where, "text": self.text, "verdict": self.verdict, "paper_verdict": self.paper_verdict,
            "why": self.why, "findings": findings,
        }  # fmt: skip


def _range(values: Sequence[Printed]) -> str:
    known = [value for value in values if not math.isnan(value.mean)]
    if not known:
        return "no value"
    missing = f", {len(values) - len(known)} without a value" if len(known) < len(values) else ""
    errors = [value.se for value in known if not math.isnan(value.se)]
    error = f" (± {max(errors):.2g} at most)" if errors else ""
    least, most = min(value.least for value in known), max(value.most for value in known)
    return f"{_signed(least)} to {_signed(most)}{error}{missing}"
