"""The closed loop without sampling noise: exact output laws of native, top-p and CRS on sources that can be listed."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from limpet import process
from limpet.denoisers.exact import Markov, Mixture, Source
from limpet.policy import Endpoint, Policy
from limpet.samples import sample
from limpet.theory.closed_loop import NAMES, measure
from limpet.theory.figures import panels
from limpet.theory.laws import encode, entropy, sequences, total_variation, truth
from limpet.theory.output_law import output_law
from limpet.theory.rows import Row, estimate
from limpet.theory.sources import describe, slipping

DRAWS = 20_000
NUCLEI = (1.0, 0.99, 0.98, 0.97, 0.96, 0.95, 0.93, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5)
Measure = Literal["tv", "nll", "entropy", "kl", "favoured"]
TITLES: dict[Measure, str] = {
    "tv": "total variation to the data law",
    "nll": NAMES["nll"],
    "entropy": "entropy of the output, nats per token",
    "kl": "KL(output || data), nats per token",
    "favoured": NAMES["favoured"],
}


def latent() -> Mixture:
    """Three overlapping modes over 4 positions and 3 symbols."""
    words = torch.tensor([[0, 0, 0, 0], [1, 1, 0, 1], [2, 2, 2, 2]])
    return slipping(words, 3, 0.15, torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64))


def chain() -> Markov:
    """A chain over 4 positions and 3 symbols that mostly stays where it is."""
    transition = torch.tensor([[0.8, 0.15, 0.05], [0.1, 0.7, 0.2], [0.25, 0.05, 0.7]], dtype=torch.float64)
    return Markov(torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64), transition, 4)


def expectations(source: Source, law: Tensor) -> dict[Measure, float]:
    """What an output law comes to; the share of the favoured mode only where the source has modes."""
    states = sequences(source.vocab_size, source.length)
    nll = float(-(law * source.log_prob(states)).sum() / source.length)
    spread = float(entropy(law)) / source.length
    found: dict[Measure, float] = {
        "tv": float(total_variation(law, truth(source))), "nll": nll, "entropy": spread, "kl": nll - spread,
    }  # fmt: skip
    if isinstance(source, Mixture):
        found["favoured"] = float(law @ measure(source, states).favoured)
    return found


def crs(source: Source, nfe: int, endpoint: Endpoint, warmup: float = 0.33, deficit: float = 0.2) -> Policy:
    """CRS whose every step may spend this deficit: one position, as spacing allows no second, if it is that sure."""
    after = nfe - 1 - process.warmup_steps(nfe, warmup)
    return Policy(nfe=nfe, endpoint=endpoint, warmup=warmup, budget=deficit * after / source.length)


def policies(source: Source, nfe: int, endpoint: Endpoint) -> dict[str, Policy]:
    native = Policy(nfe=nfe, endpoint=endpoint, horizon=0)
    return {
        "native": native,
        "top-p 0.9": native.but(top_p=0.9),
        "CRS": crs(source, nfe, endpoint),
        "CRS, no warmup, no budget": crs(source, nfe, endpoint, warmup=0.0, deficit=1.0),
    }


def matched(source: Source, policy: Policy) -> Row:
    """KL(output || data) of a policy against that of native top-p at the same entropy, interpolated over p."""
    native = policy.but(horizon=0)
    sweep = [expectations(source, output_law(source, native.but(top_p=p))) for p in NUCLEI]
    sweep.sort(key=lambda one: one["entropy"])
    ours = expectations(source, output_law(source, policy))
    theirs = np.interp(ours["entropy"], [one["entropy"] for one in sweep], [one["kl"] for one in sweep])
    where = f"{describe(source)}, {policy.endpoint}"
    return Row(f"{TITLES['kl']}: CRS ~ top-p at equal entropy", where, ours["kl"], "~", float(theirs))


def check_sampler(source: Source, name: str, policy: Policy, seed: int) -> list[Row]:
    """`limpet.sample` against the exact law: the mean true NLL, and how often the likeliest output comes."""
    exact = output_law(source, policy)
    tokens = sample(source, policy, DRAWS, seed=seed, batch_size=DRAWS).tokens
    states = sequences(source.vocab_size, source.length)
    likeliest = int(exact.argmax())
    nll, nll_error = estimate(-source.log_prob(tokens))
    share, share_error = estimate((encode(tokens, source.vocab_size) == likeliest).double())
    where = f"{describe(source)}, {name}, {policy.endpoint}"
    return [
        Row("NLL of samples = exact", where, nll, "=", float(-(exact * source.log_prob(states)).sum()), nll_error),
        Row("share of the likeliest output = exact", where, share, "=", float(exact[likeliest]), share_error),
    ]


def check_refinement(source: Source) -> list[Row]:
    """The native sampler with an ancestral endpoint comes nearer to the data law as its steps get smaller."""
    calls = (4, 16, 64)
    laws = [output_law(source, Policy(nfe=nfe, horizon=0, endpoint="ancestral")) for nfe in calls]
    distances = [float(total_variation(law, truth(source))) for law in laws]
    return [
        Row(f"TV of native: {many} calls <= {few} calls", f"{describe(source)}, ancestral", right, "<=", left)
        for few, many, left, right in zip(calls, calls[1:], distances, distances[1:], strict=False)
    ]


def contrasts(source: Source, endpoint: Endpoint) -> list[Row]:
    """Each policy against the native sampler; no claim is made, the verdict says what was found."""
    found = {
        name: expectations(source, output_law(source, policy))
        for name, policy in policies(source, 16, endpoint).items()
    }
    native, where = found.pop("native"), f"{describe(source)}, {endpoint}"
    return [
        Row(f"{TITLES[key]}: {name} ~ native", where, value, "~", native[key])
        for name, values in found.items()
        for key, value in values.items()
        if key != "kl"
    ]


def rows() -> list[Row]:
    found = []
    for source in (latent(), chain()):
        found += check_refinement(source)
        found += contrasts(source, "ancestral") + contrasts(source, "argmax")
        found += [matched(source, crs(source, 16, "ancestral")), matched(source, crs(source, 16, "argmax"))]
    for seed, (name, policy) in enumerate(policies(latent(), 16, "argmax").items(), 92):
        found += check_sampler(latent(), name, policy, seed)
    return found


def figure() -> Any:
    modes = latent()
    keys: tuple[Measure, ...] = ("tv", "nll", "favoured")
    drawing, axes = panels("Exact output laws of native, top-p and CRS: 3 symbols, 4 positions", 3, 2)
    data = expectations(modes, truth(modes))
    calls = (2, 4, 8, 16, 32)
    lines: dict[Endpoint, str] = {"ancestral": "-", "argmax": "--"}
    for endpoint, line in lines.items():
        by_calls = [policies(modes, nfe, endpoint) for nfe in calls]
        for color, kind in enumerate(("native", "top-p 0.9", "CRS")):
            found = [expectations(modes, output_law(modes, choice[kind])) for choice in by_calls]
            for panel, key in zip(axes, keys, strict=False):
                label = f"{kind}, {endpoint}"
                panel.plot(calls, [one[key] for one in found], line, marker=".", color=f"C{color}", label=label)
    for panel, key in zip(axes, keys, strict=False):
        panel.axhline(data[key], color="g", linestyle=":", label="data")
        panel.set(xscale="log", xticks=calls, xticklabels=calls, xlabel="calls of the denoiser", ylabel=TITLES[key])
        panel.minorticks_off()
        panel.set_title("three modes")
    axes[0].legend(fontsize=7, handlelength=3.5)

    warmups = [step / 15 for step in range(15)]
    for deficit in (0.15, 0.2, 0.3, 0.45, 1.0):
        chosen = [crs(modes, 16, "argmax", warmup, deficit) for warmup in warmups]
        shares = [expectations(modes, output_law(modes, policy))["favoured"] for policy in chosen]
        axes[3].plot(warmups, shares, marker=".", label=f"deficit {deficit:g} a step")
    axes[3].axhline(data["favoured"], color="g", linestyle=":", label="data")
    axes[3].set(xlabel="warmup", ylabel=TITLES["favoured"], title="three modes, CRS, 16 calls, argmax")
    axes[3].legend(fontsize=7, handlelength=3.5)

    for panel, source, name in ((axes[4], modes, "three modes"), (axes[5], chain(), "Markov chain")):
        for endpoint, line in lines.items():
            sweeps = {
                "top-p": [Policy(nfe=16, horizon=0, endpoint=endpoint, top_p=p) for p in NUCLEI],
                "CRS": [crs(source, 16, endpoint, deficit=d) for d in (0.0, 0.12, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)],
            }
            for color, (kind, sweep) in enumerate(sweeps.items(), 1):
                found = [expectations(source, output_law(source, policy)) for policy in sweep]
                x, y = [one["entropy"] for one in found], [one["kl"] for one in found]
                panel.plot(x, y, line, marker=".", color=f"C{color}", label=f"{kind}, {endpoint}")
        panel.axvline(expectations(source, truth(source))["entropy"], color="g", linestyle=":", label="data")
        panel.set(xlabel=TITLES["entropy"], ylabel=TITLES["kl"], title=f"{name}, 16 calls", yscale="log")
        panel.legend(fontsize=7, handlelength=3.5)
    return drawing
