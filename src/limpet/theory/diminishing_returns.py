"""Corollary 4: the more evidence there is on a mode, from support or context, the less another observation adds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from limpet.theory.combined_evidence import (
    Evidence,
    joint,
    log_loss_bound,
    observe,
    prior_odds,
    random_evidence,
    ratios,
)
from limpet.theory.figures import panels
from limpet.theory.rows import Row, worst
from limpet.theory.sources import RANDOM


def gain(odds: Tensor, support: Tensor, context: Tensor, more: Tensor) -> Tensor:
    """G_delta(S, T): by how much `more` evidence lowers the certificate on the mode's log loss."""
    return log_loss_bound(odds, support + context) - log_loss_bound(odds, support + context + more)


def slope(odds: Tensor, support: Tensor, context: Tensor, more: Tensor) -> Tensor:
    """Its derivative in S, which is also that in T, in closed form (eq. 32)."""
    here, there = odds * (-(support + context)).exp(), odds * (-(support + context + more)).exp()
    return there / (1 + there) - here / (1 + here)


def check(name: str, odds: Tensor, support: Tensor, context: Tensor, more: Tensor) -> list[Row]:
    """All claims on (B,) problems; derivatives of the gain by automatic differentiation."""
    s, t = support.clone().requires_grad_(), context.clone().requires_grad_()
    by_support, by_context = torch.autograd.grad(gain(odds, s, t, more).sum(), (s, t))
    closed = slope(odds, support, context, more)
    found = gain(odds, support, context, more)
    limit = odds.log() - support - context
    nothing = torch.zeros(())
    return [
        worst("0 < gain", name, nothing, "<", found),
        worst("dG/dS < 0", name, by_support, "<", nothing),
        worst("dG/dT = dG/dS", name, by_context, "=", by_support),
        worst("dG/dS = closed form", name, by_support, "=", closed),
        worst("ln gain <= ln a - S - T, so it goes to 0", name, found.log(), "<=", limit),
    ]


def check_observation(name: str, evidence: Evidence) -> Row:
    """Two modes, where the certificate is exact: the fall of -ln w_m* when one more token is seen, by enumeration,
    is the gain at delta = that token's log-likelihood ratio."""
    before = evidence._replace(context=evidence.context[:, :, :-1], seen=evidence.seen[:, :-1])
    fall = observe(joint(evidence), evidence)[0][:, 0].log() - observe(joint(before), before)[0][:, 0].log()
    support, context = ratios(before)
    more = ratios(evidence)[1] - context
    expected = gain(prior_odds(evidence), support, context, more)
    return worst("fall of -ln w at one more token = gain", name, fall, "=", expected)


def random_problems(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Prior odds, S, T and delta > 0."""
    u = torch.rand(4, count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (6 * u[0] - 3).exp(), 12 * u[1] - 2, 12 * u[2] - 2, 0.01 + 4 * u[3]


def rows() -> list[Row]:
    found = check(f"{RANDOM:,} random (a, S, T, delta)", *random_problems(RANDOM, seed=50))
    pair = random_evidence(RANDOM, 2, seed=51)
    found.append(check_observation(f"{RANDOM:,} random problems, K=2, V=2, d=3, n=3, H=2", pair))
    return found


def figure() -> Any:
    drawing, (axes,) = panels("The more evidence, the less one more label adds")
    totals = torch.linspace(-2, 10, 200, dtype=torch.float64)
    for share in (0.5, 0.2, 0.05):
        odds = torch.tensor((1 - share) / share, dtype=torch.float64)
        axes.plot(totals, gain(odds, totals, torch.zeros(()), torch.ones(())), label=f"prior of the mode {share:g}")
    axes.set_xlabel("evidence so far, S + T, nats")
    axes.set_ylabel("gain of one more nat, nats")
    axes.legend()
    return drawing
