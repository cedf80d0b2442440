"""Algorithm 1 for one sample in plain Python: lists and loops, nothing shared with the package but the model.

It knows every knob of the native sampler and of CRS, as a dict, and uses the same uniforms for the same ends, so its
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


def stepping(times: list[float], weave: bool, r: int, i: int) -> tuple[float, float] | None:
    """The times that a position steps from and to in a call, None where it is not its turn; after the last time comes
    clean text, at 0."""
    nodes = [*times, 0.0]
    if not weave:
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
    laws: list[list[list[float]]] = field(default_factory=list)  # of each call
    labels: dict[int, int] = field(default_factory=dict)
    selected_at: dict[int, int] = field(default_factory=dict)


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


def law_of(model: Any, tokens: list[int], t: float, temperature: float = 1.0) -> list[list[float]]:
    """The leave-one-out law at every position, at a temperature."""
    law = model.body(torch.tensor([tokens]), t)[0].double().softmax(-1).tolist()
    if model.predicts == "posterior":
        noise = 0.999 * t
        for i, z in enumerate(tokens):
            divided = [p / literal.forward(z, x, noise, len(law[i])) for x, p in enumerate(law[i])]
            law[i] = [p / sum(divided) for p in divided]
    return law if temperature == 1 else [tempered(one, temperature) for one in law]


def tempered(law: list[float], temperature: float) -> list[float]:
    """The law to the power 1 / temperature, normalised."""
    largest = max(law)
    powers = [math.exp(math.log(p / largest) / temperature) if p else 0.0 for p in law]
    return [p / sum(powers) for p in powers]


def inverse(weights: list[float], u: float) -> int:
    """The first token whose cumulated weight passes u of the total."""
    cumulated, total = [], 0.0
    for weight in weights:
        total += weight
        cumulated.append(total)
    return next(x for x, c in enumerate(cumulated) if c > u * total)


def move(law: list[float], z: int, signal_t: float, signal_s: float, coins: tuple, tokens: tuple) -> int:
    """One reverse step of one position, by two coins."""
    size = len(law)
    draw = (signal_s - signal_t) / (1 - signal_t)
    uniform = (1 - signal_t / signal_s) * (1 - signal_s) / (1 - signal_t)
    if coins[0] >= draw + uniform:
        return z
    if coins[1] >= (1 - signal_t) / (1 - signal_t + signal_t * size * law[z]):
        return z
    return inverse(law, tokens[0]) if coins[0] < draw else int(tokens[1] * size)


def ranked(law: list[float]) -> list[int]:
    return sorted(range(len(law)), key=lambda a: (-law[a], a))


def value(knobs: Any, law: list[float], u: float) -> int:
    """What a new label holds."""
    best, second = ranked(law)[:2]
    if knobs.values == "second":
        return second
    if knobs.values == "nucleus":
        kept = literal.nucleus(law, knobs.value_top_p, knobs.boundary)
        others = [p if keep and x != best else 0.0 for x, (p, keep) in enumerate(zip(law, kept, strict=True))]
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


def mended(knobs: Any, labels: dict[int, int], laws: list[list[float]], visible: list[int], call: int) -> list[int]:
    """The visible labels whose turn it is and that another token beats by most, far enough apart."""
    gain = {}
    for i in visible:
        rival = max(law for token, law in enumerate(laws[i]) if token != labels[i])
        if (i + call) % knobs.turns == 0 and rival > laws[i][labels[i]]:
            gain[i] = math.log(rival / laws[i][labels[i]]) if laws[i][labels[i]] else math.inf
    return scan({i: -more for i, more in gain.items()}, knobs.mend, math.inf, knobs.apart)


def keeps(knobs: Any, law: list[float], p: float) -> list[bool]:
    """The tokens that top-p, top-k and min-p all keep."""
    kept = [True] * len(law) if p >= 1 else literal.nucleus(law, p, knobs.boundary)
    first = ranked(law)[: knobs.top_k or len(law)]
    return [k and x in first and law[x] >= knobs.min_p * max(law) for x, k in enumerate(kept)]


def run(
    model: Any,
    sampler: Mapping[str, Any],
    seed: int,
    sample: int,
    fixed: dict[int, int] | None = None,
    replay: dict[int, int] | None = None,
    recorded: dict[int, int] | None = None,
) -> Path:
    knobs, fixed = SimpleNamespace(**NO_LABELS | sampler), fixed or {}
    length, size, last = model.length, model.vocab_size, knobs.nfe - 1
    warmup = round(knobs.warmup * last)
    after = last - warmup
    free = [i for i in range(length) if i not in fixed]
    knobs.mend = -(-len(free) // 32) if knobs.mend is None else knobs.mend
    knobs.turns = -(-knobs.nfe // 32) if knobs.turns is None else knobs.turns
    count = knobs.count if knobs.count is not None else -(-len(free) // max(1, after))
    times = grid(knobs.nfe, knobs.warmup, knobs.grid)
    path = Path()

    def pair(step: int, position: int, purpose: int) -> tuple[float, float]:
        return literal.uniforms(seed, sample, step, position, purpose)

    def visible(r: int) -> list[int]:
        if knobs.write == "output":
            return []
        ages = {i: r - e for i, e in path.selected_at.items()}
        return [i for i, age in ages.items() if age >= 1 and (knobs.horizon is None or age <= knobs.horizon)]

    def look(r: int) -> list[list[float]]:
        shown = [path.labels[i] if i in visible(r) else state[i] for i in range(length)]
        path.states.append(list(state))
        path.inputs.append(shown)
        path.laws.append(law_of(model, shown, times[r], knobs.temperature))
        return path.laws[-1]

    def advance(laws: list[list[float]], r: int) -> list[int]:
        late = knobs.top_p if knobs.late_top_p is None else knobs.late_top_p
        p = knobs.top_p if r < warmup else late
        moved = list(state)
        for i in free:
            if (span := stepping(times, knobs.weave, r, i)) is None:
                continue
            kept = keeps(knobs, laws[i], p)
            law = laws[i] if all(kept) else literal.restricted(laws[i], kept)
            coins, tokens = pair(r, i, COINS), pair(r, i, TOKENS)
            moved[i] = move(law, state[i], *(1 - 0.999 * t for t in span), coins, tokens)
        return moved

    state = [fixed[i] if i in fixed else int(pair(0, i, START)[0] * size) for i in range(length)]
    for r in range(last):
        laws = look(r)
        for i in visible(r):
            if refreshes(knobs.values, i, r):
                path.labels[i] = ranked(laws[i])[0]
        for i in mended(knobs, path.labels, laws, visible(r), r):
            path.labels[i] = ranked(laws[i])[0]
        eligible = [i for i in free if i not in path.selected_at]
        chosen: list[int] = []
        if replay is not None:
            chosen = [i for i in eligible if replay.get(i) == r]
        elif r >= warmup:
            deficit = {i: 1 - max(laws[i]) for i in eligible}
            chosen = scan(deficit, count, knobs.budget * len(free) / after, knobs.spacing)
        for i in chosen:
            path.selected_at[i] = r
            path.labels[i] = recorded[i] if knobs.values == "recorded" else value(knobs, laws[i], pair(r, i, VALUES)[0])
        state = advance(laws, r)

    laws = look(last)
    for i in mended(knobs, path.labels, laws, visible(last), last):
        path.labels[i] = ranked(laws[i])[0]
    path.tokens = [ranked(law)[0] for law in laws] if knobs.endpoint == "argmax" else advance(laws, last)
    for i, token in fixed.items():
        path.tokens[i] = token
    if knobs.write != "input" or knobs.endpoint == "copied":
        for i, label in path.labels.items():
            path.tokens[i] = label
    return path
