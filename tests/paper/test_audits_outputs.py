"""Studies of what comes out (final_step, values, storage) against the public sampler and distributions written out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from test_audits_singleton import SOURCE

import limpet
import literal
from limpet.errors import LimpetError
from limpet.experiments import Results, Shelf, Store, collect, run, units
from limpet.experiments.executors import local
from limpet.generation import begin
from limpet.models.loading import load
from limpet.paper import studies
from limpet.paper.studies import final_step, presets, storage, values
from limpet.paper.studies.trajectories import Settings, opened, states
from limpet.samplers import CRS, Native
from limpet.samplers.context import State
from limpet.samplers.crs import NEVER, Memory

WORDS, CHAIN = load("exact:words"), load("exact:chain")
SMOKE = presets.preset("smoke")


def study_of(module, preset):
    return studies.study(module.__name__.rpartition(".")[2], preset)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return Store(str(tmp_path_factory.mktemp("store")))


@pytest.fixture(scope="module")
def done(store):
    """The studies on exact sources, done: their results, and the tokens of every cell and shard."""

    def found(module, preset) -> tuple[Results, dict[str, list[torch.Tensor]]]:
        study, shelf = study_of(module, preset), Shelf("cpu")
        assert not run(study, store, local(shelf=shelf), shelf).failed
        plan = units.resolve(study, shelf)
        tokens: dict[str, list[torch.Tensor]] = {}
        for unit in plan.units:
            if unit.cell in study.samples:
                tokens.setdefault(unit.cell.name, []).append(store.read(unit.key).tensors["tokens"].long())
        return collect(study, store), tokens

    return found


def nll(source, tokens) -> float:
    return -float(source.log_prob(tokens).mean()) / tokens.shape[1]


def test_argmax_and_ancestral_share_the_path_and_rows_are_the_measures_of_their_tokens(done):
    results, tokens = done(final_step, SMOKE)
    for p in (1.0, 0.9):
        for end in ("sample", "argmax"):
            cell, sampler = f"distilled/{p}/{end}", Native(nfe=4, top_p=p, final_step=end)
            for shard, seed in enumerate((8200, 8210)):
                made = limpet.sample(WORDS, sampler, 2, seed, first=SMOKE.apart).tokens
                assert (tokens[cell][shard] == made).all()
                assert results.values(cell, "ppl")[shard] == pytest.approx(np.exp(nll(WORDS, made)))
        assert (tokens[f"distilled/{p}/ancestral"][0] != tokens[f"distilled/{p}/argmax"][0]).any()


@dataclass(frozen=True)
class Noisy(Native):
    """The native sampler with a final step from far away, so that its draw matters."""

    @property
    def times(self) -> tuple[float, ...]:
        return (*super().times[:-1], 0.6)


def test_the_ancestral_rule_draws_from_the_restricted_posterior():
    """One pre-terminal state many times over: chi-square at 1e-4 on each of its positions."""
    *_, one = states(Native(nfe=6, top_p=0.9), opened(SOURCE, Settings(paths=1), 11))
    assert one.call == 5
    times = 20_000
    sampler, ctx = Noisy(nfe=6, top_p=0.9, final_step="sample"), opened(SOURCE, Settings(paths=times), 11)
    after, info = sampler.step(ctx, State(5, one.tokens.expand(times, -1)))
    assert (after.call, info.t) == (6, 0.6)
    signal = SOURCE.schedule.signal(0.6)
    probs = SOURCE.probs(one.tokens, signal.expand(1))[0]
    for i in range(3):
        own = probs[i].tolist()
        kept = literal.restricted(own, literal.nucleus(own, 0.9, "released"))
        expected = np.array(literal.converted(kept, int(one.tokens[0, i]), 1 - float(signal)))
        counts = np.bincount(after.tokens[:, i].numpy(), minlength=3)
        assert literal.chi_square(counts, expected) > 1e-4


def test_value_arms_are_the_public_sampler_with_replay(done):
    results, tokens = done(values, SMOKE)
    crs = CRS(nfe=8)
    for shard, seed in enumerate((8200, 8210)):
        recorded = limpet.sample(WORDS, crs, 4, seed)
        for arm in {**values.ARMS, **values.REFRESHED}:
            made = limpet.sample(WORDS, crs.replace(values=arm), 4, seed, replay=recorded.memory).tokens
            assert (tokens[arm][shard] == made).all(), arm
            assert results.values(arm, "ppl")[shard] == pytest.approx(np.exp(nll(WORDS, made))), arm
            if arm == "argmax":  # replaying its own positions, the argmax run is itself
                assert (made == recorded.tokens).all()


def walked(source, sampler, n, seed, recorded):
    """Every call of a replay that stores labels: the state before, the state after, and what it saw and did."""
    ctx = opened(source, Settings(paths=n), seed)
    state = begin(sampler, ctx, recorded)
    while state.call < sampler.nfe - 1:
        after, info = sampler.step(ctx, state)
        yield state.memory, after.memory, info
        state = after


def test_second_nucleus_and_refreshed_labels_are_what_their_names_say():
    """One call by hand: labels from the exact distribution of its input."""
    crs = CRS(nfe=8, budget=4.0)
    recorded = limpet.sample(WORDS, crs, 3, 1).memory
    for kind in ("second", "nucleus", "refreshed"):
        for _, after, info in walked(WORDS, crs.replace(values=kind), 3, 1, recorded):
            probs = WORDS.probs(info.input, WORDS.schedule.signal(info.t).expand(3))
            ranked = probs.sort(dim=-1, descending=True).values  # ties are common here: compare masses, not tokens
            for b, i in info.marks["chosen"].nonzero().tolist():
                own = probs[b, i].tolist()
                label, top = int(after.labels[b, i]), int(probs[b, i].argmax())
                if kind == "second":
                    assert label != top
                    assert own[label] == pytest.approx(float(ranked[b, i, 1]), rel=1e-12)
                elif kind == "nucleus":
                    kept = literal.nucleus(own, 0.9, "released")
                    assert label != top
                    assert kept[label] or sum(kept) == 1
                    assert sum(kept) > 1 or own[label] == pytest.approx(float(ranked[b, i, 1]), rel=1e-12)
                else:
                    assert label == top
            if kind == "refreshed":
                assert (after.labels == probs.argmax(-1))[info.marks["visible"]].all()


def test_refreshing_in_turn_never_changes_two_neighbours():
    recorded = limpet.sample(CHAIN, CRS(nfe=12), 4, 3).memory
    moved = 0
    for before, after, info in walked(CHAIN, CRS(nfe=12, values="refreshed-in-turn"), 4, 3, recorded):
        changed = info.marks["visible"] & (after.labels != before.labels)
        assert not (changed[:, 1:] & changed[:, :-1]).any()
        due = changed.nonzero()[:, 1] + info.call
        assert (due % 2 == 0).all()
        moved += int(changed.sum())
    assert moved > 0


def test_refreshing_half_as_often_leaves_odd_calls_alone():
    recorded = limpet.sample(CHAIN, CRS(nfe=12), 4, 3).memory
    moved = [0, 0]
    for before, after, info in walked(CHAIN, CRS(nfe=12, values="refreshed-half"), 4, 3, recorded):
        probs = CHAIN.probs(info.input, CHAIN.schedule.signal(info.t).expand(4))
        visible = info.marks["visible"]
        if info.call % 2 == 0:
            assert (after.labels == probs.argmax(-1))[visible].all()
        moved[info.call % 2] += int((visible & (after.labels != before.labels)).sum())
    assert moved[0] > 0
    assert moved[1] == 0


def test_changes_of_labels_are_counted_one_by_one():
    arm = CRS(nfe=8, values="refreshed")
    recorded = limpet.sample(CHAIN, CRS(nfe=8), 4, 3).memory
    ctx = opened(CHAIN, Settings(paths=4), 3)
    found = values.followed(arm, ctx, begin(arm, ctx, recorded))
    history: dict[tuple[int, int], list[int]] = {}
    visible = 0
    for _, after, info in walked(CHAIN, arm, 4, 3, recorded):
        visible += int(info.marks["visible"].sum())
        for b, i in (info.marks["chosen"] | info.marks["visible"]).nonzero().tolist():
            labels = history.setdefault((b, i), [])
            label = int(after.labels[b, i])
            if not labels or labels[-1] != label:
                labels.append(label)
    replaced = sum(len(labels) - 1 for labels in history.values())
    back = sum(labels[k] == labels[k - 2] for labels in history.values() for k in range(2, len(labels)))
    assert found == (visible, replaced, back)
    assert 0 < back < replaced


def test_the_probe_follows_the_arms_that_refresh(done):
    """Its paths begin where warmup ends: they are those of a replay from the start."""
    results, _ = done(values, SMOKE)
    for kind in values.REFRESHED:
        arm, found = CRS(nfe=8, values=kind), []
        for seed in (8200, 8210):
            recorded = limpet.sample(WORDS, CRS(nfe=8), 4, seed).memory
            ctx = opened(WORDS, Settings(paths=4), seed)
            found.append(values.followed(arm, ctx, begin(arm, ctx, recorded)))
        (replaced,), (back,) = (results.of(quantity, values=kind) for quantity in values.CHANGES)
        assert replaced.estimate.values.tolist() == [100 * one.replaced / one.visible for one in found]
        assert replaced.events == sum(one.visible for one in found)
        assert back.estimate.values.tolist() == [100 * one.back / one.replaced for one in found]
        assert back.events == sum(one.replaced for one in found)


def test_results_from_before_our_own_arms_show_the_papers_table_alone(done):
    results, _ = done(values, SMOKE)
    page = results.study.build_report(results)
    assert [table.name for table in page.tables] == ["values", "values-refreshed"]
    assert [entries[0].text for entries in page.tables[1].groups[0]] == list(values.REFRESHED.values())
    known = {name: measures for name, measures in results.cells.items() if not name.startswith("refreshed-")}
    before = replace(results, cells=known, probes={})
    shown = before.study.build_report(before)
    assert shown.tables == page.tables[:1]
    assert [claim.to_dict() for claim in shown.claims] == [claim.to_dict() for claim in page.claims]


def test_final_only_returns_the_labels_that_it_never_saw(done):
    _, tokens = done(storage, replace(SMOKE, nfe=12))
    for p in (1.0, 0.8):
        sampler = CRS(nfe=12, top_p=0.9, late_top_p=p)
        for shard, seed in enumerate((8200, 8210)):
            crs = limpet.sample(WORDS, sampler, 4, seed)
            native = limpet.sample(WORDS, Native(nfe=12, top_p=0.9, late_top_p=p), 4, seed).tokens
            labels, committed_at = Memory(*crs.memory)
            chosen = committed_at < NEVER
            assert chosen.any()
            found = {arm: tokens[f"{p}/{arm}"][shard] for arm in storage.ARMS}
            assert (found["revisable"] == native).all()
            assert (found["CRS"] == torch.where(chosen, labels, crs.tokens)).all()
            assert (found["final-only"] == torch.where(chosen, labels, native)).all()
            assert (found["final-only"] != found["CRS"]).any()


def test_a_model_whose_law_is_unknown_needs_a_judge():
    for module in (final_step, values, storage):
        with pytest.raises(LimpetError, match="needs a judge"):
            units.resolve(study_of(module, replace(SMOKE, distilled="mini", base="mini")), Shelf("cpu"))


def test_paper_preset_counts():
    paper = presets.preset("paper")
    assert len(paper.shards) == 4
    for cell in study_of(final_step, paper).samples:
        assert (cell.n, cell.sampler.nfe) == (16, 32)
    assert {cell.sampler.top_p for cell in study_of(final_step, paper).samples} == {1.0, 0.9}
    for cell in study_of(values, paper).samples:
        assert (cell.n, cell.sampler.nfe) == (64, 64)
    probe = study_of(values, paper).cells[-1]
    assert (probe.settings.paths, probe.settings.nfe) == (64, 64)
    for cell in study_of(storage, paper).samples:
        assert (cell.n, cell.sampler.nfe, cell.sampler.top_p) == (64, 64, 0.9)
