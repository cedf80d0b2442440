"""Reads the predictions of a call at every free position, for samplers that need more than a transition reports."""

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
    "Which distribution is used: leave-one-out, or as the model predicts it. They differ if it predicts a posterior."
)
Clock = Literal["share", "grid"]
CLOCK_HELP = "The time given to the network: from the share of {} tokens, or the uniform grid's."


class PredictionSummary(NamedTuple):
    """(B, L) each, of the distributions at a temperature; 0 at fixed positions."""

    drawn: Tensor  # a token drawn from the distribution
    drawn_prob: Tensor  # its probability
    top: Tensor  # the most likely token, the lowest id of ties
    top_prob: Tensor  # its probability
    entropy: Tensor  # in nats

    def outcome(self, ctx: Context, tokens: Tensor) -> Outcome:
        """The outcome of the call, with these next tokens."""
        return Outcome(tokens, self.top, torch.where(ctx.free, 1 - self.top_prob, math.inf), None)


def read_predictions(
    ctx: Context,
    features: Features,
    call: int,
    temperature: float,
    which: WhichDistribution = "leave-one-out",
    scored_at: float | None = None,
) -> PredictionSummary:
    """Reads the distributions of a call at all free positions.

    At temperature 0 the drawn token is the argmax, and probabilities are those at temperature 1. Draws use the uniforms
    that a transition of this call would use. scored_at: the temperature of the drawn token's probability, by default
    that of the draw."""
    tokens = torch.zeros_like(ctx.fixed)
    numbers = tokens.double()
    found = PredictionSummary(tokens, numbers, tokens.clone(), numbers.clone(), numbers.clone())
    u, _ = ctx.rng.uniforms(call, positions(tokens), Purpose.TOKENS)
    for rows, log_probs in ctx.log_probs(features, ctx.free.nonzero(), temperature or 1.0, call, which == "predicted"):
        here = tuple(rows.unbind(-1))
        probs = log_probs.double().softmax(-1)
        found.top_prob[here], found.top[here] = probs.max(-1)
        found.entropy[here] = torch.special.entr(probs).sum(-1)
        drawn = inverse_cdf(probs, u[here]) if temperature else found.top[here]
        scored = probs
        if scored_at is not None and temperature not in (0, scored_at):
            scored = (log_probs.double() * (temperature / scored_at)).softmax(-1)
        found.drawn[here], found.drawn_prob[here] = drawn, scored.gather(-1, drawn[:, None])[:, 0]
    return found


def uniform_tokens(ctx: Context, call: int) -> Tensor:
    """(B, L) uniform tokens at free positions, from the uniforms that a transition of this call would use."""
    _, u = ctx.rng.uniforms(call, positions(ctx.fixed), Purpose.TOKENS)
    return torch.where(ctx.free, uniform_token(u, ctx.model.vocab_size), ctx.fixed)


def best_positions(score: Tensor, among: Tensor, count: Tensor) -> Tensor:
    """(B, L) bool: of the positions `among` (B, L), the `count` (B,) with the largest scores; ties: lower positions."""
    order = torch.where(among, -score, math.inf).sort(dim=-1, stable=True).indices
    ranked = torch.arange(score.shape[1], device=score.device).expand_as(order)
    return among & (torch.zeros_like(order).scatter(-1, order, ranked) < count[:, None])


def falling(first: float, last: float, call: int, nfe: int) -> float:
    """The temperature of a call: from the first call's it approaches the last in equal steps."""
    return last + (first - last) * (nfe - call) / nfe


def time_of_share(ctx: Context, clean: Tensor) -> Tensor:
    """(B,) the times whose signal equals the share of free positions that are in `clean` (B, L) bool."""
    return ctx.time((clean & ctx.free).sum(-1).double() / ctx.generated.clamp(min=1))
