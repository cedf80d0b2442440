"""The theta-trapezoidal rule: two leaps per step, the second with rates that correct the error of the first."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from limpet.diffusion import process
from limpet.diffusion.backends import inverse_cdf, positions
from limpet.diffusion.rng import Purpose
from limpet.errors import LimpetError
from limpet.samplers.base import Context, Features, State, StepInfo
from limpet.samplers.native import Native
from limpet.samplers.params import param
from limpet.samplers.tau_leaping import outcome_of, reverse_rates


class FirstLeap(NamedTuple):
    """What the second call of a step reads of the first. Nothing is stored between steps."""

    before: Tensor  # (B, L) the state at the start of the step
    values: Tensor  # (B, L, D) its features


class LeapCall(NamedTuple):
    """A call whose distributions a leap reads."""

    call: int
    tokens: Tensor  # (B, L) the model input
    features: Features


@dataclass(frozen=True)
class Trapezoidal(Native):
    """The state jumps at the rates of the reverse process, held constant during a leap.

    A step leaps theta of its span, makes a second call, and leaps the rest at extrapolated rates (arXiv 2502.00234).

    The rate from z to y is (-a' / (a V)) p(y) / p(z), where a is the signal and p = a h + (1 - a) / V the distribution
    of the noisy token. Each step has two calls, the final step has one. An even nfe begins with one ancestral step,
    where the rates are largest."""

    theta: float = param(0.5, "Share of a step's span that its first leap takes.", above=0, high=0.99)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.interleave:
            raise LimpetError("trapezoidal has interleave True; it takes False, because a leap moves all positions")

    @property
    def times(self) -> tuple[float, ...]:
        """The time of every call: the start and an inner time of each step, then the final step's."""
        first = self.ancestral_steps
        nodes = process.GRIDS[self.grid]((self.nfe + first + 1) // 2, self.warmup)
        steps = [(t, t - self.theta * (t - s)) for t, s in pairwise(nodes)]
        return *nodes[:first], *(t for step in steps[first:] for t in step), nodes[-1]

    @property
    def ancestral_steps(self) -> int:
        """How many ancestral steps come first: one for an even nfe."""
        return 1 - self.nfe % 2

    def step(self, ctx: Context, state: State) -> tuple[State, StepInfo]:
        r = state.call
        if r < self.ancestral_steps or r == self.nfe - 1:
            return super().step(ctx, state)
        t, span = self.times[r], self.times[r] - self.times[r + 1]
        # A trace inspects the distributions too. The leap itself reads them below.
        inspections = [self.transition(ctx, state, ctx.no_positions, ctx.free)] if ctx.trace else []
        features, *outcomes = ctx.call(state, state.tokens, t, *inspections)
        tokens, free = state.tokens.clone(), ctx.free.nonzero()
        calls = self.leap_calls(ctx, state, features)
        coin, _ = ctx.rng.uniforms(r, positions(tokens), Purpose.COINS)
        u, _ = ctx.rng.uniforms(r, positions(tokens), Purpose.TOKENS)
        for pieces in zip(
            *(ctx.log_probs(one.features, free, self.temperature, one.call) for one in calls), strict=True
        ):
            here = tuple(pieces[0][0].unbind(-1))
            rates = self.rates(ctx, calls, here, [log_probs for _, log_probs in pieces])
            jumps = coin[here] < -(-rates.sum(-1) * span).expm1()
            tokens[here] = torch.where(jumps, inverse_cdf(rates, u[here]), tokens[here])
            del rates  # frees the memory before the next piece
        memory = () if state.memory else FirstLeap(state.tokens, features.values.clone())
        info = StepInfo(r, t, state.tokens, outcome_of(outcomes, tokens), {})
        return state.next(tokens, features, memory), info

    def leap_calls(self, ctx: Context, state: State, features: Features) -> list[LeapCall]:
        """The calls that a leap reads: the first one of its step, if there is one before, and the current one."""
        current = LeapCall(state.call, state.tokens, features)
        if not state.memory:
            return [current]
        before, values = state.memory
        call = state.call - 1
        return [LeapCall(call, before, Features(values, ctx.network_call(before, self.times[call]))), current]

    def rates(
        self, ctx: Context, calls: list[LeapCall], here: tuple[Tensor, ...], log_probs_by_call: list[Tensor]
    ) -> Tensor:
        """(r, V) the rates of a leap at some samples and positions; 0 at their own tokens.

        The second leap extrapolates the rates of its two calls, in place."""
        *first, rates = (
            reverse_rates(ctx, log_probs, call.tokens[here], self.times[call.call], self.support(call.call))
            for call, log_probs in zip(calls, log_probs_by_call, strict=True)
        )
        if not first:
            return rates
        less, over = (1 - self.theta) ** 2 + self.theta**2, 2 * self.theta * (1 - self.theta)
        own = calls[-1].tokens[here][:, None]
        return rates.sub_(first[0].mul_(less)).div_(over).clamp_(min=0).scatter_(-1, own, 0.0)
