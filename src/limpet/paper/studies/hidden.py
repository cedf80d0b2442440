"""Whether a stored label is still believed later, seen, hidden at its own position, or never written (appendix E)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from limpet.evaluation.statistics import paired
from limpet.experiments.claims import Finding, above
from limpet.experiments.contents import Panel, series
from limpet.experiments.results import Results
from limpet.experiments.study import Seen
from limpet.models import Denoiser
from limpet.paper.studies import trajectories
from limpet.paper.studies.audits import Preset, beside, each, less, models_of, one, presets
from limpet.paper.studies.published import Claims, ticks
from limpet.samplers import CRS, Native
from limpet.samplers.context import Context, State
from limpet.samplers.crs import NEVER

VIEWS = ("overwritten", "restored", "revisable")


@dataclass(frozen=True, kw_only=True)
class Settings(trajectories.Settings):
    events: int = 8  # selections audited on each path, at most
    offsets: tuple[int, ...] = (1, 2, 4, 8)  # calls after the selection


PRESETS = presets("hidden", Settings)


class Event(NamedTuple):
    ctx: int
    position: int
    call: int
    label: int


Belief = dict[str, float]  # at one offset, the probability of the stored label in each view, and whether it "changed"


def look(models: Sequence[Denoiser], settings: Settings, shard: int, shards: tuple[int, ...]) -> Iterator[Seen]:
    crs = CRS(nfe=settings.nfe)
    for model in models:
        ctx = trajectories.opened(model, settings, shards[shard], trace=True)
        native = trajectories.states(Native(nfe=settings.nfe), trajectories.opened(model, settings, shards[shard]))
        beliefs = followed(crs, ctx, list(trajectories.states(crs, ctx)), list(native), settings)
        for offset, found in beliefs.items():
            at, changed = {"offset": offset}, [belief for belief in found if belief["changed"]]
            for suffix, kept in (("", found), (", where it changed", changed)):
                for view in VIEWS:
                    yield Seen(model.name, view + suffix, at, *_mean([belief[view] for belief in kept]))
            yield Seen(model.name, "changed", at, *_mean([belief["changed"] for belief in found]))


def _mean(values: list[float]) -> tuple[float, str, int]:
    return (100 * (sum(values) / len(values)) if values else float("nan")), "%", len(values)


def followed(
    crs: CRS, ctx: Context, along: list[State], native: list[State], settings: Settings
) -> dict[int, list[Belief]]:
    """What the audited events of one shard show at each offset that their path still reaches."""
    audited = events(along[-1].memory[1], along[-1].memory[0], settings.events)
    found: dict[int, list[Belief]] = {offset: [] for offset in settings.offsets}
    for call in range(settings.nfe):
        here = [(event, offset) for event in audited for offset in settings.offsets if event.call + offset == call]
        if here:
            beliefs = observe(crs, ctx, along[call], native[call], [event for event, _ in here])
            for (_, offset), one in zip(here, beliefs, strict=True):
                found[offset].append(one)
    return found


def events(committed_at: Tensor, labels: Tensor, most: int) -> list[Event]:
    """At most so many selections of each path, evenly spaced in order of call and position."""
    found = []
    for ctx, calls in enumerate(committed_at.cpu()):
        order = calls.sort(stable=True)
        chosen = order.indices[order.values < NEVER]
        for position in chosen[trajectories.spread(len(chosen), most)].tolist():
            found.append(Event(ctx, position, int(calls[position]), int(labels[ctx, position])))
    return found


def observe(crs: CRS, ctx: Context, state: State, native: State, chosen: Sequence[Event]) -> list[Belief]:
    """The three views of some events in one call of a traced path and of its paired revisable one."""
    t, model, device = crs.times[state.call], ctx.model, ctx.fixed.device
    sample, position, _, label = (torch.tensor(column, device=device) for column in zip(*chosen, strict=True))
    inputs = torch.where(crs.visible(state), state.memory[0], state.tokens)
    own = state.tokens[sample, position]
    restored, each = inputs[sample], torch.arange(len(chosen), device=device)  # one row an event
    restored[each, position] = own
    shown = {"overwritten": (inputs, sample), "restored": (restored, each), "revisable": (native.tokens, sample)}
    found = {"changed": (own != label).double().tolist()}
    for view, (tokens, row) in shown.items():
        probs = trajectories.log_probs(model, model.body(tokens, t)[row, position], tokens[row, position], t)
        found[view] = probs.gather(-1, label[:, None])[:, 0].exp().tolist()
    return [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)]


cells = each(look)


def claims(results: Results, preset: Preset[Settings]) -> Claims:
    """Of the distilled model, whose paths the paper follows: the restored view less the paired revisable one."""

    def gaps(suffix: str) -> list[Finding]:
        views = f"restored{suffix}", f"revisable{suffix}"
        return [
            above(f"{views[0]} less revisable, offset {offset}",
                  paired(*(one(results, view, model, offset=offset).values for view in views)), 0,
                  less("hidden", *views, offset=offset))
            for model in beside(results, "Duo-distilled")
            for offset in preset.settings.offsets
        ]  # fmt: skip

    return {"restored": gaps(""), "changed": gaps(", where it changed")}


def panels(results: Results, preset: Preset[Settings]) -> Iterator[Panel]:
    """Probability of the stored label against the offset, over all events and where restoring changed the input."""
    for title, suffix in (("all events", ""), ("where restoring changes the token", ", where it changed")):
        lines = [
            series(f"{model}, {view}", preset.settings.offsets,
                   [one(results, view + suffix, model, offset=offset) for offset in preset.settings.offsets])
            for model in models_of(results, "restored")
            for view in VIEWS
        ]  # fmt: skip
        at = ticks(preset.settings.offsets)
        yield Panel(title, "calls after the selection", "probability, %", lines, at, log_x=True)
