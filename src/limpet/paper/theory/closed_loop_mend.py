"""What mending does to exact output distributions: `Mend`, the same sampler that mends nothing, and the native one, each against
the data distribution."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from limpet.experiments.contents import Panel
from limpet.models.exact import Source
from limpet.paper.theory.closed_loop_exact import (
    NUCLEI,
    TITLES,
    Sweeps,
    along,
    check_sampler,
    crs,
    expectations,
    latent,
    swept,
)
from limpet.paper.theory.output_distribution import output_distribution
from limpet.paper.theory.problems import chain, describe, divergence, truth
from limpet.paper.theory.sides import Sides, line
from limpet.samplers import Mend, Native
from limpet.samplers.crs import CRSFinalStep

MISSED = "KL(data || output), nats per token"
FINAL_STEPS: tuple[CRSFinalStep, ...] = ("keep", "argmax")
DEFICITS = (0.0, 0.1, 0.12, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7, 1.0)  # that a call may spend


def mend(source: Source, nfe: int, final_step: CRSFinalStep, deficit: float = 0.2) -> Mend:
    """As it comes, but for top-p, so that only labels sharpen the distribution, and for a budget that tells calls apart."""
    budget = crs(source, nfe, "argmax", deficit=deficit).budget
    return Mend(nfe=nfe, final_step=final_step, late_top_p=None, budget=budget)


def arms(source: Source, nfe: int, final_step: CRSFinalStep, deficit: float = 0.2) -> dict[str, Native]:
    """Mend; CRS with all its parameters; and the native sampler with the final step that positions without labels have."""
    ours = mend(source, nfe, final_step, deficit)
    return {"Mend": ours, "CRS": ours.replace(mend=0), "native": ours.native()}


def measured_on(source: Source, sampler: Native) -> dict[str, float]:
    """What an output distribution comes to, and how much of the data it misses."""
    probs = output_distribution(source, sampler)
    return {**expectations(source, probs), "missed": float(divergence(truth(source), probs)) / source.length}


def contrasts(source: Source, nfe: int, final_step: CRSFinalStep) -> list[Sides]:
    """Mend against the others; no claim is made, the verdict says what was found. KL(data || output) is told where
    both are finite: an output distribution that never gives some sequence has an infinite one."""
    found = {name: measured_on(source, arm) for name, arm in arms(source, nfe, final_step).items()}
    ours, where = found.pop("Mend"), f"{describe(source)}, {nfe} calls, {final_step}"
    titles = {**{key: TITLES[key] for key in ("tv", "kl", "entropy")}, "missed": MISSED}
    return [
        Sides(f"{title}: Mend ~ {name}", where, ours[key], "~", values[key])
        for name, values in found.items()
        for key, title in titles.items()
        if np.isfinite([ours[key], values[key]]).all()
    ]


def matched(source: Source, nfe: int, final_step: CRSFinalStep) -> list[Sides]:
    """KL(output || data) of Mend against CRS at each budget, and against top-p at each p, at the same entropy."""
    ours = mend(source, nfe, final_step)
    curves: dict[str, Sequence[Native]] = {
        "CRS": [mend(source, nfe, final_step, deficit).replace(mend=0) for deficit in DEFICITS],
        "top-p": [ours.native().replace(top_p=p) for p in NUCLEI],
    }
    found, made = expectations(source, output_distribution(source, ours)), []
    for name, sweep in curves.items():
        points = swept(source, sweep)
        entropies, kls = zip(*sorted(zip(points["entropy"], points["kl"], strict=True)), strict=True)
        if not entropies[0] <= found["entropy"] <= entropies[-1]:
            continue  # nothing to compare with
        theirs = float(np.interp(found["entropy"], entropies, kls))
        where = f"{describe(source)}, {nfe} calls, {final_step}"
        made.append(Sides(f"{TITLES['kl']}: Mend ~ {name} at equal entropy", where, found["kl"], "~", theirs))
    return made


def sides() -> list[Sides]:
    found = []
    for source in (latent(), chain(4)):
        for final_step in FINAL_STEPS:
            for nfe in (4, 16):
                found += contrasts(source, nfe, final_step)
                found += matched(source, nfe, final_step)
    for seed, final_step in enumerate(FINAL_STEPS, 110):
        found += check_sampler(latent(), "Mend", mend(latent(), 8, final_step), seed)
    return found


def panels() -> Iterator[Panel]:
    calls = (2, 4, 8, 16, 32)
    ticks = {"xticks": range(len(calls)), "xticklabels": calls}
    for title, source in (("three modes", latent()), ("Markov chain", chain(4))):
        sweeps: Sweeps = {
            (name, f"C{color}.-"): [arms(source, nfe, "keep")[name] for nfe in calls]
            for color, name in enumerate(("native", "CRS", "Mend"))
        }
        yield from along(source, title, "calls of the denoiser", range(len(calls)), sweeps, "tv", "nll", **ticks)
        lines = []
        for name, style in (("CRS", "C1.-"), ("Mend", "C2.-")):
            points = swept(source, [arms(source, 16, "keep", deficit)[name] for deficit in DEFICITS])
            lines.append(line(name, points["entropy"], points["kl"], style))
        nuclei = swept(source, [Native(nfe=16, final_step="sample", top_p=p) for p in NUCLEI])
        lines.append(line("top-p", nuclei["entropy"], nuclei["kl"], "C0.-"))
        yield Panel(f"{title}, 16 calls", TITLES["entropy"], TITLES["kl"], lines, axes={"yscale": "log"})
