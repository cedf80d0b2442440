"""Measures of exact output distributions on tiny sources, and the tables and figures that the closed loops share."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from limpet.diffusion import process
from limpet.experiments import Panel
from limpet.generation import sample
from limpet.models.exact import Mixture, Source, codebook
from limpet.paper.theory import closed_loop, problems
from limpet.paper.theory.checks import Check, compare_means, line
from limpet.paper.theory.closed_loop import final
from limpet.paper.theory.output_distribution import output_distribution
from limpet.paper.theory.problems import describe, sequences, truth
from limpet.samplers import CRS, Native
from limpet.samplers.crs import CRSFinalStep

SAMPLES = 20_000
CALLS = (2, 4, 8, 16, 32)  # of the figures
TOP_P = (1.0, 0.99, 0.98, 0.97, 0.96, 0.95, 0.93, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5)
TITLES = {
    "tv": "total variation to the data distribution",
    "nll": closed_loop.TITLES["nll"],
    "entropy": "entropy of the output, nats per token",
    "kl": "KL(output || data), nats per token",
    "reverse_kl": "KL(data || output), nats per token",
    "favoured": closed_loop.TITLES["favoured"],
}
Sweeps = Mapping[tuple[str, str], Iterable[Native]]  # by name and style of a line


def latent() -> Mixture:
    """Three overlapping modes over 4 positions and 3 symbols."""
    words = torch.tensor([[0, 0, 0, 0], [1, 1, 0, 1], [2, 2, 2, 2]])
    return codebook(words, 3, torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), slip=0.15)


def crs_with_deficit(
    source: Source, nfe: int, final_step: CRSFinalStep, warmup: float = 0.33, deficit: float = 0.2
) -> CRS:
    """CRS that may commit this much deficit in each call: one position, as its spacing allows no second one."""
    after = nfe - 1 - process.warmup_steps(nfe, warmup)
    return CRS(nfe=nfe, final_step=final_step, warmup=warmup, budget=deficit * after / source.length)


def measures_of(source: Source, probs: Tensor) -> dict[str, float]:
    """Every measure of an output distribution; the favoured mode's only where the source has modes."""
    states, data = sequences(source.vocab_size, source.length), truth(source)
    nll = float(-(probs * source.log_prob(states)).sum() / source.length)
    entropy = float(problems.entropy(probs)) / source.length
    reverse = float(problems.divergence(data, probs)) / source.length
    distance = float(problems.total_variation(probs, data))
    measures = {"tv": distance, "nll": nll, "entropy": entropy, "kl": nll - entropy, "reverse_kl": reverse}
    if isinstance(source, Mixture):
        measures["favoured"] = float(probs @ closed_loop.measure(source, states)["favoured"])
    return measures


def measure(source: Source, sampler: Native) -> dict[str, float]:
    """Every measure of a sampler's output distribution."""
    return measures_of(source, output_distribution(source, sampler))


def sweep(source: Source, samplers: Iterable[Native]) -> dict[str, list[float]]:
    """The measures of several samplers, by measure."""
    rows = [measure(source, sampler) for sampler in samplers]
    return {key: [row[key] for row in rows] for key in rows[0]}


def contrast(
    where: str, one: str, ours: Mapping[str, float], other: str, theirs: Mapping[str, float], *keys: str
) -> list[Check]:
    """Measures of one output distribution beside another's, where both are finite. Nothing is claimed.

    KL(data || output) is infinite for a distribution that never gives some sequence."""
    return [
        Check(f"{TITLES[key]}: {one} ~ {other}", where, ours[key], "~", theirs[key])
        for key in keys
        if key in ours and math.isfinite(ours[key]) and math.isfinite(theirs[key])
    ]


def at_equal_entropy(
    source: Source, where: str, one: str, sampler: Native, other: str, curve: Iterable[Native]
) -> list[Check]:
    """KL(output || data) of a sampler beside a curve of others at its entropy, where the curve reaches it."""
    ours, points = measure(source, sampler), sweep(source, curve)
    entropies, kls = zip(*sorted(zip(points["entropy"], points["kl"], strict=True)), strict=True)
    if not entropies[0] <= ours["entropy"] <= entropies[-1]:
        return []
    theirs = float(np.interp(ours["entropy"], entropies, kls))
    return [Check(f"{TITLES['kl']}: {one} ~ {other} at equal entropy", where, ours["kl"], "~", theirs)]


def top_p_curve(native: Native) -> list[Native]:
    """The native sampler at each top-p."""
    return [native.replace(top_p=p) for p in TOP_P]


def check_samples(source: Source, name: str, sampler: Native, seed: int) -> list[Check]:
    """`limpet.sample` against the exact distribution: the mean true NLL, and the share of the likeliest output."""
    exact = output_distribution(source, sampler)
    tokens = sample(source, sampler, SAMPLES, seed=seed, batch_size=SAMPLES).tokens
    nll = float(-(exact * source.log_prob(sequences(source.vocab_size, source.length))).sum())
    likeliest = int(exact.argmax())
    is_likeliest = (problems.encode(tokens, source.vocab_size) == likeliest).double()
    where = f"{describe(source)}, {name}, {final(sampler)}"
    return [
        compare_means("NLL of samples = exact", where, -source.log_prob(tokens), "=", nll),
        compare_means("share of the likeliest output = exact", where, is_likeliest, "=", float(exact[likeliest])),
    ]


def lines_along(source: Source, xs: Sequence[float], sweeps: Sweeps, *keys: str) -> dict[str, list[Any]]:
    """A line over xs for each sweep of samplers, by measure."""
    points = {named: sweep(source, samplers) for named, samplers in sweeps.items()}
    return {key: [line(name, xs, one[key], style) for (name, style), one in points.items()] for key in keys}


def panels_along(
    source: Source, title: str, x: str, xs: Sequence[float], sweeps: Sweeps, *keys: str, **axes: Any
) -> list[Panel]:
    """The lines along x in a panel for each measure, with the measure of the data distribution."""
    data, lines = measures_of(source, truth(source)), lines_along(source, xs, sweeps, *keys)
    level = {key: line("data", (xs[0], xs[-1]), [data[key]] * 2, "g:") for key in keys}
    return [Panel(title, x, TITLES[key], [*lines[key], level[key]], axes=axes) for key in keys]


def panel_by_entropy(source: Source, title: str, curves: Sweeps) -> Panel:
    """KL(output || data) against entropy, a line for each curve of samplers."""
    lines = []
    for (name, style), samplers in curves.items():
        points = sweep(source, samplers)
        lines.append(line(name, points["entropy"], points["kl"], style))
    data, kls = measures_of(source, truth(source))["entropy"], [kl for one in lines for kl in one.y]
    lines.append(line("data", [data] * 2, (min(kls), max(kls)), "g:"))
    return Panel(title, TITLES["entropy"], TITLES["kl"], lines, axes={"yscale": "log"})
