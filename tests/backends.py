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

from limpet.engine.steps import Backend, Head, Input, Outcome, Transition, dense, lazy, trial
from limpet.engine.streams import Stream

BACKENDS: dict[str, Backend] = {"dense": dense.BACKEND, "lazy": lazy.BACKEND}
if importlib.util.find_spec("triton") is not None:
    from limpet.engine.steps import fused

    BACKENDS["fused"] = fused.BACKEND


class Case(NamedTuple):
    """One step: what is asked of it, and what the denoiser was shown."""

    transition: Transition
    input: Input

    def but(self, **changes: Any) -> Case:
        """The same with some things changed; `seen` is what the denoiser saw."""
        names = {field.name for field in fields(Transition)}
        asked = replace(self.transition, **{name: value for name, value in changes.items() if name in names})
        shown = {"signal": asked.signal_t, **{name: changes[name] for name in changes if name not in names}}
        if "seen" in shown:
            shown["tokens"] = shown.pop("seen")
        return Case(asked, self.input._replace(**shown))


def case_of(tokens: Tensor, vocab_size: int, seed: int = 8200, **changes: Any) -> Case:
    """A step that revises and inspects everywhere, of a model that saw the state, unless told otherwise."""
    every = torch.ones_like(tokens, dtype=torch.bool)
    stream = Stream(seed, torch.arange(len(tokens), device=tokens.device))
    asked = Transition(call=0, tokens=tokens, revise=every, inspect=every, signal_t=0.4, signal_s=0.6)
    return Case(asked, trial.input_of(asked, vocab_size, stream)).but(**changes)


def same(rows: Tensor) -> Tensor:
    return rows


def step(backend: Backend, logits: Tensor, case: Case, head: Head = same) -> Outcome:
    return trial.step(backend, logits, *case, head)
