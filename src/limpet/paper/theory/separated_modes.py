"""Appendix B.2: at low noise the true word of a separated codebook is the unique nearest one, and the argmax of every
token's posterior spells it.

Everywhere below, words are (B, K, L), and the true word is the first."""

import math

import torch
from torch import Tensor

from limpet.diffusion import process
from limpet.models.exact import codebook
from limpet.paper.theory.checks import Check, worst_case
from limpet.paper.theory.problems import RANDOM, probs_at, random_distributions, random_words, sequences

DECODED = 50  # random codebooks that are decoded in every state


def distances(words: Tensor, states: Tensor) -> Tensor:
    """(B, K, L) words, (S, L) states -> (B, S, K): Hamming distances."""
    return (states[:, None] != words[:, None]).sum(-1).double()


def separation(words: Tensor) -> Tensor:
    """(B,): the smallest distance between two words of each codebook."""
    apart = (words[:, :, None] != words[:, None]).sum(-1)
    own = torch.eye(words.shape[1], dtype=torch.bool)
    return apart.masked_fill(own, words.shape[-1] + 1).flatten(1).amin(-1).double()


def likelihood(distance: Tensor, length: int, vocab_size: int, noise: float) -> Tensor:
    """The probability of one noisy state at this distance from its clean word."""
    same, other = torch.tensor([1 - noise + noise / vocab_size, noise / vocab_size], dtype=torch.float64).unbind()
    return same.pow(length - distance) * other.pow(distance)


def mismatch(noise: float | Tensor, vocab_size: int) -> Tensor:
    """r: the probability that a noisy token differs from its clean one."""
    return torch.as_tensor(noise, dtype=torch.float64) * (vocab_size - 1) / vocab_size


def not_nearest(words: Tensor, vocab_size: int, noise: float) -> Tensor:
    """(B,): the probability that the true word is not the unique nearest one, by enumeration of the noisy states."""
    apart = distances(words, sequences(vocab_size, words.shape[-1]))
    chance = likelihood(apart[..., 0], words.shape[-1], vocab_size, noise)
    return (chance * (apart[..., 1:] <= apart[..., :1]).any(-1)).sum(-1)


def not_nearest_of_two(distance: int, vocab_size: int, noise: float) -> float:
    """The same for two words, in closed form.

    Where the words differ, a noisy token agrees with the true word, with the other, or with neither. The trinomial sum
    is over the outcomes in which at least as many agree with the other word."""
    true, other = 1 - noise + noise / vocab_size, noise / vocab_size
    neither = max(0.0, 1 - true - other)
    terms = []
    for wrong in range(distance + 1):
        for right in range(min(wrong, distance - wrong) + 1):
            ways = math.comb(distance, wrong) * math.comb(distance - wrong, right)
            terms.append(ways * other**wrong * true**right * neither ** (distance - wrong - right))
    return math.fsum(terms)


def tail(length: int, rate: Tensor, least: Tensor) -> Tensor:
    """(B,): P(Binomial(L, rate) >= least)."""
    hits = torch.arange(length + 1)
    ways = torch.tensor([math.comb(length, int(k)) for k in hits], dtype=torch.float64)
    terms = ways * rate[..., None] ** hits * (1 - rate[..., None]) ** (length - hits)
    return (terms * (hits >= least[..., None])).sum(-1)


def log_chernoff(length: int, rate: Tensor, share: Tensor) -> Tensor:
    """-L d_bin(share || rate): the log of the bound, a claim only where rate < share."""
    relative = torch.xlogy(share, share) - torch.xlogy(share, rate)
    return -length * (relative + torch.xlogy(1 - share, (1 - share) / (1 - rate)))


def check_nearest(name: str, words: Tensor, vocab_size: int, noise: float, everywhere: bool = False) -> list[Check]:
    """Enumeration <= binomial tail <= Chernoff, where r < separation / 2L; in logs, so that small values count.

    everywhere: check also where the bound claims nothing."""
    length, apart = words.shape[-1], separation(words)
    rate = mismatch(noise, vocab_size)
    claimed = (rate < apart / (2 * length)) | torch.tensor(everywhere)
    if not claimed.any():
        return []
    words, apart = words[claimed], apart[claimed]
    exact = not_nearest(words, vocab_size, noise).log()
    binomial = tail(length, rate.expand(len(words)), apart / 2).log()
    chernoff = log_chernoff(length, rate, apart / (2 * length))
    return [
        worst_case("ln P(not nearest) <= ln binomial tail", name, exact, "<=", binomial),
        worst_case("ln binomial tail <= Chernoff exponent", name, binomial, "<=", chernoff),
    ]


def check_gap(name: str, words: Tensor, weights: Tensor, vocab_size: int) -> list[Check]:
    """The Hamming-Bayes gap (eq. 18) of every sequence but the true word; positive where that word has w > 1/2."""
    apart = distances(words, sequences(vocab_size, words.shape[-1]))  # (B, S, K)
    risk = (apart * weights[:, None]).sum(-1)
    own = apart[..., 0] == 0
    gap = risk - risk[own][:, None]
    bound = (2 * weights[:, :1] - 1) * apart[..., 0]
    return [
        worst_case("(2w - 1) distance <= Hamming gap", name, bound[~own], "<=", gap[~own]),
        worst_case("0 < Hamming gap", name, torch.zeros(()), "<", gap[~own]),
    ]


def count_exceptions(words: Tensor, vocab_size: int, noise: float, weights: Tensor | None = None) -> dict[str, int]:
    """How often each claim on the decoding of one codebook (K, L) fails, over all noisy states.

    The likeliest words are the nearest ones. A word nearer than half the separation is the only likeliest one. Where
    one word has posterior above 1/2, the argmax of the denoiser's posterior spells it."""
    states, source = sequences(vocab_size, words.shape[-1]), codebook(words, vocab_size, weights)
    apart = distances(words[None], states)[0]  # (S, K)
    scores = source.weights * likelihood(apart, words.shape[-1], vocab_size, noise)
    posterior = scores / scores.sum(-1, keepdim=True)
    likeliest = posterior >= posterior.amax(-1, keepdim=True) * (1 - 1e-12)
    nearest = apart == apart.amin(-1, keepdim=True)
    near = 2 * apart < separation(words[None])  # (S, K)
    unique = likeliest & (likeliest.sum(-1, keepdim=True) == 1)
    argmax = process.posterior(probs_at(source, states, 1 - noise), states, 1 - noise).argmax(-1)
    sure = posterior.amax(-1) > 0.5
    misspelled = argmax[sure] != words[posterior.argmax(-1)[sure]]
    return {
        "states where the likeliest is not the nearest": int((likeliest != nearest).sum()),
        "states within half the separation of a word not decoded to it": int((near & ~unique).sum()),
        "tokens where argmax does not spell the mode": int(misspelled.sum()),
    }


def opposites(length: int) -> Tensor:
    """(1, 2, L): a codebook of 0 ... 0 and 1 ... 1."""
    return torch.tensor([0, 1])[None, :, None].expand(1, 2, length)


def checks() -> list[Check]:
    rows, random = [], random_words(RANDOM, 3, 5, 3, seed=10)
    for noise in (0.0, 0.02, 0.05):
        rows += check_nearest(f"{RANDOM:,} random codebooks, K=3, V=3, L=5, noise {noise}", random, 3, noise)
    for size, length, noise in ((2, 9, 0.3), (4, 5, 0.5)):
        exact, closed = float(not_nearest(opposites(length), size, noise)), not_nearest_of_two(length, size, noise)
        where = f"two words, V={size}, L={length}, noise {noise}"
        rows.append(Check("P(not nearest): enumeration = trinomial sum", where, exact, "=", closed))
    rows += check_nearest("two opposite words, V=2, L=9, noise 0.3", opposites(9), 2, 0.3)
    for noise in (0.1, 0.3):
        exact, where = math.log(not_nearest_of_two(96, 64, noise)), f"two words, V=64, L=128, noise {noise}"
        bound = float(log_chernoff(128, mismatch(noise, 64), torch.tensor(96 / 256, dtype=torch.float64)))
        rows.append(Check("ln P(not nearest) <= Chernoff exponent", where, exact, "<=", bound))
    for modes in (3, 2):
        weights = random_distributions(RANDOM, modes, seed=11) / 2
        weights[:, 0] += 0.5  # the true word has more than half
        rows += check_gap(f"{RANDOM:,} random codebooks, K={modes}, V=3, L=5", random[:, :modes], weights, 3)
    exceptions, name = [count_exceptions(words, 3, 0.3) for words in random[:DECODED]], "K=3, V=3, L=5, noise 0.3"
    return rows + [
        Check(claim, f"{DECODED} random codebooks, {name}", float(sum(one[claim] for one in exceptions)), "=", 0.0)
        for claim in exceptions[0]
    ]
