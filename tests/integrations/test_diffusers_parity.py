"""limpet's samplers against diffusers' token schedulers, on the same logits and, where they draw, the same uniforms."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import limpet
from limpet import BlockRefinement, EntropyBound, Gibbs, Sampler
from limpet.diffusion import process, transitions
from limpet.diffusion.backends import inverse_cdf
from limpet.diffusion.rng import CounterRNG, Purpose, uniform_token
from limpet.generation import Step
from limpet.models import Denoiser, ModelInput
from limpet.samplers import State

diffusers = pytest.importorskip("diffusers", minversion="0.42")

VOCAB, LENGTH, SAMPLES, SEED = 11, 24, 6, 8200


class Logits(Denoiser):
    """Logits that depend on the neighbours, of several sharpnesses, and not on the time."""

    vocab_size, length, name, digest = VOCAB, LENGTH, "logits", "logits"

    def __init__(self, sharpness: float = 2.0, predicts: Any = "leave-one-out") -> None:
        generator = torch.Generator().manual_seed(5)
        self.table = sharpness * torch.randn(2, VOCAB, VOCAB, generator=generator)
        self.scale = torch.rand(LENGTH, 1, generator=generator) * 2
        self.predicts = predicts

    def backbone(self, inputs: ModelInput) -> Tensor:
        before, after = inputs.tokens.roll(1, 1), inputs.tokens.roll(-1, 1)
        return self.scale * (self.table[0, before] + self.table[1, after])

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


def trajectory(model: Denoiser, sampler: Sampler) -> Iterator[tuple[CounterRNG, State, Step]]:
    """Every step, with the random numbers and the state before it."""
    rng, state = CounterRNG(SEED, torch.arange(SAMPLES)), None
    for step in limpet.steps(model, sampler, SAMPLES, SEED, trace=False):
        yield rng, sampler.init(step.context) if state is None else state, step
        state = step.state


@pytest.mark.parametrize("bound", [0.0, 0.1, 3.0, 1000.0])
@pytest.mark.parametrize("temperatures", [(0.8, 0.4), (1.0, 1.0)])
def test_entropy_bound(bound: float, temperatures: tuple[float, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """In every call: what is accepted, what is drawn, the next state. The last call of ours returns the argmax."""
    first, last = temperatures
    model, nfe = Logits(), 9
    ours = EntropyBound(nfe=nfe, bound=bound, first_temperature=first, last_temperature=last, settled=None)
    theirs = diffusers.EntropyBoundScheduler(entropy_bound=bound, t_max=first, t_min=last)
    theirs.set_timesteps(nfe)
    counts = set()
    for rng, before, step in trajectory(model, ours):
        with draws(rng, step.call, monkeypatch):
            output = theirs.step(model.logits(before.tokens, step.t), step.call, before.tokens)
        if step.call < nfe - 1:
            assert torch.equal(step.masks["accepted"], output.accepted_index)
            assert torch.equal(step.tokens, output.prev_sample)
        else:
            assert torch.equal(step.tokens, output.pred_logits.argmax(-1))
        counts |= set(output.accepted_index.sum(-1).tolist())
    assert counts == ({1} if bound == 0 else {LENGTH} if bound == 1000 else counts)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
@pytest.mark.parametrize(("threshold", "editing"), [(0.95, None), (0.95, 0.9), (0.7, 0.4), (1.0, 0.2)])
def test_block_refinement(
    temperature: float, threshold: float, editing: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every call: what is committed, what is edited, the next state."""
    model, nfe = Logits(), 7
    ours = BlockRefinement(nfe=nfe, threshold=threshold, editing=editing, temperature=temperature)
    theirs = diffusers.BlockRefinementScheduler(
        block_length=LENGTH, num_inference_steps=nfe, threshold=threshold, editing_threshold=editing
    )
    theirs.set_timesteps(nfe)
    edits = 0
    for rng, before, step in trajectory(model, ours):
        logits = model.logits(before.tokens, step.t)
        with draws(rng, step.call, monkeypatch):
            output = theirs.step(logits, step.call, before.tokens, mask_token_id=None, temperature=temperature)
        assert torch.equal(step.masks["chosen"], output.transfer_index)
        assert torch.equal(step.masks["edited"], output.editing_transfer_index)
        assert torch.equal(step.tokens, output.prev_sample)
        edits += int(output.editing_transfer_index.sum())
    assert step.state.memory[0].all()
    assert (edits > 0) == (editing is not None)


def probs_of(scheduler: Any, logits: Tensor, call: int, tokens: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """(B, L, V): the distribution of the next token under DiscreteDDIM at temperature 1, summed over its draws."""
    probs = torch.zeros(*tokens.shape, VOCAB, dtype=torch.float64)
    for clean in range(VOCAB):
        weights_of: list[Tensor] = []

        def multinomial(weights: Tensor, num_samples: int, generator: Any = None, x: int = clean) -> Tensor:
            weights_of.append(weights)  # noqa: B023  of the clean tokens, then of the three routes
            return torch.full((len(weights), 1), x if len(weights_of) == 1 else 0)  # noqa: B023

        with monkeypatch.context() as patched:
            patched.setattr(torch, "multinomial", multinomial)
            scheduler.step(logits, call, tokens, temperature=1.0)
        x0 = weights_of[0][:, clean].view_as(tokens).double()
        route = weights_of[1].view(*tokens.shape, 3).double()
        probs[..., clean] += x0 * route[..., 0]
        probs.scatter_add_(-1, tokens[..., None], (x0 * route[..., 1])[..., None])
        probs += (x0 * route[..., 2])[..., None] / VOCAB
    return probs


@pytest.mark.parametrize("call", range(8))
def test_discrete_ddim_is_ancestral_for_posterior_logits_alone(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At temperature 1, it has the distribution of the native step if its logits are those of the posterior. From
    leave-one-out logits it has another one, as soon as a token is any evidence."""
    scheduler = diffusers.DiscreteDDIMScheduler(num_inference_steps=8)
    scheduler.set_timesteps(8)
    signal_t, signal_s = call / 8, (call + 1) / 8
    tokens = torch.randint(VOCAB, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(call))
    h = Logits().logits(tokens, 0.5).double().softmax(-1)
    native = transitions.probs(h, tokens, transitions.psi(max(signal_t, 1e-12), signal_s, 1.0))
    posterior = process.posterior(h, tokens, signal_t)
    assert torch.allclose(probs_of(scheduler, posterior.log(), call, tokens, monkeypatch), native, atol=1e-6)
    distance = (probs_of(scheduler, h.log(), call, tokens, monkeypatch) - native).abs().sum(-1).max() / 2
    assert (float(distance) > 0.05) == (call > 0)


@pytest.mark.parametrize("predicts", ["leave-one-out", "posterior"])
@pytest.mark.parametrize("tau", [1.0, 0.2])
def test_the_informed_corrector(predicts: Any, tau: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The positions that the same Gumbel numbers choose, and the distributions that are drawn there. Theirs converts
    the logits of a posterior to leave-one-out."""
    model = Logits(sharpness=0.7, predicts=predicts)
    ours = Gibbs(nfe=7, corrections=1, positions=5, choose="margin", tau=tau)
    theirs = diffusers.DiscreteDDIMScheduler(corrector_steps=1, corrector_k=5, corrector_selection_tau=tau)
    corrections = 0
    for rng, before, step in trajectory(model, ours):
        _, correction = ours.scheduled(step.call)
        if correction is None:
            continue
        uniforms, _ = rng.uniforms(ours.inner.nfe + correction, torch.arange(LENGTH), Purpose.POSITIONS)
        signal = model.schedule.level(step.t)
        logits = model.logits(before.tokens, step.t).double()
        if predicts == "leave-one-out":
            logits = process.posterior(logits.softmax(-1), before.tokens, signal).log()
        chosen, probs = corrected(theirs, logits, before.tokens, signal, uniforms, monkeypatch)
        assert torch.equal(chosen, step.masks["corrected"])
        assert torch.equal(step.tokens[~chosen], before.tokens[~chosen])
        h = process.leave_one_out(logits.softmax(-1), before.tokens, signal)
        redrawn = transitions.probs(h, before.tokens, transitions.redraw(signal))
        for ours_of_row, theirs_of_row in zip(redrawn, probs, strict=True):
            for one in theirs_of_row:  # in the order in which the positions were chosen
                assert float((ours_of_row - one).abs().sum(-1).min()) < 1e-9
        corrections += 1
    assert corrections == 3


def corrected(
    theirs: Any, logits: Tensor, tokens: Tensor, signal: float, uniforms: Tensor, monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, Tensor]:
    """Their correction: (B, L) bool, where it redraws, and (B, K, V) the distributions there."""
    chosen, distributions = [], []
    select = theirs._select_positions

    def multinomial(weights: Tensor, num_samples: int, generator: Any = None) -> Tensor:
        distributions.append(weights)
        return torch.zeros(len(weights), 1, dtype=torch.long)

    with monkeypatch.context() as patched:
        patched.setattr(type(theirs), "_alpha", lambda self, step: signal)
        patched.setattr(torch, "rand", lambda *size, device=None, generator=None: uniforms.clone())
        patched.setattr(torch, "multinomial", multinomial)
        patched.setattr(theirs, "_select_positions", lambda *arguments: chosen.append(select(*arguments)) or chosen[-1])
        theirs.step_correct(logits, 0, tokens)
    where = torch.zeros_like(tokens, dtype=torch.bool).scatter(-1, chosen[0], True)
    return where, distributions[0].view(SAMPLES, -1, VOCAB)


def test_the_conversion_to_leave_one_out_logits_is_the_same() -> None:
    tokens = torch.randint(VOCAB, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    logits = Logits().logits(tokens, 0.5).double()
    for signal in (0.01, 0.5, 0.99):
        theirs = diffusers.DiscreteDDIMScheduler._to_loo_logits(logits, tokens, signal)
        assert torch.equal(process.leave_one_out_logits(logits, tokens, signal), theirs)
        each = torch.full((SAMPLES, 1), signal, dtype=torch.float64)
        assert torch.allclose(process.leave_one_out_logits(logits, tokens, each), theirs, atol=1e-12)
        assert math.isfinite(float(theirs.sum()))
