"""Mend beside CRS: what it shares with it bit for bit, what it revises, and how little in one call."""

from __future__ import annotations

import pytest
import torch

import limpet
from limpet import Mend
from limpet.diffusion.rng import CounterRNG
from limpet.generation import Inputs, Step, rollout

WORDS = limpet.load("exact:words")


def steps_of(sampler: Mend, stop: int | None = None) -> list[Step]:
    inputs = Inputs(torch.full((16, WORDS.length), -1), CounterRNG(1, torch.arange(16)))
    return list(rollout(WORDS, sampler, inputs, stop=stop))


@pytest.mark.parametrize("every", [None, 1, 3])
@pytest.mark.parametrize(("most", "spacing"), [(None, 4), (2, 0), (50, 7)])
def test_one_call_revises_few_tokens_far_apart(most: int | None, spacing: int, every: int | None) -> None:
    """Only visible tokens that the call inspects and contradicts, and to the argmax."""
    sampler = Mend(nfe=12, warmup=0.1, spacing=0, revise=most, revise_spacing=spacing, revise_every=every)
    changed, before = 0, None
    for step in steps_of(sampler):
        values = step.state.memory.committed_values
        if before is not None:
            revised = step.masks["revised"]
            assert torch.equal(revised, step.visible & (values != before))
            assert revised.sum(-1).max() <= (-(-WORDS.length // 32) if most is None else most)
            assert torch.equal(values[revised], step.outcome.top[revised])
            if step.outcome.gain is not None:
                assert (step.outcome.gain[revised] > 0).all()
            for row in revised:
                positions = row.nonzero()[:, 0]
                assert (positions.diff() > spacing).all()
                assert ((positions + step.call) % (every or 1) == 0).all()
            changed += int(revised.sum())
        before = values
    assert changed > 10


def test_the_largest_contradiction_is_revised_first() -> None:
    one, many = (Mend(nfe=12, warmup=0.1, spacing=0, revise=most, revise_spacing=0) for most in (1, 1000))
    *_, last = steps_of(one, stop=6)
    (_, first), (_, every) = (sampler.step(last.context, last.state) for sampler in (one, many))
    contradicted = first.masks["visible"] & (first.outcome.gain > 0)
    assert torch.equal(every.masks["revised"], contradicted)
    best = first.outcome.gain.masked_fill(~contradicted, -torch.inf).amax(-1)
    rows = contradicted.any(-1)
    assert rows.sum() > 4
    assert torch.equal(first.outcome.gain[first.masks["revised"]], best[rows])


def test_in_their_own_turn_positions_that_step_are_committed_and_even_or_odd_ones_revised() -> None:
    """With and without a trace, which inspects every position, the samples are the same."""
    sampler = Mend(nfe=12, warmup=0.1, spacing=0, revise_spacing=0, interleave=True, own_turn=True)
    counts = {"chosen": 0, "revised": 0}
    for step in steps_of(sampler):
        assert ((step.masks["chosen"].nonzero()[:, 1] - step.call) % 2 == 0).all() or step.call == sampler.nfe - 1
        for row in step.masks["revised"]:
            assert (row.nonzero()[:, 0].diff() % 2 == 0).all()
        counts = {mask: count + int(step.masks[mask].sum()) for mask, count in counts.items()}
    assert min(counts.values()) > 10
    tokens = limpet.sample(WORDS, sampler, n=2, seed=0).tokens
    *_, last = limpet.steps(WORDS, sampler, n=2, seed=0, trace=True)
    assert torch.equal(last.state.tokens, tokens)


def test_fewer_inspections_need_fewer_rows_of_the_head() -> None:
    """By default a token is inspected once in nfe / 32 calls."""
    rows = [limpet.sample(WORDS, Mend(nfe=40, revise_every=n), n=2, seed=0).head_rows for n in (1, 2, 4)]
    assert rows[0] > rows[1] > rows[2] > limpet.sample(WORDS, Mend(nfe=40, revise=0), n=2, seed=0).head_rows
    default, two = (limpet.sample(WORDS, Mend(nfe=40, revise_every=n), n=2, seed=0) for n in (None, 2))
    assert default.head_rows == rows[1]
    assert torch.equal(default.tokens, two.tokens)
