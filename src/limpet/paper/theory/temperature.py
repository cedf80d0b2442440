"""Appendix E.1: which distributions are a scalar temperature of another, and the convex fit of the nearest one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from limpet.experiments.contents import Panel
from limpet.paper.theory.problems import (
    RANDOM,
    divergence,
    probs_at,
    random_distributions,
    random_numbers,
    tiny,
    total_variation,
)
from limpet.paper.theory.sides import Sides, line, worst

LARGEST = 1e4  # inverse temperatures beyond this are not looked for


def tempered(probs: Tensor, beta: Tensor) -> Tensor:
    """nu_beta: the distribution to the power beta, normalised; beta has the distribution's shape without its last axis."""
    return (beta[..., None] * probs.log()).softmax(-1)


def variance(probs: Tensor, beta: Tensor) -> Tensor:
    """f''(beta) in closed form: the variance of ln nu under nu_beta."""
    at, log = tempered(probs, beta), probs.log()
    return (at * (log - (at * log).sum(-1, keepdim=True)) ** 2).sum(-1)


def fit(probs: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """The beta >= 0 that brings `other` to its nearest temperature of `distribution`, and KL(other || law_beta), what is left.

    The objective is convex, so its slope E_{nu_beta}[ln nu] - E_mu[ln nu] rises: bisect for its zero."""
    log = probs.log()
    target = (other * log).sum(-1)
    low, high = torch.zeros_like(target), torch.full_like(target, LARGEST)
    for _ in range(100):
        middle = (low + high) / 2
        short = (tempered(probs, middle) * log).sum(-1) < target
        low, high = torch.where(short, middle, low), torch.where(short, high, middle)
    beta = torch.where(log.mean(-1) >= target, 0.0, (low + high) / 2)  # where the slope is up already at 0, stay there
    return beta, divergence(other, tempered(probs, beta))


def check_characterisation(name: str, probs: Tensor, other: Tensor, beta: Tensor) -> list[Sides]:
    """Log ratios are beta times as large (eq. 39); so rankings are kept, the fit finds beta, and nothing is left.

    Claims where `other` is `tempered(distribution, beta)`; any distribution can be given, to see them fail."""
    found, residual = fit(probs, other)
    off = other.log() - beta[..., None] * probs.log()  # alike for all tokens, if the ratios of any two are
    # The reverse direction of the proof: fix token 0, exponentiate the log ratios against it, normalise.
    weights = (probs / probs[..., :1]) ** beta[..., None]
    rebuilt = total_variation(weights / weights.sum(-1, keepdim=True), other)
    swapped = (probs.argsort(-1) != other.argsort(-1)).any(-1).double()
    return [
        worst("log ratios = beta x log ratios", name, off.amax(-1) - off.amin(-1), "=", 0.0),
        worst("distribution rebuilt from the log ratios = distribution (TV)", name, rebuilt, "=", 0.0),
        worst("rankings that changed", name, swapped, "=", 0.0),
        worst("f'' x (fitted beta - beta) = 0", name, variance(probs, beta) * (found - beta), "=", 0.0),
        worst("temperature residual = 0", name, residual, "=", 0.0),
    ]


def check_convexity(name: str, probs: Tensor, other: Tensor, beta: Tensor) -> list[Sides]:
    """f'' by automatic differentiation is the variance, so f is convex; and no beta does better than the fit."""

    def f(at: Tensor) -> Tensor:
        return divergence(other, tempered(probs, at))

    slope = torch.func.grad(lambda at: f(at).sum())
    curvature = torch.func.grad(lambda at: slope(at).sum())(beta)
    _, residual = fit(probs, other)
    tried = torch.stack([f(at.expand(len(probs))) for at in torch.linspace(0, 10, 101, dtype=torch.float64)])
    return [
        worst("f'' = variance of ln nu", name, curvature, "=", variance(probs, beta)),
        worst("f at the middle <= mean of f at the ends", name,
              f((beta + 1) / 2), "<=", (f(beta) + f(torch.ones_like(beta))) / 2),
        worst("fitted residual <= residual at any beta", name, residual, "<=", tried),
        worst("0 <= fitted residual", name, torch.zeros(()), "<=", residual),
    ]  # fmt: skip


def context_residual(noise: float) -> Tensor:
    """(L - 1,): on the tiny mixture, what no temperature explains of a change that one visible label makes.

    From the state 0 ... 0 at this noise, position 0 is overwritten by 1; the others' distributions are compared."""
    source = tiny()[1]
    states = torch.zeros(2, source.length, dtype=torch.long)
    states[1, 0] = 1
    hidden, shown = probs_at(source, states, 1 - noise)[:, 1:]
    return fit(hidden, shown)[1]


def sides() -> list[Sides]:
    probs, other = random_distributions(RANDOM, 8, seed=80), random_distributions(RANDOM, 8, seed=81)
    beta = 0.05 + 3 * random_numbers(RANDOM, seed=82)
    name = f"{RANDOM:,} random distributions, V=8"
    flat = total_variation(tempered(probs, torch.zeros_like(beta)), torch.full_like(probs, 1 / 8))
    left, where = context_residual(0.5), "mixture, V=3, L=5, noise 0.5"
    return [
        *check_characterisation(name, probs, tempered(probs, beta), beta),
        worst("beta = 0 gives the uniform distribution (TV)", name, flat, "=", 0.0),
        *check_convexity(f"{RANDOM:,} random pairs of distributions, V=8", probs, other, beta),
        worst("0 < residual of a visible label", where, torch.zeros(()), "<", left),
    ]


def panels() -> Iterator[Panel]:
    pairs = zip(random_distributions(6, 8, seed=80), random_distributions(6, 8, seed=81), strict=True)
    grid = torch.linspace(0, 4, 200, dtype=torch.float64)
    fits = [
        line(f"pair {i}", grid, divergence(mu, tempered(nu.expand(len(grid), -1), grid)))
        for i, (nu, mu) in enumerate(pairs, 1)
    ]
    noises = torch.linspace(0.02, 0.98, 49).tolist()
    residuals = torch.stack([context_residual(noise) for noise in noises], 1)
    left = [line(f"position {i}", noises, values) for i, values in enumerate(residuals, 1)]
    title, axes = "convex objectives of six random pairs", {"ylim": (0, 4)}
    yield Panel(title, "inverse temperature beta", "KL(other || law_beta), nats", fits, axes=axes)
    title = "one visible label, mixture, V=3, L=5"
    yield Panel(title, "noise", "residual after the best temperature, nats", left)
