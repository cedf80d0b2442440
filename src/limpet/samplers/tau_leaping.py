"""Tau-leaping and Euler steps: jumps at the rates of the reverse process, which are held constant during a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from limpet.diffusion import truncation
from limpet.diffusion.backends import Outcome, inverse_cdf, positions
from limpet.diffusion.rng import Purpose
from limpet.diffusion.truncation import Support
from limpet.samplers.base import Context, State, StepInfo
from limpet.samplers.native import Native
from limpet.samplers.params import param

LEAST_SIGNAL = 1e-9
Rule = Literal["tau-leaping", "first-jump", "euler"]

# The probability that a token changes, as a function of the expected number of its jumps.
CHANGES: dict[Rule, Callable[[Tensor], Tensor]] = {
    "tau-leaping": lambda jumps: jumps * (-jumps).exp(),
    "first-jump": lambda jumps: -(-jumps).expm1(),
    "euler": lambda jumps: jumps.clamp(max=1),
}


@dataclass(frozen=True)
class TauLeaping(Native):
    """Steps of the continuous-time chain: a token jumps at the rates that it has at the start of the step.

    Jumps to each token have a Poisson number. As tokens have no order, two jumps in one step cannot be added, and the
    token stays (arXiv 2205.14987, section 4.3). The final step is that of the native sampler."""

    rule: Rule = param(
        "tau-leaping",
        "When a token changes: if it jumps exactly once; if it jumps at all, by the first jump; or with the expected "
        "number of jumps as its probability, at most 1 (euler).",
    )

    def step(self, ctx: Context, state: State) -> tuple[State, StepInfo]:
        r = state.call
        if r == self.nfe - 1:
            return super().step(ctx, state)
        moves = ctx.free & ((positions(ctx.free) - r) % 2 == 0) if self.interleave else ctx.free
        since = self.times[max(0, r - self.interleave)]
        return self.leap(ctx, state, moves, since, since - self.times[r + 1])

    def leap(
        self, ctx: Context, state: State, moves: Tensor, since: float, span: float, forward: bool = False
    ) -> tuple[State, StepInfo]:
        """One call, and jumps over a span of time.

        moves: (B, L) bool, the positions that may jump. since: the time of their tokens. forward: whether they also
        jump at the rates of the forward process."""
        r, t = state.call, self.times[state.call]
        # A trace inspects the distributions too. The leap itself reads them below.
        inspections = [self.transition(ctx, state, ctx.no_positions, ctx.free)] if ctx.trace else []
        features, *outcomes = ctx.call(state, state.tokens, t, *inspections)
        tokens = state.tokens.clone()
        coin, _ = ctx.rng.uniforms(r, positions(tokens), Purpose.COINS)
        u, _ = ctx.rng.uniforms(r, positions(tokens), Purpose.TOKENS)
        for rows, log_probs in ctx.log_probs(features, moves.nonzero(), self.temperature, r):
            here = tuple(rows.unbind(-1))
            rates = reverse_rates(ctx, log_probs, tokens[here], since, self.support(r))
            if forward:
                rates.add_(forward_rate(ctx, since)).scatter_(-1, tokens[here][:, None], 0.0)
            changes = coin[here] < CHANGES[self.rule](rates.sum(-1) * span)
            tokens[here] = torch.where(changes, inverse_cdf(rates, u[here]), tokens[here])
            del rates  # frees the memory before the next piece
        info = StepInfo(r, t, state.tokens, outcome_of(outcomes, tokens), {})
        return state.next(tokens, features), info


def forward_rate(ctx: Context, t: float) -> float:
    """The rate at which the forward process jumps from a token to each token: -a' / (a V), where a is the signal.

    A schedule without any signal at t = 1 has an infinite rate there; the largest one that is used jumps as surely."""
    return -float(ctx.model.schedule.slope(t)) / (max(ctx.signal(t), LEAST_SIGNAL) * ctx.model.vocab_size)


def reverse_rates(ctx: Context, log_probs: Tensor, own: Tensor, t: float, support: Support) -> Tensor:
    """(r, V) float64: the rates at which the reverse process jumps away from the tokens `own` (r,) at time t.

    The rate from z to y is the forward rate times p(y) / p(z), where p = a h + (1 - a) / V is the distribution of the
    noisy token. All operations are in place, because the distributions are large."""
    signal, pace, own = ctx.signal(t), forward_rate(ctx, t), own[:, None]
    probs = truncation.truncate(log_probs.double().softmax(-1), support)
    noisy = probs.mul_(signal).add_((1 - signal) / ctx.model.vocab_size)
    at_own = noisy.gather(-1, own)
    return noisy.mul_(pace).div_(at_own).scatter_(-1, own, 0.0)


def outcome_of(inspected: list[Outcome], tokens: Tensor) -> Outcome:
    """The outcome of a leap to these tokens, with what a trace inspected."""
    if inspected:
        return inspected[0]._replace(tokens=tokens)
    return Outcome(tokens, torch.zeros_like(tokens), torch.full_like(tokens, torch.inf, dtype=torch.double), None)
