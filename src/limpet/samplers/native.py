"""The native sampler: ancestral steps of the learned reverse transition, with top-p, top-k, min-p and a temperature."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from torch import Tensor

from limpet.diffusion import process
from limpet.diffusion.backends import Outcome, Transition, positions
from limpet.diffusion.transitions import Coins, ancestral
from limpet.diffusion.truncation import Boundary, Support
from limpet.samplers.base import Context, Sampler, State, StepInfo
from limpet.samplers.params import param, params, refresh_param

FinalStep = Literal["argmax", "sample"]
Grid = Literal["two-piece", "uniform", "quadratic"]


@dataclass(frozen=True)
class Native(Sampler):
    """Ancestral sampling: every position can change until the last call."""

    nfe: int = param(64, "Network calls per sample: nfe - 1 reverse steps and the final step.", low=2)
    refresh: int = refresh_param()
    warmup: float = param(0.33, "Fraction of early steps, which also splits the two-piece grid.", low=0, high=1)
    grid: Grid = param(
        "two-piece", "Times of the calls: equal steps on each side of the split; equal steps; or ever smaller steps."
    )
    interleave: bool = param(False, "Update even and odd positions alternately, each over the span of two calls.")
    temperature: float = param(1.0, "Softmax temperature, applied before top-p.", above=0, high=1e6)
    top_p: float = param(1.0, "Probability mass of the nucleus. 1 keeps every token.", above=0, high=1)
    late_top_p: float | None = param(None, "top_p after warmup. None: top_p.", above=0, high=1, since="warmup")
    boundary: Boundary = param("released", "Whether top-p keeps one more token at an exact tie (released) or not.")
    top_k: int | None = param(None, "Most tokens to draw from. None: all.", low=1, counts="vocabulary")
    min_p: float = param(0.0, "Draw tokens at least this fraction as likely as the likeliest.", low=0, high=1)
    final_step: FinalStep = param("sample", "The last call: one more draw, or the argmax.", since="final step")

    @property
    def times(self) -> tuple[float, ...]:
        """The time of every call, the final step's last."""
        return process.GRIDS[self.grid](self.nfe, self.warmup)

    @property
    def warmup_calls(self) -> int:
        """W: the number of calls in the warmup."""
        return process.warmup_steps(self.nfe, self.warmup)

    def step(self, ctx: Context, state: State) -> tuple[State, StepInfo]:
        t, transition = self.times[state.call], self.transition(ctx, state, ctx.free, ctx.no_positions)
        features, outcome = ctx.call(state, state.tokens, t, transition)
        info = StepInfo(state.call, t, state.tokens, outcome, {})
        return state.next(self.read(ctx, state, outcome), features), info

    def transition(self, ctx: Context, state: State, revise: Tensor, inspect: Tensor) -> Transition:
        """The transition of a call, from the state to the next time.

        The last call goes to clean text: by a draw from the posterior, or by the argmax, for which all free positions
        are inspected. If interleaved, a position moves in every other call, from the time of the call before.

        revise, inspect: (B, L) bool, see `Transition`."""
        r, is_last = state.call, state.call == self.nfe - 1
        if is_last and self.final_step == "argmax":
            revise, inspect = ctx.no_positions, ctx.free
        elif self.interleave:
            revise = revise & self.steps_now(revise, r)
        start = self.times[max(0, r - self.interleave)]
        return Transition(
            call=r,
            tokens=state.tokens,
            revise=revise,
            inspect=inspect,
            coins=self.coins(ctx.signal(start), 1.0 if is_last else ctx.signal(self.times[r + 1]), r),
            temperature=self.temperature,
            support=self.support(r),
        )

    def steps_now(self, tokens: Tensor, call: int) -> Tensor:
        """(L,) bool: the positions of tokens (B, L) that step in a call: all, or every second one if interleaved."""
        place = positions(tokens)
        return (place - call) % 2 == 0 if self.interleave else place >= 0

    def coins(self, signal_t: float, signal_s: float, call: int) -> Coins:
        """The coins of a call's transition. A subclass that overrides only this is another method."""
        return ancestral(signal_t, signal_s)

    def support(self, call: int) -> Support:
        """The tokens that a call may draw."""
        is_late = self.late_top_p is not None and call >= self.warmup_calls
        return Support(self.late_top_p if is_late else self.top_p, self.boundary, self.top_k, self.min_p)  # type: ignore[arg-type]

    def read(self, ctx: Context, state: State, outcome: Outcome) -> Tensor:
        """(B, L) the tokens after a call: those drawn, or the argmax in the last call, with fixed tokens in place."""
        if state.call == self.nfe - 1 and self.final_step == "argmax":
            return outcome.top.where(ctx.free, ctx.fixed)
        return outcome.tokens

    def shared_calls(self, other: Sampler) -> int:
        """How many first calls another sampler makes in the same way.

        Two samplers of one class agree until the first differing parameter takes effect. Samplers of two classes agree
        until the native opening of one ends. A subclass without a native opening may differ from the first call on."""
        mine, theirs = self.native_opening(), other.native_opening() if isinstance(other, Native) else None
        if mine is None or theirs is None:
            return self.nfe if self == other else 0
        if type(other) is not type(self):
            return min(mine.warmup_calls, theirs.warmup_calls, mine.shared_calls(theirs))
        since = {"start": 0, "warmup": self.warmup_calls, "final step": self.nfe - 1}
        known = params(type(self))
        starts = (since[known[name].since] for name in known if getattr(self, name) != getattr(other, name))
        return min(starts, default=self.nfe)

    def native_opening(self) -> Native | None:
        """The native sampler whose calls this sampler makes until the warmup ends. A subclass must say so itself."""
        return self if type(self) is Native else None

    def as_native(self, **changes: Any) -> Native:
        """The native sampler with the same parameters, some of them changed."""
        return Native(**{one.name: getattr(self, one.name) for one in fields(Native)} | changes)
