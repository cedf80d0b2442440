"""Samplers written out for one sample in plain Python: lists and loops, nothing shared with the package but the model.

A transcription is a function of the model, the sampler's parameters, the uniforms by (call, position, purpose) and the
fixed tokens by position; it returns the output. It uses the same uniforms for the same purposes, so its tokens are the
sampler's tokens. Signals are those of the log-linear schedule: 1 - .999 t."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

import literal
import plain
from plain import COINS, START, TOKENS, inverse, probs_of, ranked

NOISE, POSITIONS = 4, 6  # the purposes beside plain's


class Uniforms(NamedTuple):
    """All that one sample will draw."""

    seed: int
    sample: int

    def __call__(self, call: int, position: int, purpose: int) -> tuple[float, float]:
        return literal.uniforms(self.seed, self.sample, call, position, purpose)


Params = SimpleNamespace
Triple = tuple[float, float, float]
Weights = Callable[[Params, float, float], Triple]  # signals before and after -> the weights draw, uniform, noise

NATIVE = {
    "warmup": 0.33,
    "grid": "two-piece",
    "temperature": 1.0,
    "top_p": 1.0,
    "late_top_p": None,
    "boundary": "released",
    "top_k": None,
    "min_p": 0.0,
    "final_step": "sample",
    "interleave": False,
}
CRS = {"final_step": "argmax", "horizon": None, "budget": 0.5, "spacing": 4, "count": None}


def signal(t: float) -> float:
    return 1 - 0.999 * t


def cut(probs: list[float], params: Params, late: bool) -> list[float]:
    """The distribution on the tokens that top-p, top-k and min-p all keep."""
    p = params.late_top_p if late and params.late_top_p is not None else params.top_p
    kept = literal.nucleus(probs, p, params.boundary) if p < 1 else [True] * len(probs)
    likeliest = ranked(probs)[: params.top_k]
    kept = [keep and x in likeliest and probs[x] >= params.min_p * max(probs) for x, keep in enumerate(kept)]
    return literal.restricted(probs, kept)


def ancestral(params: Params, a: float, b: float) -> Triple:
    return (b - a) / (1 - a), (1 - a / b) * (1 - b) / (1 - a), 0.0


def psi(params: Params, a: float, b: float) -> Triple:
    draw, uniform, _ = ancestral(params, a, b)
    if b == 1 or a < params.start or a >= params.stop:
        return draw, uniform, 0.0
    sigma = {
        "cap": min(params.eta, (1 - b) / a),
        "rescale": params.eta * min(params.eta, (1 - b) / a),
        "rescale-remdm": params.eta * min(1, (1 - b) / a),
        "loop": params.eta if a == b else 0.0,
        "constant": params.eta * (1 - b),
    }[params.rule]
    kappa = min(1.0, max(0.0, 1 - sigma / (1 - b)))
    return kappa * draw + (1 - kappa) * b, kappa * uniform, (1 - kappa) * (1 - b)


def ddim(params: Params, a: float, b: float) -> Triple:
    stay = params.stay * (1 - b) / (1 - a)
    return b - stay * a, 0.0, 1 - b - stay * (1 - a)


def times_of(params: Params) -> list[float]:
    if getattr(params, "rule", None) != "loop" or params.nfe == 2:
        return plain.grid(params.nfe, params.warmup, params.grid)
    steps, there = params.nfe - 1, 0.1 / 0.999
    last = max(1, round(0.05 * steps))
    first = min(steps - last, max(1, round(0.45 * steps)))
    down = [1 + (there - 1) * k / first for k in range(first)]
    end = [there + (plain.EPS - there) * k / last for k in range(last + 1)]
    return down + [there] * (steps - first - last) + end


class TwoCoins:
    """A sample by two coins, call by call; with a budget, tokens are committed as in Algorithm 1 (the argmax, written
    into the model input only)."""

    def __init__(
        self, model: Any, params: Params, uniforms: Uniforms, fixed: dict[int, int], weights: Weights = ancestral
    ) -> None:
        self.model, self.params, self.uniforms, self.weights = model, params, uniforms, weights
        self.free = [i for i in range(model.length) if i not in fixed]
        self.times, self.size, self.last = times_of(params), model.vocab_size, params.nfe - 1
        self.warmup_calls = round(params.warmup * self.last)
        self.values: dict[int, int] = {}
        self.committed_at: dict[int, int] = {}
        self.state = [fixed.get(i, int(uniforms(0, i, START)[0] * self.size)) for i in range(model.length)]

    def visible(self, r: int) -> list[int]:
        horizon = getattr(self.params, "horizon", None) or math.inf
        return [i for i, e in self.committed_at.items() if 1 <= r - e <= horizon]

    def distributions(self, r: int) -> list[list[float]]:
        """The predictions before the predictor's call r."""
        model_input = [self.values[i] if i in self.visible(r) else z for i, z in enumerate(self.state)]
        return probs_of(self.model, model_input, self.times[r], self.params.temperature)

    def move(self, i: int, probs: list[float], r: int, a: float, b: float) -> int:
        (first, second), (for_draw, for_any) = (self.uniforms(r, i, purpose) for purpose in (COINS, TOKENS))
        z = self.state[i]
        draw, uniform, noise = self.weights(self.params, a, b)
        anything = int(for_any * self.size)
        if first >= draw + uniform:
            return anything if first < draw + uniform + noise else z
        if second >= (1 - a) / (1 - a + a * self.size * probs[z]):
            return z
        return inverse(probs, for_draw) if first < draw else anything

    def step(self, r: int) -> None:
        distributions, after = self.distributions(r), list(self.state)
        for i in self.free:
            if span := plain.stepping(self.times, self.params.interleave, r, i):
                probs = cut(distributions[i], self.params, r >= self.warmup_calls)
                after[i] = self.move(i, probs, r, *map(signal, span))
            if r == self.last and self.params.final_step == "argmax":
                after[i] = ranked(distributions[i])[0]
        if hasattr(self.params, "budget") and self.warmup_calls <= r < self.last:
            steps = self.last - self.warmup_calls
            deficit = {i: 1 - max(distributions[i]) for i in self.free if i not in self.committed_at}
            count = -(-len(self.free) // steps) if self.params.count is None else self.params.count
            for i in plain.scan(deficit, count, self.params.budget * len(self.free) / steps, self.params.spacing):
                self.values[i], self.committed_at[i] = ranked(distributions[i])[0], r
        self.state = after


def by_two_coins(weights: Weights) -> Callable[..., list[int]]:
    """The transcription of a method that is a set of weights."""

    def run(model: Any, params: Params, uniforms: Uniforms, fixed: dict[int, int]) -> list[int]:
        sample = TwoCoins(model, params, uniforms, fixed, weights)
        for r in range(params.nfe):
            sample.step(r)
        return sample.state

    return run


def committed(model: Any, params: Params, uniforms: Uniforms, fixed: dict[int, int]) -> list[int]:
    """CRS and Mend: Algorithm 1, with what the parameters change of it."""
    return plain.run(model, vars(params), uniforms.seed, uniforms.sample, fixed).tokens


PREDICTORS: dict[str, tuple[dict[str, Any], Weights]] = {
    "native": ({}, ancestral),
    "crs": (CRS, ancestral),
    "psi": ({"rule": "rescale", "eta": 0.05, "start": 0.0, "stop": 1.0}, psi),
    "ddim": ({"stay": 1.0}, ddim),
}


def gibbs(model: Any, params: Params, uniforms: Uniforms, fixed: dict[int, int]) -> list[int]:
    """The predictor's calls and the corrections in one list; then one after the other."""
    c, nfe = params.corrections, params.nfe
    corrected = (nfe - 1) // (1 + c) if c else 0
    steps = nfe - 1 - c * corrected
    name, *settings = params.predictor.replace(",", " ").split()
    extra, weights = PREDICTORS[name]
    own = {**NATIVE, **extra, "nfe": steps + 1}
    for setting in settings:
        param, _, text = setting.partition("=")
        own[param] = text if isinstance(own[param], str) else int(text) if text.isdecimal() else float(text)
    sample = TwoCoins(model, SimpleNamespace(**own), uniforms, fixed, weights)

    number = steps + 1  # determines the uniforms of the next correction; the predictor's calls come first
    for r in range(steps):
        sample.step(r)
        if r < steps - corrected:
            continue
        for _ in range(c):
            b, distributions, z = signal(sample.times[r + 1]), sample.distributions(r + 1), list(sample.state)
            score = {}
            for i in sample.free:
                if i in sample.visible(r + 1):
                    continue
                score[i] = -math.log(-math.log(uniforms(number, i, POSITIONS)[0]))
                if params.choose == "margin":
                    p = [b * h + (1 - b) / sample.size for h in distributions[i]]
                    margin = math.log(p[z[i]]) - max(math.log(q) for y, q in enumerate(p) if y != z[i])
                    score[i] -= margin / params.tau
            for i in sorted(score, key=lambda i: (-score[i], i))[: params.positions]:
                probs = cut(distributions[i], sample.params, r + 1 >= sample.warmup_calls)
                for_draw, for_any = uniforms(number, i, TOKENS)
                fresh = uniforms(number, i, COINS)[0] < b
                sample.state[i] = inverse(probs, for_draw) if fresh else int(for_any * sample.size)
            number += 1
    sample.step(steps)
    return sample.state


# Samplers that read complete distributions, call by call


class One:
    """One sample of a sampler without coins: its model, its uniforms, its fixed tokens."""

    def __init__(self, model: Any, uniforms: Uniforms, fixed: dict[int, int]) -> None:
        self.model, self.pair, self.fixed = model, uniforms, fixed
        self.size, self.length = model.vocab_size, model.length
        self.free = [i for i in range(self.length) if i not in fixed]
        self.stopped_at: int | None = None  # the call that ended it, if one did

    def start(self) -> list[int]:
        return [self.fixed.get(i, int(self.pair(0, i, START)[0] * self.size)) for i in range(self.length)]

    def distributions(self, tokens: list[int], t: float, temperature: float = 1.0) -> list[list[float]]:
        return probs_of(self.model, tokens, t, temperature)

    def drawn(self, distributions: list[list[float]], call: int) -> dict[int, int]:
        return {i: inverse(distributions[i], self.pair(call, i, TOKENS)[0]) for i in self.free}

    def anything(self, call: int, i: int) -> int:
        return int(self.pair(call, i, TOKENS)[1] * self.size)

    def time(self, clean: list[int]) -> float:
        """The time whose signal is the share of clean tokens."""
        return min(1.0, max(plain.EPS, (1 - len(clean) / len(self.free)) / 0.999))


def largest(score: dict[int, float], count: int) -> list[int]:
    return sorted(score, key=lambda i: (-score[i], i))[: max(0, count)]


def entropy_bound(one: One, params: Any) -> list[int]:
    state, accepted, history = one.start(), [], []
    for r in range(params.nfe):
        t = one.time(accepted) if params.clock == "share" else plain.grid(params.nfe, 0, "uniform")[r]
        heat = params.last_temperature + (params.first_temperature - params.last_temperature) * (1 - r / params.nfe)
        distributions = one.distributions(state, t, heat)
        entropy = {i: -sum(p * math.log(p) for p in distributions[i] if p) for i in one.free}
        drawn, accepted, spent = one.drawn(distributions, r), [], 0.0
        for i in sorted(one.free, key=lambda i: (entropy[i], i)):
            if spent <= params.bound:
                accepted.append(i)
            spent += entropy[i]
        top = {i: ranked(distributions[i])[0] for i in one.free}
        stable = len(history) >= params.patience and all(old == top for old in history[-params.patience :])
        history.append(top)
        calm = params.settled is not None and sum(entropy.values()) / len(one.free) < params.settled
        if r == params.nfe - 1 or (stable and calm):
            one.stopped_at = r
            return [top.get(i, state[i]) for i in range(one.length)]
        for i in one.free:
            state[i] = drawn[i] if i in accepted else one.anything(r, i)
    raise AssertionError


def gidd_adaptive(one: One, params: Any) -> list[int]:
    state, setting = one.start(), params.nfe - (params.final_step == "argmax")
    count = -(-len(one.free) // setting) if params.count is None else params.count
    for r, t in enumerate(plain.grid(params.nfe, 0, "uniform")):
        distributions = one.distributions(state, t)
        if r == setting:
            return [ranked(probs)[0] if i in one.free else state[i] for i, probs in enumerate(distributions)]
        prior = 1 / one.size  # of the current token, whichever it is
        score = {i: (max(distributions[i]) - distributions[i][state[i]]) * prior for i in one.free}
        for i in largest(score, count):
            state[i] = ranked(distributions[i])[0]
    return state


def gidd_correction(one: One, params: Any) -> list[int]:
    corrections = min(params.nfe // 2, params.nfe - 2) if params.corrections is None else params.corrections
    drawing = vars(params) | {"nfe": params.nfe - corrections}
    state = plain.run(one.model, drawing, one.pair.seed, one.pair.sample, one.fixed).tokens
    best, idle = 0.0, 0
    for r in range(params.nfe - corrections, params.nfe):
        distributions = one.distributions(state, params.correction_time, params.sharpness)
        drawn, following = one.drawn(distributions, r), list(state)
        score = {i: distributions[i][drawn[i]] if drawn[i] != state[i] else 0.0 for i in one.free}
        for i in largest(score, params.changes):
            following[i] = drawn[i]
        agreement = sum(following[i] == ranked(distributions[i])[0] for i in one.free) / len(one.free)
        best, idle = (agreement, 0) if agreement > best else (best, idle + 1)
        if (params.patience is not None and idle > params.patience) or following == state:
            one.stopped_at = r
            break
        state = following
    return state


def block_refinement(one: One, params: Any) -> list[int]:
    state, committed = one.start(), []
    for r in range(params.nfe):
        t = one.time(committed) if params.clock == "share" else plain.grid(params.nfe, 0, "uniform")[r]
        distributions = one.distributions(state, t, params.temperature or 1.0)
        drawn = (
            one.drawn(distributions, r) if params.temperature else {i: ranked(distributions[i])[0] for i in one.free}
        )
        confidence = {i: distributions[i][drawn[i]] for i in one.free}
        owed = math.ceil((r + 1) * len(one.free) / params.nfe) - len(committed)
        waiting = {i: confidence[i] for i in one.free if i not in committed}
        new = set(largest(waiting, owed)) | {i for i in waiting if confidence[i] > params.threshold}
        edited = [i for i in committed if params.editing is not None and confidence[i] > params.editing]
        for i in [*new, *edited]:
            state[i] = drawn[i]
        committed += sorted(new)
        for i in one.free:
            if i not in committed:
                state[i] = one.anything(r, i)
    return state


def guided(one: One, params: Any) -> list[int]:
    nodes = (params.nfe + 1) // 2
    state, times = one.start(), plain.grid(nodes, params.warmup, params.grid)
    for k, t in enumerate(times):
        probs = distributions = one.distributions(state, t)
        if 2 * k < params.nfe - 1:  # the final step of an odd number of calls has one call
            noised = list(state)
            for i in one.fixed:
                keep, other = one.pair(2 * k, i, NOISE)
                if keep >= (signal(t) if params.without == "level" else 0.0):
                    noised[i] = int(other * one.size)
            other = one.distributions(noised, t)
            probs = []
            for p, q in zip(distributions, other, strict=True):
                powers = [x ** (1 + params.weight) / y**params.weight for x, y in zip(p, q, strict=True)]
                probs.append([x / sum(powers) for x in powers])
        if k == nodes - 1 and params.final_step == "argmax":
            return [ranked(probs[i])[0] if i in one.free else state[i] for i in range(one.length)]
        for i in one.free:
            if span := plain.stepping(times, params.interleave, k, i):
                coins, tokens = one.pair(k, i, COINS), one.pair(k, i, TOKENS)
                state[i] = plain.move(probs[i], state[i], *map(signal, span), coins, tokens)
    return state


def reverse_rates(probs: Any, z: int, t: float) -> list:
    """Of jumps from z, for each token: the reverse process of the log-linear schedule. Numbers, or arrays of them."""
    size, kept = len(probs), signal(t)
    noisy = [kept * p + (1 - kept) / size for p in probs]
    return [0 * p if y == z else 0.999 / (kept * size) * p / noisy[z] for y, p in enumerate(noisy)]


def extrapolated(first: Any, second: Any, z: int, theta: float) -> list:
    """The rates of the second leap, from the token that the first one came to."""
    both = (1 - theta) ** 2 + theta**2
    rates = [(later - both * early) / (2 * theta * (1 - theta)) for early, later in zip(first, second, strict=True)]
    return [0 * rate if y == z else np.maximum(rate, 0) for y, rate in enumerate(rates)]


def trapezoidal(one: One, params: Any) -> list[int]:
    plainly = params.nfe % 2 == 0
    nodes = plain.grid((params.nfe - 1 - plainly) // 2 + plainly + 1, params.warmup, params.grid)
    state, r = one.start(), 0

    def leap(rates: dict[int, list], span: float) -> None:
        for i in one.free:
            if one.pair(r, i, COINS)[0] < 1 - math.exp(-sum(rates[i]) * span):
                state[i] = inverse(rates[i], one.pair(r, i, TOKENS)[0])

    def advance(t: float, signal_s: float) -> None:
        distributions = one.distributions(state, t)
        for i in one.free:
            coins, tokens = one.pair(r, i, COINS), one.pair(r, i, TOKENS)
            state[i] = plain.move(distributions[i], state[i], signal(t), signal_s, coins, tokens)

    for k, (t, s) in enumerate(pairwise(nodes)):
        if plainly and k == 0:
            advance(t, signal(s))
            r += 1
            continue
        inside, distributions = t - params.theta * (t - s), one.distributions(state, t)
        first = {i: reverse_rates(distributions[i], state[i], t) for i in one.free}
        leap(first, t - inside)
        r, distributions = r + 1, one.distributions(state, inside)
        second = {i: reverse_rates(distributions[i], state[i], inside) for i in one.free}
        leap({i: extrapolated(first[i], second[i], state[i], params.theta) for i in one.free}, inside - s)
        r += 1
    if params.final_step == "argmax":
        return [
            ranked(probs)[0] if i in one.free else state[i]
            for i, probs in enumerate(one.distributions(state, nodes[-1]))
        ]
    advance(nodes[-1], 1.0)
    return state


def jumped(one: One, state: list[int], i: int, rates: list, span: float, rule: str, r: int) -> int:
    """The token after one leap of one position, from the Poisson distribution of its number of jumps."""
    expected = sum(rates) * span
    none, once = math.exp(-expected), expected * math.exp(-expected)
    change = {"tau-leaping": once, "first-jump": 1 - none, "euler": min(1.0, expected)}[rule]
    return inverse(rates, one.pair(r, i, TOKENS)[0]) if one.pair(r, i, COINS)[0] < change else state[i]


def finish(one: One, params: Any, state: list[int], t: float, r: int, moves: Callable[[int], Any]) -> list[int]:
    """The final step of the native sampler, at the positions that move from a signal of their own."""
    distributions = one.distributions(state, t)
    for i in one.free:
        if params.final_step == "argmax":
            state[i] = ranked(distributions[i])[0]
        elif span := moves(i):
            coins, tokens = one.pair(r, i, COINS), one.pair(r, i, TOKENS)
            state[i] = plain.move(cut(distributions[i], params, True), state[i], *map(signal, span), coins, tokens)
    return state


def tau_leaping(one: One, params: Any) -> list[int]:
    state, times, last = one.start(), plain.grid(params.nfe, params.warmup, params.grid), params.nfe - 1
    for r in range(last):
        distributions = one.distributions(state, times[r])
        for i in one.free:
            if span := plain.stepping(times, params.interleave, r, i):
                rates = reverse_rates(
                    cut(distributions[i], params, r >= round(params.warmup * last)), state[i], span[0]
                )
                state[i] = jumped(one, state, i, rates, span[0] - span[1], params.rule, r)
    return finish(one, params, state, times[last], last, lambda i: plain.stepping(times, params.interleave, last, i))


def forward_backward(one: One, params: Any) -> list[int]:
    """Each corrected node has its corrections, and then its step; the first and the last node have none."""
    c, state, r = params.corrections, one.start(), 0
    corrected = (params.nfe - 2) // (1 + c) if c else 0
    times = plain.grid(params.nfe - c * corrected, params.warmup, params.grid)

    def leap(t: float, span: float, forward: bool) -> None:
        distributions, before = one.distributions(state, t), list(state)
        for i in one.free:
            rates = reverse_rates(distributions[i], before[i], t)
            if forward:
                rates = [
                    0.0 if y == before[i] else rate + 0.999 / (signal(t) * one.size) for y, rate in enumerate(rates)
                ]
            state[i] = jumped(one, before, i, rates, span, params.rule, r)

    for k, (t, s) in enumerate(pairwise(times)):
        for _ in range(c if k >= len(times) - 1 - corrected else 0):
            leap(t, params.span * (t - s), True)
            r += 1
        leap(t, t - s, False)
        r += 1
    return finish(one, params, state, times[-1], r, lambda i: (times[-1], 0.0))


def rdm(one: One, params: Any) -> list[int]:
    state, calls, n = one.start(), params.nfe, len(one.free)
    times = plain.grid(calls + 1, 0, params.grid)
    score: dict[int, float] = {}  # of the denoised tokens; the other positions are noise
    for r in range(calls):
        t = one.time(list(score)) if params.clock == "share" else times[r]
        at_one = one.distributions(state, t)
        heated = one.distributions(state, t, params.temperature) if params.temperature else at_one
        drawn = one.drawn(heated, r) if params.temperature else {i: ranked(at_one[i])[0] for i in one.free}
        new = {i: math.log(at_one[i][drawn[i]]) for i in one.free}
        if params.schedule == "linear":
            rate, k = (calls - r - 1) / calls, n * (calls - r - 1) // calls
        else:
            rate = math.cos((r + 1) / calls * math.pi / 2)
            k = math.floor(round(n * rate, 9))
        gumbel = {i: -math.log(-math.log(one.pair(r, i, POSITIONS)[0])) for i in one.free}
        lowest = largest({i: -(new[i] + params.noise * rate * gumbel[i]) for i in one.free}, k)

        def returns(i: int) -> bool:
            falls = drawn[i] == state[i] and new[i] < score[i]  # noqa: B023
            return i in lowest and (params.returns == "uncond" or falls)  # noqa: B023

        noise = [i for i in one.free if (returns(i) if i in score else i in lowest)]
        kept = {i: old for i, old in score.items() if i not in noise}
        found = [i for i in one.free if i not in score and i not in lowest]
        score = kept | {i: new[i] for i in found}
        after = one.time(list(score)) if params.clock == "share" else times[r + 1]
        for i in noise:
            if one.pair(r, i, COINS)[0] >= signal(t) / signal(after):
                state[i] = one.anything(r, i)
        for i in found:
            state[i] = drawn[i]
    assert len(score) == n
    return state


def confidence_threshold(one: One, params: Any) -> list[int]:
    state, frozen = one.start(), []
    for r in range(params.nfe):
        t = one.time(frozen) if params.clock == "share" else plain.grid(params.nfe, 0, "uniform")[r]
        heat = params.last_temperature + (params.first_temperature - params.last_temperature) * (1 - r / params.nfe)
        distributions = one.distributions(state, t, heat)
        top = {i: ranked(distributions[i])[0] for i in one.free}
        waiting = [i for i in one.free if i not in frozen]
        if not waiting:
            one.stopped_at = r
            return [top.get(i, state[i]) for i in range(one.length)]
        token = one.drawn(distributions, r) if params.draw else top
        confidence = {i: distributions[i][token[i]] for i in waiting}
        new = [i for i in waiting if confidence[i] >= params.threshold] or largest(confidence, 1)
        if r == params.nfe - 1 - params.repair:
            new = waiting
        for i in waiting:
            state[i] = token[i] if i in new else one.anything(r, i)
        frozen += new
        if len(frozen) == len(one.free) and not params.repair:
            one.stopped_at = r
            return state
    raise AssertionError


def by_rule(rule: Callable[[One, Any], list[int]]) -> Callable[..., list[int]]:
    """The transcription of a method that is a rule for one sample."""

    def run(model: Any, params: Params, uniforms: Uniforms, fixed: dict[int, int]) -> list[int]:
        return rule(One(model, uniforms, fixed), params)

    return run
