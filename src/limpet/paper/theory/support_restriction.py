"""Section 3.2: restricting the support commutes with the conversion from leave-one-out distribution to posterior."""

import torch
from torch import Tensor

from limpet.diffusion.process import posterior
from limpet.diffusion.truncation import nucleus, restrict
from limpet.paper.theory.checks import Check, worst_case
from limpet.paper.theory.problems import RANDOM, random_distributions, total_variation


def conditional(probs: Tensor, kept: Tensor) -> Tensor:
    """probs( . | A): the distribution restricted to a set that has some of its mass (eq. 8)."""
    inside = probs * kept
    return inside / inside.sum(-1, keepdim=True)


def check(name: str, probs: Tensor, kept: Tensor, z: Tensor, signal: Tensor) -> Check:
    """C(T_A h) = (C h)( . | A) for (B, V) distributions and sets, (B,) current tokens and signals."""
    distance = total_variation(
        posterior(conditional(probs, kept), z, signal), conditional(posterior(probs, z, signal), kept)
    )
    return worst_case("posterior of restricted = restricted posterior (TV)", name, distance, "=", 0.0)


def check_top_p(name: str, probs: Tensor, p: float, z: Tensor, signal: Tensor, rank: str = "leave-one-out") -> Check:
    """The same for the sampler's own top-p, whose set is ranked on the leave-one-out distribution.

    rank: "posterior" ranks the set after the conversion. The two sides then differ."""
    converted = posterior(probs, z, signal)
    kept = nucleus(converted if rank == "posterior" else probs, p, "released")
    distance = total_variation(posterior(restrict(probs, p), z, signal), conditional(converted, kept))
    return worst_case("posterior of top-p = posterior given the nucleus (TV)", name, distance, "=", 0.0)


def random_steps(count: int, vocab_size: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Distributions, sets that have some of their mass, current tokens and signals."""
    generator = torch.Generator().manual_seed(seed)
    probs = random_distributions(count, vocab_size, seed=seed)
    kept = torch.rand(count, vocab_size, generator=generator) < 0.4
    kept.scatter_(-1, probs.argmax(-1, keepdim=True), True)
    z = torch.randint(vocab_size, (count,), generator=generator)
    return probs, kept, z, torch.rand(count, generator=generator, dtype=torch.float64)


def checks() -> list[Check]:
    probs, kept, z, signal = random_steps(RANDOM, 12, seed=70)
    name = f"{RANDOM:,} random distributions, V=12"
    random_sets = check(f"{name}, random sets", probs, kept, z, signal)
    return [random_sets, *(check_top_p(f"{name}, p={p}", probs, p, z, signal) for p in (0.5, 0.9, 0.99))]
