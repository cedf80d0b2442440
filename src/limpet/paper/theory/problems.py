"""Small exact distributions as float64 tensors, the named sources of the statements, and random batches.

A joint distribution over n tokens of V symbols is flat, (..., V**n): base-V codes, position 0 the leading digit."""

import math

import torch
from torch import Tensor

from limpet.models.exact import Markov, Source, codebook

RANDOM = 1000  # random sources for every statement


def sequences(vocab_size: int, length: int) -> Tensor:
    """(V**n, n): every sequence, in the order of its code."""
    return decode(torch.arange(vocab_size**length), vocab_size, length)


def encode(tokens: Tensor, vocab_size: int) -> Tensor:
    """(..., n) tokens -> (...): the code of each sequence."""
    return (tokens * _place_values(vocab_size, tokens.shape[-1])).sum(-1)


def decode(code: Tensor, vocab_size: int, length: int) -> Tensor:
    """(...) codes -> (..., n): the sequence of each."""
    return code[..., None] // _place_values(vocab_size, length) % vocab_size


def _place_values(base: int, length: int) -> Tensor:
    return base ** torch.arange(length - 1, -1, -1)


def length_of(joint: Tensor, vocab_size: int) -> int:
    """n, of a joint distribution over n tokens."""
    return round(math.log(joint.shape[-1], vocab_size))


def product(distributions: Tensor) -> Tensor:
    """(..., n, V) distributions of independent tokens -> (..., V**n): their joint distribution."""
    joint = distributions.new_ones(*distributions.shape[:-2], 1)
    for probs in distributions.unbind(-2):
        joint = (joint[..., :, None] * probs[..., None, :]).flatten(-2)
    return joint


def marginals(joint: Tensor, vocab_size: int) -> Tensor:
    """(..., V**n) -> (..., n, V): the distribution of each token."""
    distributions, rest = [], joint
    while rest.shape[-1] > 1:
        # The leading digits are summed away, so the code starts at the next position.
        rest = rest.reshape(*rest.shape[:-1], vocab_size, -1)
        distributions.append(rest.sum(-1))
        rest = rest.sum(-2)
    return torch.stack(distributions, -2)


def truth(source: Source) -> Tensor:
    """(V**L,): the data distribution of a source small enough to list."""
    return source.log_prob(sequences(source.vocab_size, source.length)).exp()


def probs_at(source: Source, states: Tensor, signal: float) -> Tensor:
    """(B, L, V): the leave-one-out distributions of a source in (B, L) states, all at one signal."""
    return source.probs(states, torch.full((len(states),), signal, dtype=torch.float64))


def entropy(probs: Tensor) -> Tensor:
    """The entropy of each distribution, in nats."""
    return torch.xlogy(probs, probs).sum(-1).neg().clamp(min=0.0)  # rounding may leave a point mass below 0


def divergence(probs: Tensor, other: Tensor) -> Tensor:
    """KL(probs || other), in nats: infinite where the other has no mass and the first has some."""
    return (torch.xlogy(probs, probs) - torch.xlogy(probs, other)).sum(-1)


def total_variation(probs: Tensor, other: Tensor) -> Tensor:
    """Half of the absolute difference, summed."""
    return (probs - other).abs().sum(-1) / 2


# Sources


def random_distributions(*shape: int, seed: int, zeros: float = 0.0) -> Tensor:
    """Categorical distributions over the last axis, from nearly uniform to nearly certain along the first one.

    zeros: the share of tokens that have no mass; the likeliest token always keeps its own."""
    generator = torch.Generator().manual_seed(seed)
    reach = torch.rand(shape[0], generator=generator, dtype=torch.float64)
    sharpness = (math.log(0.1) + reach * math.log(80)).exp().view(-1, *[1] * (len(shape) - 1))
    logits = sharpness * torch.randn(shape, generator=generator, dtype=torch.float64)
    missing = torch.rand(shape, generator=generator) < zeros
    missing.scatter_(-1, logits.argmax(-1, keepdim=True), False)
    return logits.masked_fill(missing, -math.inf).softmax(-1)


def random_numbers(*shape: int, seed: int) -> Tensor:
    """Uniform numbers in [0, 1)."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_words(count: int, modes: int, length: int, vocab_size: int, seed: int) -> Tensor:
    """(count, K, L): codebooks of K different words."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.rand(count, vocab_size**length, generator=generator).topk(modes, -1).indices
    return decode(codes, vocab_size, length)


def chain(length: int) -> Markov:
    """A Markov chain over 3 symbols that mostly repeats the token before."""
    transition = torch.tensor([[0.8, 0.15, 0.05], [0.1, 0.7, 0.2], [0.25, 0.05, 0.7]], dtype=torch.float64)
    return Markov(torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64), transition, length)


def tiny() -> list[Source]:
    """One source of each kind, small enough to list: 3 symbols, 5 positions."""
    words = torch.tensor([[0, 0, 0, 0, 0], [1, 1, 1, 0, 1], [2, 2, 1, 2, 2]])
    weights = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    return [codebook(words, 3, weights), codebook(words, 3, weights, slip=0.15), chain(5)]


def large() -> list[Source]:
    """One source of each kind, too large to list: 16 symbols, 32 positions, 8 modes."""
    words = torch.randint(16, (8, 32), generator=torch.Generator().manual_seed(32))
    random_chain = Markov(torch.ones(16), random_distributions(16, 16, seed=16), 32)
    return [codebook(words, 16), codebook(words, 16, slip=0.2), random_chain]


def describe(source: Source) -> str:
    """The source as the tables name it."""
    return f"{source.name}, V={source.vocab_size}, L={source.length}"
