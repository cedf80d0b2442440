"""Tests of a backend: one step on given logits, and whether its draws have the right distribution."""

from __future__ import annotations

import torch
from torch import Tensor

from limpet.diffusion.backends import Backend, Head, NetworkCall, Outcome, Transition
from limpet.diffusion.rng import CounterRNG
from limpet.diffusion.transitions import Coins, ancestral
from limpet.diffusion.transitions import probs as transition_probs
from limpet.diffusion.truncation import ALL_TOKENS, Support, truncate

HALFWAY = ancestral(0.4, 0.7)


def network_call(transition: Transition, vocab_size: int, rng: CounterRNG, convert: bool = False) -> NetworkCall:
    """A network call whose input is the state of the transition."""
    nonfinite_at = torch.full((2,), -1, device=transition.tokens.device)
    return NetworkCall(transition.tokens, transition.coins.signal, vocab_size, convert, rng, nonfinite_at, "a test")


def step(
    backend: Backend, logits: Tensor, transition: Transition, call: NetworkCall, head: Head = lambda rows: rows
) -> Outcome:
    """One step of a backend. `logits` (B, L, ...) are the features: logits, or what `head` turns into logits."""
    return backend.advance(head, logits, backend.plan(transition, call))


def p_value(
    backend: Backend,
    probs: Tensor,
    support: Support = ALL_TOKENS,
    coins: Coins = HALFWAY,
    seed: int = 0,
    device: str | torch.device = "cpu",
    shape: tuple[int, int] = (200, 1000),
) -> float:
    """The p-value of many draws of one step from token 1, against the exact distribution.

    probs: (V,) the predicted distribution. shape: the number of draws, as a batch."""
    every = torch.ones(shape, dtype=torch.bool, device=device)
    transition = Transition(0, every.long(), every, ~every, coins, support=support)
    call = network_call(transition, len(probs), CounterRNG(seed, torch.arange(shape[0], device=device)))
    drawn = step(backend, probs.log().float().to(device).expand(*shape, -1), transition, call).tokens
    exact = transition_probs(truncate(probs, support), torch.tensor(1), coins)
    return chi_square(torch.bincount(drawn.flatten().cpu(), minlength=len(probs)), exact)


def chi_square(counts: Tensor, probs: Tensor) -> float:
    """The p-value of Pearson's test; 0 if a token of probability zero was drawn."""
    possible = probs > 0
    if counts[~possible].any():
        return 0.0
    expected = probs[possible] * counts.sum()
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    freedom = torch.tensor(float(possible.sum() - 1), dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2)) if freedom else 1.0
