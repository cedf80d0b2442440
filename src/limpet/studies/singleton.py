"""How often top-p leaves a single token, and whether that token lasts (appendix D.1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from limpet.compare import SHARDS
from limpet.denoisers import Denoiser
from limpet.engine.path import Path, generate
from limpet.lab.page import Figure
from limpet.lab.results import Results
from limpet.lab.study import Seen
from limpet.samplers import Native
from limpet.studies import paths
from limpet.studies.audit import Preset, bars, beside, each, models_of, percent, presets, tabled

TITLE = "Point hypotheses along a path"
ASKS = "How often top-p leaves one token, and whether that token lasts."
CERTAIN = 1e-8  # a bridge whose largest mass is this near to 1 counts as deterministic


@dataclass(frozen=True, kw_only=True)
class Settings(paths.Settings):
    masses: tuple[float, ...] = (0.8, 0.9)  # native top-p at every call, warmup too
    last: int = 10  # reverse steps of the "last steps"


PRESETS = presets(
    Preset("smoke", Settings(paths=1, nfe=12, length=48), "bfloat16", SHARDS[:2]),
    Preset("mini", Settings(paths=2), "bfloat16"),
    Preset("paper", Settings(paths=4)),
)

PAPER = {
    ("Duo-distilled", quantity, p): figure
    for p, figures in {
        0.8: ("35.44 ± 0.32", "58.46 ± 0.90", "99.65 ± 0.03", "95.93 ± 0.20", "94.80 ± 0.06"),
        0.9: ("27.54 ± 0.43", "45.56 ± 0.24", "99.78 ± 0.02", "97.16 ± 0.12", "94.76 ± 0.09"),
    }.items()
    for quantity, figure in zip(
        ("singleton", "singleton, last steps", "next step", "final", "stochastic bridge"), figures, strict=True
    )
}

CONVENTIONS = {
    "singleton": "pairs of a position and a reverse step where top-p, by the sampler's own boundary, keeps one token",
    "singleton, last steps": "the same over the last reverse steps",
    "next step": "of those, the argmax of the next call (the readout's too) is the same token",
    "final": "of those, the output is the same token",
    "stochastic bridge": "of those, the bridge from the state to the token has no mass of 1 - 1e-8 or more",
}


def look(models: Sequence[Denoiser], settings: Settings, shard: int, shards: tuple[int, ...]) -> Iterator[Seen]:
    for model in models:
        for p in settings.masses:
            seen = trace(Native(nfe=settings.nfe, top_p=p), paths.opened(model, settings, shards[shard], trace=True))
            single, late = seen["singleton"], seen["singleton"][-settings.last :]
            yield Seen(model.name, "singleton", {"p": p}, *percent(single.sum(), single.numel()))
            yield Seen(model.name, "singleton, last steps", {"p": p}, *percent(late.sum(), late.numel()))
            for quantity in ("next step", "final", "stochastic bridge"):
                kept = (single & seen[quantity]).sum()
                yield Seen(model.name, quantity, {"p": p}, *percent(kept, int(single.sum())))


def trace(sampler: Native, path: Path) -> dict[str, Tensor]:
    """(nfe - 1, B, L) bool each: the singleton events of a traced path, and what holds at each pair."""
    infos = [info for _, info in generate(sampler, path)]
    top = torch.stack([info.outcome.top for info in infos])
    deficit = torch.stack([info.outcome.deficit for info in infos[:-1]])
    state = torch.stack([info.input for info in infos[:-1]])
    nodes = torch.tensor([path.signal(t) for t in sampler.times], dtype=torch.float64, device=state.device)
    mass = largest_mass(top[:-1], state, nodes[:-1, None, None], nodes[1:, None, None], path.denoiser.vocab_size)
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


cells, tables = each(look), tabled(ASKS, beside(PAPER))


def figures(results: Results, preset: Preset[Settings]) -> Iterator[Figure]:
    """How many pairs are singletons, and how many of those last."""
    models = models_of(results, "singleton")
    groups = {f"{model}, p = {p}": (model, {"p": p}) for model in models for p in preset.settings.masses}
    shown = (("singleton", "singleton, last steps"), ("next step", "final", "stochastic bridge"))
    caption = "How many pairs of a position and a step are singletons, and how many of those last."
    yield Figure("singleton", caption, tuple(bars(results, quantities, groups) for quantities in shown))
