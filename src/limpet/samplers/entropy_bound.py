"""Entropy-bounded acceptance: each call keeps its most certain draws, as many as a bound on their entropies allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from limpet.diffusion import process
from limpet.samplers.base import Context, Sampler, State, StepInfo
from limpet.samplers.params import param, refresh_param
from limpet.samplers.predictions import (
    CLOCK_HELP,
    DISTRIBUTION_HELP,
    Clock,
    WhichDistribution,
    falling,
    read_predictions,
    time_of_share,
    uniform_tokens,
)


class EntropyBoundMemory(NamedTuple):
    """(B, L) each; a value of the whole sample is repeated at all its positions."""

    accepted: Tensor  # bool: the last call drew the token and kept it
    top: Tensor  # the argmax of the last call; -1 before the first
    unchanged: Tensor  # how many calls in a row the argmax of the whole sample has not changed
    stopped: Tensor  # bool: later calls do not change the sample


@dataclass(frozen=True)
class EntropyBound(Sampler):
    """Each call draws every token, and accepts draws in ascending entropy while the entropies before sum to the bound.

    The bound limits the mutual information of the accepted tokens. The others become uniform noise, and the next call
    decides again (arXiv 2505.24857, on uniform states as in DiffusionGemma).

    A sample whose argmax is stable stops. Its remaining calls are made and counted, and change nothing."""

    nfe: int = param(64, "Network calls per sample; the last returns the argmax.", low=2)
    refresh: int = refresh_param()
    bound: float = param(0.1, "Most nats of entropy, summed over the draws accepted before.", low=0, high=1e6)
    first_temperature: float = param(0.8, "Softmax temperature of the first call.", above=0, high=1e6)
    last_temperature: float = param(0.4, "Temperature that the calls approach in equal steps.", above=0, high=1e6)
    clock: Clock = param("share", CLOCK_HELP.format("accepted"))
    settled: float | None = param(0.005, "A stable sample stops below this mean entropy. None: never.", low=0)
    distribution: WhichDistribution = param("leave-one-out", DISTRIBUTION_HELP)
    patience: int = param(1, "Calls in a row without a change after which the argmax is stable.", low=1)

    def init(self, ctx: Context) -> State:
        zeros = torch.zeros_like(ctx.fixed)
        return State(0, ctx.noise(), EntropyBoundMemory(ctx.no_positions, zeros - 1, zeros, ctx.no_positions))

    def step(self, ctx: Context, state: State) -> tuple[State, StepInfo]:
        r, is_last = state.call, state.call == self.nfe - 1
        was_accepted, before, unchanged, stopped = state.memory
        t = time_of_share(ctx, was_accepted) if self.clock == "share" else process.uniform_grid(self.nfe)[r]
        (features,) = ctx.call(state, state.tokens, t, temperature=self.temperature(r))
        predictions = read_predictions(ctx, features, r, self.temperature(r), self.distribution)

        accepted = within_bound(predictions.entropy, ctx.free, self.bound)
        is_same = ((predictions.top == before) | ~ctx.free).all(-1, keepdim=True)
        unchanged = torch.where(is_same, unchanged + 1, 0)
        is_calm = predictions.entropy.sum(-1, keepdim=True) < (self.settled or 0) * ctx.generated[:, None]
        ending = (is_calm & (unchanged >= self.patience)) if not is_last else ~ctx.no_positions

        tokens = torch.where(accepted, predictions.drawn, uniform_tokens(ctx, r))
        tokens = torch.where(ending & ctx.free, predictions.top, tokens)
        tokens = torch.where(stopped, state.tokens, tokens)
        accepted = accepted | (ending | stopped) & ctx.free
        memory = EntropyBoundMemory(accepted, predictions.top, unchanged, stopped | ending)
        mean_time = float(t.mean()) if isinstance(t, Tensor) else t
        info = StepInfo(r, mean_time, state.tokens, predictions.outcome(ctx, tokens), {"accepted": accepted})
        return state.next(tokens, features, memory), info

    def finished(self, state: State) -> Tensor:
        return state.memory[3][:, 0]

    def temperature(self, call: int) -> float:
        """The softmax temperature of a call."""
        return falling(self.first_temperature, self.last_temperature, call, self.nfe)


def within_bound(entropy: Tensor, among: Tensor, bound: float) -> Tensor:
    """(B, L) bool: positions of `among` in ascending entropy (ties: lower first) while the sum before is at most bound.

    So the position with the smallest entropy is always included."""
    ranked, order = torch.where(among, entropy, torch.inf).sort(dim=-1, stable=True)
    before = torch.nn.functional.pad(ranked.cumsum(-1)[:, :-1], (1, 0))
    return among & torch.zeros_like(among).scatter(-1, order, before <= bound)
