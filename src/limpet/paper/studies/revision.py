"""Whether revised tokens become right, and whether they agree with each other.

The truth is that of `risk`: a committed token is right where it is the clean token. It is known along forward
trajectories, where the state before each call is drawn from the clean text, and only the committed tokens are the
sampler's. Along sampled trajectories there is no truth; there a committed token is compared with the prediction at its
position. All samplers commit the positions and calls of one run that never revises."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from limpet.diffusion.rng import CounterRNG
from limpet.experiments import Panel, ProbeValue, Results
from limpet.generation import Inputs, context_of, first_state, rollout
from limpet.models import Denoiser
from limpet.paper.studies import audits
from limpet.paper.studies.trajectories import ForwardSettings, clean_texts, forward_states, text_positions
from limpet.samplers import Mend

SAMPLERS: dict[str, dict[str, Any]] = {  # parameters that differ from a Mend that revises nothing, which comes first
    "stored": {},
    "revised": {"revise": None},
    "refreshed": {"values": "refreshed"},
    "refreshed-interleaved": {"values": "refreshed-interleaved"},
}
SAMPLED = ("sampled, contradicted", "sampled, contradicted again", "sampled, contradicted at the final step")


@dataclass(frozen=True, kw_only=True)
class RevisionSettings(ForwardSettings):
    times: tuple[float, ...] = (0.6, 0.5, 0.4, 0.3, 0.2, 0.1)  # at which wrong tokens are counted
    spacing: int = 2  # the default of Mend


PRESETS = audits.presets("revision", RevisionSettings)


class TokenRecord(NamedTuple):
    """The committed tokens around one call: (B, L) each."""

    t: float
    visible: Tensor  # bool: given to the network, so that the call may revise it
    chosen: Tensor  # bool: committed by the call
    top: Tensor  # the argmax of the prediction
    before: Tensor  # the committed tokens before the call
    after: Tensor


Share = tuple[str, dict[str, float], float, float]  # quantity, place, how many, and of how many


def audit(
    models: Sequence[Denoiser], settings: RevisionSettings, index: int, seeds: tuple[int, ...]
) -> Iterator[ProbeValue]:
    storing = Mend(nfe=settings.nfe, count=settings.count, spacing=settings.spacing, revise=0)
    for model in models:
        clean = clean_texts(model, settings, index, seeds)
        inputs = revision_inputs(model, clean, seeds[index])
        clean = clean.to(model.device)
        rising = forward_states(clean, storing.times[::-1], model, seeds[index])
        for name, records in record_all(storing, model, inputs, rising[::-1]).items():
            for quantity, at, hits, total in compare_with_truth(records, clean, settings.times):
                yield ProbeValue(model.name, quantity, {"values": name, **at}, *audits.percent(hits, total))
        for name, records in record_all(storing, model, inputs).items():
            for quantity, at, hits, total in agreement(records):
                yield ProbeValue(model.name, quantity, {"values": name, **at}, *audits.percent(hits, total))


def revision_inputs(model: Denoiser, clean: Tensor, seed: int) -> Inputs:
    """Traced trajectories as long as some texts; the end tokens at which texts were cut are fixed."""
    fixed = torch.where(text_positions(model, clean), -1, clean).to(model.device)
    return Inputs(fixed, CounterRNG(seed, torch.arange(len(clean), device=model.device)), trace=True)


def record_all(
    storing: Mend, model: Denoiser, inputs: Inputs, states: Sequence[Tensor] | None = None
) -> dict[str, list[TokenRecord]]:
    """The committed tokens of every sampler: along the given states, or along the sampler's own trajectories."""
    found: dict[str, list[TokenRecord]] = {}
    for name, changes in SAMPLERS.items():
        found[name], memory = record(storing.replace(**changes), model, inputs, states)
        inputs = inputs if inputs.replay else replace(inputs, replay=memory)
    return found


def record(
    sampler: Mend, model: Denoiser, inputs: Inputs, states: Sequence[Tensor] | None
) -> tuple[list[TokenRecord], tuple[Tensor, ...]]:
    """The committed tokens of one sampler around each call, and its final memory."""
    ctx = context_of(model, inputs)
    state, records = first_state(sampler, ctx, inputs), []
    for call in range(sampler.nfe):
        if states is not None:
            state = state._replace(tokens=torch.where(ctx.free, states[call], ctx.fixed))
        (step,) = rollout(model, sampler, inputs, start=state, stop=call + 1)
        masks, tokens = step.masks, (state.memory[0], step.state.memory[0])
        records.append(TokenRecord(step.t, masks["visible"], masks["chosen"], step.outcome.top, *tokens))
        state = step.state
    return records, state.memory


def stacked(records: Sequence[TokenRecord]) -> tuple[Tensor, ...]:
    """(calls, B, L) each: which tokens are visible, the argmax there, the committed tokens before and after."""
    parts = zip(*((one.visible, one.top, one.before, one.after) for one in records), strict=True)
    return tuple(torch.stack(part) for part in parts)


def share(quantity: str, hits: Tensor, among: Tensor, **at: float) -> Share:
    """How many of some positions have a property."""
    return quantity, at, float((hits & among).sum()), float(among.sum())


def compare_with_truth(records: Sequence[TokenRecord], clean: Tensor, times: Sequence[float]) -> Iterator[Share]:
    """Shares of tokens that are or become right or wrong: call by call, and from commitment to the end."""
    visible, top, before, after = stacked(records)
    wrong, right = visible & (before != clean), visible & (before == clean)
    contradicted = visible & (top != before)
    yield share("contradicted", contradicted, visible)
    yield share("wrong where contradicted", wrong, contradicted)
    yield share("right instead", top == clean, contradicted)
    yield share("corrected in a call", after == clean, wrong)
    yield share("still wrong in a call", (after != clean) & (after != before), wrong)
    yield share("spoiled in a call", after != clean, right)

    first = torch.full_like(clean, -1)  # the token that was committed at each position
    for one in records:
        first = torch.where(one.chosen, one.after, first)
    committed, last = first >= 0, records[-1].after
    wrong, right = committed & (first != clean), committed & (first == clean)
    yield share("wrong when stored", first != clean, committed)
    yield share("wrong at the end", last != clean, committed)
    yield share("corrected overall", last == clean, wrong)
    yield share("still wrong overall", (last != clean) & (last != first), wrong)
    yield share("spoiled overall", last != clean, right)
    for t in times:
        one = next(one for one in records if one.t <= t)
        yield share("wrong among the visible", one.before != clean, one.visible, t=t)


def agreement(records: Sequence[TokenRecord]) -> Iterator[Share]:
    """Shares of visible tokens that calls contradict: of all, of those that the call before changed, at the end."""
    visible, top, before, after = stacked(records)
    contradicted, changed = visible & (top != before), visible & (after != before)
    yield share(SAMPLED[0], contradicted, visible)
    yield share(SAMPLED[1], contradicted[1:], changed[:-1] & visible[1:])
    yield share(SAMPLED[2], contradicted[-1], visible[-1])


cells = audits.probe_each(audit)


def panels(results: Results, preset: audits.AuditPreset[RevisionSettings]) -> Iterator[Panel]:
    """For each model, contradicted tokens along sampled trajectories."""
    for model in audits.models_of(results, SAMPLED[0]):
        groups = {name: (model, {"values": name}) for name in SAMPLERS}
        yield replace(audits.bars(results, SAMPLED, groups), title=model)
