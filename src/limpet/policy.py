"""Policy: every knob of a sampler, checked, in one frozen dataclass."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from limpet.errors import LimpetError
from limpet.support import Boundary

Endpoint = Literal["argmax", "ancestral"]
Grid = Literal["two-piece", "uniform"]
Values = Literal["argmax", "second", "nucleus", "refreshed", "recorded"]
Write = Literal["input", "output", "both"]


@dataclass(frozen=True)
class Policy:
    """One sampler. The defaults are CRS as the paper runs it; `horizon=0` is the native sampler."""

    nfe: int = 64
    """Network calls for one sample: nfe - 1 reverse steps and the readout."""
    warmup: float = 0.33
    """Fraction of the reverse steps before the first selection; it also places the split of the two-piece grid."""
    horizon: int | None = None
    """For how many later steps the denoiser sees a label: None for ever (CRS), 0 never (native), H the next H."""
    budget: float = 0.5
    """Total deficit that may be selected along the path, as a fraction of the generated length."""
    spacing: int = 4
    """Positions selected in one step are more than this far apart."""
    count: int | None = None
    """Most positions selected in one step; None for the generated length over the steps after warmup, rounded up."""
    top_p: float = 1.0
    """Mass of the nucleus that each reverse step draws from; 1 keeps every label."""
    late_top_p: float | None = None
    """The same for the steps after warmup; None for top_p throughout."""
    endpoint: Endpoint = "argmax"
    """The last call: the argmax of the law, or one more draw (the released code's way)."""
    grid: Grid = "two-piece"
    """Times of the reverse steps."""
    boundary: Boundary = "released"
    """Whether top-p keeps the label after an exact tie, as the released code does, or not, as the paper writes it."""
    values: Values = "argmax"
    """What a label holds: the argmax; the second-ranked token; a draw from the nucleus without the argmax; the
    argmax of each current step; or what the replayed run recorded."""
    value_top_p: float = 0.9
    """The nucleus that `values="nucleus"` draws from."""
    write: Write = "input"
    """Whether labels are written into the denoiser's input, only copied to the output, or both."""

    def __post_init__(self) -> None:
        _check("nfe", self.nfe, _whole(self.nfe) and self.nfe >= 2, "a whole number, at least 2 (a step and a readout)")
        _check("warmup", self.warmup, _between(self.warmup, 0, 1), "a fraction between 0 and 1")
        _check(
            "horizon", self.horizon, self.horizon is None or (_whole(self.horizon) and self.horizon >= 0),
            "None (for ever), 0 (off) or a number of steps",
        )  # fmt: skip
        _check("budget", self.budget, _between(self.budget, 0, math.inf), "a fraction of the length, 0 or more")
        _check("spacing", self.spacing, _whole(self.spacing) and self.spacing >= 0, "a whole number, 0 or more")
        _check(
            "count", self.count, self.count is None or (_whole(self.count) and self.count >= 0),
            "None or a whole number, 0 or more",
        )  # fmt: skip
        for name in ("top_p", "late_top_p", "value_top_p"):
            value = getattr(self, name)
            if value is None and name == "late_top_p":
                continue
            _check(name, value, _between(value, 0, 1) and value > 0, "a mass above 0 and at most 1 (1 is off)")
        choices = {"endpoint": Endpoint, "grid": Grid, "boundary": Boundary, "values": Values, "write": Write}
        for name, choice in choices.items():
            allowed = get_args(choice)
            _check(name, getattr(self, name), getattr(self, name) in allowed, "one of " + ", ".join(allowed))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Policy:
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, 1)
                hint = f"; did you mean {near[0]}?" if near else f"; it takes {', '.join(known)}"
                raise LimpetError(f"a policy has no field {name!r}{hint}")
        return cls(**values)

    def but(self, **changes: Any) -> Policy:
        """The same policy with some fields changed."""
        return Policy.from_dict({**self.to_dict(), **changes})


def _whole(value: object) -> bool:
    """A whole number that fits a tensor."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**31


def _between(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _check(name: str, value: object, good: bool, takes: str) -> None:
    if not good:
        raise LimpetError(f"policy field {name} is {value!r}; it takes {takes}")
