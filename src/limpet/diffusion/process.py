"""The uniform channel: schedules, forward distributions, bridge, leave-one-out and posterior, reverse distribution, time grids.

Everything here is dense and float64: it is what every faster path is tested against.
A distribution is a tensor whose last axis runs over the V tokens; `signal` is 1 - noise (1 clean, 0 uniform).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

EPS = 1e-5  # the last node of every grid: the final step's time
FLOOR = 1e-3  # the signal that both schedules keep at t = 1


@dataclass(frozen=True)
class Schedule:
    """How the signal falls from 1 at t = 0 to about 0 at t = 1, and how fast."""

    name: str
    _signal: Callable[[Tensor], Tensor]
    _slope: Callable[[Tensor], Tensor]

    def signal(self, t: float | Tensor) -> Tensor:
        return self._signal(torch.as_tensor(t, dtype=torch.float64))

    def slope(self, t: float | Tensor) -> Tensor:
        """d signal / dt, negative."""
        return self._slope(torch.as_tensor(t, dtype=torch.float64))

    @cache  # noqa: B019  schedules are few, and so are the times of grids
    def level(self, t: float) -> float:
        """The signal at one time, as a number."""
        return float(self.signal(t))

    def sigma(self, t: float | Tensor) -> Tensor:
        """-ln signal: what the Duo network is conditioned on."""
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
CLEAREST = 0.99  # the most signal whose evidence is taken out of a posterior: beyond, a network's own error is larger


def seen_signal(signal: float | Tensor, clean: Tensor) -> Tensor:
    """The signal that tokens look to have to a network that is told no time, where a share of them is clean (B,) and
    the rest at `signal`; at most CLEAREST."""
    return (clean + (1 - clean) * signal).clamp(max=CLEAREST)


@cache
def clipped_snr(low: float = -9.0, high: float = 9.0) -> Schedule:
    """A signal that falls evenly between the two whose log-odds (log-SNR) are `high`, at t = 0, and `low`, at t = 1."""
    last, first = (1 / (1 + math.exp(-odds)) for odds in (low, high))
    return Schedule(
        f"clipped-snr {low:g} to {high:g}",
        lambda t: first - (first - last) * t,
        lambda t: torch.full_like(t, last - first),
    )


def _column(signal: float | Tensor, like: Tensor) -> Tensor:
    """A signal level, one for all or one per leading axis, as a float64 that broadcasts against a distribution."""
    signal = torch.as_tensor(signal, dtype=torch.float64, device=like.device)
    return signal.reshape(signal.shape + (1,) * (like.dim() - signal.dim()))


def _point(x: Tensor, vocab_size: int) -> Tensor:
    return torch.nn.functional.one_hot(x, vocab_size).to(torch.float64)


def forward_probs(x: Tensor, signal: float | Tensor, vocab_size: int) -> Tensor:
    """q(t|0): the distribution of the noisy token given the clean token x (eq. 1).

    q(t|s) is the same channel at signal_t / signal_s (eq. 2)."""
    probs = _point(x, vocab_size)
    signal = _column(signal, probs)
    return signal * probs + (1 - signal) / vocab_size


def bridge(x: Tensor, z: Tensor, signal_t: float | Tensor, signal_s: float | Tensor, vocab_size: int) -> Tensor:
    """q(s|0,t): the distribution of the token at s given the clean token x and the token z at t (eq. 3)."""
    signal_t, signal_s = (torch.as_tensor(s, dtype=torch.float64) for s in (signal_t, signal_s))
    # The channel is symmetric, so q(z|y) read along y is the forward distribution started at z.
    joint = forward_probs(x, signal_s, vocab_size) * forward_probs(z, signal_t / signal_s, vocab_size)
    return joint / joint.sum(-1, keepdim=True)


def posterior(probs: Tensor, z: Tensor, signal: float | Tensor) -> Tensor:
    """C_{t,z}: from the leave-one-out distribution to the ordinary denoising posterior (eq. 5)."""
    joint = probs.to(torch.float64) * forward_probs(z, signal, probs.shape[-1])
    return joint / joint.sum(-1, keepdim=True)


def leave_one_out(probs: Tensor, z: Tensor, signal: float | Tensor) -> Tensor:
    """The inverse of `posterior`: take the evidence of the token z itself out of a denoising posterior."""
    joint = probs.to(torch.float64) / forward_probs(z, signal, probs.shape[-1])
    return joint / joint.sum(-1, keepdim=True)


def leave_one_out_logits(logits: Tensor, z: Tensor, signal: float | Tensor) -> Tensor:
    """`leave_one_out` on logits, at one signal or one each: it moves only the logit of z, by
    -ln(1 + V signal / noise)."""
    if isinstance(signal, Tensor):
        shift = -(logits.shape[-1] * signal / (1 - signal)).log1p().to(logits.dtype).expand(z.shape)
        return logits.scatter_add(-1, z.unsqueeze(-1), shift.unsqueeze(-1))
    down = logits.new_full((*z.shape, 1), -math.log1p(logits.shape[-1] * signal / (1 - signal)))
    return logits.scatter_add(-1, z.unsqueeze(-1), down)


def reverse_probs(probs: Tensor, z: Tensor, signal_t: float | Tensor, signal_s: float | Tensor) -> Tensor:
    """pi(s|t): the reverse transition of a leave-one-out distribution at the current token z (eq. 7).

    The sum over clean tokens of bridge times posterior collapses to a mixture of three routes:
    stay at z, draw from the distribution, draw uniformly."""
    probs = probs.to(torch.float64)
    vocab_size = probs.shape[-1]
    stay = _point(z, vocab_size)
    signal_t, signal_s = _column(signal_t, probs), _column(signal_s, probs)
    prob_at_z = probs.gather(-1, z.unsqueeze(-1))
    weight_stay = signal_t * vocab_size * prob_at_z + (signal_t / signal_s - signal_t)
    weight_draw = signal_s - signal_t
    weight_uniform = (1 - signal_t / signal_s) * (1 - signal_s)
    total = signal_t * vocab_size * prob_at_z + (1 - signal_t)
    return (weight_stay * stay + weight_draw * probs + weight_uniform / vocab_size) / total


def warmup_steps(nfe: int, warmup: float) -> int:
    """W = round(f (N - 1)), of the N - 1 transitions (appendix A)."""
    return round(warmup * (nfe - 1))


@cache
def uniform_grid(nfe: int, warmup: float = 0.0) -> tuple[float, ...]:
    """N equally spaced times from 1 to EPS, the last the final step's; they know no warmup."""
    return tuple(torch.linspace(1, EPS, nfe, dtype=torch.float64).tolist())


@cache
def two_piece_grid(nfe: int, warmup: float) -> tuple[float, ...]:
    """W equal steps down to t = 1 - f, then the rest down to EPS: the first selection is at 1 - f for every N."""
    first = warmup_steps(nfe, warmup)
    if first in (0, nfe - 1):
        return uniform_grid(nfe)
    split = 1 - warmup * (1 - EPS)
    early = torch.linspace(1, split, first + 1, dtype=torch.float64)
    late = torch.linspace(split, EPS, nfe - first, dtype=torch.float64)
    return *early.tolist(), *late[1:].tolist()


@cache
def quadratic_grid(nfe: int, warmup: float = 0.0) -> tuple[float, ...]:
    """Squares of N equally spaced numbers, from 1 to EPS: steps shrink on the way down, so that more of the calls see a
    state which is nearly clean, and can still take back what the others contradict. They know no warmup."""
    return tuple((torch.linspace(1, math.sqrt(EPS), nfe, dtype=torch.float64) ** 2).tolist())


GRIDS: dict[str, Callable[[int, float], tuple[float, ...]]] = {
    "two-piece": two_piece_grid, "uniform": uniform_grid, "quadratic": quadratic_grid
}  # fmt: skip
