"""Tuning: finds the parameters with the lowest NLL at their entropy, by successive halving over seeds.

All candidates are measured on a few seeds, the best third of them on three times as many, until few are left. Every
rung is a study in one store, and every choice is a function of its results alone, so a stopped tuning continues where
it was and makes the same choices. Choices use even seeds and the report uses odd ones, so the reported numbers are
not biased by the choice."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from limpet.errors import LimpetError
from limpet.evaluation import statistics
from limpet.evaluation.statistics import Estimate, Floats
from limpet.experiments.report_content import Figure, Panel, ReportContent, Series, estimate_series
from limpet.experiments.results import Results
from limpet.experiments.store import canonical_json, digest
from limpet.experiments.study import Cell, JudgeSpec, Study
from limpet.samplers import CRS, Native, Sampler, find, params
from limpet.samplers.names import assigned

SPACE = "mend late_top_p=1,.9,.8,.7,.6,.5 budget=.25,.5,1 spacing=1,2,4 warmup=.2,.33,.5 revise=2,4,None,16"
TOP_P = (1.0, 0.9, 0.8, 0.7, 0.55, 0.4)  # of the reference curve
LATE_TOP_P = (None, 0.8, 0.6, 0.45)  # of the curve of CRS
KEEP = 3  # one candidate in so many goes on to the next rung, and so many are the last to choose from
METRICS = ("entropy", "rep-4")

EVERY_SEED = slice(None)
Curve = tuple[Floats, Floats]  # entropies and NLL of its nodes
Measure = Callable[[Study], Results]  # computes what the store does not hold of a study, and reads it all


# The space


@dataclass(frozen=True)
class Space:
    """A sampler and the values that some of its parameters may take; the others have their defaults."""

    name: str  # the sampler's name on a command line
    kind: type[Sampler]
    values: Mapping[str, tuple[Any, ...]]

    def text(self, **values: Any) -> str:
        """The sampler with these parameters as a command line has it."""
        return sampler_text(self.kind(**values), self.name)


def parse_space(text: str) -> Space:
    """A space as a command line has it: `mend late_top_p=.9,.8 warmup=.2,.33`."""
    name, *settings = text.split() or [""]
    kind, values = find(name), {}
    takes = "it takes parameters with values, such as warmup=.2,.33"
    for param, setting in assigned(kind, name, settings, f"space {text!r}", takes):
        if (field := param.name) == "nfe":
            raise LimpetError(f"space {text!r} has nfe; samplers are compared at equal calls, which --nfe sets")
        parts = [setting] if param.kind is str and not param.choices else setting.split(",")  # a text may hold commas
        values[field] = tuple(dict.fromkeys(map(param.read, parts)))
        for value in values[field]:
            if not param.accepts(value):
                raise LimpetError(f"space {text!r} has {field} {value!r}; {name} takes {param.takes}")
    return Space(name, kind, values)


def points(space: Space) -> Iterator[dict[str, Any]]:
    """Every point of a space once, in a random order that is always the same.

    A parameter takes each of its values once before it takes one twice. So the first points cover the space, however
    many of them are used."""
    known: set[tuple[Any, ...]] = set()
    for point in zip(*(_shuffled(param, values) for param, values in space.values.items()), strict=True):
        if point not in known:
            known.add(point)
            yield dict(zip(space.values, point, strict=True))
        if len(known) == math.prod(map(len, space.values.values())):
            return


def _shuffled(param: str, values: tuple[Any, ...]) -> Iterator[Any]:
    """The values in one random order after another, without end; every parameter has its own orders."""
    generator = random.Random(param)
    while True:
        yield from sorted(values, key=lambda _: generator.random())


def sampler_text(sampler: Sampler, name: str | None = None) -> str:
    """A sampler as a command line has it: the parameters that differ from their defaults, without nfe."""
    changed = (
        f"{param}={getattr(sampler, param)}"
        for param, about in params(type(sampler)).items()
        if param != "nfe" and getattr(sampler, param) != about.default
    )
    return " ".join([name or sampler.name, *changed])


def candidate_samplers(spaces: Sequence[Space], nfe: int, count: int) -> dict[str, Sampler]:
    """At most `count` samplers by their texts, alternately from each space: its defaults first, then its points."""

    def candidates(space: Space) -> Iterator[tuple[str, Sampler]]:
        yield space.text(), space.kind(nfe=nfe)  # type: ignore[call-arg]
        for point in points(space):
            yield space.text(**point), space.kind(nfe=nfe, **point)  # type: ignore[call-arg]

    found: dict[str, Sampler] = {}
    waiting = [candidates(space) for space in spaces]
    while waiting and len(found) < count:
        current = waiting.pop(0)
        if (new := next((one for one in current if one[0] not in found), None)) is not None:
            found |= [new]
            waiting.append(current)
    return found


# The configuration


@dataclass(frozen=True)
class TuningConfig:
    """What is tuned: the lowest NLL at an entropy, or the largest distance below the reference curve anywhere."""

    model: str
    nfe: int = 16
    judges: tuple[JudgeSpec, ...] = ()  # none where the model's own distribution is known
    spaces: tuple[str, ...] = (SPACE,)
    # The cost of the defaults, in seeds of 8 samples: 2 x 6 for the reference curve, 24 + 2 x 8 + 6 x 3 candidates in
    # three rungs, and 4 x (6 + 5 + 2) on fresh seeds, where both final steps of top-p share all calls but one. On two
    # idle cores, 16 calls of `mini` on 8 samples took 7 s with committed tokens and 11 s with top-p; candidates share
    # their warmup, a quarter of their calls. That is 130 s, 300 s and 430 s, with the judge a quarter of an hour.
    candidates: int = 24
    n: int = 8
    n_seeds: int = 4  # fresh ones; the last choice uses as many or more, and its reference curve half of them
    entropy: float | None = None
    tolerance: float = 0.05  # how far a candidate's entropy may be from the wanted one
    length: int | None = None
    seed: int = 5000  # even; the seeds of choices go up from it by two, and fresh ones lie between them

    def __post_init__(self) -> None:
        for name in ("candidates", "n", "n_seeds"):
            if getattr(self, name) < 1:
                raise LimpetError(f"{name} is {getattr(self, name)}; it takes one or more")
        if self.seed < 0 or self.seed % 2:
            raise LimpetError(f"seed is {self.seed}; it takes an even number from 0, because fresh seeds are odd")
        if self.entropy is not None and not 0 < self.entropy < math.inf:
            raise LimpetError(f"entropy is {self.entropy}; it takes nats above 0, as the table of limpet compare has")
        if not 0 < self.tolerance < math.inf:
            raise LimpetError(f"tolerance is {self.tolerance}; it takes a number above 0")

    @property
    def digest(self) -> str:
        """A digest of all settings."""
        return digest(canonical_json(asdict(self)))[:8]

    def seeds(self, count: int) -> tuple[int, ...]:
        """Seeds that choices use."""
        return tuple(range(self.seed, self.seed + 2 * count, 2))

    @property
    def fresh_seeds(self) -> tuple[int, ...]:
        """Seeds that no choice uses."""
        return tuple(seed + 1 for seed in self.seeds(self.n_seeds))

    def study(self, step: str, samplers: Mapping[str, Sampler], seeds: tuple[int, ...]) -> Study:
        """One step of the tuning as a study."""
        cells = tuple(Cell(name, self.model, sampler, self.n, self.length) for name, sampler in samplers.items())
        name, title = f"tune-{self.digest}-{step}", f"tuning {self.model}, {step}"
        return Study(name, title, cells, seeds, lambda _: ReportContent(), self.judges, METRICS)


def rungs(candidates: int, n_seeds: int) -> list[tuple[int, int]]:
    """How many candidates on how many seeds, rung by rung.

    Each rung has a third of the candidates on three times the seeds, so every rung costs as much; the last has at
    least `n_seeds`."""
    counts = [candidates]
    while counts[-1] > KEEP:
        counts.append(-(-counts[-1] // KEEP))
    last = len(counts) - 1
    return [(count, max(KEEP**k, -(-n_seeds // KEEP ** (last - k)))) for k, count in enumerate(counts)]


# Curves


def top_p_curve(nfe: int, final_step: Literal["sample", "argmax"]) -> dict[str, Sampler]:
    """Native sampling from p = 1 down."""
    samplers = (Native(nfe=nfe, top_p=mass, final_step=final_step) for mass in TOP_P)
    return {sampler_text(sampler): sampler for sampler in samplers}


def crs_curve(nfe: int) -> dict[str, Sampler]:
    """CRS that keeps committed tokens in the final step, from late p = 1 down."""
    samplers = (CRS(nfe=nfe, final_step="keep", late_top_p=mass) for mass in LATE_TOP_P)
    return {sampler_text(sampler): sampler for sampler in samplers}


def mean_point(results: Results, cell: str, seeds: NDArray[np.int64] | slice = EVERY_SEED) -> tuple[float, float]:
    """A cell's entropy and NLL over some seeds together."""
    entropy, nll = (float(results.values(cell, name)[seeds].mean()) for name in ("entropy", "nll"))
    return entropy, nll


def curves_through(
    results: Results, cells: Iterable[Iterable[str]], seeds: NDArray[np.int64] | slice = EVERY_SEED
) -> list[Curve]:
    """Curves through cells, cut where they turn back; the lowest part counts."""
    return [
        part
        for curve in cells
        for part in statistics.branches(*zip(*(mean_point(results, cell, seeds) for cell in curve), strict=True))
    ]


def distance(curves: Sequence[Curve], entropy: float, nll: float) -> float:
    """NLL minus that of the lowest curve at the same entropy.

    Beyond the curves' highest entropy the comparison is with their upper end. NLL rises with entropy, so the true
    distance is then at least as good. Below their lowest entropy there is no value."""
    if not curves:
        return math.nan
    return nll - statistics.lowest(curves, min(entropy, max(float(xs.max()) for xs, _ in curves)))[1]


def delta_nll(results: Results, cell: str, *curves: Iterable[str]) -> Estimate:
    """A cell's NLL minus the lowest curve's at the cell's own entropy.

    The error is by leaving out one seed at a time, because under a single seed a cell may miss the curve."""
    cells = [list(curve) for curve in curves]

    def over(seeds: NDArray[np.int64]) -> float:
        return distance(curves_through(results, cells, seeds), *mean_point(results, cell, seeds))

    return statistics.jackknife(over, len(results.study.seeds))


# Choices


class Candidate(NamedTuple):
    """A sampler as one rung measured it."""

    sampler: str  # its text
    entropy: float
    nll: float
    delta_nll: float  # against the reference curve at the same entropy; NaN below the curve's lower end
    seeds: int


def measured_candidates(results: Results, samplers: Iterable[str], curve: Sequence[Curve]) -> list[Candidate]:
    """Candidates beside the reference curve.

    They may be on more seeds than the curve. Its error is shared by candidates of about the same entropy, so theirs is
    the one that has to be small."""
    values = ((sampler, *mean_point(results, sampler)) for sampler in samplers)
    seeds = len(results.study.seeds)
    return [Candidate(name, entropy, nll, distance(curve, entropy, nll), seeds) for name, entropy, nll in values]


def ranked(found: Iterable[Candidate], entropy: float | None, tolerance: float) -> list[Candidate]:
    """Candidates, the best first: those near the wanted entropy by their distance below the reference curve, then the
    others by their entropy.

    Entropies that are near are not equal, and NLL rises with entropy. So each candidate is compared with the curve at
    its own entropy."""

    def order(one: Candidate) -> tuple[float, bool, float, str]:
        off = 0.0 if entropy is None else max(0.0, abs(one.entropy - entropy) - tolerance)
        has_none = math.isnan(one.delta_nll)
        return off, has_none, 0.0 if has_none else one.delta_nll, one.sampler

    return sorted(found, key=order)


def check_reached(found: Sequence[Candidate], curve: Sequence[Curve], entropy: float | None, tolerance: float) -> None:
    """Raise if no candidate can be what is wanted."""
    low, high = min(one.entropy for one in found), max(one.entropy for one in found)
    have = f"the {len(found)} samplers have {low:.3g} to {high:.3g}"
    if entropy is not None and not low - tolerance <= entropy <= high + tolerance:
        raise LimpetError(f"entropy {entropy:g} is out of reach: {have}; ask for one in between, or widen --space")
    if all(math.isnan(one.delta_nll) for one in found):
        xs = [x for part, _ in curve for x in part]
        span = f"{min(xs):.3g} to {max(xs):.3g}" if xs else "no two points with a likelihood"
        raise LimpetError(
            f"no sampler can be compared with top-p at its own entropy: {have}, and the curve of top-p {span}; give "
            "--space values that draw more freely"
        )


def frontier(found: Iterable[Candidate]) -> list[Candidate]:
    """The samplers that no other beats in both entropy and NLL, by entropy, each as it was last measured."""
    last = {one.sampler: one for one in found}.values()

    def is_beaten(one: Candidate) -> bool:
        others = (other for other in last if (other.entropy, other.nll) != (one.entropy, one.nll))
        return any(other.entropy >= one.entropy and other.nll <= one.nll for other in others)

    return sorted((one for one in last if not is_beaten(one)), key=lambda one: one.entropy)


# The tuning


@dataclass(frozen=True)
class TuningResult:
    """The candidates of every rung, the best first, and the winner on fresh seeds."""

    config: TuningConfig
    rungs: tuple[tuple[Candidate, ...], ...]
    winner: str  # its text
    sampler: Sampler
    fresh: Results

    @property
    def text(self) -> str:
        """The winner as `--sampler` takes it."""
        return f"{self.winner} nfe={self.sampler.nfe}"

    @property
    def default(self) -> str:
        """The winner's sampler with its default parameters."""
        return self.winner.split()[0]

    def frontier(self) -> list[Candidate]:
        return frontier(one for rung in self.rungs for one in rung)

    def distances(self, sampler: str | None = None) -> dict[str, Estimate]:
        """Delta NLL of a sampler (default: the winner) against the best of top-p, and against CRS, at equal entropy."""
        nfe, sampler = self.config.nfe, sampler or self.winner
        return {
            "top-p": delta_nll(self.fresh, sampler, top_p_curve(nfe, "sample"), top_p_curve(nfe, "argmax")),
            "CRS": delta_nll(self.fresh, sampler, crs_curve(nfe)),
        }

    def figure(self) -> Figure:
        """Entropy and NLL of every candidate as it was last measured, and of curves and winner on fresh seeds."""
        nfe = self.config.nfe

        def on_fresh_seeds(name: str, cells: Collection[str], **style: Any) -> Series:
            entropies = [self.fresh(cell, "entropy").mean for cell in cells]
            return estimate_series(name, entropies, [self.fresh(cell, "nll") for cell in cells], **style)

        last = {one.sampler: one for rung in self.rungs for one in rung}.values()
        entropies, nlls = tuple(one.entropy for one in last), tuple(one.nll for one in last)
        tried = Series("tried", entropies, nlls, joined=False, open=True)
        curves = {
            "top-p, sampled final step": top_p_curve(nfe, "sample"),
            "top-p, argmax final step": top_p_curve(nfe, "argmax"),
            "CRS, committed tokens kept": crs_curve(nfe),
        }
        lines = [on_fresh_seeds(name, cells) for name, cells in curves.items()]
        lines += [tried, on_fresh_seeds(self.winner, [self.winner], joined=False)]
        title = f"{self.config.model}, {nfe} network calls"
        panel = Panel(title, "unigram entropy (nats)", "NLL (nats/token), lower is better", lines)
        return Figure("tuned", "Samplers that were tried; curves and the winner on fresh seeds.", (panel,))

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, None where there is none."""

        def row(one: Candidate) -> dict[str, Any]:
            delta, nll = statistics.numbers([one.delta_nll, one.nll])
            return {**one._asdict(), "delta_nll": delta, "nll": nll}

        cells = {
            name: {measure: self.fresh(name, measure).to_dict() for measure in ("nll", *METRICS)}
            for name in self.fresh.cells
        }
        return {
            "config": asdict(self.config),
            "winner": self.text,
            "sampler": self.sampler.to_dict(),
            "delta_nll": {name: one.to_dict() for name, one in self.distances().items()},
            "rungs": [list(map(row, rung)) for rung in self.rungs],
            "frontier": list(map(row, self.frontier())),
            "fresh": {"seeds": list(self.config.fresh_seeds), "cells": cells},
        }


def tune(config: TuningConfig, measure: Measure) -> TuningResult:
    """Find the best parameters by successive halving, and measure the winner on fresh seeds.

    config: what is tuned. measure: runs a study and returns its results."""
    nfe, top = config.nfe, top_p_curve(config.nfe, "sample")
    left = candidate_samplers([parse_space(text) for text in config.spaces], nfe, config.candidates)
    half = config.seeds(-(-config.n_seeds // 2))
    curve = curves_through(measure(config.study("curve", top, half)), [top])
    climbed: list[tuple[Candidate, ...]] = []
    for k, (count, n_seeds) in enumerate(rungs(len(left), config.n_seeds), 1):
        left = dict(islice(left.items(), count))
        results = measure(config.study(f"rung-{k}", left, config.seeds(n_seeds)))
        found = measured_candidates(results, left, curve)
        if k == 1:
            check_reached(found, curve, config.entropy, config.tolerance)
        climbed.append(tuple(ranked(found, config.entropy, config.tolerance)))
        left = {one.sampler: left[one.sampler] for one in climbed[-1]}
    winner, sampler = next(iter(left.items()))
    default = winner.split()[0]
    beside = {winner: sampler, default: find(default)(nfe=nfe)}  # type: ignore[call-arg]
    beside |= {**top, **top_p_curve(nfe, "argmax"), **crs_curve(nfe), "crs": CRS(nfe=nfe)}
    fresh = measure(config.study("fresh", beside, config.fresh_seeds))
    return TuningResult(config, tuple(climbed), winner, sampler, fresh)
