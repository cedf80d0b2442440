"""The two coins: a step without memory is a mixture of five routes, and their weights say which method it is.

From a token z at signal a, with the distribution h over V tokens:

    draw      from h if coin two agrees, else z stays
    uniform   any token if coin two agrees, else z stays
    fresh     from h
    noise     any token
    stay      z

Coin one chooses among them and does not look at the distribution. Coin two, tossed for the first two routes alone, agrees with
probability g = (1 - a) / (1 - a + a V h(z)). So noise and stay need neither the distribution nor the output head. Routes stand
in one order for all methods, so that methods which nearly agree, on the same uniforms, nearly draw the same."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

STAY, DRAW, UNIFORM, FRESH, NOISE = range(5)


class Coins(NamedTuple):
    """Coin two's signal, and up to which uniform coin one takes each route; beyond the last it stays."""

    signal: float
    draw: float
    uniform: float
    fresh: float
    noise: float

    @property
    def noisy(self) -> bool:
        """Whether a token may come from nowhere."""
        return self.noise > self.fresh


def nested(signal: float, draw: float, uniform: float = 0.0, fresh: float = 0.0, noise: float = 0.0) -> Coins:
    """Coins from the routes' weights; what is left stays."""
    up_to_uniform = draw + uniform
    return Coins(signal, draw, up_to_uniform, up_to_uniform + fresh, up_to_uniform + fresh + noise)


def ancestral(signal_t: float, signal_s: float) -> Coins:
    """The learned reverse transition, `process.reverse_probs`."""
    return psi(signal_t, signal_s, 1.0)


def psi(signal_t: float, signal_s: float, kappa: float) -> Coins:
    """Ancestral with probability kappa; else the posterior is drawn from and carried to s anew. The token at t then
    is forgotten, so that every position has its chance again; each position's marginal stays what it was."""
    a, b = signal_t, signal_s
    draw, uniform = (b - a) / (1 - a), (1 - a / b) * (1 - b) / (1 - a)
    return nested(a, kappa * draw + (1 - kappa) * b, kappa * uniform, noise=(1 - kappa) * (1 - b))


def coupled(signal_t: float, signal_s: float, stay: float) -> Coins:
    """DDIM for a discrete state: z stays with probability `stay`, at most (1 - signal_s) / (1 - signal_t), which is
    the maximal coupling; the posterior and noise share the rest so that marginals hold."""
    return nested(signal_t, signal_s - stay * signal_t, noise=1 - signal_s - stay * (1 - signal_t))


def redraw(signal: float) -> Coins:
    """A token at this level from the distribution of all others, whatever z was: a Gibbs move."""
    return nested(signal, 0.0, fresh=signal, noise=1 - signal)


def coin_one(u: Tensor, coins: Coins) -> Tensor:
    """The route, before the distribution is known."""
    route = torch.full_like(u, STAY, dtype=torch.int8)
    for name, limit in ((NOISE, coins.noise), (FRESH, coins.fresh), (UNIFORM, coins.uniform), (DRAW, coins.draw)):
        route[u < limit] = name
    return route


def coin_two(u: Tensor, prob_at_z: Tensor, signal: float, vocab_size: int) -> Tensor:
    """Whether it agrees."""
    return u * (1 - signal + signal * vocab_size * prob_at_z) < 1 - signal


def probs(probs: Tensor, z: Tensor, coins: Coins) -> Tensor:
    """(..., V) float64: the distribution of the next token, all routes together."""
    size, probs = probs.shape[-1], probs.to(torch.float64)
    agrees = (1 - coins.signal) / (1 - coins.signal + coins.signal * size * probs.gather(-1, z[..., None]))
    drawn, moved = coins.draw * agrees, (coins.uniform - coins.draw) * agrees
    other = (drawn + coins.fresh - coins.uniform) * probs + (moved + coins.noise - coins.fresh) / size
    return other + (1 - coins.noise + coins.uniform - drawn - moved) * torch.nn.functional.one_hot(z, size)
