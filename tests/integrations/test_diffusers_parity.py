"""Where the original is a library, it runs beside ours: diffusers' token schedulers, on the same logits and, where
they draw, on the same uniforms (their draws are replaced by ours, one uniform a draw)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import limpet
from limpet import BlockRefinement, EntropyBound, Gibbs, Sampler
from limpet.diffusion import process, transitions
from limpet.diffusion.backends import inverse_cdf, positions
from limpet.diffusion.rng import CounterRNG, Purpose, uniform_token
from limpet.models import Denoiser
from limpet.samplers.context import State, StepInfo, generate, open_context

diffusers = pytest.importorskip("diffusers", minversion="0.42")

VOCAB, LENGTH, SAMPLES, SEED = 11, 24, 6, 8200


class Logits(Denoiser):
    """Logits of the neighbours, of several sharpnesses; they know no time, so what a sampler tells does not matter."""

    vocab_size, length, name, digest = VOCAB, LENGTH, "logits", "logits"

    def __init__(self, sharpness: float = 2.0, predicts: Any = "leave-one-out") -> None:
        generator = torch.Generator().manual_seed(5)
        self.table = sharpness * torch.randn(2, VOCAB, VOCAB, generator=generator)
        self.scale = torch.rand(LENGTH, 1, generator=generator) * 2
        self.predicts = predicts

    def body(self, tokens: Tensor, t: float | Tensor) -> Tensor:
        return self.scale * (self.table[0, tokens.roll(1, 1)] + self.table[1, tokens.roll(-1, 1)])

    def head(self, features: Tensor) -> Tensor:
        return features


@contextmanager
def draws(rng: CounterRNG, call: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A categorical draw takes the first uniform of the call's tokens, a uniform token the second."""
    first, second = rng.uniforms(call, torch.arange(LENGTH), Purpose.TOKENS)

    def multinomial(weights: Tensor, num_samples: int, generator: Any = None) -> Tensor:
        assert num_samples == 1
        return inverse_cdf(weights, first.flatten())[:, None]

    def randint(low: int, high: int, size: Any, device: Any = None, generator: Any = None) -> Tensor:
        assert (low, tuple(size)) == (0, tuple(second.shape))
        return uniform_token(second, high)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "multinomial", multinomial)
        patched.setattr(torch, "randint", randint)
        yield


def walked(model: Denoiser, sampler: Sampler) -> tuple[CounterRNG, State, list[tuple[State, StepInfo]]]:
    rng = CounterRNG(SEED, torch.arange(SAMPLES))
    ctx = open_context(model, rng, torch.full((SAMPLES, LENGTH), -1))
    return rng, sampler.begin(ctx), list(generate(sampler, ctx))


@pytest.mark.parametrize("bound", [0.0, 0.1, 3.0, 1000.0])
@pytest.mark.parametrize("temperatures", [(0.8, 0.4), (1.0, 1.0)])
def test_entropy_bound(bound: float, temperatures: tuple[float, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call but the last, in which ours reads out the argmax: what is accepted, what was drawn, the next state."""
    hottest, coldest = temperatures
    model, nfe = Logits(), 9
    ours = EntropyBound(nfe=nfe, bound=bound, hottest=hottest, coldest=coldest, settled=None)
    theirs = diffusers.EntropyBoundScheduler(entropy_bound=bound, t_max=hottest, t_min=coldest)
    theirs.set_timesteps(nfe)
    rng, state, ctx = walked(model, ours)
    counts = set()
    for after, info in ctx:
        with draws(rng, info.call, monkeypatch):
            told = theirs.step(model.logits(state.tokens, info.t), info.call, state.tokens)
        if after.call < nfe:
            assert torch.equal(info.marks["accepted"], told.accepted_index)
            assert torch.equal(after.tokens, told.prev_sample)
        else:
            assert torch.equal(after.tokens, told.pred_logits.argmax(-1))
        counts |= set(told.accepted_index.sum(-1).tolist())
        state = after
    assert counts == ({1} if bound == 0 else {LENGTH} if bound == 1000 else counts)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
@pytest.mark.parametrize(("threshold", "editing"), [(0.95, None), (0.95, 0.9), (0.7, 0.4), (1.0, 0.2)])
def test_block_refinement(
    temperature: float, threshold: float, editing: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call: what is committed, what is edited, the next state; theirs remembers by itself."""
    model, nfe = Logits(), 7
    ours = BlockRefinement(nfe=nfe, threshold=threshold, editing=editing, temperature=temperature)
    theirs = diffusers.BlockRefinementScheduler(
        block_length=LENGTH, num_inference_steps=nfe, threshold=threshold, editing_threshold=editing
    )
    theirs.set_timesteps(nfe)
    rng, state, ctx = walked(model, ours)
    edits = 0
    for after, info in ctx:
        with draws(rng, info.call, monkeypatch):
            told = theirs.step(
                model.logits(state.tokens, info.t), info.call, state.tokens, mask_token_id=None, temperature=temperature
            )
        assert torch.equal(info.marks["chosen"], told.transfer_index)
        assert torch.equal(info.marks["edited"], told.editing_transfer_index)
        assert torch.equal(after.tokens, told.prev_sample)
        edits += int(told.editing_transfer_index.sum())
        state = after
    assert state.memory[0].all()
    assert (edits > 0) == (editing is not None)


def probs_of(scheduler: Any, logits: Tensor, call: int, tokens: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """(B, L, V): the distribution of the next token under DiscreteDDIM at temperature 1, every draw of it summed out."""
    probs = torch.zeros(*tokens.shape, VOCAB, dtype=torch.float64)
    for clean in range(VOCAB):
        seen: list[Tensor] = []

        def multinomial(weights: Tensor, num_samples: int, generator: Any = None, x: int = clean) -> Tensor:
            seen.append(weights)  # noqa: B023  the clean tokens' distribution, then that of the three routes
            return torch.full((len(weights), 1), x if len(seen) == 1 else 0)  # noqa: B023

        with monkeypatch.context() as patched:
            patched.setattr(torch, "multinomial", multinomial)
            scheduler.step(logits, call, tokens, temperature=1.0)
        x0, route = seen[0][:, clean].view_as(tokens).double(), seen[1].view(*tokens.shape, 3).double()
        probs[..., clean] += x0 * route[..., 0]
        probs.scatter_add_(-1, tokens[..., None], (x0 * route[..., 1])[..., None])
        probs += (x0 * route[..., 2])[..., None] / VOCAB
    return probs


@pytest.mark.parametrize("call", range(8))
def test_discrete_ddim_is_ancestral_for_posterior_logits_alone(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At temperature 1, on the posterior that a leave-one-out distribution makes of its token, it has the native step's distribution;
    given the leave-one-out distribution itself it has another, once a token is any evidence."""
    scheduler = diffusers.DiscreteDDIMScheduler(num_inference_steps=8)
    scheduler.set_timesteps(8)
    signal_t, signal_s = call / 8, (call + 1) / 8
    tokens = torch.randint(VOCAB, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(call))
    h = Logits().logits(tokens, 0.5).double().softmax(-1)
    native = transitions.probs(h, tokens, transitions.psi(max(signal_t, 1e-12), signal_s, 1.0))
    posterior = process.posterior(h, tokens, signal_t)
    assert torch.allclose(probs_of(scheduler, posterior.log(), call, tokens, monkeypatch), native, atol=1e-6)
    apart = (probs_of(scheduler, h.log(), call, tokens, monkeypatch) - native).abs().sum(-1).max() / 2
    assert (float(apart) > 0.05) == (call > 0)


def test_discrete_ddim_by_default_bridges_to_the_argmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its default temperature 0 the last call takes the argmax: ours does, read out so."""
    scheduler, model = diffusers.DiscreteDDIMScheduler(num_inference_steps=8), Logits()
    scheduler.set_timesteps(8)
    rng, _, ctx = walked(model, limpet.Native(nfe=8))
    before, (after, _) = ctx[-2][0], ctx[-1]
    with draws(rng, 7, monkeypatch):
        told = scheduler.step(model.logits(before.tokens, 0.0), 7, before.tokens)
    assert torch.equal(after.tokens, told.prev_sample)


@pytest.mark.parametrize("predicts", ["leave-one-out", "posterior"])
@pytest.mark.parametrize("tau", [1.0, 0.2])
def test_the_informed_corrector(predicts: Any, tau: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions by the same Gumbel numbers, and the distributions that they are redrawn from. Theirs takes the logits of a
    posterior, and takes each token's own evidence out of them."""
    model = Logits(sharpness=0.7, predicts=predicts)
    ours = Gibbs(nfe=7, corrections=1, positions=5, choose="margin", tau=tau)
    theirs = diffusers.DiscreteDDIMScheduler(corrector_steps=1, corrector_k=5, corrector_selection_tau=tau)
    rng, state, ctx = walked(model, ours)
    corrected = 0
    for after, info in ctx:
        _, correction = ours.due(info.call)
        if correction is not None:
            corrected += 1
            check_correction(model, theirs, rng, state, after, info, ours.inner.nfe + correction, monkeypatch)
        state = after
    assert corrected == 3


def check_correction(
    model: Logits, theirs: Any, rng: CounterRNG, before: State, after: State, info: StepInfo, number: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    signal = model.schedule.level(info.t)
    logits = model.logits(before.tokens, info.t).double()
    if model.predicts == "leave-one-out":
        logits = process.posterior(logits.softmax(-1), before.tokens, signal).log()
    places, _ = rng.uniforms(number, positions(before.tokens), Purpose.PLACES)
    distributions: list[Tensor] = []

    def multinomial(weights: Tensor, num_samples: int, generator: Any = None) -> Tensor:
        distributions.append(weights)
        return torch.zeros(len(weights), 1, dtype=torch.long)

    with monkeypatch.context() as patched:
        patched.setattr(type(theirs), "_alpha", lambda self, step: signal)
        patched.setattr(torch, "rand", lambda *size, device=None, generator=None: places.clone())
        patched.setattr(torch, "multinomial", multinomial)
        chosen = _chosen(theirs, logits, before.tokens)
    assert torch.equal(chosen, info.marks["corrected"])
    assert torch.equal(after.tokens[~chosen], before.tokens[~chosen])
    h = process.leave_one_out(logits.softmax(-1), before.tokens, signal)
    redrawn = transitions.probs(h, before.tokens, transitions.redraw(signal))
    for rows, probs in zip(redrawn, distributions[0].view(SAMPLES, -1, VOCAB), strict=True):
        for one in probs:  # in whichever order positions were chosen
            assert float((rows - one).abs().sum(-1).min()) < 1e-9


def _chosen(theirs: Any, logits: Tensor, tokens: Tensor) -> Tensor:
    """(B, L) bool: where it redraws."""
    found: list[Tensor] = []
    select: Callable[..., Tensor] = type(theirs)._select_positions

    def noted(*arguments: Any) -> Tensor:
        found.append(select(theirs, *arguments))
        return found[-1]

    theirs._select_positions = noted
    theirs.step_correct(logits, 0, tokens)
    del theirs._select_positions
    return torch.zeros_like(tokens, dtype=torch.bool).scatter(-1, found[0], True)


def test_taking_a_tokens_own_evidence_out_is_the_same() -> None:
    tokens = torch.randint(VOCAB, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    logits = Logits().logits(tokens, 0.5).double()
    for signal in (0.01, 0.5, 0.99):
        theirs = diffusers.DiscreteDDIMScheduler._to_loo_logits(logits, tokens, signal)
        assert torch.equal(process.leave_one_out_logits(logits, tokens, signal), theirs)
        each = torch.full((SAMPLES, 1), signal, dtype=torch.float64)
        assert torch.allclose(process.leave_one_out_logits(logits, tokens, each), theirs, atol=1e-12)
        assert math.isfinite(float(theirs.sum()))
