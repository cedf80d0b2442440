"""Corollary 4: the more evidence there is on a mode, from support or context, the less another observation adds."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from limpet.experiments.contents import Panel
from limpet.paper.theory import combined_evidence as combined
from limpet.paper.theory.problems import RANDOM, random_numbers
from limpet.paper.theory.sides import Sides, line, worst


def gain(odds: Tensor, support: Tensor, context: Tensor, more: Tensor) -> Tensor:
    """G_delta(S, T): by how much `more` evidence lowers the certificate on the mode's log loss."""
    before = support + context
    return combined.log_loss_bound(odds, before) - combined.log_loss_bound(odds, before + more)


def slope(odds: Tensor, support: Tensor, context: Tensor, more: Tensor) -> Tensor:
    """Its derivative in S, which is also that in T, in closed form (eq. 32)."""
    before = support + context
    return combined.error_bound(odds, before + more) - combined.error_bound(odds, before)


def check(name: str, odds: Tensor, support: Tensor, context: Tensor, more: Tensor) -> list[Sides]:
    """All claims on (B,) problems; derivatives of the gain by automatic differentiation."""
    derivative = torch.func.grad(lambda s, t: gain(odds, s, t, more).sum(), (0, 1))
    by_support, by_context = derivative(support, context)
    closed, found = slope(odds, support, context, more), gain(odds, support, context, more)
    limit, nothing = odds.log() - support - context, torch.zeros(())
    return [
        worst("0 < gain", name, nothing, "<", found),
        worst("dG/dS < 0", name, by_support, "<", nothing),
        worst("dG/dT = dG/dS", name, by_context, "=", by_support),
        worst("dG/dS = closed form", name, by_support, "=", closed),
        worst("ln gain <= ln a - S - T, so it goes to 0", name, found.log(), "<=", limit),
    ]


def check_observation(name: str, evidence: combined.Evidence) -> Sides:
    """Two modes, where the certificate is exact: the fall of -ln w_m* when one more token is seen, by enumeration,
    is the gain at delta = that token's log-likelihood ratio."""
    before = evidence._replace(context=evidence.context[:, :, :-1], seen=evidence.seen[:, :-1])
    then, now = (combined.observe(combined.joint(one), one)[0][:, 0].log() for one in (before, evidence))
    support, context = combined.ratios(before)
    expected = gain(combined.prior_odds(evidence), support, context, combined.ratios(evidence)[1] - context)
    return worst("fall of -ln w at one more token = gain", name, now - then, "=", expected)


def random_problems(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Prior odds, S, T and delta > 0."""
    u = random_numbers(4, count, seed=seed)
    return (6 * u[0] - 3).exp(), 12 * u[1] - 2, 12 * u[2] - 2, 0.01 + 4 * u[3]


def sides() -> list[Sides]:
    found = check(f"{RANDOM:,} random (a, S, T, delta)", *random_problems(RANDOM, seed=50))
    pair = combined.random_evidence(RANDOM, 2, seed=51)
    return [*found, check_observation(f"{RANDOM:,} random problems, K=2, V=2, d=3, n=3, H=2", pair)]


def panels() -> Iterator[Panel]:
    totals, shares = torch.linspace(-2, 10, 200, dtype=torch.float64), (0.5, 0.2, 0.05)
    nothing, one = torch.zeros(()), torch.ones(())
    gains = [gain(torch.tensor((1 - share) / share, dtype=torch.float64), totals, nothing, one) for share in shares]
    lines = [line(f"prior of the mode {share:g}", totals, found) for share, found in zip(shares, gains, strict=True)]
    yield Panel("", "evidence so far, S + T, nats", "gain of one more nat, nats", lines)
