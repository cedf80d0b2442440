"""From a model and a sampler to samples: what is fixed, which batches, what comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from limpet.denoisers import Denoiser, Needed, Wrapped, tokenizer_digest
from limpet.engine.path import Info, Path, State, check, generate, open_path
from limpet.engine.steps import Backend
from limpet.engine.streams import SAMPLES, SEEDS, Stream
from limpet.errors import LimpetError, extra
from limpet.samplers import CRS, Sampler

Given = str | Sequence[int] | Tensor  # a prompt: text, ids, or (n, P) ids
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
    prefix: int  # how many leading tokens were given
    model: str
    digest: str
    tokenizer: str | None  # its digest
    _decode: Callable[[list[int]], str] | None = field(repr=False)

    @property
    def texts(self) -> list[str]:
        if self._decode is None:
            raise LimpetError(f"{self.model} has no tokenizer, so its samples have no text; use .tokens")
        return [self._decode(ids) for ids in self.tokens.tolist()]

    def rows(self) -> Iterator[dict[str, Any]]:
        """One plain dict a sample, with everything that decides it: what `limpet sample` writes as JSON lines."""
        texts = self.texts if self._decode else [None] * len(self.tokens)
        for i, text in enumerate(texts):
            yield {
                "text": text, "tokens": self.tokens[i].tolist(), "seed": self.seed, "sample": self.first + i,
                "model": self.model, "digest": self.digest, "tokenizer": self.tokenizer, "nfe": self.nfe,
                "selected": int(self.selected[i]), "prefix": self.prefix, "sampler": self.sampler.to_dict(),
            }  # fmt: skip


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
    fixed: Mapping[int, int] | Tensor | None = None,
    batch_size: int | None = None,
    progress: bool | Watcher = False,
    *,
    replay: tuple[Tensor, ...] | None = None,
    first: int = 0,
    backend: Backend | None = None,
) -> Samples:
    """n samples of a model under a sampler (default: CRS with 64 calls).

    prefix: text or ids to begin with. fixed: more generally, given tokens anywhere, as {position: token} or a tensor
    (L,) or (n, L) with -1 where the position is free; both hold in state, input and output and are never selected.
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
    if batch_size is None:  # enough rows to keep the device busy, few enough to bound the features' memory
        batch_size = max(1, (65536 if model.device.type == "cuda" else 8192) // fixed.shape[1])
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
        prefix=int((fixed >= 0).all(0).cumprod(0).sum()),
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


def begin(sampler: Sampler, path: Path, recorded: tuple[Tensor, ...] | None = None) -> State:
    """The start of a path, or of the replay of a recorded one."""
    return sampler.begin(path) if recorded is None else sampler.replay(path, recorded)


def given_tokens(
    model: Denoiser, n: int, length: int, prefix: Given | None, fixed: Mapping[int, int] | Tensor | None
) -> Tensor:
    """(n, L) given tokens, -1 where free, from a prefix and fixed positions, checked."""
    if length < 1:
        raise LimpetError(f"length is {length}; ask for at least one token")
    tokens = torch.full((n, length), -1)
    if isinstance(fixed, Mapping):
        for position, token in fixed.items():
            if not 0 <= position < length:
                raise LimpetError(f"fixed position {position} is outside a sequence of {length} tokens")
            _check_token(model, token)
            tokens[:, position] = token
    elif fixed is not None:
        if fixed.shape not in {(length,), (n, length)}:
            raise LimpetError(f"fixed has shape {tuple(fixed.shape)}; it takes ({length},) or ({n}, {length})")
        tokens[:] = fixed
    if prefix is not None:
        if isinstance(prefix, str):
            if model.tokenizer is None:
                raise LimpetError(f"{model.name} has no tokenizer: give the prefix as token ids")
            prefix = model.tokenizer.encode(prefix)
        ids = torch.as_tensor(prefix, dtype=torch.long)
        for token in ids[ids < 0].tolist():
            _check_token(model, token)
        if ids.dim() not in (1, 2) or (ids.dim() == 2 and len(ids) != n):
            raise LimpetError(f"prefix has shape {tuple(ids.shape)}; it takes (P,) for all samples or ({n}, P)")
        if ids.shape[-1] > length:
            raise LimpetError(
                f"the prefix has {ids.shape[-1]} tokens, the sequence {length}: shorten it or raise length"
            )
        tokens[:, : ids.shape[-1]] = ids
    for token in tokens[(tokens < -1) | (tokens >= model.vocab_size)].tolist():
        _check_token(model, token)
    return tokens


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
