"""Paths that begin alike are walked once: arms fork where they first differ.

Every step of an arm has a mark, everything that decides the step. Arms with equal marks so far have equal states, so
one of them walks for all, and the state is forked where the marks part. The warmup of a family of CRS arms is shared
so, and both endpoints of one path."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from limpet import sampler
from limpet.sampler import Run, State
from limpet.samples import Counted


class Trail(NamedTuple):
    """How far one batch has come, and what its path has cost and shown."""

    state: State
    calls: int  # of the body
    visible: Tensor  # (B,) labels seen, summed over the steps that may select


class Arm(NamedTuple):
    """One policy on its way: its marks, and its runs, one a batch, made when first needed."""

    key: str
    marks: tuple[Hashable, ...]
    late: bool  # replays another arm, which must be done before its runs can be made
    runs: Callable[[], Sequence[Run]]


def marks(run: Run, replay: str | None) -> tuple[Hashable, ...]:
    """What decides each step of a run, the readout last."""
    policy, last = run.policy, len(run.times) - 1
    selects = replay is not None or run.horizon > 0
    how = (
        run.horizon, policy.count, policy.budget, policy.spacing, policy.values, policy.value_top_p, policy.write,
        run.covered, replay,
    )  # fmt: skip

    def mark(r: int) -> Hashable:
        support = (run.top_p[r], policy.boundary) if run.top_p[r] < 1 else None
        selection = how if selects and r >= run.warmup else None
        if r < last:
            return run.times[r], run.times[r + 1], support, selection
        return run.times[r], policy.endpoint, support if policy.endpoint == "ancestral" else None, selection

    return tuple(mark(r) for r in range(last + 1))


def begin(runs: Sequence[Run]) -> list[Trail]:
    return [
        Trail(sampler.begin(run), 0, torch.zeros(len(run.fixed), dtype=torch.long, device=run.fixed.device))
        for run in runs
    ]


def walk(arms: Sequence[Arm], trails: list[Trail]) -> Iterator[tuple[Arm, list[Trail]]]:
    """Every arm with its finished trails, those that replay another after it; `trails` are common to all of them."""
    at = trails[0].state.step
    while at < len(arms[0].marks):
        parts: dict[Hashable, list[Arm]] = {}
        for arm in arms:
            parts.setdefault(arm.marks[at], []).append(arm)
        if len(parts) > 1:
            for part in sorted(parts.values(), key=lambda part: all(arm.late for arm in part)):
                yield from walk(part, trails)
            return
        runs = min(arms, key=lambda arm: arm.late).runs()
        trails = [_advance(run, trail) for run, trail in zip(runs, trails, strict=True)]
        at += 1
    yield from ((arm, trails) for arm in arms)


def _advance(run: Run, trail: Trail) -> Trail:
    counted = run.denoiser
    assert isinstance(counted, Counted)
    before = counted.calls
    last = trail.state.step == len(run.times) - 1
    state, info = (sampler.readout if last else sampler.step)(run, trail.state)
    selecting = run.warmup <= info.step < len(run.times) - 1
    visible = trail.visible + info.visible.sum(-1) if selecting else trail.visible
    return Trail(state, trail.calls + counted.calls - before, visible)
