"""`refresh`: which positions a call computes, where it is exact, and that it is the same however a batch is cut."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import limpet
from limpet import LimpetError, conformance
from limpet.diffusion.backends import fastest, sparse
from limpet.diffusion.rng import CounterRNG
from limpet.generation import CountingDenoiser, Inputs, rollout
from limpet.models import Cache, Denoiser, ModelInput, WrappedDenoiser
from limpet.models.duo import Duo
from limpet.recording.trajectory import record
from limpet.samplers import Context, Native, Sampler, State, from_dict, parse
from limpet.samplers.base import Kept, check_memory
from limpet.samplers.builtin import BUILTIN
from model_cases import TINY, random_network
from thinned import thinned

NFE, LENGTH = 12, 12
SHAPE = replace(TINY, vocab_size=11, length=LENGTH, hidden=96)  # whole vectors: rows round alike in any number
FIXED = torch.tensor([3, -1, -1, 7, -1, -1, -1, -1, -1, 2, -1, -1])
SAMPLERS = [*BUILTIN, "native interleave=true top_p=.9", "crs final_step=sample", "mend interleave=true",
            "gibbs choose=margin positions=3 predictor=crs"]  # fmt: skip


def sampler(text: str, refresh: int = 1, nfe: int = NFE) -> Sampler:
    return parse(f"{text} nfe={nfe} refresh={refresh}")[1]


def inputs(samples: list[int], fixed: Tensor | None = None, **options) -> Inputs:
    fixed = torch.full((LENGTH,), -1) if fixed is None else fixed
    return Inputs(fixed.repeat(len(samples), 1), CounterRNG(5, torch.tensor(samples)), **options)


def final(model: Denoiser, one: Sampler, batch: Inputs, start: State | None = None, **options) -> State:
    *_, end = rollout(model, one, batch, start, **options)
    return end.state


@pytest.fixture(scope="module")
def model() -> Duo:
    return Duo(random_network(SHAPE))


@pytest.fixture(scope="module")
def local() -> Duo:
    """A network in which a position depends on its own token alone: keys and values never matter, nor does the time."""
    network = random_network(SHAPE)
    with torch.no_grad():
        network.sigma_map.mlp[2].weight.zero_()
        for block in network.blocks:
            block.attn_out.weight.zero_()
    return Duo(network)


class Computed(WrappedDenoiser):
    """Remembers which positions each call computes, (B, L) bool."""

    def __init__(self, inner: Denoiser) -> None:
        super().__init__(inner)
        self.calls: list[Tensor] = []

    def backbone(self, inputs: ModelInput) -> Tensor:
        computed = torch.ones_like(inputs.tokens, dtype=torch.bool)
        if inputs.cache is not None and inputs.cache.compute is not None:
            computed = torch.zeros_like(computed).flatten().index_fill(0, inputs.cache.compute, True).view_as(computed)
        self.calls.append(computed)
        return super().backbone(inputs)


class Deaf(WrappedDenoiser):
    """Ignores the cache that it is batch."""

    def backbone(self, inputs: ModelInput) -> Tensor:
        return super().backbone(inputs._replace(cache=None))


# Exact where nothing is approximate


@pytest.mark.parametrize("text", SAMPLERS)
def test_calls_that_compute_everything_have_the_bytes_of_no_cache(model, text, monkeypatch):
    fixed = FIXED if parse(text)[1].needs_fixed else None
    expected = final(model, sampler(text), inputs([0, 1, 2], fixed))
    monkeypatch.setattr(Context, "_cache", lambda *_: Cache(None, (), []))
    state = final(model, sampler(text, refresh=2), inputs([0, 1, 2], fixed))
    assert state.kept is not None
    assert state.tokens.equal(expected.tokens)
    assert all(map(torch.equal, state.memory, expected.memory))


@pytest.mark.parametrize("name", thinned(["sudoku", "mini", "mini-distilled", "molecules"]))
def test_so_they_have_on_every_built_in_model(name, monkeypatch):
    built_in = limpet.load(name, device="cpu")
    expected = limpet.sample(built_in, "mend nfe=4", n=2)
    assert limpet.sample(built_in, "mend nfe=4 refresh=1", n=2) == expected
    monkeypatch.setattr(Context, "_cache", lambda *_: Cache(None, (), []))
    assert limpet.sample(built_in, "mend nfe=4 refresh=2", n=2).tokens.equal(expected.tokens)


@pytest.mark.parametrize("trace", [False, True])
@pytest.mark.parametrize("text", SAMPLERS)
def test_every_sampler_reads_only_what_is_computed(local, text, trace):
    """Where keys and values do not matter, what a sampler reads is exact only if its own position was computed."""
    batch = inputs([0, 1, 2], FIXED, trace=trace)
    assert final(local, sampler(text, 5), batch).tokens.equal(final(local, sampler(text), batch).tokens)


# Which positions a call computes


@pytest.mark.parametrize("text", ["native top_p=.9", "native interleave=true", "crs", "mend"])
def test_a_call_computes_what_changed_and_what_is_read(model, text):
    """By the definition: those with another token in the model input than a call before, and those of the plan."""
    computed, one, plans = Computed(model), sampler(text, refresh=4), []
    backend = fastest(torch.device("cpu"))

    def plan(transition, call):
        plans.append(sparse.plan(transition, call))
        return plans[-1]

    steps = list(rollout(computed, one, inputs([0, 1, 2], FIXED, backend=backend._replace(plan=plan))))
    last = {id(p.transition): p for p in plans}.values()  # the context plans once more, for the cache
    by_call = {p.transition.call: p for p in last}
    for call, step in enumerate(steps):
        expected = torch.ones(3, LENGTH, dtype=torch.bool)
        if call % 4:
            expected = step.model_input != steps[call - 1].model_input
            expected[tuple(by_call[call].rows.unbind(-1))] = True
            assert not (expected & (FIXED >= 0)).any()
        assert computed.calls[call].equal(expected)


def test_the_rows_are_counted(model):
    counting = CountingDenoiser(model)
    final(counting, sampler("native", 4), inputs([0, 1]))
    assert NFE // 4 * 2 * LENGTH < counting.positions < NFE * 2 * LENGTH
    exact = CountingDenoiser(model)
    final(exact, sampler("native"), inputs([0, 1]))
    assert (exact.positions, exact.calls) == (NFE * 2 * LENGTH, counting.calls)


# A sample is the same however it is sampled


@pytest.mark.parametrize("text", ["native", "native interleave=true", "mend", "gibbs corrections=2"])
def test_a_sample_is_independent_of_its_batch(model, text):
    one, many = sampler(text, 4), list(range(64))
    together = final(model, one, inputs(many, FIXED))
    shuffled = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    assert final(model, one, inputs(shuffled.tolist(), FIXED)).tokens.equal(together.tokens[shuffled])
    assert final(model, one, inputs([40, 3, 17], FIXED)).tokens.equal(together.tokens[[40, 3, 17]])
    for number in (0, 9, 63):
        assert final(model, one, inputs([number], FIXED)).tokens.equal(together.tokens[[number]])


def test_sampling_cut_into_batches_and_steps_and_recordings_give_the_same(model):
    text = f"mend nfe={NFE} refresh=4"
    out = limpet.sample(model, text, n=7, prompt=[3, 4], fixed={7: 2})
    assert (out.tokens[:, [0, 1, 7]] == torch.tensor([3, 4, 2])).all()
    assert limpet.sample(model, text, n=7, prompt=[3, 4], fixed={7: 2}, batch_size=3) == out
    *_, traced = limpet.steps(model, text, n=7, prompt=[3, 4], fixed={7: 2})
    assert traced.tokens.equal(out.tokens)
    frames = record(model, text, sample=2, prompt=[3, 4], fixed={7: 2}).frames
    assert frames[-1].tokens.tolist() == out.tokens[2].tolist()


@pytest.mark.parametrize("text", ["native top_p=.9", "mend", "trapezoidal"])
def test_a_state_can_be_gone_on_from_more_than_once(model, text):
    one, batch = sampler(text, 4), inputs([0, 1, 2], FIXED)
    steps = list(rollout(model, one, batch))
    for step in (steps[4], steps[5], steps[4]):  # nothing that a later call did has changed what a state keeps
        assert final(model, one, batch, step.state).tokens.equal(steps[-1].tokens)
    other = final(model, sampler("crs", 4), batch, steps[4].state) if text == "mend" else None
    assert other is None or final(model, one, batch, steps[4].state).tokens.equal(steps[-1].tokens)


def test_a_state_without_its_cache_begins_with_a_full_call(model):
    one, batch = sampler("native", 4), inputs([0, 1], FIXED)
    steps, computed = list(rollout(model, one, batch)), Computed(model)
    final(computed, one, batch, steps[4].state._replace(kept=None))
    assert [calls.all().item() for calls in computed.calls[:5]] == [True, False, False, False, True]
    resumed = final(model, one, batch, steps[3].state._replace(kept=None))  # where a full call was due anyway
    assert resumed.tokens.equal(steps[-1].tokens)


def test_early_stopping_ends_with_what_the_call_gave(model):
    @dataclass(frozen=True)
    class Ending(Native):
        def finished(self, state: State) -> Tensor:
            return torch.full((len(state.tokens),), state.call >= 7)

    batch, one = inputs([0, 1, 2], FIXED), Ending(nfe=NFE, refresh=4)
    ended, steps = (list(rollout(model, one, batch, until_finished=until)) for until in (True, False))
    assert (len(ended), len(steps)) == (7, NFE)
    assert ended[-1].tokens.equal(steps[6].tokens)


# Names, and what is refused


def test_refresh_is_a_parameter_of_every_sampler():
    for name in BUILTIN:
        caption, one = parse(f"{name} nfe=16 refresh=4")
        assert (caption, one.refresh) == (f"{name} refresh=4", 4)
        assert repr(one) == f"{type(one).__name__}(nfe=16, refresh=4)"
        assert from_dict(json.loads(json.dumps(one.to_dict()))) == one
        assert "refresh" not in one.replace(refresh=1).to_dict()  # as versions before it wrote


def test_what_cannot_be_cached_is_refused_in_one_sentence(model, monkeypatch):
    with pytest.raises(LimpetError, match=r"exact:words computes every position at every call.*leave refresh out"):
        limpet.sample(limpet.load("exact:words"), "native refresh=2 nfe=4", n=1)
    with pytest.raises(LimpetError, match="duo has cache_bytes and kept nothing of a call"):
        limpet.sample(Deaf(model), "native refresh=2 nfe=4", n=1)
    with pytest.raises(LimpetError, match="has refresh 0; it takes a whole number from 1"):
        parse("mend refresh=0")
    monkeypatch.setattr(model, "cache_bytes", 2**60)
    with pytest.raises(
        LimpetError, match=r"the cache of duo takes .* GiB for 2 samples of 12 tokens, .* smaller batch"
    ):
        check_memory(model, torch.zeros(2, LENGTH))


def test_a_cache_that_is_wrong_fails_the_check(model):
    class Stale(WrappedDenoiser):
        """Attends to the kept keys and values also where it has to renew them."""

        def backbone(self, inputs: ModelInput) -> Tensor:
            features = super().backbone(inputs)
            if inputs.cache is not None and inputs.cache.compute is not None:
                inputs.cache.after[:] = inputs.cache.before
            return features

    def found(subject: Denoiser) -> conformance.CheckResult:
        return {row.what: row for row in conformance.model_rows(subject)}["some positions beside a cache"]

    assert found(model).ok
    assert not found(Stale(model)).ok
    assert not found(Deaf(model)).ok


def test_what_is_kept_has_the_size_that_is_checked(model):
    state = final(model, sampler("native", 4), inputs([0, 1]))
    assert isinstance(state.kept, Kept)
    assert sum(layer.nbytes for layer in state.kept.layers) == model.cache_bytes * 2 * LENGTH
