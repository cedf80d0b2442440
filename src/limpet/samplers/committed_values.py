"""The tokens that CRS commits: the argmax, or what the paper's interventions write in its place."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from limpet.diffusion import truncation
from limpet.diffusion.backends import Outcome, inverse_cdf, positions
from limpet.diffusion.rng import Purpose
from limpet.samplers.base import Context, Features

if TYPE_CHECKING:
    from limpet.samplers.crs import CRS


class Choice(NamedTuple):
    """The positions that a call has chosen, and what determines the tokens committed there."""

    sampler: CRS
    ctx: Context
    features: Features
    outcome: Outcome
    chosen: Tensor  # (B, L) bool: committed by this call
    visible: Tensor  # (B, L) bool: committed before, and part of the model input of this call
    values: Tensor  # (B, L) the committed tokens before this call
    call: int


def argmax(choice: Choice) -> Tensor:
    """The argmax of the call that commits the position."""
    return torch.where(choice.chosen, choice.outcome.top, choice.values)


def recorded(choice: Choice) -> Tensor:
    """The tokens of the replayed trajectory, which are known from the start."""
    return choice.values


def refreshed(choice: Choice) -> Tensor:
    """The argmax of the current call at visible positions too, as often as REFRESHING says."""
    is_due = REFRESHING[choice.sampler.values](positions(choice.values), choice.call)
    return torch.where(choice.chosen | (choice.visible & is_due), choice.outcome.top, choice.values)


def second(choice: Choice) -> Tensor:
    """The second most likely token."""
    return _at_chosen(choice, lambda rows, log_probs: _without_argmax(log_probs).argmax(-1))


def nucleus(choice: Choice) -> Tensor:
    """A draw from the nucleus without the argmax; the second most likely token if the nucleus is the argmax alone."""

    def draw(rows: Tensor, log_probs: Tensor) -> Tensor:
        sample, position = rows.unbind(-1)
        others = _without_argmax(log_probs)
        weights = (log_probs - log_probs.amax(-1, keepdim=True)).exp()
        weights = weights * truncation.nucleus(weights, choice.sampler.value_top_p, choice.sampler.boundary)
        weights = weights * (others > -math.inf)
        is_empty = weights.sum(-1) == 0
        one_hot = torch.nn.functional.one_hot(others[is_empty].argmax(-1), log_probs.shape[-1])
        weights[is_empty] = one_hot.to(weights.dtype)
        u, _ = choice.ctx.rng.uniforms(choice.call, position, Purpose.VALUES, sample)
        return inverse_cdf(weights, u)

    return _at_chosen(choice, draw)


def _without_argmax(log_probs: Tensor) -> Tensor:
    return log_probs.scatter(-1, log_probs.argmax(-1, keepdim=True), -math.inf)


def _at_chosen(choice: Choice, pick: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The committed tokens, with those that `pick` returns for rows (r, 2) and log-probs (r, V) at chosen positions."""
    values = choice.values.clone()
    for rows, log_probs in choice.ctx.log_probs(choice.features, choice.chosen.nonzero(), choice.sampler.temperature):
        values[tuple(rows.unbind(-1))] = pick(rows, log_probs)
    return values


# Which visible positions a call refreshes
REFRESHING: dict[str, Callable[[Tensor, int], Tensor | bool]] = {
    "refreshed": lambda position, call: True,
    "refreshed-half": lambda position, call: call % 2 == 0,
    # Every other position, so that no token changes together with its neighbour
    "refreshed-interleaved": lambda position, call: (position + call) % 2 == 0,
}
RULES: dict[str, Callable[[Choice], Tensor]] = {
    "argmax": argmax,
    "second": second,
    "nucleus": nucleus,
    "recorded": recorded,
    **dict.fromkeys(REFRESHING, refreshed),
}
