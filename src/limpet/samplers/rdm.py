"""RDM's reparameterized decoding: the most confident tokens are kept, and the least confident return to noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from limpet.diffusion import process
from limpet.diffusion.backends import positions
from limpet.diffusion.rng import Purpose
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

TINY = 2.0**-54  # below every uniform but 0
ROUNDING = 1e-9  # so that a product that is a whole number is not rounded down


class RDMMemory(NamedTuple):
    """(B, L) each."""

    denoised: Tensor  # bool: the token was predicted by a call; elsewhere it is noise
    score: Tensor  # the log-probability of the token when it was predicted; -inf where it is noise


@dataclass(frozen=True)
class RDM(Sampler):
    """Each call ranks its predictions by their log-probability. Outside the lowest ones, noise becomes the prediction.

    Among the lowest ones, a denoised token returns to noise (arXiv 2302.05737). A denoised token that stays is not
    predicted again. This is the nearest ancestor of CRS: commitment with memory on uniform noise, where a commitment
    can be forgotten, and the network reads the tokens that the state itself holds.

    The authors decode the argmax for translation. For open text they draw at temperature .3 with noise 5."""

    nfe: int = param(64, "Network calls per sample; the last one leaves no noise.", low=2)
    refresh: int = refresh_param()
    returns: Literal["uncond", "cond"] = param(
        "uncond",
        "Which denoised tokens among the lowest return to noise: all, or those predicted again with a lower score.",
    )
    schedule: Literal["linear", "cosine"] = param(
        "cosine", "How the number of the lowest falls from call to call: in equal parts, or as a quarter of a cosine."
    )
    noise: float = param(0.0, "Scale of the Gumbel noise on the ranking; it falls with the schedule.", low=0, high=1e6)
    temperature: float = param(
        0.0, "Softmax temperature of the draws; scores are at 1. At 0 the argmax is taken.", low=0, high=1e6
    )
    clock: Clock = param("share", CLOCK_HELP.format("denoised"))
    grid: Literal["uniform", "quadratic"] = param("uniform", "Times for clock=grid: equal or ever smaller steps.")
    distribution: WhichDistribution = param("leave-one-out", DISTRIBUTION_HELP)

    def init(self, ctx: Context) -> State:
        return State(
            0, ctx.noise(), RDMMemory(ctx.no_positions, torch.full_like(ctx.fixed, -math.inf, dtype=torch.double))
        )

    def step(self, ctx: Context, state: State) -> tuple[State, StepInfo]:
        r, (denoised, score) = state.call, state.memory
        t = self.time(ctx, r, denoised)
        (features,) = ctx.call(state, state.tokens, t)
        predictions = read_predictions(ctx, features, r, self.temperature, self.distribution, scored_at=1.0)
        predicted = predictions.drawn_prob.log()

        u, _ = ctx.rng.uniforms(r, positions(state.tokens), Purpose.POSITIONS)
        ranking = predicted - self.noise * self.rate(r) * (-u.clamp(min=TINY).log()).log()
        lowest = best_positions(-ranking, ctx.free, (ctx.generated * self.rate(r) + ROUNDING).long())
        returned = denoised & lowest
        if self.returns == "cond":
            returned = returned & (predictions.drawn == state.tokens) & (predicted < score)
        chosen = ctx.free & ~denoised & ~lowest
        noisy = returned | (ctx.free & ~denoised & lowest)
        denoised = (denoised | chosen) & ~returned

        tokens = torch.where(noisy, self.noised(ctx, state, t, self.time(ctx, r + 1, denoised)), state.tokens)
        tokens = torch.where(chosen, predictions.drawn, tokens)
        score = torch.where(chosen, predicted, score.masked_fill(noisy, -math.inf))
        masks = {"committed": denoised, "chosen": chosen, "returned": returned}
        mean_time = float(t.mean()) if isinstance(t, Tensor) else t
        info = StepInfo(r, mean_time, state.tokens, predictions.outcome(ctx, tokens), masks)
        return state.next(tokens, features, RDMMemory(denoised, score)), info

    def rate(self, call: int) -> float:
        """The share of positions that are noise after a call."""
        left = (self.nfe - 1 - call) / self.nfe
        return left if self.schedule == "linear" else math.sin(math.pi / 2 * left)

    def time(self, ctx: Context, call: int, denoised: Tensor) -> float | Tensor:
        """The time of a call that reads these denoised tokens."""
        if self.clock == "share":
            return time_of_share(ctx, denoised)
        return process.GRIDS[self.grid](self.nfe + 1, 0.0)[call]

    def noised(self, ctx: Context, state: State, t: float | Tensor, after: float | Tensor) -> Tensor:
        """(B, L) the tokens after the noise between two times: each stays, or becomes uniform."""
        before, then = (ctx.model.schedule.signal(time) for time in (t, after))
        u, _ = ctx.rng.uniforms(state.call, positions(state.tokens), Purpose.COINS)
        stays = u < (before / then).reshape(-1, 1).to(u.device)
        return torch.where(stays, state.tokens, uniform_tokens(ctx, state.call))
