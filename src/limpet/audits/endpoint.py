"""What the last call's output rule does to quality: one path, read out in two ways (appendix D.2, endpoint audit)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from limpet import sampler, stats
from limpet.audits.paths import QUALITY, Models, before, prepared, quality
from limpet.audits.result import SHARDS, Progress, Result, Row, each, row
from limpet.audits.result import Preset as Base
from limpet.policy import Policy
from limpet.sampler import Run

TITLE = "Two output rules on one path"
ASKS = "What the last call's output rule does to quality, on one and the same path."
ENDPOINTS = ("ancestral", "argmax")
PANELS = 1


@dataclass(frozen=True, kw_only=True)
class Preset(Base):
    masses: tuple[float, ...] = (1.0, 0.9)  # native top-p at every step and, for the ancestral rule, at the readout


PRESETS = {
    "smoke": Preset(shards=SHARDS[:2], paths=1, nfe=8, length=48, precision="bfloat16"),
    "mini": Preset(paths=4, nfe=32, precision="bfloat16"),
    "paper": Preset(paths=16, nfe=32),
}

PAPER = {
    (model, quantity, p, endpoint): figure
    for (model, p), figures in {
        ("Duo", 1.0): ("100.11", "5.58", "87.62", "5.23"),
        ("Duo", 0.9): ("44.78", "5.40", "53.57", "5.22"),
        ("Duo-distilled", 1.0): ("61.13", "5.54", "45.50", "5.40"),
        ("Duo-distilled", 0.9): ("34.90", "5.42", "33.54", "5.35"),
    }.items()
    for (endpoint, quantity), figure in zip(
        [(endpoint, quantity) for endpoint in ENDPOINTS for quantity in ("perplexity", "entropy")], figures, strict=True
    )
}

CONVENTIONS = {
    **QUALITY,
    "argmax - ancestral, NLL": "nats per token, paired by shard",
    "argmax - ancestral, entropy": "nats, paired by shard",
}


def read_out(run: Run) -> dict[str, Tensor]:
    """(B, L) output of one path under each rule; the ancestral one draws from the posterior, top-p applied."""
    last = before(run, run.policy.nfe - 1)
    outputs = {}
    for endpoint in ENDPOINTS:
        state, _ = sampler.readout(replace(run, policy=run.policy.but(endpoint=endpoint)), last)
        outputs[endpoint] = state.tokens.cpu()
    return outputs


@torch.inference_mode()
def audit(models: Models, preset: Preset, progress: Progress = lambda done, total: None) -> Result:
    units = [(model, p, seed) for model in models.denoisers for p in preset.masses for seed in preset.shards]
    outputs: dict[tuple[str, float, str], list[Tensor]] = {}
    for model, p, seed in each(units, progress):
        run = prepared(model, Policy(nfe=preset.nfe, horizon=0, top_p=p), seed, preset.paths, preset.length)
        for endpoint, tokens in read_out(run).items():
            outputs.setdefault((model.name, p, endpoint), []).append(tokens)
    rows: list[Row] = []
    for model in models.denoisers:
        for p in preset.masses:
            found = {end: quality(models, model, outputs[model.name, p, end]) for end in ENDPOINTS}
            for end in ENDPOINTS:
                for quantity in QUALITY:
                    rows.append(row(model, quantity, {"p": p, "endpoint": end}, found[end][quantity], PAPER))
            for name, quantity in (("NLL", "nll"), ("entropy", "entropy")):
                gap = stats.paired(found["argmax"][quantity], found["ancestral"][quantity])
                rows.append(row(model, f"argmax - ancestral, {name}", {"p": p}, gap.values, PAPER))
    return Result("endpoint", asdict(preset), models.digests(), rows, CONVENTIONS)


def figure(result: Result, axes: Sequence[Any]) -> None:
    """An arrow for each path set, from the ancestral rule to argmax, in perplexity and entropy."""
    (panel,) = axes
    for i, model in enumerate(result.models):
        for p, style in zip(result.settings["masses"], ("o", "s", "^", "v"), strict=False):
            points = [
                [
                    result.of(quantity, model, p=p, endpoint=end)[0].estimate.mean
                    for quantity in ("entropy", "perplexity")
                ]
                for end in ENDPOINTS
            ]
            panel.plot(*zip(*points, strict=True), style + "-", color=f"C{i}", markevery=[0], mfc="white")
            panel.plot(*points[1], style, color=f"C{i}", label=f"{model}, p = {p}")
    panel.set_xlabel("entropy, nats")
    panel.set_ylabel("perplexity")
    panel.set_title("ancestral (hollow) to argmax (filled)")
    panel.legend(fontsize="small")
