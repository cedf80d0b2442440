"""Proposition 2: the exact leave-one-out Bayes risk of selecting a token does not rise as noise falls."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from limpet.diffusion.process import forward_probs
from limpet.evaluation import statistics
from limpet.experiments.contents import Panel, series
from limpet.models.exact import Source, forward_path
from limpet.paper.theory.problems import (
    RANDOM,
    describe,
    large,
    length_of,
    probs_at,
    product,
    random_distributions,
    sequences,
    tiny,
    truth,
)
from limpet.paper.theory.sides import Sides, line, measured, worst

NOISES = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.97, 1.0)
DRAWS = 4000


def _corrupt(joint: Tensor, signals: list[float]) -> Tensor:
    """The uniform channel along each noisy token's axis of (B, V, V, ..., V), from axis 2 on, one signal for each."""
    for axis, signal in enumerate(signals, 2):
        joint = signal * joint + (1 - signal) * joint.mean(axis, keepdim=True)
    return joint


def evidence(joint: Tensor, vocab_size: int, signal: float | Tensor) -> Iterator[Tensor]:
    """(B, V**L) data distributions -> (B, V, V, ..., V) for each position: P(its clean token, the noisy tokens elsewhere).

    `signal` is one level for all positions, or (L,) levels, one for each."""
    length = length_of(joint, vocab_size)
    signals = torch.as_tensor(signal, dtype=torch.float64).expand(length).tolist()
    clean = joint.view(len(joint), *[vocab_size] * length)
    for i in range(length):
        yield _corrupt(clean.movedim(1 + i, 1), signals[:i] + signals[i + 1 :])


def risks(joint: Tensor, vocab_size: int, signal: float | Tensor) -> Tensor:
    """(L, B): the Bayes risk of naming the clean token at each position from the noisy tokens elsewhere (eq. 14)."""
    return torch.stack([1 - noisy.amax(1).flatten(1).sum(-1) for noisy in evidence(joint, vocab_size, signal)])


def simulated_risks(joint: Tensor, vocab_size: int, signal_s: float, signal_t: float) -> Tensor:
    """(L, B): the risk of the proof's rule: given the cleaner tokens, corrupt them further from s to t oneself, and
    answer as the Bayes rule at t does. It is randomised: it answers a with probability `answer[a | x_s]`."""
    found = []
    for cleaner, noisy in zip(*(evidence(joint, vocab_size, signal) for signal in (signal_s, signal_t)), strict=True):
        bayes = torch.zeros_like(noisy).scatter(1, noisy.argmax(1, keepdim=True), 1.0)
        # The channel is symmetric, so averaging the Bayes rule over what x_s is corrupted into is the channel again.
        answer = _corrupt(bayes, [signal_t / signal_s] * (noisy.dim() - 2))
        found.append(1 - (cleaner * answer).flatten(1).sum(-1))
    return torch.stack(found)


def check(name: str, joint: Tensor, vocab_size: int, signals: Sequence[float | Tensor]) -> Sides:
    """R_s <= R_t for each step along signals that should fall, at every position, for every joint distribution: the worst."""
    found = torch.stack([risks(joint, vocab_size, signal) for signal in signals])
    return worst("risk at s <= risk at t", name, found[:-1], "<=", found[1:])


def check_simulation(name: str, joint: Tensor, vocab_size: int, signal_s: float, signal_t: float) -> list[Sides]:
    """The simulated rule has exactly the noisier risk, and the Bayes rule does no worse."""
    simulated = simulated_risks(joint, vocab_size, signal_s, signal_t)
    here, there = risks(joint, vocab_size, signal_s), risks(joint, vocab_size, signal_t)
    return [
        worst("risk of the simulated rule = risk at t", name, simulated, "=", there),
        worst("risk at s <= risk of the simulated rule", name, here, "<=", simulated),
    ]


def risk_from_denoiser(source: Source, signal: float) -> Tensor:
    """(L,): the risk once more, from the denoiser's own distribution at every state: the mean of 1 - max distribution."""
    states, data = sequences(source.vocab_size, source.length), truth(source)
    noisy = product(forward_probs(states[data > 0], signal, source.vocab_size))
    chance = data[data > 0] @ noisy  # (V**L,) of each noisy state
    return chance @ (1 - probs_at(source, states, signal).amax(-1))


def sampled_risks(source: Source, signals: Sequence[float], n: int, seed: int) -> tuple[Tensor, Tensor]:
    """(signals, n) twice, means over positions along n forward paths: the deficit 1 - max distribution, whose mean is the risk
    with the last coin already averaged out (Rao-Blackwell), and the plain share of wrong argmax labels."""
    clean = source.draw(n, seed)
    deficits, wrong = [], []
    for signal, state in zip(signals, forward_path(clean, signals, source.vocab_size, seed), strict=True):
        largest, top = probs_at(source, state, signal).max(-1)
        deficits.append((1 - largest).mean(-1))
        wrong.append((top != clean).double().mean(-1))
    return torch.stack(deficits), torch.stack(wrong)


def sides() -> list[Sides]:
    signals = [1 - noise for noise in NOISES]
    found = []
    for source in tiny():
        joint, name = truth(source)[None], describe(source)
        exact = risks(joint, source.vocab_size, 0.5)[:, 0]
        sampled = sampled_risks(source, [0.5], DRAWS, seed=3)[0][0]
        steps = [(0.0, 0.4), (0.4, 0.8), (0.8, 1.0)]
        found += [check(f"{name}, noise {s} and {t}", joint, source.vocab_size, [1 - s, 1 - t]) for s, t in steps]
        found += [
            worst("risk by the denoiser = risk by enumeration", name, risk_from_denoiser(source, 0.5), "=", exact),
            measured("risk by Monte Carlo = risk by enumeration", name, sampled, "=", float(exact.mean())),
        ]
    joint = random_distributions(RANDOM, 3**4, seed=1, zeros=0.3)
    name = f"{RANDOM:,} random joint distributions, V=3, L=4"
    found += [check(name, joint, 3, signals), *check_simulation(name, joint, 3, 0.6, 0.3)]
    independent = product(random_distributions(RANDOM, 4, 3, seed=2, zeros=0.3))
    found.append(check(f"{RANDOM:,} random distributions of independent tokens", independent, 3, signals))
    for source in large():
        found += _beyond_enumeration(source, signals[1:-1])
    return found


def _beyond_enumeration(source: Source, signals: Sequence[float]) -> list[Sides]:
    """The worst step along the signals, and whether the distribution's own deficit tells how often its argmax is wrong."""
    name = describe(source)
    deficits, wrong = sampled_risks(source, signals, DRAWS // 4, seed=4)
    steps = [
        measured("risk at s <= risk at t, Monte Carlo", name, here, "<=", there)  # along one path the two are paired
        for here, there in itertools.pairwise(deficits)
    ]
    return [
        min(steps, key=lambda step: step.slack - step.margin),
        measured("mean deficit = share of wrong labels, Monte Carlo", name, deficits.mean(0), "=", wrong.mean(0)),
    ]


def panels() -> Iterator[Panel]:
    noises, levels = torch.linspace(0, 1, 41).tolist(), [0.98, *(1 - noise for noise in NOISES[1:-1])]
    small, big = [], []
    for source in tiny():
        joint = truth(source)[None]
        means = [float(risks(joint, source.vocab_size, 1 - noise).mean()) for noise in noises]
        small.append(line(describe(source), noises, means))
    for source in large():
        over = [statistics.mean_se(deficits) for deficits in sampled_risks(source, levels, DRAWS // 4, seed=4)[0]]
        big.append(series(describe(source), [1 - level for level in levels], over, style="-"))
    what = "Bayes risk of the argmax label"
    yield Panel("exact", "noise", what, small)
    yield Panel("Monte Carlo, one standard error", "noise", what, big)
