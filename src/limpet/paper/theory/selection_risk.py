"""Proposition 2: the exact leave-one-out Bayes risk of committing a token does not rise as noise falls."""

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from limpet.diffusion.process import forward_probs
from limpet.models.exact import Source, forward_path
from limpet.paper.theory import problems
from limpet.paper.theory.checks import Check, compare_means, worst_case
from limpet.paper.theory.problems import RANDOM, describe, length_of, product, random_distributions, truth

NOISES = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.97, 1.0)
DRAWS = 4000


def _corrupt(joint: Tensor, signals: list[float]) -> Tensor:
    """The uniform channel along the noisy tokens' axes of (B, V, V, ..., V), from axis 2 on, a signal for each."""
    for axis, signal in enumerate(signals, 2):
        joint = signal * joint + (1 - signal) * joint.mean(axis, keepdim=True)
    return joint


def evidence(joint: Tensor, vocab_size: int, signal: float | Tensor) -> Iterator[Tensor]:
    """For each position (B, V, V, ..., V): P(its clean token, the noisy tokens elsewhere).

    joint: (B, V**L) data distributions. signal: one level, or (L,) levels, one for each position."""
    length = length_of(joint, vocab_size)
    signals = torch.as_tensor(signal, dtype=torch.float64).expand(length).tolist()
    clean = joint.view(len(joint), *[vocab_size] * length)
    for i in range(length):
        yield _corrupt(clean.movedim(1 + i, 1), signals[:i] + signals[i + 1 :])


def risks(joint: Tensor, vocab_size: int, signal: float | Tensor) -> Tensor:
    """(L, B): the Bayes risk of predicting each clean token from the noisy tokens elsewhere (eq. 14)."""
    return torch.stack([1 - noisy.amax(1).flatten(1).sum(-1) for noisy in evidence(joint, vocab_size, signal)])


def simulated_risks(joint: Tensor, vocab_size: int, signal_s: float, signal_t: float) -> Tensor:
    """(L, B): the risk of the proof's rule, which corrupts the cleaner tokens further from s to t and then predicts as
    the Bayes rule at t does."""
    rule_risks = []
    for cleaner, noisy in zip(*(evidence(joint, vocab_size, signal) for signal in (signal_s, signal_t)), strict=True):
        bayes = torch.zeros_like(noisy).scatter(1, noisy.argmax(1, keepdim=True), 1.0)
        # The channel is symmetric, so it also averages the Bayes rule over what x_s is corrupted into.
        prediction = _corrupt(bayes, [signal_t / signal_s] * (noisy.dim() - 2))  # P(the rule predicts a | x_s)
        rule_risks.append(1 - (cleaner * prediction).flatten(1).sum(-1))
    return torch.stack(rule_risks)


def check(name: str, joint: Tensor, vocab_size: int, signals: Sequence[float | Tensor]) -> Check:
    """R_s <= R_t for neighbours among falling signals, at every position."""
    by_signal = torch.stack([risks(joint, vocab_size, signal) for signal in signals])
    return worst_case("risk at s <= risk at t", name, by_signal[:-1], "<=", by_signal[1:])


def check_simulation(name: str, joint: Tensor, vocab_size: int, signal_s: float, signal_t: float) -> list[Check]:
    """The simulated rule has exactly the noisier risk, and the Bayes rule does no worse."""
    simulated = simulated_risks(joint, vocab_size, signal_s, signal_t)
    at_s, at_t = risks(joint, vocab_size, signal_s), risks(joint, vocab_size, signal_t)
    return [
        worst_case("risk of the simulated rule = risk at t", name, simulated, "=", at_t),
        worst_case("risk at s <= risk of the simulated rule", name, at_s, "<=", simulated),
    ]


def risk_from_denoiser(source: Source, signal: float) -> Tensor:
    """(L,): the risk as the mean deficit of the denoiser over all noisy states."""
    states, data = problems.sequences(source.vocab_size, source.length), truth(source)
    noisy = product(forward_probs(states[data > 0], signal, source.vocab_size))
    return data[data > 0] @ noisy @ (1 - problems.probs_at(source, states, signal).amax(-1))


def sampled_risks(source: Source, signals: Sequence[float], n: int, seed: int) -> tuple[Tensor, Tensor]:
    """(signals, n) twice, means over positions of n forward trajectories: the deficit, and the share of argmax tokens
    that are wrong. The mean of the deficit is the risk with less variance (Rao-Blackwell)."""
    clean = source.draw(n, seed)
    deficits, errors = [], []
    for signal, state in zip(signals, forward_path(clean, signals, source.vocab_size, seed), strict=True):
        largest, top = problems.probs_at(source, state, signal).max(-1)
        deficits.append((1 - largest).mean(-1))
        errors.append((top != clean).double().mean(-1))
    return torch.stack(deficits), torch.stack(errors)


def check_tiny(source: Source) -> list[Check]:
    """A source that is small enough to list: the risk at several steps, and two other ways to compute it."""
    joint, name, size = truth(source)[None], describe(source), source.vocab_size
    exact = risks(joint, size, 0.5)[:, 0]
    sampled = sampled_risks(source, [0.5], DRAWS, seed=3)[0][0]
    steps = ((0.0, 0.4), (0.4, 0.8), (0.8, 1.0))
    return [
        *(check(f"{name}, noise {s} and {t}", joint, size, [1 - s, 1 - t]) for s, t in steps),
        worst_case("risk by the denoiser = risk by enumeration", name, risk_from_denoiser(source, 0.5), "=", exact),
        compare_means("risk by Monte Carlo = risk by enumeration", name, sampled, "=", float(exact.mean())),
    ]


def check_large(source: Source, signals: Sequence[float]) -> list[Check]:
    """A source too large to list: the worst step along the signals, and the deficit beside the errors of the argmax."""
    name, statement = describe(source), "risk at s <= risk at t, Monte Carlo"
    deficits, errors = sampled_risks(source, signals, DRAWS // 4, seed=4)
    # On one trajectory, the two risks are paired.
    steps = [compare_means(statement, name, low, "<=", high) for low, high in itertools.pairwise(deficits)]
    statement = "mean deficit = share of wrong argmax tokens, Monte Carlo"
    return [
        min(steps, key=lambda step: step.slack - step.margin),
        compare_means(statement, name, deficits.mean(0), "=", errors.mean(0)),
    ]


def checks() -> list[Check]:
    signals = [1 - noise for noise in NOISES]
    joint, name = random_distributions(RANDOM, 3**4, seed=1, zeros=0.3), "random joint distributions, V=3, L=4"
    independent = product(random_distributions(RANDOM, 4, 3, seed=2, zeros=0.3))
    return [
        *itertools.chain.from_iterable(map(check_tiny, problems.tiny())),
        check(f"{RANDOM:,} {name}", joint, 3, signals),
        *check_simulation(f"{RANDOM:,} {name}", joint, 3, 0.6, 0.3),
        check(f"{RANDOM:,} random distributions of independent tokens", independent, 3, signals),
        *itertools.chain.from_iterable(check_large(source, signals[1:-1]) for source in problems.large()),
    ]
