"""What visible labels hold: the argmax, worse tokens, or each current argmax, at the same positions (appendix E)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from limpet import sampler, stats
from limpet.audits.figures import bars
from limpet.audits.paths import QUALITY, Models, before, finished, prepared, quality, recorded
from limpet.audits.result import SHARDS, Progress, Result, Row, each, percent, row
from limpet.audits.result import Preset as Base
from limpet.denoisers import Denoiser
from limpet.labels import Choice
from limpet.policy import Policy
from limpet.sampler import Run, State
from limpet.samples import Selection

TITLE = "What the visible labels hold"
ASKS = "What visible labels have to hold: the argmax, worse tokens, or each current argmax."
ARMS = ("argmax", "second", "nucleus", "refreshed", "refreshed half as often", "refreshed in turn")
REFRESHED = ARMS[-3:]
PANELS = 2


@dataclass(frozen=True, kw_only=True)
class Preset(Base):
    pass


PRESETS = {
    "smoke": Preset(shards=SHARDS[:2], paths=1, nfe=8, length=48, precision="bfloat16"),
    "mini": Preset(paths=2, nfe=32, precision="bfloat16"),
    "paper": Preset(paths=64),
}

PAPER = {
    ("Duo-distilled", "perplexity", values): figure
    for values, figure in {
        "argmax": "28.27 ± 0.53",
        "second": "77.75 ± 1.80",
        "nucleus": "78.36 ± 1.56",
        "refreshed": "26.42 ± 0.39",
    }.items()
}

CONVENTIONS = {
    **QUALITY,
    "NLL, less argmax": "nats per token, paired by shard",
    "labels replaced": "of the visible labels, those that a step's refresh changes, all steps together",
    "labels put back": "of those, the ones that go back to the value before their last change",
    "values": "positions and steps of selection replayed from the argmax run; second: rank two of the arm's own law; "
    "nucleus: a draw from top-p 0.9 without the argmax, rank two where it holds nothing else; refreshed: all visible "
    "labels take each current argmax at once, seen from the next step on; two more that are not in the paper: half as "
    "often, all of them at even steps; in turn, every other position, even ones at even steps",
}


class Changes(NamedTuple):
    """How many labels were visible, over all steps of a path, how many a step replaced, how many it put back."""

    visible: int
    replaced: int
    back: int


def half_as_often(choice: Choice) -> Tensor:
    """A label rule that refreshes all positions, at even steps."""
    due = choice.transition.step % 2 == 0
    return torch.where(choice.chosen | (choice.visible & due), choice.outcome.top, choice.labels)


def in_turn(choice: Choice) -> Tensor:
    """A label rule that refreshes every other position, so that no label changes together with its neighbour."""
    positions = torch.arange(choice.labels.shape[1], device=choice.labels.device)
    due = (positions + choice.transition.step) % 2 == 0
    return torch.where(choice.chosen | (choice.visible & due), choice.outcome.top, choice.labels)


RULES = {"refreshed half as often": half_as_often, "refreshed in turn": in_turn}  # that no policy names


def arm_of(model: Denoiser, arm: str, preset: Preset, seed: int, record: Selection) -> Run:
    """A run that selects where and when the recorded one did, and stores what the arm says."""
    policy = Policy(nfe=preset.nfe, values="refreshed" if arm in REFRESHED else arm)  # type: ignore[arg-type]
    run = prepared(model, policy, seed, preset.paths, preset.length, replay=record)
    return replace(run, label=RULES[arm]) if arm in RULES else run


def followed(run: Run, state: State) -> tuple[State, Changes]:
    """The end of a path from a state on, and what became of its visible labels."""
    former = torch.full_like(state.labels, -1)  # what a label was before its last change
    visible = replaced = back = 0
    for after, info in sampler.generate(run, state):
        if info.step == run.policy.nfe - 1:  # nothing is stored at the readout
            return after, Changes(visible, replaced, back)
        changed = info.visible & (after.labels != state.labels)
        visible, replaced = visible + int(info.visible.sum()), replaced + int(changed.sum())
        back += int((changed & (after.labels == former)).sum())
        former = torch.where(changed, state.labels, former)
        state = after
    raise AssertionError("a path ends with its readout")


@torch.inference_mode()
def audit(models: Models, preset: Preset, progress: Progress = lambda done, total: None) -> Result:
    units = [(model, seed, arm) for model in models.denoisers for seed in preset.shards for arm in ARMS]
    outputs: dict[tuple[str, str], list[Tensor]] = {}
    changes: dict[tuple[str, str], list[Changes]] = {}
    for model, seed, arm in each(units, progress):
        if arm == "argmax":
            run = prepared(model, Policy(nfe=preset.nfe), seed, preset.paths, preset.length)
            start = before(run, run.warmup)  # nothing is selected before: all arms share the path so far
            end = finished(run, start)
            record = recorded(end)
        else:
            end, seen = followed(arm_of(model, arm, preset, seed, record), start)
            changes.setdefault((model.name, arm), []).append(seen)
        outputs.setdefault((model.name, arm), []).append(end.tokens.cpu())
    rows: list[Row] = []
    for model in models.denoisers:
        found = {arm: quality(models, model, outputs[model.name, arm]) for arm in ARMS}
        for quantity in QUALITY:
            rows += [row(model, quantity, {"values": arm}, found[arm][quantity], PAPER) for arm in ARMS]
        for arm in ARMS[1:]:
            gap = stats.paired(found[arm]["nll"], found["argmax"]["nll"])
            rows.append(row(model, "NLL, less argmax", {"values": arm}, gap.values, PAPER))
        for arm in REFRESHED:
            visible, replaced, back = zip(*changes[model.name, arm], strict=True)
            at = {"values": arm}
            rows.append(row(model, "labels replaced", at, percent(replaced, visible), PAPER, "%", sum(visible)))
            rows.append(row(model, "labels put back", at, percent(back, replaced), PAPER, "%", sum(replaced)))
    return Result("values", asdict(preset), models.digests(), rows, CONVENTIONS)


def figure(result: Result, axes: Sequence[Any]) -> None:
    """Perplexity of each arm, and its paired distance from the argmax arm."""
    for panel, quantity, arms in zip(axes, ("perplexity", "NLL, less argmax"), (ARMS, ARMS[1:]), strict=True):
        groups = {m: [result.of(quantity, m, values=arm)[0].estimate for arm in arms] for m in result.models}
        bars(panel, arms, groups)
        panel.set_ylabel(quantity)
    axes[1].axhline(0, color="k", linewidth=0.8)
    axes[0].legend()
