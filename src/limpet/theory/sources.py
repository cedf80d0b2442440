"""The sources that statements are evaluated on: a few named ones, and random batches."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from limpet.denoisers.exact import Markov, Mixture, Source, codebook
from limpet.theory.laws import decode

RANDOM = 1000  # random sources for every statement


def random_laws(*shape: int, seed: int, zeros: float = 0.0) -> Tensor:
    """Categorical laws over the last axis, from nearly uniform to nearly certain, alike within each first index.

    `zeros` is the share of tokens that have no mass at all; the likeliest always keeps its own."""
    generator = torch.Generator().manual_seed(seed)
    reach = torch.rand(shape[0], generator=generator, dtype=torch.float64)
    sharpness = (math.log(0.1) + reach * math.log(80)).exp().view(-1, *[1] * (len(shape) - 1))
    logits = sharpness * torch.randn(shape, generator=generator, dtype=torch.float64)
    missing = torch.rand(shape, generator=generator) < zeros
    missing.scatter_(-1, logits.argmax(-1, keepdim=True), False)
    return logits.masked_fill(missing, -math.inf).softmax(-1)


def random_numbers(*shape: int, seed: int) -> Tensor:
    """Uniform in [0, 1)."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_words(count: int, modes: int, length: int, vocab_size: int, seed: int) -> Tensor:
    """(count, K, L): codebooks of K different words."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.rand(count, vocab_size**length, generator=generator).topk(modes, -1).indices
    return decode(codes, vocab_size, length)


def slipping(
    words: Tensor, vocab_size: int, slip: float, weights: Tensor | None = None, name: str = "mixture", phrases: int = 1
) -> Mixture:
    """A codebook each of whose tokens slips, with probability `slip`, to a uniform one: modes with full support."""
    laws = (1 - slip) * torch.nn.functional.one_hot(words, vocab_size).double() + slip / vocab_size
    return Mixture(torch.ones(len(words)) if weights is None else weights, laws, phrases, name)


def chain(length: int) -> Markov:
    """A chain over 3 symbols that mostly stays where it is."""
    transition = torch.tensor([[0.8, 0.15, 0.05], [0.1, 0.7, 0.2], [0.25, 0.05, 0.7]], dtype=torch.float64)
    return Markov(torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64), transition, length)


def tiny() -> list[Source]:
    """One source of each kind, small enough to list: 3 symbols, 5 positions."""
    words = torch.tensor([[0, 0, 0, 0, 0], [1, 1, 1, 0, 1], [2, 2, 1, 2, 2]])
    weights = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    return [codebook(words, 3, weights), slipping(words, 3, 0.15, weights), chain(5)]


def large() -> list[Source]:
    """One source of each kind, too large to list: 16 symbols, 32 positions, 8 modes."""
    words = torch.randint(16, (8, 32), generator=torch.Generator().manual_seed(32))
    return [codebook(words, 16), slipping(words, 16, 0.2), Markov(torch.ones(16), random_laws(16, 16, seed=16), 32)]


def law_at(source: Source, states: Tensor, signal: float) -> Tensor:
    """The law of a source in (B, L) states, all at one signal."""
    return source.law(states, torch.full((len(states),), signal, dtype=torch.float64))


def describe(source: Source) -> str:
    return f"{source.name}, V={source.vocab_size}, L={source.length}"
