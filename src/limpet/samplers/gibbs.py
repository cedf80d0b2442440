"""Correctors: after a predictor's steps a few positions are redrawn, each from the distribution that all others give it.

One position at random, redrawn at the level b that the path has reached from b h + (1 - b) / V, leaves the distribution at that
level as it is (leave-one-out Gibbs); several at once do not quite. The informed corrector (arXiv 2407.21243; for
uniform states 2605.22765) prefers positions whose token has little margin over the best other one: it leaves no distribution as
it is, and trades diversity for likelihood. Its authors take 12 positions, two corrections a step, tau 1."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from limpet import registry
from limpet.diffusion.backends import Outcome, Transition, positions
from limpet.diffusion.rng import Purpose
from limpet.diffusion.transitions import redraw
from limpet.errors import LimpetError
from limpet.samplers.base import Context, Sampler, State, StepInfo
from limpet.samplers.crs import CRS
from limpet.samplers.names import parse
from limpet.samplers.native import Native
from limpet.samplers.params import param
from limpet.samplers.predictions import first

Choose = Literal["random", "margin"]


class Due(NamedTuple):
    """What a call is: the predictor's own, or a correction before it."""

    call: int  # the predictor's next, as it counts
    correction: int | None  # which of all corrections, or None for the predictor's own


@dataclass(frozen=True)
class Gibbs(Sampler):
    """A predictor, and after each of its last steps some corrections. Their distributions have its temperature and support."""

    nfe: int = param(64, "Network calls for one sample: the predictor's steps, corrections, and the final step.", low=2)
    predictor: str = param("native", "Whose steps are corrected: an arm, with commas for spaces on a command line, as "
                          "in native,top_p=.9; its number of calls follows.")  # fmt: skip
    corrections: int = param(1, "Corrections after a step, as many of the last steps as nfe has calls for.", low=0)
    positions: int = param(1, "Positions redrawn in one correction.", low=1)
    choose: Choose = param("random", "Which: any, or sooner those whose token has a small margin.")
    tau: float = param(1.0, "How little the margin counts: it is divided by this.", above=0, high=1e6)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.inner  # it says now what is wrong with it

    @cached_property
    def inner(self) -> Native:
        """The predictor, with as many calls as corrections leave it."""
        calls = self.nfe - self.corrections * self.corrected
        words = self.predictor.replace(",", " ")
        # A parameter is data, and may come from a request: it opens and runs no file.
        if any(registry.is_file(word) or word.endswith(".toml") for word in words.split()):
            raise LimpetError(f"gibbs has predictor {self.predictor!r}; it takes a sampler by its name, and no file")
        _, inner = parse(words, nfe=calls)
        # One that takes several calls for a step, or knows no times, has states that no one level belongs to.
        moves = isinstance(inner, CRS) or type(inner).step is Native.step
        if not isinstance(inner, Native) or not moves or inner.interleave:
            raise LimpetError(
                f"gibbs has predictor {self.predictor!r}; it takes crs, native, or what changes native's coins alone, "
                "such as psi, unwoven: every call must move the state from one time to the next"
            )
        if inner.nfe != calls:
            raise LimpetError(
                f"gibbs has predictor {self.predictor!r}, and leaves it {calls} of {self.nfe} calls: leave its nfe out"
            )
        return inner

    @property
    def corrected(self) -> int:
        """After how many of the predictor's last steps there are corrections."""
        return (self.nfe - 1) // (1 + self.corrections) if self.corrections else 0

    def due(self, call: int) -> Due:
        """What one of all calls is."""
        plain = self.inner.nfe - 1 - self.corrected  # steps that nothing follows
        if call < plain or call == self.nfe - 1:
            return Due(min(call, self.inner.nfe - 1), None)
        step, turn = divmod(call - plain, 1 + self.corrections)
        return Due(plain + step + (turn > 0), step * self.corrections + turn - 1 if turn else None)

    def init(self, ctx: Context) -> State:
        return self.inner.init(ctx)

    def step(self, ctx: Context, state: State) -> tuple[State, StepInfo]:
        call, correction = self.due(state.call)
        own = state._replace(call=call)  # the predictor counts its own calls, which name its uniforms
        if correction is None:
            after, info = self.inner.step(ctx, own)
            labels = {name: mark for name, mark in info.masks.items() if name in ("committed", "visible")}
            info = info._replace(masks={**labels, "corrected": ctx.no_positions})
        else:
            after, info = self.correct(ctx, own, correction)
        return after._replace(call=state.call + 1), info._replace(call=state.call)

    def correct(self, ctx: Context, state: State, number: int) -> tuple[State, StepInfo]:
        """One correction; labels stay, and are seen. Its uniforms are those of no call of the predictor."""
        call, t, informed = self.inner.nfe + number, self.inner.times[state.call], self.choose == "margin"
        seen, free, masks = self.look(ctx, state)
        u, _ = ctx.rng.uniforms(call, positions(seen), Purpose.PLACES)
        gumbel, most = -(-u.log()).log(), torch.full_like(ctx.generated, self.positions)
        # At random, positions are known before any distribution is; else all are redrawn, and those not chosen put back.
        revise = free if informed else first(gumbel, free, most)
        ask = Transition(
            call=call,
            tokens=state.tokens,
            revise=revise,
            inspect=free if informed else ctx.no_positions,
            coins=redraw(ctx.signal(t)),
            temperature=self.inner.temperature,
            support=self.inner.support(state.call),
            against=state.tokens if informed else None,
        )
        features, outcome = ctx.call(state, seen, t, ask)
        chosen = first(gumbel + self.preference(ctx, state, outcome), free, most) if informed else revise
        info = StepInfo(call, t, seen, outcome, {**masks, "corrected": chosen})
        tokens = outcome.tokens.where(chosen, state.tokens)
        return state.next(tokens, features, state.memory)._replace(call=state.call), info

    def look(self, ctx: Context, state: State) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """(B, L) each: what the denoiser sees, where a correction may come, and what is marked."""
        if not isinstance(self.inner, CRS):
            return state.tokens, ctx.free, {}
        stored, committed_at = state.memory[:2]
        visible = self.inner.visible(state)
        masks = {"committed": committed_at < state.call, "visible": visible}
        return torch.where(visible, stored, state.tokens), ctx.free & ~visible, masks

    def preference(self, ctx: Context, state: State, outcome: Outcome) -> Tensor:
        """(B, L) how much sooner than others an informed corrector takes a position, as a log weight: minus its margin
        over tau. The margin is ln of p at the state's token over p at the best other, p = signal h + noise / V."""
        assert outcome.gain is not None
        signal = ctx.signal(self.inner.times[state.call])
        largest, ratio, is_top = 1 - outcome.deficit, outcome.gain.exp(), outcome.top == state.tokens
        own = torch.where(is_top, largest, largest / ratio)
        other = torch.where(is_top, largest * ratio, largest)
        noise = (1 - signal) / ctx.model.vocab_size
        return ((signal * other + noise) / (signal * own + noise)).log() / self.tau

    def shared_calls(self, other: Sampler) -> int:
        return self.nfe if self == other else 0
