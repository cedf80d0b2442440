"""From a model and a sampler to samples: what is fixed, which batches, what comes back."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from limpet.diffusion.backends import Backend
from limpet.diffusion.rng import SAMPLES, SEEDS, CounterRNG
from limpet.errors import LimpetError, extra, plain, remark
from limpet.files import read_text, write_whole
from limpet.html import table
from limpet.models import Denoiser, Needed, Wrapped, check_model, tokenizer_digest
from limpet.samplers import CRS, Sampler, from_dict
from limpet.samplers.context import Context, State, StepInfo, generate, open_context

Ids = Sequence[int]
Given = str | Ids | Tensor | Sequence[str] | Sequence[Ids]  # a prompt: text, ids, or (n, P) ids; or each sample's own
Fixed = Mapping[int, int | str | Ids] | Tensor  # a token, or some from there on as ids or text; or (L,) or (n, L) ids
Watcher = Callable[
    [State, StepInfo, int, int], None
]  # told after every call of every batch, with how many are done, of all
SHOWN = 8  # samples that a notebook shows of many
ABOUT = ("nfe", "seed", "model", "digest", "precision", "tokenizer")  # what is written of all samples of a run alike


@dataclass(frozen=True, eq=False, repr=False)
class Samples:
    """What `sample` returns: a sequence of samples, each a plain dict with everything that decides it (`rows`).

    A slice is the samples that follow each other there. Samples are equal where their rows are; `save` writes the rows
    as JSON lines, as `limpet sample` does, and `load` reads them back, without the memory that a replay needs."""

    tokens: Tensor  # (n, L)
    nfe: int  # calls of the denoiser's body for each sample, counted
    head_rows: float  # rows of the head evaluated, as a fraction of nfe x free positions
    committed: Tensor  # (n,) how many positions each sample committed along its path
    memory: tuple[Tensor, ...]  # (n, L) each: what the sampler remembered at the end; `replay` takes it
    sampler: Sampler
    seed: int
    first: int  # index of the first sample under the seed
    given: Tensor  # (n, L) what was given, -1 where it was free
    model: str
    digest: str
    precision: str  # what the model ran in
    tokenizer: str | None  # its digest
    _decode: Callable[[list[int]], str] | None

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
        committed, sampler = self.committed.tolist(), self.sampler.to_dict()
        for i, (tokens, prefix, given) in enumerate(
            zip(self.tokens.tolist(), self.prefixes.tolist(), self.given, strict=True)
        ):
            fixed = [at for at in (given >= 0).nonzero().flatten().tolist() if at >= prefix]
            before, after = (None, None) if self._decode is None else cut(self._decode, tokens, prefix)
            yield {
                "text": None if before is None or after is None else before + after, "tokens": tokens,
                "seed": self.seed, "sample": self.first + i, "model": self.model, "digest": self.digest,
                "precision": self.precision, "tokenizer": self.tokenizer, "nfe": self.nfe, "committed": committed[i],
                "prefix": prefix, "prefix_text": before, "fixed": [[at, tokens[at]] for at in fixed],
                "sampler": sampler,
            }  # fmt: skip

    def __len__(self) -> int:
        return len(self.tokens)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self.rows()

    @overload
    def __getitem__(self, which: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, which: slice) -> Samples: ...

    def __getitem__(self, which: int | slice) -> dict[str, Any] | Samples:
        if isinstance(which, int):
            if not -len(self) <= which < len(self):
                raise IndexError(f"there are {len(self)} samples, and none is number {which}")
            (row,) = self[which % len(self) : which % len(self) + 1].rows()
            return row
        start, stop, step = which.indices(len(self))
        if step != 1 or start >= stop:
            raise LimpetError("a slice of samples is one or more that follow each other, as in samples[2:4]")
        memory = [part[start:stop] for part in self.memory]
        return replace(
            self, tokens=self.tokens[start:stop], committed=self.committed[start:stop], given=self.given[start:stop],
            first=self.first + start,
            memory=tuple(memory) if type(self.memory) is tuple else type(self.memory)(*memory),
        )  # fmt: skip

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Samples) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{self.caption}>"

    @property
    def caption(self) -> str:
        """What they are, in a line."""
        n, length = self.tokens.shape
        many = f"{n} sample{'s' if n > 1 else ''} of {length} tokens"
        return f"{many}: {self.model} in {self.precision}, {self.sampler!r}, seed {self.seed}"

    def _repr_html_(self) -> str:
        texts = self.texts if self._decode else [str(ids) for ids in self.tokens.tolist()]
        rows = [[str(self.first + i), str(int(self.committed[i])), text] for i, text in enumerate(texts[:SHOWN])]
        more = f"; the first {SHOWN}" if len(self) > SHOWN else ""
        return table(self.caption + more, ["sample", "committed", "text"], rows)

    def to_pandas(self) -> Any:
        """A data frame, one row a sample; the sampler's parameters are columns of their own."""
        return extra("pandas", "notebook").json_normalize(list(self), sep=" ")

    def save(self, path: str | os.PathLike[str]) -> None:
        """One line of JSON a sample; `limpet score` takes such a file too."""
        write_whole(path, self.lines())

    def lines(self) -> str:
        """JSON lines, one a sample."""
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in self)

    @classmethod
    def load(cls, path: str | os.PathLike[str], sampler: Sampler | None = None) -> Samples:
        """What `save` or `limpet sample --out` wrote. A sampler of one's own, in a Python file, is to be given: what a
        file of samples names is never run."""
        try:
            lines = read_text(path, "name a file of samples").split("\n")  # a text may have other ends of lines in it
            return _read([json.loads(line) for line in lines if line], sampler)
        except (ValueError, TypeError, LookupError, RecursionError, RuntimeError) as error:
            reason = str(error) if isinstance(error, LimpetError) else repr(error)
            raise LimpetError(f"{path} does not hold the samples of one run ({reason})") from error


def _read(rows: list[dict[str, Any]], sampler: Sampler | None) -> Samples:
    """Samples from the rows of one run, which agree on all but each sample's own. How many rows of the head were
    evaluated is not written, as it hangs on the batch."""
    if not rows:
        raise LimpetError("it is empty")
    first, own = rows[0], ("text", "tokens", "sample", "committed", "prefix", "prefix_text", "fixed")
    for i, row in enumerate(rows):
        if row["sample"] != first["sample"] + i or any(row[key] != first[key] for key in first if key not in own):
            raise LimpetError(f"line {i + 1} is not of the run of line 1, or not the sample after the one before it")
    if sampler is None:
        if ".py:" in (name := str(first["sampler"])):  # also as another sampler's predictor
            raise LimpetError(f"they were made under {name}, a file that is not run from here: give sampler=")
        sampler = from_dict(first["sampler"])
    elif sampler.to_dict() != first["sampler"]:
        raise LimpetError(f"they were made under {first['sampler']}, not under {sampler}")
    texts = {tuple(row["tokens"]): str(row["text"]) for row in rows}
    texts |= {tuple(row["tokens"][: row["prefix"]]): str(row["prefix_text"]) for row in rows}
    tokens = torch.tensor([row["tokens"] for row in rows], dtype=torch.long)
    given = torch.full_like(tokens, -1)
    for i, row in enumerate(rows):
        at = [*range(row["prefix"]), *(position for position, _ in row["fixed"])]
        given[i, at] = tokens[i, at]
    return Samples(
        tokens=tokens, given=given, head_rows=math.nan,
        committed=torch.tensor([row["committed"] for row in rows], dtype=torch.long),
        memory=(), sampler=sampler, first=int(first["sample"]),
        **{name: first[name] for name in ABOUT},
        _decode=None if first["text"] is None else lambda ids: texts[tuple(ids)],
    )  # fmt: skip


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
    where the position is free; both hold in state, input and output and are never committed.
    replay: the `memory` of other samples: select where and when they did. first: index of the first sample under the
    seed, so that shards of one set can be made apart. progress: True for a bar, or a function told after every call."""
    sampler = CRS() if sampler is None else sampler
    check_model(model)
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
    committed: list[Tensor] = []
    with watcher(progress) as watch, torch.inference_mode():
        for start in range(0, n, batch_size):
            rows = slice(start, min(n, start + batch_size))
            rng = CounterRNG(seed, torch.arange(first + rows.start, first + rows.stop, device=model.device))
            path = open_context(counted, rng, fixed[rows], backend)
            recorded = None if replay is None else tuple(part[rows].to(model.device) for part in replay)
            for state, info in generate(sampler, path, begin(sampler, path, recorded)):
                watch(state, info, start * sampler.nfe + (info.call + 1) * (rows.stop - start), n * sampler.nfe)
            ends.append(state)
            committed.append(info.marks.get("committed", path.no_positions).sum(-1))
    memory = [torch.cat(parts).cpu() for parts in zip(*(end.memory for end in ends), strict=True)]
    kind = type(ends[0].memory)
    return Samples(
        tokens=torch.cat([state.tokens for state in ends]).cpu(),
        nfe=counted.calls // len(ends),
        head_rows=counted.rows / max(1, int((fixed < 0).sum()) * sampler.nfe),
        committed=torch.cat(committed).cpu(),
        memory=tuple(memory) if kind is tuple else kind(*memory),
        sampler=sampler,
        seed=seed,
        first=first,
        given=fixed.cpu(),
        model=model.name,
        digest=model.digest,
        precision=model.precision,
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


def begin(sampler: Sampler, path: Context, recorded: tuple[Tensor, ...] | None = None) -> State:
    """The start of a path, or of the replay of a recorded one."""
    return sampler.begin(path) if recorded is None else sampler.replay(path, recorded)


def given_tokens(model: Denoiser, n: int, length: int, prefix: Given | None, fixed: Fixed | None) -> Tensor:
    """(n, L) given tokens, -1 where free, from a prefix and fixed positions, checked."""
    if length < 1:
        raise LimpetError(f"length is {length}; ask for at least one token")
    if length > model.length:
        remark(
            f"length is {length}, and {model.name} is made for {model.length}: of what lies beyond, it learnt nothing"
        )
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
            ids = torch.tensor(ids_of(model, given, "the prefix"), dtype=torch.long)
            if len(ids) > length:
                which = "the prefix" if isinstance(rows, slice) else f"prefix {rows + 1} of {n}"
                raise LimpetError(f"{which} has {len(ids)} tokens, the sequence {length}: shorten it or raise length")
            begins = tokens[rows, : len(ids)]
            torn = ((begins >= 0) & (begins != ids)).nonzero()[:, -1:]
            if len(torn):
                raise LimpetError(
                    f"prefix and fixed give position {int(torn[0])} different tokens: leave it out of one of them"
                )
            tokens[rows, : len(ids)] = ids
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
        from rich.console import Console
        from rich.progress import Progress

        console = Console(stderr=True)
        if console.is_jupyter or not console.is_terminal:
            yield _line(often=console.is_jupyter)
            return
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task("sampling", total=None)
            yield lambda state, info, done, total: bar.update(task, completed=done, total=total)


def _line(often: bool) -> Watcher:
    """Progress where there is no terminal: in a notebook a line that is written over, which needs no widgets, and
    elsewhere the last of it."""

    def watch(state: State, info: StepInfo, done: int, total: int) -> None:
        if often or done == total:
            sys.stderr.write(f"\r{done:,} of {total:,} calls" + "\n" * (done == total))
            sys.stderr.flush()

    return watch
