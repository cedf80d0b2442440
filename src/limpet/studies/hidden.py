"""Whether a stored label is still believed later, seen, hidden at its own position, or never written (appendix E)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from limpet.compare import SHARDS
from limpet.denoisers import Denoiser
from limpet.engine.path import Path, State
from limpet.lab.page import Figure, Panel, series
from limpet.lab.results import Results
from limpet.lab.study import Seen
from limpet.samplers import CRS, Native
from limpet.samplers.crs import NEVER
from limpet.studies import paths
from limpet.studies.audit import Preset, beside, each, models_of, one, presets, tabled

TITLE = "Later belief in a stored label"
ASKS = "Whether a stored label is still believed later, seen, hidden at its own position, or never written."
VIEWS = ("overwritten", "restored", "revisable")


@dataclass(frozen=True, kw_only=True)
class Settings(paths.Settings):
    events: int = 8  # selections audited on each path, at most
    offsets: tuple[int, ...] = (1, 2, 4, 8)  # calls after the selection


PRESETS = presets(
    Preset("smoke", Settings(paths=1, nfe=12, length=64, events=3), "bfloat16", SHARDS[:2]),
    Preset("mini", Settings(paths=2, nfe=32), "bfloat16"),
    Preset("paper", Settings(paths=8)),
)

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
    "revisable": "the same on the path without labels, same randomness, at the same call and position",
    "changed": "events in which restoring the position changes its input token",
    "where it changed": "over those events alone",
    "events": "evenly spaced along each path's selections in order of call and position; the readout counts as a call",
}


class Event(NamedTuple):
    path: int
    position: int
    call: int
    label: int


class Belief(NamedTuple):
    """What one event shows at one offset."""

    probability: dict[str, float]  # of the stored label, in each view
    changed: bool


def look(models: Sequence[Denoiser], settings: Settings, shard: int, shards: tuple[int, ...]) -> Iterator[Seen]:
    crs = CRS(nfe=settings.nfe)
    for model in models:
        path = paths.opened(model, settings, shards[shard], trace=True)
        native = paths.states(Native(nfe=settings.nfe), paths.opened(model, settings, shards[shard]))
        beliefs = followed(crs, path, list(paths.states(crs, path)), list(native), settings)
        for offset, found in beliefs.items():
            at = {"offset": offset}
            changed = [one for one in found if one.changed]
            for suffix, kept in (("", found), (", where it changed", changed)):
                for view in VIEWS:
                    yield Seen(model.name, view + suffix, at, *_mean([one.probability[view] for one in kept]))
            yield Seen(model.name, "changed", at, *_mean([float(one.changed) for one in found]))


def _mean(values: list[float]) -> tuple[float, str, int]:
    return (100 * (sum(values) / len(values)) if values else float("nan")), "%", len(values)


def followed(
    crs: CRS, path: Path, along: list[State], native: list[State], settings: Settings
) -> dict[int, list[Belief]]:
    """What the audited events of one shard show at each offset that their path still reaches."""
    audited = events(along[-1].memory[1], along[-1].memory[0], settings.events)
    found: dict[int, list[Belief]] = {offset: [] for offset in settings.offsets}
    for call in range(settings.nfe):
        here = [(event, offset) for event in audited for offset in settings.offsets if event.call + offset == call]
        if here:
            beliefs = observe(crs, path, along[call], native[call], [event for event, _ in here])
            for (_, offset), one in zip(here, beliefs, strict=True):
                found[offset].append(one)
    return found


def events(selected_at: Tensor, labels: Tensor, most: int) -> list[Event]:
    """At most so many selections of each path, evenly spaced in order of call and position."""
    found = []
    for path, calls in enumerate(selected_at.cpu()):
        order = calls.sort(stable=True)
        chosen = order.indices[order.values < NEVER]
        for position in chosen[paths.spread(len(chosen), most)].tolist():
            found.append(Event(path, position, int(calls[position]), int(labels[path, position])))
    return found


def observe(crs: CRS, path: Path, state: State, native: State, chosen: Sequence[Event]) -> list[Belief]:
    """The three views of some events in one call of a traced path and of its paired revisable one."""
    t, model, device = crs.times[state.call], path.denoiser, path.fixed.device
    sample, position, _, label = (torch.tensor(column, device=device) for column in zip(*chosen, strict=True))
    inputs = torch.where(crs.visible(state), state.memory[0], state.tokens)
    own = state.tokens[sample, position]
    restored, each = inputs[sample], torch.arange(len(chosen), device=device)  # one row an event
    restored[each, position] = own
    shown = {"overwritten": (inputs, sample), "restored": (restored, each), "revisable": (native.tokens, sample)}
    found = {}
    for view, (tokens, row) in shown.items():
        law = paths.log_law(model, model.body(tokens, t)[row, position], tokens[row, position], t)
        found[view] = law.gather(-1, label[:, None])[:, 0].exp().tolist()
    changed = (own != label).tolist()
    return [Belief({view: found[view][i] for view in VIEWS}, changed[i]) for i in range(len(chosen))]


cells, tables = each(look), tabled(ASKS, beside(PAPER))


def figures(results: Results, preset: Preset[Settings]) -> Iterator[Figure]:
    """Probability of the stored label against the offset, over all events and where restoring changed the input."""

    def panel(title: str, suffix: str) -> Panel:
        lines = (
            series(f"{model}, {view}", preset.settings.offsets,
                   [one(results, view + suffix, model, offset=offset) for offset in preset.settings.offsets])
            for model in models_of(results, "restored")
            for view in VIEWS
        )  # fmt: skip
        ticks = tuple((float(offset), str(offset)) for offset in preset.settings.offsets)
        return Panel(title, "calls after the selection", "probability, %", tuple(lines), ticks, log_x=True)

    panels = panel("all events", ""), panel("where restoring changes the token", ", where it changed")
    yield Figure("hidden", "Probability of the stored label, so many calls after its selection.", panels)
