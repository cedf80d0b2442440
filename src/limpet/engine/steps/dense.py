"""The reference step: the law at every position, in float64, nothing left out."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from limpet.engine import process, steps, support
from limpet.engine.selector import select
from limpet.engine.steps import DRAW, STAY, UNIFORM, Backend, Head, Outcome, Whole
from limpet.engine.streams import Purpose, uniform_token


def law_of(head: Head, features: Tensor, plan: Whole) -> Tensor:
    """(B, L, V) float64: the leave-one-out law at the transition's temperature, before top-p."""
    law = head(features).double().softmax(-1)
    broken = law.sum(-1).isnan().flatten().nonzero()
    if len(broken):
        raise steps.no_law(plan.input, plan.transition.call, int(broken[0]))
    if plan.input.convert:
        law = process.leave_one_out(law, plan.input.tokens, plan.input.signal)
    if plan.transition.temperature != 1:
        law = (law.log() / plan.transition.temperature).softmax(-1)
    return law


def advance(head: Head, features: Tensor, plan: Whole) -> Outcome:
    transition, stream = plan.transition, plan.input.stream
    law = law_of(head, features, plan)
    largest, top = law.max(-1)
    deficit = torch.where(transition.inspect, 1 - largest, math.inf)

    law = support.restrict(law, transition.top_p, transition.boundary)
    z = transition.tokens
    route, second = steps.routes(transition, stream)
    law_at_z = law.gather(-1, z[..., None])[..., 0]
    kept = steps.coin_two(second, law_at_z, transition.signal_t, law.shape[-1])
    route = route.masked_fill(~kept, STAY)
    for_draw, for_uniform = stream.uniforms(transition.call, steps.positions(z), Purpose.TOKENS)
    drawn = steps.inverse_cdf(law.flatten(0, 1), for_draw.flatten()).view_as(z)
    tokens = torch.where(route == DRAW, drawn, z)
    tokens = torch.where(route == UNIFORM, uniform_token(for_uniform, law.shape[-1]), tokens)
    return Outcome(tokens, top.masked_fill(~transition.inspect, 0), deficit)


BACKEND = Backend(Whole, advance, select)
