"""Tuning: the parameters with which a sampler has the least NLL at its entropy, found by successive halving over shards.

All arms are measured on a few shards, the best third of them on three times as many, until few are left. Every rung is
a study on one store, and what is chosen is a function of its results alone: a tuning that was stopped goes on where it
was, and makes the same choices. Choices look at even seeds and the report at odd ones, so that it sees no luck that
anything was chosen by."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from limpet.errors import LimpetError
from limpet.evaluation import statistics
from limpet.evaluation.statistics import Estimate, Floats
from limpet.experiments.contents import Figure, Page, Panel, Series, series
from limpet.experiments.results import Results
from limpet.experiments.store import canonical, digest
from limpet.experiments.study import Cell, Judging, Study
from limpet.samplers import CRS, Native, Sampler, find, params
from limpet.samplers.base import assigned

SPACE = "mend late_top_p=1,.9,.8,.7,.6,.5 budget=.25,.5,1 spacing=1,2,4 warmup=.2,.33,.5 mend=2,4,None,16"
MASSES = (1.0, 0.9, 0.8, 0.7, 0.55, 0.4)  # of the reference curve, top-p
LATE = (None, 0.8, 0.6, 0.45)  # late masses of CRS's curve
KEEP = 3  # one arm in so many stays; and so many are the last to choose from
METRICS = ("entropy", "rep-4")

EVERY = slice(None)  # shard
Branch = tuple[Floats, Floats]  # entropies and NLL of a curve's nodes
Measured = Callable[[Study], Results]  # makes what the store does not hold of a study, and reads it all


# The space


@dataclass(frozen=True)
class Space:
    """A sampler and the values that some of its parameters may have; the others stay as they come."""

    name: str  # as an arm has it
    kind: type[Sampler]
    values: Mapping[str, tuple[Any, ...]]

    def line(self, **own: Any) -> str:
        """The arm with these parameters as a command line has it."""
        return line(self.kind(**own), self.name)


def space(text: str) -> Space:
    """A space as a command line has it: `mend late_top_p=.9,.8 warmup=.2,.33`."""
    name, *settings = text.split() or [""]
    kind, values = find(name), {}
    takes = "it takes parameters with values, such as warmup=.2,.33"
    for param, given in assigned(kind, name, settings, f"space {text!r}", takes):
        if (field := param.name) == "nfe":
            raise LimpetError(f"space {text!r} has nfe; arms are compared at equal calls, which --nfe gives")
        parts = [given] if param.kind is str and not param.choices else given.split(",")  # a text may hold commas
        values[field] = tuple(dict.fromkeys(map(param.read, parts)))
        for value in values[field]:
            if not param.accepts(value):
                raise LimpetError(f"space {text!r} has {field} {value!r}; {name} takes {param.takes}")
    return Space(name, kind, values)


def points(space: Space) -> Iterator[dict[str, Any]]:
    """Every point of a space once, by chance but the same each time, and spread from the first on: a parameter takes each of
    its values once before it takes one twice. So any number of first points covers the space, and holds what a smaller
    number does."""
    seen: set[tuple[Any, ...]] = set()
    for point in zip(*(_turns(param, values) for param, values in space.values.items()), strict=True):
        if point not in seen:
            seen.add(point)
            yield dict(zip(space.values, point, strict=True))
        if len(seen) == math.prod(map(len, space.values.values())):
            return


def _turns(param: str, values: tuple[Any, ...]) -> Iterator[Any]:
    """The values for ever, in one random order after another; parameters go their own ways."""
    chance = random.Random(param)
    while True:
        yield from sorted(values, key=lambda _: chance.random())


def line(sampler: Sampler, name: str | None = None) -> str:
    """A sampler as a command line has it, without its number of calls: what is not as it comes."""
    own = (
        f"{param}={getattr(sampler, param)}"
        for param, about in params(type(sampler)).items()
        if param != "nfe" and getattr(sampler, param) != about.default
    )
    return " ".join([name or sampler.name, *own])


def arms(spaces: Sequence[Space], nfe: int, most: int) -> dict[str, Sampler]:
    """So many arms by their lines, from each space in turn: its sampler as it comes, then its points."""

    def of(space: Space) -> Iterator[tuple[str, Sampler]]:
        yield space.line(), space.kind(nfe=nfe)  # type: ignore[call-arg]
        for point in points(space):
            yield space.line(**point), space.kind(nfe=nfe, **point)  # type: ignore[call-arg]

    found: dict[str, Sampler] = {}
    waiting = [of(one) for one in spaces]
    while waiting and len(found) < most:
        turn = waiting.pop(0)
        if (one := next((one for one in turn if one[0] not in found), None)) is not None:
            found |= [one]
            waiting.append(turn)
    return found


# The question


@dataclass(frozen=True)
class Question:
    """What is asked: the least NLL at an entropy, or the largest distance below the reference curve anywhere."""

    model: str
    nfe: int = 16
    judges: tuple[Judging, ...] = ()  # none where the true distribution is known
    spaces: tuple[str, ...] = (SPACE,)
    # What a tuning costs by default, in shards of 8 samples: 2 x 6 of the curve that arms are held against, 24 + 2 x 8
    # + 6 x 3 arms in three rungs, and 4 x (6 + 5 + 2) on fresh seeds, where both final steps of top-p share all calls but
    # one. On two free cores 16 calls of `mini` on 8 samples took 7 s with labels and 11 s with top-p; arms share their
    # warmup, a quarter of their calls. That makes 130 s, 300 s and 430 s, with the judge a quarter of an hour.
    arms: int = 24
    n: int = 8
    shards: int = 4  # fresh ones; the last choice is made on as many or more, and the curve for it on half of them
    entropy: float | None = None
    tolerance: float = 0.05  # how near an arm's entropy is to that wanted
    length: int | None = None
    seed: int = 5000  # even; seeds of choices go up from it by two, fresh ones lie between them

    def __post_init__(self) -> None:
        for what in ("arms", "n", "shards"):
            if getattr(self, what) < 1:
                raise LimpetError(f"{what} is {getattr(self, what)}; it takes one or more")
        if self.seed < 0 or self.seed % 2:
            raise LimpetError(f"seed is {self.seed}; it takes an even number from 0, as fresh seeds are odd")
        if self.entropy is not None and not 0 < self.entropy < math.inf:
            raise LimpetError(f"entropy is {self.entropy}; it takes nats above 0, as the table of limpet compare has")
        if not 0 < self.tolerance < math.inf:
            raise LimpetError(f"tolerance is {self.tolerance}; it takes a number above 0")

    def seeds(self, shards: int) -> tuple[int, ...]:
        """That choices look at."""
        return tuple(range(self.seed, self.seed + 2 * shards, 2))

    @property
    def fresh(self) -> tuple[int, ...]:
        """That no choice looks at, however many shards it takes."""
        return tuple(seed + 1 for seed in self.seeds(self.shards))

    def study(self, step: str, cells: Mapping[str, Sampler], shards: tuple[int, ...]) -> Study:
        asked = digest(canonical(asdict(self)))[:8]
        made = tuple(Cell(name, self.model, sampler, self.n, self.length) for name, sampler in cells.items())
        return Study(
            f"tune-{asked}-{step}", f"tuning {self.model}, {step}", made, shards, lambda _: Page(), self.judges, METRICS
        )


def rungs(arms: int, shards: int) -> list[tuple[int, int]]:
    """How many arms on how many shards, rung by rung: a third of the arms on three times the shards, so that every rung
    costs as much, and `shards` or more at the last."""
    counts = [arms]
    while counts[-1] > KEEP:
        counts.append(-(-counts[-1] // KEEP))
    last = len(counts) - 1
    return [(arms, max(KEEP**k, -(-shards // KEEP ** (last - k)))) for k, arms in enumerate(counts)]


# Curves


def top_p(nfe: int, **final_step: Any) -> dict[str, Sampler]:
    """Native top-p from mass to mass."""
    made = (Native(nfe=nfe, top_p=mass, **final_step) for mass in MASSES)
    return {line(sampler): sampler for sampler in made}


def committed(nfe: int) -> dict[str, Sampler]:
    """CRS with labels copied, from late mass to late mass."""
    made = (CRS(nfe=nfe, final_step="keep", late_top_p=mass) for mass in LATE)
    return {line(sampler): sampler for sampler in made}


def at(results: Results, cell: str, kept: NDArray[np.int64] | slice = EVERY) -> tuple[float, float]:
    """A cell's entropy and NLL over some shards together."""
    entropy, nll = (float(results.values(cell, what)[kept].mean()) for what in ("entropy", "nll"))
    return entropy, nll


def drawn(results: Results, curves: Iterable[Iterable[str]], kept: NDArray[np.int64] | slice = EVERY) -> list[Branch]:
    """Curves through cells, cut where they turn back: what is read off them is the lower branch."""
    return [
        part
        for curve in curves
        for part in statistics.branches(*zip(*(at(results, cell, kept) for cell in curve), strict=True))
    ]


def gap(curves: Sequence[Branch], entropy: float, nll: float) -> float:
    """NLL less that of the lowest of some curves at the same entropy.

    With more entropy than any point of the curves it is held against their upper end, and is then at least so far
    below, as NLL rises with entropy; with less than any there is no value."""
    if not curves:
        return math.nan
    return nll - statistics.lowest(curves, min(entropy, max(float(xs.max()) for xs, _ in curves)))[1]


def less(results: Results, arm: str, *curves: Iterable[str]) -> Estimate:
    """An arm's NLL less the lowest curve's at its own entropy. The error is by leaving out one shard at a time: in one
    shard alone an arm may miss the curve."""
    held = [list(curve) for curve in curves]

    def over(kept: NDArray[np.int64]) -> float:
        return gap(drawn(results, held, kept), *at(results, arm, kept))

    return statistics.jackknife(over, len(results.study.shards))


# Choices


class Scored(NamedTuple):
    """An arm in a rung."""

    arm: str
    entropy: float
    nll: float
    less: float  # than the reference curve's NLL at the arm's entropy; NaN beyond the curve's lower end
    shards: int


def scored(results: Results, arms: Iterable[str], curve: Sequence[Branch]) -> list[Scored]:
    """Arms held against the reference curve. They may be on more shards than it is: its error is one that arms of about
    the same entropy share, and so it is theirs that has to be small."""
    found = ((arm, *at(results, arm)) for arm in arms)
    return [
        Scored(arm, entropy, nll, gap(curve, entropy, nll), len(results.study.shards)) for arm, entropy, nll in found
    ]


def ranked(found: Iterable[Scored], entropy: float | None, tolerance: float) -> list[Scored]:
    """The best first: what lies farthest below the reference curve, of those near the wanted entropy; then the others,
    the nearest first.

    Arms near one entropy have not quite the same, and NLL rises with it. So it is the distances from the curve that are
    compared, each at its own entropy: NLL carried to the wanted entropy along the curve."""

    def order(one: Scored) -> tuple[float, bool, float, str]:
        off = 0.0 if entropy is None else max(0.0, abs(one.entropy - entropy) - tolerance)
        lost = math.isnan(one.less)
        return off, lost, 0.0 if lost else one.less, one.arm

    return sorted(found, key=order)


def reached(found: Sequence[Scored], curve: Sequence[Branch], entropy: float | None, tolerance: float) -> None:
    """Raise where no arm can be what is wanted."""
    low, high = min(one.entropy for one in found), max(one.entropy for one in found)
    have = f"the {len(found)} arms have {low:.3g} to {high:.3g}"
    if entropy is not None and not low - tolerance <= entropy <= high + tolerance:
        raise LimpetError(f"entropy {entropy:g} is out of reach: {have}; ask for one in between, or widen --space")
    if all(math.isnan(one.less) for one in found):
        xs = [x for part, _ in curve for x in part]
        span = f"{min(xs):.3g} to {max(xs):.3g}" if xs else "no two points with a likelihood"
        raise LimpetError(
            f"no arm can be held against top-p at its own entropy: {have}, and the curve of top-p {span}; give --space "
            "values that draw more freely"
        )


def frontier(found: Iterable[Scored]) -> list[Scored]:
    """The arms that no other beats in both entropy and NLL, by entropy; each as it was last measured."""
    last = {one.arm: one for one in found}.values()
    best = [
        one
        for one in last
        if not any(other.entropy >= one.entropy and other.nll <= one.nll and other[1:3] != one[1:3] for other in last)
    ]
    return sorted(best, key=lambda one: one.entropy)


# The tuning


@dataclass(frozen=True)
class Tuned:
    """What was found: every rung's arms, the best first, and the winner on fresh seeds."""

    question: Question
    rungs: tuple[tuple[Scored, ...], ...]
    winner: str  # its line
    sampler: Sampler
    fresh: Results

    @property
    def arm(self) -> str:
        """What `--arm` takes."""
        return f"{self.winner} nfe={self.sampler.nfe}"

    @property
    def plain(self) -> str:
        """The winner's sampler as it comes."""
        return self.winner.split()[0]

    def frontier(self) -> list[Scored]:
        return frontier(one for rung in self.rungs for one in rung)

    def distances(self, arm: str | None = None) -> dict[str, Estimate]:
        """An arm's NLL, the winner's unless told, less the best top-p final step's and less CRS's, at its own entropy."""
        nfe, arm = self.question.nfe, arm or self.winner
        return {
            "top-p": less(self.fresh, arm, top_p(nfe, final_step="sample"), top_p(nfe)),
            "CRS": less(self.fresh, arm, committed(nfe)),
        }

    def figure(self) -> Figure:
        """Entropy and NLL: every arm as it was last measured, the curves and the winner on fresh seeds."""
        nfe = self.question.nfe

        def fresh(name: str, cells: Collection[str], **style: Any) -> Series:
            return series(
                name, [self.fresh(cell, "entropy").mean for cell in cells], [self.fresh(cell, "nll") for cell in cells],
                **style,
            )  # fmt: skip

        last = {one.arm: one for rung in self.rungs for one in rung}.values()
        tried = Series(
            "tried", tuple(one.entropy for one in last), tuple(one.nll for one in last), joined=False, open=True
        )
        curves = {
            "top-p, ancestral": top_p(nfe, final_step="sample"), "top-p, argmax": top_p(nfe),
            "CRS, copied": committed(nfe),
        }  # fmt: skip
        lines = [fresh(name, cells) for name, cells in curves.items()]
        panel = Panel(
            f"{self.question.model}, {nfe} calls", "unigram entropy, nats", "NLL, nats a token",
            [*lines, tried, fresh(self.winner, [self.winner], joined=False)],
        )  # fmt: skip
        return Figure("tuned", "Arms that were tried, and on fresh seeds the curves and the winner.", (panel,))

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, None where there is none."""

        def row(one: Scored) -> dict[str, Any]:
            return {**one._asdict(), "less": statistics.numbers([one.less])[0], "nll": statistics.numbers([one.nll])[0]}

        cells = {
            name: {what: self.fresh(name, what).to_dict() for what in ("nll", *METRICS)} for name in self.fresh.cells
        }
        return {
            "question": asdict(self.question),
            "arm": self.arm,
            "sampler": self.sampler.to_dict(),
            "less": {name: one.to_dict() for name, one in self.distances().items()},
            "rungs": [list(map(row, rung)) for rung in self.rungs],
            "frontier": list(map(row, self.frontier())),
            "fresh": {"shards": list(self.question.fresh), "cells": cells},
        }


def tune(question: Question, measured: Measured) -> Tuned:
    """Successive halving: choose on even seeds, then look at the winner, the curves and CRS on fresh ones."""
    nfe, top = question.nfe, top_p(question.nfe, final_step="sample")
    left = arms([space(text) for text in question.spaces], nfe, question.arms)
    half = question.seeds(-(-question.shards // 2))
    curve = drawn(measured(question.study("curve", top, half)), [top])
    climbed: list[tuple[Scored, ...]] = []
    for k, (many, shards) in enumerate(rungs(len(left), question.shards), 1):
        left = {name: left[name] for name in islice(left, many)}
        results = measured(question.study(f"rung-{k}", left, question.seeds(shards)))
        found = scored(results, left, curve)
        if k == 1:
            reached(found, curve, question.entropy, question.tolerance)
        climbed.append(tuple(ranked(found, question.entropy, question.tolerance)))
        left = {one.arm: left[one.arm] for one in climbed[-1]}
    winner, sampler = next(iter(left.items()))
    plain = find(winner.split()[0])(nfe=nfe)  # type: ignore[call-arg]
    beside = {winner: sampler, winner.split()[0]: plain, **top, **top_p(nfe), **committed(nfe), "crs": CRS(nfe=nfe)}
    return Tuned(question, tuple(climbed), winner, sampler, measured(question.study("fresh", beside, question.fresh)))
