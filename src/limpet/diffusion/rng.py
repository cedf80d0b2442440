"""Counter-based randomness: (seed, sample, step, position, purpose) -> uniforms, the same bits on every device.

Philox 4x32-10 (Salmon et al., 2011) in integer tensor operations. Each uniform depends only on what it is used for, so
a sample does not depend on its batch, on the order of work, or on the other samplers of a comparison.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from limpet.errors import LimpetError

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
SEED_LIMIT = 2**64  # seeds are below this
SAMPLE_LIMIT = 2**32  # sample numbers are below this
Seed = TypeVar("Seed", int, Tensor)


class Purpose(IntEnum):
    """What a pair of uniforms is used for. The numbers decide every result, so they never change."""

    START = 0  # the state at t = 1
    COINS = 1  # the two coins of a reverse step
    TOKENS = 2  # the draw from a predicted distribution, and the uniform token
    VALUES = 3  # the committed token drawn from a nucleus
    NOISE = 4  # forward corruption of clean text
    DATA = 5  # draws from a source whose distribution is known
    POSITIONS = 6  # the positions that a call chooses
    CANVAS = 7  # the seed of a later canvas


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int] | tuple[Tensor, Tensor]
) -> tuple[Tensor, ...]:
    """Four 32-bit words (in int64 tensors) for each 128-bit counter under a 64-bit key, or a key for each."""
    c0, c1, c2, c3 = counter
    k0, k1 = cast("tuple[Tensor, Tensor]", key)  # the arithmetic of whole numbers is the same
    for _ in range(ROUNDS):
        # A 32 x 32 bit product needs 64 unsigned bits. int64 wraps around, and shifting and masking restores the words.
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32 & WORD) ^ c1 ^ k0, p1 & WORD, (p0 >> 32 & WORD) ^ c3 ^ k1, p0 & WORD
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1, c2, c3


def uniform53(high: Tensor, low: Tensor) -> Tensor:
    """Converts two 32-bit words to a float64 in [0, 1) with 53 random bits."""
    return ((high >> 5) * 2**26 + (low >> 6)).to(torch.float64) * 2.0**-53


@dataclass(frozen=True)
class CounterRNG:
    """The randomness of a batch of samples, under one seed or each under its own."""

    seed: int | Tensor  # or (B,) int64: the bits of each sample's seed
    samples: Tensor  # (B,) the number of each sample under its seed

    def __post_init__(self) -> None:
        if isinstance(self.seed, int) and not 0 <= self.seed < SEED_LIMIT:
            raise LimpetError(f"seed is {self.seed}; it must be a whole number from 0 to 2**64 - 1")

    def of(self, rows: Tensor, canvas: int = 0) -> CounterRNG:
        """The randomness of some of the samples, in a canvas of a longer text."""
        if isinstance(self.seed, int):
            return CounterRNG(canvas_seed(self.seed, canvas), self.samples[rows])
        return CounterRNG(canvas_seed(self.seed[rows], canvas), self.samples[rows])

    def uniforms(
        self, step: int, positions: Tensor, purpose: Purpose, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Two independent uniforms for each sample and position.

        positions: (L,), which gives (B, L) uniforms; or, together with `rows`, (R,), which gives (R,).
        rows: (R,) the index in the batch of the sample of each position."""
        which = (slice(None), None) if rows is None else rows
        samples, seed = self.samples[which], self.seed if isinstance(self.seed, int) else self.seed[which]
        counter = (positions, torch.full_like(positions, step), samples, torch.full_like(positions, int(purpose)))
        words = philox(counter, _key(seed))
        return uniform53(words[0], words[1]), uniform53(words[2], words[3])


def _key(seed: Any) -> tuple[Any, Any]:
    """The two words of a seed, or of each."""
    return seed & WORD, seed >> 32 & WORD


def canvas_seed(seed: Seed, canvas: int) -> Seed:
    """The seed of a canvas of a longer text, or of each. The first canvas has the seed of the text."""
    if canvas == 0:
        return seed
    zero = torch.zeros_like(seed) if isinstance(seed, Tensor) else torch.zeros((), dtype=torch.long)
    high, low, *_ = philox((zero + canvas, zero, zero, zero + int(Purpose.CANVAS)), _key(seed))
    return high << 32 | low if isinstance(seed, Tensor) else int(high) << 32 | int(low)


def uniform_token(u: Tensor, vocab_size: int) -> Tensor:
    """A uniformly random token from a uniform in [0, 1)."""
    return (u * vocab_size).long()
