"""The recommended sampler: a number of network calls and a sharpness from 0 to 1 decide its parameters."""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from limpet.errors import LimpetError
from limpet.files import Toml
from limpet.models import Denoiser
from limpet.samplers.base import Sampler
from limpet.samplers.mend import Mend
from limpet.samplers.names import as_sampler
from limpet.samplers.native import Native

NFE = 64  # default network calls
SHARPNESS = 0.25  # default sharpness
DIGITS = 4  # of the parameters: a printed sampler is the sampler
MANY_CALLS = 16  # from here on an open position need not be inspected in every call


@dataclass(frozen=True)
class Dial:
    """The numbers of the rule: two parameters of Mend at sharpness 0 and at sharpness 1. Budgets of 0 are native steps.

    In between top-p is linear in the sharpness and the budget geometric, so both are monotone and smooth. In the sharp
    half positions committed in one call may be closer. Neither depends on the number of calls: interleaved steps on the
    quadratic grid have the same entropy at 12 calls as at 24. From `MANY_CALLS` on a call commits only positions
    that step in it, which takes fewer rows of the head; with fewer calls that costs quality."""

    top_p: float = 0.85  # late_top_p at sharpness 0
    sharp_top_p: float = 0.6  # late_top_p at sharpness 1
    budget: float = 0.06  # at sharpness 0
    sharp_budget: float = 1.0  # at sharpness 1

    def __post_init__(self) -> None:
        if not 0 < self.sharp_top_p <= self.top_p <= 1:
            raise LimpetError(f"top_p is {self.top_p} and sharp_top_p {self.sharp_top_p}; it falls, from 1 at most")
        if not (0 < self.budget <= self.sharp_budget < math.inf or self.budget == self.sharp_budget == 0):
            raise LimpetError(
                f"budget is {self.budget} and sharp_budget {self.sharp_budget}; it rises, from above 0, or both are 0"
            )

    def sampler(self, nfe: int, sharpness: float) -> Sampler:
        """The sampler at a number of calls and a sharpness."""
        top_p = round(self.top_p + (self.sharp_top_p - self.top_p) * sharpness, DIGITS)
        steps = Native(nfe=nfe, grid="quadratic", interleave=True, warmup=0.2, late_top_p=top_p)
        if not self.budget:
            return steps
        budget = round(self.budget ** (1 - sharpness) * self.sharp_budget**sharpness, DIGITS)
        spacing, own_turn = 2 if sharpness <= 0.5 else 1, nfe >= MANY_CALLS
        return Mend(**vars(steps) | {"final_step": "keep"}, budget=budget, spacing=spacing, own_turn=own_turn)


@dataclass(frozen=True)
class SavedDial:
    """The dial of one model, as `limpet tune` saves it."""

    model: str  # its name
    digest: str  # of the model
    about: str  # what it was tuned with
    dial: Dial
    checksum: str = ""  # of the other fields

    @property
    def content(self) -> str:
        """The checksum that these fields should have."""
        own = {name: value for name, value in asdict(self).items() if name != "checksum"}
        return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()[:16]

    def toml(self) -> str:
        """The file's text."""
        texts = {"model": self.model, "digest": self.digest, "about": self.about, "checksum": self.content}
        lines = [f"{name} = {json.dumps(text, ensure_ascii=False)}" for name, text in texts.items()]
        numbers = [f"{name} = {value!r}" for name, value in asdict(self.dial).items()]
        return "\n".join([*lines, "", "[dial]", *numbers, ""])


def dial_path(digest: str) -> Path:
    """Where the dial of a model is saved: in LIMPET_HOME, by default ~/.limpet. A digest may be any text."""
    name = hashlib.sha256(digest.encode()).hexdigest()[:16]
    return Path(os.environ.get("LIMPET_HOME") or "~/.limpet").expanduser() / "dials" / f"{name}.toml"


def dial_of(model: Denoiser | None) -> Dial:
    """The dial that `limpet tune` saved for a model, or the general one."""
    if model is None or not (path := dial_path(model.digest)).is_file():
        return Dial()
    again = "run limpet tune again, or delete the file"
    saved = Toml(path, again).build(SavedDial)
    if saved.digest != model.digest:
        raise LimpetError(f"{path} is the dial of {saved.model} ({saved.digest[:12]}), not of {model.name}: {again}")
    if saved.checksum != saved.content:
        raise LimpetError(f"{path} was edited after limpet tune wrote it: {again}")
    return saved.dial


def recommended(nfe: int = NFE, sharpness: float | None = None, model: Denoiser | None = None) -> Sampler:
    """The recommended sampler, an ordinary one whose parameters can be printed and changed.

    nfe: network calls for each sample. sharpness: 0 is as diverse as the released default (top-p .9, sampled final
    step, 64 calls), 1 is the sharpest that is still useful (default: .25). model: use the dial that `limpet tune` saved
    for this model, if there is one."""
    sharpness = SHARPNESS if sharpness is None else sharpness
    if isinstance(sharpness, bool) or not isinstance(sharpness, (int, float)) or not 0 <= sharpness <= 1:
        raise LimpetError(f"sharpness is {sharpness!r}; it takes a number from 0 (diverse) to 1 (sharp)")
    if isinstance(nfe, bool) or not isinstance(nfe, int) or nfe < 2:
        raise LimpetError(f"nfe is {nfe!r}; the recommended sampler takes a whole number from 2")
    return dial_of(model).sampler(nfe, float(sharpness))


def check_not_both(sampler: object, sharpness: float | None) -> None:
    """Raise if a sharpness is given beside a sampler, or beside several."""
    if sampler and sharpness is not None:
        raise LimpetError("both a sampler and a sharpness are given: sharpness chooses the sampler, so leave one out")


def choose_sampler(
    sampler: Sampler | str | None, nfe: int | None = None, sharpness: float | None = None, model: Denoiser | None = None
) -> Sampler:
    """The sampler that a caller asked for, or the recommended one.

    sampler: an instance or a text. nfe: network calls of a text that does not set its own, and of the recommended
    sampler. sharpness: of the recommended sampler. model: see `recommended`."""
    if sampler is None:
        return recommended(NFE if nfe is None else nfe, sharpness, model)
    check_not_both(sampler, sharpness)
    if isinstance(sampler, Sampler) and nfe not in (None, sampler.nfe):
        raise LimpetError(f"nfe is {nfe}, and the sampler makes {sampler.nfe} calls: leave one out")
    return as_sampler(sampler, nfe=nfe)
