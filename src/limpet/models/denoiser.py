"""The interface of a model: a backbone, a head, and what its output means."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from limpet.diffusion.process import LOG_LINEAR, Schedule
from limpet.errors import LimpetError
from limpet.models.prompt_layouts import PromptLayout

CleanTokens = Literal["ignored", "fixed", "committed"]
Rows = Callable[[], Tensor | None]  # flat positions (R,), ascending, whose features will be read; None for all


def all_rows() -> None:
    """Every position will be read."""
    return None


class Cache(NamedTuple):
    """Keys and values that a model keeps from one call to the next, so that it need not compute every position.

    The model computes the positions in `compute`, and lets them attend to all others through the keys and values in
    `before`. It appends to `after` what the next call will read, in tensors of its own: a state that a trajectory
    comes back to still holds those of `before`."""

    compute: (
        Tensor | None
    )  # (R,) flat positions to compute, ascending; None for all, and then nothing in `before` is read
    before: tuple[Tensor, ...]  # (B, L, ...) of each layer, from the call before
    after: list[Tensor]  # (B, L, ...) of each layer; empty when the model is called


class ModelInput(NamedTuple):
    """What one network call is given. A model ignores what it does not use."""

    tokens: Tensor  # (B, L) the noisy tokens, with committed tokens written in
    t: float | Tensor  # one time for all samples, or (B,)
    rows: Rows = all_rows  # which positions will be read; a model may ask late, when it has launched the other work
    clean: Tensor | None = None  # (B, L) bool: tokens known to hold no noise (see `Denoiser.clean_tokens`)
    previous: Tensor | None = None  # (B, L, E) what `self_condition` made of the previous call's logits
    cache: Cache | None = None  # where the sampler has `refresh`; given only to models with `cache_bytes`


class Tokenizer(Protocol):
    """Text to ids and back."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


def tokenizer_digest(tokenizer: Tokenizer | None) -> str | None:
    """A digest that is equal for tokenizers that read the same ids as the same text; None where it is unknown."""
    return getattr(tokenizer, "digest", None)


class Denoiser(ABC):
    """A model that predicts clean tokens from noisy ones, in two parts.

    The backbone reads the whole sequence. The head turns the features of one position into logits over the vocabulary.
    They are separate so that a sampler can run the head only where it needs a prediction. A subclass sets the first
    four attributes; `check_model` checks every model before its first call."""

    name: str
    digest: str  # of everything that decides its output
    vocab_size: int
    length: int  # default length of a sample
    predicts: Literal["leave-one-out", "posterior"] = "leave-one-out"
    schedule: Schedule = LOG_LINEAR
    tokenizer: Tokenizer | None = None
    clean_tokens: CleanTokens = "ignored"  # which tokens `ModelInput.clean` marks: none, fixed ones, committed ones too
    self_conditioned: bool = False  # whether each call reads the previous call's prediction, by `self_condition`
    cache_bytes: int = 0  # that it keeps of one position between calls with `refresh`; 0: it computes all at every call
    precision: str = "float32"  # what it computes in
    checker: str | None = None  # the name of the checker that decides whether a sample is right
    prompt_layout: PromptLayout | None = None  # how a prompt is written, where it is no plain text
    info: Mapping[str, Any] = MappingProxyType({})  # more facts for people: its source, its sizes
    device: torch.device = torch.device("cpu")

    def __repr__(self) -> str:
        about = f"{self.length} tokens of {self.vocab_size:,}, {self.precision} on {self.device}"
        return f"<{type(self).__name__} {self.name}: {about}>"

    @abstractmethod
    def backbone(self, inputs: ModelInput) -> Tensor:
        """The features (B, L, D) of an input. Positions outside `inputs.rows` may hold anything."""

    @abstractmethod
    def head(self, features: Tensor) -> Tensor:
        """(..., D) features -> (..., V) logits."""

    def self_condition(self, logits: Tensor) -> Tensor:
        """What the next call reads of this one: (R, V) logits, at the sampler's temperature -> (R, E)."""
        return logits

    def evidence_signal(self, signal: float | Tensor, clean_share: Tensor) -> float | Tensor:
        """The signal level whose evidence of its own token each posterior prediction contains: one, or (B,).

        signal: the level of the transition. clean_share: (B,) the share of tokens known to hold no noise. A model
        that is not given the time infers the level from the tokens, so it can differ from `signal`."""
        return signal

    def logits(self, tokens: Tensor, t: float | Tensor) -> Tensor:
        """(B, L) tokens, one time or (B,) times -> (B, L, V) float32 logits."""
        return self.head(self.backbone(ModelInput(tokens, t))).float()


class Canvas(Denoiser):
    """A denoiser of one canvas of a longer text, conditioned on the text before it."""

    begin: int | None  # the token before a text that has no prompt
    ends: tuple[int, ...]  # tokens that end a text
    pad: int  # fills a canvas after its end

    @abstractmethod
    def after(self, text: Tensor, rows: Tensor | None = None) -> Canvas:
        """The same model for the canvas that follows more text (R, P): one row for all samples, or one for each.

        rows: (R,) the samples that continue, where several samples were given before."""

    @abstractmethod
    def prompt(self, chat: str | Sequence[Mapping[str, str]]) -> list[int]:
        """A user's message, or a chat of messages with `role` and `content`, as the tokens that precede the reply."""


class WrappedDenoiser(Denoiser):
    """A denoiser that behaves as another does, until a subclass overrides something."""

    def __init__(self, inner: Denoiser) -> None:
        self.inner = inner
        for name in Denoiser.__annotations__:
            if name != "device":
                setattr(self, name, getattr(inner, name, None))

    @property
    def device(self) -> torch.device:
        return self.inner.device

    @device.setter
    def device(self, device: torch.device) -> None:
        self.inner.device = device

    def backbone(self, inputs: ModelInput) -> Tensor:
        return self.inner.backbone(inputs)

    def head(self, features: Tensor) -> Tensor:
        return self.inner.head(features)

    def self_condition(self, logits: Tensor) -> Tensor:
        return self.inner.self_condition(logits)

    def evidence_signal(self, signal: float | Tensor, clean_share: Tensor) -> float | Tensor:
        return self.inner.evidence_signal(signal, clean_share)


def check_model(denoiser: Denoiser) -> None:
    """Raise unless a model has the attributes that sampling needs."""
    if isinstance(denoiser, str):
        raise LimpetError(f"the model is {denoiser!r}, a text: load it first, with limpet.load({denoiser!r})")
    takes: dict[str, tuple[str, Any]] = {
        "name": ("a text", lambda value: isinstance(value, str) and value),
        "digest": ("a text that changes with its output", lambda value: isinstance(value, str) and value),
        "vocab_size": ("a whole number from 2", lambda value: type(value) is int and value >= 2),
        "length": ("a whole number from 1", lambda value: type(value) is int and value >= 1),
        "predicts": ('"leave-one-out" or "posterior"', lambda value: value in ("leave-one-out", "posterior")),
        "schedule": ("a limpet.process.Schedule", lambda value: isinstance(value, Schedule)),
        "clean_tokens": ('"ignored", "fixed" or "committed"', lambda value: value in ("ignored", "fixed", "committed")),
        "self_conditioned": ("true or false", lambda value: type(value) is bool),
        "cache_bytes": ("a whole number from 0", lambda value: type(value) is int and value >= 0),
        "precision": ("a text, such as float32", lambda value: isinstance(value, str) and value),
        "checker": ("the name of a checker, or None", lambda value: value is None or isinstance(value, str)),
        "prompt_layout": ("a PromptLayout or None", lambda value: value is None or isinstance(value, PromptLayout)),
    }
    for name, (words, is_valid) in takes.items():
        value = getattr(denoiser, name, None)
        if not is_valid(value):
            raise LimpetError(f"the model {type(denoiser).__name__} has {name} {value!r}; it takes {words}")
