"""Whether labels help by being seen or only by being returned: the same labels, copied out, with and without a place in
the input (appendix D, earlier storage-output control)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from limpet import stats
from limpet.audits.figures import line, look
from limpet.audits.paths import QUALITY, Models, before, finished, prepared, quality, recorded
from limpet.audits.result import SHARDS, Progress, Result, Row, each, row
from limpet.audits.result import Preset as Base
from limpet.policy import Policy

TITLE = "Seeing stored labels against only returning them"
ASKS = "Whether labels help by being seen or only by being returned."
ARMS = ("CRS", "final-only", "revisable")
PANELS = 2


@dataclass(frozen=True, kw_only=True)
class Preset(Base):
    early: float = 0.9  # top-p during warmup
    masses: tuple[float, ...] = (1.0, 0.9)  # top-p after it


PRESETS = {
    "smoke": Preset(shards=SHARDS[:2], paths=1, nfe=8, length=48, precision="bfloat16"),
    "mini": Preset(paths=2, nfe=24, precision="bfloat16"),
    "paper": Preset(paths=64, masses=(1.0, 0.9, 0.8)),
}

CONVENTIONS = {
    **QUALITY,
    "CRS - final-only, NLL": "nats per token, paired by shard: what repeated visibility adds to output storage",
    "CRS": "labels are written into the input and copied to the output",
    "final-only": "the same labels at the same positions, copied to the output; never in the input",
    "revisable": "no labels; argmax at the readout: a reference, not a third arm of the same output rule",
    "masses": "the paper plots a sweep of top-p after warmup and lists neither its values nor its figures",
}


def outputs(model: Any, preset: Preset, seed: int) -> dict[tuple[str, float], Tensor]:
    """(arm, late top-p) -> (B, L) tokens of one shard; all arms share their randomness and their warmup."""
    crs = Policy(nfe=preset.nfe, top_p=preset.early, write="both")
    start = None
    found = {}
    for p in preset.masses:
        policy = crs.but(late_top_p=p)
        run = prepared(model, policy, seed, preset.paths, preset.length)
        start = before(run, run.warmup) if start is None else start
        end = finished(run, start)
        hidden = policy.but(write="output", values="recorded")
        ends = {
            "CRS": end,
            "final-only": finished(
                prepared(model, hidden, seed, preset.paths, preset.length, replay=recorded(end)), start
            ),
            "revisable": finished(prepared(model, policy.but(horizon=0), seed, preset.paths, preset.length), start),
        }
        found.update({(arm, p): state.tokens.cpu() for arm, state in ends.items()})
    return found


@torch.inference_mode()
def audit(models: Models, preset: Preset, progress: Progress = lambda done, total: None) -> Result:
    made: dict[str, list[dict[tuple[str, float], Tensor]]] = {}
    for model, seed in each([(model, seed) for model in models.denoisers for seed in preset.shards], progress):
        made.setdefault(model.name, []).append(outputs(model, preset, seed))
    rows: list[Row] = []
    for model in models.denoisers:
        for p in preset.masses:
            found = {arm: quality(models, model, [shard[arm, p] for shard in made[model.name]]) for arm in ARMS}
            for arm in ARMS:
                for quantity in QUALITY:
                    rows.append(row(model, quantity, {"arm": arm, "late p": p}, found[arm][quantity], {}))
            gap = stats.paired(found["CRS"]["nll"], found["final-only"]["nll"])
            rows.append(row(model, "CRS - final-only, NLL", {"late p": p}, gap.values, {}))
    return Result("storage", asdict(preset), models.digests(), rows, CONVENTIONS)


def figure(result: Result, axes: Sequence[Any]) -> None:
    """Perplexity against entropy, and against top-p after warmup."""
    frontier, sweep = axes
    masses = sorted(result.settings["masses"])
    for i, model in enumerate(result.models):
        for arm, style in zip(ARMS, ("-", "--", ":"), strict=True):
            at = [{"arm": arm, "late p": p} for p in masses]
            perplexity = [result.of("perplexity", model, **where)[0].estimate for where in at]
            entropy = [result.of("entropy", model, **where)[0].estimate.mean for where in at]
            line(frontier, entropy, perplexity, f"{model}, {arm}", linestyle=style, **look(i))
            line(sweep, masses, perplexity, f"{model}, {arm}", linestyle=style, **look(i))
    frontier.set_xlabel("entropy, nats")
    sweep.set_xlabel("top-p after warmup")
    frontier.set_ylabel("perplexity")
    frontier.legend(fontsize="small", handlelength=3)
