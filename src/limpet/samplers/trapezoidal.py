"""The theta-trapezoidal rule: two leaps a step, the second with rates that the first one's error is taken out of."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from limpet.diffusion import process, truncation
from limpet.diffusion.backends import Outcome, inverse_cdf, positions
from limpet.diffusion.rng import Purpose
from limpet.errors import LimpetError
from limpet.samplers.base import Context, Features, State, StepInfo
from limpet.samplers.native import Native
from limpet.samplers.params import param


class Leapt(NamedTuple):
    """What the second call of a step must know of the first; nothing is remembered between steps."""

    before: Tensor  # (B, L) the state that the step began with
    values: Tensor  # (B, L, D) what the body made of it


class Asked(NamedTuple):
    """A call whose distributions a leap reads."""

    call: int
    tokens: Tensor  # (B, L) that it saw
    features: Features


@dataclass(frozen=True)
class Trapezoidal(Native):
    """The state jumps at the reverse process's rates, which a leap holds constant: from z to y at R(y) =
    (-a' / (a V)) p(y) / p(z), where a is the signal and p = a distribution + (1 - a) / V the distribution of the noisy token. A step
    leaps theta of its span, calls again, and leaps the rest at extrapolated rates (arXiv 2502.00234).

    Two calls a step and one to read out: an even nfe begins with one ancestral step, where the rates are largest."""

    theta: float = param(0.5, "Share of a step's span that its first leap takes.", above=0, high=0.99)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.interleave:
            raise LimpetError("trapezoidal has interleave True; it takes False, as a leap is of all positions at once")

    @property
    def times(self) -> tuple[float, ...]:
        """What each call is told: the start and the inside of every step, then the final step's."""
        nodes = process.GRIDS[self.grid]((self.nfe + self.plain + 1) // 2, self.warmup)
        steps = [(t, t - self.theta * (t - s)) for t, s in pairwise(nodes)]
        return *nodes[: self.plain], *(t for step in steps[self.plain :] for t in step), nodes[-1]

    @property
    def plain(self) -> int:
        """How many ancestral steps come first: one for an even nfe."""
        return 1 - self.nfe % 2

    def step(self, ctx: Context, state: State) -> tuple[State, StepInfo]:
        r = state.call
        if r < self.plain or r == self.nfe - 1:
            return super().step(ctx, state)
        t, span = self.times[r], self.times[r] - self.times[r + 1]
        # Who watches is told of the distributions as well; the leap itself reads them below.
        looks = [self.transition(ctx, state, ctx.no_positions, ctx.free)] if ctx.trace else []
        features, *told = ctx.call(state, state.tokens, t, *looks)
        tokens, free = state.tokens.clone(), ctx.free.nonzero()
        asked = self.asked(ctx, state, features)
        coin, _ = ctx.rng.uniforms(r, positions(tokens), Purpose.COINS)
        u, _ = ctx.rng.uniforms(r, positions(tokens), Purpose.TOKENS)
        for both in zip(*(ctx.log_probs(one.features, free, self.temperature, one.call) for one in asked), strict=True):
            here = tuple(both[0][0].unbind(-1))
            rates = self.rates(ctx, asked, here, [log_probs for _, log_probs in both])
            jumps = coin[here] < -(-rates.sum(-1) * span).expm1()
            tokens[here] = torch.where(jumps, inverse_cdf(rates, u[here]), tokens[here])
            del rates  # before the next distributions are made
        memory = () if state.memory else Leapt(state.tokens, features.values.clone())
        unread = Outcome(tokens, torch.zeros_like(tokens), torch.full_like(tokens, torch.inf, dtype=torch.double), None)
        outcome = told[0]._replace(tokens=tokens) if told else unread
        return state.next(tokens, features, memory), StepInfo(r, t, state.tokens, outcome, {})

    def asked(self, ctx: Context, state: State, features: Features) -> list[Asked]:
        """The call that a leap reads, and before it the one that its step began with."""
        this = Asked(state.call, state.tokens, features)
        if not state.memory:
            return [this]
        before, values = state.memory
        return [Asked(state.call - 1, before, Features(values, ctx.network_call(before, self.times[state.call - 1]))), this]

    def rates(
        self, ctx: Context, asked: list[Asked], here: tuple[Tensor, ...], log_probs_by_call: list[Tensor]
    ) -> Tensor:
        """(r, V) of the leap at some samples and positions, by their distributions in its calls: 0 at their own tokens. Of the
        second leap, written over those of the two calls."""
        *first, rates = (
            self.at(ctx, one, here, log_probs) for one, log_probs in zip(asked, log_probs_by_call, strict=True)
        )
        if not first:
            return rates
        less, over = (1 - self.theta) ** 2 + self.theta**2, 2 * self.theta * (1 - self.theta)
        own = asked[-1].tokens[here][:, None]
        return rates.sub_(first[0].mul_(less)).div_(over).clamp_(min=0).scatter_(-1, own, 0.0)

    def at(self, ctx: Context, asked: Asked, here: tuple[Tensor, ...], log_probs: Tensor) -> Tensor:
        """(r, V) float64: the rates of the reverse process away from the tokens, by the distributions of one call. Every step
        is written over the one before: distributions are large, and two are held at once."""
        t, signal = self.times[asked.call], ctx.signal(self.times[asked.call])
        pace = -float(ctx.model.schedule.slope(t)) / (signal * ctx.model.vocab_size)
        probs = truncation.cut(log_probs.double().softmax(-1), self.support(asked.call))
        noisy = probs.mul_(signal).add_((1 - signal) / ctx.model.vocab_size)
        own = asked.tokens[here][:, None]
        at_own = noisy.gather(-1, own)
        return noisy.mul_(pace).div_(at_own).scatter_(-1, own, 0.0)
