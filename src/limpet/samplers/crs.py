"""Committed reveal sampling, the paper's Algorithm 1: concentrated predictions are stored and shown to later calls."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from limpet.errors import LimpetError
from limpet.samplers import committed_values
from limpet.samplers.committed_values import Choice
from limpet.samplers.base import Context, State, StepInfo
from limpet.samplers.native import Native
from limpet.samplers.params import param

Values = Literal["argmax", "second", "nucleus", "refreshed", "refreshed-half", "refreshed-interleaved", "recorded"]
CRSFinalStep = Literal["argmax", "sample", "keep"]
Write = Literal["input", "output", "both"]

OPEN = 2**31 - 1  # stands for the call that selects a position, while none has
NEVER = 2**31 - 2  # and where none will, in a replay


class Memory(NamedTuple):
    """What CRS remembers."""

    committed_values: Tensor  # (B, L) the stored label, where there is one
    committed_at: Tensor  # (B, L) the call that selects the position, or OPEN, or NEVER


class Replayed(Memory):
    """The same, of a path that does again what another did."""

    __slots__ = ()


@dataclass(frozen=True)
class CRS(Native):
    """Native steps, and after warmup the surest predictions become labels that the denoiser sees."""

    final_step: CRSFinalStep = param("argmax", "The last call: the argmax of the distribution; one more draw (the released code's way); "  # type: ignore[assignment]
                             "or labels copied and one more draw elsewhere.", since="warmup")  # fmt: skip
    horizon: int | None = param(None, "For how many later calls the denoiser sees a label; None for ever.", low=1,
                               since="warmup")  # fmt: skip
    budget: float = param(0.5, "Total deficit that may be committed along the path, as a fraction of the generated "
                         "length.", low=0, since="warmup")  # fmt: skip
    spacing: int = param(4, "Positions committed in one call are more than this far apart.", low=0, since="warmup")
    count: int | None = param(None, "Most positions committed in one call; None for the generated length over the steps "
                             "after warmup, rounded up.", low=0, since="warmup")  # fmt: skip
    values: Values = param("argmax", "What a label holds: the argmax; the second-ranked token; a draw from the nucleus "
                          "without the argmax; the argmax of each current call, of every second one, or of every "
                          "second position in turn; or what the replayed path recorded.", since="warmup")  # fmt: skip
    value_top_p: float = param(0.9, "The nucleus that values=nucleus draws from.", above=0, high=1, since="warmup")
    write: Write = param("input", "Whether labels are written into the denoiser's input, only copied to the output, or "
                        "both.", since="warmup")  # fmt: skip

    def init(self, ctx: Context) -> State:
        if self.values == "recorded":
            raise LimpetError("crs has values 'recorded', which a replay alone can fill: give replay=, or other values")
        tokens = ctx.noise()
        return State(0, tokens, Memory(torch.zeros_like(tokens), torch.full_like(tokens, OPEN)))

    def step(self, ctx: Context, state: State) -> tuple[State, StepInfo]:
        """One call: look, draw the next state, then select positions and store their labels; the last reads out."""
        r, t, last = state.call, self.times[state.call], state.call == self.nfe - 1
        memory = Memory if type(state.memory) is not Replayed else Replayed
        stored, committed_at = state.memory
        committed, visible, seen = committed_at < r, self.visible(state), self.seen(state)

        selecting = memory is Memory and self.warmup_calls <= r and not last
        # What may be committed now, or in a replay is.
        eligible = ctx.free & (committed_at == (OPEN if selecting else r))
        doubted = self.doubted(ctx, state, visible)
        revise = ctx.free ^ committed if self.hides and not ctx.trace else ctx.free
        # The transition starts from the state, not from the input, and the labels chosen below do not touch it.
        ask = self.transition(ctx, state, revise, eligible if doubted is None else eligible | doubted)
        ask = ask if doubted is None else replace(ask, against=stored)
        features, outcome = ctx.call(state, seen, t, ask, clean=visible | ~ctx.free)

        chosen, tokens = eligible, self.read(ctx, state, outcome)
        if selecting:
            most, allowance = self.limits(ctx)
            chosen = ctx.backend.select(outcome.deficit, eligible, most, allowance, self.spacing)
        masks = {"committed": committed, "visible": visible, "chosen": chosen}
        before = stored
        if not last or doubted is not None:
            stored = self.relabel(Choice(self, ctx, features, outcome, chosen, visible, stored, r))
            committed_at = torch.where(chosen, r, committed_at)
        if self.mends:
            masks["revised"] = visible & (stored != before)
        if last and (self.write != "input" or self.final_step == "keep"):
            tokens = torch.where(committed, stored, tokens)
        info = StepInfo(r, t, seen, outcome, masks)
        return state.next(tokens, features, memory(stored, committed_at)), info

    @property
    def hides(self) -> bool:
        """Whether a label hides its position for ever, which spares the state there: it is never looked at again."""
        return self.horizon is None and self.write != "output" and self.final_step != "sample"

    @property
    def mends(self) -> bool:
        """Whether a visible label may take another value."""
        return self.values in committed_values.REFRESHING

    def visible(self, state: State) -> Tensor:
        """(B, L) bool: committed at e, a label is seen by the calls e + 1 ... e + horizon."""
        _, committed_at = state.memory
        seen = committed_at < (state.call if self.write != "output" else 0)
        return seen if self.horizon is None else seen & (committed_at >= state.call - self.horizon)

    def seen(self, state: State) -> Tensor:
        """(B, L) what the denoiser is shown: the state with the visible labels written over it."""
        return torch.where(self.visible(state), state.memory[0], state.tokens)

    def doubted(self, ctx: Context, state: State, visible: Tensor) -> Tensor | None:
        """(B, L) bool: the visible labels whose distributions are looked at again; None for none."""
        return visible if self.values in committed_values.REFRESHING and state.call < self.nfe - 1 else None

    def relabel(self, choice: Choice) -> Tensor:
        """(B, L) the labels after a call."""
        return committed_values.RULES[self.values](choice)

    def limits(self, ctx: Context) -> tuple[Tensor, Tensor]:
        """(B,) K and E: the most positions, and the most deficit, committed in one call."""
        after = max(1, self.nfe - 1 - self.warmup_calls)  # steps that may select
        each = (ctx.generated + (after - 1)) // after
        most = each if self.count is None else torch.full_like(each, self.count)
        return most, self.budget * ctx.generated.double() / after

    def replay(self, ctx: Context, recorded: tuple[Tensor, ...]) -> State:
        """Select where and when a recorded path did, and nowhere else; never a given token."""
        if len(recorded) != 2:
            raise LimpetError(
                f"crs replays labels and the calls that committed them; this memory has {len(recorded)} parts"
            )
        stored, committed_at = recorded
        kept = stored if self.values == "recorded" else torch.zeros_like(stored)
        return State(0, ctx.noise(), Replayed(kept, torch.where(ctx.free, committed_at.clamp(max=NEVER), NEVER)))

    def native_opening(self) -> Native | None:
        return self.native() if type(self) is CRS else None

    def native(self) -> Native:
        """The native sampler with the same parameters."""
        steps = {one.name: getattr(self, one.name) for one in fields(Native)}
        return Native(**steps | {"final_step": "argmax" if self.final_step == "argmax" else "sample"})
