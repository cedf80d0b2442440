"""What the sampler asks of a model: a body, a head, and what its output means."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, Protocol

import torch
from torch import Tensor

from limpet.process import LOG_LINEAR, Schedule

Needed = Callable[[], Tensor | None]  # flat positions (R,), ascending, whose features will be read; None for all


class Tokenizer(Protocol):
    """Text to ids and back."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class Denoiser(ABC):
    """A model of clean tokens given noisy ones, in two parts.

    The body sees the whole sequence; the head turns one position's features into logits over the vocabulary.
    They are apart so that a sampler can run the head only where it needs a law."""

    vocab_size: int
    length: int  # the length it samples unless told otherwise
    predicts: Literal["leave-one-out", "posterior"] = "leave-one-out"
    schedule: Schedule = LOG_LINEAR
    tokenizer: Tokenizer | None = None
    digest: str  # of everything that decides its output
    name: str

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @abstractmethod
    def body(self, tokens: Tensor, t: float | Tensor) -> Tensor:
        """(B, L) tokens, one time or (B,) times -> (B, L, D) features."""

    def body_at(self, tokens: Tensor, t: float | Tensor, needed: Needed) -> Tensor:
        """`body`, of which only the needed positions will be read: the others may hold anything.

        A model may ask for them late, when all that mixes positions has been launched."""
        return self.body(tokens, t)

    @abstractmethod
    def head(self, features: Tensor) -> Tensor:
        """(..., D) features -> (..., V) logits."""

    def logits(self, tokens: Tensor, t: float | Tensor) -> Tensor:
        """(B, L), one time or (B,) times -> (B, L, V) float32."""
        return self.head(self.body(tokens, t)).float()
