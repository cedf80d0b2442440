"""Section 3.1: the leave-one-out distribution is the posterior averaged over what the position's own noisy token may be, given
the others, and the conversion takes it back to that posterior."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from limpet.diffusion.process import forward_probs, posterior
from limpet.experiments.contents import Panel
from limpet.models.exact import Source
from limpet.paper.theory import problems
from limpet.paper.theory.problems import RANDOM, describe, sequences, total_variation, truth
from limpet.paper.theory.sides import Sides, line, worst

NOISES = (0.1, 0.5, 0.9)


def listed(joint: Tensor, vocab_size: int, length: int, noise: float) -> tuple[Tensor, Tensor]:
    """(B, V**L) data distributions -> (B, S) the distribution of the noisy state, and (B, S, L, V) the posterior of each clean token in
    every state: by Bayes' rule over whole clean sequences, with no leave-one-out distribution on the way."""
    every = sequences(vocab_size, length)
    channel = problems.product(forward_probs(every, 1 - noise, vocab_size))  # (clean S, noisy S)
    both = joint[:, :, None] * channel
    state = both.sum(1)
    return state, problems.marginals((both / state[:, None]).movedim(1, 2), vocab_size)


def averaged(state: Tensor, after: Tensor, vocab_size: int, given: bool = True) -> Tensor:
    """(B, S, L, V): at each position the mean of the posterior over its own noisy token, the others held.

    Its weight is that token's distribution given the others. With given=False all weigh alike, and the mean is another distribution."""
    batch, _, length, _ = after.shape
    found = []
    for i in range(length):
        inner = vocab_size ** (length - 1 - i)
        shape = batch, -1, vocab_size, inner  # states before this digit of their code, the digit, and after it
        weight = state.view(shape) if given else torch.ones_like(state).view(shape)
        own = after[:, :, i].reshape(*shape, vocab_size)
        mean = (weight[..., None] * own).sum(2, keepdim=True) / weight.sum(2, keepdim=True)[..., None]
        found.append(mean.expand(own.shape).reshape(batch, -1, vocab_size))
    return torch.stack(found, 2)


def check(name: str, source: Source, noise: float, given: bool = True) -> list[Sides]:
    """Both equalities in every state of a source small enough to list: the largest TV between their sides."""
    size, states = source.vocab_size, sequences(source.vocab_size, source.length)
    state, after = listed(truth(source)[None], size, source.length, noise)
    probs = problems.probs_at(source, states, 1 - noise)
    mean = averaged(state, after, size, given)[0]
    converted = posterior(probs, states, 1 - noise)
    return [
        worst("mean of the posterior = leave-one-out distribution (TV)", name, total_variation(mean, probs), "=", 0.0),
        worst(
            "converted leave-one-out distribution = posterior (TV)",
            name,
            total_variation(converted, after[0]),
            "=",
            0.0,
        ),
    ]


def check_random(name: str, joint: Tensor, vocab_size: int, length: int, noise: float) -> Sides:
    """The conversion of the mean is the posterior it was made from, for data distributions of no kind in particular."""
    state, after = listed(joint, vocab_size, length, noise)
    mean = averaged(state, after, vocab_size)
    converted = posterior(mean, sequences(vocab_size, length).expand(len(joint), -1, -1), 1 - noise)
    distance = total_variation(converted, after)
    return worst("conversion of the mean = posterior (TV)", name, distance, "=", 0.0)


def sides() -> list[Sides]:
    found = [
        row
        for source in problems.tiny()
        for noise in NOISES
        for row in check(f"{describe(source)}, noise {noise}", source, noise)
    ]
    joint = problems.random_distributions(RANDOM, 3**3, seed=80, zeros=0.3)
    return found + [
        check_random(f"{RANDOM:,} random distributions, V=3, L=3, noise {noise}", joint, 3, 3, noise)
        for noise in NOISES
    ]


def panels() -> Iterator[Panel]:
    """How far the posterior of a state lies from its mean: what a position's own token adds to the others."""
    noises = torch.linspace(0.02, 1, 25, dtype=torch.float64).tolist()

    def added(source: Source, noise: float) -> float:
        state, after = listed(truth(source)[None], source.vocab_size, source.length, noise)
        distance = total_variation(after, averaged(state, after, source.vocab_size)).mean(-1)
        return float((state * distance).sum())

    lines = [line(describe(source), noises, [added(source, noise) for noise in noises]) for source in problems.tiny()]
    yield Panel("", "noise", "mean total variation", lines)
