"""The two-coin step: head and law only at the rows that need them, in chunks that bound memory.

A row is needed where coin one moves or where the transition inspects. Weights keep the head's precision (at least
float32), sums are float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from limpet import support
from limpet.steps import DRAW, STAY, Head, Outcome, Transition, coin_two, inverse_cdf, log_law, routes
from limpet.streams import Purpose, uniform_token

CHUNK = 2**23  # logits that the head makes at once: rows x vocabulary
PIECE = 2**20  # of those, what a CPU works on at once: more would leave its caches, and be asked anew of the system


@dataclass(frozen=True)
class Planned(Transition):
    """A transition whose first coin has been tossed."""

    route: Tensor  # (B, L) STAY, DRAW or UNIFORM
    second: Tensor  # (B, L) the uniform for coin two
    rows: Tensor  # (R, 2) the samples and positions that need a law, in order

    def needed(self) -> Tensor | None:
        sample, position = self.rows.unbind(-1)
        every = len(self.rows) == self.tokens.numel()
        return None if every else sample * self.tokens.shape[1] + position


def plan(transition: Transition) -> Planned:
    """Toss coin one everywhere; the rows where it moves or the law is inspected."""
    route, second = routes(transition)
    rows = ((route != STAY) | transition.inspect).nonzero()
    return Planned(**transition.given(), route=route, second=second, rows=rows)


def advance(head: Head, features: Tensor, transition: Transition) -> Outcome:
    planned = transition if isinstance(transition, Planned) else plan(transition)
    route, second, tokens = planned.route, planned.second, planned.tokens.clone()
    top = torch.zeros_like(tokens)
    deficit = torch.full(tokens.shape, math.inf, dtype=torch.float64, device=tokens.device)
    for rows, said in _pieces(head, features, planned.rows, planned.vocab_size):
        sample, position = rows.unbind(-1)
        logits = log_law(said, planned, sample, position)
        largest, top[sample, position] = logits.max(-1)
        weights = (logits - largest[:, None]).exp_()  # the largest is 1, so the deficit is what the others add
        total = weights.sum(-1, dtype=torch.float64)
        deficit[sample, position] = (total - 1) / total

        moves = (route[sample, position] != STAY).nonzero()[:, 0]
        if len(moves) < len(rows):
            weights, total, sample, position = weights[moves], total[moves], sample[moves], position[moves]
        tokens[sample, position] = _move(
            weights, total, route[sample, position], second[sample, position], sample, position, planned
        )
    return Outcome(tokens, top.masked_fill(~planned.inspect, 0), deficit.masked_fill(~planned.inspect, math.inf))


def _pieces(head: Head, features: Tensor, needed: Tensor, vocab_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The needed rows, a few at a time, and what the head says of them. The head takes many at once: it reads all its
    weights for every call."""
    many = max(1, CHUNK // vocab_size)
    few = max(1, PIECE // vocab_size) if needed.device.type == "cpu" else many
    for rows in torch.split(needed, many):
        said = head(features[tuple(rows.unbind(-1))])
        yield from zip(torch.split(rows, few), torch.split(said, few), strict=True)


def _move(
    weights: Tensor, total: Tensor, route: Tensor, second: Tensor, sample: Tensor, position: Tensor,
    transition: Transition,
) -> Tensor:  # fmt: skip
    """The next tokens of the rows where coin one moved, given the weights of their laws and the sums of those."""
    if transition.top_p < 1:
        weights = weights * support.nucleus(weights, transition.top_p, transition.boundary)
        total = weights.sum(-1, dtype=torch.float64)
    z = transition.tokens[sample, position]
    law_at_z = weights.gather(-1, z[:, None])[:, 0] / total
    kept = coin_two(second, law_at_z, transition.signal_t, transition.vocab_size)
    for_draw, for_uniform = transition.stream.uniforms(transition.step, position, Purpose.TOKENS, sample)
    moved = uniform_token(for_uniform, transition.vocab_size)
    drawn = kept & (route == DRAW)
    moved[drawn] = inverse_cdf(weights[drawn], for_draw[drawn])
    return torch.where(kept, moved, z)
