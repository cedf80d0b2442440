"""The two-coin step: head and distribution only at the rows that need them, in chunks that bound memory.

A row is needed where coin one asks for the distribution or the transition inspects it. Weights keep the head's precision (at
least float32), sums are float64."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from limpet.diffusion import truncation
from limpet.diffusion.backends import (
    Backend,
    Head,
    NetworkCall,
    Outcome,
    Transition,
    inverse_cdf,
    log_probs,
    noised,
    nonfinite_logits,
    of_rows,
    pieces,
    reported,
    routes,
)
from limpet.diffusion.rng import Purpose, uniform_token
from limpet.diffusion.selection import select
from limpet.diffusion.transitions import FRESH, NOISE, STAY, UNIFORM, coin_two


class Tossed(NamedTuple):
    """A transition whose first coin has been tossed."""

    transition: Transition
    input: NetworkCall
    route: Tensor  # (B, L) by coin one
    second: Tensor  # (B, L) the uniform for coin two
    rows: Tensor  # (R, 2) the samples and positions that need a distribution, in order

    def needed(self) -> Tensor | None:
        sample, position = self.rows.unbind(-1)
        every = len(self.rows) == self.route.numel()
        return None if every else sample * self.route.shape[1] + position


def plan(transition: Transition, input: NetworkCall) -> Tossed:
    """Toss coin one everywhere; the rows where it moves or the distribution is inspected."""
    route, second = routes(transition, input.rng)
    rows = (((route != STAY) & (route != NOISE)) | transition.inspect).nonzero()
    return Tossed(transition, input, route, second, rows)


def advance(head: Head, features: Tensor, plan: Tossed) -> Outcome:
    transition, input, route, second, needed = plan
    tokens = noised(transition, input, route)
    top = torch.zeros_like(tokens)
    deficit = torch.full(tokens.shape, math.inf, dtype=torch.float64, device=tokens.device)
    gain = None if transition.against is None else -deficit
    for rows, said in pieces(head, features, needed, input.vocab_size):
        sample, position = rows.unbind(-1)
        logits = log_probs(said, input.tokens[sample, position], of_rows(input, sample), transition.temperature)
        largest, top[sample, position] = logits.max(-1)
        weights = (logits - largest[:, None]).exp_()  # the largest is 1, so the deficit is what the others add
        total = weights.sum(-1, dtype=torch.float64)
        if total.isnan().any():
            broken = rows[total.isnan().nonzero()[0, 0]]
            raise nonfinite_logits(input, transition.call, int(broken[0] * tokens.shape[1] + broken[1]))
        deficit[sample, position] = (total - 1) / total
        if gain is not None and transition.against is not None:
            gain[sample, position] = _gain(logits, largest, transition.against[sample, position])

        moves = ((route[sample, position] != STAY) & (route[sample, position] != NOISE)).nonzero()[:, 0]
        if len(moves) < len(rows):
            weights, total, sample, position = weights[moves], total[moves], sample[moves], position[moves]
        tokens[sample, position] = _move(
            weights, total, route[sample, position], second[sample, position], sample, position, plan
        )
    return reported(transition, tokens, top, deficit, gain)


def _gain(logits: Tensor, largest: Tensor, against: Tensor) -> Tensor:
    """(R,) how much larger the best other logit is than that of each row's given token."""
    own = logits.gather(-1, against[:, None])[:, 0]
    is_top = (own == largest).nonzero()[:, 0]  # the others' best is the largest
    best = largest.clone()
    best[is_top] = logits[is_top].scatter(-1, against[is_top, None], -math.inf).amax(-1)
    return (best - own).double()


def _move(
    weights: Tensor, total: Tensor, route: Tensor, second: Tensor, sample: Tensor, position: Tensor, plan: Tossed
) -> Tensor:
    """The next tokens of the rows where coin one asks for the distribution, given its weights and their sums."""
    transition, input = plan.transition, plan.input
    z, fresh = transition.tokens[sample, position], route == FRESH
    own = weights.gather(-1, z[:, None])[:, 0]
    agrees = partial(coin_two, signal=transition.coins.signal, vocab_size=input.vocab_size)
    if transition.support.whole:
        moved = agrees(second, own / total) | fresh
    else:  # the distribution is cut only where a token is drawn from it, or coin two hangs on it
        least, most = truncation.bounds(weights, own, total, transition.support)
        moved, open = agrees(second, most) | fresh, agrees(second, least)
        cut = (moved & (route != UNIFORM) | (open & ~moved)).nonzero()[:, 0]
        weights[cut] = weights[cut] * truncation.kept(weights[cut], transition.support)
        prob_at_z = weights[cut].gather(-1, z[cut, None])[:, 0] / weights[cut].sum(-1, dtype=torch.float64)
        moved[cut] = agrees(second[cut], prob_at_z) | fresh[cut]
    for_draw, for_uniform = input.rng.uniforms(transition.call, position, Purpose.TOKENS, sample)
    token = uniform_token(for_uniform, input.vocab_size)
    drawn = moved & (route != UNIFORM)
    token[drawn] = inverse_cdf(weights[drawn], for_draw[drawn])
    return torch.where(moved, token, z)


BACKEND = Backend(plan, advance, select)
