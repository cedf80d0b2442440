"""The forward-backward corrector: leaps at the rates of the forward and the reverse process together."""

from __future__ import annotations

from dataclasses import dataclass

from limpet.diffusion import process
from limpet.errors import LimpetError
from limpet.samplers.base import Context, State, StepInfo
from limpet.samplers.params import param
from limpet.samplers.tau_leaping import TauLeaping


@dataclass(frozen=True)
class ForwardBackward(TauLeaping):
    """Tau-leaping with corrections: at the time of a step, leaps that add noise and remove it at once.

    The sum of the two rates keeps the distribution at that time, up to the error of a leap (arXiv 2205.14987,
    proposition 4). Its authors correct ten times per step, in the last tenth of the time, over 1.5 steps."""

    corrections: int = param(1, "Corrections before a step, for as many of the last steps as nfe allows.", low=0)
    span: float = param(1.5, "Time of a correction, in lengths of the step after it.", above=0, high=1e6)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.interleave:
            raise LimpetError(
                "forward-backward has interleave True; it takes False, because a correction needs all positions at one "
                "noise level"
            )

    @property
    def times(self) -> tuple[float, ...]:
        """The time of every call. The corrections before a step have its time, so the same time follows theirs."""
        corrected = (self.nfe - 2) // (1 + self.corrections) if self.corrections else 0  # steps
        nodes = process.GRIDS[self.grid](self.nfe - self.corrections * corrected, self.warmup)
        first = len(nodes) - 1 - corrected  # the first corrected node; the initial noise and the output are not
        repeats = [1 + self.corrections * (first <= k < len(nodes) - 1) for k in range(len(nodes))]
        return tuple(t for t, repeat in zip(nodes, repeats, strict=True) for _ in range(repeat))

    def step(self, ctx: Context, state: State) -> tuple[State, StepInfo]:
        r, times = state.call, self.times
        if r == self.nfe - 1 or times[r + 1] < times[r]:
            return super().step(ctx, state)
        after = next(t for t in times[r:] if t < times[r])
        return self.leap(ctx, state, ctx.free, times[r], self.span * (times[r] - after), forward=True)
