"""Paths that begin alike are walked once: arms fork where one of them first differs.

How far two arms are the same their samplers say. One arm leads and walks for all; those that part from it go on from
a copy of its state. So a family of CRS arms shares its warmup, and both final steps of a native path all but one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from limpet.experiments.units import Walk
from limpet.generation import Counted, begin
from limpet.samplers import Sampler
from limpet.samplers.context import Context, State, stepped

PAPERS = ("committed", "visible")  # marks that every path has a count of, if only none


class Trail(NamedTuple):
    """How far one batch has come, and what its path has cost and shown."""

    ctx: Context
    state: State
    began: State  # its start
    marks: Mapping[str, Tensor]  # (B,) positions marked, summed over the calls before the final step
    calls: int = 0  # of the body


def walk(
    walks: Sequence[Walk], paths: Sequence[Context], recall: Callable[[str], Sequence[Tensor]]
) -> Iterator[tuple[Walk, list[Trail]]]:
    """Every walk with its finished trails, one a batch; replays come last, since `recall` needs what they replay."""
    waiting: list[tuple[list[Walk], list[Trail]]] = [([*walks], [])]
    while waiting:
        waiting.sort(key=lambda part: all(one.source for one in part[0]))
        together, trails = waiting.pop(0)
        leader = min(together, key=lambda one: bool(one.source))
        sampler, memory = leader.cell.sampler, recall(leader.source) if leader.source else None
        starts = [begin(sampler, ctx, _rows(memory, ctx) if memory else None) for ctx in paths]
        if trails and all(torch.equal(old.began.tokens, new.tokens) for old, new in zip(trails, starts, strict=True)):
            trails = list(map(_fork, trails, starts))
        else:  # the first, or a replay that begins elsewhere
            nothing = [dict.fromkeys(PAPERS, ctx.no_positions.sum(-1)) for ctx in paths]
            trails = list(map(Trail, paths, starts, starts, nothing))
        for call in range(trails[0].state.call, sampler.nfe):
            apart = [one for one in together if one is not leader and leader.shared(one) <= call]
            if apart:
                waiting.append((apart, trails))
                together = [one for one in together if one not in apart]
            trails = [_advance(sampler, trail) for trail in trails]
        for trail in trails:
            trail.ctx.check_finite()
        yield from ((one, trails) for one in together)


def _rows(memory: Sequence[Tensor], ctx: Context) -> tuple[Tensor, ...]:
    """The part of what was recorded that is of a path's samples."""
    return tuple(part.to(ctx.fixed.device)[ctx.rng.samples] for part in memory)


def _fork(trail: Trail, start: State) -> Trail:
    """The trail for another leader. One that began with other things to remember, or to replay, can share only calls
    in which nothing was remembered yet: its memory is as at its own start."""
    mine, theirs = start.memory, trail.began.memory
    if type(mine) is type(theirs) and len(mine) == len(theirs) and all(map(torch.equal, mine, theirs)):
        return trail
    return trail._replace(state=trail.state._replace(memory=mine), began=start)


def _advance(sampler: Sampler, trail: Trail) -> Trail:
    counted = trail.ctx.model
    assert isinstance(counted, Counted)
    before = counted.calls
    state, info = stepped(sampler, trail.ctx, trail.state)
    marks = dict(trail.marks)
    for name, mask in info.marks.items():
        if name == "committed":  # for ever: the last count is of the whole path
            marks[name] = mask.sum(-1)
        elif state.call < sampler.nfe:
            marks[name] = marks.get(name, 0) + mask.sum(-1)
    return trail._replace(state=state, calls=trail.calls + counted.calls - before, marks=marks)
