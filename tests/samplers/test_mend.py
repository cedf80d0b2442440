"""Mend beside CRS: what it shares with it to the bit, what it changes, and how little in one call."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

import limpet
from limpet import CRS, Mend
from limpet.diffusion.backends import backends, dense, sparse
from limpet.diffusion.rng import CounterRNG
from limpet.samplers.context import generate, open_context

WORDS = limpet.load("exact:words")
PARAMS = [
    {}, {"horizon": 2}, {"write": "both"}, {"values": "refreshed"}, {"final_step": "argmax"}, {"final_step": "sample"},
    {"late_top_p": 0.7, "budget": 0.2, "spacing": 0}, {"count": 3, "temperature": 0.8},
]  # fmt: skip


def plainly(mend: Mend) -> CRS:
    """The CRS with the parameters that both have."""
    return CRS(**{one.name: getattr(mend, one.name) for one in fields(CRS)})


@pytest.mark.parametrize("parameters", PARAMS, ids=str)
@pytest.mark.parametrize("backend", [dense.BACKEND, sparse.BACKEND], ids=["dense", "lazy"])
def test_mending_nothing_is_crs_bit_for_bit(params: dict, backend) -> None:
    mend = Mend(nfe=9, mend=0, **params)
    one, other = (limpet.sample(WORDS, each, n=4, seed=3, backend=backend) for each in (mend, plainly(mend)))
    assert torch.equal(one.tokens, other.tokens)
    assert all(torch.equal(a, b) for a, b in zip(one.memory, other.memory, strict=True))
    assert one.head_rows == other.head_rows


@pytest.mark.parametrize("turns", [None, 1, 3])
@pytest.mark.parametrize(("most", "apart"), [(None, 4), (2, 0), (50, 7)])
def test_few_labels_change_in_one_call_and_none_near_another(most: int | None, apart: int, turns: int | None) -> None:
    """And only visible ones whose turn it is, to the argmax, where the distribution contradicts them."""
    sampler = Mend(nfe=12, warmup=0.1, spacing=0, mend=most, apart=apart, turns=turns)
    ctx = open_context(WORDS, CounterRNG(1, torch.arange(16)), torch.full((16, WORDS.length), -1))
    changed, before = 0, sampler.begin(ctx)
    for state, info in generate(sampler, ctx):
        if info.call >= sampler.warmup_calls:
            mended = info.marks["mended"]
            assert torch.equal(mended, info.marks["visible"] & (state.memory.labels != before.memory.labels))
            assert mended.sum(-1).max() <= (-(-WORDS.length // 32) if most is None else most)
            assert torch.equal(state.memory.labels[mended], info.outcome.top[mended])
            assert (info.outcome.gain[mended] > 0).all()
            for row in mended:
                places = row.nonzero()[:, 0]
                assert (places.diff() > apart).all()
                assert ((places + info.call) % (turns or 1) == 0).all()
            changed += int(mended.sum())
        before = state
    assert changed > 10


def test_the_surest_contradiction_is_mended_first() -> None:
    one, many = (Mend(nfe=12, warmup=0.1, spacing=0, mend=most, apart=0) for most in (1, 1000))
    ctx = open_context(WORDS, CounterRNG(1, torch.arange(16)), torch.full((16, WORDS.length), -1))
    state = one.begin(ctx)
    for _ in range(6):
        state, _ = one.step(ctx, state)
    (_, first), (_, every) = (each.step(ctx, state) for each in (one, many))
    wrong = first.marks["visible"] & (first.outcome.gain > 0)
    assert torch.equal(every.marks["mended"], wrong)
    best = first.outcome.gain.masked_fill(~wrong, -torch.inf).amax(-1)
    rows = wrong.any(-1)
    assert rows.sum() > 4
    assert torch.equal(first.outcome.gain[first.marks["mended"]], best[rows])


def test_turns_spare_the_head_and_default_to_one_in_32_calls() -> None:
    rows = [limpet.sample(WORDS, Mend(nfe=40, turns=turns), n=2, seed=0).head_rows for turns in (1, 2, 4)]
    assert rows[0] > rows[1] > rows[2] > limpet.sample(WORDS, plainly(Mend(nfe=40)), n=2, seed=0).head_rows
    usual = limpet.sample(WORDS, Mend(nfe=40), n=2, seed=0)
    assert usual.head_rows == rows[1]
    assert torch.equal(usual.tokens, limpet.sample(WORDS, Mend(nfe=40, turns=2), n=2, seed=0).tokens)


@pytest.mark.parametrize("name", [name for name in backends("cpu") if name != "dense"])
def test_backends_draw_the_same_and_watching_changes_nothing(name: str) -> None:
    sampler = Mend(nfe=10, turns=2, spacing=0)
    outs = [limpet.sample(WORDS, sampler, n=4, seed=2, backend=each) for each in (backends("cpu")[name], dense.BACKEND)]
    assert torch.equal(outs[0].tokens, outs[1].tokens)
    ctx = open_context(WORDS, CounterRNG(2, torch.arange(4)), torch.full((4, WORDS.length), -1), trace=True)
    *_, (last, _) = generate(sampler, ctx)
    assert torch.equal(last.tokens, outs[0].tokens)


def test_given_tokens_hold() -> None:
    out = limpet.sample(WORDS, Mend(nfe=10), n=4, seed=2, fixed={3: 1, 17: 4})
    assert (out.tokens[:, 3] == 1).all()
    assert (out.tokens[:, 17] == 4).all()
