"""Mend: committed reveal sampling whose labels can change their mind, a few at a time and never two neighbours."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from limpet.samplers.committed_values import Choice
from limpet.samplers.base import Context, State
from limpet.samplers.crs import CRS, CRSFinalStep
from limpet.samplers.native import Native
from limpet.samplers.params import param


@dataclass(frozen=True)
class Mend(CRS):
    """CRS, and each call gives a new value to the visible labels that its distribution contradicts most.

    To change all labels at once would let neighbours give way to each other; one after the other, each change sees
    those before it. So few change in one call, and these far apart: nearly what one after the other would do."""

    final_step: CRSFinalStep = param("keep", "The last call: the argmax of the distribution; one more draw (the released code's way); "
                             "or labels copied and one more draw elsewhere.", since="warmup")  # fmt: skip
    late_top_p: float | None = param(
        0.8, "Mass of the nucleus that steps after warmup draw from; None for top_p.", above=0, high=1, since="warmup"
    )
    budget: float = param(1.0, "Total deficit that may be committed along the path, as a fraction of the generated "
                         "length.", low=0, since="warmup")  # fmt: skip
    spacing: int = param(2, "Positions committed in one call are more than this far apart.", low=0, since="warmup")
    revise: int | None = param(None, "Most labels mended in one call; None for a thirty-second of the generated length, "
                            "rounded up.", low=0, since="warmup")  # fmt: skip
    revise_spacing: int = param(4, "Labels mended in one call are more than this far apart.", low=0, since="warmup")
    revise_every: int | None = param(None, "A label is looked at again every so many calls: more is cheaper. None for a "
                             "thirty-second of nfe, rounded up.", low=1, since="warmup")  # fmt: skip

    @property
    def mends(self) -> bool:
        return self.revise != 0 or super().mends

    def doubted(self, ctx: Context, state: State, visible: Tensor) -> Tensor | None:
        if self.revise == 0:
            return super().doubted(ctx, state, visible)
        due, other = self.due(visible, state.call), super().doubted(ctx, state, visible)
        return due if other is None else due | other

    def due(self, visible: Tensor, call: int) -> Tensor:
        """(B, L) bool: the visible labels whose turn it is."""
        position, turns = torch.arange(visible.shape[1], device=visible.device), self.revise_every or -(-self.nfe // 32)
        return visible & ((position + call) % turns == 0)

    def relabel(self, choice: Choice) -> Tensor:
        """New labels first, then the mended: the distribution at another token exceeds that at the label, the most first.

        The final step mends too, and does nothing else to labels."""
        stored = choice.labels if choice.call == self.nfe - 1 else super().relabel(choice)
        gain = choice.outcome.gain
        if gain is None:
            return stored
        wrong = self.due(choice.visible, choice.call) & (gain > 0)
        mended = choice.ctx.backend.select(-gain, wrong, self.most(choice.ctx), math.inf, self.revise_spacing)
        return torch.where(mended, choice.outcome.top, stored)

    def native_opening(self) -> Native | None:
        return self.native() if type(self) is Mend else None

    def most(self, ctx: Context) -> Tensor:
        """(B,) how many labels may be mended in one call."""
        return (ctx.generated + 31) // 32 if self.revise is None else torch.full_like(ctx.generated, self.revise)
