"""Mend: committed reveal sampling that can revise committed tokens, a few per call and none near another."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from limpet.diffusion.backends import positions
from limpet.samplers.base import Context, State
from limpet.samplers.committed_values import Choice
from limpet.samplers.crs import CRS, FINAL_STEP_HELP, CRSFinalStep
from limpet.samplers.native import Native
from limpet.samplers.params import param


@dataclass(frozen=True)
class Mend(CRS):
    """CRS in which each call also revises the committed tokens that its predictions contradict most.

    If all tokens were revised at once, neighbours would change because of each other's old values. If one token is
    revised after another, each revision accounts for those before it. Few revisions per call, far apart, are close to
    that."""

    final_step: CRSFinalStep = param("keep", FINAL_STEP_HELP, since="warmup")
    late_top_p: float | None = param(0.8, "top_p after warmup. None: top_p.", above=0, high=1, since="warmup")
    budget: float = param(1.0, "Most deficit committed, per position of generated length.", low=0, since="warmup")
    spacing: int = param(2, "Positions committed in one call are more than this far apart.", low=0, since="warmup")
    revise: int | None = param(None, "Most tokens revised in one call. None: the length / 32.", low=0, since="warmup")
    revise_spacing: int = param(4, "Tokens revised in one call are more than this far apart.", low=0, since="warmup")
    revise_every: int | None = param(
        None, "Calls from one inspection of a committed token to the next. None: nfe / 32.", low=1, since="warmup"
    )
    own_turn: bool = param(
        False, "If interleaved, commit positions that step in the call, and revise even or odd ones.", since="warmup"
    )

    @property
    def can_revise(self) -> bool:
        return self.revise != 0 or super().can_revise

    def revisable(self, ctx: Context, state: State, visible: Tensor) -> Tensor | None:
        refreshed = super().revisable(ctx, state, visible)
        if self.revise == 0:
            return refreshed
        due = self.due(visible, state.call)
        return due if refreshed is None else due | refreshed

    def due(self, visible: Tensor, call: int) -> Tensor:
        """(B, L) bool: the visible committed tokens that a call inspects."""
        every = self.revise_every or -(-self.nfe // 32)
        return visible & ((positions(visible) + call) % every == 0)

    def may_commit(self, committed: Tensor, call: int) -> Tensor:
        return self.steps_now(committed, call) if self.own_turn else super().may_commit(committed, call)

    def update_values(self, choice: Choice) -> Tensor:
        """Commits new tokens, then revises those whose best alternative is more likely, the largest ratio first.

        The final step revises too, and commits nothing."""
        values = choice.values if choice.call == self.nfe - 1 else super().update_values(choice)
        gain = choice.outcome.gain
        if gain is None:
            return values
        contradicted = self.due(choice.visible, choice.call) & (gain > 0)
        if self.own_turn and self.interleave:
            worst = gain.masked_fill(~contradicted, -math.inf).argmax(-1, keepdim=True)
            contradicted &= (positions(gain) - worst) % 2 == 0
        count = self.revise_count(choice.ctx)
        revised = choice.ctx.backend.select(-gain, contradicted, count, math.inf, self.revise_spacing)
        return torch.where(revised, choice.outcome.top, values)

    def revise_count(self, ctx: Context) -> Tensor:
        """(B,) the most tokens that one call revises."""
        return (ctx.generated + 31) // 32 if self.revise is None else torch.full_like(ctx.generated, self.revise)

    def native_opening(self) -> Native | None:
        return self.native() if type(self) is Mend else None
