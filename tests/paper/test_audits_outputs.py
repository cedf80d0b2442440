"""Studies of outputs (final-step, values, storage) against the public sampler and distributions written out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from test_audits_singleton import SOURCE

import limpet
import literal
from limpet.errors import LimpetError
from limpet.experiments import ModelCache, Results, Store, collect, local, resolve, run
from limpet.generation import Inputs, context_of, rollout
from limpet.models.loading import load
from limpet.paper import studies
from limpet.paper.studies import preset, storage, values
from limpet.paper.studies.trajectories import AuditSettings, audit_inputs
from limpet.samplers import CRS, Native, State

WORDS, CHAIN = load("exact:words"), load("exact:chain")
SMOKE = preset("smoke")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Computes a study on exact sources: its results, and the tokens of every cell and seed."""
    store = Store(str(tmp_path_factory.mktemp("store")))

    def compute(name, size) -> tuple[Results, dict[str, list[torch.Tensor]]]:
        study, models = studies.study(name, size), ModelCache("cpu")
        assert not run(study, store, local(models=models), models).failed
        tokens: dict[str, list[torch.Tensor]] = {}
        for unit in resolve(study, models).units:
            if unit.cell in study.sample_cells:
                tokens.setdefault(unit.cell.name, []).append(store.read(unit.key).tensors["tokens"].long())
        return collect(study, store), tokens

    return compute


def nll(source, tokens) -> float:
    return -float(source.log_prob(tokens).mean()) / tokens.shape[1]


def test_both_final_steps_share_the_trajectory_and_rows_are_the_measures_of_their_tokens(finished):
    results, tokens = finished("final-step", SMOKE)
    for p in (1.0, 0.9):
        for final_step in ("sample", "argmax"):
            cell, sampler = f"distilled/{p}/{final_step}", Native(nfe=4, top_p=p, final_step=final_step)
            for i, seed in enumerate((8200, 8210)):
                drawn = limpet.sample(WORDS, sampler, 2, seed, first=SMOKE.final_step_first).tokens
                assert (tokens[cell][i] == drawn).all()
                assert results.values(cell, "ppl")[i] == pytest.approx(np.exp(nll(WORDS, drawn)))
        assert (tokens[f"distilled/{p}/sample"][0] != tokens[f"distilled/{p}/argmax"][0]).any()


@dataclass(frozen=True)
class Noisy(Native):
    """The native sampler with a final step from far away, so that its draw matters."""

    @property
    def times(self) -> tuple[float, ...]:
        return (*super().times[:-1], 0.6)


def test_a_sampled_final_step_draws_from_the_restricted_posterior():
    """One state before the final step, many times over: chi-square at 1e-4 on each of its positions."""
    sampler, times = Noisy(nfe=6, top_p=0.9), 20_000
    *_, before = rollout(SOURCE, sampler, audit_inputs(SOURCE, AuditSettings(n=1), 11), stop=5)
    start, inputs = State(5, before.tokens.expand(times, -1)), audit_inputs(SOURCE, AuditSettings(n=times), 11)
    (step,) = rollout(SOURCE, sampler, inputs, start=start)
    assert (step.state.call, step.t) == (6, 0.6)
    signal = SOURCE.schedule.signal(0.6)
    probs = SOURCE.probs(before.tokens, signal.expand(1))[0]
    for i in range(3):
        own = probs[i].tolist()
        kept = literal.restricted(own, literal.nucleus(own, 0.9, "released"))
        expected = np.array(literal.converted(kept, int(before.tokens[0, i]), 1 - float(signal)))
        counts = np.bincount(step.tokens[:, i].numpy(), minlength=3)
        assert literal.chi_square(counts, expected) > 1e-4


def test_cells_of_values_are_the_public_sampler_with_replay(finished):
    results, tokens = finished("values", SMOKE)
    crs = CRS(nfe=8)
    for i, seed in enumerate((8200, 8210)):
        recorded = limpet.sample(WORDS, crs, 4, seed)
        for name in ("argmax", "second", "nucleus", *values.REFRESHED):
            drawn = limpet.sample(WORDS, crs.replace(values=name), 4, seed, replay=recorded.memory).tokens
            assert (tokens[name][i] == drawn).all(), name
            assert results.values(name, "ppl")[i] == pytest.approx(np.exp(nll(WORDS, drawn))), name
            if name == "argmax":  # a run that replays its own positions is itself
                assert (drawn == recorded.tokens).all()


def replay_inputs(source, n: int, seed: int, recorded) -> Inputs:
    return replace(audit_inputs(source, AuditSettings(n=n), seed), replay=recorded)


def replayed(source, sampler, n: int, seed: int, recorded):
    """Every step of a replay that commits tokens, and the committed tokens before it."""
    before = torch.zeros(n, source.length, dtype=torch.long)
    for step in rollout(source, sampler, replay_inputs(source, n, seed, recorded), stop=sampler.nfe - 1):
        yield before, step.state.memory[0], step
        before = step.state.memory[0]


def exact(source, step):
    return source.probs(step.model_input, source.schedule.signal(step.t).expand(len(step.tokens)))


def test_second_nucleus_and_refreshed_values_are_what_their_names_say():
    """Call by call, from the exact distribution of the network's input."""
    recorded = limpet.sample(WORDS, CRS(nfe=8, budget=4.0), 3, 1).memory
    for kind in ("second", "nucleus", "refreshed"):
        for _, after, step in replayed(WORDS, CRS(nfe=8, budget=4.0, values=kind), 3, 1, recorded):
            probs = exact(WORDS, step)
            ranked = probs.sort(dim=-1, descending=True).values  # ties are common here: compare masses, not tokens
            for b, i in step.masks["chosen"].nonzero().tolist():
                own = probs[b, i].tolist()
                token, top = int(after[b, i]), int(probs[b, i].argmax())
                assert (token == top) == (kind == "refreshed")
                if kind == "second":
                    assert own[token] == pytest.approx(float(ranked[b, i, 1]), rel=1e-12)
                elif kind == "nucleus":
                    kept = literal.nucleus(own, 0.9, "released")
                    assert kept[token] or sum(kept) == 1
                    assert sum(kept) > 1 or own[token] == pytest.approx(float(ranked[b, i, 1]), rel=1e-12)
            if kind == "refreshed":
                assert (after == probs.argmax(-1))[step.visible].all()


def test_interleaved_and_half_rate_refreshing():
    """Interleaved, no two neighbours change together; at half the rate, odd calls change nothing."""
    recorded, moved = limpet.sample(CHAIN, CRS(nfe=12), 4, 3).memory, {"interleaved": 0, 0: 0, 1: 0}
    for before, after, step in replayed(CHAIN, CRS(nfe=12, values="refreshed-interleaved"), 4, 3, recorded):
        changed = step.visible & (after != before)
        assert not (changed[:, 1:] & changed[:, :-1]).any()
        assert ((changed.nonzero()[:, 1] + step.call) % 2 == 0).all()
        moved["interleaved"] += int(changed.sum())
    for before, after, step in replayed(CHAIN, CRS(nfe=12, values="refreshed-half"), 4, 3, recorded):
        if step.call % 2 == 0:
            assert (after == exact(CHAIN, step).argmax(-1))[step.visible].all()
        moved[step.call % 2] += int((step.visible & (after != before)).sum())
    assert moved["interleaved"] > 0
    assert moved[0] > 0
    assert moved[1] == 0


def counted(source, sampler, n, seed, recorded):
    """What the probe counts from the start of a replay."""
    inputs = audit_inputs(source, AuditSettings(n=n), seed)
    return values.count_changes(sampler, source, inputs, sampler.replay(context_of(source, inputs), recorded))


def test_changes_are_counted_one_by_one():
    sampler, recorded = CRS(nfe=8, values="refreshed"), limpet.sample(CHAIN, CRS(nfe=8), 4, 3).memory
    history: dict[tuple[int, int], list[int]] = {}
    visible = 0
    for _, after, step in replayed(CHAIN, sampler, 4, 3, recorded):
        visible += int(step.visible.sum())
        for b, i in (step.masks["chosen"] | step.visible).nonzero().tolist():
            tokens = history.setdefault((b, i), [])
            if not tokens or tokens[-1] != int(after[b, i]):
                tokens.append(int(after[b, i]))
    replaced = sum(len(tokens) - 1 for tokens in history.values())
    reverted = sum(tokens[k] == tokens[k - 2] for tokens in history.values() for k in range(2, len(tokens)))
    assert counted(CHAIN, sampler, 4, 3, recorded) == (visible, replaced, reverted)
    assert 0 < reverted < replaced


def test_the_probe_follows_the_samplers_that_refresh(finished):
    """Its trajectories begin where warmup ends: they are those of a replay from the start."""
    results, _ = finished("values", SMOKE)
    for kind in values.REFRESHED:
        found = [
            counted(WORDS, CRS(nfe=8, values=kind), 4, seed, limpet.sample(WORDS, CRS(nfe=8), 4, seed).memory)
            for seed in (8200, 8210)
        ]
        (replaced,), (reverted,) = (results.find(quantity, values=kind) for quantity in values.CHANGES)
        assert replaced.estimate.values.tolist() == [100 * one.replaced / one.visible for one in found]
        assert replaced.events == sum(one.visible for one in found)
        assert reverted.estimate.values.tolist() == [100 * one.reverted / one.replaced for one in found]
        assert reverted.events == sum(one.replaced for one in found)


def test_final_only_returns_the_tokens_that_its_network_never_saw(finished):
    _, tokens = finished("storage", replace(SMOKE, nfe=12))
    for p in (1.0, 0.8):
        common = {"nfe": 12, "top_p": 0.9, "late_top_p": p}
        for i, seed in enumerate((8200, 8210)):
            crs = limpet.sample(WORDS, CRS(**common), 4, seed)
            native = limpet.sample(WORDS, Native(**common, final_step="argmax"), 4, seed).tokens
            stored, committed_at = crs.memory
            committed = committed_at < 12
            assert committed.any()
            found = {name: tokens[f"{p}/{name}"][i] for name in storage.SAMPLERS}
            assert (found["revisable"] == native).all()
            assert (found["CRS"] == torch.where(committed, stored, crs.tokens)).all()
            assert (found["final-only"] == torch.where(committed, stored, native)).all()
            assert (found["final-only"] != found["CRS"]).any()


def test_a_model_without_a_known_distribution_needs_a_judge():
    for name in ("final-step", "values", "storage"):
        with pytest.raises(LimpetError, match="needs a judge"):
            resolve(studies.study(name, replace(SMOKE, distilled="mini", base="mini")), ModelCache("cpu"))
