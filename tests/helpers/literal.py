"""The paper's equations written out one by one, in its own noise convention; Philox; a chi-square.

Nothing here is shared with the package. Each equation is one function of plain numbers; all of them also take numpy
arrays elementwise, so that one loop over tokens can serve many cases at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import stats


def forward(z, x, noise, size):
    """q(t|0)(z|x), equation 1."""
    return (1 - noise) * (z == x) + noise / size


def forward_between(z, y, noise_t, noise_s, size):
    """q(t|s)(z|y), equation 2."""
    beta = (noise_t - noise_s) / (1 - noise_s)
    return (1 - beta) * (z == y) + beta / size


def bridge(y, x, z, noise_t, noise_s, size):
    """q(s|0,t)(y|x,z), equation 3."""
    return forward(y, x, noise_s, size) * forward_between(z, y, noise_t, noise_s, size) / forward(z, x, noise_t, size)


def converted(probs: Sequence, z, noise) -> list:
    """C_{t,z} h, equation 5: one entry of `distribution` for each clean token."""
    size = len(probs)
    normalizer = sum(probs[other] * forward(z, other, noise, size) for other in range(size))
    return [probs[x] * forward(z, x, noise, size) / normalizer for x in range(size)]


def reverse(probs: Sequence, z, noise_t, noise_s) -> list:
    """pi(s|t)(y|z), equation 7: the bridge summed under the converted distribution."""
    size = len(probs)
    clean = converted(probs, z, noise_t)
    return [sum(bridge(y, x, z, noise_t, noise_s, size) * clean[x] for x in range(size)) for y in range(size)]


def nucleus(probs: Sequence[float], p: float, boundary: str) -> list[bool]:
    """A_p(h), equation 9, by a full sort: ties by lower id; `released` asks for more than p, `paper` for p."""
    order = sorted(range(len(probs)), key=lambda a: (-probs[a], a))
    limit = p * sum(probs)
    kept, mass = [False] * len(probs), 0.0
    for a in order:
        kept[a] = True
        mass += probs[a]
        if mass > limit or (boundary == "paper" and mass >= limit):
            break
    return kept


def restricted(probs: Sequence[float], kept: Sequence[bool]) -> list[float]:
    """T_A h, equation 8."""
    mass = sum(weight for weight, keep in zip(probs, kept, strict=True) if keep)
    return [weight / mass if keep else 0.0 for weight, keep in zip(probs, kept, strict=True)]


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox 4x32 with ten rounds, in unbounded integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b % 2**32, (a >> 32) ^ c3 ^ k1, a % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


def uniforms(seed: int, sample: int, step: int, position: int, purpose: int) -> tuple[float, float]:
    """The pair of 53-bit uniforms for one use."""
    words = philox([position, step, sample, purpose], [seed % 2**32, seed >> 32])
    first, second = ((high >> 5) * 2**26 + (low >> 6) for high, low in (words[:2], words[2:]))
    return first / 2**53, second / 2**53


def chi_square(counts: np.ndarray, distributions: np.ndarray) -> float:
    """The p-value of rows of counts together, each a multinomial of its own distribution; impossible cells are empty.

    Cells that expect fewer than ten are pooled within their row, so that the chi-square limit holds."""
    counts, distributions = np.atleast_2d(counts), np.atleast_2d(distributions)
    assert (counts[distributions == 0] == 0).all(), "a token of probability zero was drawn"
    statistic, freedom = 0.0, 0
    for row, probs in zip(counts, distributions, strict=True):
        expected = probs * row.sum()
        small = expected < 10
        observed, expected = (np.append(cells[~small], cells[small].sum()) for cells in (row, expected))
        observed, expected = observed[expected > 0], expected[expected > 0]
        statistic += ((observed - expected) ** 2 / expected).sum()
        freedom += len(observed) - 1
    return float(stats.chi2.sf(statistic, freedom)) if freedom else 1.0
