"""DDIM for a uniform state: a token stays with a probability of its own, at most that of the maximal coupling.

The family is that of denoising diffusion implicit models (arXiv 2010.02502, appendix A), with the learned posterior in
place of its argmax. The maximal coupling is exact: its output distribution nears the data distribution as the native sampler's does, and
lies a little closer. With fewer tokens that stay it keeps each position's marginal, not the joint distribution."""

from __future__ import annotations

from dataclasses import dataclass

from limpet.diffusion.transitions import Coins, coupled
from limpet.samplers.native import Native
from limpet.samplers.params import param


@dataclass(frozen=True)
class DDIM(Native):
    """A position keeps its token, or is drawn from its posterior, or is noise."""

    stay: float = param(1.0, "How often a token stays, as a fraction of what marginals allow: 1 is the maximal "
                       "coupling, in which no step makes noise; with 0 every step draws all anew.", low=0,
                       high=1)  # fmt: skip

    def coins(self, signal_t: float, signal_s: float, call: int) -> Coins:
        return coupled(signal_t, signal_s, self.stay * (1 - signal_s) / (1 - signal_t))
