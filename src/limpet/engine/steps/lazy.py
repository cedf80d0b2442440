"""The two-coin step: head and law only at the rows that need them, in chunks that bound memory.

A row is needed where coin one moves or where the transition inspects. Weights keep the head's precision (at least
float32), sums are float64."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from limpet.engine import steps, support
from limpet.engine.selector import select
from limpet.engine.steps import DRAW, STAY, Backend, Head, Input, Outcome, Transition
from limpet.engine.streams import Purpose, uniform_token


class Tossed(NamedTuple):
    """A transition whose first coin has been tossed."""

    transition: Transition
    input: Input
    route: Tensor  # (B, L) STAY, DRAW or UNIFORM
    second: Tensor  # (B, L) the uniform for coin two
    rows: Tensor  # (R, 2) the samples and positions that need a law, in order

    def needed(self) -> Tensor | None:
        sample, position = self.rows.unbind(-1)
        every = len(self.rows) == self.route.numel()
        return None if every else sample * self.route.shape[1] + position


def plan(transition: Transition, input: Input) -> Tossed:
    """Toss coin one everywhere; the rows where it moves or the law is inspected."""
    route, second = steps.routes(transition, input.stream)
    rows = ((route != STAY) | transition.inspect).nonzero()
    return Tossed(transition, input, route, second, rows)


def advance(head: Head, features: Tensor, plan: Tossed) -> Outcome:
    transition, input, route, second, needed = plan
    tokens = transition.tokens.clone()
    top = torch.zeros_like(tokens)
    deficit = torch.full(tokens.shape, math.inf, dtype=torch.float64, device=tokens.device)
    for rows, said in steps.pieces(head, features, needed, input.vocab_size):
        sample, position = rows.unbind(-1)
        logits = steps.log_law(said, input.tokens[sample, position], input, transition.temperature)
        largest, top[sample, position] = logits.max(-1)
        weights = (logits - largest[:, None]).exp_()  # the largest is 1, so the deficit is what the others add
        total = weights.sum(-1, dtype=torch.float64)
        if total.isnan().any():
            broken = rows[total.isnan().nonzero()[0, 0]]
            raise steps.no_law(input, transition.call, int(broken[0] * tokens.shape[1] + broken[1]))
        deficit[sample, position] = (total - 1) / total

        moves = (route[sample, position] != STAY).nonzero()[:, 0]
        if len(moves) < len(rows):
            weights, total, sample, position = weights[moves], total[moves], sample[moves], position[moves]
        tokens[sample, position] = _move(
            weights, total, route[sample, position], second[sample, position], sample, position, plan
        )
    inspect = transition.inspect
    return Outcome(tokens, top.masked_fill(~inspect, 0), deficit.masked_fill(~inspect, math.inf))


def _move(
    weights: Tensor, total: Tensor, route: Tensor, second: Tensor, sample: Tensor, position: Tensor, plan: Tossed
) -> Tensor:
    """The next tokens of the rows where coin one moved, given the weights of their laws and the sums of those."""
    transition, input = plan.transition, plan.input
    if transition.top_p < 1:
        weights = weights * support.nucleus(weights, transition.top_p, transition.boundary)
        total = weights.sum(-1, dtype=torch.float64)
    z = transition.tokens[sample, position]
    law_at_z = weights.gather(-1, z[:, None])[:, 0] / total
    kept = steps.coin_two(second, law_at_z, transition.signal_t, input.vocab_size)
    for_draw, for_uniform = input.stream.uniforms(transition.call, position, Purpose.TOKENS, sample)
    moved = uniform_token(for_uniform, input.vocab_size)
    drawn = kept & (route == DRAW)
    moved[drawn] = steps.inverse_cdf(weights[drawn], for_draw[drawn])
    return torch.where(kept, moved, z)


BACKEND = Backend(plan, advance, select)
