"""The theta-trapezoidal rule: two leaps a step, the second with rates that the first one's error is taken out of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from limpet.engine import process, support
from limpet.engine.path import Features, Info, Path, State
from limpet.engine.steps import Outcome, inverse_cdf
from limpet.engine.streams import Purpose
from limpet.samplers.knobs import knob
from limpet.samplers.native import Native


class Leapt(NamedTuple):
    """What the second call of a step must know of the first; nothing is remembered between steps."""

    before: Tensor  # (B, L) the state that the step began with
    values: Tensor  # (B, L, D) what the body made of it


@dataclass(frozen=True)
class Trapezoidal(Native):
    """The state jumps at the reverse process's rates, which a leap holds constant: from z to y at R(y) =
    (-a' / (a V)) p(y) / p(z), where a is the signal and p = a law + (1 - a) / V the law of the noisy token. A step
    leaps theta of its span, calls again, and leaps the rest at extrapolated rates (arXiv 2502.00234).

    Two calls a step and one to read out: an even nfe begins with one ancestral step, where the rates are largest."""

    theta: float = knob(0.5, "Share of a step's span that its first leap takes.", above=0, high=0.99)

    @property
    def times(self) -> tuple[float, ...]:
        """What each call is told: the start and the inside of every step, then the readout's."""
        grid = process.two_piece_grid if self.grid == "two-piece" else process.uniform_grid
        nodes = grid((self.nfe + self.plain + 1) // 2, self.warmup)
        steps = [(t, t - self.theta * (t - s)) for t, s in pairwise(nodes)]
        return *nodes[: self.plain], *(t for step in steps[self.plain :] for t in step), nodes[-1]

    @property
    def plain(self) -> int:
        """How many ancestral steps come first: one for an even nfe."""
        return 1 - self.nfe % 2

    def step(self, path: Path, state: State) -> tuple[State, Info]:
        r = state.call
        if r < self.plain or r == self.nfe - 1:
            return super().step(path, state)
        t, span = self.times[r], self.times[r] - self.times[r + 1]
        # Who watches is told of the laws as well; the leap itself reads them below.
        looks = [self.transition(path, state, path.nowhere, path.free)] if path.trace else []
        features, *told = path.call(state.tokens, t, *looks)
        tokens, free = state.tokens.clone(), path.free.nonzero()
        for rows, rates in self.rates(path, state, features, free):
            sample, position = here = tuple(rows.unbind(-1))
            total = rates.sum(-1)
            coin, _ = path.stream.uniforms(r, position, Purpose.COINS, sample)
            u, _ = path.stream.uniforms(r, position, Purpose.TOKENS, sample)
            jumps = coin < -(-total * span).expm1()
            tokens[here] = torch.where(jumps, inverse_cdf(rates, u), tokens[here])
        memory = () if state.memory else Leapt(state.tokens, features.values.clone())
        unread = Outcome(tokens, torch.zeros_like(tokens), torch.full_like(tokens, torch.inf, dtype=torch.double), None)
        outcome = told[0]._replace(tokens=tokens) if told else unread
        return State(r + 1, tokens, memory), Info(r, t, state.tokens, outcome, {})

    def rates(self, path: Path, state: State, features: Features, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows of samples and positions, and the rates (r, V) of their leap: 0 at their own tokens."""
        r = state.call
        if not state.memory:
            yield from self.at(path, state.tokens, features, r, rows)
            return
        before, values = state.memory
        earlier = Features(values, path.shown(before, self.times[r - 1]))
        both = zip(self.at(path, before, earlier, r - 1, rows), self.at(path, state.tokens, features, r, rows),
                   strict=True)  # fmt: skip
        less, over = (1 - self.theta) ** 2 + self.theta**2, 2 * self.theta * (1 - self.theta)
        for (some, first), (_, second) in both:
            own = state.tokens[tuple(some.unbind(-1))]
            rates = ((second - less * first) / over).clamp(min=0)
            yield some, rates.scatter(-1, own[:, None], 0.0)

    def at(self, path: Path, tokens: Tensor, features: Features, call: int, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip  # noqa: E501
        """The rates of the reverse process away from the tokens, float64, by the laws of one call."""
        t, signal = self.times[call], path.signal(self.times[call])
        pace = -float(path.denoiser.schedule.slope(t)) / (signal * path.denoiser.vocab_size)
        for some, log_law in path.laws(features, rows, self.temperature, call):
            law = support.cut(log_law.double().softmax(-1), self.support(call))
            noisy = signal * law + (1 - signal) / path.denoiser.vocab_size
            own = tokens[tuple(some.unbind(-1))][:, None]
            yield some, (pace * noisy / noisy.gather(-1, own)).scatter(-1, own, 0.0)
