"""What a sampler reads off every distribution of a call, where its rule needs more than the router tells: in bounded pieces."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from limpet.diffusion.backends import Outcome, inverse_cdf, positions
from limpet.diffusion.rng import Purpose, uniform_token
from limpet.samplers.base import Context, Features

WhichDistribution = Literal["leave-one-out", "predicted"]
DISTRIBUTION_HELP = (
    "Which distribution is read: leave-one-out, or as the model predicts it; they differ where that is a posterior."
)


class Reading(NamedTuple):
    """(B, L) each, of the distributions at a temperature; 0 where none was read."""

    drawn: Tensor  # a token from the distribution
    chance: Tensor  # the distribution at that token
    top: Tensor  # the likeliest token, lowest id at a tie
    largest: Tensor  # the distribution at that one
    entropy: Tensor  # in nats

    def outcome(self, ctx: Context, tokens: Tensor) -> Outcome:
        """What a call that was read so tells, when these are the next tokens."""
        return Outcome(tokens, self.top, torch.where(ctx.free, 1 - self.largest, math.inf), None)


def read(
    ctx: Context, features: Features, call: int, temperature: float, kind: WhichDistribution = "leave-one-out"
) -> Reading:
    """The distributions at all free positions of a call; at temperature 0 the token drawn is the likeliest of the distribution as it
    is. A draw uses the uniform that the router's would."""
    tokens = torch.zeros_like(ctx.fixed)
    found = Reading(tokens, number := tokens.double(), tokens.clone(), number.clone(), number.clone())
    u, _ = ctx.rng.uniforms(call, positions(tokens), Purpose.TOKENS)
    for rows, log_probs in ctx.log_probs(features, ctx.free.nonzero(), temperature or 1.0, call, kind == "predicted"):
        here = tuple(rows.unbind(-1))
        probs = log_probs.double().softmax(-1)
        found.largest[here], found.top[here] = probs.max(-1)
        found.entropy[here] = torch.special.entr(probs).sum(-1)
        drawn = inverse_cdf(probs, u[here]) if temperature else found.top[here]
        found.drawn[here], found.chance[here] = drawn, probs.gather(-1, drawn[:, None])[:, 0]
    return found


def anything(ctx: Context, call: int) -> Tensor:
    """(B, L) a uniform token at free positions, as the router would draw it; given tokens as they were given."""
    _, u = ctx.rng.uniforms(call, positions(ctx.fixed), Purpose.TOKENS)
    return torch.where(ctx.free, uniform_token(u, ctx.model.vocab_size), ctx.fixed)


def first(score: Tensor, among: Tensor, count: Tensor) -> Tensor:
    """(B, L) bool: of the positions `among`, the `count` (B,) with the largest scores; ties go to lower positions."""
    order = torch.where(among, -score, math.inf).sort(dim=-1, stable=True).indices
    ranked = torch.arange(score.shape[1], device=score.device).expand_as(order)
    return among & (torch.zeros_like(order).scatter(-1, order, ranked) < count[:, None])


def time_of(ctx: Context, clean: Tensor) -> Tensor:
    """(B,) the time at which the share of signal is that of the free positions that count as clean, bool (B, L)."""
    return ctx.time((clean & ctx.free).sum(-1).double() / ctx.generated.clamp(min=1))
