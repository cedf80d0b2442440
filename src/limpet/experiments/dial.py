"""Fits the dial to a model and a judge or a checker: the samplers at its two ends.

Candidates are measured on some seeds. The released sampler's diversity decides which of them can be an end, and
quality decides between those. The fitted dial is then measured on other seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from limpet.errors import LimpetError
from limpet.evaluation.comparison import Comparison, SamplerScores
from limpet.evaluation.scores import NLL
from limpet.samplers import Native, Sampler
from limpet.samplers.recommended import Dial

RELEASED = Native(nfe=64, top_p=0.9)  # whose diversity sharpness 0 has
FALL = 0.06  # the share of its entropy that sharpness 1 gives up: as much as the general dial does on `mini`
ROUNDING = 0.005  # a share of the entropy that is no difference
TOP_P = (0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5)
BUDGETS = (0.0, 0.06, 0.25, 1.0)  # 0 commits nothing
SHARPNESS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the report
Measure = Callable[[Mapping[str, Sampler], Sequence[int]], Comparison]  # samplers by name, on some seeds


class DialCandidate(NamedTuple):
    """One sampler of the dial's family as it was measured."""

    top_p: float
    budget: float
    entropy: float
    error: float  # NLL, or 1 - the checker's first number: lower is better


@dataclass(frozen=True)
class DialResult:
    """A fitted dial, the candidates, and the dial beside the released sampler on fresh seeds."""

    dial: Dial
    quality: str  # the measure that decided
    entropy: float  # of the released sampler, on the seeds of the choice
    candidates: tuple[DialCandidate, ...]
    fresh: Comparison

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {
            "dial": vars(self.dial),
            "quality": self.quality,
            "entropy": self.entropy,
            "candidates": [one._asdict() for one in self.candidates],
            "fresh": self.fresh.to_dict(),
        }


def quality_of(scores: SamplerScores) -> str:
    """The measure that decides: a checker's first number, or the NLL."""
    names = list(scores.scores.measures)
    return names[0] if scores.samples and names[0] != NLL else NLL


def candidates(nfe: int) -> dict[tuple[float, float], Sampler]:
    """The samplers that may be an end of the dial, by top-p and budget."""
    return {(p, b): Dial(p, p, b, b).sampler(nfe, 0) for p in TOP_P for b in BUDGETS}


def choose_ends(found: Sequence[DialCandidate], released: float) -> Dial:
    """The dial between two candidates: the best that is as diverse as the released sampler, and the best that gives
    up `FALL` of that diversity at most. released: the released sampler's entropy."""

    def best(low: float, among: Sequence[DialCandidate]) -> DialCandidate:
        kept = [one for one in among if one.entropy >= low * (1 - ROUNDING)]
        return min(kept, key=lambda one: (one.error, -one.entropy)) if kept else max(among, key=lambda one: one.entropy)

    diverse = best(released, found)
    sharper = [
        one
        for one in found
        if one.top_p <= diverse.top_p and one.budget >= diverse.budget and bool(one.budget) == bool(diverse.budget)
    ]
    sharp = best(released * (1 - FALL), sharper)
    return Dial(diverse.top_p, sharp.top_p, diverse.budget, sharp.budget)


def fit(nfe: int, seeds: Sequence[int], fresh_seeds: Sequence[int], measure: Measure) -> DialResult:
    """Fit the dial at a number of calls.

    seeds: of the choice. fresh_seeds: of the report. measure: samples and evaluates."""
    if set(seeds) & set(fresh_seeds):
        raise LimpetError("the report needs seeds that no choice has used")
    tried = candidates(nfe)
    named = {f"top_p={p:g} budget={b:g}": one for (p, b), one in tried.items()}
    released, *rest = measure({"released": RELEASED, **named}, seeds).samplers
    quality = quality_of(released)
    sign, offset = (1.0, 0.0) if quality == NLL else (-1.0, 1.0)

    def candidate(key: tuple[float, float], one: SamplerScores) -> DialCandidate:
        entropy, value = (one.scores.estimate(name).mean for name in ("entropy", quality))
        return DialCandidate(*key, entropy, offset + sign * value)

    found = tuple(candidate(key, one) for key, one in zip(tried, rest, strict=True))
    entropy = released.scores.estimate("entropy").mean
    dial = choose_ends(found, entropy)
    report = {f"sharpness={s:g}": dial.sampler(nfe, s) for s in SHARPNESS}
    return DialResult(dial, quality, entropy, found, measure({"released": RELEASED, **report}, fresh_seeds))
