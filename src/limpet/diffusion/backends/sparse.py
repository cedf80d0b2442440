"""The CPU backend: the head and the distribution only at the rows that need them, in pieces that bound memory.

A row is needed if coin one chooses a route that reads the distribution, or if the position is inspected. Weights keep
the precision of the head (at least float32); sums are float64."""

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
    inspected_outcome,
    inverse_cdf,
    nonfinite_logits,
    routes,
    row_log_probs,
    with_noise,
)
from limpet.diffusion.rng import Purpose, uniform_token
from limpet.diffusion.selection import select
from limpet.diffusion.transitions import FRESH, NOISE, STAY, UNIFORM, coin_two


class SparsePlan(NamedTuple):
    """A transition after coin one."""

    transition: Transition
    network_call: NetworkCall
    route: Tensor  # (B, L) from coin one
    second: Tensor  # (B, L) the uniform for coin two
    rows: Tensor  # (R, 2) the samples and positions that need a distribution, in order

    def needed(self) -> Tensor | None:
        if len(self.rows) == self.route.numel():
            return None
        sample, position = self.rows.unbind(-1)
        return sample * self.route.shape[1] + position


def plan(transition: Transition, network_call: NetworkCall) -> SparsePlan:
    """Chooses the routes, and so the rows that need a distribution."""
    route, second = routes(transition, network_call.rng)
    rows = (_reads(route) | transition.inspect).nonzero()
    return SparsePlan(transition, network_call, route, second, rows)


def advance(head: Head, features: Tensor, plan: SparsePlan) -> Outcome:
    """The outcome of a transition, given the features (B, L, D)."""
    transition, network_call, route, _, needed = plan
    tokens = with_noise(transition, network_call, route)
    top = torch.zeros_like(tokens)
    deficit = torch.full(tokens.shape, math.inf, dtype=torch.float64, device=tokens.device)
    gain = None if transition.against is None else -deficit
    for rows, logits in row_log_probs(head, features, needed, network_call, transition.temperature):
        here = tuple(rows.unbind(-1))
        largest, top[here] = largest_of(logits)
        weights = (logits - largest[:, None]).exp_()  # the largest weight is 1, so the deficit is the sum of the others
        total = weights.sum(-1, dtype=torch.float64)
        if total.isnan().any():
            sample, position = rows[total.isnan().nonzero()[0, 0]].tolist()
            raise nonfinite_logits(network_call, transition.call, sample * tokens.shape[1] + position)
        deficit[here] = (total - 1) / total
        if gain is not None and transition.against is not None:
            gain[here] = _gain(logits, largest, transition.against[here])

        reads = _reads(route[here]).nonzero()[:, 0]
        if len(reads) < len(rows):
            weights, total, rows = weights[reads], total[reads], rows[reads]
        tokens[tuple(rows.unbind(-1))] = _next_tokens(weights, total, rows, plan)
    return inspected_outcome(transition, tokens, top, deficit, gain)


def largest_of(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(R,) each: the largest of each row (R, V), and the first place that holds it.

    A search for places is slow, so it is made in the first group of tokens whose largest is the row's."""
    size = logits.shape[-1]
    width = next(width for width in range(math.isqrt(size), 0, -1) if size % width == 0)
    groups = logits.reshape(len(logits), size // width, width)
    largest, group = groups.amax(-1).max(-1)
    place = groups[torch.arange(len(logits), device=logits.device), group].argmax(-1)
    return largest, group * width + place


def _reads(route: Tensor) -> Tensor:
    """Whether a route depends on the distribution."""
    return (route != STAY) & (route != NOISE)


def _gain(logits: Tensor, largest: Tensor, against: Tensor) -> Tensor:
    """(R,) the best other logit minus that of the token in `against` (R,); `largest` (R,) is the best of all."""
    own = logits.gather(-1, against[:, None])[:, 0]
    is_top = (own == largest).nonzero()[:, 0]  # in the other rows, the best other logit is the largest
    best = largest.clone()
    best[is_top] = logits[is_top].scatter(-1, against[is_top, None], -math.inf).amax(-1)
    return (best - own).double()


def _next_tokens(weights: Tensor, total: Tensor, rows: Tensor, plan: SparsePlan) -> Tensor:
    """(R,) the next tokens of rows (R, 2) whose route reads the distribution; weights (R, V) and their sums `total`."""
    transition, network_call = plan.transition, plan.network_call
    sample, position = rows.unbind(-1)
    route, second, z = (part[sample, position] for part in (plan.route, plan.second, transition.tokens))
    fresh = route == FRESH
    own = weights.gather(-1, z[:, None])[:, 0]
    agrees = partial(coin_two, signal=transition.coins.signal, vocab_size=network_call.vocab_size)
    if transition.support.keeps_all:
        moves = agrees(second, own / total) | fresh
    else:  # truncate only the rows from which a token is drawn, or whose coin two depends on the truncation
        least, most = truncation.truncated_prob_bounds(weights, own, total, transition.support)
        moves, undecided = agrees(second, most) | fresh, agrees(second, least)
        cut = (moves & (route != UNIFORM) | (undecided & ~moves)).nonzero()[:, 0]
        weights[cut] = weights[cut] * truncation.kept(weights[cut], transition.support)
        prob_at_z = weights[cut].gather(-1, z[cut, None])[:, 0] / weights[cut].sum(-1, dtype=torch.float64)
        moves[cut] = agrees(second[cut], prob_at_z) | fresh[cut]
    for_draw, for_uniform = network_call.rng.uniforms(transition.call, position, Purpose.TOKENS, sample)
    token = uniform_token(for_uniform, network_call.vocab_size)
    drawn = moves & (route != UNIFORM)
    token[drawn] = inverse_cdf(weights[drawn], for_draw[drawn])
    return torch.where(moves, token, z)


BACKEND = Backend(plan, advance, select)
