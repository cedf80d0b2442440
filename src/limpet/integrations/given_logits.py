"""One call of a sampler on logits that another library has computed: what the integrations of engines share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from limpet.diffusion.process import LINEAR, inferred_signal
from limpet.diffusion.rng import CounterRNG
from limpet.errors import LimpetError
from limpet.generation import Inputs, context_of, rollout
from limpet.models import Denoiser, ModelInput
from limpet.samplers import Sampler, State


class GivenLogits(Denoiser):
    """The logits (B, L, V) of an engine's network as a denoiser. The network is not given the time.

    The engine itself gives the network its previous prediction."""

    name, digest, schedule, predicts = "the engine's model", "the engine's model", LINEAR, "posterior"
    self_conditioned = True

    def __init__(self, logits: Tensor) -> None:
        self.computed = logits
        self.length, self.vocab_size = int(logits.shape[1]), int(logits.shape[2])
        self.device = logits.device

    def backbone(self, inputs: ModelInput) -> Tensor:
        return self.computed

    def head(self, features: Tensor) -> Tensor:
        return features

    def evidence_signal(self, signal: float | Tensor, clean_share: Tensor) -> float | Tensor:
        return inferred_signal(signal, clean_share)


class Advanced(NamedTuple):
    """What a call of a sampler leads to."""

    state: State
    canvas: Tensor  # (B, L) what the network reads next; after the last call, the output
    finished: Tensor  # (B,) bool: samples that no later call changes
    temperature: float  # at which the sampler read the logits; the next call's self-conditioning uses it too
    committed: Tensor  # (B, L) bool: where a token is committed


def check_sampler(sampler: Sampler) -> Sampler:
    """Raise unless a sampler can run on logits that are given to it."""
    if sampler.needs_fixed:
        raise LimpetError(f"{sampler.name} needs fixed tokens, and an engine's canvas has none: use another sampler")
    return sampler


def first_state(sampler: Sampler, rng: CounterRNG, length: int, vocab_size: int) -> State:
    """The state before the first call of a canvas of so many tokens."""
    shape = (len(rng.samples), length)
    model = GivenLogits(torch.zeros((), device=rng.samples.device).expand(*shape, vocab_size))
    with torch.inference_mode():
        return sampler.init(context_of(model, _inputs(rng, shape)))


def advance(sampler: Sampler, state: State, rng: CounterRNG, logits: Tensor) -> Advanced:
    """Go on by one call, given the logits (B, L, V) of a network that read `sampler.model_input(state)`."""
    (step,) = rollout(GivenLogits(logits), sampler, _inputs(rng, logits.shape[:2]), state, state.call + 1)
    assert step.state.previous is not None
    state, temperature = step.state._replace(previous=None), step.state.previous.temperature
    is_last = state.call == sampler.nfe
    finished = torch.full_like(sampler.finished(state), True) if is_last else sampler.finished(state)
    canvas = state.tokens if is_last else torch.where(finished[:, None], state.tokens, sampler.model_input(state))
    committed = (
        step.committed | step.masks.get("chosen", step.committed) if "committed" in step.masks else step.committed
    )
    return Advanced(state, canvas, finished, temperature, committed)


def _inputs(rng: CounterRNG, shape: tuple[int, ...]) -> Inputs:
    return Inputs(torch.full(tuple(shape), -1, device=rng.samples.device), rng)
