"""Claims about results: a verdict is computed from the numbers, by one rule for the paper's numbers and for ours.

A claim rests on findings. A finding is an estimate and the criterion that it should meet. Each criterion asks one
question in one direction, so it is judged by one-sided bounds at confidence LEVEL (Student's t over seeds). A finding
holds when the bound towards the other side still meets the criterion, fails when the bound from the other side does
not, and is open in between. Two quantities are equivalent when both bounds lie within a tolerance. A claim is supported
when all of its findings hold, not supported when one fails, not tested when none has a value, and else inconclusive.

With a two-sided interval, four seeds would leave open what the paper reads as decided. At this level they decide where
the paper decides, and leave open where it says that its errors do not tell (appendix D.6)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from limpet.errors import import_extra
from limpet.evaluation.statistics import Estimate

LEVEL = 0.95
PAPER_SEEDS = 4  # seeds behind every error that the paper prints
FEW = 3  # values that a summary lists one by one

Outcome = Literal["holds", "fails", "open"]
Verdict = Literal["supported", "not supported", "inconclusive", "not tested"]
PaperOutcome = Literal["holds", "fails", "open", "right sign", "wrong sign", ""]
PaperVerdict = Literal["supported", "not supported", "inconclusive", "by sign", "in words"]


def student(df: int, level: float = LEVEL) -> float:
    """The one-sided quantile of Student's t."""
    return float(import_extra("scipy.stats", "lab").t.ppf(level, df))


def bounds(mean: float, se: float, seeds: int) -> tuple[float, float]:
    """A lower and an upper bound of the mean, each at confidence LEVEL; infinite where there is no error."""
    if seeds < 2 or math.isnan(mean) or math.isnan(se):
        return -math.inf, math.inf
    reach = student(seeds - 1) * se
    return mean - reach, mean + reach


class PublishedValue(NamedTuple):
    """What the paper prints: one number or the ends of a range, and its standard error over seeds if it prints one."""

    low: float
    high: float
    se: float = math.nan

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2

    def __str__(self) -> str:
        if self.low != self.high:
            return f"{_signed(self.low)} to {_signed(self.high)}"
        return _signed(self.mean) + ("" if math.isnan(self.se) else f" ± {self.se:.2g}")


def published_difference(one: PublishedValue, other: PublishedValue) -> PublishedValue:
    """One published value minus another, with their errors taken as independent.

    The true error is smaller where both share their randomness, as the paper's tables 6 and 7 show."""
    return PublishedValue(one.low - other.high, one.high - other.low, math.hypot(one.se, other.se))


class Criterion(NamedTuple):
    """Where the value of a finding should lie: in words and as an interval."""

    text: str
    low: float = -math.inf
    high: float = math.inf
    holds_unless_failed: bool = False  # the value is only asked not to lie on the other side

    def judge(self, lower: float, upper: float) -> Outcome:
        """The outcome for a value between two bounds. A finite interval contains its ends, a half-line does not."""
        if lower > self.high or upper < self.low:
            return "fails"
        if self.holds_unless_failed:
            return "holds" if math.isfinite(upper - lower) else "open"
        if math.isfinite(self.high - self.low):
            is_inside = self.low <= lower and upper <= self.high
        else:
            is_inside = self.low < lower and upper < self.high
        return "holds" if is_inside else "open"


class Finding(NamedTuple):
    """A number that a claim rests on, and the paper's value if it prints one."""

    name: str
    estimate: Estimate
    criterion: Criterion
    paper: PublishedValue | None = None

    @property
    def expected(self) -> str:
        """The criterion in words."""
        return self.criterion.text

    @property
    def outcome(self) -> Outcome:
        return self.criterion.judge(*bounds(self.estimate.mean, self.estimate.se, len(self.estimate.values)))

    @property
    def paper_outcome(self) -> PaperOutcome:
        """The same rule on the paper's value: by its sign where it prints no error, "" where it prints no number."""
        if self.paper is None:
            return ""
        if not math.isnan(self.paper.se):
            return self.criterion.judge(*bounds(self.paper.mean, self.paper.se, PAPER_SEEDS))
        return "right sign" if self.criterion.judge(self.paper.low, self.paper.high) == "holds" else "wrong sign"

    @property
    def measured(self) -> str:
        """Our value in words."""
        if math.isnan(self.estimate.mean):
            reason = next((reason for reason in self.estimate.reasons if reason), "")
            return f"no value ({reason})" if reason else "no value"
        error = "" if math.isnan(self.estimate.se) else f" ± {self.estimate.se:.2g}"
        return _signed(self.estimate.mean) + error

    @property
    def published(self) -> str:
        """The paper's value, or the criterion where it prints none."""
        return self.expected if self.paper is None else str(self.paper)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as a report stores them."""
        paper = self.paper and {"low": self.paper.low, "high": self.paper.high, "se": _or_none(self.paper.se)}
        return {
            "name": self.name,
            **self.estimate.to_dict(),
            "reasons": list(self.estimate.reasons),
            "expected": self.expected,
            "outcome": self.outcome,
            "paper": paper,
            "paper_outcome": self.paper_outcome,
        }


def _signed(value: float) -> str:
    return f"{value:+#.3g}"


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def below(name: str, estimate: Estimate, bound: float = 0.0, paper: PublishedValue | None = None) -> Finding:
    """The value is below a bound."""
    return Finding(name, estimate, Criterion(f"below {bound:g}", high=bound), paper)


def above(name: str, estimate: Estimate, bound: float = 0.0, paper: PublishedValue | None = None) -> Finding:
    """The value is above a bound."""
    return Finding(name, estimate, Criterion(f"above {bound:g}", low=bound), paper)


def not_below(name: str, estimate: Estimate, bound: float = 0.0, paper: PublishedValue | None = None) -> Finding:
    """The value is not below a bound: for one step of a trend that its ends decide."""
    return Finding(name, estimate, Criterion(f"not below {bound:g}", low=bound, holds_unless_failed=True), paper)


def not_above(name: str, estimate: Estimate, bound: float = 0.0, paper: PublishedValue | None = None) -> Finding:
    """The value is not above a bound."""
    return Finding(name, estimate, Criterion(f"not above {bound:g}", high=bound, holds_unless_failed=True), paper)


def within(name: str, estimate: Estimate, bound: float, paper: PublishedValue | None = None) -> Finding:
    """The value is at most `bound` away from zero."""
    return Finding(name, estimate, Criterion(f"within {bound:.3g} of 0", -bound, bound), paper)


def between(name: str, estimate: Estimate, low: float, high: float, paper: PublishedValue | None = None) -> Finding:
    """The value lies in an interval."""
    return Finding(name, estimate, Criterion(f"{low:g} to {high:g}", low, high), paper)


def equivalent(name: str, estimate: Estimate, paper: PublishedValue) -> Finding:
    """For what the paper's errors do not tell apart: the value is no further from zero than the paper's own bounds.

    So our smaller errors do not count against us, and a larger difference does."""
    return within(name, estimate, max(map(abs, bounds(paper.mean, paper.se, PAPER_SEEDS))), paper)


SIDES: dict[str, Callable[..., Finding]] = {  # how a file names the criterion of a finding
    make.__name__.replace("_", " "): make for make in (below, above, not_below, not_above, within, equivalent)
}


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, where it stands, the findings that it rests on, and the reasons for their bounds."""

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
        """The same rule on the numbers that the paper prints.

        "by sign" where some have no error and all that have one hold; "in words" where there is no number."""
        outcomes = {finding.paper_outcome for finding in self.findings} - {""}
        if not outcomes:
            return "in words"
        if outcomes & {"fails", "wrong sign"}:
            return "not supported"
        if "open" in outcomes:
            return "inconclusive"
        return "by sign" if "right sign" in outcomes else "supported"

    @property
    def count(self) -> str:
        """How many findings hold."""
        held = sum(finding.outcome == "holds" for finding in self.findings)
        return f"{held} of {len(self.findings)} hold"

    @property
    def measured(self) -> str:
        """Our numbers in short: each of a few, or the range of many with the largest error."""
        if len(self.findings) <= FEW:
            return "; ".join(dict.fromkeys(finding.measured for finding in self.findings))
        estimates = [finding.estimate for finding in self.findings]
        return _range([PublishedValue(estimate.mean, estimate.mean, estimate.se) for estimate in estimates])

    @property
    def published(self) -> str:
        """The paper's numbers in short."""
        if len(self.findings) <= FEW:
            return "; ".join(dict.fromkeys(finding.published for finding in self.findings))
        known = [finding.paper for finding in self.findings if finding.paper is not None]
        return _range(known) if known else "; ".join(dict.fromkeys(finding.expected for finding in self.findings))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as a report stores them."""
        return {
            "where": self.where,
            "text": self.text,
            "verdict": self.verdict,
            "paper_verdict": self.paper_verdict,
            "why": self.why,
            "findings": [finding.to_dict() for finding in self.findings],
        }


def _range(values: Sequence[PublishedValue]) -> str:
    known = [value for value in values if not math.isnan(value.mean)]
    if not known:
        return "no value"
    missing = f", {len(values) - len(known)} without a value" if len(known) < len(values) else ""
    errors = [value.se for value in known if not math.isnan(value.se)]
    error = f" (± {max(errors):.2g} at most)" if errors else ""
    low, high = min(value.low for value in known), max(value.high for value in known)
    return f"{_signed(low)} to {_signed(high)}{error}{missing}"
