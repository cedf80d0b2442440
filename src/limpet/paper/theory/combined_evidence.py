"""Theorem 3: support restriction and visible context are evidence of one mode, and their log-likelihood ratios add."""

from typing import NamedTuple

import torch
from torch import Tensor

from limpet.paper.theory import problems
from limpet.paper.theory.checks import Check, worst_case
from limpet.paper.theory.problems import RANDOM, divergence, product, random_distributions
from limpet.paper.theory.shared_modes import mixture, spread_bound


class Evidence(NamedTuple):
    """The quantities of the theorem, for a batch of B problems with K modes. The first mode is the reference m*."""

    weights: Tensor  # (B, K) prior
    support: Tensor  # (B, K, d, V) distributions R of the support-bearing tokens X
    future: Tensor  # (B, K, n, V) distributions P of the future tokens Y
    context: Tensor  # (B, K, H, V) distributions of the visible observations U
    retained: Tensor  # (B, d, V) bool: the rectangle A
    observed: Tensor  # (B, H) the observed u


def random_evidence(count: int, modes: int, seed: int, d: int = 3, n: int = 3, h: int = 2, vocab: int = 2) -> Evidence:
    """Random problems; every side of a rectangle keeps a token."""
    generator = torch.Generator().manual_seed(seed)
    retained = torch.rand(count, d, vocab, generator=generator) < 0.6
    retained[..., 0] |= ~retained.any(-1)
    return Evidence(
        weights=random_distributions(count, modes, seed=seed + 1),
        support=random_distributions(count, modes, d, vocab, seed=seed + 2),
        future=random_distributions(count, modes, n, vocab, seed=seed + 3),
        context=random_distributions(count, modes, h, vocab, seed=seed + 4),
        retained=retained,
        observed=torch.randint(vocab, (count, h), generator=generator),
    )


def prior_odds(evidence: Evidence) -> Tensor:
    """(B,): a, the prior odds against the reference mode."""
    return evidence.weights[:, 1:].sum(-1) / evidence.weights[:, 0]


def ratios_by_mode(evidence: Evidence) -> tuple[Tensor, Tensor]:
    """(B, K - 1) twice: S_m(A) and T_m(u), the evidence for the reference mode against each other one (eq. 24)."""
    support = (evidence.support * evidence.retained[:, None]).sum(-1).log().sum(-1)  # (B, K): ln R_m(A)
    index = evidence.observed[:, None, :, None].expand(-1, evidence.weights.shape[1], -1, 1)
    context = evidence.context.gather(-1, index)[..., 0].log().sum(-1)  # (B, K): ln P(u | m)
    return support[:, :1] - support[:, 1:], context[:, :1] - context[:, 1:]


def ratios(evidence: Evidence) -> tuple[Tensor, Tensor]:
    """(B,) twice: S(A) and T(u), the least of each over the other modes (eq. 25)."""
    support, context = ratios_by_mode(evidence)
    return support.amin(-1), context.amin(-1)


def joint(evidence: Evidence) -> Tensor:
    """(B, K, V**d, V**n, V**H): the distribution of mode, support, future and context, independent given the mode."""
    x, y, u = product(evidence.support), product(evidence.future), product(evidence.context)
    return torch.einsum("bk,bkx,bky,bku->bkxyu", evidence.weights, x, y, u)


def observe(probs: Tensor, evidence: Evidence) -> tuple[Tensor, Tensor]:
    """(B, K) and (B, V**n): the distributions of the mode and of the future given X in A and U = u, by summation."""
    inside = product(evidence.retained.double())  # (B, V**d): 1 in the rectangle
    observed = product(torch.nn.functional.one_hot(evidence.observed, evidence.context.shape[-1]).double())
    rest = torch.einsum("bkxyu,bx,bu->bky", probs, inside, observed)
    rest = rest / rest.sum((1, 2), keepdim=True)
    return rest.sum(-1), rest.sum(1)


def error_bound(odds: Tensor, total: Tensor) -> Tensor:
    """epsilon(S, T) of eq. 27: the posterior error when the odds have fallen by e^-(S + T)."""
    left = odds * (-total).exp()
    return left / (1 + left)


def log_loss_bound(odds: Tensor, total: Tensor) -> Tensor:
    """The bound on -ln w_m* (eq. 30), which depends on S + T alone."""
    return (odds * (-total).exp()).log1p()


def gap(future: Tensor, vocab_size: int) -> Tensor:
    """(B,): KL(mixture || product of its marginals) of the future tokens."""
    return divergence(future, product(problems.marginals(future, vocab_size)))


def check(name: str, evidence: Evidence, probs: Tensor | None = None) -> list[Check]:
    """Every claim of the theorem: the left sides by enumeration, the right sides from S and T.

    probs: the joint distribution. Default: `joint(evidence)`; another one may lack the conditional independence."""
    mode, future = observe(joint(evidence) if probs is None else probs, evidence)
    modes, count, odds = mode.shape[1], evidence.future.shape[-2], prior_odds(evidence)
    total = torch.stack(ratios(evidence)).sum(0)
    error, others = error_bound(odds, total), mode[:, 1:].sum(-1)
    spread = spread_bound(error.clamp(max=1 - 1 / modes), modes)
    each = (evidence.weights[:, 1:] / evidence.weights[:, :1]).log() - torch.stack(ratios_by_mode(evidence)).sum(0)
    distance = problems.total_variation(future, mixture(mode, evidence.future))
    pairs: dict[str, tuple[Tensor, Tensor]] = {
        "ln posterior odds <= ln prior odds - S - T": ((others / mode[:, 0]).log(), odds.log() - total),
        "posterior error <= e(S, T)": (others, error),
        "Ent(w[A, u]) <= h2(e) + e log(K - 1)": (problems.entropy(mode), spread),
        "KL given A, u <= (n - 1)(h2(e) + e log(K - 1))": (
            gap(future, evidence.future.shape[-1]),
            (count - 1) * spread,
        ),
        "-ln w[A, u] <= ln(1 + a e^-(S + T))": (-mode[:, 0].log(), log_loss_bound(odds, total)),
    }
    return [
        worst_case(
            "ln odds of each mode = ln prior odds - S_m - T_m", name, (mode[:, 1:] / mode[:, :1]).log(), "=", each
        ),
        *(worst_case(statement, name, left, "<=", right) for statement, (left, right) in pairs.items()),
        worst_case("future given A, u = mixture at w[A, u] (TV)", name, distance, "=", 0.0),
    ]


def checks() -> list[Check]:
    shape = "V=2, d=3, n=3, H=2"
    rows = check(f"{RANDOM:,} random problems, K=4, {shape}", random_evidence(RANDOM, 4, seed=30))
    return rows + check(f"{RANDOM:,} random problems, K=2, {shape}", random_evidence(RANDOM, 2, seed=40))
