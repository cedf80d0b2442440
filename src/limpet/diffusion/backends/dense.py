"""The reference backend: the distribution at every position, in float64, nothing skipped."""

from __future__ import annotations

import torch
from torch import Tensor

from limpet.diffusion import process, truncation
from limpet.diffusion.backends import (
    Backend,
    DensePlan,
    Head,
    Outcome,
    inspected_outcome,
    inverse_cdf,
    nonfinite_logits,
    positions,
    routes,
    with_noise,
)
from limpet.diffusion.rng import Purpose, uniform_token
from limpet.diffusion.selection import select
from limpet.diffusion.transitions import DRAW, FRESH, STAY, UNIFORM, coin_two


def probs_of(head: Head, features: Tensor, plan: DensePlan) -> Tensor:
    """(B, L, V) float64: the leave-one-out distribution at the transition's temperature, before truncation."""
    probs = head(features).double().softmax(-1)
    broken = probs.sum(-1).isnan().flatten().nonzero()
    if len(broken):
        raise nonfinite_logits(plan.network_call, plan.transition.call, int(broken[0]))
    if plan.network_call.convert:
        probs = process.leave_one_out(probs, plan.network_call.tokens, plan.network_call.signal)
    if plan.transition.temperature != 1:
        probs = (probs.log() / plan.transition.temperature).softmax(-1)
    return probs


def gain_of(probs: Tensor, against: Tensor | None) -> Tensor | None:
    """(B, L): ln of the best other token's probability over that of the token in `against` (B, L)."""
    if against is None:
        return None
    own = against[..., None]
    return (probs.scatter(-1, own, 0.0).amax(-1) / probs.gather(-1, own)[..., 0]).log()


def advance(head: Head, features: Tensor, plan: DensePlan) -> Outcome:
    """The outcome of a transition, given the features (B, L, D)."""
    transition, rng = plan.transition, plan.network_call.rng
    untruncated = probs_of(head, features, plan)
    largest, top = untruncated.max(-1)

    probs = truncation.truncate(untruncated, transition.support)
    z = transition.tokens
    route, second = routes(transition, rng)
    prob_at_z = probs.gather(-1, z[..., None])[..., 0]
    agrees = coin_two(second, prob_at_z, transition.coins.signal, probs.shape[-1]) | (route == FRESH)
    tokens = with_noise(transition, plan.network_call, route)
    route = route.masked_fill(~agrees, STAY)
    for_draw, for_uniform = rng.uniforms(transition.call, positions(z), Purpose.TOKENS)
    drawn = inverse_cdf(probs.flatten(0, 1), for_draw.flatten()).view_as(z)
    tokens = torch.where((route == DRAW) | (route == FRESH), drawn, tokens)
    tokens = torch.where(route == UNIFORM, uniform_token(for_uniform, probs.shape[-1]), tokens)
    return inspected_outcome(transition, tokens, top, 1 - largest, gain_of(untruncated, transition.against))


BACKEND = Backend(DensePlan, advance, select)
