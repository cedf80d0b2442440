"""What a sampler reads off every law of a call, where its rule needs more than the router tells: in bounded pieces."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from limpet.engine.path import Features, Path
from limpet.engine.steps import Outcome, inverse_cdf, positions
from limpet.engine.streams import Purpose, uniform_token

Law = Literal["leave-one-out", "predicted"]
LAW = "Which law is read: leave-one-out, or as the model predicts it; they differ where that is a posterior."


class Reading(NamedTuple):
    """(B, L) each, of the laws at a temperature; 0 where none was read."""

    drawn: Tensor  # a token from the law
    chance: Tensor  # the law at that token
    top: Tensor  # the likeliest token, lowest id at a tie
    largest: Tensor  # the law at that one
    entropy: Tensor  # in nats

    def outcome(self, path: Path, tokens: Tensor) -> Outcome:
        """What a call that was read so tells, when these are the next tokens."""
        return Outcome(tokens, self.top, torch.where(path.free, 1 - self.largest, math.inf), None)


def read(path: Path, features: Features, call: int, temperature: float, kind: Law = "leave-one-out") -> Reading:
    """The laws at all free positions of a call; at temperature 0 the token drawn is the likeliest of the law as it
    is. A draw uses the uniform that the router's would."""
    tokens = torch.zeros_like(path.fixed)
    found = Reading(tokens, number := tokens.double(), tokens.clone(), number.clone(), number.clone())
    u, _ = path.stream.uniforms(call, positions(tokens), Purpose.TOKENS)
    for rows, log_law in path.laws(features, path.free.nonzero(), temperature or 1.0, call, kind == "predicted"):
        here = tuple(rows.unbind(-1))
        law = log_law.double().softmax(-1)
        found.largest[here], found.top[here] = law.max(-1)
        found.entropy[here] = torch.special.entr(law).sum(-1)
        drawn = inverse_cdf(law, u[here]) if temperature else found.top[here]
        found.drawn[here], found.chance[here] = drawn, law.gather(-1, drawn[:, None])[:, 0]
    return found


def anything(path: Path, call: int) -> Tensor:
    """(B, L) a uniform token at free positions, as the router would draw it; given tokens as they were given."""
    _, u = path.stream.uniforms(call, positions(path.fixed), Purpose.TOKENS)
    return torch.where(path.free, uniform_token(u, path.denoiser.vocab_size), path.fixed)


def first(score: Tensor, among: Tensor, count: Tensor) -> Tensor:
    """(B, L) bool: of the positions `among`, the `count` (B,) with the largest scores; ties go to lower positions."""
    order = torch.where(among, -score, math.inf).sort(dim=-1, stable=True).indices
    ranked = torch.arange(score.shape[1], device=score.device).expand_as(order)
    return among & (torch.zeros_like(order).scatter(-1, order, ranked) < count[:, None])


def time_of(path: Path, clean: Tensor) -> Tensor:
    """(B,) the time at which the share of signal is that of the free positions that count as clean, bool (B, L)."""
    return path.time((clean & path.free).sum(-1).double() / path.generated.clamp(min=1))
