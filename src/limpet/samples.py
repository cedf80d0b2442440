"""From a model and a sampler to samples: what is fixed, which batches, what comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from limpet.denoisers import Denoiser, Needed, Wrapped, tokenizer_digest
from limpet.engine.path import Info, Path, State, check, generate, open_path
from limpet.engine.steps import Backend
from limpet.engine.streams import SAMPLES, SEEDS, Stream
from limpet.errors import LimpetError, extra, plain
from limpet.samplers import CRS, Sampler

Ids = Sequence[int]
Given = str | Ids | Tensor | Sequence[str] | Sequence[Ids]  # a prompt: text, ids, or (n, P) ids; or each sample's own
Fixed = Mapping[int, int | str | Ids] | Tensor  # a token, or some from there on as ids or text; or (L,) or (n, L) ids
Watcher = Callable[
    [State, Info, int, int], None
]  # told after every call of every batch, with how many are done, of all


@dataclass(frozen=True)
class Samples:
    """What `sample` returns."""

    tokens: Tensor  # (n, L)
    nfe: int  # calls of the denoiser's body for each sample, counted
    head_rows: float  # rows of the head evaluated, as a fraction of nfe x free positions
    selected: Tensor  # (n,) how many positions each sample selected along its path
    memory: tuple[Tensor, ...]  # (n, L) each: what the sampler remembered at the end; `replay` takes it
    sampler: Sampler
    seed: int
    first: int  # index of the first sample under the seed
    given: Tensor  # (n, L) what was given, -1 where it was free
    model: str
    digest: str
    tokenizer: str | None  # its digest
    _decode: Callable[[list[int]], str] | None = field(repr=False)

    @property
    def prefix(self) -> int:
        """How many leading tokens were given to every sample."""
        return int(self.prefixes.min())

    @property
    def prefixes(self) -> Tensor:
        """(n,) how many leading tokens were given to each."""
        return (self.given >= 0).long().cumprod(1).sum(1)

    @property
    def texts(self) -> list[str]:
        if self._decode is None:
            raise LimpetError(f"{self.model} has no tokenizer, so its samples have no text; use .tokens")
        return [self._decode(ids) for ids in self.tokens.tolist()]

    def rows(self) -> Iterator[dict[str, Any]]:
        """One plain dict a sample, with everything that decides it: what `limpet sample` writes as JSON lines."""
        selected, sampler = self.selected.tolist(), self.sampler.to_dict()
        for i, (tokens, prefix, given) in enumerate(
            zip(self.tokens.tolist(), self.prefixes.tolist(), self.given, strict=True)
        ):
            fixed = [at for at in (given >= 0).nonzero().flatten().tolist() if at >= prefix]
            before, after = (None, None) if self._decode is None else cut(self._decode, tokens, prefix)
            yield {
                "text": None if before is None or after is None else before + after, "tokens": tokens,
                "seed": self.seed, "sample": self.first + i, "model": self.model, "digest": self.digest,
                "tokenizer": self.tokenizer, "nfe": self.nfe, "selected": selected[i], "prefix": prefix,
                "prefix_text": before, "fixed": [[at, tokens[at]] for at in fixed], "sampler": sampler,
            }  # fmt: skip


def cut(decode: Callable[[list[int]], str], ids: list[int], prefix: int) -> tuple[str, str]:
    """The text of some ids, cut where the first `prefix` of them end: the two parts are the whole. A character that
    lies in ids on both sides is of the second part."""
    text, before = decode(ids), decode(ids[:prefix]) if prefix else ""
    end = len(before)
    if not text.startswith(before):
        end = next(i for i in range(end) if text[: i + 1] != before[: i + 1])
    return text[:end], text[end:]


class Counted(Wrapped):
    """A denoiser that counts: calls of the body, rows of the head."""

    def __init__(self, inner: Denoiser) -> None:
        super().__init__(inner)
        self.calls, self.rows = 0, 0

    def body(self, tokens: Tensor, t: float | Tensor) -> Tensor:
        self.calls += 1
        return super().body(tokens, t)

    def body_at(self, tokens: Tensor, t: float | Tensor, needed: Needed) -> Tensor:
        self.calls += 1
        return super().body_at(tokens, t, needed)

    def body_told(self, tokens: Tensor, t: float | Tensor, needed: Needed, clean: Tensor | None) -> Tensor:
        self.calls += 1
        return super().body_told(tokens, t, needed, clean)

    def body_carried(self, tokens: Tensor, t: float | Tensor, clean: Tensor | None, carried: Tensor | None) -> Tensor:
        self.calls += 1
        return super().body_carried(tokens, t, clean, carried)

    def head(self, features: Tensor) -> Tensor:
        self.rows += features.shape[:-1].numel()
        return super().head(features)


def sample(
    model: Denoiser,
    sampler: Sampler | None = None,
    n: int = 8,
    seed: int = 8200,
    length: int | None = None,
    prefix: Given | None = None,
    fixed: Fixed | None = None,
    batch_size: int | None = None,
    progress: bool | Watcher = False,
    *,
    replay: tuple[Tensor, ...] | None = None,
    first: int = 0,
    backend: Backend | None = None,
) -> Samples:
    """n samples of a model under a sampler (default: CRS with 64 calls).

    prefix: text or ids to begin with, or a list of n of them, one for each sample. fixed: more generally, given tokens
    anywhere, as {position: token}, as {position: text or ids} that begin there, or as a tensor (L,) or (n, L) with -1
    where the position is free; both hold in state, input and output and are never selected.
    replay: the `memory` of other samples: select where and when they did. first: index of the first sample under the
    seed, so that shards of one set can be made apart. progress: True for a bar, or a function told after every call."""
    sampler = CRS() if sampler is None else sampler
    check(model)
    reachable(n, seed, first, batch_size)
    fixed = given_tokens(model, n, model.length if length is None else length, prefix, fixed).to(model.device)
    for part in replay or ():
        if part.shape != fixed.shape:
            raise LimpetError(
                f"the replayed samples have shape {tuple(part.shape)}, these {tuple(fixed.shape)}: "
                "ask for as many samples of the same length"
            )
    batch_size = batch_size or at_once(model.device, fixed.shape[1])
    counted = Counted(model)
    ends: list[State] = []
    selected: list[Tensor] = []
    with watcher(progress) as watch, torch.inference_mode():
        for start in range(0, n, batch_size):
            rows = slice(start, min(n, start + batch_size))
            stream = Stream(seed, torch.arange(first + rows.start, first + rows.stop, device=model.device))
            path = open_path(counted, stream, fixed[rows], backend)
            recorded = None if replay is None else tuple(part[rows].to(model.device) for part in replay)
            for state, info in generate(sampler, path, begin(sampler, path, recorded)):
                watch(state, info, start * sampler.nfe + (info.call + 1) * (rows.stop - start), n * sampler.nfe)
            ends.append(state)
            selected.append(info.marks.get("selected", path.nowhere).sum(-1))
    memory = [torch.cat(parts).cpu() for parts in zip(*(end.memory for end in ends), strict=True)]
    kind = type(ends[0].memory)
    return Samples(
        tokens=torch.cat([state.tokens for state in ends]).cpu(),
        nfe=counted.calls // len(ends),
        head_rows=counted.rows / max(1, int((fixed < 0).sum()) * sampler.nfe),
        selected=torch.cat(selected).cpu(),
        memory=tuple(memory) if kind is tuple else kind(*memory),
        sampler=sampler,
        seed=seed,
        first=first,
        given=fixed.cpu(),
        model=model.name,
        digest=model.digest,
        tokenizer=tokenizer_digest(model.tokenizer),
        _decode=None if model.tokenizer is None else model.tokenizer.decode,
    )


def reachable(n: int, seed: int, first: int, batch_size: int | None) -> None:
    """Raise unless there are such samples, and they can be computed in such batches."""
    if n < 1:
        raise LimpetError(f"n is {n}; ask for at least one sample")
    if batch_size is not None and batch_size < 1:
        raise LimpetError(f"batch_size is {batch_size}; compute at least one sample at once, or leave it out")
    if not 0 <= seed < SEEDS or not 0 <= first <= SAMPLES - n:
        raise LimpetError(
            f"seed is {seed} and first {first}; they are whole numbers from 0, the seed of at most 64 bits"
        )


def at_once(device: torch.device, length: int) -> int:
    """Samples in a batch: enough to keep the device busy, few enough to bound the features' memory."""
    return max(1, (65536 if device.type == "cuda" else 8192) // length)


def begin(sampler: Sampler, path: Path, recorded: tuple[Tensor, ...] | None = None) -> State:
    """The start of a path, or of the replay of a recorded one."""
    return sampler.begin(path) if recorded is None else sampler.replay(path, recorded)


def given_tokens(model: Denoiser, n: int, length: int, prefix: Given | None, fixed: Fixed | None) -> Tensor:
    """(n, L) given tokens, -1 where free, from a prefix and fixed positions, checked."""
    if length < 1:
        raise LimpetError(f"length is {length}; ask for at least one token")
    tokens = torch.full((n, length), -1)
    if isinstance(fixed, Mapping):
        for position, token in spelled(model, fixed.items(), length).items():
            tokens[:, position] = token
    elif fixed is not None:
        if fixed.shape not in {(length,), (n, length)}:
            raise LimpetError(f"fixed has shape {tuple(fixed.shape)}; it takes ({length},) or ({n}, {length})")
        tokens[:] = fixed
    if prefix is not None:
        for rows, given in _prefixes(prefix, n):
            ids = ids_of(model, given, "the prefix")
            if len(ids) > length:
                which = "the prefix" if isinstance(rows, slice) else f"prefix {rows + 1} of {n}"
                raise LimpetError(f"{which} has {len(ids)} tokens, the sequence {length}: shorten it or raise length")
            tokens[rows, : len(ids)] = torch.tensor(ids, dtype=torch.long)
    for token in tokens[(tokens < -1) | (tokens >= model.vocab_size)].tolist():
        _check_token(model, token)
    return tokens


def _prefixes(prefix: Given, n: int) -> Iterator[tuple[int | slice, Any]]:
    """Which samples begin with what: all with one prefix, or each with its own."""
    shape = () if isinstance(prefix, str | int) else tuple(getattr(prefix, "shape", (len(prefix),)))
    own = bool(shape and shape[0]) and (isinstance(prefix[0], str) or np.ndim(prefix[0]) > 0)
    if len(shape) > 2 or (own and shape[0] != n) or isinstance(prefix, int):
        raise LimpetError(f"prefix has shape {shape}; it takes (P,) for all samples or ({n}, P), or {n} texts")
    yield from enumerate(prefix) if own else [(slice(None), prefix)]


def spelled(model: Denoiser, texts: Iterable[tuple[int, int | str | Ids]], length: int) -> dict[int, int]:
    """{position: token} of tokens, and of texts or ids that begin at a position."""
    given: dict[int, int] = {}
    for start, text in texts:
        ids, shown = ids_of(model, text, "what is fixed"), plain(ascii(text), 40)
        if not 0 <= start < length:
            raise LimpetError(f"fixed position {start} is outside a sequence of {length} tokens")
        if start + len(ids) > length:
            raise LimpetError(
                f"{shown} takes {len(ids)} tokens from position {start}, past the {length} of the sequence: "
                "shorten it or raise length"
            )
        for position, token in enumerate(ids, start):
            if position in given:
                raise LimpetError(f"position {position} is given twice: move {shown}")
            given[position] = token
    return given


def ids_of(model: Denoiser, given: int | str | Ids | Tensor, what: str) -> list[int]:
    """Text as the model's own ids, or one or more ids as they are, checked."""
    if isinstance(given, str):
        if model.tokenizer is None:
            raise LimpetError(f"{model.name} has no tokenizer: give {what} as token ids")
        return model.tokenizer.encode(given)
    ids: list[int] = np.atleast_1d(np.asarray(given)).tolist()
    for token in ids:
        _check_token(model, token)
    return ids


def _check_token(model: Denoiser, token: int) -> None:
    if not 0 <= token < model.vocab_size:
        last = model.vocab_size - 1
        raise LimpetError(f"token {token} is outside the vocabulary of {model.vocab_size} (0 to {last})")


@contextmanager
def watcher(progress: bool | Watcher) -> Iterator[Watcher]:
    if callable(progress):
        yield progress
    elif not progress:
        yield lambda state, info, done, total: None
    else:
        console = extra("rich.console", "cli").Console(stderr=True)
        with extra("rich.progress", "cli").Progress(console=console, transient=True) as bar:
            task = bar.add_task("sampling", total=None)
            yield lambda state, info, done, total: bar.update(task, completed=done, total=total)
