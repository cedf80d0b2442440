"""Theorem 1: what a product of marginals loses of a shared mode, and how visible context that favours one mode wins it
back."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from limpet.experiments.contents import Panel
from limpet.models.exact import codebook
from limpet.paper.theory.problems import (
    RANDOM,
    divergence,
    entropy,
    marginals,
    product,
    random_distributions,
    total_variation,
    truth,
)
from limpet.paper.theory.sides import Sides, line, worst

# Modes have prior weights (B, K); given its mode, a sequence has independent tokens with distributions (B, K, n, V).


def mixture(weights: Tensor, distributions: Tensor) -> Tensor:
    """(B, V**n): Q_mix, one mode for all tokens (eq. 11)."""
    return (weights[..., None] * product(distributions)).sum(-2)


def remixed(weights: Tensor, distributions: Tensor) -> Tensor:
    """(B, V**n): Q_prod, a mode for each token by itself."""
    return product((weights[..., None, None] * distributions).sum(-3))


def spread_bound(error: Tensor, modes: int) -> Tensor:
    """h2(error) + error log(K - 1): the most entropy that K modes can have when the likeliest misses `error`."""
    own = torch.stack([error, 1 - error], -1)
    return entropy(own) + error * math.log(max(1, modes - 1))


def check_gap(name: str, weights: Tensor, distributions: Tensor) -> list[Sides]:
    """KL(mixture || product) = total correlation <= the tokens' information on the mode <= (n - 1) Ent(w) (eq. 12)."""
    count, vocab_size = distributions.shape[-2:]
    joint = mixture(weights, distributions)
    gap = divergence(joint, remixed(weights, distributions))
    average = (weights[..., None, None] * distributions).sum(-3)
    information = entropy(average) - (weights[..., None] * entropy(distributions)).sum(-2)  # (B, n): I(Y_i; M)
    told = information[:, 1:].sum(-1)
    correlation = entropy(marginals(joint, vocab_size)).sum(-1) - entropy(joint)
    return [
        worst("KL(mixture || product) = total correlation", name, gap, "=", correlation),
        worst("KL(mixture || product) <= sum of I(Y_i; M)", name, gap, "<=", told),
        worst("sum of I(Y_i; M) <= (n - 1) Ent(w)", name, told, "<=", (count - 1) * entropy(weights)),
    ]


def with_context(weights: Tensor, context: Tensor, distributions: Tensor) -> Tensor:
    """(B, K, U, V**n): the joint distribution of mode, context and tokens when the context has distribution (B, K, U) given the mode and
    tells nothing more on the tokens."""
    return weights[..., None, None] * context[..., None] * product(distributions)[..., None, :]


def check_context(name: str, joint: Tensor, vocab_size: int) -> list[Sides]:
    """Given any context u: the tokens' distribution is the mixture with weights w[u], and its gap obeys eq. 13.

    Everything is read off the joint distribution (B, K, U, V**n) of mode, context and tokens, so that one in which the tokens
    depend on the context beyond the mode breaks it."""
    modes = joint.shape[1]
    by_context = joint.sum(1)  # (B, U, V**n)
    given = by_context / by_context.sum(-1, keepdim=True)
    weights = joint.sum(-1) / joint.sum((1, 3))[:, None]  # (B, K, U): w[u]
    distributions = joint.sum(2) / joint.sum((2, 3))[..., None]  # (B, K, V**n): of the tokens given the mode
    mixed = torch.einsum("bku,bky->buy", weights, distributions)
    each = marginals(given, vocab_size)
    gap = divergence(given, product(each))
    bound = (each.shape[-2] - 1) * spread_bound(1 - weights.amax(1), modes)
    return [
        worst("distribution given u = mixture at w[u] (TV)", name, total_variation(given, mixed), "=", 0.0),
        worst("KL given u <= (n - 1)(h2(e) + e log(K - 1))", name, gap, "<=", bound),
    ]


def check_ratio(name: str, weights: Tensor, context: Tensor) -> Sides:
    """Posterior odds against a mode <= prior odds times the largest likelihood ratio (eq. 23), in logs, for every
    reference mode and every context."""
    posterior = weights[..., None] * context  # (B, K, U), up to a constant
    found = []
    for mode in range(weights.shape[1]):
        others = [m for m in range(weights.shape[1]) if m != mode]
        odds = posterior[:, others].sum(1) / posterior[:, mode]
        ratio = (context[:, others] / context[:, [mode]]).amax(1)
        prior = weights[:, others].sum(1) / weights[:, mode]
        found.append((odds.log(), (prior[:, None] * ratio).log()))
    left, right = (torch.stack(side) for side in zip(*found, strict=True))
    return worst("ln posterior odds <= ln prior odds + ln ratio", name, left, "<=", right)


def two_coordinates(share: float) -> list[Sides]:
    """The paper's example: 00 with probability 1 - share, 11 with probability share."""
    name = f"two coordinates, share {share}"
    source = codebook(torch.tensor([[0, 0], [1, 1]]), 2, torch.tensor([1 - share, share], dtype=torch.float64))
    joint = truth(source)
    apart = product(marginals(joint, 2))
    argmax = int(marginals(joint, 2).argmax(-1) @ torch.tensor([2, 1]))
    seen = source.probs(torch.tensor([[1, 0]]), torch.ones(1, dtype=torch.float64))[0, 1]  # position 1 sees a clean 1
    return [
        Sides("hybrid mass of the product = 2 share (1 - share)", name, float(apart[1] + apart[2]), "=",
            2 * share * (1 - share)),
        Sides("hybrid mass of the data = 0", name, float(joint[1] + joint[2]), "=", 0.0),
        Sides("error of the coordinatewise argmax = share", name, float(1 - joint[argmax]), "=", share),
        Sides("a visible label decides the other token", name, float(seen[1]), "=", 1.0),
    ]  # fmt: skip


def _repeated(labels: int, agree: float = 0.8) -> Sides:
    """Visible labels that each name the true one of two modes with probability `agree`: the odds that the exact
    denoiser gives the other mode fall exponentially."""
    words = torch.tensor([[0], [1]]).expand(2, labels + 1)
    source = codebook(words, 2, slip=2 * (1 - agree))
    modes = source.mode_probs(words[:1], torch.ones(1, dtype=torch.float64))[0, -1]
    name = f"two modes, c={labels}, each right with {agree}"
    odds, right = float(modes[1] / modes[0]), ((1 - agree) / agree) ** labels
    return Sides("ln odds after c consistent labels = c ln ratio", name, math.log(odds), "=", math.log(right))


def sides() -> list[Sides]:
    weights, distributions = (
        random_distributions(RANDOM, 3, seed=20),
        random_distributions(RANDOM, 3, 4, 3, seed=21, zeros=0.2),
    )
    context = random_distributions(RANDOM, 3, 4, seed=22)
    name = f"{RANDOM:,} random mixtures, K=3, n=4, V=3"
    points = torch.eye(3, dtype=torch.float64)[None, :, None].expand(RANDOM, 3, 4, 3)
    # Equality once more: separate words, and a context that leaves the modes it disfavours equally likely.
    even = torch.tensor([[0.7, 0.15, 0.15]], dtype=torch.float64)
    flat = torch.tensor([[[0.5, 0.5], [0.1, 0.9], [0.1, 0.9]]], dtype=torch.float64)
    return [
        *two_coordinates(0.3),
        *check_gap(name, weights, distributions),
        *check_gap(f"{RANDOM:,} codebooks with nothing in common, K=3, n=4", weights, points),
        *check_context(name, with_context(weights, context, distributions), 3),
        *check_context("three words, disfavoured modes equally likely", with_context(even, flat, points[:1]), 3),
        check_ratio(name, weights, context),
        check_ratio(f"{RANDOM:,} random pairs of modes", weights[:, :2], context[:, :2]),
        *(_repeated(labels) for labels in (1, 4, 16)),
    ]


def panels() -> Iterator[Panel]:
    words = torch.eye(2, dtype=torch.float64)[:, None].expand(2, 4, 2)

    def gap(second: Tensor, slip: float = 0.0) -> Tensor:
        """KL(mixture || product) of two words of four tokens that slip, at weights of the second."""
        weights, distributions = torch.stack([1 - second, second], -1), (1 - slip) * words + slip / 2
        distributions = distributions.expand(len(second), 2, 4, 2)
        return divergence(mixture(weights, distributions), remixed(weights, distributions))

    shares, labels = torch.linspace(0.001, 0.999, 200, dtype=torch.float64), torch.arange(9)
    prior = [line(f"tokens slip {slip:g}", shares, gap(shares, slip)) for slip in (0.0, 0.1, 0.3)]
    prior.append(line("(n - 1) Ent(w)", shares, 3 * entropy(torch.stack([1 - shares, shares], -1)), "k:"))
    left = {agree: gap((labels * math.log(agree / (1 - agree))).neg().sigmoid()) for agree in (0.6, 0.8, 0.95)}
    seen = [line(f"each label right with {agree:g}", labels, gaps, "o-") for agree, gaps in left.items()]
    what = "KL(mixture || product), nats"
    yield Panel("K=2, n=4", "prior weight of the second mode", what, prior)
    yield Panel("two separate words, even prior", "visible labels that agree", what, seen, axes={"yscale": "log"})
