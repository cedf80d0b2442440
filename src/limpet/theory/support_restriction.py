"""Section 3.2: restricting the support commutes with the conversion from leave-one-out law to posterior."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from limpet import process, support
from limpet.theory.figures import panels
from limpet.theory.laws import total_variation
from limpet.theory.rows import Row, worst
from limpet.theory.sources import RANDOM, random_laws


def given(law: Tensor, kept: Tensor) -> Tensor:
    """law( . | A): the law restricted to a set that holds some of its mass (eq. 8)."""
    inside = law * kept
    return inside / inside.sum(-1, keepdim=True)


def check(name: str, law: Tensor, kept: Tensor, z: Tensor, signal: Tensor) -> Row:
    """C(T_A h) = (C h)( . | A) for (B, V) laws, sets, (B,) current tokens and signals: the largest TV between them."""
    restricted = process.posterior(given(law, kept), z, signal)
    conditioned = given(process.posterior(law, z, signal), kept)
    return worst(
        "posterior of restricted = restricted posterior (TV)", name, total_variation(restricted, conditioned), "=", 0.0
    )


def check_top_p(name: str, law: Tensor, p: float, z: Tensor, signal: Tensor, rank: str = "law") -> Row:
    """The same for the sampler's own top-p, whose set is ranked on the leave-one-out law.

    With rank="posterior" the set is ranked after the conversion, and then the two do not agree."""
    restricted = process.posterior(support.restrict(law, p), z, signal)
    posterior = process.posterior(law, z, signal)
    kept = support.nucleus(law if rank == "law" else posterior, p, "released")
    distance = total_variation(restricted, given(posterior, kept))
    return worst("posterior of top-p = posterior given the nucleus (TV)", name, distance, "=", 0.0)


def random_steps(count: int, vocab_size: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Laws, sets that hold some of their mass, current tokens and signals."""
    generator = torch.Generator().manual_seed(seed)
    law = random_laws(count, vocab_size, seed=seed)
    kept = torch.rand(count, vocab_size, generator=generator) < 0.4
    kept.scatter_(-1, law.argmax(-1, keepdim=True), True)
    z = torch.randint(vocab_size, (count,), generator=generator)
    return law, kept, z, torch.rand(count, generator=generator, dtype=torch.float64)


def rows() -> list[Row]:
    law, kept, z, signal = random_steps(RANDOM, 12, seed=70)
    name = f"{RANDOM:,} random laws, V=12"
    found = [check(f"{name}, random sets", law, kept, z, signal)]
    return found + [check_top_p(f"{name}, p={p}", law, p, z, signal) for p in (0.5, 0.9, 0.99)]


def figure() -> Any:
    drawing, (axes,) = panels("Top-p before the conversion is not top-p after it")
    law, _, z, _ = random_steps(RANDOM, 12, seed=70)
    noises = torch.linspace(0.01, 1, 40, dtype=torch.float64)
    for p in (0.5, 0.9, 0.99):
        distances = []
        for noise in noises.tolist():
            signal = torch.full((RANDOM,), 1 - noise, dtype=torch.float64)
            before = process.posterior(support.restrict(law, p), z, signal)
            after = support.restrict(process.posterior(law, z, signal), p)
            distances.append(total_variation(before, after).mean())
        axes.plot(noises, distances, label=f"p = {p:g}")
    axes.set_xlabel("noise")
    axes.set_ylabel("mean total variation")
    axes.legend()
    return drawing
