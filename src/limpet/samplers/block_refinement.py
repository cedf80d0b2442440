"""Block refinement: a quota of the surest tokens is committed in each call, and may be edited; the rest stay noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from limpet.engine import process
from limpet.engine.path import Info, Path, State
from limpet.samplers.entropy_bound import Clock
from limpet.samplers.knobs import knob
from limpet.samplers.reading import LAW, Law, anything, first, read, time_of
from limpet.samplers.sampler import Sampler


class Memory(NamedTuple):
    committed: Tensor  # (B, L) bool: the token stays, unless it is edited


@dataclass(frozen=True)
class BlockRefinement(Sampler):
    """Call r of N brings the committed tokens of L free positions to ceil((r + 1) L / N), the most confident first,
    and commits whatever else is more confident than the threshold; all others become uniform. The whole sequence is
    one block (LLaDA, arXiv 2502.09992; on uniform states as diffusers' scheduler of this name has it). A committed
    token that another, confident enough, contradicts may be edited (LLaDA2.1)."""

    nfe: int = knob(64, "Network calls for one sample; the last commits what is left.", low=2)
    threshold: float = knob(0.95, "Confidence above which a token is committed beyond the quota.", low=0, high=1)
    editing: float | None = knob(None, "Confidence above which another token takes a committed one's place; None for "
                                 "never.", low=0, high=1)  # fmt: skip
    temperature: float = knob(0.0, "Of the laws that candidates are drawn from; 0 takes the argmax, whose confidence "
                              "is of the law as it is.", low=0, high=1e6)  # fmt: skip
    clock: Clock = knob("share", "Which signal the denoiser is told: the share of committed tokens, or the uniform "
                        "grid's.")  # fmt: skip
    law: Law = knob("leave-one-out", LAW)

    def begin(self, path: Path) -> State:
        return State(0, path.noise(), Memory(path.nowhere))

    def step(self, path: Path, state: State) -> tuple[State, Info]:
        r, (committed,) = state.call, state.memory
        t = time_of(path, committed) if self.clock == "share" else process.uniform_grid(self.nfe)[r]
        (features,) = path.call(state.tokens, t)
        seen = read(path, features, r, self.temperature, self.law)

        target = ((r + 1) * path.generated + self.nfe - 1) // self.nfe
        waiting = path.free & ~committed
        due = first(seen.chance, waiting, target - committed.sum(-1))
        chosen = due | (waiting & (seen.chance > self.threshold))
        limit = torch.inf if self.editing is None else self.editing
        edited = committed & (seen.drawn != state.tokens) & (seen.chance > limit)
        tokens = torch.where(chosen | edited, seen.drawn, state.tokens)
        committed = committed | chosen
        tokens = torch.where(committed, tokens, anything(path, r))
        marks = {"committed": committed, "chosen": chosen, "edited": edited}
        told = float(t.mean()) if isinstance(t, Tensor) else t
        return State(r + 1, tokens, Memory(committed)), Info(r, told, state.tokens, seen.outcome(path, tokens), marks)
