"""GIDD's two ways to use a call: set the positions that gain most, and correct a finished sample token by token."""

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
from limpet.samplers.params import param
from limpet.samplers.predictions import first, read


@dataclass(frozen=True)
class GIDDAdaptive(Sampler):
    """Each call sets the positions with the largest max h - h(z) to their argmax, and leaves all others as they are
    (the adaptive step of GIDD's sequel, arXiv 2512.10858). There, a position also counts by the prior pi(z) of the
    token that stands in it; on uniform states that is 1 / V everywhere. Commitment without memory: any token may be
    set again."""

    nfe: int = param(64, "Network calls for one sample.", low=2)
    count: int | None = param(None, "Positions set in one call; None for the generated length over the calls that set, "
                             "rounded up.", low=0)  # fmt: skip
    final_step: Literal["state", "argmax"] = param("state", "The last call: sets positions as the others do, or reads out "
                                                "the argmax of every distribution.")  # fmt: skip

    def step(self, ctx: Context, state: State) -> tuple[State, StepInfo]:
        r, t = state.call, process.uniform_grid(self.nfe)[state.call]
        look = Transition(
            call=r, tokens=state.tokens, revise=ctx.no_positions, inspect=ctx.free,
            coins=nested(ctx.signal(t), 0.0), against=state.tokens,
        )  # fmt: skip
        features, outcome = ctx.call(state, state.tokens, t, look)
        # The gain is ln of the best other token's distribution over that of z: where it is positive, the other is the argmax.
        better = ctx.free & (outcome.gain > 0)
        lead = (1 - outcome.deficit) * -torch.where(better, -outcome.gain, 0.0).expm1()
        chosen = first(lead, better, self.counts(ctx))
        if self.final_step == "argmax" and r == self.nfe - 1:
            chosen = ctx.free
        tokens = torch.where(chosen, outcome.top, state.tokens)
        info = StepInfo(r, t, state.tokens, outcome._replace(tokens=tokens), {"chosen": chosen})
        return state.next(tokens, features), info

    def counts(self, ctx: Context) -> Tensor:
        """(B,) how many positions a call sets at most."""
        calls = self.nfe - (self.final_step == "argmax")
        each = (ctx.generated + (calls - 1)) // calls
        return each if self.count is None else torch.full_like(each, self.count)


class Progress(NamedTuple):
    """How a sample's correction goes, (B, L), the same at all its positions."""

    agreed: Tensor  # the most positions at which a corrected sample was what its call's argmax was
    idle: Tensor  # calls since that rose
    stopped: Tensor  # bool: nothing more is changed


@dataclass(frozen=True)
class GIDDCorrection(Native):
    """A native path, then calls that each change one token of its output: of the tokens drawn from a sharpened distribution at
    nearly no noise, the likeliest of those that differ from what stands there (arXiv 2503.04482).

    A sample stops when a call changes nothing, or when agreement with the argmax has not risen for a while; its calls
    go on without it, and all are counted."""

    corrections: int | None = param(None, "Calls of the nfe that correct, after the others have drawn and read out a "
                                   "sample; None for half.", low=0)  # fmt: skip
    correction_time: float = param(0.01, "The time that correcting calls are told.", low=process.EPS, high=1)
    sharpness: float = param(0.1, "Temperature of the distribution that corrections are drawn from.", above=0, high=1e6)
    changes: int = param(1, "Tokens changed in one correcting call, at most.", low=1)
    patience: int | None = param(32, "Calls in a row after which a sample stops that agrees no more than before; None "
                                "for never.", low=0)  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nfe - self.correcting < 2:
            raise LimpetError(
                f"{self.name} has corrections {self.correcting} of nfe {self.nfe}; at least 2 calls must draw the "
                "sample that they correct"
            )

    @property
    def correcting(self) -> int:
        return self.corrections if self.corrections is not None else min(self.nfe // 2, self.nfe - 2)

    @property
    def predictor(self) -> Native:
        """The sampler of the calls before."""
        own = {name: getattr(self, name) for name in Native.__dataclass_fields__}
        return Native(**{**own, "nfe": self.nfe - self.correcting})

    def init(self, ctx: Context) -> State:
        none = torch.zeros_like(ctx.fixed)
        return State(0, ctx.noise(), Progress(none, none, ctx.no_positions))

    def step(self, ctx: Context, state: State) -> tuple[State, StepInfo]:
        if state.call < self.predictor.nfe:
            drawn, info = self.predictor.step(ctx, state)
            return drawn._replace(memory=state.memory), info._replace(masks={"changed": ctx.no_positions})
        agreed, idle, stopped = state.memory
        (features,) = ctx.call(state, state.tokens, self.correction_time)
        seen = read(ctx, features, state.call, self.sharpness)
        differs = ctx.free & (seen.drawn != state.tokens)
        changed = first(seen.chance, differs, torch.full_like(ctx.generated, self.changes))
        tokens = torch.where(changed, seen.drawn, state.tokens)

        now = (ctx.free & (tokens == seen.top)).sum(-1, keepdim=True)
        idle = torch.where(now > agreed, 0, idle + 1)
        tired = idle > (torch.inf if self.patience is None else self.patience)
        stopped = stopped | tired | ~changed.any(-1, keepdim=True)
        changed = changed & ~stopped  # a call that makes a sample stop changes it no more
        tokens = torch.where(changed, seen.drawn, state.tokens)
        progress = Progress(torch.maximum(agreed, now), idle, stopped)
        info = StepInfo(state.call, self.correction_time, state.tokens, seen.outcome(ctx, tokens), {"changed": changed})
        return state.next(tokens, features, progress), info
