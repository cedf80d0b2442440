"""Algorithm 1 for one sample in plain Python: lists and loops, nothing shared with the package but the model.

It knows every parameter of the native sampler and of CRS, as a dict, and uses the same uniforms for the same ends, so its
tokens are the sampler's tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

import literal

START, COINS, TOKENS, VALUES = 0, 1, 2, 3  # purposes
EPS = 1e-5
NO_LABELS = {  # what the native sampler would say of labels
    "horizon": None, "budget": 0.0, "spacing": 0, "count": 0, "values": "argmax", "value_top_p": 1.0, "write": "input",
    "mend": 0, "apart": 0, "turns": 1,
}  # fmt: skip


def stepping(times: list[float], interleave: bool, r: int, i: int) -> tuple[float, float] | None:
    """The times that a position steps from and to in a call, None where it is not its turn; after the last time comes
    clean text, at 0."""
    nodes = [*times, 0.0]
    if not interleave:
        return nodes[r], nodes[r + 1]
    if i % 2 != r % 2:
        return None
    return nodes[r - 1 if r else 0], nodes[r + 1]


@dataclass
class Path:
    """What a sample did, call by call."""

    tokens: list[int] = field(default_factory=list)  # the output
    states: list[list[int]] = field(default_factory=list)  # before each call
    inputs: list[list[int]] = field(default_factory=list)  # of each call
    distributions: list[list[list[float]]] = field(default_factory=list)  # of each call
    labels: dict[int, int] = field(default_factory=dict)
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
    probs = model.body(torch.tensor([tokens]), t)[0].double().softmax(-1).tolist()
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
    """The first token whose cumulated weight passes u of the total."""
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
    """What a new label holds."""
    best, second = ranked(probs)[:2]
    if params.values == "second":
        return second
    if params.values == "nucleus":
        kept = literal.nucleus(probs, params.value_top_p, params.boundary)
        others = [p if keep and x != best else 0.0 for x, (p, keep) in enumerate(zip(probs, kept, strict=True))]
        return inverse(others, u) if any(others) else second
    return best


def refreshes(values: str, position: int, call: int) -> bool:
    """Whether a visible label takes the argmax of this call."""
    due = {"refreshed": True, "refreshed-half": call % 2 == 0, "refreshed-in-turn": (position + call) % 2 == 0}
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


def mended(
    params: Any, labels: dict[int, int], distributions: list[list[float]], visible: list[int], call: int
) -> list[int]:
    """The visible labels whose turn it is and that another token beats by most, far enough apart."""
    gain = {}
    for i in visible:
        rival = max(probs for token, probs in enumerate(distributions[i]) if token != labels[i])
        if (i + call) % params.turns == 0 and rival > distributions[i][labels[i]]:
            gain[i] = math.log(rival / distributions[i][labels[i]]) if distributions[i][labels[i]] else math.inf
    return scan({i: -more for i, more in gain.items()}, params.mend, math.inf, params.apart)


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
) -> Path:
    params, fixed = SimpleNamespace(**NO_LABELS | sampler), fixed or {}
    length, size, last = model.length, model.vocab_size, params.nfe - 1
    warmup = round(params.warmup * last)
    after = last - warmup
    free = [i for i in range(length) if i not in fixed]
    params.mend = -(-len(free) // 32) if params.mend is None else params.mend
    params.turns = -(-params.nfe // 32) if params.turns is None else params.turns
    count = params.count if params.count is not None else -(-len(free) // max(1, after))
    times = grid(params.nfe, params.warmup, params.grid)
    path = Path()

    def pair(step: int, position: int, purpose: int) -> tuple[float, float]:
        return literal.uniforms(seed, sample, step, position, purpose)

    def visible(r: int) -> list[int]:
        if params.write == "output":
            return []
        ages = {i: r - e for i, e in path.committed_at.items()}
        return [i for i, age in ages.items() if age >= 1 and (params.horizon is None or age <= params.horizon)]

    def look(r: int) -> list[list[float]]:
        shown = [path.labels[i] if i in visible(r) else state[i] for i in range(length)]
        path.states.append(list(state))
        path.inputs.append(shown)
        path.distributions.append(probs_of(model, shown, times[r], params.temperature))
        return path.distributions[-1]

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
        distributions = look(r)
        for i in visible(r):
            if refreshes(params.values, i, r):
                path.labels[i] = ranked(distributions[i])[0]
        for i in mended(params, path.labels, distributions, visible(r), r):
            path.labels[i] = ranked(distributions[i])[0]
        eligible = [i for i in free if i not in path.committed_at]
        chosen: list[int] = []
        if replay is not None:
            chosen = [i for i in eligible if replay.get(i) == r]
        elif r >= warmup:
            deficit = {i: 1 - max(distributions[i]) for i in eligible}
            chosen = scan(deficit, count, params.budget * len(free) / after, params.spacing)
        for i in chosen:
            path.committed_at[i] = r
            path.labels[i] = (
                recorded[i] if params.values == "recorded" else value(params, distributions[i], pair(r, i, VALUES)[0])
            )
        state = advance(distributions, r)

    distributions = look(last)
    for i in mended(params, path.labels, distributions, visible(last), last):
        path.labels[i] = ranked(distributions[i])[0]
    path.tokens = (
        [ranked(probs)[0] for probs in distributions] if params.final_step == "argmax" else advance(distributions, last)
    )
    for i, token in fixed.items():
        path.tokens[i] = token
    if params.write != "input" or params.final_step == "keep":
        for i, label in path.labels.items():
            path.tokens[i] = label
    return path
