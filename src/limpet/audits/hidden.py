"""Whether a stored label is still believed later, seen, hidden at its own position, or never written (appendix E)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from limpet import sampler
from limpet.audits.figures import line, look
from limpet.audits.paths import Models, log_law, prepared, spread, states
from limpet.audits.result import SHARDS, Progress, Result, Row, each, row
from limpet.audits.result import Preset as Base
from limpet.policy import Policy
from limpet.sampler import NEVER, Run, State

TITLE = "Later belief in a stored label"
ASKS = "Whether a stored label is still believed later, seen, hidden at its own position, or never written."
VIEWS = ("overwritten", "restored", "revisable")
PANELS = 2


@dataclass(frozen=True, kw_only=True)
class Preset(Base):
    events: int = 8  # selections audited on each path, at most
    offsets: tuple[int, ...] = (1, 2, 4, 8)  # steps after the selection


PRESETS = {
    "smoke": Preset(shards=SHARDS[:2], paths=1, nfe=12, length=64, events=3, precision="bfloat16"),
    "mini": Preset(paths=2, nfe=32, precision="bfloat16"),
    "paper": Preset(paths=8),
}

PAPER = {
    ("Duo-distilled", quantity, offset): figure
    for quantity, figures in {
        "restored": ("74.83 ± 0.60", "83.23 ± 0.44", "82.30 ± 0.52", "82.91 ± 0.09"),
        "revisable": ("49.39 ± 2.62", "55.42 ± 3.59", "54.81 ± 4.22", "56.30 ± 4.30"),
        "restored, where it changed": ("73.00 ± 1.29", "84.02 ± 2.09", "81.99 ± 2.97", "84.58 ± 2.30"),
        "revisable, where it changed": ("45.34 ± 3.27", "52.95 ± 4.93", "51.91 ± 4.86", "53.78 ± 5.80"),
        "changed": ("144 of 256", "114 of 224", "108 of 224", "96 of 223"),
    }.items()
    for offset, figure in zip((1, 2, 4, 8), figures, strict=True)
}

CONVENTIONS = {
    "overwritten": "probability of the stored label under the input with all visible labels",
    "restored": "the same with the audited position alone back at its mutable token: an intervention, no marginal",
    "revisable": "the same on the path without labels, same randomness, at the same step and position",
    "changed": "events in which restoring the position changes its input token",
    "where it changed": "over those events alone",
    "events": "evenly spaced along each path's selections in order of step and position; the readout counts as a step",
}


class Event(NamedTuple):
    path: int
    position: int
    step: int
    label: int


class Seen(NamedTuple):
    """What one event shows at one offset."""

    probability: dict[str, float]  # of the stored label, in each view
    changed: bool


def events(selected_at: Tensor, labels: Tensor, most: int) -> list[Event]:
    """At most so many selections of each path, evenly spaced in order of step and position."""
    found = []
    for path, steps in enumerate(selected_at.cpu()):
        order = steps.sort(stable=True)
        chosen = order.indices[order.values != NEVER]
        for position in chosen[spread(len(chosen), most)].tolist():
            found.append(Event(path, position, int(steps[position]), int(labels[path, position])))
    return found


def observe(run: Run, along: list[State], native: list[State], chosen: Sequence[Event], step: int) -> list[Seen]:
    """The three views of some events at one step of a traced path and of its paired revisable one."""
    device, t, model = run.fixed.device, run.times[step], run.denoiser
    path, position, _, label = (torch.tensor(column, device=device) for column in zip(*chosen, strict=True))
    _, inputs = sampler.look(run, along[step])
    own = along[step].tokens[path, position]
    restored, each_row = inputs[path], torch.arange(len(path), device=device)  # one row an event
    restored[each_row, position] = own
    shown = {"overwritten": (inputs, path), "restored": (restored, each_row), "revisable": (native[step].tokens, path)}
    found = {}
    for view, (tokens, place) in shown.items():
        law = log_law(model, model.body(tokens, t)[place, position], tokens[place, position], t)
        found[view] = law.gather(-1, label[:, None])[:, 0].exp().tolist()
    changed = (own != label).tolist()
    return [Seen({view: found[view][i] for view in VIEWS}, changed[i]) for i in range(len(chosen))]


def offsets_seen(run: Run, along: list[State], native: list[State], preset: Preset) -> dict[int, list[Seen]]:
    """What the audited events of one shard show at each offset that their path still reaches."""
    audited = events(along[-1].selected_at, along[-1].labels, preset.events)
    found: dict[int, list[Seen]] = {offset: [] for offset in preset.offsets}
    for step in range(run.policy.nfe):
        here = [(event, offset) for event in audited for offset in preset.offsets if event.step + offset == step]
        if here:
            seen = observe(run, along, native, [event for event, _ in here], step)
            for (_, offset), one in zip(here, seen, strict=True):
                found[offset].append(one)
    return found


@torch.inference_mode()
def audit(models: Models, preset: Preset, progress: Progress = lambda done, total: None) -> Result:
    policy = Policy(nfe=preset.nfe)
    shards: dict[str, list[dict[int, list[Seen]]]] = {}
    for model, seed in each([(model, seed) for model in models.denoisers for seed in preset.shards], progress):
        run = prepared(model, policy, seed, preset.paths, preset.length, trace=True)
        native = prepared(model, policy.but(horizon=0), seed, preset.paths, preset.length)
        seen = offsets_seen(run, list(states(run)), list(states(native)), preset)
        shards.setdefault(model.name, []).append(seen)
    rows: list[Row] = []
    for model in models.denoisers:
        for offset in preset.offsets:
            seen_by_shard = [shard[offset] for shard in shards[model.name]]
            rows += _rows(model, offset, seen_by_shard)
    return Result("hidden", asdict(preset), models.digests(), rows, CONVENTIONS)


def _rows(model: Any, offset: int, shards: list[list[Seen]]) -> list[Row]:
    at = {"offset": offset}
    rows = []
    for suffix, kept in (("", shards), (", where it changed", [[s for s in shard if s.changed] for shard in shards])):
        events_kept = sum(map(len, kept))
        for view in VIEWS:
            means = [100 * _mean([seen.probability[view] for seen in shard]) for shard in kept]
            rows.append(row(model, view + suffix, at, means, PAPER, "%", events_kept))
    shares = [100 * _mean([float(seen.changed) for seen in shard]) for shard in shards]
    rows.append(row(model, "changed", at, shares, PAPER, "%", sum(map(len, shards))))
    return rows


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def figure(result: Result, axes: Sequence[Any]) -> None:
    """Probability of the stored label against the offset, over all events and where restoring changed the input."""
    offsets = result.settings["offsets"]
    for panel, suffix, title in zip(
        axes, ("", ", where it changed"), ("all events", "where restoring changes the token"), strict=True
    ):
        for i, model in enumerate(result.models):
            for view, style in zip(VIEWS, (":", "-", "--"), strict=True):
                found = [result.of(view + suffix, model, offset=offset)[0].estimate for offset in offsets]
                line(panel, offsets, found, f"{model}, {view}", linestyle=style, **look(i))
        panel.set_xscale("log", base=2)
        panel.set_xticks(offsets, [str(offset) for offset in offsets])
        panel.set_xlabel("steps after the selection")
        panel.set_title(title)
    axes[0].set_ylabel("probability of the stored label, %")
    axes[0].legend(fontsize="small", handlelength=3)
