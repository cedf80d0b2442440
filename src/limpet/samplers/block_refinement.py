"""Block refinement: a quota of the surest tokens is committed in each call, and may be edited; the rest stay noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from limpet.diffusion import process
from limpet.samplers.base import Context, Sampler, State, StepInfo
from limpet.samplers.entropy_bound import Clock
from limpet.samplers.params import param
from limpet.samplers.predictions import DISTRIBUTION_HELP, WhichDistribution, anything, first, read, time_of


class Memory(NamedTuple):
    committed: Tensor  # (B, L) bool: the token stays, unless it is edited


@dataclass(frozen=True)
class BlockRefinement(Sampler):
    """Call r of N brings the committed tokens of L free positions to ceil((r + 1) L / N), the most confident first,
    and commits whatever else is more confident than the threshold; all others become uniform. The whole sequence is
    one block (LLaDA, arXiv 2502.09992; on uniform states as diffusers' scheduler of this name has it). A committed
    token that another, confident enough, contradicts may be edited (LLaDA2.1)."""

    nfe: int = param(64, "Network calls for one sample; the last commits what is left.", low=2)
    threshold: float = param(0.95, "Confidence above which a token is committed beyond the quota.", low=0, high=1)
    editing: float | None = param(None, "Confidence above which another token takes a committed one's place; None for "
                                 "never.", low=0, high=1)  # fmt: skip
    temperature: float = param(0.0, "Of the distributions that candidates are drawn from; 0 takes the argmax, whose confidence "
                              "is of the distribution as it is.", low=0, high=1e6)  # fmt: skip
    clock: Clock = param("share", "Which signal the denoiser is told: the share of committed tokens, or the uniform "
                        "grid's.")  # fmt: skip
    distribution: WhichDistribution = param("leave-one-out", DISTRIBUTION_HELP)

    def init(self, ctx: Context) -> State:
        return State(0, ctx.noise(), Memory(ctx.no_positions))

    def step(self, ctx: Context, state: State) -> tuple[State, StepInfo]:
        r, (committed,) = state.call, state.memory
        t = time_of(ctx, committed) if self.clock == "share" else process.uniform_grid(self.nfe)[r]
        (features,) = ctx.call(state, state.tokens, t)
        seen = read(ctx, features, r, self.temperature, self.distribution)

        target = ((r + 1) * ctx.generated + self.nfe - 1) // self.nfe
        waiting = ctx.free & ~committed
        due = first(seen.chance, waiting, target - committed.sum(-1))
        chosen = due | (waiting & (seen.chance > self.threshold))
        limit = torch.inf if self.editing is None else self.editing
        edited = committed & (seen.drawn != state.tokens) & (seen.chance > limit)
        tokens = torch.where(chosen | edited, seen.drawn, state.tokens)
        committed = committed | chosen
        tokens = torch.where(committed, tokens, anything(ctx, r))
        masks = {"committed": committed, "chosen": chosen, "edited": edited}
        told = float(t.mean()) if isinstance(t, Tensor) else t
        return state.next(tokens, features, Memory(committed)), StepInfo(
            r, told, state.tokens, seen.outcome(ctx, tokens), masks
        )
