"""Audits of what comes out (endpoint, values, storage) against the public sampler and laws written out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import limpet
import literal
from limpet import sampler
from limpet.audits import AUDITS, Models
from limpet.audits.endpoint import read_out
from limpet.audits.paths import QUALITY, before, prepared, quality
from limpet.audits.storage import Preset as Storage
from limpet.audits.storage import outputs
from limpet.audits.values import ARMS, RULES, arm_of, followed
from limpet.audits.values import Preset as Values
from limpet.denoisers.catalog import load
from limpet.errors import LimpetError
from limpet.policy import Policy
from limpet.sampler import NEVER
from test_audits_singleton import SOURCE
from test_audits_temperature import tiny_network

WORDS, CHAIN = load("exact:words"), load("exact:chain")


def test_argmax_and_ancestral_share_the_path():
    policy = Policy(nfe=8, horizon=0, top_p=0.9)
    found = read_out(prepared(WORDS, policy, 11, 4))
    assert (found["argmax"] == limpet.sample(WORDS, policy, 4, 11).tokens).all()
    assert (found["ancestral"] == limpet.sample(WORDS, policy.but(endpoint="ancestral"), 4, 11).tokens).all()


def test_the_ancestral_rule_draws_from_the_restricted_posterior():
    """One pre-terminal state many times over: chi-square at 1e-4 on each of its positions."""
    policy = Policy(nfe=6, horizon=0, top_p=0.9)
    one = before(prepared(SOURCE, policy, 11, 1), 5)
    times = 20_000
    run = prepared(SOURCE, policy.but(endpoint="ancestral"), 11, times)
    run = replace(run, times=[*run.times[:-1], 0.6], signals=[*run.signals[:-1], 0.4])  # noisy still: the draw matters
    state = one._replace(**{name: getattr(one, name).expand(times, -1) for name in ("tokens", "labels", "selected_at")})
    drawn = sampler.readout(run, state)[0].tokens
    law = SOURCE.law(one.tokens, SOURCE.schedule.signal(0.6).expand(1))[0]
    for i in range(3):
        own = law[i].tolist()
        kept = literal.restricted(own, literal.nucleus(own, 0.9, "released"))
        expected = np.array(literal.converted(kept, int(one.tokens[0, i]), 1 - run.signals[-1]))
        counts = np.bincount(drawn[:, i].numpy(), minlength=3)
        assert literal.chi_square(counts, expected) > 1e-4


def test_endpoint_rows_are_the_measures_of_those_tokens():
    result = AUDITS["endpoint"](Models((WORDS,)), "smoke")
    policy = Policy(nfe=8, horizon=0, top_p=0.9)
    made = [limpet.sample(WORDS, policy, 1, seed).tokens for seed in (8200, 8210)]
    nll = [-float(WORDS.log_prob(tokens)[0]) / 160 for tokens in made]
    (row,) = result.of("perplexity", p=0.9, endpoint="argmax")
    assert row.estimate.values == pytest.approx(np.exp(nll))


def test_value_arms_are_the_public_sampler_with_replay():
    result = AUDITS["values"](Models((WORDS,)), "smoke")
    policy = Policy(nfe=8)
    for seed, shard in ((8200, 0), (8210, 1)):
        crs = limpet.sample(WORDS, policy, 1, seed)
        for arm in ARMS:
            if arm in RULES:
                continue  # not policies of their own: below
            tokens = limpet.sample(WORDS, policy.but(values=arm), 1, seed, replay=crs.selection).tokens
            nll = -float(WORDS.log_prob(tokens)[0]) / 160
            (row,) = result.of("perplexity", values=arm)
            assert row.estimate.values[shard] == pytest.approx(np.exp(nll)), arm
            if arm == "argmax":  # replaying its own positions, the argmax run is itself
                assert (tokens == crs.tokens).all()


def test_second_nucleus_and_refreshed_labels_are_what_their_names_say():
    """One step by hand: labels from the exact law of the step's input."""
    policy = Policy(nfe=8, budget=4.0)
    crs = limpet.sample(WORDS, policy, 3, 1)
    for values in ("second", "nucleus", "refreshed"):
        run = prepared(WORDS, policy.but(values=values), 1, 3, replay=crs.selection)
        state = sampler.begin(run)
        while state.step < 7:
            after, info = sampler.step(run, state)
            law = WORDS.law(info.input, WORDS.schedule.signal(info.t).expand(3))
            ranked = law.sort(dim=-1, descending=True).values  # ties are common here: compare masses, not labels
            for b, i in info.chosen.nonzero().tolist():
                own = law[b, i].tolist()
                label, top = int(after.labels[b, i]), int(law[b, i].argmax())
                if values == "second":
                    assert label != top
                    assert own[label] == pytest.approx(float(ranked[b, i, 1]), rel=1e-12)
                elif values == "nucleus":
                    kept = literal.nucleus(own, 0.9, "released")
                    assert label != top
                    assert kept[label] or sum(kept) == 1
                    assert sum(kept) > 1 or own[label] == pytest.approx(float(ranked[b, i, 1]), rel=1e-12)
                else:
                    assert label == top
            if values == "refreshed":
                assert (after.labels == law.argmax(-1))[info.visible].all()
            state = after


def test_refreshing_in_turn_never_changes_two_neighbours():
    preset = Values(paths=4, nfe=12)
    record = limpet.sample(CHAIN, Policy(nfe=12), 4, 3).selection
    run = arm_of(CHAIN, "refreshed in turn", preset, 3, record)
    state, moved = sampler.begin(run), 0
    while state.step < 11:
        after, info = sampler.step(run, state)
        changed = info.visible & (after.labels != state.labels)
        assert not (changed[:, 1:] & changed[:, :-1]).any()
        due = changed.nonzero()[:, 1] + info.step
        assert (due % 2 == 0).all()
        moved += int(changed.sum())
        state = after
    assert moved > 0


def test_refreshing_half_as_often_leaves_odd_steps_alone():
    record = limpet.sample(CHAIN, Policy(nfe=12), 4, 3).selection
    run = arm_of(CHAIN, "refreshed half as often", Values(paths=4, nfe=12), 3, record)
    state, moved = sampler.begin(run), [0, 0]
    while state.step < 11:
        after, info = sampler.step(run, state)
        law = CHAIN.law(info.input, CHAIN.schedule.signal(info.t).expand(4))
        if info.step % 2 == 0:
            assert (after.labels == law.argmax(-1))[info.visible].all()
        moved[info.step % 2] += int((info.visible & (after.labels != state.labels)).sum())
        state = after
    assert moved[0] > 0
    assert moved[1] == 0


def test_changes_of_labels_are_counted_one_by_one():
    preset = Values(paths=4, nfe=8)
    record = limpet.sample(CHAIN, Policy(nfe=8), 4, 3).selection
    end, found = followed(arm_of(CHAIN, "refreshed", preset, 3, record), sampler.begin(prepared(CHAIN, Policy(), 3, 4)))
    assert (end.tokens == limpet.sample(CHAIN, Policy(nfe=8, values="refreshed"), 4, 3, replay=record).tokens).all()
    run = arm_of(CHAIN, "refreshed", preset, 3, record)
    history: dict[tuple[int, int], list[int]] = {}
    state, visible = sampler.begin(run), 0
    while state.step < 7:
        after, info = sampler.step(run, state)
        visible += int(info.visible.sum())
        for b, i in (info.chosen | info.visible).nonzero().tolist():
            values = history.setdefault((b, i), [])
            label = int(after.labels[b, i])
            if not values or values[-1] != label:
                values.append(label)
        state = after
    replaced = sum(len(values) - 1 for values in history.values())
    back = sum(values[k] == values[k - 2] for values in history.values() for k in range(2, len(values)))
    assert found == (visible, replaced, back)
    assert 0 < back < replaced


def test_final_only_returns_the_labels_that_it_never_saw():
    preset = Storage(paths=3, nfe=12, masses=(1.0, 0.8))
    found = outputs(WORDS, preset, 21)
    for p in preset.masses:
        policy = Policy(nfe=12, top_p=0.9, late_top_p=p)
        crs, native = (limpet.sample(WORDS, policy.but(horizon=horizon), 3, 21) for horizon in (None, 0))
        chosen = crs.selection.selected_at != NEVER
        assert chosen.any()
        assert (found["revisable", p] == native.tokens).all()
        assert (found["CRS", p] == torch.where(chosen, crs.selection.labels, crs.tokens)).all()
        assert (found["final-only", p] == torch.where(chosen, crs.selection.labels, native.tokens)).all()
        assert (found["final-only", p] != found["CRS", p]).any()


def test_a_model_whose_law_is_unknown_needs_a_judge():
    model = tiny_network()
    with pytest.raises(LimpetError, match="give a judge"):
        quality(Models((model,)), model, [torch.zeros(1, 24, dtype=torch.long)])


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("endpoint", {"paths": 16, "nfe": 32, "masses": (1.0, 0.9)}),
        ("values", {"paths": 64, "nfe": 64}),
        ("storage", {"paths": 64, "nfe": 64, "early": 0.9}),
    ],
)
def test_paper_preset_counts(name, counts):
    preset = AUDITS[name].presets["paper"]
    assert len(preset.shards) == 4
    assert {field: getattr(preset, field) for field in counts} == counts
    assert set(QUALITY) == {"perplexity", "entropy"}
