"""Corollary 4: the more evidence of a mode there is, from support or context, the less another observation adds."""

import torch
from torch import Tensor

from limpet.paper.theory import combined_evidence as combined
from limpet.paper.theory.checks import Check, worst_case
from limpet.paper.theory.problems import RANDOM, random_numbers


def gain(odds: Tensor, support: Tensor, context: Tensor, more: Tensor) -> Tensor:
    """G_delta(S, T): by how much `more` evidence lowers the bound on the log loss of the mode."""
    before = support + context
    return combined.log_loss_bound(odds, before) - combined.log_loss_bound(odds, before + more)


def slope(odds: Tensor, support: Tensor, context: Tensor, more: Tensor) -> Tensor:
    """The derivative of the gain in S, which is also the one in T, in closed form (eq. 32)."""
    before = support + context
    return combined.error_bound(odds, before + more) - combined.error_bound(odds, before)


def check(name: str, odds: Tensor, support: Tensor, context: Tensor, more: Tensor) -> list[Check]:
    """All claims on (B,) problems, with derivatives of the gain by automatic differentiation."""
    derivative = torch.func.grad(lambda s, t: gain(odds, s, t, more).sum(), (0, 1))
    by_support, by_context = derivative(support, context)
    gains, zero = gain(odds, support, context, more), torch.zeros(())
    return [
        worst_case("0 < gain", name, zero, "<", gains),
        worst_case("dG/dS < 0", name, by_support, "<", zero),
        worst_case("dG/dT = dG/dS", name, by_context, "=", by_support),
        worst_case("dG/dS = closed form", name, by_support, "=", slope(odds, support, context, more)),
        worst_case("ln gain <= ln a - S - T, so it goes to 0", name, gains.log(), "<=", odds.log() - support - context),
    ]


def check_observation(name: str, evidence: combined.Evidence) -> Check:
    """The fall of -ln w_m* when one more token is visible, by enumeration, is the gain at that token's log-likelihood
    ratio. A claim for two modes, where the bound is exact."""
    before = evidence._replace(context=evidence.context[:, :, :-1], observed=evidence.observed[:, :-1])
    old, new = (combined.observe(combined.joint(one), one)[0][:, 0].log() for one in (before, evidence))
    support, context = combined.ratios(before)
    expected = gain(combined.prior_odds(evidence), support, context, combined.ratios(evidence)[1] - context)
    return worst_case("fall of -ln w at one more token = gain", name, new - old, "=", expected)


def random_problems(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(count,) prior odds, S, T and delta > 0."""
    u = random_numbers(4, count, seed=seed)
    return (6 * u[0] - 3).exp(), 12 * u[1] - 2, 12 * u[2] - 2, 0.01 + 4 * u[3]


def checks() -> list[Check]:
    rows = check(f"{RANDOM:,} random (a, S, T, delta)", *random_problems(RANDOM, seed=50))
    two_modes = combined.random_evidence(RANDOM, 2, seed=51)
    return [*rows, check_observation(f"{RANDOM:,} random problems, K=2, V=2, d=3, n=3, H=2", two_modes)]
