"""Appendix E.1: which laws are a scalar temperature of another, and the convex fit of the nearest one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from limpet.theory.figures import panels
from limpet.theory.laws import divergence, total_variation
from limpet.theory.rows import Row, worst
from limpet.theory.sources import RANDOM, random_laws, tiny

LARGEST = 1e4  # inverse temperatures beyond this are not looked for


def tempered(law: Tensor, beta: Tensor) -> Tensor:
    """nu_beta: the law to the power beta, normalised; beta has the law's shape without its last axis."""
    return (beta[..., None] * law.log()).softmax(-1)


def variance(law: Tensor, beta: Tensor) -> Tensor:
    """f''(beta) in closed form: the variance of ln nu under nu_beta."""
    at, log = tempered(law, beta), law.log()
    return (at * (log - (at * log).sum(-1, keepdim=True)) ** 2).sum(-1)


def fit(law: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """The beta >= 0 that brings `other` to its nearest temperature of `law`, and KL(other || law_beta), what is left.

    The objective is convex, so its slope E_{nu_beta}[ln nu] - E_mu[ln nu] rises: bisect for its zero."""
    log = law.log()
    target = (other * log).sum(-1)
    low, high = torch.zeros_like(target), torch.full_like(target, LARGEST)
    for _ in range(100):
        middle = (low + high) / 2
        short = (tempered(law, middle) * log).sum(-1) < target
        low, high = torch.where(short, middle, low), torch.where(short, high, middle)
    beta = torch.where(log.mean(-1) >= target, 0.0, (low + high) / 2)  # where the slope is up already at 0, stay there
    return beta, divergence(other, tempered(law, beta))


def disproportion(law: Tensor, other: Tensor, beta: Tensor) -> Tensor:
    """The largest |ln mu(a)/mu(b) - beta ln nu(a)/nu(b)| over pairs of labels: 0 exactly for a temperature (eq. 39)."""
    off = other.log() - beta[..., None] * law.log()
    return off.amax(-1) - off.amin(-1)


def check_characterisation(name: str, law: Tensor, other: Tensor, beta: Tensor) -> list[Row]:
    """Log ratios are beta times as large; so rankings are kept, the fit finds beta, and nothing is left.

    Claims where `other` is `tempered(law, beta)`; any law can be given, to see them fail."""
    found, residual = fit(law, other)
    swapped = (law.argsort(-1) != other.argsort(-1)).any(-1).double()
    return [
        worst("log ratios = beta x log ratios", name, disproportion(law, other, beta), "=", 0.0),
        worst(
            "law rebuilt from the log ratios = law (TV)", name, total_variation(_rebuilt(law, beta), other), "=", 0.0
        ),
        worst("rankings that changed", name, swapped, "=", 0.0),
        worst("f'' x (fitted beta - beta) = 0", name, variance(law, beta) * (found - beta), "=", 0.0),
        worst("temperature residual = 0", name, residual, "=", 0.0),
    ]


def _rebuilt(law: Tensor, beta: Tensor) -> Tensor:
    """The reverse direction of the proof: fix label 0, exponentiate the log ratios against it, normalise."""
    weights = (law / law[..., :1]) ** beta[..., None]
    return weights / weights.sum(-1, keepdim=True)


def check_convexity(name: str, law: Tensor, other: Tensor, beta: Tensor) -> list[Row]:
    """f'' by automatic differentiation is the variance, so f is convex; and no beta does better than the fit."""
    variable = beta.clone().requires_grad_()
    value = divergence(other, tempered(law, variable))
    (slope,) = torch.autograd.grad(value.sum(), variable, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), variable)
    _, residual = fit(law, other)
    grid = torch.linspace(0, 10, 101, dtype=torch.float64)
    tried = torch.stack([divergence(other, tempered(law, at.expand(len(law)))) for at in grid])
    middle = divergence(other, tempered(law, (beta + 1) / 2))
    ends = (value.detach() + divergence(other, tempered(law, torch.ones_like(beta)))) / 2
    return [
        worst("f'' = variance of ln nu", name, curvature, "=", variance(law, beta)),
        worst("f at the middle <= mean of f at the ends", name, middle, "<=", ends),
        worst("fitted residual <= residual at any beta", name, residual, "<=", tried),
        worst("0 <= fitted residual", name, torch.zeros(()), "<=", residual),
    ]


def context_residual(share: float) -> Tensor:
    """(L - 1,): on the tiny mixture, what no temperature explains of a change that one visible label makes.

    From the state 0 ... 0 at this noise, position 0 is overwritten by 1; the others' laws are compared."""
    source = tiny()[1]
    signal = torch.full((1,), 1 - share, dtype=torch.float64)
    state = torch.zeros(1, source.length, dtype=torch.long)
    shown = state.clone()
    shown[0, 0] = 1
    return fit(source.law(state, signal)[0, 1:], source.law(shown, signal)[0, 1:])[1]


def rows() -> list[Row]:
    law, other = random_laws(RANDOM, 8, seed=80), random_laws(RANDOM, 8, seed=81)
    beta = 0.05 + 3 * torch.rand(RANDOM, generator=torch.Generator().manual_seed(82), dtype=torch.float64)
    name = f"{RANDOM:,} random laws, V=8"
    zero = torch.zeros(RANDOM, dtype=torch.float64)
    found = check_characterisation(name, law, tempered(law, beta), beta)
    found.append(
        worst("beta = 0 gives the uniform law (TV)", name,
              total_variation(tempered(law, zero), torch.full_like(law, 1 / 8)), "=", 0.0)
    )  # fmt: skip
    found += check_convexity(f"{RANDOM:,} random pairs of laws, V=8", law, other, beta)
    found.append(
        worst(
            "0 < residual of a visible label",
            "mixture, V=3, L=5, noise 0.5",
            torch.zeros(()),
            "<",
            context_residual(0.5),
        )
    )
    return found


def figure() -> Any:
    drawing, (fits, left) = panels("Visible context is not a temperature", 2)
    law, other = random_laws(6, 8, seed=80), random_laws(6, 8, seed=81)
    grid = torch.linspace(0, 4, 200, dtype=torch.float64)
    for nu, mu in zip(law, other, strict=True):
        fits.plot(grid, divergence(mu, tempered(nu.expand(len(grid), -1), grid)))
    fits.set_ylim(0, 4)
    fits.set_xlabel("inverse temperature beta")
    fits.set_ylabel("KL(other || law_beta), nats")
    fits.set_title("convex objectives of six random pairs")
    noises = torch.linspace(0.02, 0.98, 49).tolist()
    residuals = torch.stack([context_residual(noise) for noise in noises])
    for position, values in enumerate(residuals.T, 1):
        left.plot(noises, values, label=f"position {position}")
    left.set_xlabel("noise")
    left.set_ylabel("residual after the best temperature, nats")
    left.set_title("one visible label, mixture, V=3, L=5")
    left.legend()
    return drawing
