"""What the sampler asks of a model: a body, a head, and what its output means."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from limpet.diffusion.process import LOG_LINEAR, Schedule
from limpet.errors import LimpetError

ToldClean = Literal["nothing", "given", "visible"]
Needed = Callable[[], Tensor | None]  # flat positions (R,), ascending, whose features will be read; None for all


class Tokenizer(Protocol):
    """Text to ids and back."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


def tokenizer_digest(tokenizer: Tokenizer | None) -> str | None:
    """What tells tokenizers apart: those with equal digests read the same ids as the same text. None where it is not
    known."""
    return getattr(tokenizer, "digest", None)


class Denoiser(ABC):
    """A model of clean tokens given noisy ones, in two parts.

    The body sees the whole sequence; the head turns one position's features into logits over the vocabulary.
    They are apart so that a sampler can run the head only where it needs a distribution. A subclass must say the first four;
    `check_model` holds every model to that before its first call."""

    name: str
    digest: str  # of everything that decides its output
    vocab_size: int
    length: int  # the length it samples unless told otherwise
    predicts: Literal["leave-one-out", "posterior"] = "leave-one-out"
    schedule: Schedule = LOG_LINEAR
    tokenizer: Tokenizer | None = None
    told_clean: ToldClean = "nothing"  # where `body_told` hears that tokens are clean: nowhere, given ones, labels too
    carries: bool = False  # whether each call is told of the call before it (self-conditioning), by `carry`
    precision: str = "float32"  # what it computes in
    info: Mapping[str, Any] = MappingProxyType({})  # what else is worth knowing of it: where it came from, its sizes

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def __repr__(self) -> str:
        about = f"{self.length} tokens of {self.vocab_size:,}, {self.precision} on {self.device}"
        return f"<{type(self).__name__} {self.name}: {about}>"

    @abstractmethod
    def body(self, tokens: Tensor, t: float | Tensor) -> Tensor:
        """(B, L) tokens, one time or (B,) times -> (B, L, D) features."""

    def body_at(self, tokens: Tensor, t: float | Tensor, needed: Needed) -> Tensor:
        """`body`, of which only the needed positions will be read: the others may hold anything.

        A model may ask for them late, when all that mixes positions has been launched."""
        return self.body(tokens, t)

    def body_told(self, tokens: Tensor, t: float | Tensor, needed: Needed, clean: Tensor | None) -> Tensor:
        """`body_at` of a model that is told which tokens are clean, (B, L) bool; None where nothing is known. It is
        called only of a model that says so with `told_clean`."""
        return self.body_at(tokens, t, needed)

    def body_carried(self, tokens: Tensor, t: float | Tensor, clean: Tensor | None, carried: Tensor | None) -> Tensor:
        """`body_told`, everywhere, of a model that is also told what `carry` made of the call before, (B, L, E); None
        in the first call of a path. It is called only of a model that says so with `carries`."""
        return self.body_told(tokens, t, lambda: None, clean)

    def carry(self, logits: Tensor) -> Tensor:
        """(R, V) logits of a call, at the temperature that they were read at -> (R, E), what the next call is told."""
        return logits

    def evidence(self, signal: float | Tensor, clean: Tensor) -> float | Tensor:
        """Of a model that predicts a posterior: the signal whose evidence of its own token each distribution holds, for all or
        (B,), where the transition's is `signal`. A model that is told no time reads that off the tokens, of which the
        share `clean` (B,) is known to hold no noise."""
        return signal

    @abstractmethod
    def head(self, features: Tensor) -> Tensor:
        """(..., D) features -> (..., V) logits."""

    def logits(self, tokens: Tensor, t: float | Tensor) -> Tensor:
        """(B, L), one time or (B,) times -> (B, L, V) float32."""
        return self.head(self.body(tokens, t)).float()


class Canvas(Denoiser):
    """A denoiser of one canvas of a longer text, which is told what stands before it."""

    ends: tuple[int, ...]  # tokens that end a text
    pad: int  # what stands after its end

    @abstractmethod
    def after(self, text: Tensor, rows: Tensor | None = None) -> Canvas:
        """The same for the canvas after more text, (R, P): one row for all samples, or one for each. If it was told of
        several samples already, `rows` (R,) are those that go on."""

    @abstractmethod
    def prompt(self, text: str) -> list[int]:
        """What a user says as the tokens that a reply comes after."""


class Wrapped(Denoiser):
    """A denoiser that does and says what another does, until a subclass changes something."""

    def __init__(self, inner: Denoiser) -> None:
        self.inner = inner
        for name in Denoiser.__annotations__:
            setattr(self, name, getattr(inner, name, None))

    @property
    def device(self) -> torch.device:
        return self.inner.device

    def body(self, tokens: Tensor, t: float | Tensor) -> Tensor:
        return self.inner.body(tokens, t)

    def body_at(self, tokens: Tensor, t: float | Tensor, needed: Needed) -> Tensor:
        return self.inner.body_at(tokens, t, needed)

    def body_told(self, tokens: Tensor, t: float | Tensor, needed: Needed, clean: Tensor | None) -> Tensor:
        return self.inner.body_told(tokens, t, needed, clean)

    def body_carried(self, tokens: Tensor, t: float | Tensor, clean: Tensor | None, carried: Tensor | None) -> Tensor:
        return self.inner.body_carried(tokens, t, clean, carried)

    def carry(self, logits: Tensor) -> Tensor:
        return self.inner.carry(logits)

    def evidence(self, signal: float | Tensor, clean: Tensor) -> float | Tensor:
        return self.inner.evidence(signal, clean)

    def head(self, features: Tensor) -> Tensor:
        return self.inner.head(features)


def check_model(denoiser: Denoiser) -> None:
    """Raise unless a model says of itself what every path needs to know."""
    takes: dict[str, tuple[str, Any]] = {
        "name": ("a text", lambda value: isinstance(value, str) and value),
        "digest": ("a text that changes with its output", lambda value: isinstance(value, str) and value),
        "vocab_size": ("a whole number from 2", lambda value: type(value) is int and value >= 2),
        "length": ("a whole number from 1", lambda value: type(value) is int and value >= 1),
        "predicts": ('"leave-one-out" or "posterior"', lambda value: value in ("leave-one-out", "posterior")),
        "schedule": ("a limpet.process.Schedule", lambda value: isinstance(value, Schedule)),
        "told_clean": ('"nothing", "given" or "visible"', lambda value: value in ("nothing", "given", "visible")),
        "carries": ("true or false", lambda value: type(value) is bool),
        "precision": ("a text, such as float32", lambda value: isinstance(value, str) and value),
    }
    for name, (words, good) in takes.items():
        value = getattr(denoiser, name, None)
        if not good(value):
            raise LimpetError(f"the model {type(denoiser).__name__} has {name} {value!r}; it takes {words}")
