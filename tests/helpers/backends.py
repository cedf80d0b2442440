"""The step backends, the fused one by Triton's interpreter where there is no GPU, and one step on given logits."""

# ruff: noqa: E402
from __future__ import annotations

import importlib.util
import os
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined

from limpet.diffusion import process
from limpet.diffusion.backends import Backend, Head, Input, Outcome, Transition, dense, sparse, testing
from limpet.diffusion.rng import CounterRNG
from limpet.diffusion.transitions import ancestral
from limpet.diffusion.truncation import Support
from limpet.models import Denoiser

BACKENDS: dict[str, Backend] = {"dense": dense.BACKEND, "lazy": sparse.BACKEND}
if importlib.util.find_spec("triton") is not None:
    from limpet.diffusion.backends import fused

    BACKENDS["fused"] = fused.BACKEND


class Posterior(Denoiser):
    """A source seen through a model that predicts the denoising posterior of its own input."""

    predicts, name, digest = "posterior", "posterior", "posterior"

    def __init__(self, inner: Denoiser) -> None:
        self.inner, self.vocab_size, self.length = inner, inner.vocab_size, inner.length

    def body(self, tokens: Tensor, t: float | Tensor) -> Tensor:
        return process.posterior(self.inner.body(tokens, t).exp(), tokens, self.schedule.signal(t)).log()

    def head(self, features: Tensor) -> Tensor:
        return features


class Case(NamedTuple):
    """One step: what is asked of it, and what the denoiser was shown."""

    transition: Transition
    input: Input

    def replace(self, **changes: Any) -> Case:
        """The same with some things changed: fields of the transition, the two signals of ancestral coins, parts of
        the support, or what the denoiser saw (`seen`) and how it is read."""
        cut = {name: changes.pop(name) for name in Support._fields if name in changes}
        signals = [changes.pop(name, None) for name in ("signal_t", "signal_s")]
        names = {field.name for field in fields(Transition)}
        asked = replace(self.transition, **{name: value for name, value in changes.items() if name in names})
        asked = replace(asked, support=asked.support._replace(**cut))
        if any(signals) and "coins" not in changes:
            given = zip(signals, (0.4, 0.6), strict=True)
            asked = replace(asked, coins=ancestral(*(usual if own is None else own for own, usual in given)))
        shown = {"signal": asked.coins.signal, **{name: changes[name] for name in changes if name not in names}}
        if "seen" in shown:
            shown["tokens"] = shown.pop("seen")
        return Case(asked, self.input._replace(**shown))


def case_of(tokens: Tensor, vocab_size: int, seed: int = 8200, **changes: Any) -> Case:
    """A step that revises and inspects everywhere and holds the distribution against the state, of a model that saw the state,
    unless told otherwise."""
    every = torch.ones_like(tokens, dtype=torch.bool)
    rng = CounterRNG(seed, torch.arange(len(tokens), device=tokens.device))
    asked = Transition(call=0, tokens=tokens, revise=every, inspect=every, coins=ancestral(0.4, 0.6), against=tokens)
    return Case(asked, testing.input_of(asked, vocab_size, rng)).replace(**changes)


def same(rows: Tensor) -> Tensor:
    return rows


def step(backend: Backend, logits: Tensor, case: Case, head: Head = same) -> Outcome:
    return testing.step(backend, logits, *case, head)
