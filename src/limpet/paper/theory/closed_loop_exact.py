"""The closed loop without sampling noise: exact output distributions of native, top-p and CRS on sources that can be listed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from limpet.diffusion import process
from limpet.experiments.contents import Panel
from limpet.generation import sample
from limpet.models.exact import Mixture, Source, codebook
from limpet.paper.theory.closed_loop import NAMES, measure
from limpet.paper.theory.output_distribution import output_distribution
from limpet.paper.theory.problems import chain, describe, encode, entropy, sequences, total_variation, truth
from limpet.paper.theory.sides import Sides, line, measured
from limpet.samplers import CRS, Native
from limpet.samplers.native import FinalStep

DRAWS = 20_000
NUCLEI = (1.0, 0.99, 0.98, 0.97, 0.96, 0.95, 0.93, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5)
TITLES = {
    "tv": "total variation to the data distribution",
    "nll": NAMES["nll"],
    "entropy": "entropy of the output, nats per token",
    "kl": "KL(output || data), nats per token",
    "favoured": NAMES["favoured"],
}


def latent() -> Mixture:
    """Three overlapping modes over 4 positions and 3 symbols."""
    words = torch.tensor([[0, 0, 0, 0], [1, 1, 0, 1], [2, 2, 2, 2]])
    return codebook(words, 3, torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), slip=0.15)


def expectations(source: Source, probs: Tensor) -> dict[str, float]:
    """What an output distribution comes to; the share of the favoured mode only where the source has modes."""
    states = sequences(source.vocab_size, source.length)
    nll = float(-(probs * source.log_prob(states)).sum() / source.length)
    spread = float(entropy(probs)) / source.length
    found = {"tv": float(total_variation(probs, truth(source))), "nll": nll, "entropy": spread, "kl": nll - spread}
    if isinstance(source, Mixture):
        found["favoured"] = float(probs @ measure(source, states)["favoured"])
    return found


def crs(source: Source, nfe: int, final_step: FinalStep, warmup: float = 0.33, deficit: float = 0.2) -> CRS:
    """CRS whose every call may spend this deficit: one position, as spacing allows no second, if it is that sure."""
    after = nfe - 1 - process.warmup_steps(nfe, warmup)
    return CRS(nfe=nfe, final_step=final_step, warmup=warmup, budget=deficit * after / source.length)


def arms(source: Source, nfe: int, final_step: FinalStep) -> dict[str, Native]:
    native = Native(nfe=nfe, final_step=final_step)
    return {
        "native": native,
        "top-p 0.9": native.replace(top_p=0.9),
        "CRS": crs(source, nfe, final_step),
        "CRS, no warmup, no budget": crs(source, nfe, final_step, warmup=0.0, deficit=1.0),
    }


def swept(source: Source, sweep: Iterable[Native]) -> dict[str, list[float]]:
    """What the output distributions of some samplers come to, measure by measure."""
    found = [expectations(source, output_distribution(source, sampler)) for sampler in sweep]
    return {key: [one[key] for one in found] for key in found[0]}


def matched(source: Source, sampler: CRS) -> Sides:
    """KL(output || data) of CRS against that of native top-p at the same entropy, interpolated over p."""
    native = sampler.native().replace(top_p=1.0)
    curve = swept(source, (native.replace(top_p=p) for p in NUCLEI))
    entropies, kls = zip(*sorted(zip(curve["entropy"], curve["kl"], strict=True)), strict=True)
    ours = expectations(source, output_distribution(source, sampler))
    theirs = float(np.interp(ours["entropy"], entropies, kls))
    where = f"{describe(source)}, {sampler.final_step}"
    return Sides(f"{TITLES['kl']}: CRS ~ top-p at equal entropy", where, ours["kl"], "~", theirs)


def check_sampler(source: Source, name: str, sampler: Native, seed: int) -> list[Sides]:
    """`limpet.sample` against the exact distribution: the mean true NLL, and how often the likeliest output comes."""
    exact = output_distribution(source, sampler)
    tokens = sample(source, sampler, DRAWS, seed=seed, batch_size=DRAWS).tokens
    nll = float(-(exact * source.log_prob(sequences(source.vocab_size, source.length))).sum())
    likeliest = int(exact.argmax())
    came = (encode(tokens, source.vocab_size) == likeliest).double()
    where = f"{describe(source)}, {name}, {sampler.final_step}"
    return [
        measured("NLL of samples = exact", where, -source.log_prob(tokens), "=", nll),
        measured("share of the likeliest output = exact", where, came, "=", float(exact[likeliest])),
    ]


def check_refinement(source: Source) -> list[Sides]:
    """The native sampler with an ancestral final_step comes nearer to the data distribution as its steps get smaller."""
    calls = (4, 16, 64)
    distances = swept(source, (Native(nfe=nfe, final_step="sample") for nfe in calls))["tv"]
    return [
        Sides(f"TV of native: {many} calls <= {few} calls", f"{describe(source)}, ancestral", right, "<=", left)
        for few, many, left, right in zip(calls, calls[1:], distances, distances[1:], strict=False)
    ]


def contrasts(source: Source, final_step: FinalStep) -> list[Sides]:
    """Each arm against the native sampler; no claim is made, the verdict says what was found."""
    found = {
        name: expectations(source, output_distribution(source, arm))
        for name, arm in arms(source, 16, final_step).items()
    }
    native, where = found.pop("native"), f"{describe(source)}, {final_step}"
    return [
        Sides(f"{TITLES[key]}: {name} ~ native", where, value, "~", native[key])
        for name, values in found.items()
        for key, value in values.items()
        if key != "kl"
    ]


def sides() -> list[Sides]:
    found = []
    for source in (latent(), chain(4)):
        found += check_refinement(source)
        found += contrasts(source, "sample") + contrasts(source, "argmax")
        found += [matched(source, crs(source, 16, "sample")), matched(source, crs(source, 16, "argmax"))]
    for seed, (name, arm) in enumerate(arms(latent(), 16, "argmax").items(), 92):
        found += check_sampler(latent(), name, arm, seed)
    return found


STYLES: dict[FinalStep, str] = {"sample": ".-", "argmax": ".--"}
Sweeps = dict[tuple[str, str], list[Native]]  # by name and style of a line


def along(
    source: Source, title: str, x: str, xs: Sequence[float], sweeps: Sweeps, *keys: str, **axes: Any
) -> list[Panel]:
    """What sweeps of samplers come to along x, a panel for each measure, beside what the data distribution does."""
    found, data = {named: swept(source, sweep) for named, sweep in sweeps.items()}, expectations(source, truth(source))
    lines = {key: [line(name, xs, one[key], style) for (name, style), one in found.items()] for key in keys}
    level = {key: line("data", (xs[0], xs[-1]), [data[key]] * 2, "g:") for key in keys}
    return [Panel(title, x, TITLES[key], [*lines[key], level[key]], axes=axes) for key in keys]


def against_entropy(source: Source, title: str) -> Panel:
    """KL against entropy, of top-p at each p and of CRS at each deficit a call."""
    deficits, lines = (0.0, 0.12, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5), []
    for final_step, style in STYLES.items():
        nuclei = swept(source, (Native(nfe=16, final_step=final_step, top_p=p) for p in NUCLEI))
        ours = swept(source, (crs(source, 16, final_step, deficit=deficit) for deficit in deficits))
        lines.append(line(f"top-p, {final_step}", nuclei["entropy"], nuclei["kl"], f"C1{style}"))
        lines.append(line(f"CRS, {final_step}", ours["entropy"], ours["kl"], f"C2{style}"))
    data, kls = expectations(source, truth(source))["entropy"], [kl for one in lines for kl in one.y]
    lines.append(line("data", [data] * 2, (min(kls), max(kls)), "g:"))
    return Panel(title, TITLES["entropy"], TITLES["kl"], lines, axes={"yscale": "log"})


def panels() -> Iterator[Panel]:
    modes, calls, warmups = latent(), (2, 4, 8, 16, 32), [step / 15 for step in range(15)]
    by_calls: Sweeps = {
        (f"{kind}, {final_step}", f"C{color}{style}"): [arms(modes, nfe, final_step)[kind] for nfe in calls]
        for final_step, style in STYLES.items()
        for color, kind in enumerate(("native", "top-p 0.9", "CRS"))
    }
    by_warmup: Sweeps = {
        (f"deficit {deficit:g} a step", ".-"): [crs(modes, 16, "argmax", warmup, deficit) for warmup in warmups]
        for deficit in (0.15, 0.2, 0.3, 0.45, 1.0)
    }
    ticks = {"xticks": range(5), "xticklabels": calls}
    yield from along(
        modes, "three modes", "calls of the denoiser", range(5), by_calls, "tv", "nll", "favoured", **ticks
    )
    yield from along(modes, "three modes, CRS, 16 calls, argmax", "warmup", warmups, by_warmup, "favoured")
    yield against_entropy(modes, "three modes, 16 calls")
    yield against_entropy(chain(4), "Markov chain, 16 calls")
