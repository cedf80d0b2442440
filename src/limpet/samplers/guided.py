"""Classifier-free guidance toward the fixed tokens: predictions are moved away from those made without them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from limpet.diffusion.backends import Outcome, positions
from limpet.diffusion.rng import Purpose, uniform_token
from limpet.errors import LimpetError
from limpet.samplers.base import Blend, Context, State, StepInfo
from limpet.samplers.native import Native
from limpet.samplers.params import param


class UnguidedFeatures(NamedTuple):
    """What the second call of a step reads of the first. Nothing is stored between steps."""

    values: Tensor  # (B, L, D) the features of the state without its fixed tokens


@dataclass(frozen=True)
class Guided(Native):
    """Native steps guided toward the fixed tokens, with two calls each.

    The first call reads the state with its fixed tokens noised, the second the state itself. The step draws from the
    second distribution to the power 1 + weight over the first to the power weight (arXiv 2207.12598; for discrete
    states 2412.10193).

    At weight 0 the states are those of the native sampler with half the calls. The last call of an odd nfe is the final
    step, and reads the state itself without guidance."""

    needs_fixed: ClassVar[bool] = True

    nfe: int = param(64, "Network calls per sample: two for each reverse step, one or two for the final step.", low=3)
    weight: float = param(1.0, "Strength of the guidance; 0 for none.", low=0, high=1e3)
    without: Literal["level", "uniform"] = param(
        "level", "What replaces a fixed token in the first call: the token at the state's noise level, or any token."
    )

    @property
    def inner(self) -> Native:
        """The sampler whose steps are guided."""
        return self.as_native(nfe=(self.nfe + 1) // 2)

    @property
    def times(self) -> tuple[float, ...]:
        return tuple(t for t in self.inner.times for _ in range(2))[: self.nfe]

    def init(self, ctx: Context) -> State:
        if ctx.free.all(-1).any():
            raise LimpetError(f"{self.name} needs fixed tokens to guide by: give a prompt or fixed tokens")
        return super().init(ctx)

    def step(self, ctx: Context, state: State) -> tuple[State, StepInfo]:
        t, is_unguided = self.times[state.call], self.nfe % 2 == 1 and state.call == self.nfe - 1
        if not state.memory and not is_unguided:
            return self.first_call(ctx, state, t)
        inner, inner_state = self.inner, State(state.call // 2, state.tokens)
        blend = None if is_unguided else Blend(state.memory[0], self.weight)
        transition = inner.transition(ctx, inner_state, ctx.free, ctx.no_positions)
        features, outcome = ctx.call(state, state.tokens, t, transition, blend=blend)
        info = StepInfo(state.call, t, state.tokens, outcome, {"noised": ctx.no_positions})
        return state.next(inner.read(ctx, inner_state, outcome), features), info

    def first_call(self, ctx: Context, state: State, t: float) -> tuple[State, StepInfo]:
        """The call without fixed tokens. It changes no token."""
        keeps, u = ctx.rng.uniforms(state.call, positions(state.tokens), Purpose.NOISE)
        kept = ctx.free | (keeps < (ctx.signal(t) if self.without == "level" else 0))
        model_input = torch.where(kept, state.tokens, uniform_token(u, ctx.model.vocab_size))
        (features,) = ctx.call(state, model_input, t, clean=ctx.no_positions)  # the fixed tokens are noise, too
        not_inspected = torch.full_like(model_input, torch.inf, dtype=torch.double)
        outcome = Outcome(state.tokens, torch.zeros_like(model_input), not_inspected, None)
        info = StepInfo(state.call, t, model_input, outcome, {"noised": ~ctx.free})
        return state.next(state.tokens, features, UnguidedFeatures(features.values.clone())), info
