"""Whether a committed token is still probable later: visible, hidden at its own position, or never written
(appendix E.3)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from limpet.experiments import Panel, ProbeValue, Results, estimate_series
from limpet.generation import Inputs, Step, rollout
from limpet.models import Denoiser
from limpet.paper.studies import audits
from limpet.paper.studies.audits import estimate_of
from limpet.paper.studies.published import ticks
from limpet.paper.studies.trajectories import AuditSettings, audit_inputs, evenly_spaced, predict_samples
from limpet.samplers import CRS, Native

VIEWS = ("overwritten", "restored", "revisable")


@dataclass(frozen=True, kw_only=True)
class HiddenSettings(AuditSettings):
    events: int = 8  # selections audited in each trajectory, at most
    offsets: tuple[int, ...] = (1, 2, 4, 8)  # calls after the selection


PRESETS = audits.presets("hidden", HiddenSettings)


class CommitEvent(NamedTuple):
    """A position of one sample and the token that a call committed there."""

    sample: int
    position: int
    call: int
    token: int


Belief = dict[str, float]  # of one event: the probability of its token in each view, and whether it "changed"


def audit(
    models: Sequence[Denoiser], settings: HiddenSettings, index: int, seeds: tuple[int, ...]
) -> Iterator[ProbeValue]:
    crs, native = CRS(nfe=settings.nfe), Native(nfe=settings.nfe, final_step="argmax")
    for model in models:
        inputs = audit_inputs(model, settings, seeds[index], trace=True)
        committing = list(rollout(model, crs, inputs))
        revisable = list(rollout(model, native, audit_inputs(model, settings, seeds[index])))
        for offset, found in beliefs_by_offset(inputs, committing, revisable, settings).items():
            at, changed = {"offset": offset}, [belief for belief in found if belief["changed"]]
            for suffix, kept in (("", found), (", where it changed", changed)):
                for view in VIEWS:
                    mean = sum(belief[view] for belief in kept) / len(kept) if kept else math.nan
                    yield ProbeValue(model.name, view + suffix, at, 100 * mean, "%", len(kept))
            yield ProbeValue(model.name, "changed", at, *audits.percent(len(changed), len(found)))


def beliefs_by_offset(
    inputs: Inputs, committing: Sequence[Step], revisable: Sequence[Step], settings: HiddenSettings
) -> dict[int, list[Belief]]:
    """What the audited events of one seed show at each offset that their trajectory still reaches.

    committing, revisable: every step of the CRS trajectory and of its paired native one."""
    values, committed_at = committing[-1].state.memory
    audited = commit_events(committed_at, values, settings.nfe, settings.events)
    found: dict[int, list[Belief]] = {offset: [] for offset in settings.offsets}
    for call in range(1, settings.nfe):
        here = [(event, offset) for event in audited for offset in settings.offsets if event.call + offset == call]
        if here:
            beliefs = beliefs_at(inputs, committing, revisable, call, [event for event, _ in here])
            for (_, offset), belief in zip(here, beliefs, strict=True):
                found[offset].append(belief)
    return found


def commit_events(committed_at: Tensor, values: Tensor, nfe: int, most: int) -> list[CommitEvent]:
    """At most `most` selections of each trajectory, evenly spaced in order of call and position.

    committed_at: (B, L) the call that committed each position, nfe or more for none. values: (B, L) its token."""
    found = []
    for sample, calls in enumerate(committed_at.cpu()):
        order = calls.sort(stable=True)
        chosen = order.indices[order.values < nfe]
        for position in chosen[evenly_spaced(len(chosen), most)].tolist():
            found.append(CommitEvent(sample, position, int(calls[position]), int(values[sample, position])))
    return found


def beliefs_at(
    inputs: Inputs, committing: Sequence[Step], revisable: Sequence[Step], call: int, events: Sequence[CommitEvent]
) -> list[Belief]:
    """The three views of some events in one call."""
    step, before, native = committing[call], committing[call - 1].state, revisable[call]
    model, device = step.context.model, before.tokens.device
    sample, position, _, token = (torch.tensor(column, device=device) for column in zip(*events, strict=True))
    each = torch.arange(len(events), device=device)  # one row for each event
    overwritten, clean = step.model_input[sample], (step.visible | ~step.context.free)[sample]
    restored, restored_clean = overwritten.clone(), clean.clone()
    restored[each, position] = own = before.tokens[sample, position]
    restored_clean[each, position] = False
    views = {
        "overwritten": (before, overwritten, clean),
        "restored": (before, restored, restored_clean),
        "revisable": (revisable[call - 1].state, native.model_input[sample], None),
    }
    found = {"changed": (own != token).double().tolist()}
    for view, (state, tokens, known) in views.items():
        log_probs = predict_samples(model, inputs, state, sample, tokens, step.t, position, known)
        found[view] = log_probs.gather(-1, token[:, None])[:, 0].exp().tolist()
    return [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)]


cells = audits.probe_each(audit)


def panels(results: Results, preset: audits.AuditPreset[HiddenSettings]) -> Iterator[Panel]:
    """Probability of the committed token against the offset, over all events and where restoring changed the input."""
    offsets = preset.settings.offsets
    for title, suffix in (("all events", ""), ("where restoring changes the token", ", where it changed")):
        lines = []
        for model in audits.models_of(results, "restored"):
            for view in VIEWS:
                estimates = [estimate_of(results, view + suffix, model, offset=offset) for offset in offsets]
                lines.append(estimate_series(f"{model}, {view}", offsets, estimates))
        yield Panel(title, "calls after the selection", "probability, %", lines, ticks(offsets), log_x=True)
