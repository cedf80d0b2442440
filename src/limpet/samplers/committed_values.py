"""What a label holds: the argmax, or one of the values that the paper's interventions put in its place."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from limpet.diffusion import truncation
from limpet.diffusion.backends import Outcome, inverse_cdf
from limpet.diffusion.rng import Purpose
from limpet.samplers.base import Context, Features

if TYPE_CHECKING:
    from limpet.samplers.crs import CRS


class Choice(NamedTuple):
    """What a call has chosen, and all it knows: what the new labels are made from."""

    sampler: CRS
    ctx: Context
    features: Features
    outcome: Outcome
    chosen: Tensor  # (B, L) bool: newly committed
    visible: Tensor  # (B, L) bool: committed before, and seen by this call
    labels: Tensor  # (B, L) as they were
    call: int


def argmax(choice: Choice) -> Tensor:
    return torch.where(choice.chosen, choice.outcome.top, choice.labels)


def recorded(choice: Choice) -> Tensor:
    """A replay begins with all its labels."""
    return choice.labels


def refreshed(choice: Choice) -> Tensor:
    """Positions stay visible; the values of those that are due follow the current argmax."""
    position = torch.arange(choice.labels.shape[1], device=choice.labels.device)
    due = choice.visible & REFRESHING[choice.sampler.values](position, choice.call)
    return torch.where(choice.chosen | due, choice.outcome.top, choice.labels)


def second(choice: Choice) -> Tensor:
    """The second-ranked token."""
    return _drawn(choice, lambda rows, logits: _without_argmax(logits).argmax(-1))


def nucleus(choice: Choice) -> Tensor:
    """A draw from the nucleus without the argmax; the second-ranked token where the nucleus is the argmax alone."""

    def draw(rows: Tensor, logits: Tensor) -> Tensor:
        sample, position = rows.unbind(-1)
        others = _without_argmax(logits)
        weights = (logits - logits.amax(-1, keepdim=True)).exp()
        weights = weights * truncation.nucleus(weights, choice.sampler.value_top_p, choice.sampler.boundary)
        weights = weights * (others > -math.inf)
        alone = weights.sum(-1) == 0
        weights[alone] = torch.nn.functional.one_hot(others[alone].argmax(-1), logits.shape[-1]).to(weights.dtype)
        u, _ = choice.ctx.rng.uniforms(choice.call, position, Purpose.VALUES, sample)
        return inverse_cdf(weights, u)

    return _drawn(choice, draw)


def _without_argmax(logits: Tensor) -> Tensor:
    return logits.scatter(-1, logits.argmax(-1, keepdim=True), -math.inf)


def _drawn(choice: Choice, draw: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Labels with the chosen ones replaced by what their rows' distributions give."""
    labels = choice.labels.clone()
    for rows, logits in choice.ctx.log_probs(choice.features, choice.chosen.nonzero(), choice.sampler.temperature):
        labels[tuple(rows.unbind(-1))] = draw(rows, logits)
    return labels


# Of visible positions, those that a call refreshes
REFRESHING: dict[str, Callable[[Tensor, int], Tensor | bool]] = {
    "refreshed": lambda position, call: True,
    "refreshed-half": lambda position, call: call % 2 == 0,
    # every other one, so that no label changes together with its neighbour
    "refreshed-interleaved": lambda position, call: (position + call) % 2 == 0,
}
RULES: dict[str, Callable[[Choice], Tensor]] = {
    "argmax": argmax, "second": second, "nucleus": nucleus, "recorded": recorded, **dict.fromkeys(REFRESHING, refreshed)
}  # fmt: skip
