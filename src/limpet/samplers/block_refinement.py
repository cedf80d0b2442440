"""Block refinement: each call commits a quota of its most confident tokens; the others stay noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from limpet.diffusion import process
from limpet.samplers.base import Context, Sampler, State, StepInfo
from limpet.samplers.params import param, refresh_param
from limpet.samplers.predictions import (
    CLOCK_HELP,
    DISTRIBUTION_HELP,
    Clock,
    WhichDistribution,
    best_positions,
    read_predictions,
    time_of_share,
    uniform_tokens,
)


class BlockRefinementMemory(NamedTuple):
    """What block refinement stores."""

    committed: Tensor  # (B, L) bool: the token stays, unless it is edited


@dataclass(frozen=True)
class BlockRefinement(Sampler):
    """Each call commits its most confident tokens up to a quota, and all above a threshold; the others become noise.

    Call r of N raises the number of committed tokens to ceil((r + 1) L / N) of L. The whole sequence is one block
    (LLaDA, arXiv 2502.09992; on uniform states as in diffusers' scheduler). A committed token may be edited
    if another token is confident enough (LLaDA2.1)."""

    nfe: int = param(64, "Network calls per sample; the last commits the remaining tokens.", low=2)
    refresh: int = refresh_param()
    threshold: float = param(0.95, "Confidence above which a token is committed beyond the quota.", low=0, high=1)
    editing: float | None = param(
        None, "Confidence that replaces a committed token. None: never replaced.", low=0, high=1
    )
    temperature: float = param(
        0.0, "Softmax temperature of the draws. At 0 the argmax is taken, with its confidence at 1.", low=0, high=1e6
    )
    clock: Clock = param("share", CLOCK_HELP.format("committed"))
    distribution: WhichDistribution = param("leave-one-out", DISTRIBUTION_HELP)

    def init(self, ctx: Context) -> State:
        return State(0, ctx.noise(), BlockRefinementMemory(ctx.no_positions))

    def step(self, ctx: Context, state: State) -> tuple[State, StepInfo]:
        r, (committed,) = state.call, state.memory
        t = time_of_share(ctx, committed) if self.clock == "share" else process.uniform_grid(self.nfe)[r]
        (features,) = ctx.call(state, state.tokens, t)
        predictions = read_predictions(ctx, features, r, self.temperature, self.distribution)

        quota = ((r + 1) * ctx.generated + self.nfe - 1) // self.nfe
        waiting = ctx.free & ~committed
        due = best_positions(predictions.drawn_prob, waiting, quota - committed.sum(-1))
        chosen = due | (waiting & (predictions.drawn_prob > self.threshold))
        limit = torch.inf if self.editing is None else self.editing
        edited = committed & (predictions.drawn != state.tokens) & (predictions.drawn_prob > limit)
        tokens = torch.where(chosen | edited, predictions.drawn, state.tokens)
        committed = committed | chosen
        tokens = torch.where(committed, tokens, uniform_tokens(ctx, r))
        masks = {"committed": committed, "chosen": chosen, "edited": edited}
        mean_time = float(t.mean()) if isinstance(t, Tensor) else t
        info = StepInfo(r, mean_time, state.tokens, predictions.outcome(ctx, tokens), masks)
        return state.next(tokens, features, BlockRefinementMemory(committed)), info
