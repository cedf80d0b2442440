"""How often top-p leaves a single token, and whether that token lasts (appendix D.1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from limpet.evaluation.statistics import paired
from limpet.experiments.claims import Finding, above, below
from limpet.experiments.contents import Panel
from limpet.experiments.results import Results
from limpet.experiments.study import Seen
from limpet.models import Denoiser
from limpet.paper.studies import trajectories
from limpet.paper.studies.audits import Preset, bars, beside, each, figure, less, models_of, one, percent, presets
from limpet.paper.studies.published import Claims
from limpet.samplers import Native
from limpet.samplers.context import Context, generate

QUANTITIES = ("singleton", "singleton, last steps", "next step", "final", "stochastic bridge")
CERTAIN = 1e-8  # a bridge whose largest mass is this near to 1 counts as deterministic


@dataclass(frozen=True, kw_only=True)
class Settings(trajectories.Settings):
    masses: tuple[float, ...] = (0.8, 0.9)  # native top-p at every call, warmup too
    last: int = 10  # reverse steps of the "last steps"


PRESETS = presets("singleton", Settings)


def look(models: Sequence[Denoiser], settings: Settings, shard: int, shards: tuple[int, ...]) -> Iterator[Seen]:
    for model in models:
        for p in settings.masses:
            seen = trace(
                Native(nfe=settings.nfe, top_p=p), trajectories.opened(model, settings, shards[shard], trace=True)
            )
            single, late = seen["singleton"], seen["singleton"][-settings.last :]
            yield Seen(model.name, "singleton", {"p": p}, *percent(single.sum(), single.numel()))
            yield Seen(model.name, "singleton, last steps", {"p": p}, *percent(late.sum(), late.numel()))
            for quantity in QUANTITIES[2:]:
                kept = (single & seen[quantity]).sum()
                yield Seen(model.name, quantity, {"p": p}, *percent(kept, int(single.sum())))


def trace(sampler: Native, ctx: Context) -> dict[str, Tensor]:
    """(nfe - 1, B, L) bool each: the singleton events of a traced path, and what holds at each pair."""
    infos = [info for _, info in generate(sampler, ctx)]
    top = torch.stack([info.outcome.top for info in infos])
    deficit = torch.stack([info.outcome.deficit for info in infos[:-1]])
    state = torch.stack([info.input for info in infos[:-1]])
    nodes = torch.tensor([ctx.signal(t) for t in sampler.times], dtype=torch.float64, device=state.device)
    mass = largest_mass(top[:-1], state, nodes[:-1, None, None], nodes[1:, None, None], ctx.model.vocab_size)
    spare = 1 - sampler.top_p
    return {
        "singleton": deficit.double() < spare if sampler.boundary == "released" else deficit.double() <= spare,
        "next step": top[1:] == top[:-1],
        "final": top[-1] == top[:-1],
        "stochastic bridge": mass < 1 - CERTAIN,
    }


def largest_mass(token: Tensor, z: Tensor, signal_t: Tensor, signal_s: Tensor, vocab_size: int) -> Tensor:
    """max over y of the bridge q(s|0,t)(y | token, z), from its closed form.

    Mass lies on the token, on the state, or evenly on the rest; the rest never has more at one place than they do."""
    same, between = (token == z).double(), signal_t / signal_s
    rest_s, rest_t, rest = (1 - signal_s) / vocab_size, (1 - between) / vocab_size, (1 - signal_t) / vocab_size
    at_token = (signal_s + rest_s) * (between * same + rest_t)
    at_state = (signal_s * same + rest_s) * (between + rest_t)
    return torch.maximum(at_token, at_state) / (signal_t * same + rest)


cells = each(look)


def claims(results: Results, preset: Preset[Settings]) -> Claims:
    """Of the distilled model, which is the one that the paper traces."""
    found: dict[str, list[Finding]] = {key: [] for key in ("often", "later", "lasts", "not-for-ever", "stochastic")}
    for model in beside(results, "Duo-distilled"):
        for p in preset.settings.masses:
            rates = {quantity: one(results, quantity, model, p=p) for quantity in QUANTITIES}
            paper = {quantity: figure("singleton", quantity, p=p) for quantity in QUANTITIES}
            every, late, following, final, bridge = QUANTITIES
            found["often"].append(above(f"{late}, p={p}", rates[late], 10, paper[late]))
            gap = paired(rates[late].values, rates[every].values)
            found["later"].append(above(f"{late} less all, p={p}", gap, 0, less("singleton", late, every, p=p)))
            found["lasts"].append(above(f"{following}, p={p}", rates[following], 99, paper[following]))
            found["not-for-ever"].append(above(f"{final}, p={p}", rates[final], 90, paper[final]))
            found["not-for-ever"].append(below(f"{final}, p={p}", rates[final], 100, paper[final]))
            found["stochastic"].append(above(f"{bridge}, p={p}", rates[bridge], 90, paper[bridge]))
    return found


def panels(results: Results, preset: Preset[Settings]) -> Iterator[Panel]:
    """How many pairs are singletons, and how many of those last."""
    models = models_of(results, "singleton")
    groups = {f"{model}, p = {p}": (model, {"p": p}) for model in models for p in preset.settings.masses}
    yield from (bars(results, quantities, groups) for quantities in (QUANTITIES[:2], QUANTITIES[2:]))
