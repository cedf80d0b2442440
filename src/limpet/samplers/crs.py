"""Committed reveal sampling, the paper's Algorithm 1: concentrated predictions are stored and shown to later calls."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from limpet.engine.path import Info, Path, State
from limpet.errors import LimpetError
from limpet.samplers import labels
from limpet.samplers.knobs import knob
from limpet.samplers.labels import Choice
from limpet.samplers.native import Native

Values = Literal["argmax", "second", "nucleus", "refreshed", "refreshed-half", "refreshed-in-turn", "recorded"]
Readout = Literal["argmax", "ancestral", "copied"]
Write = Literal["input", "output", "both"]

OPEN = 2**31 - 1  # stands for the call that selects a position, while none has
NEVER = 2**31 - 2  # and where none will, in a replay


class Memory(NamedTuple):
    """What CRS remembers."""

    labels: Tensor  # (B, L) the stored label, where there is one
    selected_at: Tensor  # (B, L) the call that selects the position, or OPEN, or NEVER


class Replayed(Memory):
    """The same, of a path that does again what another did."""

    __slots__ = ()


@dataclass(frozen=True)
class CRS(Native):
    """Native steps, and after warmup the surest predictions become labels that the denoiser sees."""

    endpoint: Readout = knob("argmax", "The last call: the argmax of the law; one more draw (the released code's way); "  # type: ignore[assignment]
                             "or labels copied and one more draw elsewhere.", since="warmup")  # fmt: skip
    horizon: int | None = knob(None, "For how many later calls the denoiser sees a label; None for ever.", low=1,
                               since="warmup")  # fmt: skip
    budget: float = knob(0.5, "Total deficit that may be selected along the path, as a fraction of the generated "
                         "length.", low=0, since="warmup")  # fmt: skip
    spacing: int = knob(4, "Positions selected in one call are more than this far apart.", low=0, since="warmup")
    count: int | None = knob(None, "Most positions selected in one call; None for the generated length over the steps "
                             "after warmup, rounded up.", low=0, since="warmup")  # fmt: skip
    values: Values = knob("argmax", "What a label holds: the argmax; the second-ranked token; a draw from the nucleus "
                          "without the argmax; the argmax of each current call, of every second one, or of every "
                          "second position in turn; or what the replayed path recorded.", since="warmup")  # fmt: skip
    value_top_p: float = knob(0.9, "The nucleus that values=nucleus draws from.", above=0, high=1, since="warmup")
    write: Write = knob("input", "Whether labels are written into the denoiser's input, only copied to the output, or "
                        "both.", since="warmup")  # fmt: skip

    def begin(self, path: Path) -> State:
        if self.values == "recorded":
            raise LimpetError("crs has values 'recorded', which a replay alone can fill: give replay=, or other values")
        tokens = path.noise()
        return State(0, tokens, Memory(torch.zeros_like(tokens), torch.full_like(tokens, OPEN)))

    def step(self, path: Path, state: State) -> tuple[State, Info]:
        """One call: look, draw the next state, then select positions and store their labels; the last reads out."""
        r, t, last = state.call, self.times[state.call], state.call == self.nfe - 1
        memory = Memory if type(state.memory) is not Replayed else Replayed
        stored, selected_at = state.memory
        selected, visible, seen = selected_at < r, self.visible(state), self.seen(state)

        selecting = memory is Memory and self.early <= r and not last
        # What may be selected now, or in a replay is.
        eligible = path.free & (selected_at == (OPEN if selecting else r))
        doubted = self.doubted(path, state, visible)
        revise = path.free ^ selected if self.hides and not path.trace else path.free
        # The transition starts from the state, not from the input, and the labels chosen below do not touch it.
        ask = self.transition(path, state, revise, eligible if doubted is None else eligible | doubted)
        ask = ask if doubted is None else replace(ask, against=stored)
        features, outcome = path.call(seen, t, ask, clean=visible | ~path.free)

        chosen, tokens = eligible, self.read(path, state, outcome)
        if selecting:
            most, allowance = self.limits(path)
            chosen = path.backend.select(outcome.deficit, eligible, most, allowance, self.spacing)
        marks = {"selected": selected, "visible": visible, "chosen": chosen}
        before = stored
        if not last or doubted is not None:
            stored = self.relabel(Choice(self, path, features, outcome, chosen, visible, stored, r))
            selected_at = torch.where(chosen, r, selected_at)
        if self.mends:
            marks["mended"] = visible & (stored != before)
        if last and (self.write != "input" or self.endpoint == "copied"):
            tokens = torch.where(selected, stored, tokens)
        return State(r + 1, tokens, memory(stored, selected_at)), Info(r, t, seen, outcome, marks)

    @property
    def hides(self) -> bool:
        """Whether a label hides its position for ever, which spares the state there: it is never looked at again."""
        return self.horizon is None and self.write != "output" and self.endpoint != "ancestral"

    @property
    def mends(self) -> bool:
        """Whether a visible label may take another value."""
        return self.values in labels.REFRESHING

    def visible(self, state: State) -> Tensor:
        """(B, L) bool: selected at e, a label is seen by the calls e + 1 ... e + horizon."""
        _, selected_at = state.memory
        seen = selected_at < (state.call if self.write != "output" else 0)
        return seen if self.horizon is None else seen & (selected_at >= state.call - self.horizon)

    def seen(self, state: State) -> Tensor:
        """(B, L) what the denoiser is shown: the state with the visible labels written over it."""
        return torch.where(self.visible(state), state.memory[0], state.tokens)

    def doubted(self, path: Path, state: State, visible: Tensor) -> Tensor | None:
        """(B, L) bool: the visible labels whose laws are looked at again; None for none."""
        return visible if self.values in labels.REFRESHING and state.call < self.nfe - 1 else None

    def relabel(self, choice: Choice) -> Tensor:
        """(B, L) the labels after a call."""
        return labels.RULES[self.values](choice)

    def limits(self, path: Path) -> tuple[Tensor, Tensor]:
        """(B,) K and E: the most positions, and the most deficit, selected in one call."""
        after = max(1, self.nfe - 1 - self.early)  # steps that may select
        each = (path.generated + (after - 1)) // after
        most = each if self.count is None else torch.full_like(each, self.count)
        return most, self.budget * path.generated.double() / after

    def replay(self, path: Path, recorded: tuple[Tensor, ...]) -> State:
        """Select where and when a recorded path did, and nowhere else; never a given token."""
        if len(recorded) != 2:
            raise LimpetError(
                f"crs replays labels and the calls that selected them; this memory has {len(recorded)} parts"
            )
        stored, selected_at = recorded
        kept = stored if self.values == "recorded" else torch.zeros_like(stored)
        return State(0, path.noise(), Replayed(kept, torch.where(path.free, selected_at.clamp(max=NEVER), NEVER)))

    def opening(self) -> Native | None:
        return self.native() if type(self) is CRS else None

    def native(self) -> Native:
        """The native sampler with the same knobs."""
        steps = {one.name: getattr(self, one.name) for one in fields(Native)}
        return Native(**steps | {"endpoint": "argmax" if self.endpoint == "argmax" else "ancestral"})
