"""Appendix E.1: which distributions are a scalar temperature of another, and the convex fit of the nearest one."""

import torch
from torch import Tensor

from limpet.paper.theory import problems
from limpet.paper.theory.checks import Check, worst_case
from limpet.paper.theory.problems import RANDOM, divergence, random_distributions, total_variation

LARGEST = 1e4  # the largest inverse temperature that the fit considers


def tempered(probs: Tensor, beta: Tensor) -> Tensor:
    """nu_beta: the distribution to the power beta, normalised. beta: the shape of probs without its last axis."""
    return (beta[..., None] * probs.log()).softmax(-1)


def variance(probs: Tensor, beta: Tensor) -> Tensor:
    """f''(beta) in closed form: the variance of ln nu under nu_beta."""
    at, log = tempered(probs, beta), probs.log()
    return (at * (log - (at * log).sum(-1, keepdim=True)) ** 2).sum(-1)


def fit(probs: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """The beta >= 0 at which nu_beta is nearest to `other`, and the residual KL(other || nu_beta).

    The objective is convex, so its slope E_{nu_beta}[ln nu] - E_other[ln nu] increases. Bisection finds its zero."""
    log = probs.log()
    target = (other * log).sum(-1)
    low, high = torch.zeros_like(target), torch.full_like(target, LARGEST)
    for _ in range(100):
        middle = (low + high) / 2
        is_low = (tempered(probs, middle) * log).sum(-1) < target
        low, high = torch.where(is_low, middle, low), torch.where(is_low, high, middle)
    beta = torch.where(log.mean(-1) >= target, 0.0, (low + high) / 2)  # 0 where the slope is positive already at 0
    return beta, divergence(other, tempered(probs, beta))


def check_characterisation(name: str, probs: Tensor, other: Tensor, beta: Tensor) -> list[Check]:
    """Log ratios are beta times as large (eq. 39), so rankings are the same, and the fit finds beta with no residual.

    A claim where `other` is `tempered(probs, beta)`."""
    fitted, residual = fit(probs, other)
    offset = other.log() - beta[..., None] * probs.log()  # equal for all tokens, if the log ratios of any two are
    # The reverse direction of the proof: exponentiate the log ratios against token 0, and normalise.
    weights = (probs / probs[..., :1]) ** beta[..., None]
    rebuilt = total_variation(weights / weights.sum(-1, keepdim=True), other)
    reranked = (probs.argsort(-1) != other.argsort(-1)).any(-1).double()
    zeros = {
        "log ratios = beta x log ratios": offset.amax(-1) - offset.amin(-1),
        "distribution rebuilt from the log ratios = distribution (TV)": rebuilt,
        "rankings that changed": reranked,
        "f'' x (fitted beta - beta) = 0": variance(probs, beta) * (fitted - beta),
        "temperature residual = 0": residual,
    }
    return [worst_case(statement, name, left, "=", 0.0) for statement, left in zeros.items()]


def check_convexity(name: str, probs: Tensor, other: Tensor, beta: Tensor) -> list[Check]:
    """f'' by automatic differentiation is the variance, so f is convex, and no beta does better than the fit."""

    def f(at: Tensor) -> Tensor:
        return divergence(other, tempered(probs, at))

    slope = torch.func.grad(lambda at: f(at).sum())
    curvature = torch.func.grad(lambda at: slope(at).sum())(beta)
    residual, mean = fit(probs, other)[1], (f(beta) + f(torch.ones_like(beta))) / 2
    grid = torch.stack([f(at.expand(len(probs))) for at in torch.linspace(0, 10, 101, dtype=torch.float64)])
    return [
        worst_case("f'' = variance of ln nu", name, curvature, "=", variance(probs, beta)),
        worst_case("f at the middle <= mean of f at the ends", name, f((beta + 1) / 2), "<=", mean),
        worst_case("fitted residual <= residual at any beta", name, residual, "<=", grid),
        worst_case("0 <= fitted residual", name, torch.zeros(()), "<=", residual),
    ]


def context_residual(noise: float) -> Tensor:
    """(L - 1,): what no temperature explains of the change that one visible token makes, on the tiny mixture.

    In the state 0 ... 0 at this noise, position 0 becomes 1. The distributions at the other positions are compared."""
    source = problems.tiny()[1]
    states = torch.zeros(2, source.length, dtype=torch.long)
    states[1, 0] = 1
    before, after = problems.probs_at(source, states, 1 - noise)[:, 1:]
    return fit(before, after)[1]


def checks() -> list[Check]:
    probs, other = random_distributions(RANDOM, 8, seed=80), random_distributions(RANDOM, 8, seed=81)
    beta = 0.05 + 3 * problems.random_numbers(RANDOM, seed=82)
    name, zero = f"{RANDOM:,} random distributions, V=8", torch.zeros(())
    to_uniform = total_variation(tempered(probs, torch.zeros_like(beta)), torch.full_like(probs, 1 / 8))
    residual, where = context_residual(0.5), "mixture, V=3, L=5, noise 0.5"
    return [
        *check_characterisation(name, probs, tempered(probs, beta), beta),
        worst_case("beta = 0 gives the uniform distribution (TV)", name, to_uniform, "=", 0.0),
        *check_convexity(f"{RANDOM:,} random pairs of distributions, V=8", probs, other, beta),
        worst_case("0 < residual of a visible token", where, zero, "<", residual),
    ]
