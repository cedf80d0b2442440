"""Transitions without memory as mixtures of five routes, chosen by two coins; the weights define the method.

From a token z at signal a, with the predicted distribution h over V tokens:

    draw      a draw from h if coin two agrees, else z stays
    uniform   a uniform token if coin two agrees, else z stays
    fresh     a draw from h
    noise     a uniform token
    stay      z

Coin one chooses the route without the distribution. Coin two is used for the first two routes only and agrees with
probability (1 - a) / (1 - a + a V h(z)). So noise and stay need neither the distribution nor the output head.
All methods list the routes in the same order, so that similar methods draw similar tokens from the same uniforms."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

STAY, DRAW, UNIFORM, FRESH, NOISE = range(5)


class Coins(NamedTuple):
    """The signal for coin two, and for each route the uniform below which coin one takes it; above all, z stays."""

    signal: float
    draw: float
    uniform: float
    fresh: float
    noise: float

    @property
    def has_noise(self) -> bool:
        """Whether the route noise is possible."""
        return self.noise > self.fresh


def nested(signal: float, draw: float, uniform: float = 0.0, fresh: float = 0.0, noise: float = 0.0) -> Coins:
    """Coins from the weights of the routes. The route stay has the remaining weight."""
    up_to_uniform = draw + uniform
    return Coins(signal, draw, up_to_uniform, up_to_uniform + fresh, up_to_uniform + fresh + noise)


def ancestral(signal_t: float, signal_s: float) -> Coins:
    """The learned reverse transition, as in `process.reverse_probs`."""
    return psi(signal_t, signal_s, 1.0)


def psi(signal_t: float, signal_s: float, kappa: float) -> Coins:
    """The ancestral transition with probability kappa; otherwise a draw from the posterior, noised anew to signal_s.

    The second case forgets the token at t, so every position can change again. Each position keeps its marginal."""
    a, b = signal_t, signal_s
    draw, uniform = (b - a) / (1 - a), (1 - a / b) * (1 - b) / (1 - a)
    return nested(a, kappa * draw + (1 - kappa) * b, kappa * uniform, noise=(1 - kappa) * (1 - b))


def coupled(signal_t: float, signal_s: float, stay: float) -> Coins:
    """DDIM for a discrete state: z stays with probability `stay`, at most (1 - signal_s) / (1 - signal_t).

    The upper limit is the maximal coupling. The posterior and noise share the rest so that marginals are kept."""
    return nested(signal_t, signal_s - stay * signal_t, noise=1 - signal_s - stay * (1 - signal_t))


def redraw(signal: float) -> Coins:
    """A Gibbs move: a new token at this signal, given all other positions, whatever z was."""
    return nested(signal, 0.0, fresh=signal, noise=1 - signal)


def coin_one(u: Tensor, coins: Coins) -> Tensor:
    """The route of each uniform, as int8."""
    route = torch.full_like(u, STAY, dtype=torch.int8)
    for number, limit in ((NOISE, coins.noise), (FRESH, coins.fresh), (UNIFORM, coins.uniform), (DRAW, coins.draw)):
        route[u < limit] = number
    return route


def coin_two(u: Tensor, prob_at_z: Tensor, signal: float, vocab_size: int) -> Tensor:
    """Whether coin two agrees, given the uniform and the predicted probability of the current token."""
    return u * (1 - signal + signal * vocab_size * prob_at_z) < 1 - signal


def probs(probs: Tensor, z: Tensor, coins: Coins) -> Tensor:
    """(..., V) float64: the distribution of the next token, summed over the routes."""
    size, probs = probs.shape[-1], probs.to(torch.float64)
    agrees = (1 - coins.signal) / (1 - coins.signal + coins.signal * size * probs.gather(-1, z[..., None]))
    drawn, moved = coins.draw * agrees, (coins.uniform - coins.draw) * agrees
    other = (drawn + coins.fresh - coins.uniform) * probs + (moved + coins.noise - coins.fresh) / size
    return other + (1 - coins.noise + coins.uniform - drawn - moved) * torch.nn.functional.one_hot(z, size)
