"""How two checkpoints differ in what they select, on the same exact forward states (appendix D.3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from limpet import process, selector
from limpet.audits.figures import line, look
from limpet.audits.paths import Models, clean_texts, forward_states, labels, within
from limpet.audits.result import SHARDS, Progress, Result, Row, each, percent
from limpet.audits.result import Preset as Base
from limpet.denoisers import Denoiser
from limpet.errors import LimpetError
from limpet.policy import Policy
from limpet.stats import Estimate, mean_se

TITLE = "What two checkpoints select on shared states"
ASKS = "How two checkpoints differ in what they select, on the same exact forward states."
PANELS = 3


@dataclass(frozen=True, kw_only=True)
class Preset(Base):
    times: tuple[float, ...] = (0.2, 0.4, 0.5, 0.6, 0.67, 0.7)
    count: int | None = None  # positions selected; None for what a step of CRS with these calls selects
    spacing: int = 4
    bins: int = 10  # of the reliability curve


PRESETS = {
    "smoke": Preset(shards=SHARDS[:2], paths=1, length=64, times=(0.2, 0.67), precision="bfloat16"),
    "mini": Preset(paths=16),
    "paper": Preset(paths=16, count=25),
}

# The paper gives ranges over its six times, for the pair base Duo and Duo-distilled.
PAPER = {
    "self accuracy, difference": "0.9 to 2.1 over t",
    "Jaccard": "0.43 to 0.53 over t",
    "argmax agreement": "99.75 or more",
    "fixed-position accuracy, difference": "0.25 or less in size",
    "self error": "3.5 to 8.1 over t, both checkpoints",
    "confidence": "nearly 100",
}

CONVENTIONS = {
    "self accuracy": "of the labels at the positions that the checkpoint itself selects, those that are right",
    "self error": "100 less that",
    "confidence": "the law's mass on those labels",
    "cross accuracy": "of its labels at the positions that the other checkpoint selects",
    "self accuracy, difference": "second checkpoint less first, each on its own positions, points, paired by shard",
    "fixed-position accuracy, difference": "second less first, both on the positions of the one named",
    "argmax agreement": "both checkpoints have the same argmax, on the positions of the one named",
    "Jaccard": "positions that both select over positions that either does, mean over sequences",
    "reliability": "accuracy of the labels at all positions and times whose confidence falls in a bin of this centre",
    "selection": "least deficit first, spacing 4, the count alone as a limit, no budget; leave-one-out laws; never the "
    "end tokens that a text is cut at",
    "states": "one exact forward path of each text, the same for both checkpoints",
}


class View(NamedTuple):
    """What one checkpoint makes of some states: (B, L) each."""

    label: Tensor
    deficit: Tensor
    chosen: Tensor


def count_of(preset: Preset, length: int) -> int:
    """How many positions are selected: the paper's 25 of 1024 is what one step of CRS may select at 64 calls."""
    policy = Policy(nfe=preset.nfe)
    steps = preset.nfe - 1 - process.warmup_steps(preset.nfe, policy.warmup)
    return preset.count or -(-length // steps)


def view(model: Denoiser, states: Tensor, t: float, eligible: Tensor, count: int, spacing: int) -> View:
    label, deficit = labels(model, states, t)
    return View(label, deficit, selector.select(deficit, eligible, count, math.inf, spacing))


def right(label: Tensor, clean: Tensor, where: Tensor) -> float:
    """The percentage of labels that are the clean token."""
    return float(100 * (label == clean)[where].double().mean())


def compared(first: View, second: View, clean: Tensor) -> dict[tuple[str, str], float]:
    """(quantity, of whom) -> one shard's figure at one time; "first", "second", or "" for the pair."""
    views = {"first": first, "second": second}
    found: dict[tuple[str, str], float] = {}
    for (name, own), other in zip(views.items(), (second, first), strict=True):
        found["self accuracy", name] = right(own.label, clean, own.chosen)
        found["self error", name] = 100 - found["self accuracy", name]
        found["confidence", name] = float(100 * (1 - own.deficit[own.chosen]).mean())
        found["cross accuracy", name] = right(own.label, clean, other.chosen)
        found["fixed-position accuracy, difference", name] = right(second.label, clean, own.chosen) - right(
            first.label, clean, own.chosen
        )
        found["argmax agreement", name] = float(100 * (first.label == second.label)[own.chosen].double().mean())
    found["self accuracy, difference", ""] = found["self accuracy", "second"] - found["self accuracy", "first"]
    both, either = (first.chosen & second.chosen).sum(-1), (first.chosen | second.chosen).sum(-1)
    found["Jaccard", ""] = float((both / either).mean())
    return found


@torch.inference_mode()
def audit(models: Models, preset: Preset, progress: Progress = lambda done, total: None) -> Result:
    if len(models.denoisers) != 2:
        raise LimpetError(f"this audit compares two checkpoints, and was given {len(models.denoisers)}: name two")
    a, b = models.denoisers
    if a.vocab_size != b.vocab_size or a.schedule != b.schedule:
        raise LimpetError(f"{a.name} and {b.name} have no states in common: name two models of one vocabulary")
    texts = clean_texts(models, a, preset.shards, preset.paths, preset.length)
    count = count_of(preset, texts[0].shape[1])
    found: dict[tuple[str, str, float], list[float]] = {}
    hits, of = np.zeros((2, len(preset.shards), preset.bins)), np.zeros((2, len(preset.shards), preset.bins))
    for shard, seed in each([*enumerate(preset.shards)], progress):
        clean = texts[shard]
        inside = within(a, clean)
        for t, states in zip(preset.times, forward_states(clean, preset.times, a, seed), strict=True):
            views = [view(model, states, t, inside, count, preset.spacing) for model in (a, b)]
            for (quantity, whose), value in compared(views[0], views[1], clean).items():
                found.setdefault((quantity, whose, t), []).append(value)
            for one, (label, deficit, _) in enumerate(views):
                place = ((1 - deficit[inside]) * preset.bins).long().clamp(0, preset.bins - 1).numpy()
                hits[one, shard] += np.bincount(place, (label == clean)[inside].double().numpy(), preset.bins)
                of[one, shard] += np.bincount(place, minlength=preset.bins)
    names = {"first": a.name, "second": b.name, "": f"{a.name} and {b.name}"}
    selected = count * preset.paths * len(preset.shards)
    rows = [
        Row(
            names[whose], quantity, {"t": t}, mean_se(values), "" if quantity == "Jaccard" else "%", selected,
            PAPER.get(quantity, ""),
        )
        for (quantity, whose, t), values in found.items()
    ]  # fmt: skip
    for one, model in enumerate((a, b)):
        for i in range(preset.bins):
            centre = round((i + 0.5) / preset.bins, 4)
            values = percent(hits[one, :, i].tolist(), of[one, :, i].tolist())
            rows.append(
                Row(model.name, "reliability", {"confidence": centre}, mean_se(values), "%", int(of[one, :, i].sum()))
            )
    settings = {**asdict(preset), "count": count}
    return Result("selection", settings, models.digests(), rows, CONVENTIONS)


def figure(result: Result, axes: Sequence[Any]) -> None:
    """Error of what each selects, overlap and agreement, and the reliability curves, against time."""
    error, overlap, curve = axes
    times = result.settings["times"]
    line(
        overlap, times, [_share(result.of("Jaccard", t=t)[0].estimate) for t in times], "Jaccard", color="k", marker="D"
    )
    for i, model in enumerate(result.models):
        line(error, times, [result.of("self error", model, t=t)[0].estimate for t in times], model, **look(i))
        agreement = [result.of("argmax agreement", model, t=t)[0].estimate for t in times]
        line(overlap, times, agreement, f"agreement where {model} selects", **look(i))
        bins = [row for row in result.of("reliability", model) if np.isfinite(row.estimate.mean)]
        line(curve, [100 * row.at["confidence"] for row in bins], [row.estimate for row in bins], model, **look(i))
    curve.plot([0, 100], [0, 100], "k:", linewidth=1)
    error.set_ylabel("wrong labels among the selected, %")
    overlap.set_ylabel("%")
    for panel in (error, overlap):
        panel.set_xlabel("t")
    curve.set_xlabel("confidence, %")
    curve.set_ylabel("accuracy, %")
    for panel in axes:
        panel.legend()


def _share(estimate: Estimate) -> Estimate:
    return Estimate(100 * estimate.values)
