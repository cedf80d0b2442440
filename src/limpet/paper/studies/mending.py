"""What becomes of wrong labels and of right ones when labels may change, and whether the changes agree with each other.

The truth is that of `risk`: a label is right where it is the clean token. It is known along exact forward paths, where
each call's state is the text's own at that time, and only labels are the sampler's doing. Along sampled paths there is
none; there, a label is held against the distribution that all the rest gives it. All arms have labels where and when one run
that changes none has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from limpet.diffusion.rng import CounterRNG
from limpet.experiments.contents import Panel
from limpet.experiments.results import Results
from limpet.experiments.study import Seen
from limpet.models import Denoiser
from limpet.paper.studies import trajectories
from limpet.paper.studies.audits import Preset, bars, each, models_of, percent, presets
from limpet.samplers import Mend
from limpet.samplers.context import Context, State, open_context, stepped

ARMS: dict[str, dict[str, Any]] = {  # what each changes of a Mend that mends nothing; the first makes the selection
    "stored": {}, "mended": {"mend": None},
    "refreshed": {"values": "refreshed"}, "refreshed-in-turn": {"values": "refreshed-in-turn"},
}  # fmt: skip
SAMPLED = ("sampled, contradicted", "sampled, contradicted again", "sampled, contradicted at the final step")


@dataclass(frozen=True, kw_only=True)
class Settings(trajectories.Forward):
    times: tuple[float, ...] = (0.6, 0.5, 0.4, 0.3, 0.2, 0.1)  # at which wrong labels are counted
    spacing: int = 2  # as Mend has it


PRESETS = presets("mending", Settings)


class Step(NamedTuple):
    """One call and the labels: (B, L) each."""

    t: float
    visible: Tensor  # bool: seen by the call, so that it may change
    chosen: Tensor  # bool: stored by it
    top: Tensor  # the argmax of its distribution
    was: Tensor  # what labels held before it
    now: Tensor  # and after it


Share = tuple[str, dict[str, float], float, float]  # a quantity, where, how many, and of how many


def look(models: Sequence[Denoiser], settings: Settings, shard: int, shards: tuple[int, ...]) -> Iterator[Seen]:
    still = Mend(nfe=settings.nfe, count=settings.count, spacing=settings.spacing, mend=0)
    for model in models:
        clean = trajectories.clean_texts(model, settings, shard, shards)
        ctx = opened(model, clean, shards[shard])
        clean = clean.to(ctx.fixed.device)
        upward = trajectories.forward_states(clean, still.times[::-1], model, shards[shard])
        for arm, along in followed(still, ctx, upward[::-1]).items():
            for quantity, at, hits, of in against_the_truth(along, clean, settings.times):
                yield Seen(model.name, quantity, {"values": arm, **at}, *percent(hits, of))
        for arm, along in followed(still, ctx).items():
            for quantity, at, hits, of in agreement(along):
                yield Seen(model.name, quantity, {"values": arm, **at}, *percent(hits, of))


def opened(model: Denoiser, clean: Tensor, seed: int) -> Context:
    """Paths as long as some texts, every distribution of which is looked at; the tokens that texts were cut at are given."""
    fixed = torch.where(trajectories.within(model, clean), -1, clean).to(model.device)
    return open_context(model, CounterRNG(seed, torch.arange(len(clean), device=model.device)), fixed, trace=True)


def followed(still: Mend, ctx: Context, states: Sequence[Tensor] | None = None) -> dict[str, list[Step]]:
    """What the labels of each arm do; along the states that are told, or along paths of the arm's own."""
    found: dict[str, list[Step]] = {}
    recorded: tuple[Tensor, ...] = ()
    for arm, changes in ARMS.items():
        sampler = still.replace(**changes)
        state = sampler.replay(ctx, recorded) if recorded else sampler.begin(ctx)
        found[arm], state = walked(sampler, ctx, state, states)
        recorded = recorded or state.memory
    return found


def walked(sampler: Mend, ctx: Context, state: State, states: Sequence[Tensor] | None) -> tuple[list[Step], State]:
    """Every call of one arm, and the state after the last."""
    along = []
    for call in range(sampler.nfe):
        if states is not None:
            state = state._replace(tokens=torch.where(ctx.free, states[call], ctx.fixed))
        after, info = stepped(sampler, ctx, state)
        marks, top = info.marks, info.outcome.top
        along.append(Step(info.t, marks["visible"], marks["chosen"], top, state.memory[0], after.memory[0]))
        state = after
    ctx.check_finite()
    return along, state


def stacked(along: Sequence[Step]) -> tuple[Tensor, ...]:
    """(calls, B, L) each: which labels the calls see, the argmax there, what labels were before, and after."""
    parts = zip(*((step.visible, step.top, step.was, step.now) for step in along), strict=True)
    return tuple(torch.stack(part) for part in parts)


def share(quantity: str, hits: Tensor, of: Tensor, **at: float) -> Share:
    return quantity, at, float((hits & of).sum()), float(of.sum())


def against_the_truth(along: Sequence[Step], clean: Tensor, times: Sequence[float]) -> Iterator[Share]:
    """In the calls, each label counted in each of them; and in all."""
    visible, top, was, now = stacked(along)
    wrong, right = visible & (was != clean), visible & (was == clean)
    against = visible & (top != was)
    yield share("contradicted", against, visible)
    yield share("wrong where contradicted", wrong, against)
    yield share("right instead", top == clean, against)
    yield share("mended in a call", now == clean, wrong)
    yield share("another wrong one in a call", (now != clean) & (now != was), wrong)
    yield share("spoilt in a call", now != clean, right)

    first = torch.full_like(clean, -1)  # what each label held when it was stored
    for step in along:
        first = torch.where(step.chosen, step.now, first)
    there, last = first >= 0, along[-1].now
    wrong, right = there & (first != clean), there & (first == clean)
    yield share("wrong when stored", first != clean, there)
    yield share("wrong at the end", last != clean, there)
    yield share("mended in all", last == clean, wrong)
    yield share("another wrong one in all", (last != clean) & (last != first), wrong)
    yield share("spoilt in all", last != clean, right)
    for t in times:
        step = next(step for step in along if step.t <= t)
        yield share("wrong among the visible", step.was != clean, step.visible, t=t)


def agreement(along: Sequence[Step]) -> Iterator[Share]:
    """Labels that calls contradict; of those that a call has changed, those that the next one contradicts; and those
    that the last one does."""
    visible, top, was, now = stacked(along)
    against, changed = visible & (top != was), visible & (now != was)
    for quantity, hits, of in zip(
        SAMPLED, (against, against[1:], against[-1]), (visible, changed[:-1] & visible[1:], visible[-1]), strict=True
    ):
        yield share(quantity, hits, of)


cells = each(look)


def panels(results: Results, preset: Preset[Settings]) -> Iterator[Panel]:
    """For each model, contradicted labels along sampled paths."""
    for model in models_of(results, SAMPLED[0]):
        yield replace(bars(results, SAMPLED, {arm: (model, {"values": arm}) for arm in ARMS}), title=model)
