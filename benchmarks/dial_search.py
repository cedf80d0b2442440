"""What was tried to improve Mend on interleaved steps, near both ends of the dial, on seeds of the choice.

    python benchmarks/dial_search.py --models exact:words --calls 8 --n 256
    python benchmarks/dial_search.py --models exact:words exact:grammar --calls 16 --only dial turn error together
    python benchmarks/dial_search.py --models sudoku --calls 16 --n 32 --only dial turn

Cells that the file has are kept. Networks run in bfloat16."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from measuring import ResultFile
from torch import Tensor

import limpet
from limpet import param
from limpet.diffusion.backends import positions
from limpet.diffusion.process import EPS
from limpet.diffusion.rng import Purpose, uniform_token
from limpet.diffusion.truncation import Support
from limpet.evaluation import source_judge
from limpet.samplers import Context, Mend, State, StepInfo, parse
from limpet.samplers.committed_values import Choice
from limpet.samplers.crs import OPEN, Memory

Together = Literal["all", "parity", "half"]


@dataclass(frozen=True)
class Variant(Mend):
    """Mend with parameters that were tried and left out, since they improved nothing measurably."""

    grid_power: float = param(0.0, "Times are this power of equal steps. 0: those of the grid.", low=0)
    end_top_p: float | None = param(None, "top_p falls or rises to this in proportion to the time.", above=0, high=1)
    forget: float = param(0.0, "A contradicted token with more deficit than this becomes noisy again. 0: none.", low=0)
    budget_slope: float = param(0.0, "The budget grows with this power of the signal level.", low=0)
    follow: float = param(0.0, "The budget falls by exp of this times the share of contradicted tokens.", low=0)
    together: Together = param("all", "One call revises: all; those of the parity of the worst; a random half.")

    revise_turn: bool = param(False, "Inspect and revise only committed tokens whose positions step in the call.")

    @property
    def times(self) -> tuple[float, ...]:
        if not self.grid_power:
            return super().times
        steps = torch.linspace(1, EPS ** (1 / self.grid_power), self.nfe, dtype=torch.float64)
        return tuple((steps**self.grid_power).tolist())

    def support(self, call: int) -> Support:
        own = super().support(call)
        if self.end_top_p is None:
            return own
        return own._replace(top_p=self.end_top_p + (self.top_p - self.end_top_p) * self.times[call])

    def due(self, visible: Tensor, call: int) -> Tensor:
        inspected = super().due(visible, call)
        return inspected & self.steps_now(visible, call) if self.revise_turn else inspected

    def step(self, ctx: Context, state: State) -> tuple[State, StepInfo]:
        if self.budget_slope:
            share = (1 + self.budget_slope) * ctx.signal(self.times[state.call]) ** self.budget_slope
            return self.replace(budget=self.budget * share, budget_slope=0.0).step(ctx, state)
        new, info = super().step(ctx, state)
        gain = info.outcome.gain
        if gain is None or new.call == self.nfe:
            return new, info
        inspected = self.due(info.masks["visible"], info.call)
        if self.follow:
            new = self._reopened(ctx, new, info, (inspected & (gain > 0)).sum(-1) / inspected.sum(-1).clamp(min=1))
        if not self.forget:
            return new, info
        values, committed_at = new.memory
        forgotten = inspected & (gain > 0) & (info.outcome.deficit > self.forget)
        u, v = ctx.rng.uniforms(info.call, positions(values), Purpose.VALUES)
        noisy = torch.where(u < ctx.signal(self.times[new.call]), values, uniform_token(v, ctx.model.vocab_size))
        memory = Memory(values, torch.where(forgotten, OPEN, committed_at))
        return new._replace(tokens=torch.where(forgotten, noisy, new.tokens), memory=memory), info

    def _reopened(self, ctx: Context, new: State, info: StepInfo, error: Tensor) -> State:
        """The state with only those of this call's commitments that the smaller budget allows. error: (B,) the share of
        earlier ones that this call contradicts."""
        chosen, (values, committed_at) = info.masks["chosen"], new.memory
        ranked = info.outcome.deficit.masked_fill(~chosen, torch.inf).sort(-1)
        fits = ranked.values.cumsum(-1) <= (self.limits(ctx)[1] * (-self.follow * error).exp())[:, None]
        kept = torch.zeros_like(chosen).scatter(-1, ranked.indices, fits)
        return new._replace(memory=Memory(values, torch.where(chosen & ~kept, OPEN, committed_at)))

    def update_values(self, choice: Choice) -> Tensor:
        gain = choice.outcome.gain
        if self.together == "all" or gain is None:
            return super().update_values(choice)
        place = positions(choice.values)
        if self.together == "parity":
            contradicted = self.due(choice.visible, choice.call) & (gain > 0)
            allowed = (place - gain.masked_fill(~contradicted, -torch.inf).argmax(-1, keepdim=True)) % 2 == 0
        else:
            allowed = choice.ctx.rng.uniforms(choice.call, place, Purpose.VALUES)[0] < 0.5
        gain = gain.masked_fill(~allowed, -torch.inf)
        return super().update_values(choice._replace(outcome=choice.outcome._replace(gain=gain)))


STEPS = "grid=quadratic interleave=true"
ENDS = {"diverse": "budget=.06 late_top_p=.85", "sharp": "budget=1 late_top_p=.6"}
TRIED = {  # by idea: parameters that stand before those of the end
    "dial": ["warmup=.2"],
    "grid": ["warmup=.2 grid_power=1.5", "warmup=.2 grid_power=3"],
    "warmup": ["warmup=.1", "warmup=.33"],
    "spacing": ["warmup=.2 spacing=1", "warmup=.2 spacing=4"],
    "turn": ["warmup=.2 own_turn=true", "warmup=.2 own_turn=true revise_turn=true"],
    "forget": ["warmup=.2 forget=.3", "warmup=.2 forget=.6"],
    "noise": ["warmup=.2 budget_slope=.3", "warmup=.2 budget_slope=1"],
    "revisions": ["warmup=.2 revise=0", "warmup=.2 revise=1000"],
    "inspection": ["warmup=.2 revise_every=2", "warmup=.2 revise_every=4"],
    "error": ["warmup=.2 follow=3", "warmup=.2 follow=10"],
    "together": ["warmup=.2 together=parity", "warmup=.2 together=half"],
}
SCHEDULES = {  # of top-p, which belong to the diverse end
    "top-p falls with time": ["warmup=.2 budget=.06 top_p=1 end_top_p=.75"],
    "top-p rises with time": ["warmup=.2 budget=.06 top_p=.75 end_top_p=.95"],
}

CHECKS = ("grammatical", "valid")  # of the models with a checker


def texts(ideas: Sequence[str]) -> list[str]:
    """Every sampler as a command line takes it, without the class. ideas: of `TRIED`; none for all, and `SCHEDULES`."""
    tried = [TRIED[idea] for idea in ideas or TRIED]
    plain = [f"{STEPS} {own} {end}" for some in tried for own in some for end in ENDS.values()]
    return plain if ideas else plain + [f"{STEPS} {own} late_top_p=None" for some in SCHEDULES.values() for own in some]


def measure(model: limpet.Denoiser, text: str, nfe: int, n: int, seed: int) -> dict[str, Any]:
    """Mean values of the samples of one seed."""
    sampler = parse(f"{__file__}:Variant {text}")[1].replace(nfe=nfe)
    judge = "mini-judge" if source_judge(model) is None and model.checker is None else None
    one = limpet.compare(model, {"": sampler}, n=n, seeds=[seed], judge=judge).samplers[0]
    shown = [name for name in (*CHECKS, "nll", "entropy", "rep-4") if name in one.scores.measures]
    found = {name: round(float(one.scores.values[name][0]), 4) for name in shown}
    values = {name: value for name, value in found.items() if math.isfinite(value)}
    return {"n": n, "seed": seed, "head_rows": round(one.head_rows, 3), **values}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["exact:words"])
    parser.add_argument("--calls", nargs="+", type=int, default=[8])
    parser.add_argument("--n", type=int, default=256)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=TRIED, default=(), help="ideas")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/dial-search.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    file = ResultFile(options.out)
    for model in options.models:
        loaded = limpet.load(model, precision="float32" if model.startswith("exact:") else "bfloat16")
        for nfe in options.calls:
            for text in texts(options.only):
                file.measure(f"{model}/{nfe}/{text}", measure, loaded, text, nfe, options.n, options.seed)
