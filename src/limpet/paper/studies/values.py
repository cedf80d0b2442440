"""Other tokens at the committed positions (section 5.2, appendix E.2): all else is replayed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from limpet.experiments.contents import Contrast, Entry, Table, number, signed
from limpet.experiments.study import Cell, Probe, Seen
from limpet.models import Denoiser
from limpet.paper.studies.audits import cost, one, percent
from limpet.paper.studies.presets import Preset
from limpet.paper.studies.published import Beside, printed
from limpet.paper.studies.trajectories import Settings, opened
from limpet.samplers import CRS
from limpet.samplers.context import Context, State, generate, stepped

ARMS = {"argmax": "argmax", "second": "second-ranked", "nucleus": "top-p=0.9 alternative", "refreshed": "refreshed"}
REFRESHED = {  # two of them our own, to tell labels that are revised from labels that are revised all at once
    "refreshed": "every call", "refreshed-half": "every second call", "refreshed-in-turn": "every second position",
}  # fmt: skip
CHANGES = ("labels replaced", "labels put back")


def cells(preset: Preset) -> Iterator[Cell | Probe]:
    yield Cell("native", preset.distilled, preset.native, preset.n)
    yield Cell("argmax", preset.distilled, preset.crs, preset.n)
    for values in list({**ARMS, **REFRESHED})[1:]:
        yield Cell(values, preset.distilled, preset.crs.replace(values=values), preset.n, replay="argmax")
    settings = Settings(paths=preset.n, nfe=preset.nfe)
    yield Probe("changes", (preset.distilled,), look, settings, (1 + len(REFRESHED)) * cost(settings))


class Changes(NamedTuple):
    """How many labels were visible, over all calls of a path, how many a call replaced, how many it put back."""

    visible: int
    replaced: int
    back: int


def look(models: Sequence[Denoiser], settings: Settings, shard: int, shards: tuple[int, ...]) -> Iterator[Seen]:
    """What becomes of the labels of arms that refresh them, all at the positions of one CRS run."""
    crs = CRS(nfe=settings.nfe)
    for model in models:
        ctx = opened(model, settings, shards[shard])
        start = crs.begin(ctx)
        while start.call < crs.warmup_calls:  # nothing is committed before: all arms share the path so far
            start, _ = stepped(crs, ctx, start)
        *_, (end, _) = generate(crs, ctx, start)
        for values in REFRESHED:
            arm = crs.replace(values=values)
            found = followed(arm, ctx, start._replace(memory=arm.replay(ctx, end.memory).memory))
            yield Seen(model.name, "labels replaced", {"values": values}, *percent(found.replaced, found.visible))
            yield Seen(model.name, "labels put back", {"values": values}, *percent(found.back, found.replaced))


def followed(arm: CRS, ctx: Context, state: State) -> Changes:
    """What becomes of the visible labels of a path, from a state on."""
    former = torch.full_like(state.tokens, -1)  # what a label was before its last change
    visible = replaced = back = 0
    for after, info in generate(arm, ctx, state):
        if info.call < arm.nfe - 1:  # nothing is stored at the final step
            was, now, seen = state.memory[0], after.memory[0], info.marks["visible"]
            changed = seen & (now != was)
            visible, replaced = visible + int(seen.sum()), replaced + int(changed.sum())
            back += int((changed & (now == former)).sum())
            former = torch.where(changed, was, former)
        state = after
    return Changes(visible, replaced, back)


def tables(results: Beside, preset: Preset) -> Iterator[Table]:
    def refreshed(values: str, name: str) -> tuple[Entry, ...]:
        here = (Entry(text) for text, *_ in results.entries(values, ("ppl", "entropy")))  # the paper's stand above
        gap = Entry(signed(results.contrast(values, "argmax"), 4))
        changes = (Entry(number(one(results, quantity, values=values), 1)) for quantity in CHANGES)
        return Entry(name), *here, gap, *changes

    arms = {**ARMS, "native": "none (native)"}
    yield results.measured("values", [{arm: (name,) for arm, name in arms.items()}])
    if set(REFRESHED) <= set(results.cells):  # reports written before these arms were added do without
        yield results.table("values-refreshed", [[refreshed(*arm) for arm in REFRESHED.items()]])


def contrasts(results: Beside, preset: Preset) -> Iterator[Contrast]:
    for arm in list(ARMS)[1:]:
        paper = printed("nll", arm, "argmax")
        shown = f"{paper.mean:+.3f}" if paper else ""
        yield Contrast(f"NLL of {ARMS[arm]} less argmax", results.contrast(arm, "argmax"), shown)
