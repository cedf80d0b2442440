"""Theorem 1: what a product of marginals loses of a shared mode, and how visible context that favours one mode recovers
it.

Modes have prior weights (B, K). Given its mode, a sequence has independent tokens with distributions (B, K, n, V)."""

import math

import torch
from torch import Tensor

from limpet.models.exact import codebook
from limpet.paper.theory import problems
from limpet.paper.theory.checks import Check, worst_case
from limpet.paper.theory.problems import RANDOM, divergence, entropy, marginals, product, random_distributions


def mixture(weights: Tensor, distributions: Tensor) -> Tensor:
    """(B, V**n): Q_mix, one mode for all tokens (eq. 11)."""
    return (weights[..., None] * product(distributions)).sum(-2)


def average(weights: Tensor, distributions: Tensor) -> Tensor:
    """(B, n, V): the distribution of each token, averaged over the modes."""
    return (weights[..., None, None] * distributions).sum(-3)


def mode_gap(weights: Tensor, distributions: Tensor) -> Tensor:
    """(B,): KL(Q_mix || Q_prod). Q_prod draws a mode for each token separately."""
    return divergence(mixture(weights, distributions), product(average(weights, distributions)))


def spread_bound(error: Tensor, modes: int) -> Tensor:
    """h2(error) + error log(K - 1): the largest entropy of K modes when the likeliest one misses `error`."""
    return entropy(torch.stack([error, 1 - error], -1)) + error * math.log(max(1, modes - 1))


def check_gap(name: str, weights: Tensor, distributions: Tensor) -> list[Check]:
    """KL(mixture || product) = total correlation <= the tokens' information on the mode <= (n - 1) Ent(w) (eq. 12)."""
    count, vocab_size = distributions.shape[-2:]
    joint, gap = mixture(weights, distributions), mode_gap(weights, distributions)
    correlation = entropy(marginals(joint, vocab_size)).sum(-1) - entropy(joint)
    conditional = (weights[..., None] * entropy(distributions)).sum(-2)
    information = (entropy(average(weights, distributions)) - conditional)[:, 1:].sum(-1)  # I(Y_i; M), but for one
    return [
        worst_case("KL(mixture || product) = total correlation", name, gap, "=", correlation),
        worst_case("KL(mixture || product) <= sum of I(Y_i; M)", name, gap, "<=", information),
        worst_case("sum of I(Y_i; M) <= (n - 1) Ent(w)", name, information, "<=", (count - 1) * entropy(weights)),
    ]


def with_context(weights: Tensor, context: Tensor, distributions: Tensor) -> Tensor:
    """(B, K, U, V**n): the joint distribution of mode, context and tokens, independent given the mode.

    context: (B, K, U) the distribution of the context in each mode."""
    return weights[..., None, None] * context[..., None] * product(distributions)[..., None, :]


def check_context(name: str, joint: Tensor, vocab_size: int) -> list[Check]:
    """Given any context u, the tokens' distribution is the mixture with weights w[u], and its gap obeys eq. 13.

    joint: (B, K, U, V**n). Everything is computed from it, so the check fails where the tokens depend on the context
    beyond the mode."""
    modes = joint.shape[1]
    by_context = joint.sum(1)  # (B, U, V**n)
    tokens = by_context / by_context.sum(-1, keepdim=True)  # given u
    weights = joint.sum(-1) / joint.sum((1, 3))[:, None]  # (B, K, U): w[u]
    by_mode = joint.sum(2) / joint.sum((2, 3))[..., None]  # (B, K, V**n)
    distance = problems.total_variation(tokens, torch.einsum("bku,bky->buy", weights, by_mode))
    each = marginals(tokens, vocab_size)
    bound = (each.shape[-2] - 1) * spread_bound(1 - weights.amax(1), modes)
    statement = "KL given u <= (n - 1)(h2(e) + e log(K - 1))"
    return [
        worst_case("distribution given u = mixture at w[u] (TV)", name, distance, "=", 0.0),
        worst_case(statement, name, divergence(tokens, product(each)), "<=", bound),
    ]


def check_ratio(name: str, weights: Tensor, context: Tensor) -> Check:
    """Posterior odds against a mode <= prior odds times the largest likelihood ratio (eq. 23), in logs, for every
    reference mode and every context."""
    posterior = weights[..., None] * context  # (B, K, U), up to a constant
    odds, bounds = [], []
    for mode in range(weights.shape[1]):
        others = [m for m in range(weights.shape[1]) if m != mode]
        ratio = (context[:, others] / context[:, [mode]]).amax(1)
        prior = weights[:, others].sum(1) / weights[:, mode]
        odds.append((posterior[:, others].sum(1) / posterior[:, mode]).log())
        bounds.append((prior[:, None] * ratio).log())
    return worst_case(
        "ln posterior odds <= ln prior odds + ln ratio", name, torch.stack(odds), "<=", torch.stack(bounds)
    )


def two_coordinates(share: float) -> list[Check]:
    """The paper's example: 00 with probability 1 - share, 11 with probability share."""
    name = f"two coordinates, share {share}"
    source = codebook(torch.tensor([[0, 0], [1, 1]]), 2, torch.tensor([1 - share, share], dtype=torch.float64))
    joint = problems.truth(source)
    independent = product(marginals(joint, 2))
    argmax = int(marginals(joint, 2).argmax(-1) @ torch.tensor([2, 1]))
    probs = problems.probs_at(source, torch.tensor([[1, 0]]), 1.0)[0, 1]  # at position 1, where position 0 is a clean 1
    pairs: dict[str, tuple[Tensor, float]] = {
        "hybrid mass of the product = 2 share (1 - share)": (independent[1] + independent[2], 2 * share * (1 - share)),
        "hybrid mass of the data = 0": (joint[1] + joint[2], 0.0),
        "error of the coordinatewise argmax = share": (1 - joint[argmax], share),
        "a visible token decides the other one": (probs[1], 1.0),
    }
    return [Check(statement, name, float(left), "=", right) for statement, (left, right) in pairs.items()]


def check_repetition(count: int, agree: float = 0.8) -> Check:
    """The odds of the other of two modes fall exponentially with the number of visible tokens that agree.

    agree: the probability that a visible token is that of the true mode."""
    words = torch.tensor([[0], [1]]).expand(2, count + 1)
    source = codebook(words, 2, slip=2 * (1 - agree))
    modes = source.mode_probs(words[:1], torch.ones(1, dtype=torch.float64))[0, -1]
    name = f"two modes, c={count}, each right with {agree}"
    odds, right = float(modes[1] / modes[0]), ((1 - agree) / agree) ** count
    return Check("ln odds after c consistent tokens = c ln ratio", name, math.log(odds), "=", math.log(right))


def checks() -> list[Check]:
    weights, context = random_distributions(RANDOM, 3, seed=20), random_distributions(RANDOM, 3, 4, seed=22)
    distributions = random_distributions(RANDOM, 3, 4, 3, seed=21, zeros=0.2)
    name = f"{RANDOM:,} random mixtures, K=3, n=4, V=3"
    points = torch.eye(3, dtype=torch.float64)[None, :, None].expand(RANDOM, 3, 4, 3)
    # A case of equality: words without common tokens, and a context that leaves the modes it disfavours equally likely.
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
        *map(check_repetition, (1, 4, 16)),
    ]
