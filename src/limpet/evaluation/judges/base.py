"""The interface of judges: they score sequences of any length in bounded memory."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from limpet.errors import LimpetError
from limpet.models import Tokenizer

BATCH_TOKENS = 2**14  # default size of a batch
MAX_LOGITS = 2**26  # the head computes at most as many at once: 256 MiB of float32

Progress = Callable[[int, int], None]  # (windows read, windows in all)


class Window(NamedTuple):
    """A part of a sequence that is read at once: ids from start to end, of which those from first on are scored."""

    sequence: int
    start: int
    first: int
    end: int

    @property
    def inputs(self) -> int:
        return self.end - 1 - self.start


def windows(length: int, context: int, sequence: int = 0) -> Iterator[Window]:
    """Windows that score every id but the first exactly once, each with at most `context` ids before it.

    A sequence that fits is one window. A longer one continues in steps of half the context, so that every later id has
    at least half the context before it."""
    end = min(length, context + 1)
    if length > 1:
        yield Window(sequence, 0, 1, end)
    while end < length:
        first, end = end, min(length, end + max(1, context // 2))
        yield Window(sequence, end - 1 - context, first, end)


def batches(work: list[Window], batch_size: int | None) -> Iterator[list[Window]]:
    """Windows of similar length together, the longest first, so that what does not fit in memory fails at once."""
    work = sorted(work, key=lambda window: -window.inputs)
    start = 0
    while start < len(work):
        size = batch_size or max(1, BATCH_TOKENS // work[start].inputs)
        yield work[start : start + size]
        start += size


class Judge(ABC):
    """A causal language model that scores text: a backbone whose features depend on the past alone, and a head."""

    name: str
    digest: str  # of everything that decides its scores
    precision: str = "float32"  # of its computation
    context: int  # ids that it can read at once
    vocab_size: int
    tokenizer: Tokenizer | None = None
    eos: int | None = None  # the id that ends a text

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @abstractmethod
    def backbone(self, tokens: Tensor) -> Tensor:
        """(B, L) tokens -> (B, L, D) features."""

    @abstractmethod
    def head(self, features: Tensor) -> Tensor:
        """(..., D) features -> (..., V) logits of the next token."""

    @torch.inference_mode()
    def nll(
        self, tokens: Sequence[Any], batch_size: int | None = None, progress: Progress | None = None
    ) -> list[NDArray[Any]]:
        """For each sequence of ids, -ln p of every id but the first given those before it, in nats: (length - 1,)."""
        ids = [self._checked(sequence) for sequence in tokens]
        kind = np.float64 if self.precision == "float64" else np.float32
        out: list[NDArray[Any]] = [np.empty(max(len(sequence) - 1, 0), kind) for sequence in ids]
        work = [window for i, sequence in enumerate(ids) for window in windows(len(sequence), self.context, i)]
        done = 0
        for batch in batches(work, batch_size):
            # Padding is on the right, where causal attention does not reach: any id will do.
            rows = pad_sequence([ids[w.sequence][w.start : w.end] for w in batch], batch_first=True).to(self.device)
            place = torch.arange(1, rows.shape[1])
            scored = torch.stack([(place >= w.first - w.start) & (place < w.end - w.start) for w in batch])
            nll = self._nll(rows, scored.to(self.device)).cpu()  # window by window
            for w, part in zip(batch, torch.split(nll, [w.end - w.first for w in batch]), strict=True):
                out[w.sequence][w.first - 1 : w.end - 1] = part
            done += len(batch)
            if progress:
                progress(done, len(work))
        return out

    def _nll(self, rows: Tensor, scored: Tensor) -> Tensor:
        """(B, L) ids and the (B, L - 1) mask of the scored ones among ids 1, 2, ... -> (R,) NLL in nats."""
        features, targets = self.backbone(rows[:, :-1])[scored], rows[:, 1:][scored]
        rows_at_once = max(1, MAX_LOGITS // self.vocab_size)
        parts = zip(*(torch.split(part, rows_at_once) for part in (features, targets)), strict=True)
        return torch.cat([F.cross_entropy(self.head(x).float(), ids, reduction="none") for x, ids in parts])

    @torch.inference_mode()
    def features(self, tokens: Sequence[Any], batch_size: int | None = None) -> NDArray[np.float32]:
        """(n, D) features at the last id of each sequence's text, for MAUVE.

        End-of-text ids around the text are not read: they would tell a sample from a piece of real text. Of a long
        text, only the last `context` ids are read."""
        ids = [self._within(self._checked(sequence))[-self.context :] for sequence in tokens]
        if any(not len(sequence) for sequence in ids):
            raise LimpetError("an empty text has no features; leave it out")
        work = [Window(i, 0, 1, len(sequence) + 1) for i, sequence in enumerate(ids)]
        out: dict[int, NDArray[np.float32]] = {}
        for batch in batches(work, batch_size):
            rows = pad_sequence([ids[w.sequence] for w in batch], batch_first=True).to(self.device)
            ends = torch.tensor([w.inputs - 1 for w in batch], device=self.device)
            last = self.hidden(rows)[torch.arange(len(batch), device=self.device), ends]
            out.update(zip((w.sequence for w in batch), last.float().cpu().numpy(), strict=True))
        return np.stack([out[i] for i in range(len(ids))]) if ids else np.empty((0, 0), np.float32)

    def _within(self, ids: Tensor) -> Tensor:
        """The ids without leading and trailing end-of-text ids; all ids if there are no others."""
        text = (ids != (-1 if self.eos is None else self.eos)).nonzero()
        return ids[text[0] : text[-1] + 1] if len(text) else ids

    def hidden(self, tokens: Tensor) -> Tensor:
        """(B, L) tokens -> (B, L, D) last hidden state."""
        return self.backbone(tokens)

    def _checked(self, sequence: Any) -> Tensor:
        ids = torch.as_tensor(sequence, device="cpu")
        ids = ids.long() if len(ids) else torch.empty(0, dtype=torch.long)
        bad = ids[(ids < 0) | (ids >= self.vocab_size)]
        if len(bad):
            raise LimpetError(
                f"id {int(bad[0])} is outside the vocabulary of {self.name}, {self.vocab_size} ids: "
                "the text was made with other ids, so score it as text"
            )
        return ids
