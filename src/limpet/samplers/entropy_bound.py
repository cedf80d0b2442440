"""Entropy-bounded acceptance: each call keeps the surest draws, as many as a bound on their entropies allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from limpet.diffusion import process
from limpet.samplers.base import Context, Sampler, State, StepInfo
from limpet.samplers.params import param
from limpet.samplers.predictions import DISTRIBUTION_HELP, WhichDistribution, anything, read, time_of

Clock = Literal["share", "grid"]


class Memory(NamedTuple):
    """(B, L) each; what is of a whole sample is the same at all its positions."""

    accepted: Tensor  # bool: the token was drawn and kept by the last call
    top: Tensor  # the argmax of the last call; -1 before the first
    unchanged: Tensor  # how many calls in a row the sample's argmax has stayed the same
    stopped: Tensor  # bool: the sample is its own output


@dataclass(frozen=True)
class EntropyBound(Sampler):
    """A token is drawn everywhere; in ascending entropy of their distributions, draws are accepted while the sum of the
    entropies before does not pass the bound, which bounds what the accepted tokens know of each other. The rest become
    uniform, and the next call decides anew (arXiv 2505.24857, on uniform states as DiffusionGemma has it).

    A sample whose argmax has settled stops, and its calls go on without it: all are counted."""

    nfe: int = param(64, "Network calls for one sample; the last reads out the argmax.", low=2)
    bound: float = param(0.1, "Nats that the distributions of the draws accepted before may sum to.", low=0, high=1e6)
    first_temperature: float = param(0.8, "Temperature of the distributions in the first call.", above=0, high=1e6)
    last_temperature: float = param(0.4, "Temperature that the calls fall towards, in equal steps.", above=0, high=1e6)
    clock: Clock = param("share", "Which signal the denoiser is told: the share of accepted tokens, or the uniform "
                        "grid's.")  # fmt: skip
    settled: float | None = param(0.005, "A sample stops when its argmax is stable and its mean entropy is below this; "
                                 "None for never.", low=0)  # fmt: skip
    distribution: WhichDistribution = param("leave-one-out", DISTRIBUTION_HELP)
    patience: int = param(1, "Calls in a row that the argmax must stay the same to be stable.", low=1)

    def init(self, ctx: Context) -> State:
        none = torch.zeros_like(ctx.fixed)
        return State(0, ctx.noise(), Memory(ctx.no_positions, none - 1, none, ctx.no_positions))

    def step(self, ctx: Context, state: State) -> tuple[State, StepInfo]:
        r, last = state.call, state.call == self.nfe - 1
        _, before, unchanged, stopped = state.memory
        t = self.time(ctx, state)
        (features,) = ctx.call(state, state.tokens, t, temperature=self.temperature(r))
        seen = read(ctx, features, r, self.temperature(r), self.distribution)

        accepted = within(seen.entropy, ctx.free, self.bound)
        same = ((seen.top == before) | ~ctx.free).all(-1, keepdim=True)
        unchanged = torch.where(same, unchanged + 1, 0)
        calm = seen.entropy.sum(-1, keepdim=True) < (self.settled or 0) * ctx.generated[:, None]
        ending = (calm & (unchanged >= self.patience)) if not last else ~ctx.no_positions

        tokens = torch.where(accepted, seen.drawn, anything(ctx, r))
        tokens = torch.where(ending & ctx.free, seen.top, tokens)
        tokens = torch.where(stopped, state.tokens, tokens)
        accepted = accepted | (ending | stopped) & ctx.free
        memory = Memory(accepted, seen.top, unchanged, stopped | ending)
        told = float(t.mean()) if isinstance(t, Tensor) else t
        return state.next(tokens, features, memory), StepInfo(
            r, told, state.tokens, seen.outcome(ctx, tokens), {"accepted": accepted}
        )

    def finished(self, state: State) -> Tensor:
        return state.memory[3][:, 0]

    def time(self, ctx: Context, state: State) -> float | Tensor:
        """What the denoiser is told: (B,) times where each sample has its own share."""
        return time_of(ctx, state.memory[0]) if self.clock == "share" else process.uniform_grid(self.nfe)[state.call]

    def temperature(self, call: int) -> float:
        return self.last_temperature + (self.first_temperature - self.last_temperature) * (self.nfe - call) / self.nfe


def within(entropy: Tensor, among: Tensor, bound: float) -> Tensor:
    """(B, L) bool: in ascending entropy, ties by position, those before which the entropies sum to the bound at most;
    so the surest always is."""
    ranked, order = torch.where(among, entropy, torch.inf).sort(dim=-1, stable=True)
    before = torch.nn.functional.pad(ranked.cumsum(-1)[:, :-1], (1, 0))
    return among & torch.zeros_like(among).scatter(-1, order, before <= bound)
