"""A backend on trial: one step on logits that are given, and whether what it draws has the distribution that it should."""

from __future__ import annotations

import torch
from torch import Tensor

from limpet.diffusion.backends import Backend, Head, NetworkCall, Outcome, Transition
from limpet.diffusion.rng import CounterRNG
from limpet.diffusion.transitions import Coins, ancestral
from limpet.diffusion.transitions import probs as probs_of
from limpet.diffusion.truncation import EVERY, Support, cut

HALFWAY = ancestral(0.4, 0.7)


def input_of(transition: Transition, vocab_size: int, rng: CounterRNG, convert: bool = False) -> NetworkCall:
    """What a model was shown that saw the state itself."""
    nonfinite_at = torch.full((2,), -1, device=transition.tokens.device)
    return NetworkCall(transition.tokens, transition.coins.signal, vocab_size, convert, rng, nonfinite_at, "a model on trial")


def step(
    backend: Backend, logits: Tensor, transition: Transition, input: NetworkCall, head: Head = lambda rows: rows
) -> Outcome:
    """One step, where the features (B, L, ...) are logits or what a head makes logits of."""
    return backend.advance(head, logits, backend.plan(transition, input))


def fit(
    backend: Backend, probs: Tensor, support: Support = EVERY, coins: Coins = HALFWAY, seed: int = 0,
    device: str | torch.device = "cpu", shape: tuple[int, int] = (200, 1000),
) -> float:  # fmt: skip
    """The p-value of many draws of one step from token 1, against the dense distribution."""
    every = torch.ones(shape, dtype=torch.bool, device=device)
    asked = Transition(0, every.long(), every, ~every, coins, support=support)
    shown = input_of(asked, len(probs), CounterRNG(seed, torch.arange(shape[0], device=device)))
    drawn = step(backend, probs.log().float().to(device).expand(*shape, -1), asked, shown).tokens
    exact = probs_of(cut(probs, support), torch.tensor(1), coins)
    return chi_square(torch.bincount(drawn.flatten().cpu(), minlength=len(probs)), exact)


def chi_square(counts: Tensor, probs: Tensor) -> float:
    """The p-value of Pearson's test; 0 where something impossible came."""
    possible = probs > 0
    if counts[~possible].any():
        return 0.0
    expected = probs[possible] * counts.sum()
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    freedom = torch.tensor(float(possible.sum() - 1), dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2)) if freedom else 1.0
