"""What a label holds: the argmax, or one of the values that the paper's interventions put in its place."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from limpet import support
from limpet.errors import LimpetError
from limpet.policy import Policy
from limpet.steps import Head, Outcome, Transition, inverse_cdf, logits_at
from limpet.streams import Purpose


class Choice(NamedTuple):
    """What a step has chosen, and all it knows: what the new labels are made from."""

    head: Head
    features: Tensor  # (B, L, D)
    transition: Transition
    outcome: Outcome
    chosen: Tensor  # (B, L) bool: newly selected
    visible: Tensor  # (B, L) bool: selected before, and seen by this step
    labels: Tensor  # (B, L) as they were


Rule = Callable[[Choice], Tensor]  # the labels after the step


def rule(policy: Policy, recorded: Tensor | None) -> Rule:
    """The rule that a policy names; `recorded` (B, L) are the labels of a replayed run."""
    if policy.values == "recorded":
        if recorded is None:
            raise LimpetError("values='recorded' needs replay=, a recorded selection that holds its labels")
        return lambda choice: torch.where(choice.chosen, recorded, choice.labels)
    if policy.values == "nucleus":
        return lambda choice: _nucleus(choice, policy.value_top_p, policy.boundary)
    return {"argmax": _argmax, "second": _second, "refreshed": _refreshed}[policy.values]


def _argmax(choice: Choice) -> Tensor:
    return torch.where(choice.chosen, choice.outcome.top, choice.labels)


def _refreshed(choice: Choice) -> Tensor:
    """Positions stay visible; their values follow each current argmax."""
    return torch.where(choice.chosen | choice.visible, choice.outcome.top, choice.labels)


def _second(choice: Choice) -> Tensor:
    """The second-ranked token."""
    sample, position, _, others = _without_argmax(choice)
    return _stored(choice, sample, position, others.argmax(-1))


def _nucleus(choice: Choice, p: float, boundary: support.Boundary) -> Tensor:
    """A draw from the nucleus without the argmax; the second-ranked token where the nucleus is the argmax alone."""
    sample, position, logits, others = _without_argmax(choice)
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    weights = weights * support.nucleus(weights, p, boundary) * (others > -math.inf)
    alone = weights.sum(-1) == 0
    weights[alone] = torch.nn.functional.one_hot(others[alone].argmax(-1), logits.shape[-1]).to(weights.dtype)
    u, _ = choice.transition.stream.uniforms(choice.transition.step, position, Purpose.VALUES, sample)
    return _stored(choice, sample, position, inverse_cdf(weights, u))


def _without_argmax(choice: Choice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The chosen rows, their logits, and the same with each row's argmax taken out."""
    sample, position = choice.chosen.nonzero(as_tuple=True)
    logits = logits_at(choice.head, choice.features, choice.transition, sample, position)
    return sample, position, logits, logits.scatter(-1, logits.argmax(-1, keepdim=True), -math.inf)


def _stored(choice: Choice, sample: Tensor, position: Tensor, tokens: Tensor) -> Tensor:
    labels = choice.labels.clone()
    labels[sample, position] = tokens
    return labels
