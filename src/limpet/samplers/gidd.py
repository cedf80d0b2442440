"""The two samplers of GIDD: set the positions that gain most, and correct a finished sample token by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from limpet.diffusion import process
from limpet.diffusion.backends import Transition
from limpet.diffusion.transitions import nested
from limpet.errors import LimpetError
from limpet.samplers.base import Context, Sampler, State, StepInfo
from limpet.samplers.native import Native
from limpet.samplers.params import param, refresh_param
from limpet.samplers.predictions import best_positions, read_predictions


@dataclass(frozen=True)
class GIDDAdaptive(Sampler):
    """Each call sets the positions with the largest max h - h(z) to their argmax, and keeps the others.

    This is the adaptive step of GIDD's sequel (arXiv 2512.10858). There, the prior pi(z) of the current token also
    counts; on uniform states it is 1 / V everywhere. Nothing is stored: a later call may set any position again."""

    nfe: int = param(64, "Network calls per sample.", low=2)
    refresh: int = refresh_param()
    count: int | None = param(None, "Positions set in one call. None: the length over the calls that set.", low=0)
    final_step: Literal["state", "argmax"] = param(
        "state", "The last call: set positions like the other calls, or return the argmax."
    )

    def step(self, ctx: Context, state: State) -> tuple[State, StepInfo]:
        r, t = state.call, process.uniform_grid(self.nfe)[state.call]
        inspection = Transition(
            call=r,
            tokens=state.tokens,
            revise=ctx.no_positions,
            inspect=ctx.free,
            coins=nested(ctx.signal(t), 0.0),
            against=state.tokens,
        )
        features, outcome = ctx.call(state, state.tokens, t, inspection)
        # The gain is ln(best other probability / h(z)). Where it is positive, the best other token is the argmax.
        better = ctx.free & (outcome.gain > 0)
        lead = (1 - outcome.deficit) * -torch.where(better, -outcome.gain, 0.0).expm1()
        chosen = best_positions(lead, better, self.counts(ctx))
        if self.final_step == "argmax" and r == self.nfe - 1:
            chosen = ctx.free
        tokens = torch.where(chosen, outcome.top, state.tokens)
        info = StepInfo(r, t, state.tokens, outcome._replace(tokens=tokens), {"chosen": chosen})
        return state.next(tokens, features), info

    def counts(self, ctx: Context) -> Tensor:
        """(B,) the most positions that one call sets."""
        calls = self.nfe - (self.final_step == "argmax")
        counts = (ctx.generated + (calls - 1)) // calls
        return counts if self.count is None else torch.full_like(counts, self.count)


class CorrectionMemory(NamedTuple):
    """The progress of each sample's correction: (B, L) each, with one value repeated at all positions of a sample."""

    agreed: Tensor  # the most positions at which a corrected sample equalled the argmax of its call
    idle: Tensor  # calls since `agreed` increased
    stopped: Tensor  # bool: later calls do not change the sample


@dataclass(frozen=True)
class GIDDCorrection(Native):
    """A native sample, then calls that each change one of its tokens.

    Each call draws tokens from a sharpened distribution at nearly no noise, and takes the most likely draw that differs
    from the sample (arXiv 2503.04482).

    A sample stops if a call changes nothing, or if its agreement with the argmax has not increased for a while. Its
    remaining calls are made and counted."""

    corrections: int | None = param(None, "Calls of nfe that correct, after the others. None: half of them.", low=0)
    correction_time: float = param(0.01, "The time given to the network when correcting.", low=process.EPS, high=1)
    sharpness: float = param(0.1, "Softmax temperature of the draws when correcting.", above=0, high=1e6)
    changes: int = param(1, "Most tokens changed by one correcting call.", low=1)
    patience: int | None = param(32, "Calls without better agreement before a sample stops. None: any.", low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nfe - self.correcting_calls < 2:
            raise LimpetError(
                f"{self.name} has corrections {self.correcting_calls} of nfe {self.nfe}; at least 2 calls must draw "
                "the sample that they correct"
            )

    @property
    def correcting_calls(self) -> int:
        """How many calls correct."""
        return self.corrections if self.corrections is not None else min(self.nfe // 2, self.nfe - 2)

    @property
    def predictor(self) -> Native:
        """The sampler of the calls before."""
        return self.as_native(nfe=self.nfe - self.correcting_calls)

    def init(self, ctx: Context) -> State:
        zeros = torch.zeros_like(ctx.fixed)
        return State(0, ctx.noise(), CorrectionMemory(zeros, zeros, ctx.no_positions))

    def step(self, ctx: Context, state: State) -> tuple[State, StepInfo]:
        if state.call < self.predictor.nfe:
            after, info = self.predictor.step(ctx, state)
            return after._replace(memory=state.memory), info._replace(masks={"changed": ctx.no_positions})
        agreed, idle, stopped = state.memory
        (features,) = ctx.call(state, state.tokens, self.correction_time)
        predictions = read_predictions(ctx, features, state.call, self.sharpness)
        differs = ctx.free & (predictions.drawn != state.tokens)
        changed = best_positions(predictions.drawn_prob, differs, torch.full_like(ctx.generated, self.changes))
        tokens = torch.where(changed, predictions.drawn, state.tokens)

        agrees = (ctx.free & (tokens == predictions.top)).sum(-1, keepdim=True)
        idle = torch.where(agrees > agreed, 0, idle + 1)
        is_stuck = idle > (torch.inf if self.patience is None else self.patience)
        stopped = stopped | is_stuck | ~changed.any(-1, keepdim=True)
        changed = changed & ~stopped  # the call at which a sample stops does not change it
        tokens = torch.where(changed, predictions.drawn, state.tokens)
        memory = CorrectionMemory(torch.maximum(agreed, agrees), idle, stopped)
        outcome = predictions.outcome(ctx, tokens)
        info = StepInfo(state.call, self.correction_time, state.tokens, outcome, {"changed": changed})
        return state.next(tokens, features, memory), info
