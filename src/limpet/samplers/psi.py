"""Psi samplers: native steps, and with some probability the token at a position is drawn anew from its posterior.

Diffusion Duality, chapter II (arXiv 2602.21185); for a masked state, ReMDM (arXiv 2503.00307). Each position's marginal
stays what it was, the joint distribution does not quite. The authors' scripts take 256 steps, with rescale, eta .05 and top-p
.9; cap, .01 and .9; loop, .01 and .95."""

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

LOOP = 0.9  # the signal that the loop stays at
DOWN, LAST = 0.45, 0.05  # of the steps: those before the loop, and those after it

# The papers' sigma, of eta, the largest that it could be, and the signals before and after the step.
RULES: dict[Rule, Callable[[float, float, float, float], float]] = {
    "cap": lambda eta, most, a, b: min(eta, most),
    "rescale": lambda eta, most, a, b: eta * min(eta, most),
    "rescale-remdm": lambda eta, most, a, b: eta * most,
    "loop": lambda eta, most, a, b: eta if a == b else 0.0,
    "constant": lambda eta, most, a, b: eta * (1 - b),
}


@dataclass(frozen=True)
class Psi(Native):
    """A step is the native one with probability kappa = 1 - sigma / (1 - signal after it), and else forgets the token
    that it starts from, all but what it says of the clean one."""

    rule: Rule = param("rescale", "How sigma follows from eta: at most eta; rescaled as in the authors' code, or as in "
                      "ReMDM; eta in a loop at signal .9, which has its own times; or so that kappa is 1 - eta "
                      "throughout.")  # fmt: skip
    eta: float = param(0.05, "How much is drawn anew; with 0 the steps are native.", low=0, high=1)
    start: float = param(0.0, "Steps from a signal below this are native.", low=0, high=1)
    stop: float = param(1.0, "Steps from this signal on are native.", low=0, high=1)

    @property
    def times(self) -> tuple[float, ...]:
        return loop_grid(self.nfe) if self.rule == "loop" else super().times

    def coins(self, signal_t: float, signal_s: float, call: int) -> Coins:
        if signal_s == 1 or not self.start <= signal_t < self.stop:
            return ancestral(signal_t, signal_s)  # clean text is drawn from the posterior either way
        most = min(1.0, (1 - signal_s) / signal_t) if signal_t > 0 else 1.0
        sigma = RULES[self.rule](self.eta, most, signal_t, signal_s)
        return psi(signal_t, signal_s, max(0.0, 1 - sigma / (1 - signal_s)))


@cache
def loop_grid(nfe: int) -> tuple[float, ...]:
    """45% of the steps down to signal .9 on the log-linear schedule, 50% there, 5% down to EPS; at least one for the
    way down, then for the end, then for the loop."""
    steps, there = nfe - 1, (1 - LOOP) / (1 - FLOOR)
    last = max(1, round(LAST * steps))
    first = min(steps - last, max(1, round(DOWN * steps)))
    if not first:
        return 1.0, EPS
    down = torch.linspace(1, there, first + 1, dtype=torch.float64)[:-1]
    end = torch.linspace(there, EPS, last + 1, dtype=torch.float64)
    return *down.tolist(), *[there] * (steps - first - last), *end.tolist()
