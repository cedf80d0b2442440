"""Small exact laws as float64 tensors: joints over all sequences, their marginals, entropies and divergences.

A joint law over n tokens of V symbols is flat, (..., V**n): base-V codes, position 0 the most significant digit."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from limpet.denoisers.exact import Source


def sequences(vocab_size: int, length: int) -> Tensor:
    """(V**n, n): every sequence, in the order of its code."""
    return decode(torch.arange(vocab_size**length), vocab_size, length)


def encode(tokens: Tensor, vocab_size: int) -> Tensor:
    """(..., n) tokens -> (...): the code of each sequence."""
    return (tokens * _places(vocab_size, tokens.shape[-1])).sum(-1)


def decode(code: Tensor, vocab_size: int, length: int) -> Tensor:
    """(...) codes -> (..., n): the sequence of each."""
    return code[..., None] // _places(vocab_size, length) % vocab_size


def length_of(joint: Tensor, vocab_size: int) -> int:
    """n, of a joint law over n tokens."""
    return round(math.log(joint.shape[-1], vocab_size))


def _places(base: int, length: int) -> Tensor:
    return base ** torch.arange(length - 1, -1, -1)


def product(laws: Tensor) -> Tensor:
    """(..., n, V) laws of independent tokens -> (..., V**n): their joint law."""
    joint = laws.new_ones(*laws.shape[:-2], 1)
    for law in laws.unbind(-2):
        joint = (joint[..., :, None] * law[..., None, :]).flatten(-2)
    return joint


def marginals(joint: Tensor, vocab_size: int) -> Tensor:
    """(..., V**n) -> (..., n, V): the law of each token."""
    found, rest = [], joint
    while rest.shape[-1] > 1:
        # With the leading digits summed away, what is left of the code starts at the next position.
        rest = rest.reshape(*rest.shape[:-1], vocab_size, -1)
        found.append(rest.sum(-1))
        rest = rest.sum(-2)
    return torch.stack(found, -2)


def truth(source: Source) -> Tensor:
    """(V**L,): the data law of a source small enough to list."""
    return source.log_prob(sequences(source.vocab_size, source.length)).exp()


def entropy(law: Tensor) -> Tensor:
    return torch.xlogy(law, law).sum(-1).neg().clamp(min=0.0)  # rounding may leave a point mass a hair below 0


def divergence(law: Tensor, other: Tensor) -> Tensor:
    """KL(law || other): infinite where the other misses mass of the first."""
    return (torch.xlogy(law, law) - torch.xlogy(law, other)).sum(-1)


def total_variation(law: Tensor, other: Tensor) -> Tensor:
    return (law - other).abs().sum(-1) / 2
