"""Theorem 3: support restriction and visible context are evidence on one mode, and their log-likelihood ratios add."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from limpet.experiments.contents import Panel
from limpet.paper.theory.problems import (
    RANDOM,
    divergence,
    entropy,
    marginals,
    product,
    random_distributions,
    total_variation,
)
from limpet.paper.theory.shared_modes import mixture, spread_bound
from limpet.paper.theory.sides import Sides, line, worst


class Evidence(NamedTuple):
    """Everything that the theorem speaks of, for a batch of B problems with K modes, the first the reference m*."""

    weights: Tensor  # (B, K) prior
    support: Tensor  # (B, K, d, V) distributions R of the support-bearing tokens X
    future: Tensor  # (B, K, n, V) distributions P of the future tokens Y
    context: Tensor  # (B, K, H, V) distributions of the visible observations U
    retained: Tensor  # (B, d, V) bool: the rectangle A
    seen: Tensor  # (B, H) the observed u


def random_evidence(count: int, modes: int, seed: int, d: int = 3, n: int = 3, h: int = 2, vocab: int = 2) -> Evidence:
    generator = torch.Generator().manual_seed(seed)
    retained = torch.rand(count, d, vocab, generator=generator) < 0.6
    retained[..., 0] |= ~retained.any(-1)  # no empty side
    return Evidence(
        weights=random_distributions(count, modes, seed=seed + 1),
        support=random_distributions(count, modes, d, vocab, seed=seed + 2),
        future=random_distributions(count, modes, n, vocab, seed=seed + 3),
        context=random_distributions(count, modes, h, vocab, seed=seed + 4),
        retained=retained,
        seen=torch.randint(vocab, (count, h), generator=generator),
    )


def prior_odds(evidence: Evidence) -> Tensor:
    """(B,): a, the prior odds against the reference mode."""
    return evidence.weights[:, 1:].sum(-1) / evidence.weights[:, 0]


def ratios_by_mode(evidence: Evidence) -> tuple[Tensor, Tensor]:
    """(B, K - 1) twice: S_m(A) and T_m(u), the evidence for the reference mode against each other one (eq. 24)."""
    kept = (evidence.support * evidence.retained[:, None]).sum(-1).log().sum(-1)  # (B, K): ln R_m(A)
    index = evidence.seen[:, None, :, None].expand(-1, evidence.weights.shape[1], -1, 1)
    told = evidence.context.gather(-1, index)[..., 0].log().sum(-1)  # (B, K): ln P(u | m)
    return kept[:, :1] - kept[:, 1:], told[:, :1] - told[:, 1:]


def ratios(evidence: Evidence) -> tuple[Tensor, Tensor]:
    """(B,) twice: S(A) and T(u), the least of each over the other modes (eq. 25)."""
    support, context = ratios_by_mode(evidence)
    return support.amin(-1), context.amin(-1)


def joint(evidence: Evidence) -> Tensor:
    """(B, K, V**d, V**n, V**H): the distribution of mode, support, future and context, all independent given the mode."""
    x, y, u = product(evidence.support), product(evidence.future), product(evidence.context)
    return torch.einsum("bk,bkx,bky,bku->bkxyu", evidence.weights, x, y, u)


def observe(probs: Tensor, evidence: Evidence) -> tuple[Tensor, Tensor]:
    """(B, K) and (B, V**n): the distributions of the mode and of the future given X in A and U = u, by summing the joint distribution."""
    inside = product(evidence.retained.double())  # (B, V**d): 1 in the rectangle
    seen = product(torch.nn.functional.one_hot(evidence.seen, evidence.context.shape[-1]).double())
    rest = torch.einsum("bkxyu,bx,bu->bky", probs, inside, seen)
    rest = rest / rest.sum((1, 2), keepdim=True)
    return rest.sum(-1), rest.sum(1)


def error_bound(odds: Tensor, total: Tensor) -> Tensor:
    """epsilon(S, T) of eq. 27: the posterior error at which the odds have fallen by e^-(S + T)."""
    left = odds * (-total).exp()
    return left / (1 + left)


def log_loss_bound(odds: Tensor, total: Tensor) -> Tensor:
    """The certificate on -ln w_m* (eq. 30); it depends on S and T through their sum."""
    return (odds * (-total).exp()).log1p()


def check(name: str, evidence: Evidence, probs: Tensor | None = None) -> list[Sides]:
    """Every claim of the theorem, the left sides by enumeration of `distribution`, the right ones from S and T.

    `distribution` is `joint(evidence)` unless another is given, for instance one without the conditional independence."""
    mode, future = observe(joint(evidence) if probs is None else probs, evidence)
    modes, vocab_size, count = mode.shape[1], evidence.future.shape[-1], evidence.future.shape[-2]
    total = torch.stack(ratios(evidence)).sum(0)
    odds = prior_odds(evidence)
    error = error_bound(odds, total)
    capped = error.clamp(max=1 - 1 / modes)
    gap = divergence(future, product(marginals(future, vocab_size)))
    others = mode[:, 1:].sum(-1)
    spread = spread_bound(capped, modes)
    each = (evidence.weights[:, 1:] / evidence.weights[:, :1]).log() - torch.stack(ratios_by_mode(evidence)).sum(0)
    return [
        worst("ln odds of each mode = ln prior odds - S_m - T_m", name, (mode[:, 1:] / mode[:, :1]).log(), "=", each),
        worst("ln posterior odds <= ln prior odds - S - T", name,
              (others / mode[:, 0]).log(), "<=", odds.log() - total),
        worst("posterior error <= e(S, T)", name, others, "<=", error),
        worst("Ent(w[A, u]) <= h2(e) + e log(K - 1)", name, entropy(mode), "<=", spread),
        worst("KL given A, u <= (n - 1)(h2(e) + e log(K - 1))", name, gap, "<=", (count - 1) * spread),
        worst("-ln w[A, u] <= ln(1 + a e^-(S + T))", name, -mode[:, 0].log(), "<=", log_loss_bound(odds, total)),
        worst("future given A, u = mixture at w[A, u] (TV)", name,
              total_variation(future, mixture(mode, evidence.future)), "=", 0.0),
    ]  # fmt: skip


def sides() -> list[Sides]:
    shape = "V=2, d=3, n=3, H=2"
    found = check(f"{RANDOM:,} random problems, K=4, {shape}", random_evidence(RANDOM, 4, seed=30))
    return found + check(f"{RANDOM:,} random problems, K=2, {shape}", random_evidence(RANDOM, 2, seed=40))


def panels() -> Iterator[Panel]:
    evidence = random_evidence(RANDOM, 4, seed=30)
    mode, future = observe(joint(evidence), evidence)
    total, prior = torch.stack(ratios(evidence)).sum(0), prior_odds(evidence)
    odds = line("a problem", prior * (-total).exp(), mode[:, 1:].sum(-1) / mode[:, 0], ".")
    bound = 2 * spread_bound(error_bound(prior, total).clamp(max=0.75), 4)
    gap = line("a problem", bound, divergence(future, product(marginals(future, 2))), ".")
    reach, most = (1e-8, 1e8), (0, 2 * math.log(4))
    axes = {"xscale": "log", "yscale": "log", "xlim": reach, "ylim": reach}
    lines, what = [odds, line("equality", reach, reach, "k:")], "posterior odds against the mode"
    yield Panel("", "bound: prior odds x e^-(S + T)", what, lines, axes=axes)
    lines, what = [gap, line("equality", most, most, "k:")], "KL(mixture || product), nats"
    yield Panel("", f"bound on {what}", what, lines)
