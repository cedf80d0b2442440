"""DDIM for a uniform state: a token stays with a chosen probability, at most that of the maximal coupling.

The family follows denoising diffusion implicit models (arXiv 2010.02502, appendix A), with the learned posterior in
place of its argmax. With the maximal coupling the output distribution approaches the data distribution as the native
sampler's does, and is slightly closer. With a smaller probability each position keeps its marginal, but the joint
distribution is not exact."""

from __future__ import annotations

from dataclasses import dataclass

from limpet.diffusion.transitions import Coins, coupled
from limpet.samplers.native import Native
from limpet.samplers.params import param


@dataclass(frozen=True)
class DDIM(Native):
    """A position keeps its token, or is drawn from its posterior, or becomes noise."""

    stay: float = param(1.0, "How often a token stays, as a fraction of the maximum.", low=0, high=1)

    def coins(self, signal_t: float, signal_s: float, call: int) -> Coins:
        return coupled(signal_t, signal_s, self.stay * (1 - signal_s) / (1 - signal_t))
