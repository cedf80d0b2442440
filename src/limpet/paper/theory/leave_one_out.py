"""Section 3.1: the leave-one-out distribution is the posterior averaged over the position's own noisy token, given the
others, and the conversion takes it back to that posterior."""

from itertools import product

import torch
from torch import Tensor

from limpet.diffusion.process import forward_probs, posterior
from limpet.models.exact import Source
from limpet.paper.theory import problems
from limpet.paper.theory.checks import Check, worst_case
from limpet.paper.theory.problems import RANDOM, describe, length_of, sequences, total_variation, truth

NOISES = (0.1, 0.5, 0.9)


def posteriors(joint: Tensor, vocab_size: int, noise: float) -> tuple[Tensor, Tensor]:
    """(B, V**L) data distributions -> (B, S) the distribution of the noisy state, and (B, S, L, V) the posterior of
    each clean token in every state, by Bayes' rule over clean sequences, without leave-one-out distributions."""
    clean = sequences(vocab_size, length_of(joint, vocab_size))
    channel = problems.product(forward_probs(clean, 1 - noise, vocab_size))  # (clean S, noisy S)
    both = joint[:, :, None] * channel
    state = both.sum(1)
    return state, problems.marginals((both / state[:, None]).movedim(1, 2), vocab_size)


def average(state: Tensor, after: Tensor, vocab_size: int, weighted: bool = True) -> Tensor:
    """(B, S, L, V): at each position, the mean of the posterior over its own noisy token, the others fixed.

    weighted: by the token's distribution given the others. Equal weights give another distribution."""
    batch, _, length, _ = after.shape
    means = []
    for i in range(length):
        shape = batch, -1, vocab_size, vocab_size ** (length - 1 - i)  # states before the digit, the digit, after it
        weight = state.view(shape) if weighted else torch.ones_like(state).view(shape)
        own = after[:, :, i].reshape(*shape, vocab_size)
        mean = (weight[..., None] * own).sum(2, keepdim=True) / weight.sum(2, keepdim=True)[..., None]
        means.append(mean.expand(own.shape).reshape(batch, -1, vocab_size))
    return torch.stack(means, 2)


def check(name: str, source: Source, noise: float, weighted: bool = True) -> list[Check]:
    """Both equalities in every state of a source small enough to list: the largest TV between their sides."""
    size, states = source.vocab_size, sequences(source.vocab_size, source.length)
    state, after = posteriors(truth(source)[None], size, noise)
    probs = problems.probs_at(source, states, 1 - noise)
    to_mean = total_variation(average(state, after, size, weighted)[0], probs)
    to_posterior = total_variation(posterior(probs, states, 1 - noise), after[0])
    return [
        worst_case("mean of the posterior = leave-one-out distribution (TV)", name, to_mean, "=", 0.0),
        worst_case("converted leave-one-out distribution = posterior (TV)", name, to_posterior, "=", 0.0),
    ]


def check_random(name: str, joint: Tensor, vocab_size: int, noise: float) -> Check:
    """The mean converts back to the posterior, for arbitrary data distributions."""
    state, after = posteriors(joint, vocab_size, noise)
    states = sequences(vocab_size, length_of(joint, vocab_size)).expand(len(joint), -1, -1)
    converted = posterior(average(state, after, vocab_size), states, 1 - noise)
    return worst_case("conversion of the mean = posterior (TV)", name, total_variation(converted, after), "=", 0.0)


def checks() -> list[Check]:
    rows = []
    for source, noise in product(problems.tiny(), NOISES):
        rows += check(f"{describe(source)}, noise {noise}", source, noise)
    joint, name = problems.random_distributions(RANDOM, 3**3, seed=80, zeros=0.3), "random distributions, V=3, L=3"
    return rows + [check_random(f"{RANDOM:,} {name}, noise {noise}", joint, 3, noise) for noise in NOISES]
