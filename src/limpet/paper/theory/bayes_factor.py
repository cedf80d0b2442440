"""Appendix C.2: the Bayes factor of a visible token, which grows as noise falls."""

from collections.abc import Sequence

import torch
from torch import Tensor

from limpet.models.exact import Mixture
from limpet.paper.theory.checks import Check, worst_case
from limpet.paper.theory.problems import RANDOM, random_distributions, random_numbers

NOISES = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 1.0)


def bayes_factor(favoured: Tensor, other: Tensor, noise: float | Tensor, vocab_size: int) -> Tensor:
    """B of eq. 33: how much likelier a noisy token is in one mode than in another.

    favoured, other: the clean probability of the token in each mode."""
    return ((1 - noise) * favoured + noise / vocab_size) / ((1 - noise) * other + noise / vocab_size)


def check_order(name: str, favoured: Tensor, other: Tensor, vocab_size: int, noises: Sequence[float]) -> Check:
    """ln B at t <= ln B at s, for noise that rises from s to t. A claim where the favoured mode has more mass."""
    factors = torch.stack([bayes_factor(favoured, other, noise, vocab_size).log() for noise in noises])
    return worst_case("ln B at t <= ln B at s", name, factors[1:], "<=", factors[:-1])


def check_slope(name: str, favoured: Tensor, other: Tensor, noise: Tensor, vocab_size: int) -> Check:
    """dB/d noise in closed form, whose sign is that of other - favoured, against automatic differentiation."""
    slope = torch.func.grad(lambda at: bayes_factor(favoured, other, at, vocab_size).sum())(noise)
    closed = (other - favoured) / vocab_size / ((1 - noise) * other + noise / vocab_size) ** 2
    return worst_case("dB/d noise = closed form", name, slope, "=", closed)


def check_denoiser(name: str, weights: Tensor, distributions: Tensor, noise: float) -> Check:
    """B against the exact denoiser: the posterior odds of a mode after one noisy token, over the prior odds.

    weights: (B, 2), distributions: (B, 2, 2, V), of many mixtures of two modes over two positions."""
    vocab_size = distributions.shape[-1]
    tokens = torch.arange(vocab_size)[:, None].expand(-1, 2)
    signal = torch.full((vocab_size,), 1 - noise, dtype=torch.float64)
    ratios, factors = [], []
    for prior, probs in zip(weights, distributions, strict=True):
        posterior = Mixture(prior, probs).mode_probs(tokens, signal)[:, 0]  # (V, 2), given the token at position 1
        ratios.append((posterior[:, 0] / posterior[:, 1]).log() - (prior[0] / prior[1]).log())
        factors.append(bayes_factor(probs[0, 1], probs[1, 1], noise, vocab_size).log())
    return worst_case("ln odds from the denoiser = ln B", name, torch.stack(ratios), "=", torch.stack(factors))


def checks() -> list[Check]:
    pairs = random_distributions(RANDOM, 2, 5, seed=60)
    favoured, other = pairs.amax(1), pairs.amin(1)  # (B, V): for each token, the mode that gives it more, and the other
    noise = 0.02 + 0.98 * random_numbers(RANDOM, 1, seed=61).expand(-1, 5)
    name = f"{RANDOM:,} random pairs of modes, V=5"
    weights, distributions = random_distributions(RANDOM, 2, seed=62), random_distributions(RANDOM, 2, 2, 3, seed=63)
    return [
        check_order(name, favoured, other, 5, NOISES),
        check_order(f"{RANDOM:,} random pairs that agree on the token", favoured, favoured, 5, NOISES),
        check_slope(name, favoured, other, noise, 5),
        check_denoiser(f"{RANDOM:,} random mixtures, K=2, L=2, V=3, noise 0.4", weights, distributions, 0.4),
    ]
