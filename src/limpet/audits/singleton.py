"""How often top-p leaves a single label, and whether that label lasts (appendix D.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from limpet import sampler
from limpet.audits.figures import bars
from limpet.audits.paths import Models, prepared
from limpet.audits.result import SHARDS, Progress, Result, Row, each, percent, row
from limpet.audits.result import Preset as Base
from limpet.policy import Policy
from limpet.sampler import Run

TITLE = "Point hypotheses along a path"
ASKS = "How often top-p leaves one label, and whether that label lasts."
CERTAIN = 1e-8  # a bridge whose largest mass is this near to 1 counts as deterministic
PANELS = 2


@dataclass(frozen=True, kw_only=True)
class Preset(Base):
    masses: tuple[float, ...] = (0.8, 0.9)  # native top-p at every step, warmup too
    last: int = 10  # steps of the "last 10"


PRESETS = {
    "smoke": Preset(shards=SHARDS[:2], paths=1, nfe=12, length=48, precision="bfloat16"),
    "mini": Preset(paths=2, precision="bfloat16"),
    "paper": Preset(paths=4),
}

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
    "singleton": "pairs of a position and a reverse step where top-p, by the sampler's own boundary, keeps one label",
    "singleton, last steps": "the same over the last reverse steps",
    "next step": "of those, the argmax of the next call (the readout's too) is the same label",
    "final": "of those, the output is the same label",
    "stochastic bridge": "of those, the bridge from the state to the label has no mass of 1 - 1e-8 or more",
}


def largest_mass(label: Tensor, z: Tensor, signal_t: Tensor, signal_s: Tensor, vocab_size: int) -> Tensor:
    """max over y of the bridge q(s|0,t)(y | label, z), from its closed form.

    Mass lies on the label, on the state, or evenly on the rest; the rest never has more at one token than they do."""
    same, between = (label == z).double(), signal_t / signal_s
    rest_s, rest_t, rest = (1 - signal_s) / vocab_size, (1 - between) / vocab_size, (1 - signal_t) / vocab_size
    at_label = (signal_s + rest_s) * (between * same + rest_t)
    at_state = (signal_s * same + rest_s) * (between + rest_t)
    return torch.maximum(at_label, at_state) / (signal_t * same + rest)


def trace(run: Run) -> dict[str, Tensor]:
    """(N - 1, B, L) bool each: the singleton events of a traced path, and what holds at each pair."""
    infos = [info for _, info in sampler.generate(run)]
    top = torch.stack([info.top for info in infos])
    deficit = torch.stack([info.deficit for info in infos[:-1]])
    state = torch.stack([info.input for info in infos[:-1]])
    nodes = torch.tensor(run.signals, dtype=torch.float64, device=state.device)[:, None, None]
    spare = 1 - torch.tensor(run.top_p[:-1], dtype=torch.float64, device=state.device)[:, None, None]
    mass = largest_mass(top[:-1], state, nodes[:-1], nodes[1:], run.denoiser.vocab_size)
    return {
        "singleton": deficit < spare if run.policy.boundary == "released" else deficit <= spare,
        "next step": top[1:] == top[:-1],
        "final": top[-1] == top[:-1],
        "stochastic bridge": mass < 1 - CERTAIN,
    }


@torch.inference_mode()
def audit(models: Models, preset: Preset, progress: Progress = lambda done, total: None) -> Result:
    units = [(model, p, seed) for model in models.denoisers for p in preset.masses for seed in preset.shards]
    counts: dict[tuple[str, float], list[dict[str, tuple[int, int]]]] = {}
    for model, p, seed in each(units, progress):
        policy = Policy(nfe=preset.nfe, horizon=0, top_p=p)
        seen = trace(prepared(model, policy, seed, preset.paths, preset.length, trace=True))
        counts.setdefault((model.name, p), []).append(_count(seen, preset.last))
    rows: list[Row] = []
    for model in models.denoisers:
        for p in preset.masses:
            shards = counts[model.name, p]
            for quantity in CONVENTIONS:
                hits, of = zip(*(shard[quantity] for shard in shards), strict=True)
                rows.append(row(model, quantity, {"p": p}, percent(hits, of), PAPER, "%", sum(of)))
    return Result("singleton", asdict(preset), models.digests(), rows, CONVENTIONS)


def _count(seen: dict[str, Tensor], last: int) -> dict[str, tuple[int, int]]:
    """For each quantity, how many events it holds at, of how many."""
    single = seen["singleton"]
    late = single[-last:]
    events = int(single.sum())
    return {
        "singleton": (events, single.numel()),
        "singleton, last steps": (int(late.sum()), late.numel()),
        **{name: (int((single & seen[name]).sum()), events) for name in ("next step", "final", "stochastic bridge")},
    }


def figure(result: Result, axes: Sequence[Any]) -> None:
    """How many pairs are singletons, and how many of those last."""
    shown = (("singleton", "singleton, last steps"), ("next step", "final", "stochastic bridge"))
    for panel, quantities in zip(axes, shown, strict=True):
        bars(
            panel,
            quantities,
            {
                f"{model}, p = {p}": [result.of(quantity, model, p=p)[0].estimate for quantity in quantities]
                for model in result.models
                for p in result.settings["masses"]
            },
        )
        panel.set_ylabel("%")
    axes[0].legend()
