"""Samplers written out for one sample in plain Python: lists and loops, nothing shared with the package but the model.

A transcription is a function of the model, the sampler's knobs, the uniforms by (call, position, purpose), and the
given tokens by position; it returns the output. It uses the same uniforms for the same ends, so its tokens are the
sampler's tokens. Signals are the log-linear schedule's: 1 - .999 t."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

import literal
import plain
from plain import COINS, START, TOKENS, inverse, law_of, ranked

NOISE, PLACES = 4, 6  # the purposes beside plain's


class Uniforms(NamedTuple):
    """All that one sample will draw."""

    seed: int
    sample: int

    def __call__(self, call: int, position: int, purpose: int) -> tuple[float, float]:
        return literal.uniforms(self.seed, self.sample, call, position, purpose)


Knobs = SimpleNamespace
Weights = Callable[
    [Knobs, float, float], tuple[float, float, float]
]  # signals before and after -> draw, uniform, noise

NATIVE = {
    "warmup": 0.33, "grid": "two-piece", "temperature": 1.0, "top_p": 1.0, "late_top_p": None, "boundary": "released",
    "top_k": None, "min_p": 0.0, "endpoint": "argmax", "weave": False,
}  # fmt: skip
CRS = {"horizon": None, "budget": 0.5, "spacing": 4, "count": None}


def signal(t: float) -> float:
    return 1 - 0.999 * t


def cut(law: list[float], knobs: Knobs, late: bool) -> list[float]:
    """The law on the tokens that top-p, top-k and min-p all keep."""
    p = knobs.late_top_p if late and knobs.late_top_p is not None else knobs.top_p
    kept = literal.nucleus(law, p, knobs.boundary) if p < 1 else [True] * len(law)
    likeliest = ranked(law)[: knobs.top_k]
    kept = [keep and x in likeliest and law[x] >= knobs.min_p * max(law) for x, keep in enumerate(kept)]
    return literal.restricted(law, kept)


def ancestral(knobs: Knobs, a: float, b: float) -> tuple[float, float, float]:
    return (b - a) / (1 - a), (1 - a / b) * (1 - b) / (1 - a), 0.0


def psi(knobs: Knobs, a: float, b: float) -> tuple[float, float, float]:
    draw, uniform, _ = ancestral(knobs, a, b)
    if b == 1 or a < knobs.start or a >= knobs.stop:
        return draw, uniform, 0.0
    sigma = {
        "cap": min(knobs.eta, (1 - b) / a),
        "rescale": knobs.eta * min(knobs.eta, (1 - b) / a),
        "rescale-remdm": knobs.eta * min(1, (1 - b) / a),
        "loop": knobs.eta if a == b else 0.0,
        "constant": knobs.eta * (1 - b),
    }[knobs.rule]
    kappa = min(1.0, max(0.0, 1 - sigma / (1 - b)))
    return kappa * draw + (1 - kappa) * b, kappa * uniform, (1 - kappa) * (1 - b)


def ddim(knobs: Knobs, a: float, b: float) -> tuple[float, float, float]:
    stay = knobs.stay * (1 - b) / (1 - a)
    return b - stay * a, 0.0, 1 - b - stay * (1 - a)


def times_of(knobs: Knobs) -> list[float]:
    if getattr(knobs, "rule", None) != "loop" or knobs.nfe == 2:
        return plain.grid(knobs.nfe, knobs.warmup, knobs.grid)
    steps, there = knobs.nfe - 1, 0.1 / 0.999
    last = max(1, round(0.05 * steps))
    first = min(steps - last, max(1, round(0.45 * steps)))
    down = [1 + (there - 1) * k / first for k in range(first)]
    end = [there + (plain.EPS - there) * k / last for k in range(last + 1)]
    return down + [there] * (steps - first - last) + end


class Walk:
    """A path by two coins, call by call; with `count` or a budget, labels as Algorithm 1 has them (argmax values, in
    the input alone)."""

    def __init__(
        self, model: Any, knobs: Knobs, uniforms: Uniforms, fixed: dict[int, int], weights: Weights = ancestral
    ) -> None:
        self.model, self.knobs, self.uniforms, self.weights = model, knobs, uniforms, weights
        self.free = [i for i in range(model.length) if i not in fixed]
        self.times, self.size, self.last = times_of(knobs), model.vocab_size, knobs.nfe - 1
        self.early = round(knobs.warmup * self.last)
        self.labels: dict[int, int] = {}
        self.selected_at: dict[int, int] = {}
        self.state = [fixed.get(i, int(uniforms(0, i, START)[0] * self.size)) for i in range(model.length)]

    def visible(self, r: int) -> list[int]:
        horizon = getattr(self.knobs, "horizon", None) or math.inf
        return [i for i, e in self.selected_at.items() if 1 <= r - e <= horizon]

    def laws(self, r: int) -> list[list[float]]:
        """What the denoiser says before the predictor's call r."""
        shown = [self.labels[i] if i in self.visible(r) else z for i, z in enumerate(self.state)]
        return law_of(self.model, shown, self.times[r], self.knobs.temperature)

    def move(self, i: int, law: list[float], r: int, a: float, b: float) -> int:
        (first, second), (for_draw, for_any) = (self.uniforms(r, i, purpose) for purpose in (COINS, TOKENS))
        z = self.state[i]
        draw, uniform, noise = self.weights(self.knobs, a, b)
        anything = int(for_any * self.size)
        if first >= draw + uniform:
            return anything if first < draw + uniform + noise else z
        if second >= (1 - a) / (1 - a + a * self.size * law[z]):
            return z
        return inverse(law, for_draw) if first < draw else anything

    def step(self, r: int) -> None:
        laws, after = self.laws(r), list(self.state)
        for i in self.free:
            if span := plain.stepping(self.times, self.knobs.weave, r, i):
                law = cut(laws[i], self.knobs, r >= self.early)
                after[i] = self.move(i, law, r, *map(signal, span))
            if r == self.last and self.knobs.endpoint == "argmax":
                after[i] = ranked(laws[i])[0]
        if hasattr(self.knobs, "budget") and self.early <= r < self.last:
            steps = self.last - self.early
            deficit = {i: 1 - max(laws[i]) for i in self.free if i not in self.selected_at}
            count = -(-len(self.free) // steps) if self.knobs.count is None else self.knobs.count
            for i in plain.scan(deficit, count, self.knobs.budget * len(self.free) / steps, self.knobs.spacing):
                self.labels[i], self.selected_at[i] = ranked(laws[i])[0], r
        self.state = after


def by_two_coins(weights: Weights) -> Callable[..., list[int]]:
    """The transcription of a method that is a set of weights."""

    def run(model: Any, knobs: Knobs, uniforms: Uniforms, fixed: dict[int, int]) -> list[int]:
        walk = Walk(model, knobs, uniforms, fixed, weights)
        for r in range(knobs.nfe):
            walk.step(r)
        return walk.state

    return run


def labelled(model: Any, knobs: Knobs, uniforms: Uniforms, fixed: dict[int, int]) -> list[int]:
    """CRS and mend: Algorithm 1, with whatever of it the knobs change."""
    return plain.run(model, vars(knobs), uniforms.seed, uniforms.sample, fixed).tokens


PREDICTORS: dict[str, tuple[dict[str, Any], Weights]] = {
    "native": ({}, ancestral),
    "crs": (CRS, ancestral),
    "psi": ({"rule": "rescale", "eta": 0.05, "start": 0.0, "stop": 1.0}, psi),
    "ddim": ({"stay": 1.0}, ddim),
}


def gibbs(model: Any, knobs: Knobs, uniforms: Uniforms, fixed: dict[int, int]) -> list[int]:
    """The predictor's calls and the corrections in one list; then one after the other."""
    c, nfe = knobs.corrections, knobs.nfe
    corrected = (nfe - 1) // (1 + c) if c else 0
    steps = nfe - 1 - c * corrected
    name, *settings = knobs.predictor.replace(",", " ").split()
    extra, weights = PREDICTORS[name]
    own = {**NATIVE, **extra, "nfe": steps + 1}
    for setting in settings:
        knob, _, text = setting.partition("=")
        own[knob] = text if isinstance(own[knob], str) else int(text) if text.isdecimal() else float(text)
    walk = Walk(model, SimpleNamespace(**own), uniforms, fixed, weights)

    number = steps + 1  # the name of the next correction's uniforms: the predictor's calls come first
    for r in range(steps):
        walk.step(r)
        if r < steps - corrected:
            continue
        for _ in range(c):
            b, laws, z = signal(walk.times[r + 1]), walk.laws(r + 1), list(walk.state)
            score = {}
            for i in walk.free:
                if i in walk.visible(r + 1):
                    continue
                score[i] = -math.log(-math.log(uniforms(number, i, PLACES)[0]))
                if knobs.choose == "margin":
                    p = [b * h + (1 - b) / walk.size for h in laws[i]]
                    margin = math.log(p[z[i]]) - max(math.log(q) for y, q in enumerate(p) if y != z[i])
                    score[i] -= margin / knobs.tau
            for i in sorted(score, key=lambda i: (-score[i], i))[: knobs.positions]:
                law = cut(laws[i], walk.knobs, r + 1 >= walk.early)
                for_draw, for_any = uniforms(number, i, TOKENS)
                fresh = uniforms(number, i, COINS)[0] < b
                walk.state[i] = inverse(law, for_draw) if fresh else int(for_any * walk.size)
            number += 1
    walk.step(steps)
    return walk.state


# -- samplers that read whole laws, call by call -----------------------------------------------------------------------


class One:
    """One sample of a sampler that has no coins of its own: its model, its uniforms, its given tokens."""

    def __init__(self, model: Any, uniforms: Uniforms, given: dict[int, int]) -> None:
        self.model, self.pair, self.given = model, uniforms, given
        self.size, self.length = model.vocab_size, model.length
        self.free = [i for i in range(self.length) if i not in given]
        self.stopped_at: int | None = None  # the call that ended it, if one did

    def start(self) -> list[int]:
        return [self.given.get(i, int(self.pair(0, i, START)[0] * self.size)) for i in range(self.length)]

    def laws(self, tokens: list[int], t: float, temperature: float = 1.0) -> list[list[float]]:
        return law_of(self.model, tokens, t, temperature)

    def drawn(self, laws: list[list[float]], call: int) -> dict[int, int]:
        return {i: inverse(laws[i], self.pair(call, i, TOKENS)[0]) for i in self.free}

    def anything(self, call: int, i: int) -> int:
        return int(self.pair(call, i, TOKENS)[1] * self.size)

    def time(self, clean: list[int]) -> float:
        """At which the signal is the share of clean tokens."""
        return min(1.0, max(plain.EPS, (1 - len(clean) / len(self.free)) / 0.999))


def largest(score: dict[int, float], count: int) -> list[int]:
    return sorted(score, key=lambda i: (-score[i], i))[: max(0, count)]


def entropy_bound(one: One, knobs: Any) -> list[int]:
    state, accepted, history = one.start(), [], []
    for r in range(knobs.nfe):
        t = one.time(accepted) if knobs.clock == "share" else plain.grid(knobs.nfe, 0, "uniform")[r]
        heat = knobs.coldest + (knobs.hottest - knobs.coldest) * (1 - r / knobs.nfe)
        laws = one.laws(state, t, heat)
        entropy = {i: -sum(p * math.log(p) for p in laws[i] if p) for i in one.free}
        drawn, accepted, spent = one.drawn(laws, r), [], 0.0
        for i in sorted(one.free, key=lambda i: (entropy[i], i)):
            if spent <= knobs.bound:
                accepted.append(i)
            spent += entropy[i]
        top = {i: ranked(laws[i])[0] for i in one.free}
        stable = len(history) >= knobs.patience and all(old == top for old in history[-knobs.patience :])
        history.append(top)
        calm = knobs.settled is not None and sum(entropy.values()) / len(one.free) < knobs.settled
        if r == knobs.nfe - 1 or (stable and calm):
            one.stopped_at = r
            return [top.get(i, state[i]) for i in range(one.length)]
        for i in one.free:
            state[i] = drawn[i] if i in accepted else one.anything(r, i)
    raise AssertionError


def gidd_adaptive(one: One, knobs: Any) -> list[int]:
    state, setting = one.start(), knobs.nfe - (knobs.endpoint == "argmax")
    count = -(-len(one.free) // setting) if knobs.count is None else knobs.count
    for r, t in enumerate(plain.grid(knobs.nfe, 0, "uniform")):
        laws = one.laws(state, t)
        if r == setting:
            return [ranked(law)[0] if i in one.free else state[i] for i, law in enumerate(laws)]
        prior = 1 / one.size  # of the token that stands there, whichever it is
        score = {i: (max(laws[i]) - laws[i][state[i]]) * prior for i in one.free}
        for i in largest(score, count):
            state[i] = ranked(laws[i])[0]
    return state


def gidd_correction(one: One, knobs: Any) -> list[int]:
    corrections = min(knobs.nfe // 2, knobs.nfe - 2) if knobs.corrections is None else knobs.corrections
    drawing = vars(knobs) | {"nfe": knobs.nfe - corrections}
    state = plain.run(one.model, drawing, one.pair.seed, one.pair.sample, one.given).tokens
    best, idle = 0.0, 0
    for r in range(knobs.nfe - corrections, knobs.nfe):
        laws = one.laws(state, knobs.correction_time, knobs.sharpness)
        drawn, following = one.drawn(laws, r), list(state)
        score = {i: laws[i][drawn[i]] if drawn[i] != state[i] else 0.0 for i in one.free}
        for i in largest(score, knobs.changes):
            following[i] = drawn[i]
        agreement = sum(following[i] == ranked(laws[i])[0] for i in one.free) / len(one.free)
        best, idle = (agreement, 0) if agreement > best else (best, idle + 1)
        if (knobs.patience is not None and idle > knobs.patience) or following == state:
            one.stopped_at = r
            break
        state = following
    return state


def block_refinement(one: One, knobs: Any) -> list[int]:
    state, committed = one.start(), []
    for r in range(knobs.nfe):
        t = one.time(committed) if knobs.clock == "share" else plain.grid(knobs.nfe, 0, "uniform")[r]
        laws = one.laws(state, t, knobs.temperature or 1.0)
        drawn = one.drawn(laws, r) if knobs.temperature else {i: ranked(laws[i])[0] for i in one.free}
        confidence = {i: laws[i][drawn[i]] for i in one.free}
        owed = math.ceil((r + 1) * len(one.free) / knobs.nfe) - len(committed)
        waiting = {i: confidence[i] for i in one.free if i not in committed}
        new = set(largest(waiting, owed)) | {i for i in waiting if confidence[i] > knobs.threshold}
        edited = [i for i in committed if knobs.editing is not None and confidence[i] > knobs.editing]
        for i in [*new, *edited]:
            state[i] = drawn[i]
        committed += sorted(new)
        for i in one.free:
            if i not in committed:
                state[i] = one.anything(r, i)
    return state


def guided(one: One, knobs: Any) -> list[int]:
    nodes = (knobs.nfe + 1) // 2
    state, times = one.start(), plain.grid(nodes, knobs.warmup, knobs.grid)
    for k, t in enumerate(times):
        law = laws = one.laws(state, t)
        if 2 * k < knobs.nfe - 1:  # the readout of an odd number of calls has one call
            noised = list(state)
            for i in one.given:
                keep, other = one.pair(2 * k, i, NOISE)
                if keep >= (signal(t) if knobs.without == "level" else 0.0):
                    noised[i] = int(other * one.size)
            other = one.laws(noised, t)
            law = []
            for p, q in zip(laws, other, strict=True):
                powers = [x ** (1 + knobs.weight) / y**knobs.weight for x, y in zip(p, q, strict=True)]
                law.append([x / sum(powers) for x in powers])
        if k == nodes - 1 and knobs.endpoint == "argmax":
            return [ranked(law[i])[0] if i in one.free else state[i] for i in range(one.length)]
        for i in one.free:
            if span := plain.stepping(times, knobs.weave, k, i):
                coins, tokens = one.pair(k, i, COINS), one.pair(k, i, TOKENS)
                state[i] = plain.move(law[i], state[i], *map(signal, span), coins, tokens)
    return state


def reverse_rates(law: Any, z: int, t: float) -> list:
    """Of jumps from z, for each token: the reverse process of the log-linear schedule. Numbers, or arrays of them."""
    size, kept = len(law), signal(t)
    noisy = [kept * p + (1 - kept) / size for p in law]
    return [0 * p if y == z else 0.999 / (kept * size) * p / noisy[z] for y, p in enumerate(noisy)]


def extrapolated(first: Any, second: Any, z: int, theta: float) -> list:
    """The rates of the second leap, from the token that the first one came to."""
    both = (1 - theta) ** 2 + theta**2
    rates = [(later - both * early) / (2 * theta * (1 - theta)) for early, later in zip(first, second, strict=True)]
    return [0 * rate if y == z else np.maximum(rate, 0) for y, rate in enumerate(rates)]


def trapezoidal(one: One, knobs: Any) -> list[int]:
    plainly = knobs.nfe % 2 == 0
    nodes = plain.grid((knobs.nfe - 1 - plainly) // 2 + plainly + 1, knobs.warmup, knobs.grid)
    state, r = one.start(), 0

    def leap(rates: dict[int, list], span: float) -> None:
        for i in one.free:
            if one.pair(r, i, COINS)[0] < 1 - math.exp(-sum(rates[i]) * span):
                state[i] = inverse(rates[i], one.pair(r, i, TOKENS)[0])

    def advance(t: float, signal_s: float) -> None:
        laws = one.laws(state, t)
        for i in one.free:
            coins, tokens = one.pair(r, i, COINS), one.pair(r, i, TOKENS)
            state[i] = plain.move(laws[i], state[i], signal(t), signal_s, coins, tokens)

    for k, (t, s) in enumerate(pairwise(nodes)):
        if plainly and k == 0:
            advance(t, signal(s))
            r += 1
            continue
        inside, laws = t - knobs.theta * (t - s), one.laws(state, t)
        first = {i: reverse_rates(laws[i], state[i], t) for i in one.free}
        leap(first, t - inside)
        r, laws = r + 1, one.laws(state, inside)
        second = {i: reverse_rates(laws[i], state[i], inside) for i in one.free}
        leap({i: extrapolated(first[i], second[i], state[i], knobs.theta) for i in one.free}, inside - s)
        r += 1
    if knobs.endpoint == "argmax":
        return [ranked(law)[0] if i in one.free else state[i] for i, law in enumerate(one.laws(state, nodes[-1]))]
    advance(nodes[-1], 1.0)
    return state


def by_rule(rule: Callable[[One, Any], list[int]]) -> Callable[..., list[int]]:
    """The transcription of a method that is a rule for one sample."""

    def run(model: Any, knobs: Knobs, uniforms: Uniforms, fixed: dict[int, int]) -> list[int]:
        return rule(One(model, uniforms, fixed), knobs)

    return run
