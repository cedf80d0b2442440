"""Trajectories that begin alike are computed once: samplers fork at the first call in which they differ.

The samplers say how many calls they share. One of them runs for all; those that part from it continue from its state.
So a family of CRS samplers shares its warmup, and two final steps of one native sampler share all calls but one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from limpet.experiments.units import SamplingUnit
from limpet.generation import CountingDenoiser, Inputs, context_of, first_state, rollout
from limpet.samplers import State

PAPER_MASKS = ("committed", "visible")  # masks that every trajectory has a count of, if only zero


class Branch(NamedTuple):
    """One batch on its way: its state, and what its calls so far have cost and shown."""

    inputs: Inputs
    state: State
    start: State  # the state before the first call
    counts: Mapping[str, Tensor]  # (B,) positions in each mask, summed over the calls before the final step
    calls: int = 0  # of the network


def sample_units(
    model: CountingDenoiser,
    units: Sequence[SamplingUnit],
    batches: Sequence[tuple[Tensor, Inputs]],
    recall: Callable[[str], Sequence[Tensor]],
) -> Iterator[tuple[SamplingUnit, list[Branch]]]:
    """Sample units that start from the same noise.

    batches: for each batch its samples' numbers in the unit, and its inputs. recall: gives the memory of a finished
    unit by its key, for replays. Yields every unit with its finished branches, one for each batch. Replays come last,
    because they need what they replay."""
    waiting: list[tuple[list[SamplingUnit], list[Branch]]] = [([*units], [])]
    while waiting:
        waiting.sort(key=lambda part: all(unit.source for unit in part[0]))
        together, branches = waiting.pop(0)
        leader = min(together, key=lambda unit: bool(unit.source))
        sampler = leader.cell.sampler
        branches = _starting(model, leader, batches, branches, recall)
        call = branches[0].state.call
        while call < sampler.nfe:
            shared = {id(unit): leader.shared_calls(unit) for unit in together if unit is not leader}
            apart = [unit for unit in together if shared.get(id(unit), sampler.nfe) <= call]
            if apart:
                waiting.append((apart, branches))
                together = [unit for unit in together if unit not in apart]
            call = min((calls for calls in shared.values() if calls > call), default=sampler.nfe)
            branches = [_continued(model, leader, branch, call) for branch in branches]
        yield from ((unit, branches) for unit in together)


def _starting(
    model: CountingDenoiser,
    leader: SamplingUnit,
    batches: Sequence[tuple[Tensor, Inputs]],
    branches: Sequence[Branch],
    recall: Callable[[str], Sequence[Tensor]],
) -> list[Branch]:
    """The branches that a sampler continues, or fresh ones if it starts elsewhere."""
    memory = recall(leader.source) if leader.source else None
    fresh = []
    for rows, inputs in batches:
        recorded = None if memory is None else tuple(part.to(model.device)[rows] for part in memory)
        own = replace(inputs, replay=recorded)
        context = context_of(model, own)
        start = first_state(leader.cell.sampler, context, own)
        fresh.append(Branch(own, start, start, dict.fromkeys(PAPER_MASKS, context.no_positions.sum(-1))))
    pairs = list(zip(branches, fresh, strict=False))
    if branches and all(torch.equal(old.start.tokens, new.start.tokens) for old, new in pairs):
        return [_forked(old, new) for old, new in pairs]
    return fresh


def _forked(branch: Branch, fresh: Branch) -> Branch:
    """A branch for another leader. If that starts with another memory, the shared calls have stored nothing yet, so
    its memory is still the one that it starts with."""
    own, others = fresh.start.memory, branch.start.memory
    same = type(own) is type(others) and len(own) == len(others) and all(map(torch.equal, own, others))
    state = branch.state if same else branch.state._replace(memory=own)
    return branch._replace(inputs=fresh.inputs, state=state, start=branch.start if same else fresh.start)


def _continued(model: CountingDenoiser, leader: SamplingUnit, branch: Branch, stop: int) -> Branch:
    """A branch after more calls of its leader, up to call `stop`."""
    sampler, before = leader.cell.sampler, model.calls
    state, counts = branch.state, dict(branch.counts)
    for step in rollout(model, sampler, branch.inputs, start=state, stop=stop):
        state = step.state
        for name, mask in step.masks.items():
            if name == "committed":  # tokens stay committed: the last count is that of the whole trajectory
                counts[name] = mask.sum(-1)
            elif state.call < sampler.nfe:
                counts[name] = counts.get(name, 0) + mask.sum(-1)
    return branch._replace(state=state, calls=branch.calls + model.calls - before, counts=counts)
