"""Committed reveal sampling (CRS), the paper's Algorithm 1: concentrated predictions are stored and kept visible.

The nearest published ancestor is RDM's reparameterized decoding (arXiv 2302.05737; `rdm.py`), which also keeps
confident predictions on uniform noise. There the state itself holds them, and those with low scores return to noise."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from limpet.errors import LimpetError
from limpet.samplers.base import Context, State, StepInfo
from limpet.samplers.committed_values import REFRESHING, RULES, Choice
from limpet.samplers.native import Native
from limpet.samplers.params import param

Values = Literal["argmax", "second", "nucleus", "refreshed", "refreshed-half", "refreshed-interleaved", "recorded"]
CRSFinalStep = Literal["argmax", "sample", "keep"]
Write = Literal["input", "output", "both"]

FINAL_STEP_HELP = (
    "The last call: the argmax; one more draw, as in the released code; or keep committed tokens and draw the others."
)
OPEN = 2**31 - 1  # in `committed_at`: not committed yet
NEVER = 2**31 - 2  # in `committed_at`: a replay does not commit this position


class Memory(NamedTuple):
    """What CRS stores."""

    committed_values: Tensor  # (B, L) the committed token, where there is one
    committed_at: Tensor  # (B, L) the call that commits the position, or OPEN, or NEVER


class ReplayMemory(Memory):
    """The memory of a trajectory that repeats the choices of another."""

    __slots__ = ()


@dataclass(frozen=True)
class CRS(Native):
    """Native steps; after warmup, the most confident predictions are committed and shown to the network."""

    final_step: CRSFinalStep = param("argmax", FINAL_STEP_HELP, since="warmup")  # type: ignore[assignment]
    horizon: int | None = param(None, "Later calls that see a committed token. None: all.", low=1, since="warmup")
    budget: float = param(0.5, "Most deficit committed, per position of generated length.", low=0, since="warmup")
    spacing: int = param(4, "Positions committed in one call are more than this far apart.", low=0, since="warmup")
    count: int | None = param(
        None,
        "Most positions committed in one call. None: the length over the steps after warmup, rounded up.",
        low=0,
        since="warmup",
    )
    values: Values = param(
        "argmax",
        "What is committed: the argmax; the second most likely token; a draw from the nucleus without the argmax; the "
        "argmax of each later call, of every second call, or of alternate positions; the tokens of a replayed memory.",
        since="warmup",
    )
    value_top_p: float = param(0.9, "top_p of the draw for values=nucleus.", above=0, high=1, since="warmup")
    write: Write = param("input", "Whether committed tokens enter the model input, the output or both.", since="warmup")

    def init(self, ctx: Context) -> State:
        if self.values == "recorded":
            raise LimpetError("crs has values 'recorded', which a replay alone can fill: give replay=, or other values")
        tokens = ctx.noise()
        return State(0, tokens, Memory(torch.zeros_like(tokens), torch.full_like(tokens, OPEN)))

    def step(self, ctx: Context, state: State) -> tuple[State, StepInfo]:
        """One call: predict, draw the next state, select positions and commit their tokens."""
        r, t, is_last = state.call, self.times[state.call], state.call == self.nfe - 1
        is_replay = isinstance(state.memory, ReplayMemory)
        values, committed_at = state.memory
        committed, visible, model_input = committed_at < r, self.visible(state), self.model_input(state)

        is_selecting = not is_replay and self.warmup_calls <= r and not is_last
        # Positions that may be committed at this call, or that a replay commits at this call.
        eligible = ctx.free & (committed_at == (OPEN if is_selecting else r))
        if is_selecting:
            eligible = eligible & self.may_commit(committed, r)
        revisable = self.revisable(ctx, state, visible)
        revise = ctx.free ^ committed if self.skips_committed and not ctx.draws_all else ctx.free
        # The transition starts from the state, not from the model input. Tokens committed below do not change it.
        transition = self.transition(ctx, state, revise, eligible if revisable is None else eligible | revisable)
        if revisable is not None:
            transition = replace(transition, against=values)
        features, outcome = ctx.call(state, model_input, t, transition, clean=visible | ~ctx.free)

        chosen, tokens = eligible, self.read(ctx, state, outcome)
        if is_selecting:
            chosen = ctx.backend.select(outcome.deficit, eligible, *self.limits(ctx), self.spacing)
        masks = {"committed": committed, "visible": visible, "chosen": chosen}
        before = values
        if not is_last or revisable is not None:
            values = self.update_values(Choice(self, ctx, features, outcome, chosen, visible, values, r))
            committed_at = torch.where(chosen, r, committed_at)
        if self.can_revise:
            masks["revised"] = visible & (values != before)
        if is_last and (self.write != "input" or self.final_step == "keep"):
            tokens = torch.where(committed, values, tokens)
        info = StepInfo(r, t, model_input, outcome, masks)
        return state.next(tokens, features, (ReplayMemory if is_replay else Memory)(values, committed_at)), info

    @property
    def skips_committed(self) -> bool:
        """Whether the state at committed positions is never read again, so that it need not be drawn."""
        return self.horizon is None and self.write != "output" and self.final_step != "sample"

    @property
    def can_revise(self) -> bool:
        """Whether a visible committed token can change."""
        return self.values in REFRESHING

    def may_commit(self, committed: Tensor, call: int) -> Tensor:
        """(L,) bool: the positions that a call may commit."""
        return torch.ones_like(committed[0])

    def visible(self, state: State) -> Tensor:
        """(B, L) bool: committed tokens in the model input. Committed at call e, visible in e + 1, ..., e + horizon."""
        _, committed_at = state.memory
        visible = committed_at < (state.call if self.write != "output" else 0)
        return visible if self.horizon is None else visible & (committed_at >= state.call - self.horizon)

    def model_input(self, state: State) -> Tensor:
        """(B, L) the state with the visible committed tokens written over it."""
        return torch.where(self.visible(state), state.memory[0], state.tokens)

    def revisable(self, ctx: Context, state: State, visible: Tensor) -> Tensor | None:
        """(B, L) bool: visible committed tokens that this call may change, so it inspects them; None for none."""
        return visible if self.values in REFRESHING and state.call < self.nfe - 1 else None

    def update_values(self, choice: Choice) -> Tensor:
        """(B, L) the committed tokens after a call."""
        return RULES[self.values](choice)

    def limits(self, ctx: Context) -> tuple[Tensor, Tensor]:
        """(B,) each: K and E, the most positions and the most deficit committed in one call."""
        steps = max(1, self.nfe - 1 - self.warmup_calls)  # that select
        count = (ctx.generated + (steps - 1)) // steps
        count = count if self.count is None else torch.full_like(count, self.count)
        return count, self.budget * ctx.generated.double() / steps

    def replay(self, ctx: Context, recorded: tuple[Tensor, ...]) -> State:
        """The first state of a trajectory that commits where and when a recorded one did; fixed positions never."""
        if len(recorded) != 2:
            raise LimpetError(
                f"crs replays a memory of committed tokens and their calls; this memory has {len(recorded)} parts"
            )
        values, committed_at = recorded
        values = values if self.values == "recorded" else torch.zeros_like(values)
        committed_at = torch.where(ctx.free, committed_at.clamp(max=NEVER), NEVER)
        return State(0, ctx.noise(), ReplayMemory(values, committed_at))

    def native_opening(self) -> Native | None:
        return self.native() if type(self) is CRS else None

    def native(self) -> Native:
        """The native sampler with the same parameters."""
        return self.as_native(final_step="argmax" if self.final_step == "argmax" else "sample")
