"""Samplers of the field, token for token against their rules in plain Python; the exact distribution of the trapezoidal rule;
limits, given tokens, company and counted calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import limpet
import literal
import plain
import samplers_plain as written
from backends import BACKENDS, DEVICE, Posterior
from limpet import (
    BlockRefinement,
    EntropyBound,
    GIDDAdaptive,
    GIDDCorrection,
    Guided,
    LimpetError,
    Native,
    Sampler,
    Trapezoidal,
)
from limpet.diffusion import process
from limpet.diffusion.rng import CounterRNG
from limpet.models import Denoiser
from limpet.models.exact import Markov, codebook
from limpet.paper.theory.problems import chain, probs_at, product, sequences
from limpet.samplers.context import State, generate, open_context

SEED, SAMPLES = 8200, 4
GIVEN = {0: 3, 1: 5, 9: 2}


def generic(sharpness: int = 4) -> Markov:
    """A chain with random parameters: no two distributions tie by accident, so every order is decided by more than rounding."""
    generator = torch.Generator().manual_seed(21)
    rand = [torch.rand(*shape, generator=generator, dtype=torch.float64) + 0.01 for shape in ((7,), (7, 7))]
    return Markov(rand[0], rand[1] ** sharpness, 20)


def one_of(model: Denoiser, sample: int, given: dict[int, int]) -> written.One:
    return written.One(model, written.Uniforms(SEED, sample), given)


RULES: dict[type[Sampler], Callable[[written.One, Any], list[int]]] = {
    EntropyBound: written.entropy_bound, GIDDAdaptive: written.gidd_adaptive, GIDDCorrection: written.gidd_correction,
    BlockRefinement: written.block_refinement, Guided: written.guided, Trapezoidal: written.trapezoidal,
}  # fmt: skip
ARMS: list[Sampler] = [
    EntropyBound(nfe=9), EntropyBound(nfe=8, bound=4.0), EntropyBound(nfe=8, bound=2.0, clock="grid", settled=None),
    EntropyBound(nfe=12, bound=6.0, hottest=0.2, coldest=0.05, settled=0.2, patience=2),
    GIDDAdaptive(nfe=7), GIDDAdaptive(nfe=6, count=5), GIDDAdaptive(nfe=6, final_step="argmax"),
    GIDDCorrection(nfe=12), GIDDCorrection(nfe=16, corrections=12, patience=2, sharpness=0.8),
    GIDDCorrection(nfe=13, corrections=9, changes=3, patience=None, sharpness=1.0, top_p=0.9, final_step="sample"),
    BlockRefinement(nfe=6), BlockRefinement(nfe=9, threshold=0.6, editing=0.5), BlockRefinement(nfe=7, clock="grid"),
    BlockRefinement(nfe=6, temperature=0.9, editing=0.3, threshold=0.8),
    Guided(nfe=8), Guided(nfe=9, weight=2.5, final_step="sample"), Guided(nfe=8, without="uniform", weight=0.5),
    Trapezoidal(nfe=9), Trapezoidal(nfe=8, final_step="sample"), Trapezoidal(nfe=7, theta=0.3, grid="uniform"),
]  # fmt: skip
every_arm = pytest.mark.parametrize("sampler", ARMS, ids=lambda sampler: f"{sampler.caption} nfe={sampler.nfe}")


@every_arm
@pytest.mark.parametrize("kind", ["given", "free", "posterior"])
def test_every_token_is_the_rules(sampler: Sampler, kind: str) -> None:
    """Given tokens hold, and the denoiser is called as often as was said."""
    given = {} if kind == "free" and not isinstance(sampler, Guided) else GIVEN
    model: Denoiser = Posterior(generic()) if kind == "posterior" else generic()
    out = limpet.sample(model, sampler, n=SAMPLES, seed=SEED, fixed=given)
    assert out.nfe == sampler.nfe
    for sample in range(SAMPLES):
        expected = RULES[type(sampler)](one_of(model, sample, given), SimpleNamespace(**vars(sampler)))
        assert out.tokens[sample].tolist() == expected


@every_arm
def test_a_sample_does_not_know_its_company(sampler: Sampler) -> None:
    model = generic()
    together, one = (limpet.sample(model, sampler, n=6, seed=3, fixed=GIVEN, batch_size=size) for size in (6, 1))
    assert torch.equal(together.tokens, one.tokens)
    assert together.nfe == one.nfe == sampler.nfe


@pytest.mark.parametrize("kind", RULES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("nfe", range(2, 12))
def test_calls_are_counted_whatever_their_number(kind: type[Sampler], nfe: int) -> None:
    if kind is Guided and nfe == 2:
        with pytest.raises(LimpetError, match="guided has nfe 2; it takes a whole number from 3"):
            kind(nfe=nfe)
        return
    assert limpet.sample(generic(), kind(nfe=nfe), n=2, fixed=GIVEN).nfe == nfe


@every_arm
def test_a_path_that_is_watched_is_the_same(sampler: Sampler) -> None:
    """And whoever watches is told of every distribution, except of a guided path's distributions without what was given."""
    ends = []
    for trace in (False, True):
        rng = CounterRNG(SEED, torch.arange(2))
        fixed = torch.full((2, 20), -1)
        fixed[:, list(GIVEN)] = torch.tensor(list(GIVEN.values()))
        ctx = open_context(generic(), rng, fixed, trace=trace)
        walked = list(generate(sampler, ctx))
        ends.append(walked[-1][0].tokens)
        if trace and not isinstance(sampler, Guided):
            assert all((info.outcome.deficit.isfinite() == ctx.free).all() for _, info in walked)
    assert torch.equal(*ends)


@pytest.mark.parametrize("kind", [EntropyBound, BlockRefinement, GIDDCorrection, Trapezoidal])
def test_a_law_that_is_none_is_named(kind: type[Sampler]) -> None:
    class Spoiled(Markov):
        calls = 0

        def body(self, tokens: Tensor, t: float | Tensor) -> Tensor:
            features = super().body(tokens, t)
            self.calls += 1
            if self.calls == 5:
                features[1, 7] = math.nan
            return features

    model = Spoiled(*(torch.ones(shape) for shape in (7, (7, 7))), 20)
    with pytest.raises(LimpetError, match=r"make no distribution .* in call 4 at position 7 of sample 1"):
        limpet.sample(model, kind(nfe=7), n=2)


# -- limits -----------------------------------------------------------------------------------------------------------


def test_a_bound_of_nothing_accepts_the_surest_and_an_endless_one_all() -> None:
    ctx = open_context(generic(), CounterRNG(SEED, torch.arange(3)), torch.full((3, 20), -1))
    for bound, count in ((0.0, 1), (1e6, 20)):
        sampler = EntropyBound(nfe=5, bound=bound, settled=None)
        for state, info in list(generate(sampler, ctx))[:-1]:
            assert (info.marks["accepted"].sum(-1) == count).all()
            assert torch.equal(state.memory[0], info.marks["accepted"])


def test_a_sample_that_has_settled_stays_as_it_is_and_its_calls_are_still_made() -> None:
    """A codebook of two words is certain after a few calls."""
    source = codebook(torch.tensor([[0, 1, 2, 1, 0, 2], [2, 2, 0, 0, 1, 1]]), 3)
    ctx = open_context(source, CounterRNG(SEED, torch.arange(16)), torch.full((16, 6), -1))
    states = [state for state, _ in generate(EntropyBound(nfe=12, bound=0.5), ctx)]
    stopped = torch.stack([state.memory[3][:, 0] for state in states])
    assert stopped[-2].any()
    assert not stopped[0].any()
    assert (stopped[1:] >= stopped[:-1]).all()
    for state, done in zip(states, stopped, strict=True):
        assert torch.equal(state.tokens[done], states[-1].tokens[done])


@pytest.mark.parametrize(
    "sampler",
    [
        *(EntropyBound(nfe=16, bound=4.0, settled=0.3, patience=patience) for patience in (1, 2, 4)),
        *(GIDDCorrection(nfe=24, corrections=20, sharpness=0.8, patience=patience) for patience in (0, 2, 5, None)),
    ],
    ids=lambda sampler: sampler.caption,
)
def test_a_sample_stops_when_the_rule_says(sampler: Any) -> None:
    """Neither sooner nor later, each at a call of its own."""
    model = generic(16)
    ctx = open_context(model, CounterRNG(SEED, torch.arange(12)), torch.full((12, 20), -1))
    states = [state for state, _ in generate(sampler, ctx)]
    stopped = torch.stack([state.memory[-1][:, 0] for state in states], 1)
    calls = set()
    for sample in range(12):
        one = one_of(model, sample, {})
        expected = RULES[type(sampler)](one, SimpleNamespace(**vars(sampler)))
        assert states[-1].tokens[sample].tolist() == expected
        calls.add(one.stopped_at)
        assert stopped[sample].tolist() == [
            one.stopped_at is not None and r >= one.stopped_at for r in range(sampler.nfe)
        ]
    assert len(calls) > 2


@pytest.mark.parametrize("predicts", ["leave-one-out", "posterior"])
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
def test_guidance_of_weight_0_is_native_with_half_the_calls(backend: Any, predicts: str) -> None:
    """Not in distribution alone: the output is the same, for an even number of calls and for an odd one, also of a model that
    gives some tokens no mass."""
    if DEVICE != "cpu":
        pytest.skip("sources live on the CPU")
    words = torch.tensor([[0, 1, 2, 1, 0, 2], [2, 2, 0, 0, 1, 1], [1, 0, 2, 2, 1, 0]])
    models: list[tuple[Denoiser, Any]] = [(codebook(words, 3), {0: 2}), (generic(), GIVEN)]
    arms = [(nfe, end, top_p) for nfe in (10, 11) for end in ("argmax", "sample") for top_p in (1.0, 0.9)]
    if backend is BACKENDS.get("fused"):  # which is interpreted
        models, arms = models[:1], [(6, "argmax", 1.0), (5, "sample", 0.9)]
    for model, fixed in models:
        model = Posterior(model) if predicts == "posterior" else model
        for nfe, final_step, top_p in arms:
            own = Guided(nfe=nfe, weight=0.0, final_step=final_step, top_p=top_p)
            half = Native(nfe=(nfe + 1) // 2, final_step=final_step, top_p=top_p)
            ours, theirs = (limpet.sample(model, arm, n=4, fixed=fixed, backend=backend) for arm in (own, half))
            assert torch.equal(ours.tokens, theirs.tokens)
            assert (ours.nfe, theirs.nfe) == (nfe, (nfe + 1) // 2)


def test_guidance_sharpens_what_the_prefix_says() -> None:
    """The given word's log-probability ratio grows with the weight."""
    model = generic()
    found = []
    for weight in (0.0, 1.0, 4.0):
        out = limpet.sample(model, Guided(nfe=16, weight=weight, final_step="sample"), n=256, prefix=[3])
        found.append(float(model.transition[3, out.tokens[:, 1]].log().mean()))
    assert found[0] < found[1] < found[2]


def test_guidance_needs_something_to_guide_by() -> None:
    with pytest.raises(LimpetError, match="guided has nothing to guide by: give a prefix or fixed tokens"):
        limpet.sample(generic(), Guided(nfe=8), n=2)
    one = torch.full((2, 20), -1)
    one[0, 0] = 3
    with pytest.raises(LimpetError, match="nothing to guide by"):
        limpet.sample(generic(), Guided(nfe=8), n=2, fixed=one)


def test_no_correction_is_native() -> None:
    for final_step in ("argmax", "sample"):
        arms = GIDDCorrection(nfe=9, corrections=0, final_step=final_step), Native(nfe=9, final_step=final_step)
        ours, theirs = (limpet.sample(generic(), arm, n=8).tokens for arm in arms)
        assert torch.equal(ours, theirs)


def test_a_correction_needs_something_to_correct() -> None:
    with pytest.raises(LimpetError, match="gidd-correction has corrections 5 of nfe 6; at least 2 calls must draw"):
        GIDDCorrection(nfe=6, corrections=5)


def test_two_calls_of_the_trapezoidal_rule_are_native() -> None:
    """One ancestral step and the final step: an even number of calls begins so."""
    ours, theirs = (limpet.sample(generic(), kind(nfe=2), n=8).tokens for kind in (Trapezoidal, Native))
    assert torch.equal(ours, theirs)


def test_setting_every_position_in_every_call_is_the_argmax_of_the_last() -> None:
    arms = GIDDAdaptive(nfe=6, count=20), GIDDAdaptive(nfe=6, count=20, final_step="argmax")
    ours, theirs = (limpet.sample(generic(), arm, n=8).tokens for arm in arms)
    assert torch.equal(ours, theirs)


def test_a_quota_is_met_and_what_is_committed_stays_without_editing() -> None:
    ctx = open_context(generic(), CounterRNG(SEED, torch.arange(3)), torch.full((3, 20), -1))
    before = None
    for state, _ in generate(BlockRefinement(nfe=6, threshold=1.0), ctx):
        (committed,) = state.memory
        assert (committed.sum(-1) == math.ceil(state.call * 20 / 6)).all()
        if before is not None:
            held = before.memory[0]
            assert torch.equal(state.tokens[held], before.tokens[held])
        before = state


def test_an_edited_token_is_one_that_another_contradicts() -> None:
    """Editing at confidence 0 lets no committed token differ from the argmax of its call."""
    ctx = open_context(generic(), CounterRNG(SEED, torch.arange(8)), torch.full((8, 20), -1))
    edits = 0
    for state, info in generate(BlockRefinement(nfe=6, editing=0.0), ctx):
        (committed,) = state.memory
        assert torch.equal(state.tokens[committed], info.outcome.top[committed])
        edits += int(info.marks["edited"].sum())
    assert edits > 0


def test_each_sample_may_be_told_its_own_time() -> None:
    """The time whose signal is a share, under both schedules; and no transition can be asked for then."""
    model = generic()
    share = torch.tensor([0.0, 0.25, 0.5, 1.0], dtype=torch.float64)
    for name, schedule in process.SCHEDULES.items():
        model.schedule = schedule
        ctx = open_context(model, CounterRNG(SEED, torch.arange(4)), torch.full((4, 20), -1))
        t = ctx.time(share)
        assert torch.allclose(schedule.signal(t)[1:-1], share[1:-1], atol=1e-12), name
        assert (float(t[0]), float(t[-1])) == pytest.approx((1.0, process.EPS), abs=1e-12)
        features = ctx.call(state := ctx.noise(), t)[0]
        for row in range(4):
            assert torch.equal(features.values[row], model.body(state[row : row + 1], float(t[row]))[0])
        ask = Native(nfe=4).transition(ctx, State(0, state), ctx.free, ctx.no_positions)
        with pytest.raises(LimpetError, match="the coins of one time"):
            ctx.call(state, t, ask)


# -- the distribution of the trapezoidal rule ----------------------------------------------------------------------------------

SIZE, LENGTH = 3, 5
STATES = sequences(SIZE, LENGTH)  # (243, 5)


def leap(rates: np.ndarray, span: float) -> Tensor:
    """(..., 243, 5, 3) rates away from each state -> the distributions of its tokens after a leap, independent of each other."""
    total = rates.sum(-1, keepdims=True)
    stays = np.exp(-total * span)
    return torch.from_numpy((1 - stays) * rates / np.where(total > 0, total, 1) + stays * np.eye(SIZE)[STATES])


def mixed(mass: Tensor, distributions: Tensor) -> Tensor:
    """(243,): independent tokens with distributions (..., 5, 3), mixed by mass (...). The first positions against the others, so
    that no joint distribution of all of them is made for each part of the mixture."""
    distributions = distributions.flatten(0, -3)
    ahead, behind = product(distributions[:, :2]), product(distributions[:, 2:])
    return ((mass.flatten()[:, None] * ahead).T @ behind).flatten()


def by_token(rates: Callable[[int], Any]) -> np.ndarray:
    """(..., 243, 5, 3) from a function of the token that stands at a position: what it gives for each one, where that
    one stands."""
    every = [np.stack(rates(z), -1) for z in range(SIZE)]
    return np.choose(STATES.numpy()[..., None], every)


def rates_at(t: float) -> np.ndarray:
    """(243, 5, 3): those of every state, from the functions that the tokens are tested with."""
    probs = np.moveaxis(probs_at(chain(LENGTH), STATES, 1 - 0.999 * t).numpy(), -1, 0)
    return by_token(lambda z: written.reverse_rates(probs, z, t))


def second_rates(first: np.ndarray, second: np.ndarray, theta: float) -> np.ndarray:
    """(243, 243, 5, 3): from where the first leap began, and where it may have come to."""
    early, late = (np.moveaxis(rates, -1, 0) for rates in np.broadcast_arrays(first[:, None], second))
    return by_token(lambda z: written.extrapolated(early, late, z, theta))


@cache
def trapezoidal_law(nfe: int, theta: float = 0.5) -> Tensor:
    """(243,): the distribution of the output on a uniform grid, with an ancestral last call, of an odd number of calls."""
    source, mass = chain(LENGTH), torch.full((len(STATES),), 1 / len(STATES), dtype=torch.float64)
    nodes = plain.grid((nfe + 1) // 2, 0.0, "uniform")
    for t, s in pairwise(nodes):
        inside = t - theta * (t - s)
        first, second = rates_at(t), rates_at(inside)
        between = mass[:, None] * product(leap(first, t - inside))
        mass = mixed(between, leap(second_rates(first, second, theta), inside - s))
    signal = 1 - 0.999 * nodes[-1]
    return mass @ product(process.posterior(probs_at(source, STATES, signal), STATES, signal))


def test_the_trapezoidal_sampler_has_that_law() -> None:
    sampler, n = Trapezoidal(nfe=5, grid="uniform", final_step="sample"), 20_000
    out = limpet.sample(chain(LENGTH), sampler, n=n, batch_size=n).tokens
    counts = torch.bincount((out * SIZE ** torch.arange(LENGTH - 1, -1, -1)).sum(-1), minlength=SIZE**LENGTH)
    assert literal.chi_square(counts.numpy(), trapezoidal_law(5).numpy()) > 1e-3
