"""Gibbs correctors: after a predictor's steps, a few positions are drawn again given all others.

At level b the new token comes from b h + (1 - b) / V. For one random position this keeps the distribution at that level
(leave-one-out Gibbs); for several at once it does so approximately. The informed corrector (arXiv 2407.21243; for
uniform states 2605.22765) prefers positions whose token has a small margin over the best other token. It keeps no
distribution, and trades diversity for likelihood. Its authors use 12 positions, two corrections per step, tau 1."""

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
from limpet.samplers.params import param, refresh_param
from limpet.samplers.predictions import best_positions

Choose = Literal["random", "margin"]


class ScheduledCall(NamedTuple):
    """What one call does: a step of the predictor, or a correction before that step."""

    call: int  # the number of the predictor's next call
    correction: int | None  # the number of the correction; None for a step of the predictor


@dataclass(frozen=True)
class Gibbs(Sampler):
    """A predictor with corrections after each of its last steps, at the predictor's temperature and support."""

    nfe: int = param(64, "Network calls per sample: the predictor's steps, corrections, and the final step.", low=2)
    refresh: int = refresh_param()
    predictor: str = param(
        "native", "The sampler whose steps are corrected, with commas for spaces, as in native,top_p=.9; without nfe."
    )
    corrections: int = param(1, "Corrections per step, for as many of the last steps as nfe allows.", low=0)
    positions: int = param(1, "Positions drawn again by one correction.", low=1)
    choose: Choose = param("random", "Which positions: random ones, or preferably those with a small margin.")
    tau: float = param(1.0, "Temperature of the preference for small margins.", above=0, high=1e6)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.inner  # raises for a wrong predictor

    @cached_property
    def inner(self) -> Native:
        """The predictor, with the calls that the corrections leave."""
        calls = self.nfe - self.corrections * self.corrected_steps
        text = self.predictor.replace(",", " ")
        # A parameter may come from a request over the network, so it must not open or run a file.
        if any(registry.is_file(word) or word.endswith(".toml") for word in text.split()):
            raise LimpetError(f"gibbs has predictor {self.predictor!r}; it takes the name of a sampler, not a file")
        _, inner = parse(text, nfe=calls)
        # A predictor with several calls per step, or without times, has states that belong to no single level.
        is_single_step = isinstance(inner, CRS) or type(inner).step is Native.step
        if not isinstance(inner, Native) or not is_single_step or inner.interleave:
            raise LimpetError(
                f"gibbs has predictor {self.predictor!r}; it takes crs, native, or one with coins of its own, "
                "such as psi, without interleave: every call must move the state from one time to the next"
            )
        if inner.nfe != calls:
            raise LimpetError(
                f"gibbs has predictor {self.predictor!r}, which gets {calls} of {self.nfe} calls: leave its nfe out"
            )
        return inner

    @property
    def corrected_steps(self) -> int:
        """How many of the predictor's last steps are corrected."""
        return (self.nfe - 1) // (1 + self.corrections) if self.corrections else 0

    def scheduled(self, call: int) -> ScheduledCall:
        """What a call does."""
        uncorrected = self.inner.nfe - 1 - self.corrected_steps
        if call < uncorrected or call == self.nfe - 1:
            return ScheduledCall(min(call, self.inner.nfe - 1), None)
        step, offset = divmod(call - uncorrected, 1 + self.corrections)
        correction = step * self.corrections + offset - 1 if offset else None
        return ScheduledCall(uncorrected + step + (offset > 0), correction)

    def init(self, ctx: Context) -> State:
        return self.inner.init(ctx)

    def model_input(self, state: State) -> Tensor:
        return self.inner.model_input(state._replace(call=self.scheduled(state.call)[0]))

    def step(self, ctx: Context, state: State) -> tuple[State, StepInfo]:
        call, correction = self.scheduled(state.call)
        inner_state = state._replace(call=call)  # the predictor's uniforms depend on its own count of calls
        if correction is None:
            after, info = self.inner.step(ctx, inner_state)
            masks = {name: mask for name, mask in info.masks.items() if name in ("committed", "visible")}
            info = info._replace(masks={**masks, "corrected": ctx.no_positions})
        else:
            after, info = self.correct(ctx, inner_state, correction)
        return after._replace(call=state.call + 1), info._replace(call=state.call)

    def correct(self, ctx: Context, state: State, number: int) -> tuple[State, StepInfo]:
        """One correction. Committed tokens stay and are visible. Its uniforms belong to no call of the predictor."""
        call, t, is_informed = self.inner.nfe + number, self.inner.times[state.call], self.choose == "margin"
        model_input, free, masks = self.inputs(ctx, state)
        u, _ = ctx.rng.uniforms(call, positions(model_input), Purpose.POSITIONS)
        gumbel, count = -(-u.log()).log(), torch.full_like(ctx.generated, self.positions)
        # Random positions are known in advance. Otherwise all are drawn, and those not chosen are restored.
        revise = free if is_informed else best_positions(gumbel, free, count)
        transition = Transition(
            call=call,
            tokens=state.tokens,
            revise=revise,
            inspect=free if is_informed else ctx.no_positions,
            coins=redraw(ctx.signal(t)),
            temperature=self.inner.temperature,
            support=self.inner.support(state.call),
            against=state.tokens if is_informed else None,
        )
        features, outcome = ctx.call(state, model_input, t, transition)
        if is_informed:
            revise = best_positions(gumbel + self.preference(ctx, state, outcome), free, count)
        info = StepInfo(call, t, model_input, outcome, {**masks, "corrected": revise})
        tokens = outcome.tokens.where(revise, state.tokens)
        return state.next(tokens, features, state.memory)._replace(call=state.call), info

    def inputs(self, ctx: Context, state: State) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """(B, L) each: the model input of a correction, the positions that it may change, and masks by name."""
        if not isinstance(self.inner, CRS):
            return state.tokens, ctx.free, {}
        visible = self.inner.visible(state)
        masks = {"committed": state.memory[1] < state.call, "visible": visible}
        return self.inner.model_input(state), ctx.free & ~visible, masks

    def preference(self, ctx: Context, state: State, outcome: Outcome) -> Tensor:
        """(B, L) the log weight of a position for an informed corrector: minus its margin over tau.

        The margin is ln(p at the state's token / p at the best other token), where p = signal h + noise / V."""
        assert outcome.gain is not None
        signal = ctx.signal(self.inner.times[state.call])
        largest, ratio, is_top = 1 - outcome.deficit, outcome.gain.exp(), outcome.top == state.tokens
        own = torch.where(is_top, largest, largest / ratio)
        other = torch.where(is_top, largest * ratio, largest)
        noise = (1 - signal) / ctx.model.vocab_size
        return ((signal * other + noise) / (signal * own + noise)).log() / self.tau

    def shared_calls(self, other: Sampler) -> int:
        return self.nfe if self == other else 0
