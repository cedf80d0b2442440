"""Confidence threshold: a token that is predicted confidently is frozen; the others become noise again."""

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
    falling,
    read_predictions,
    time_of_share,
    uniform_tokens,
)


class ConfidenceThresholdMemory(NamedTuple):
    """(B, L) bool each."""

    frozen: Tensor  # the token stays
    stopped: Tensor  # true throughout a sample that no later call changes


@dataclass(frozen=True)
class ConfidenceThreshold(Sampler):
    """Each call freezes the predictions whose probability reaches the threshold, and at least the most probable one.

    The other positions become uniform noise, as for DiffusionGemma in mlx-vlm (pull requests 1359 and 1384). The last
    freezing call freezes all. With `repair`, one more call takes the argmax of every position, frozen or not.

    A sample with nothing left to do stops. Its remaining calls are made and counted, and change nothing."""

    nfe: int = param(64, "Most network calls per sample; the last freezes what is left, or repairs.", low=2)
    refresh: int = refresh_param()
    threshold: float = param(0.9, "Probability from which a predicted token is frozen.", low=0, high=1)
    repair: bool = param(False, "Whether a call after all are frozen sets every position to its argmax.")
    draw: bool = param(False, "Whether tokens are drawn. Otherwise the argmax is taken.")
    first_temperature: float = param(0.8, "Softmax temperature of the first call.", above=0, high=1e6)
    last_temperature: float = param(0.4, "Temperature that the calls approach in equal steps.", above=0, high=1e6)
    clock: Clock = param("share", CLOCK_HELP.format("frozen"))
    distribution: WhichDistribution = param("leave-one-out", DISTRIBUTION_HELP)

    def init(self, ctx: Context) -> State:
        return State(0, ctx.noise(), ConfidenceThresholdMemory(ctx.no_positions, ctx.no_positions))

    def step(self, ctx: Context, state: State) -> tuple[State, StepInfo]:
        r, (frozen, stopped) = state.call, state.memory
        t = time_of_share(ctx, frozen) if self.clock == "share" else process.uniform_grid(self.nfe)[r]
        temperature = falling(self.first_temperature, self.last_temperature, r, self.nfe)
        (features,) = ctx.call(state, state.tokens, t, temperature=temperature)
        predictions = read_predictions(ctx, features, r, temperature, self.distribution)
        token, prob = predictions[:2] if self.draw else (predictions.top, predictions.top_prob)

        waiting = ctx.free & ~frozen
        passes = waiting & (prob >= self.threshold)
        best = best_positions(prob, waiting, torch.ones_like(ctx.generated))
        chosen = torch.where(passes.any(-1, keepdim=True), passes, best)
        chosen = waiting if r >= self.nfe - 1 - self.repair else chosen
        is_ready = (frozen | ~ctx.free).all(-1, keepdim=True)  # since an earlier call
        repaired = ctx.free & is_ready & ~stopped if self.repair else ctx.no_positions
        frozen = frozen | chosen

        tokens = torch.where(frozen, state.tokens, uniform_tokens(ctx, r))
        tokens = torch.where(chosen, token, tokens)
        tokens = torch.where(repaired, predictions.top, tokens)
        is_done = is_ready if self.repair else (frozen | ~ctx.free).all(-1, keepdim=True)
        masks = {"committed": frozen, "chosen": chosen, "repaired": repaired}
        mean_time = float(t.mean()) if isinstance(t, Tensor) else t
        info = StepInfo(r, mean_time, state.tokens, predictions.outcome(ctx, tokens), masks)
        return state.next(tokens, features, ConfidenceThresholdMemory(frozen, stopped | is_done)), info

    def finished(self, state: State) -> Tensor:
        return state.memory[1][:, 0]
