"""Which form of Mend: how many labels it mends, which, when, and what it draws; every form that was tried, those that
failed among them, held against the best top-p curve at its own entropy."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from limpet.experiments.contents import Entry, Table, signed
from limpet.experiments.study import Cell
from limpet.paper.studies.presets import Preset
from limpet.paper.studies.published import Beside
from limpet.paper.studies.samplers import CURVES, less
from limpet.samplers import Mend, Sampler, param, parse
from limpet.samplers.committed_values import Choice
from limpet.samplers.context import Context as Walk
from limpet.samplers.context import State, StepInfo
from limpet.samplers.crs import CRS, Memory

FORMS: dict[str, list[str]] = tomllib.loads(Path(__file__).with_name("forms.toml").read_text("utf-8"))
STUDY = {"digits": 6}
FAR = ("the default", "calls")  # also at half the fewest and twice the most calls of a preset


@dataclass(frozen=True)
class Form(Mend):
    """Mend with what was tried and left out: it made nothing better."""

    least: float = param(0.0, "A label is mended only where the gain is more than this.", low=0)
    rest: int = param(0, "For how many calls a label is left alone once it is stored or mended.", low=0)
    first: float = param(0.0, "Labels change from this share of the calls on.", low=0, high=1)
    last: float = param(1.0, "And up to this one.", low=0, high=1)

    def step(self, path: Walk, state: State) -> tuple[State, StepInfo]:
        state, info = super().step(path, state)
        stored, committed_at = state.memory  # a mended label begins anew
        return state._replace(memory=Memory(stored, torch.where(info.marks["mended"], info.call, committed_at))), info

    def doubted(self, path: Walk, state: State, visible: Tensor) -> Tensor | None:
        if not self.first <= state.call / self.nfe <= self.last:
            return CRS.doubted(self, path, state, visible)
        return super().doubted(path, state, visible & (state.call - state.memory[1] > self.rest))

    def relabel(self, choice: Choice) -> Tensor:
        outcome = choice.outcome
        if outcome.gain is not None:
            outcome = outcome._replace(gain=torch.where(outcome.gain > self.least, outcome.gain, 0))
        return super().relabel(choice._replace(outcome=outcome))


def sampler(arm: str) -> Sampler:
    """An arm as a command line takes it; `form` is the one above."""
    return parse(arm.replace("form", f"{__file__}:Form", 1) if arm.startswith("form") else arm)[1]


def cells(preset: Preset) -> Iterator[Cell]:
    for role, nfe in product(preset.captions, calls(preset)):
        for arm in (arm for arms in there(preset, nfe).values() for arm in arms):
            yield Cell(f"{role}/{nfe}/{arm}", preset.roles[role], sampler(arm).replace(nfe=nfe), preset.n)


def calls(preset: Preset) -> list[int]:
    return [preset.nfes[0] // 2, *preset.nfes, 2 * preset.nfes[-1]]


def there(preset: Preset, nfe: int) -> dict[str, list[str]]:
    """The arms at a number of calls."""
    return {**CURVES, **{what: arms for what, arms in FORMS.items() if nfe in preset.nfes or what in FAR}}


def tables(results: Beside, preset: Preset) -> Iterator[Table]:
    """By model: NLL less the best top-p curve, and the entropy it is read at, by number of calls."""
    for role, caption in preset.captions.items():

        def entry(nfe: int, what: str, arm: str, role: str = role) -> Entry:
            if arm not in there(preset, nfe).get(what, ()):
                return Entry("")
            at = f"{role}/{nfe}"
            return Entry(f"{signed(less(results, at, arm), 3)} at {results(f'{at}/{arm}', 'entropy').mean:.2f}")

        rows = tuple(
            tuple((Entry(what), Entry(arm), *(entry(nfe, what, arm) for nfe in calls(preset))) for arm in arms)
            for what, arms in FORMS.items()
        )
        head = ("Changed", "Arm", *(f"{nfe} calls" for nfe in calls(preset)))
        words = results.words["tables"]["forms"]["caption"].format(caption=caption)
        yield Table(f"forms-{role}", words, head, rows, names=2)
