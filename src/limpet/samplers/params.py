"""Parameters: the fields of a sampler with their help texts, their ranges, and how a value is read and checked."""

from __future__ import annotations

import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from limpet.errors import LimpetError, unknown_name
from limpet.registry import describe_error

MOST = 2**31  # a whole number must fit a tensor, unless its range says more
KINDS: dict[type, str] = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def param(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    since: str = "start",
    counts: str = "path",
) -> Any:
    """A parameter of a sampler: a dataclass field with a help text and a range.

    default: its default. help: one or two short sentences. low, high: the smallest and largest value. above: a limit
    that the value must exceed. since: from which call on it takes effect, "start", "warmup" or "final step" (see
    `Native.shared_calls`). counts: what a whole number counts, positions and calls of a "path", tokens of the
    "vocabulary", or "other" (see `Sampler.clamped`)."""
    about = {"help": help, "low": low, "high": high, "above": above, "since": since, "counts": counts}
    return field(default=default, metadata=about)


def refresh_param() -> Any:
    """The parameter `refresh`, which stands beside nfe in every sampler that calls the network by `Context.call`."""
    help = (
        "Calls from one computation of every position to the next. The calls between compute only what changed and "
        "what is read. 1: every call is exact."
    )
    return field(default=1, metadata={"help": help, "low": 1}, kw_only=True)


@dataclass(frozen=True)
class Param:
    """One parameter, as the command line, the playground and the API describe it."""

    name: str
    kind: type  # int, float, str or bool
    choices: tuple[str, ...]  # the texts that it takes; () for any
    optional: bool  # whether it takes None
    default: Any
    help: str = ""
    low: float | None = None
    high: float | None = None
    above: float | None = None
    since: str = "start"
    counts: str = "path"

    @property
    def takes(self) -> str:
        """What it takes, as a phrase: "a number from 0 to 1"."""
        what = "one of " + ", ".join(self.choices) if self.choices else KINDS[self.kind]
        edges = (("above", self.above), ("from", self.low), ("to", self.high))
        limits = [f"{word} {edge:g}" for word, edge in edges if edge is not None]
        return " ".join([*(["None or"] if self.optional else []), what, *limits])

    def accepts(self, value: object) -> bool:
        """Whether a value has the right type and is within the range."""
        if value is None:
            return self.optional
        if self.choices:
            return value in self.choices
        if self.kind in (str, bool):
            return isinstance(value, self.kind)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not isinstance(value, (int, self.kind)):
            return False
        if isinstance(value, int) and abs(value) >= max(MOST, self.high or 0):
            return False
        high, low = math.inf if self.high is None else self.high, -math.inf if self.low is None else self.low
        return math.isfinite(value) and low <= value <= high and (self.above is None or value > self.above)

    def read(self, text: str) -> Any:
        """The value of a text from a command line. A text that cannot be converted is returned as it is."""
        plain = text.strip()
        if self.optional and plain.lower() == "none":
            return None
        try:
            if self.kind is bool:
                return {"true": True, "false": False}[plain.lower()]
            return self.kind(plain)
        except (ValueError, KeyError):
            return plain  # the sampler raises the error


@cache
def params(sampler: type) -> Mapping[str, Param]:
    """The parameters of a sampler's class, by name, in the order of its fields."""
    return types.MappingProxyType({one.name: one for one in _params(sampler)})


def _params(sampler: type) -> Iterator[Param]:
    try:
        hints = get_type_hints(sampler)
    except Exception as error:  # evaluating an annotation can raise anything
        raise LimpetError(
            f"the types of {sampler.__name__}'s fields cannot be read ({describe_error(error)})"
        ) from error
    for one in fields(sampler):
        hint = hints[one.name]
        parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        own = [part for part in parts if part is not type(None)]
        choices = get_args(own[0]) if get_origin(own[0]) is Literal else ()
        kind = str if choices else own[0]
        if len(own) != 1 or kind not in KINDS:
            raise LimpetError(
                f"{sampler.__name__} has a field {one.name} of type {hint}; a parameter is an int, float, str, bool or "
                "Literal of texts, or one of these or None"
            )
        default = None if one.default is MISSING else one.default
        yield Param(one.name, kind, choices, len(own) < len(parts), default, **one.metadata)


def check_names(sampler: type, names: Mapping[str, Any], of: str) -> None:
    """Raise for a name that is not a parameter, and suggest the closest one. of: the sampler's name."""
    for name in names:
        if name not in params(sampler):
            raise unknown_name(f"{of} has no parameter", name, params(sampler))
