"""The uniform-state diffusion process: schedules, forward and reverse distributions, conversions, time grids.

All functions are dense and compute in float64. The faster backends are tested against them. A distribution is a tensor
whose last axis runs over the V tokens. `signal` is 1 - noise: 1 for clean text, 0 for uniform noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

EPS = 1e-5  # the time of the final step: the last node of every grid
FLOOR = 1e-3  # the log-linear schedule's signal at t = 1; the cosine schedule shrinks its angle by the same factor


@dataclass(frozen=True)
class Schedule:
    """The signal as a function of time: about 1 at t = 0, about 0 at t = 1."""

    name: str
    _signal: Callable[[Tensor], Tensor]
    _slope: Callable[[Tensor], Tensor]

    def signal(self, t: float | Tensor) -> Tensor:
        """The signal at one time or several, in float64."""
        return self._signal(torch.as_tensor(t, dtype=torch.float64))

    def slope(self, t: float | Tensor) -> Tensor:
        """The derivative of the signal with respect to t, which is negative."""
        return self._slope(torch.as_tensor(t, dtype=torch.float64))

    @cache  # noqa: B019  there are few schedules, and few times on their grids
    def level(self, t: float) -> float:
        """The signal at one time, as a Python number."""
        return float(self.signal(t))

    def sigma(self, t: float | Tensor) -> Tensor:
        """-ln(signal), which the Duo network is conditioned on."""
        return -self.signal(t).log()


def _cosine_angle(t: Tensor) -> Tensor:
    return (math.pi / 2) * (1 - (1 - FLOOR) * t)


SCHEDULES = {
    "log-linear": Schedule(
        "log-linear",
        lambda t: 1 - (1 - FLOOR) * t,
        lambda t: torch.full_like(t, -(1 - FLOOR)),
    ),
    "cosine": Schedule(
        "cosine",
        lambda t: 1 - torch.cos(_cosine_angle(t)),
        lambda t: -torch.sin(_cosine_angle(t)) * (math.pi / 2) * (1 - FLOOR),
    ),
}
LOG_LINEAR = SCHEDULES["log-linear"]
LINEAR = Schedule("linear", lambda t: 1 - t, lambda t: torch.full_like(t, -1.0))
# The highest signal at which evidence is removed from a posterior. Above it, the network's own error is larger.
MAX_INFERRED_SIGNAL = 0.99


def inferred_signal(signal: float | Tensor, clean_share: Tensor) -> Tensor:
    """The signal that a network which is not given the time infers from its tokens, at most MAX_INFERRED_SIGNAL.

    signal: the level of the other tokens. clean_share: (B,) the share of tokens that hold no noise."""
    return (clean_share + (1 - clean_share) * signal).clamp(max=MAX_INFERRED_SIGNAL)


@cache
def clipped_snr(low: float = -9.0, high: float = 9.0) -> Schedule:
    """A schedule that is linear in t, from log-SNR `high` at t = 0 to log-SNR `low` at t = 1."""
    last, first = (1 / (1 + math.exp(-log_snr)) for log_snr in (low, high))
    return Schedule(
        f"clipped-snr {low:g} to {high:g}",
        lambda t: first - (first - last) * t,
        lambda t: torch.full_like(t, last - first),
    )


def _column(signal: float | Tensor, like: Tensor) -> Tensor:
    """A signal, one for all or one per leading axis, as a float64 tensor that broadcasts against a distribution."""
    signal = torch.as_tensor(signal, dtype=torch.float64, device=like.device)
    return signal.reshape(signal.shape + (1,) * (like.dim() - signal.dim()))


def _one_hot(x: Tensor, vocab_size: int) -> Tensor:
    return torch.nn.functional.one_hot(x, vocab_size).to(torch.float64)


def forward_probs(x: Tensor, signal: float | Tensor, vocab_size: int) -> Tensor:
    """q(t|0): the distribution of the noisy token given the clean token x (eq. 1), with one more axis than x.

    q(t|s) is the same function at signal_t / signal_s (eq. 2)."""
    probs = _one_hot(x, vocab_size)
    signal = _column(signal, probs)
    return signal * probs + (1 - signal) / vocab_size


def bridge(x: Tensor, z: Tensor, signal_t: float | Tensor, signal_s: float | Tensor, vocab_size: int) -> Tensor:
    """q(s|0,t): the distribution of the token at s given the clean token x and the token z at t (eq. 3)."""
    signal_t, signal_s = (torch.as_tensor(s, dtype=torch.float64) for s in (signal_t, signal_s))
    # q(z|y) is symmetric in z and y, so as a function of y it is the forward distribution from z.
    joint = forward_probs(x, signal_s, vocab_size) * forward_probs(z, signal_t / signal_s, vocab_size)
    return joint / joint.sum(-1, keepdim=True)


def posterior(probs: Tensor, z: Tensor, signal: float | Tensor) -> Tensor:
    """C_{t,z}: converts a leave-one-out distribution to the denoising posterior given the token z (eq. 5)."""
    joint = probs.to(torch.float64) * forward_probs(z, signal, probs.shape[-1])
    return joint / joint.sum(-1, keepdim=True)


def leave_one_out(probs: Tensor, z: Tensor, signal: float | Tensor) -> Tensor:
    """The inverse of `posterior`: removes the evidence of the token z from a denoising posterior."""
    joint = probs.to(torch.float64) / forward_probs(z, signal, probs.shape[-1])
    return joint / joint.sum(-1, keepdim=True)


def leave_one_out_logits(logits: Tensor, z: Tensor, signal: float | Tensor) -> Tensor:
    """`leave_one_out` on logits: it lowers only the logit of z, by ln(1 + V signal / noise).

    signal: one for all, or a tensor that broadcasts against z."""
    vocab_size = logits.shape[-1]
    if isinstance(signal, Tensor):
        shift = -(vocab_size * signal / (1 - signal)).log1p().to(logits.dtype).expand(z.shape)
    else:
        shift = logits.new_full(z.shape, -math.log1p(vocab_size * signal / (1 - signal)))
    return logits.scatter_add(-1, z.unsqueeze(-1), shift.unsqueeze(-1))


def reverse_probs(probs: Tensor, z: Tensor, signal_t: float | Tensor, signal_s: float | Tensor) -> Tensor:
    """pi(s|t): the reverse transition from the token z, given its leave-one-out distribution (eq. 7).

    The sum over clean tokens of bridge times posterior equals a mixture with closed-form weights: stay at z, draw from
    the distribution, draw uniformly."""
    probs = probs.to(torch.float64)
    vocab_size = probs.shape[-1]
    stay = _one_hot(z, vocab_size)
    signal_t, signal_s = _column(signal_t, probs), _column(signal_s, probs)
    prob_at_z = probs.gather(-1, z.unsqueeze(-1))
    weight_stay = signal_t * vocab_size * prob_at_z + (signal_t / signal_s - signal_t)
    weight_draw = signal_s - signal_t
    weight_uniform = (1 - signal_t / signal_s) * (1 - signal_s)
    total = signal_t * vocab_size * prob_at_z + (1 - signal_t)
    return (weight_stay * stay + weight_draw * probs + weight_uniform / vocab_size) / total


def warmup_steps(nfe: int, warmup: float) -> int:
    """W = round(f (N - 1)): the number of warmup transitions, of N - 1 in all (appendix A)."""
    return round(warmup * (nfe - 1))


@cache
def uniform_grid(nfe: int, warmup: float = 0.0) -> tuple[float, ...]:
    """N equally spaced times from 1 to EPS. The warmup is ignored."""
    return tuple(torch.linspace(1, EPS, nfe, dtype=torch.float64).tolist())


@cache
def two_piece_grid(nfe: int, warmup: float) -> tuple[float, ...]:
    """W equal steps from 1 to 1 - f, then equal steps to EPS, so that the first selection is at 1 - f for every N."""
    first = warmup_steps(nfe, warmup)
    if first in (0, nfe - 1):
        return uniform_grid(nfe)
    split = 1 - warmup * (1 - EPS)
    early = torch.linspace(1, split, first + 1, dtype=torch.float64)
    late = torch.linspace(split, EPS, nfe - first, dtype=torch.float64)
    return *early.tolist(), *late[1:].tolist()


@cache
def quadratic_grid(nfe: int, warmup: float = 0.0) -> tuple[float, ...]:
    """Squares of N equally spaced numbers, from 1 to EPS. The warmup is ignored.

    Steps become smaller toward the end, so more calls are made on a nearly clean state and can correct it."""
    return tuple((torch.linspace(1, math.sqrt(EPS), nfe, dtype=torch.float64) ** 2).tolist())


GRIDS: dict[str, Callable[[int, float], tuple[float, ...]]] = {
    "two-piece": two_piece_grid,
    "uniform": uniform_grid,
    "quadratic": quadratic_grid,
}
