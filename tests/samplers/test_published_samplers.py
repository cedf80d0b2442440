"""Published samplers: when samples stop, what is committed, guidance, and the exact distribution of trapezoidal leaps.

test_every_sampler.py has their transcriptions and their contract."""

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
    RDM,
    BlockRefinement,
    ConfidenceThreshold,
    EntropyBound,
    ForwardBackward,
    GIDDCorrection,
    Guided,
    LimpetError,
    Native,
    Sampler,
    TauLeaping,
    Trapezoidal,
)
from limpet.diffusion import process
from limpet.diffusion.rng import CounterRNG
from limpet.generation import Inputs, Step, context_of, rollout
from limpet.models import Denoiser, ModelInput
from limpet.models.exact import Markov, codebook
from limpet.paper.theory.problems import chain, probs_at, product, sequences, truth
from limpet.samplers import State
from thinned import by_backend

SEED = 8200
FIXED = {0: 3, 1: 5, 9: 2}


def generic(sharpness: int = 4) -> Markov:
    """A chain with random parameters, so that no two probabilities tie by accident."""
    generator = torch.Generator().manual_seed(21)
    rand = [torch.rand(*shape, generator=generator, dtype=torch.float64) + 0.01 for shape in ((7,), (7, 7))]
    return Markov(rand[0], rand[1] ** sharpness, 20)


def steps_of(model: Denoiser, sampler: Sampler, n: int) -> list[Step]:
    fixed = torch.full((n, model.length), -1)
    return list(rollout(model, sampler, Inputs(fixed, CounterRNG(SEED, torch.arange(n)))))


@pytest.mark.parametrize(
    "kind", [EntropyBound, BlockRefinement, GIDDCorrection, Trapezoidal, TauLeaping, RDM, ConfidenceThreshold]
)
def test_non_finite_logits_are_reported(kind: type[Sampler]) -> None:
    class Spoiled(Markov):
        calls = 0

        def backbone(self, inputs: ModelInput) -> Tensor:
            features = super().backbone(inputs)
            self.calls += 1
            if self.calls == 5:
                features[1, 7] = math.nan
            return features

    model = Spoiled(*(torch.ones(shape) for shape in (7, (7, 7))), 20)
    with pytest.raises(LimpetError, match=r"non-finite logits .* in call 4 at position 7 of sample 1"):
        limpet.sample(model, kind(nfe=7), n=2)


def test_an_entropy_bound_of_0_accepts_one_token_and_a_large_one_all() -> None:
    for bound, count in ((0.0, 1), (1e6, 20)):
        for step in steps_of(generic(), EntropyBound(nfe=5, bound=bound, settled=None), 3)[:-1]:
            assert (step.masks["accepted"].sum(-1) == count).all()
            assert torch.equal(step.state.memory.accepted, step.masks["accepted"])


def test_a_settled_sample_stays_as_it_is() -> None:
    """A codebook of two words is certain after a few calls."""
    source = codebook(torch.tensor([[0, 1, 2, 1, 0, 2], [2, 2, 0, 0, 1, 1]]), 3)
    states = [step.state for step in steps_of(source, EntropyBound(nfe=12, bound=0.5), 16)]
    stopped = torch.stack([state.memory.stopped[:, 0] for state in states])
    assert stopped[-2].any()
    assert not stopped[0].any()
    assert (stopped[1:] >= stopped[:-1]).all()
    for state, done in zip(states, stopped, strict=True):
        assert torch.equal(state.tokens[done], states[-1].tokens[done])


@pytest.mark.parametrize(
    "sampler",
    [
        *(EntropyBound(nfe=16, bound=4.0, settled=0.3, patience=patience) for patience in (1, 2, 4)),
        *(ConfidenceThreshold(nfe=16, threshold=0.85, repair=repair) for repair in (False, True)),
        *(GIDDCorrection(nfe=24, corrections=20, sharpness=0.8, patience=patience) for patience in (0, 2, 5, None)),
    ],
    ids=lambda sampler: sampler.caption,
)
def test_a_sample_stops_when_its_transcription_does(sampler: Any) -> None:
    """Each at a call of its own."""
    model = generic(16)
    states = [step.state for step in steps_of(model, sampler, 12)]
    stopped = torch.stack([state.memory.stopped[:, 0] for state in states], 1)
    rule = getattr(written, sampler.name.replace("-", "_"))
    calls = set()
    for sample in range(12):
        one = written.One(model, written.Uniforms(SEED, sample), {})
        assert states[-1].tokens[sample].tolist() == rule(one, SimpleNamespace(**vars(sampler)))
        stopped_at = sampler.nfe if one.stopped_at is None else one.stopped_at
        assert stopped[sample].tolist() == [r >= stopped_at for r in range(sampler.nfe)]
        calls.add(stopped_at)
    assert len(calls) > 2


@pytest.mark.skipif(DEVICE != "cpu", reason="exact sources are on the CPU")
@by_backend("predicts", [("leave-one-out",), ("posterior",)])
def test_guidance_of_weight_0_is_native_with_half_the_calls(backend: Any, predicts: str) -> None:
    """Bit for bit, with an even and an odd number of calls, also for a model that gives some tokens no mass."""
    words = torch.tensor([[0, 1, 2, 1, 0, 2], [2, 2, 0, 0, 1, 1], [1, 0, 2, 2, 1, 0]])
    models: list[tuple[Denoiser, Any]] = [(codebook(words, 3), {0: 2}), (generic(), FIXED)]
    cases = [(nfe, end, top_p) for nfe in (10, 11) for end in ("argmax", "sample") for top_p in (1.0, 0.9)]
    if backend is BACKENDS.get("fused"):  # which is interpreted
        models, cases = models[:1], [(5, "sample", 0.9)]
    for model, fixed in models:
        model = Posterior(model) if predicts == "posterior" else model
        for nfe, final_step, top_p in cases:
            guided = Guided(nfe=nfe, weight=0.0, final_step=final_step, top_p=top_p)
            half = Native(nfe=(nfe + 1) // 2, final_step=final_step, top_p=top_p)
            ours, theirs = (limpet.sample(model, each, n=4, fixed=fixed, backend=backend) for each in (guided, half))
            assert torch.equal(ours.tokens, theirs.tokens)
            assert (ours.nfe, theirs.nfe) == (nfe, (nfe + 1) // 2)


def test_guidance_sharpens_what_the_prompt_predicts() -> None:
    """The log-probability of the next token given the prompt grows with the weight."""
    model = generic()
    found = []
    for weight in (0.0, 1.0, 4.0):
        out = limpet.sample(model, Guided(nfe=16, weight=weight), n=256, prompt=[3])
        found.append(float(model.transition[3, out.tokens[:, 1]].log().mean()))
    assert found[0] < found[1] < found[2]


def test_what_a_sampler_needs() -> None:
    fixed = torch.full((2, 20), -1)
    fixed[0, 0] = 3
    for tokens in (None, fixed):
        with pytest.raises(LimpetError, match="guided needs fixed tokens to guide by: give a prompt or fixed tokens"):
            limpet.sample(generic(), Guided(nfe=8), n=2, fixed=tokens)
    with pytest.raises(LimpetError, match="guided has nfe 2; it takes a whole number from 3"):
        Guided(nfe=2)
    with pytest.raises(LimpetError, match="gidd-correction has corrections 5 of nfe 6; at least 2 calls must draw"):
        GIDDCorrection(nfe=6, corrections=5)
    for kind in (Trapezoidal, ForwardBackward):
        with pytest.raises(LimpetError, match="interleave True; it takes False"):
            kind(nfe=8, interleave=True)


def test_two_calls_of_the_trapezoidal_rule_are_native() -> None:
    """One ancestral step and the final step: an even number of calls begins with an ancestral step."""
    ours, theirs = (limpet.sample(generic(), kind(nfe=2), n=8).tokens for kind in (Trapezoidal, Native))
    assert torch.equal(ours, theirs)


def test_rdm_forgets_and_leaves_no_noise() -> None:
    """The number of noisy positions follows the schedule; denoised tokens change only by returning to noise."""
    calls, returned, before = 6, 0, None
    for step in steps_of(generic(), RDM(nfe=calls, schedule="linear"), 8):
        denoised, score = step.state.memory
        assert ((20 - denoised.sum(-1)) == 20 * (calls - step.state.call) // calls).all()
        assert torch.equal(denoised, score > -math.inf)
        if before is not None:
            stays = before.memory.denoised & ~step.masks["returned"]
            assert torch.equal(step.tokens[stays], before.tokens[stays])
        returned, before = returned + int(step.masks["returned"].sum()), step.state
    assert returned > 0
    assert before is not None
    assert before.memory.denoised.all()


def test_frozen_tokens_reach_the_threshold_or_are_alone_and_repair_sets_the_argmax() -> None:
    for step in steps_of(generic(), ConfidenceThreshold(nfe=30, threshold=0.7), 8)[:-1]:
        sure = 1 - step.outcome.deficit[step.masks["chosen"]] >= 0.7
        alone = (step.masks["chosen"].sum(-1) == 1)[:, None].expand(-1, 20)[step.masks["chosen"]]
        assert (sure | alone).all()
    repaired = [
        step for step in steps_of(generic(), ConfidenceThreshold(nfe=5, repair=True), 8) if step.masks["repaired"].any()
    ]
    assert len(repaired) >= 1
    for step in repaired:
        assert torch.equal(step.tokens[step.masks["repaired"]], step.outcome.top[step.masks["repaired"]])
    assert sum(step.masks["repaired"].long() for step in repaired).eq(1).all()


def test_a_quota_is_met_and_committed_tokens_stay_without_editing() -> None:
    before = None
    for step in steps_of(generic(), BlockRefinement(nfe=6, threshold=1.0), 3):
        (committed,) = step.state.memory
        assert (committed.sum(-1) == math.ceil(step.state.call * 20 / 6)).all()
        if before is not None:
            kept = before.memory.committed
            assert torch.equal(step.tokens[kept], before.tokens[kept])
        before = step.state


def test_edited_tokens_are_those_that_the_argmax_contradicts() -> None:
    """With editing at confidence 0, every committed token equals the argmax of its call."""
    edits = 0
    for step in steps_of(generic(), BlockRefinement(nfe=6, editing=0.0), 8):
        (committed,) = step.state.memory
        assert torch.equal(step.tokens[committed], step.outcome.top[committed])
        edits += int(step.masks["edited"].sum())
    assert edits > 0


def test_each_sample_may_have_its_own_time() -> None:
    """The time whose signal is a share, under both schedules. Transitions need one time for all samples."""
    model = generic()
    share = torch.tensor([0.0, 0.25, 0.5, 1.0], dtype=torch.float64)
    for name, schedule in process.SCHEDULES.items():
        model.schedule = schedule
        ctx = context_of(model, Inputs(torch.full((4, 20), -1), CounterRNG(SEED, torch.arange(4))))
        t = ctx.time(share)
        assert torch.allclose(schedule.signal(t)[1:-1], share[1:-1], atol=1e-12), name
        assert (float(t[0]), float(t[-1])) == pytest.approx((1.0, process.EPS), abs=1e-12)
        state = State(0, ctx.noise())
        (features,) = ctx.call(state, state.tokens, t)
        for row in range(4):
            alone = model.backbone(ModelInput(state.tokens[row : row + 1], float(t[row])))
            assert torch.equal(features.values[row], alone[0])
        transition = Native(nfe=4).transition(ctx, state, ctx.free, ctx.no_positions)
        with pytest.raises(LimpetError, match="the coins of one time"):
            ctx.call(state, state.tokens, t, transition)


# The distribution of the trapezoidal rule

SIZE, LENGTH = 3, 5
STATES = sequences(SIZE, LENGTH)  # (243, 5)


def leap(rates: np.ndarray, span: float) -> Tensor:
    """The distributions of the tokens after a leap, from rates (..., 243, 5, 3) away from each state."""
    total = rates.sum(-1, keepdims=True)
    stays = np.exp(-total * span)
    return torch.from_numpy((1 - stays) * rates / np.where(total > 0, total, 1) + stays * np.eye(SIZE)[STATES])


def mixed(mass: Tensor, distributions: Tensor) -> Tensor:
    """(243,): independent tokens with distributions (..., 5, 3), mixed by mass (...). The first positions are combined
    with the others by one product, so that no joint distribution is computed for each part of the mixture."""
    distributions = distributions.flatten(0, -3)
    ahead, behind = product(distributions[:, :2]), product(distributions[:, 2:])
    return ((mass.flatten()[:, None] * ahead).T @ behind).flatten()


def by_token(rates: Callable[[int], Any]) -> np.ndarray:
    """(..., 243, 5, 3) from a function of the token at a position, evaluated for the token of each state."""
    every = [np.stack(rates(z), -1) for z in range(SIZE)]
    return np.choose(STATES.numpy()[..., None], every)


def rates_at(t: float) -> np.ndarray:
    """(243, 5, 3): the rates of every state, from the functions of the transcription."""
    probs = np.moveaxis(probs_at(chain(LENGTH), STATES, 1 - 0.999 * t).numpy(), -1, 0)
    return by_token(lambda z: written.reverse_rates(probs, z, t))


def second_rates(first: np.ndarray, second: np.ndarray, theta: float) -> np.ndarray:
    """(243, 243, 5, 3): by the state before the first leap, and the state after it."""
    early, late = (np.moveaxis(rates, -1, 0) for rates in np.broadcast_arrays(first[:, None], second))
    return by_token(lambda z: written.extrapolated(early, late, z, theta))


@cache
def trapezoidal_distribution(nfe: int, theta: float = 0.5) -> Tensor:
    """(243,): the output distribution on a uniform grid with an odd number of calls and a sampled final step."""
    source, mass = chain(LENGTH), torch.full((len(STATES),), 1 / len(STATES), dtype=torch.float64)
    nodes = plain.grid((nfe + 1) // 2, 0.0, "uniform")
    for t, s in pairwise(nodes):
        inside = t - theta * (t - s)
        first, second = rates_at(t), rates_at(inside)
        between = mass[:, None] * product(leap(first, t - inside))
        mass = mixed(between, leap(second_rates(first, second, theta), inside - s))
    signal = 1 - 0.999 * nodes[-1]
    return mass @ product(process.posterior(probs_at(source, STATES, signal), STATES, signal))


CHANGES = {
    "tau-leaping": lambda jumps: jumps * np.exp(-jumps),
    "first-jump": lambda jumps: 1 - np.exp(-jumps),
    "euler": lambda jumps: np.minimum(jumps, 1),
}


def leaping_distribution(source: Denoiser, sampler: Sampler) -> Tensor:
    """(243,): the output distribution of tau-leaping, with or without corrections, by its rates."""
    assert isinstance(sampler, TauLeaping)
    times, last = sampler.times, sampler.nfe - 1
    mass = torch.full((len(STATES),), 1 / len(STATES), dtype=torch.float64)
    own = torch.nn.functional.one_hot(STATES, SIZE).double()
    for r, t in enumerate(times):
        predicted = probs_at(source, STATES, 1 - 0.999 * t)
        moves = np.array([i % 2 == r % 2 or not sampler.interleave for i in range(LENGTH)])[:, None]
        since = times[max(0, r - sampler.interleave)]
        if r == last:
            clean = process.posterior(predicted, STATES, 1 - 0.999 * since)
            return mass @ product(torch.where(torch.from_numpy(moves), clean, own))
        probs = np.moveaxis(predicted.numpy(), -1, 0)
        rates, span = by_token(lambda z: written.reverse_rates(probs, z, since)), since - times[r + 1]  # noqa: B023
        if t == times[r + 1]:  # a correction
            span = sampler.span * (t - next(s for s in times[r:] if s < t))
            rates = rates + (1 - own.numpy()) * 0.999 / (SIZE * (1 - 0.999 * t))
        total = rates.sum(-1, keepdims=True)
        change = CHANGES[sampler.rule](total * span) * moves
        mass = mass @ product(
            torch.from_numpy(change * rates / np.where(total > 0, total, 1) + (1 - change) * own.numpy())
        )
    raise AssertionError


@pytest.mark.parametrize(
    "sampler",
    [
        TauLeaping(nfe=6, grid="uniform"),
        TauLeaping(nfe=6, rule="euler", interleave=True),
        ForwardBackward(nfe=7, corrections=2, span=0.5, rule="first-jump"),
    ],
    ids=lambda sampler: sampler.caption,
)
def test_leaps_have_that_distribution(sampler: Sampler) -> None:
    n = 20_000
    out = limpet.sample(chain(LENGTH), sampler, n=n, batch_size=n).tokens
    counts = torch.bincount((out * SIZE ** torch.arange(LENGTH - 1, -1, -1)).sum(-1), minlength=SIZE**LENGTH)
    assert literal.chi_square(counts.numpy(), leaping_distribution(chain(LENGTH), sampler).numpy()) > 1e-3


def test_a_correction_keeps_the_distribution_at_its_noise_level_as_its_span_falls() -> None:
    """One leap at both rates changes the true distribution by the square of its span."""
    source, t = chain(LENGTH), 0.4
    signal = 1 - 0.999 * t
    probs = truth(source) @ product(process.forward_probs(STATES, signal, SIZE))
    rates = rates_at(t) + (1 - np.eye(SIZE)[STATES]) * 0.999 / (SIZE * signal)
    far = [float((probs @ product(leap(rates, span)) - probs).abs().sum()) for span in (0.02, 0.01, 0.005)]
    assert all(later < 0.3 * before for before, later in pairwise(far))
    reverse = float((probs @ product(leap(rates_at(t), 0.01)) - probs).abs().sum())
    assert far[1] < 0.05 * reverse


def test_the_trapezoidal_sampler_has_that_distribution() -> None:
    sampler, n = Trapezoidal(nfe=5, grid="uniform"), 20_000
    out = limpet.sample(chain(LENGTH), sampler, n=n, batch_size=n).tokens
    counts = torch.bincount((out * SIZE ** torch.arange(LENGTH - 1, -1, -1)).sum(-1), minlength=SIZE**LENGTH)
    assert literal.chi_square(counts.numpy(), trapezoidal_distribution(5).numpy()) > 1e-3
