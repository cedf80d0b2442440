"""Other values of the committed tokens (section 5.2, appendix E.2); everything else is replayed."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from limpet.experiments import Cell, Entry, Probe, ProbeValue, Table, format_estimate, format_signed
from limpet.generation import Inputs, rollout
from limpet.models import Denoiser
from limpet.paper.studies.audits import cost, estimate_of, percent
from limpet.paper.studies.presets import Preset, defined_cells
from limpet.paper.studies.published import PaperResults
from limpet.paper.studies.trajectories import AuditSettings, audit_inputs
from limpet.samplers import CRS, State

REFRESHED = {  # the last two are not in the paper: they separate revising tokens from revising all of them at once
    "refreshed": "every call",
    "refreshed-half": "every second call",
    "refreshed-interleaved": "every second position",
}
CHANGES = ("tokens replaced", "tokens reverted")


def cells(preset: Preset) -> list[Cell | Probe]:
    settings = AuditSettings(n=preset.n, nfe=preset.nfe)
    changes = Probe("changes", (preset.distilled,), audit, settings, (1 + len(REFRESHED)) * cost(settings))
    return [*defined_cells("values", preset), changes]


class ChangeCounts(NamedTuple):
    """Over all calls of a batch: visible committed tokens, those that a call replaced, and those that it reverted."""

    visible: int
    replaced: int
    reverted: int


def audit(
    models: Sequence[Denoiser], settings: AuditSettings, index: int, seeds: tuple[int, ...]
) -> Iterator[ProbeValue]:
    """How samplers that refresh committed tokens change them, all at the positions of one CRS run."""
    crs = CRS(nfe=settings.nfe)
    for model in models:
        inputs = audit_inputs(model, settings, seeds[index])
        # Nothing is committed during warmup, so all samplers share the trajectory until its end.
        *_, start = rollout(model, crs, inputs, stop=crs.warmup_calls)
        *_, end = rollout(model, crs, inputs, start=start.state)
        for values in REFRESHED:
            sampler = crs.replace(values=values)
            memory = sampler.replay(start.context, end.state.memory).memory
            found = count_changes(sampler, model, inputs, start.state._replace(memory=memory))
            at = {"values": values}
            yield ProbeValue(model.name, CHANGES[0], at, *percent(found.replaced, found.visible))
            yield ProbeValue(model.name, CHANGES[1], at, *percent(found.reverted, found.replaced))


def count_changes(sampler: CRS, model: Denoiser, inputs: Inputs, start: State) -> ChangeCounts:
    """The changes of visible committed tokens from a state on. The final step commits and changes nothing."""
    former = torch.full_like(start.tokens, -1)  # the value before the last change
    before = start.memory[0]
    visible = replaced = reverted = 0
    for step in rollout(model, sampler, inputs, start=start, stop=sampler.nfe - 1):
        after = step.state.memory[0]
        changed = step.visible & (after != before)
        visible, replaced = visible + int(step.visible.sum()), replaced + int(changed.sum())
        reverted += int((changed & (after == former)).sum())
        former, before = torch.where(changed, before, former), after
    return ChangeCounts(visible, replaced, reverted)


def tables(results: PaperResults, preset: Preset) -> Iterator[Table]:
    def refreshed(values: str, name: str) -> tuple[Entry, ...]:
        here = (Entry(entry.text) for entry in results.entries(values, ("ppl", "entropy")))  # paper: in the first table
        delta = Entry(format_signed(results.contrast(values, "argmax"), 4))
        changes = (Entry(format_estimate(estimate_of(results, name, values=values), 1)) for name in CHANGES)
        return Entry(name), *here, delta, *changes

    yield results.table("values-refreshed", [[refreshed(*row) for row in REFRESHED.items()]])
