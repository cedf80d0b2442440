"""The reference step: the law at every position, in float64, nothing left out."""

from __future__ import annotations

import torch
from torch import Tensor

from limpet.engine import process, support
from limpet.engine.selector import select
from limpet.engine.steps import Backend, Head, Outcome, Whole, inverse_cdf, no_law, noised, positions, reported, routes
from limpet.engine.steps.coins import DRAW, FRESH, STAY, UNIFORM, coin_two
from limpet.engine.streams import Purpose, uniform_token


def law_of(head: Head, features: Tensor, plan: Whole) -> Tensor:
    """(B, L, V) float64: the leave-one-out law at the transition's temperature, before top-p."""
    law = head(features).double().softmax(-1)
    broken = law.sum(-1).isnan().flatten().nonzero()
    if len(broken):
        raise no_law(plan.input, plan.transition.call, int(broken[0]))
    if plan.input.convert:
        law = process.leave_one_out(law, plan.input.tokens, plan.input.signal)
    if plan.transition.temperature != 1:
        law = (law.log() / plan.transition.temperature).softmax(-1)
    return law


def gain_of(law: Tensor, against: Tensor | None) -> Tensor | None:
    """(B, L): ln of the best other token's law over that of the given one."""
    if against is None:
        return None
    own = against[..., None]
    return (law.scatter(-1, own, 0.0).amax(-1) / law.gather(-1, own)[..., 0]).log()


def advance(head: Head, features: Tensor, plan: Whole) -> Outcome:
    transition, stream = plan.transition, plan.input.stream
    whole = law_of(head, features, plan)
    largest, top = whole.max(-1)

    law = support.cut(whole, transition.support)
    z = transition.tokens
    route, second = routes(transition, stream)
    law_at_z = law.gather(-1, z[..., None])[..., 0]
    agrees = coin_two(second, law_at_z, transition.coins.signal, law.shape[-1]) | (route == FRESH)
    tokens = noised(transition, plan.input, route)
    route = route.masked_fill(~agrees, STAY)
    for_draw, for_uniform = stream.uniforms(transition.call, positions(z), Purpose.TOKENS)
    drawn = inverse_cdf(law.flatten(0, 1), for_draw.flatten()).view_as(z)
    tokens = torch.where((route == DRAW) | (route == FRESH), drawn, tokens)
    tokens = torch.where(route == UNIFORM, uniform_token(for_uniform, law.shape[-1]), tokens)
    return reported(transition, tokens, top, 1 - largest, gain_of(whole, transition.against))


BACKEND = Backend(Whole, advance, select)
