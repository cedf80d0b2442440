"""The step backends, the fused one by Triton's interpreter where there is no GPU, and one step on given logits."""

# ruff: noqa: E402
from __future__ import annotations

import importlib.util
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
from limpet.diffusion import process
from limpet.diffusion.backends import Backend, Head, NetworkCall, Outcome, Transition, dense, sparse, testing
from limpet.diffusion.rng import CounterRNG
from limpet.diffusion.transitions import ancestral
from limpet.diffusion.truncation import Support
from limpet.models import Denoiser, ModelInput, WrappedDenoiser

BACKENDS: dict[str, Backend] = {"dense": dense.BACKEND, "sparse": sparse.BACKEND}
if importlib.util.find_spec("triton") is not None:
    from limpet.diffusion.backends import fused

    BACKENDS["fused"] = fused.BACKEND


class Posterior(WrappedDenoiser):
    """An exact source as a model that predicts the denoising posterior."""

    def __init__(self, inner: Denoiser) -> None:
        super().__init__(inner)
        self.predicts, self.name, self.digest = "posterior", "posterior", "posterior"

    def backbone(self, inputs: ModelInput) -> Tensor:
        probs = super().backbone(inputs).exp()
        return process.posterior(probs, inputs.tokens, self.schedule.signal(inputs.t)).log()


class Case(NamedTuple):
    """One step: the transition, and the network call whose logits it reads."""

    transition: Transition
    call: NetworkCall

    def replace(self, **changes: Any) -> Case:
        """The same step with fields of the transition, its support or the network call changed.

        `signal_t` and `signal_s` set ancestral coins; `model_input` sets the tokens of the network call."""
        support = {name: changes.pop(name) for name in Support._fields if name in changes}
        signals = [changes.pop(name, None) for name in ("signal_t", "signal_s")]
        names = {field.name for field in fields(Transition)}
        transition = replace(self.transition, **{name: changes.pop(name) for name in names & set(changes)})
        transition = replace(transition, support=transition.support._replace(**support))
        if any(signals):
            transition = replace(transition, coins=ancestral(signals[0] or 0.4, signals[1] or 0.6))
        if "model_input" in changes:
            changes["tokens"] = changes.pop("model_input")
        return Case(transition, self.call._replace(**{"signal": transition.coins.signal, **changes}))


def case_of(tokens: Tensor, vocab_size: int, seed: int = 8200, **changes: Any) -> Case:
    """A step that revises and inspects every position, with its own state as model input and as `against`."""
    every = torch.ones_like(tokens, dtype=torch.bool)
    rng = CounterRNG(seed, torch.arange(len(tokens), device=tokens.device))
    transition = Transition(
        call=0, tokens=tokens, revise=every, inspect=every, coins=ancestral(0.4, 0.6), against=tokens
    )
    return Case(transition, testing.network_call(transition, vocab_size, rng)).replace(**changes)


def same(rows: Tensor) -> Tensor:
    """A head whose features are logits."""
    return rows


def step(backend: Backend, logits: Tensor, case: Case, head: Head = same) -> Outcome:
    return testing.step(backend, logits, *case, head)
