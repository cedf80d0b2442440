"""What a label holds: the argmax, or one of the values that the paper's interventions put in its place."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from limpet import support
from limpet.errors import LimpetError
from limpet.policy import Policy
from limpet.steps import Head, Outcome, Transition, inverse_cdf, logits_at
from limpet.streams import Purpose

# (head, features, transition, outcome, chosen, shown, labels) -> labels after the step
Rule = Callable[[Head, Tensor, Transition, Outcome, Tensor, Tensor, Tensor], Tensor]


def rule(policy: Policy, recorded: Tensor | None) -> Rule:
    """The rule that a policy names; `recorded` (B, L) are the labels of a replayed run."""
    if policy.values == "recorded":
        if recorded is None:
            raise LimpetError("values='recorded' needs replay=, a recorded selection that holds its labels")
        return lambda head, features, transition, outcome, chosen, shown, labels: torch.where(chosen, recorded, labels)
    if policy.values == "nucleus":
        return lambda *step: _nucleus(policy.value_top_p, policy.boundary, *step)
    return {"argmax": _argmax, "second": _second, "refreshed": _refreshed}[policy.values]


def _argmax(
    head: Head,
    features: Tensor,
    transition: Transition,
    outcome: Outcome,
    chosen: Tensor,
    shown: Tensor,
    labels: Tensor,
) -> Tensor:
    return torch.where(chosen, outcome.top, labels)


def _refreshed(
    head: Head,
    features: Tensor,
    transition: Transition,
    outcome: Outcome,
    chosen: Tensor,
    shown: Tensor,
    labels: Tensor,
) -> Tensor:
    """Positions stay visible; their values follow each current argmax."""
    return torch.where(chosen | shown, outcome.top, labels)


def _without_argmax(head: Head, features: Tensor, transition: Transition, chosen: Tensor) -> tuple[Tensor, ...]:
    """The chosen rows and their logits, with each row's argmax apart."""
    sample, position = chosen.nonzero(as_tuple=True)
    logits = logits_at(head, features, transition, sample, position)
    return sample, position, logits, logits.scatter(-1, logits.argmax(-1, keepdim=True), -math.inf)


def _second(
    head: Head,
    features: Tensor,
    transition: Transition,
    outcome: Outcome,
    chosen: Tensor,
    shown: Tensor,
    labels: Tensor,
) -> Tensor:
    """The second-ranked token."""
    sample, position, _, others = _without_argmax(head, features, transition, chosen)
    labels = labels.clone()
    labels[sample, position] = others.argmax(-1)
    return labels


def _nucleus(
    p: float, boundary: support.Boundary, head: Head, features: Tensor, transition: Transition, outcome: Outcome,
    chosen: Tensor, shown: Tensor, labels: Tensor,
) -> Tensor:  # fmt: skip
    """A draw from the nucleus without the argmax; the second-ranked token where the nucleus is the argmax alone."""
    sample, position, logits, others = _without_argmax(head, features, transition, chosen)
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    weights = weights * support.nucleus(weights, p, boundary) * (others > -math.inf)
    alone = weights.sum(-1) == 0
    weights[alone] = torch.nn.functional.one_hot(others[alone].argmax(-1), logits.shape[-1]).to(weights.dtype)
    u, _ = transition.stream.uniforms(transition.step, position, Purpose.VALUES, sample)
    labels = labels.clone()
    labels[sample, position] = inverse_cdf(weights, u)
    return labels
