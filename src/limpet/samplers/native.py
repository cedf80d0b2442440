"""The native sampler: ancestral steps of the learned reverse transition, with top-p, a temperature and two final steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from limpet.diffusion import process
from limpet.diffusion.backends import Outcome, Transition
from limpet.diffusion.transitions import Coins, ancestral
from limpet.diffusion.truncation import Boundary, Support
from limpet.samplers.base import Context, Sampler, State, StepInfo
from limpet.samplers.params import param, params

FinalStep = Literal["argmax", "sample"]
Grid = Literal["two-piece", "uniform", "quadratic"]


@dataclass(frozen=True)
class Native(Sampler):
    """Every position stays revisable until the last call."""

    nfe: int = param(64, "Network calls for one sample: nfe - 1 reverse steps and the final step.", low=2)
    warmup: float = param(0.33, "Fraction of the reverse steps that are early; it also places the split of the "
                         "two-piece grid.", low=0, high=1)  # fmt: skip
    grid: Grid = param("two-piece", "Times of the reverse steps: equal steps on each side of the split; equal steps; or "
                      "ever smaller ones.")  # fmt: skip
    interleave: bool = param(False, "Whether even and odd positions step in turn, each as far as two calls go, so that no "
                       "neighbours change together.")  # fmt: skip
    temperature: float = param(
        1.0, "Of every distribution, before anything else; 1 leaves it alone.", above=0, high=1e6
    )
    top_p: float = param(
        1.0, "Mass of the nucleus that a reverse step draws from; 1 keeps every token.", above=0, high=1
    )
    late_top_p: float | None = param(
        None, "The same for the steps after warmup; None for top_p throughout.", above=0, high=1, since="warmup"
    )
    boundary: Boundary = param("released", "Whether top-p keeps the token after an exact tie, as the released code "
                              "does, or not, as the paper writes it.")  # fmt: skip
    top_k: int | None = param(None, "Draw from so many of the likeliest tokens; None for all.", low=1,
                             counts="vocabulary")  # fmt: skip
    min_p: float = param(0.0, "Draw from tokens at least this fraction as likely as the likeliest; 0 for all.", low=0,
                        high=1)  # fmt: skip
    final_step: FinalStep = param("sample", "The last call: the argmax of the distribution, or one more draw (the released code's "
                              "way).", since="final step")  # fmt: skip

    @property
    def times(self) -> tuple[float, ...]:
        """Of every call, the final step's last."""
        return process.GRIDS[self.grid](self.nfe, self.warmup)

    @property
    def warmup_calls(self) -> int:
        """W: how many calls come before the first late one."""
        return process.warmup_steps(self.nfe, self.warmup)

    def step(self, ctx: Context, state: State) -> tuple[State, StepInfo]:
        t, transition = self.times[state.call], self.transition(ctx, state, ctx.free, ctx.no_positions)
        features, outcome = ctx.call(state, state.tokens, t, transition)
        info = StepInfo(state.call, t, state.tokens, outcome, {})
        return state.next(self.read(ctx, state, outcome), features), info

    def transition(self, ctx: Context, state: State, revise: Tensor, inspect: Tensor) -> Transition:
        """From the state to the next time; in the last call to clean text, by a draw from the posterior C_{t,z} h, or
        all free positions are inspected for their argmax.

        Interleaved, every other position goes on from where the call before last left it, and its neighbours are at the time
        that the call is told."""
        r, last = state.call, state.call == self.nfe - 1
        if last and self.final_step == "argmax":
            revise, inspect = ctx.no_positions, ctx.free
        elif self.interleave:
            revise = revise & ((torch.arange(revise.shape[1], device=revise.device) - r) % 2 == 0)
        before = self.times[max(0, r - self.interleave)]
        return Transition(
            call=r,
            tokens=state.tokens,
            revise=revise,
            inspect=inspect,
            coins=self.coins(ctx.signal(before), 1.0 if last else ctx.signal(self.times[r + 1]), r),
            temperature=self.temperature,
            support=self.support(r),
        )

    def coins(self, signal_t: float, signal_s: float, call: int) -> Coins:
        """How a call's transition goes on: a subclass that changes this alone is another method."""
        return ancestral(signal_t, signal_s)

    def support(self, call: int) -> Support:
        """What a call's distribution is cut to."""
        late = self.late_top_p is not None and call >= self.warmup_calls
        return Support(self.late_top_p if late else self.top_p, self.boundary, self.top_k, self.min_p)  # type: ignore[arg-type]

    def read(self, ctx: Context, state: State, outcome: Outcome) -> Tensor:
        """(B, L) the tokens after a call: as drawn, or the argmax in the last one; given tokens as they were given."""
        if state.call == self.nfe - 1 and self.final_step == "argmax":
            return outcome.top.where(ctx.free, ctx.fixed)
        return outcome.tokens

    def shared_calls(self, other: Sampler) -> int:
        """Two of one kind agree until the first parameter that differs takes effect. Of another kind, until its opening
        by the native sampler ends. A subclass that does not say how it opens may differ from its first call on."""
        mine, theirs = self.native_opening(), other.native_opening() if isinstance(other, Native) else None
        if mine is None or theirs is None:
            return self.nfe if self == other else 0
        if type(other) is not type(self):
            return min(mine.warmup_calls, theirs.warmup_calls, mine.shared_calls(theirs))
        since = {"start": 0, "warmup": self.warmup_calls, "final step": self.nfe - 1}
        starts = [since[param.since] for name, param in params(type(self)).items()
                  if getattr(self, name) != getattr(other, name)]  # fmt: skip
        return min(starts, default=self.nfe)

    def native_opening(self) -> Native | None:
        """The native sampler that the calls before the end of warmup are, if they are; a subclass must say so."""
        return self if type(self) is Native else None
