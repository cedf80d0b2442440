"""The Gaussian path whose argmax is the uniform channel, so that one noise draw gives a state at every time.

With w = sqrt(sigmoid(-gamma)) onehot(x) + sqrt(sigmoid(gamma)) e, the argmax of w is x or a uniform token. Only two
things about the V normals e matter: that of x, and the largest of the others."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def signal(gamma: float | Tensor, vocab_size: int) -> Tensor:
    """The signals of the uniform channels that the argmax at each `gamma` is.

    P(x wins) = integral of phi(u - m) Phi(u)^(V - 1) du with m = e^(-gamma/2), over ten deviations round m."""
    mean = torch.exp(-torch.as_tensor(gamma, dtype=torch.float64) / 2)[..., None]
    away = torch.linspace(-10, 10, 4001, dtype=torch.float64, device=mean.device)
    log_density = -0.5 * away**2 - 0.5 * math.log(2 * math.pi)
    wins = torch.trapezoid(torch.exp(log_density + (vocab_size - 1) * torch.special.log_ndtr(mean + away)), away)
    return (vocab_size * wins - 1) / (vocab_size - 1)


def gamma_at(level: float, vocab_size: int) -> float:
    """The gamma of a given signal, by bisection: the signal falls as gamma grows."""
    low, high = -20.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if float(signal(middle, vocab_size)) > level else (low, middle)
    return (low + high) / 2


@dataclass(frozen=True)
class Path:
    """gamma runs linearly from one signal level at t = 0 to another at t = 1, for one vocabulary."""

    vocab_size: int
    first: float  # gamma at t = 0
    last: float  # gamma at t = 1

    def gamma(self, t: Tensor) -> Tensor:
        return self.first + t * (self.last - self.first)

    def signal(self, t: Tensor) -> Tensor:
        return signal(self.gamma(t), self.vocab_size)


def path(vocab_size: int, clean: float = 0.999, noisy: float = 0.006) -> Path:
    """The path whose signal goes from `clean` to `noisy`."""
    return Path(vocab_size, gamma_at(clean, vocab_size), gamma_at(noisy, vocab_size))


@dataclass(frozen=True)
class Noise:
    """All that the argmax at any gamma needs to know about V normals a position."""

    own: Tensor  # the normal of the clean token
    best: Tensor  # the largest of the other V - 1
    rival: Tensor  # which token that is


def draw(x: Tensor, vocab_size: int, generator: torch.Generator | None = None) -> Noise:
    """Noise for clean tokens x; the largest of V - 1 normals by the inverse of its distribution, Phi^(V - 1)."""
    u = torch.rand(x.shape, dtype=torch.float64, device=x.device, generator=generator).clamp_min(1e-300)
    best = -torch.special.ndtri(-torch.expm1(u.log() / (vocab_size - 1)))
    own = torch.randn(x.shape, dtype=torch.float64, device=x.device, generator=generator)
    other = torch.randint(vocab_size - 1, x.shape, device=x.device, generator=generator)
    return Noise(own, best, other + (other >= x))  # uniform over the tokens that are not x


def state(x: Tensor, gamma: Tensor, noise: Noise) -> Tensor:
    """The argmax at gamma (B,): the clean token where its normal plus e^(-gamma/2) beats every other."""
    return torch.where(torch.exp(-gamma / 2)[:, None] + noise.own > noise.best, x, noise.rival)
