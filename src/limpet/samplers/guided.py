"""Classifier-free guidance for given tokens: distributions are led away from what the denoiser says without them."""

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


class Unguided(NamedTuple):
    """What the second call of a step must know of the first; nothing is remembered between steps."""

    values: Tensor  # (B, L, D) what the body made of the state without its given tokens


@dataclass(frozen=True)
class Guided(Native):
    """Native steps of two calls each. The first sees the state with its given tokens noised, the second as it is; the
    step draws by the second's distribution to the power 1 + weight over the first's to the power weight (arXiv 2207.12598; for
    discrete states 2412.10193). At weight 0 the states are those of the native sampler with half the calls.

    The last call of an odd nfe stands alone: it reads out the distribution as it is."""

    needs_fixed: ClassVar[bool] = True

    nfe: int = param(64, "Network calls for one sample: two for each reverse step, and one or two to read out.", low=3)
    weight: float = param(1.0, "How far distributions are led away from those without the given tokens; 0 for not at all.", low=0,
                         high=1e3)  # fmt: skip
    without: Literal["level", "uniform"] = param("level", "What stands in the place of a given token in the first call: "
                                                "that token at the path's level of noise, or any token.")  # fmt: skip

    @property
    def inner(self) -> Native:
        """The sampler whose steps are guided."""
        own = {name: getattr(self, name) for name in Native.__dataclass_fields__}
        return Native(**{**own, "nfe": (self.nfe + 1) // 2})

    @property
    def times(self) -> tuple[float, ...]:
        """Of every call, the final step's last."""
        return tuple(t for t in self.inner.times for _ in range(2))[: self.nfe]

    def init(self, ctx: Context) -> State:
        if ctx.free.all(-1).any():
            raise LimpetError(f"{self.name} has nothing to guide by: give a prefix or fixed tokens, or sample natively")
        return super().init(ctx)

    def step(self, ctx: Context, state: State) -> tuple[State, StepInfo]:
        t, alone = self.times[state.call], self.nfe % 2 == 1 and state.call == self.nfe - 1
        if not state.memory and not alone:
            seen = self.unguided(ctx, state)
            (features,) = ctx.call(state, seen, t, clean=ctx.no_positions)  # the given tokens too are noise
            unread = torch.full_like(seen, torch.inf, dtype=torch.double)
            info = StepInfo(state.call, t, seen, Outcome(state.tokens, torch.zeros_like(seen), unread, None),
                        {"noised": ~ctx.free})  # fmt: skip
            return state.next(state.tokens, features, Unguided(features.values.clone())), info
        step, inner = State(state.call // 2, state.tokens), self.inner
        blend = None if alone else Blend(state.memory[0], self.weight)
        transition = inner.transition(ctx, step, ctx.free, ctx.no_positions)
        features, outcome = ctx.call(state, state.tokens, t, transition, blend=blend)
        info = StepInfo(state.call, t, state.tokens, outcome, {"noised": ctx.no_positions})
        return state.next(inner.read(ctx, step, outcome), features), info

    def unguided(self, ctx: Context, state: State) -> Tensor:
        """(B, L) the state, its given tokens noised."""
        keeps, u = ctx.rng.uniforms(state.call, positions(state.tokens), Purpose.NOISE)
        kept = ctx.free | (keeps < (ctx.signal(self.times[state.call]) if self.without == "level" else 0))
        return torch.where(kept, state.tokens, uniform_token(u, ctx.model.vocab_size))
