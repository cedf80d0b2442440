"""How often a selected label is wrong on exact forward states, against noise: proposition 2 in practice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from limpet import stats
from limpet.audits.figures import line, look
from limpet.audits.paths import Models, clean_texts, forward_states, within
from limpet.audits.result import SHARDS, Progress, Result, Row, each, row
from limpet.audits.selection import Preset as Base
from limpet.audits.selection import count_of, view
from limpet.denoisers import Denoiser

TITLE = "Risk of a selected label against noise"
ASKS = "How often a selected label is wrong on exact forward states, against noise."
MEASURES = ("error", "deficit", "selected error", "selected deficit")
PANELS = 2


@dataclass(frozen=True, kw_only=True)
class Preset(Base):
    times: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.67, 0.8, 0.9)


PRESETS = {
    "smoke": Preset(shards=SHARDS[:2], paths=1, length=64, times=(0.2, 0.5, 0.8), precision="bfloat16"),
    "mini": Preset(paths=16),
    "paper": Preset(paths=16, count=25),
}

# The paper says in words that selected-label error falls steadily with noise, and gives its range for 0.2 <= t <= 0.7.
PAPER = {
    (model, "selected error", t): "within 3.5 to 8.1"
    for model in ("Duo", "Duo-distilled")
    for t in (0.2, 0.4, 0.5, 0.6, 0.67, 0.7)
}

CONVENTIONS = {
    "error": "labels (argmax of the leave-one-out law) that are not the clean token, over all positions of the text",
    "deficit": "mean of 1 - max law over all positions: an exact source's Bayes risk, a checkpoint's own belief",
    "selected error": "the same over the positions selected: least deficit first, spacing 4, no budget",
    "selected deficit": "the law's own belief there",
    "selected error, rise": "against the next lower time, along the same forward paths, points, paired by shard",
}


def risks(model: Denoiser, clean: Tensor, times: Sequence[float], seed: int, preset: Preset) -> np.ndarray:
    """(times, 4) percentages of one shard, in the order of MEASURES."""
    count, inside = count_of(preset, clean.shape[1]), within(model, clean)
    found = []
    for t, states in zip(times, forward_states(clean, times, model, seed), strict=True):
        label, deficit, chosen = view(model, states, t, inside, count, preset.spacing)
        wrong = (label != clean).double()
        found.append([float(100 * x.mean()) for x in (wrong[inside], deficit[inside], wrong[chosen], deficit[chosen])])
    return np.array(found)


@torch.inference_mode()
def audit(models: Models, preset: Preset, progress: Progress = lambda done, total: None) -> Result:
    texts = {
        model.name: clean_texts(models, model, preset.shards, preset.paths, preset.length) for model in models.denoisers
    }
    found: dict[str, list[np.ndarray]] = {}
    units = [(model, shard, seed) for model in models.denoisers for shard, seed in enumerate(preset.shards)]
    for model, shard, seed in each(units, progress):
        made = risks(model, texts[model.name][shard], preset.times, seed, preset)
        found.setdefault(model.name, []).append(made)
    rows: list[Row] = []
    for model in models.denoisers:
        values = np.stack(found[model.name])  # (shards, times, measures)
        length = texts[model.name][0].shape[1]
        sequences = preset.paths * len(preset.shards)
        events = {
            "": sum(int(within(model, clean).sum()) for clean in texts[model.name]),
            "selected": sequences * count_of(preset, length),
        }
        for i, t in enumerate(preset.times):
            for j, quantity in enumerate(MEASURES):
                over = events["selected" if quantity.startswith("selected") else ""]
                rows.append(row(model, quantity, {"t": t}, values[:, i, j], PAPER, "%", over))
            if i:
                rise = stats.paired(values[:, i, 2], values[:, i - 1, 2])
                rows.append(row(model, "selected error, rise", {"t": t}, rise.values, {}, "%", events["selected"]))
    return Result("risk", asdict(preset), models.digests(), rows, CONVENTIONS)


def figure(result: Result, axes: Sequence[Any]) -> None:
    """Error and belief over all positions, and over the selected ones."""
    times = result.settings["times"]
    for panel, prefix in zip(axes, ("", "selected "), strict=True):
        for i, model in enumerate(result.models):
            for measure, style in (("error", "-"), ("deficit", ":")):
                estimates = [result.of(prefix + measure, model, t=t)[0].estimate for t in times]
                line(panel, times, estimates, f"{model}, {measure}", linestyle=style, **look(i))
        panel.set_xlabel("t")
        panel.set_title("selected positions" if prefix else "all positions")
    axes[0].set_ylabel("%")
    axes[1].legend(fontsize="small", handlelength=3)  # where the lines leave room
