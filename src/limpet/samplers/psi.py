"""Psi samplers: native steps that with some probability forget the current token and draw it again from its posterior.

Diffusion Duality, chapter II (arXiv 2602.21185); for a masked state, ReMDM (arXiv 2503.00307). Each position keeps its
marginal, but the joint distribution is not exact. The authors' scripts use 256 steps: rescale with eta .05 and top-p
.9; cap with .01 and .9; loop with .01 and .95."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from limpet.diffusion.process import EPS, FLOOR
from limpet.diffusion.transitions import Coins, ancestral, psi
from limpet.samplers.native import Native
from limpet.samplers.params import param

Rule = Literal["cap", "rescale", "rescale-remdm", "loop", "constant"]

LOOP_SIGNAL = 0.9  # the signal during the loop
BEFORE_LOOP, AFTER_LOOP = 0.45, 0.05  # fractions of the steps

# The papers' sigma, as a function of eta, the largest possible sigma, and the signals before and after the step.
RULES: dict[Rule, Callable[[float, float, float, float], float]] = {
    "cap": lambda eta, most, a, b: min(eta, most),
    "rescale": lambda eta, most, a, b: eta * min(eta, most),
    "rescale-remdm": lambda eta, most, a, b: eta * most,
    "loop": lambda eta, most, a, b: eta if a == b else 0.0,
    "constant": lambda eta, most, a, b: eta * (1 - b),
}


@dataclass(frozen=True)
class Psi(Native):
    """Native steps that sometimes forget the current token and draw it again from its posterior, with new noise.

    A step is native with probability kappa = 1 - sigma / (1 - signal after it)."""

    rule: Rule = param(
        "rescale",
        "How sigma follows from eta: at most eta (cap); rescaled as in the authors' code or as in ReMDM; eta in a loop "
        "at signal .9, which has its own times; or constant, so that kappa is 1 - eta.",
    )
    eta: float = param(0.05, "How often tokens are drawn again. At 0 the steps are native.", low=0, high=1)
    start: float = param(0.0, "Steps that start below this signal are native.", low=0, high=1)
    stop: float = param(1.0, "Steps that start at or above this signal are native.", low=0, high=1)

    @property
    def times(self) -> tuple[float, ...]:
        return loop_grid(self.nfe) if self.rule == "loop" else super().times

    def coins(self, signal_t: float, signal_s: float, call: int) -> Coins:
        if signal_s == 1 or not self.start <= signal_t < self.stop:
            return ancestral(signal_t, signal_s)  # both kinds of step draw clean text from the posterior
        most = min(1.0, (1 - signal_s) / signal_t) if signal_t > 0 else 1.0
        sigma = RULES[self.rule](self.eta, most, signal_t, signal_s)
        return psi(signal_t, signal_s, max(0.0, 1 - sigma / (1 - signal_s)))


@cache
def loop_grid(nfe: int) -> tuple[float, ...]:
    """The times of the rule `loop`, on the log-linear schedule: 45% of the steps to signal .9, 50% there, 5% to EPS.

    With few steps, the last part has at least one, then the first part, then the loop."""
    steps, loop_time = nfe - 1, (1 - LOOP_SIGNAL) / (1 - FLOOR)
    last = max(1, round(AFTER_LOOP * steps))
    first = min(steps - last, max(1, round(BEFORE_LOOP * steps)))
    if not first:
        return 1.0, EPS
    down = torch.linspace(1, loop_time, first + 1, dtype=torch.float64)[:-1]
    end = torch.linspace(loop_time, EPS, last + 1, dtype=torch.float64)
    return *down.tolist(), *[loop_time] * (steps - first - last), *end.tolist()
