"""Section 3.2: restricting the support commutes with the conversion from leave-one-out distribution to posterior."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from limpet.diffusion.process import posterior
from limpet.diffusion.truncation import nucleus, restrict
from limpet.experiments.contents import Panel
from limpet.paper.theory.problems import RANDOM, random_distributions, total_variation
from limpet.paper.theory.sides import Sides, line, worst


def given(probs: Tensor, kept: Tensor) -> Tensor:
    """distribution( . | A): the distribution restricted to a set that holds some of its mass (eq. 8)."""
    inside = probs * kept
    return inside / inside.sum(-1, keepdim=True)


def check(name: str, probs: Tensor, kept: Tensor, z: Tensor, signal: Tensor) -> Sides:
    """C(T_A h) = (C h)( . | A) for (B, V) distributions, sets, (B,) current tokens and signals: the largest TV between them."""
    distance = total_variation(posterior(given(probs, kept), z, signal), given(posterior(probs, z, signal), kept))
    return worst("posterior of restricted = restricted posterior (TV)", name, distance, "=", 0.0)


def check_top_p(name: str, probs: Tensor, p: float, z: Tensor, signal: Tensor, rank: str = "exact") -> Sides:
    """The same for the sampler's own top-p, whose set is ranked on the leave-one-out distribution.

    With rank="posterior" the set is ranked after the conversion, and then the two do not agree."""
    converted = posterior(probs, z, signal)
    kept = nucleus(probs if rank == "exact" else converted, p, "released")
    distance = total_variation(posterior(restrict(probs, p), z, signal), given(converted, kept))
    return worst("posterior of top-p = posterior given the nucleus (TV)", name, distance, "=", 0.0)


def random_steps(count: int, vocab_size: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Distributions, sets that hold some of their mass, current tokens and signals."""
    generator = torch.Generator().manual_seed(seed)
    probs = random_distributions(count, vocab_size, seed=seed)
    kept = torch.rand(count, vocab_size, generator=generator) < 0.4
    kept.scatter_(-1, probs.argmax(-1, keepdim=True), True)
    z = torch.randint(vocab_size, (count,), generator=generator)
    return probs, kept, z, torch.rand(count, generator=generator, dtype=torch.float64)


def sides() -> list[Sides]:
    probs, kept, z, signal = random_steps(RANDOM, 12, seed=70)
    name = f"{RANDOM:,} random distributions, V=12"
    found = [check(f"{name}, random sets", probs, kept, z, signal)]
    return found + [check_top_p(f"{name}, p={p}", probs, p, z, signal) for p in (0.5, 0.9, 0.99)]


def panels() -> Iterator[Panel]:
    probs, _, z, _ = random_steps(RANDOM, 12, seed=70)
    noises = torch.linspace(0.01, 1, 40, dtype=torch.float64)

    def apart(p: float, signal: Tensor) -> float:
        before, after = posterior(restrict(probs, p), z, signal), restrict(posterior(probs, z, signal), p)
        return float(total_variation(before, after).mean())

    lines = [line(f"p = {p:g}", noises, [apart(p, 1 - noise) for noise in noises]) for p in (0.5, 0.9, 0.99)]
    yield Panel("", "noise", "mean total variation", lines)
