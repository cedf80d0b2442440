"""Transitions by two coins: their mixtures against the dense distributions, and the marginals that they keep."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from limpet.diffusion import process, transitions
from limpet.diffusion.transitions import Coins

UNEVEN = [0.35, 0.05, 0.2, 0.1, 0.02, 0.18, 0.07, 0.03]
SPANS = [(0.001, 0.1), (0.5, 0.6), (0.99, 0.999), (0.7, 1.0)]  # signals before and after
METHODS: dict[str, Coins] = {
    **{f"ancestral {t} {s}": transitions.ancestral(t, s) for t, s in SPANS},
    **{f"psi {t} {s} {kappa}": transitions.psi(t, s, kappa) for t, s in SPANS for kappa in (0.0, 0.6)},
    **{
        f"coupled {t} {s} {share}": transitions.coupled(t, s, share * (1 - s) / (1 - t))
        for t, s in SPANS
        for share in (0.0, 0.5, 1.0)
    },
    "redraw": transitions.redraw(0.7),
    "all five": transitions.nested(0.4, 0.3, 0.1, 0.25, 0.2),
}


@pytest.mark.parametrize("method", METHODS)
def test_the_routes_add_up_to_the_distribution(method: str) -> None:
    """The shares of coin one from a fine grid of uniforms, the odds of coin two in closed form."""
    n, coins = 2**20, METHODS[method]
    route = transitions.coin_one((torch.arange(n, dtype=torch.float64) + 0.5) / n, coins)
    stay, draw, uniform, fresh, noise = (route.bincount(minlength=5) / n).tolist()
    probs = torch.tensor(UNEVEN, dtype=torch.float64)
    for z in range(len(probs)):
        odds = (1 - coins.signal) / (1 - coins.signal + coins.signal * len(probs) * probs[z])
        mixed = odds * (draw * probs + uniform / len(probs)) + fresh * probs + noise / len(probs)
        mixed[z] += (draw + uniform) * (1 - odds) + stay
        torch.testing.assert_close(
            mixed, transitions.probs(probs[None], torch.tensor([z]), coins)[0], rtol=0, atol=5e-6
        )


@pytest.mark.parametrize(("signal_t", "signal_s"), SPANS)
def test_ancestral_coins_give_the_reverse_distribution(signal_t: float, signal_s: float) -> None:
    probs, z = torch.tensor(UNEVEN, dtype=torch.float64).expand(8, 8), torch.arange(8)
    exact = process.reverse_probs(probs, z, signal_t, signal_s)
    ancestral = transitions.ancestral(signal_t, signal_s)
    torch.testing.assert_close(transitions.probs(probs, z, ancestral), exact, rtol=1e-12, atol=1e-15)
    assert transitions.psi(signal_t, signal_s, 1.0) == ancestral


@pytest.mark.parametrize(("signal_t", "signal_s"), SPANS)
@given(kappa=st.floats(0, 1), share=st.floats(0, 1), seed=st.integers(0, 999))
@settings(max_examples=40)
def test_every_method_keeps_the_marginal(
    signal_t: float, signal_s: float, kappa: float, share: float, seed: int
) -> None:
    """A token with its marginal at level t has its marginal at level s after the step: Psi at any kappa, the coupling
    at any share of its largest, a redraw at its own level."""
    probs = torch.rand(1, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).pow(4)
    probs = probs / probs.sum()
    coupled = transitions.coupled(signal_t, signal_s, share * (1 - signal_s) / (1 - signal_t))
    methods = [
        (transitions.psi(signal_t, signal_s, kappa), signal_s),
        (transitions.redraw(signal_t), signal_t),
        (coupled, signal_s),
    ]
    before = signal_t * probs[0] + (1 - signal_t) / 7
    for coins, level in methods:
        assert all(0 <= a <= b + 1e-12 <= 1 + 2e-12 for a, b in itertools.pairwise(coins[1:]))
        after = before @ transitions.probs(probs.expand(7, 7), torch.arange(7), coins)
        torch.testing.assert_close(after, level * probs[0] + (1 - level) / 7, rtol=1e-9, atol=1e-12)
