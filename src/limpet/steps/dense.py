"""The reference step: the law at every position, in float64, nothing left out."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from limpet import process, support
from limpet.steps import DRAW, STAY, UNIFORM, Head, Outcome, Transition, coin_two, inverse_cdf, positions, routes
from limpet.streams import Purpose, uniform_token


def advance(head: Head, features: Tensor, transition: Transition) -> Outcome:
    law = head(features).double().softmax(-1)  # (B, L, V)
    if transition.convert:
        law = process.leave_one_out(law, transition.seen, transition.signal_t)
    largest, top = law.max(-1)
    deficit = torch.where(transition.inspect, 1 - largest, math.inf)

    law = support.restrict(law, transition.top_p, transition.boundary)
    z = transition.tokens
    route, second = routes(transition)
    law_at_z = law.gather(-1, z[..., None])[..., 0]
    kept = coin_two(second, law_at_z, transition.signal_t, law.shape[-1])
    route = route.masked_fill(~kept, STAY)
    for_draw, for_uniform = transition.stream.uniforms(transition.step, positions(transition), Purpose.TOKENS)
    drawn = inverse_cdf(law.flatten(0, 1), for_draw.flatten()).view_as(z)
    tokens = torch.where(route == DRAW, drawn, z)
    tokens = torch.where(route == UNIFORM, uniform_token(for_uniform, law.shape[-1]), tokens)
    return Outcome(tokens, top.masked_fill(~transition.inspect, 0), deficit)
