"""The reference step: the distribution at every position, in float64, nothing left out."""

from __future__ import annotations

import torch
from torch import Tensor

from limpet.diffusion import process, truncation
from limpet.diffusion.backends import (
    Backend,
    Head,
    Outcome,
    Whole,
    inverse_cdf,
    noised,
    nonfinite_logits,
    positions,
    reported,
    routes,
)
from limpet.diffusion.rng import Purpose, uniform_token
from limpet.diffusion.selection import select
from limpet.diffusion.transitions import DRAW, FRESH, STAY, UNIFORM, coin_two


def probs_of(head: Head, features: Tensor, plan: Whole) -> Tensor:
    """(B, L, V) float64: the leave-one-out distribution at the transition's temperature, before top-p."""
    probs = head(features).double().softmax(-1)
    broken = probs.sum(-1).isnan().flatten().nonzero()
    if len(broken):
        raise nonfinite_logits(plan.input, plan.transition.call, int(broken[0]))
    if plan.input.convert:
        probs = process.leave_one_out(probs, plan.input.tokens, plan.input.signal)
    if plan.transition.temperature != 1:
        probs = (probs.log() / plan.transition.temperature).softmax(-1)
    return probs


def gain_of(probs: Tensor, against: Tensor | None) -> Tensor | None:
    """(B, L): ln of the best other token's distribution over that of the given one."""
    if against is None:
        return None
    own = against[..., None]
    return (probs.scatter(-1, own, 0.0).amax(-1) / probs.gather(-1, own)[..., 0]).log()


def advance(head: Head, features: Tensor, plan: Whole) -> Outcome:
    transition, stream = plan.transition, plan.input.rng
    whole = probs_of(head, features, plan)
    largest, top = whole.max(-1)

    probs = truncation.cut(whole, transition.support)
    z = transition.tokens
    route, second = routes(transition, stream)
    prob_at_z = probs.gather(-1, z[..., None])[..., 0]
    agrees = coin_two(second, prob_at_z, transition.coins.signal, probs.shape[-1]) | (route == FRESH)
    tokens = noised(transition, plan.input, route)
    route = route.masked_fill(~agrees, STAY)
    for_draw, for_uniform = stream.uniforms(transition.call, positions(z), Purpose.TOKENS)
    drawn = inverse_cdf(probs.flatten(0, 1), for_draw.flatten()).view_as(z)
    tokens = torch.where((route == DRAW) | (route == FRESH), drawn, tokens)
    tokens = torch.where(route == UNIFORM, uniform_token(for_uniform, probs.shape[-1]), tokens)
    return reported(transition, tokens, top, 1 - largest, gain_of(whole, transition.against))


BACKEND = Backend(Whole, advance, select)
