"""Which variant of Mend: how many tokens it revises, which, when, and from what it samples. All variants that were
tried, the failed ones included, against the best top-p curve at their own entropy."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from limpet.experiments import Cell, Entry, Table, format_signed
from limpet.paper.studies.presets import Preset
from limpet.paper.studies.published import PaperResults
from limpet.paper.studies.samplers import CURVES, FILE, delta
from limpet.samplers import CRS, Context, Mend, Sampler, State, StepInfo, param, parse
from limpet.samplers.committed_values import Choice
from limpet.samplers.crs import Memory

FORMS: dict[str, list[str]] = FILE["forms"]
STUDY = {"digits": 6}
AT_MORE_CALLS = ("default", "calls")  # these also run at half the fewest and twice the most calls of a preset


@dataclass(frozen=True)
class MendVariant(Mend):
    """Mend with parameters that were tried and left out, since they improved nothing."""

    min_gain: float = param(
        0.0, "A token is revised only where the log-ratio to the best other token exceeds this.", low=0
    )
    rest: int = param(0, "Calls for which a token is not inspected after it was committed or revised.", low=0)
    revise_from: float = param(0.0, "Tokens are revised from this share of the calls on.", low=0, high=1)
    revise_until: float = param(1.0, "Tokens are revised up to this share of the calls.", low=0, high=1)

    def step(self, ctx: Context, state: State) -> tuple[State, StepInfo]:
        state, info = super().step(ctx, state)
        values, committed_at = state.memory  # a revised token counts as committed anew
        return state._replace(memory=Memory(values, torch.where(info.masks["revised"], info.call, committed_at))), info

    def revisable(self, ctx: Context, state: State, visible: Tensor) -> Tensor | None:
        if not self.revise_from <= state.call / self.nfe <= self.revise_until:
            return CRS.revisable(self, ctx, state, visible)
        return super().revisable(ctx, state, visible & (state.call - state.memory[1] > self.rest))

    def update_values(self, choice: Choice) -> Tensor:
        outcome = choice.outcome
        if outcome.gain is not None:
            outcome = outcome._replace(gain=torch.where(outcome.gain > self.min_gain, outcome.gain, 0))
        return super().update_values(choice._replace(outcome=outcome))


def parse_form(text: str) -> Sampler:
    """A sampler as a command line takes it; `variant` is `MendVariant`."""
    return parse(text.replace("variant", f"{__file__}:MendVariant", 1) if text.startswith("variant") else text)[1]


def cells(preset: Preset) -> Iterator[Cell]:
    for role, nfe in product(preset.captions, calls(preset)):
        for text in (text for texts in forms_at(preset, nfe).values() for text in texts):
            yield Cell(f"{role}/{nfe}/{text}", preset.roles[role], parse_form(text).replace(nfe=nfe), preset.n)


def calls(preset: Preset) -> list[int]:
    """A preset's numbers of calls, half the fewest, and twice the most."""
    return [preset.nfes[0] // 2, *preset.nfes, 2 * preset.nfes[-1]]


def forms_at(preset: Preset, nfe: int) -> dict[str, list[str]]:
    """The samplers at a number of calls, by what they change."""
    own = {changed: texts for changed, texts in FORMS.items() if nfe in preset.nfes or changed in AT_MORE_CALLS}
    return {**CURVES, **own}


def tables(results: PaperResults, preset: Preset) -> Iterator[Table]:
    """By model: delta NLL against the best top-p curve, and the entropy where it is read, by number of calls."""
    for role, caption in preset.captions.items():

        def entry(nfe: int, changed: str, text: str, role: str = role) -> Entry:
            if text not in forms_at(preset, nfe).get(changed, ()):
                return Entry("")
            at = f"{role}/{nfe}"
            entropy = results(f"{at}/{text}", "entropy").mean
            return Entry(f"{format_signed(delta(results, at, text), 3)} at {entropy:.2f}")

        groups = [
            [(Entry(changed), Entry(text), *(entry(nfe, changed, text) for nfe in calls(preset))) for text in texts]
            for changed, texts in FORMS.items()
        ]
        yield results.table(f"forms/{role}", groups, *(f"{nfe} calls" for nfe in calls(preset)), caption=caption)
