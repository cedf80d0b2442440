"""Algorithm 1 for one sample in plain Python: lists and loops, nothing shared with the package but the model.

It reads every parameter of the native sampler, CRS and Mend from a dict. It uses the same uniforms for the same
purposes, so its tokens are the sampler's tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

import literal
from limpet.models import ModelInput

START, COINS, TOKENS, VALUES = 0, 1, 2, 3  # purposes
EPS = 1e-5
NOTHING_COMMITTED = {  # the parameters of CRS and Mend for the native sampler
    "horizon": None,
    "budget": 0.0,
    "spacing": 0,
    "count": 0,
    "values": "argmax",
    "value_top_p": 1.0,
    "write": "input",
    "revise": 0,
    "revise_spacing": 0,
    "revise_every": 1,
    "own_turn": False,
}


def stepping(times: list[float], interleave: bool, r: int, i: int) -> tuple[float, float] | None:
    """The times that a position steps from and to in a call; None if it does not move. Clean text is at time 0."""
    nodes = [*times, 0.0]
    if not interleave:
        return nodes[r], nodes[r + 1]
    if i % 2 != r % 2:
        return None
    return nodes[r - 1 if r else 0], nodes[r + 1]


@dataclass
class Trajectory:
    """One sample, call by call."""

    tokens: list[int] = field(default_factory=list)  # the output
    states: list[list[int]] = field(default_factory=list)  # before each call
    inputs: list[list[int]] = field(default_factory=list)  # of each call
    distributions: list[list[list[float]]] = field(default_factory=list)  # of each call
    values: dict[int, int] = field(default_factory=dict)  # the committed tokens
    committed_at: dict[int, int] = field(default_factory=dict)


def grid(nfe: int, warmup: float, kind: str) -> list[float]:
    first = round(warmup * (nfe - 1))
    if kind == "quadratic":
        return [(1 + (math.sqrt(EPS) - 1) * k / (nfe - 1)) ** 2 for k in range(nfe)]
    if kind == "uniform" or first in (0, nfe - 1):
        return [1 + (EPS - 1) * k / (nfe - 1) for k in range(nfe)]
    split = 1 - warmup * (1 - EPS)
    rest = nfe - 1 - first
    early = [1 + (split - 1) * k / first for k in range(first)]
    return early + [split + (EPS - split) * k / rest for k in range(rest + 1)]


def probs_of(model: Any, tokens: list[int], t: float, temperature: float = 1.0) -> list[list[float]]:
    """The leave-one-out distribution at every position, at a temperature."""
    features = model.backbone(ModelInput(torch.tensor([tokens]), t))
    probs = model.head(features)[0].double().softmax(-1).tolist()
    if model.predicts == "posterior":
        noise = 0.999 * t
        for i, z in enumerate(tokens):
            divided = [p / literal.forward(z, x, noise, len(probs[i])) for x, p in enumerate(probs[i])]
            probs[i] = [p / sum(divided) for p in divided]
    return probs if temperature == 1 else [tempered(one, temperature) for one in probs]


def tempered(probs: list[float], temperature: float) -> list[float]:
    """The distribution to the power 1 / temperature, normalised."""
    largest = max(probs)
    powers = [math.exp(math.log(p / largest) / temperature) if p else 0.0 for p in probs]
    return [p / sum(powers) for p in powers]


def inverse(weights: list[float], u: float) -> int:
    """The first token whose cumulative weight exceeds u times the total."""
    cumulated, total = [], 0.0
    for weight in weights:
        total += weight
        cumulated.append(total)
    return next(x for x, c in enumerate(cumulated) if c > u * total)


def move(probs: list[float], z: int, signal_t: float, signal_s: float, coins: tuple, tokens: tuple) -> int:
    """One reverse step of one position, by two coins."""
    size = len(probs)
    draw = (signal_s - signal_t) / (1 - signal_t)
    uniform = (1 - signal_t / signal_s) * (1 - signal_s) / (1 - signal_t)
    if coins[0] >= draw + uniform:
        return z
    if coins[1] >= (1 - signal_t) / (1 - signal_t + signal_t * size * probs[z]):
        return z
    return inverse(probs, tokens[0]) if coins[0] < draw else int(tokens[1] * size)


def ranked(probs: list[float]) -> list[int]:
    return sorted(range(len(probs)), key=lambda a: (-probs[a], a))


def value(params: Any, probs: list[float], u: float) -> int:
    """The token that is committed."""
    best, second = ranked(probs)[:2]
    if params.values == "second":
        return second
    if params.values == "nucleus":
        kept = literal.nucleus(probs, params.value_top_p, params.boundary)
        others = [p if keep and x != best else 0.0 for x, (p, keep) in enumerate(zip(probs, kept, strict=True))]
        return inverse(others, u) if any(others) else second
    return best


def refreshes(values: str, position: int, call: int) -> bool:
    """Whether a visible committed token becomes the argmax of this call."""
    due = {"refreshed": True, "refreshed-half": call % 2 == 0, "refreshed-interleaved": (position + call) % 2 == 0}
    return due.get(values, False)


def scan(deficit: dict[int, float], count: int, budget: float, spacing: int) -> list[int]:
    """The greedy scan of appendix A over the eligible positions."""
    chosen: list[int] = []
    spent = 0.0
    for i in sorted(deficit, key=lambda i: (deficit[i], i)):
        fits = len(chosen) < count and spent + deficit[i] <= budget
        if fits and all(abs(i - j) > spacing for j in chosen):
            chosen.append(i)
            spent += deficit[i]
    return chosen


def revised(
    params: Any, values: dict[int, int], distributions: list[list[float]], visible: list[int], call: int
) -> list[int]:
    """The visible committed tokens that this call inspects and that another token beats by most, far enough apart."""
    gain = {}
    for i in visible:
        rival = max(prob for token, prob in enumerate(distributions[i]) if token != values[i])
        own = distributions[i][values[i]]
        if (i + call) % params.revise_every == 0 and rival > own:
            gain[i] = math.log(rival / own) if own else math.inf
    if params.own_turn and params.interleave and gain:
        worst = max(gain, key=lambda i: (gain[i], -i))
        gain = {i: more for i, more in gain.items() if (i - worst) % 2 == 0}
    return scan({i: -more for i, more in gain.items()}, params.revise, math.inf, params.revise_spacing)


def keeps(params: Any, probs: list[float], p: float) -> list[bool]:
    """The tokens that top-p, top-k and min-p all keep."""
    kept = [True] * len(probs) if p >= 1 else literal.nucleus(probs, p, params.boundary)
    first = ranked(probs)[: params.top_k or len(probs)]
    return [k and x in first and probs[x] >= params.min_p * max(probs) for x, k in enumerate(kept)]


def run(
    model: Any,
    sampler: Mapping[str, Any],
    seed: int,
    sample: int,
    fixed: dict[int, int] | None = None,
    replay: dict[int, int] | None = None,
    recorded: dict[int, int] | None = None,
) -> Trajectory:
    params, fixed = SimpleNamespace(**NOTHING_COMMITTED | sampler), fixed or {}
    length, size, last = model.length, model.vocab_size, params.nfe - 1
    warmup = round(params.warmup * last)
    after = last - warmup
    free = [i for i in range(length) if i not in fixed]
    params.revise = -(-len(free) // 32) if params.revise is None else params.revise
    params.revise_every = -(-params.nfe // 32) if params.revise_every is None else params.revise_every
    count = params.count if params.count is not None else -(-len(free) // max(1, after))
    times = grid(params.nfe, params.warmup, params.grid)
    found = Trajectory()

    def pair(step: int, position: int, purpose: int) -> tuple[float, float]:
        return literal.uniforms(seed, sample, step, position, purpose)

    def visible(r: int) -> list[int]:
        if params.write == "output":
            return []
        ages = {i: r - e for i, e in found.committed_at.items()}
        return [i for i, age in ages.items() if age >= 1 and (params.horizon is None or age <= params.horizon)]

    def predict(r: int) -> list[list[float]]:
        model_input = [found.values[i] if i in visible(r) else state[i] for i in range(length)]
        found.states.append(list(state))
        found.inputs.append(model_input)
        found.distributions.append(probs_of(model, model_input, times[r], params.temperature))
        return found.distributions[-1]

    def advance(distributions: list[list[float]], r: int) -> list[int]:
        late = params.top_p if params.late_top_p is None else params.late_top_p
        p = params.top_p if r < warmup else late
        moved = list(state)
        for i in free:
            if (span := stepping(times, params.interleave, r, i)) is None:
                continue
            kept = keeps(params, distributions[i], p)
            probs = distributions[i] if all(kept) else literal.restricted(distributions[i], kept)
            coins, tokens = pair(r, i, COINS), pair(r, i, TOKENS)
            moved[i] = move(probs, state[i], *(1 - 0.999 * t for t in span), coins, tokens)
        return moved

    state = [fixed[i] if i in fixed else int(pair(0, i, START)[0] * size) for i in range(length)]
    for r in range(last):
        distributions = predict(r)
        for i in visible(r):
            if refreshes(params.values, i, r):
                found.values[i] = ranked(distributions[i])[0]
        for i in revised(params, found.values, distributions, visible(r), r):
            found.values[i] = ranked(distributions[i])[0]
        eligible = [i for i in free if i not in found.committed_at]
        chosen: list[int] = []
        if replay is not None:
            chosen = [i for i in eligible if replay.get(i) == r]
        elif r >= warmup:
            deficit = {i: 1 - max(distributions[i]) for i in eligible}
            if params.own_turn and params.interleave:
                deficit = {i: one for i, one in deficit.items() if (i - r) % 2 == 0}
            chosen = scan(deficit, count, params.budget * len(free) / after, params.spacing)
        for i in chosen:
            found.committed_at[i] = r
            found.values[i] = (
                recorded[i] if params.values == "recorded" else value(params, distributions[i], pair(r, i, VALUES)[0])
            )
        state = advance(distributions, r)

    distributions = predict(last)
    for i in revised(params, found.values, distributions, visible(last), last):
        found.values[i] = ranked(distributions[i])[0]
    found.tokens = (
        [ranked(probs)[0] for probs in distributions] if params.final_step == "argmax" else advance(distributions, last)
    )
    for i, token in fixed.items():
        found.tokens[i] = token
    if params.write != "input" or params.final_step == "keep":
        for i, token in found.values.items():
            found.tokens[i] = token
    return found
