"""From a model and a policy to samples: what is fixed, which batches, what comes back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from limpet import labels, process, sampler
from limpet.denoisers import Denoiser
from limpet.errors import LimpetError, extra
from limpet.policy import Policy
from limpet.sampler import NEVER, Info, Run, State
from limpet.steps import Backend, lazy
from limpet.streams import Stream

Given = str | Sequence[int] | Tensor  # a prompt: text, ids, or (n, P) ids


@dataclass(frozen=True)
class Selection:
    """Where and when a run selected, and what it stored: enough to replay it."""

    selected_at: Tensor  # (n, L) the step, or sampler.NEVER
    labels: Tensor  # (n, L)

    def __getitem__(self, rows: slice) -> Selection:
        return Selection(self.selected_at[rows], self.labels[rows])


@dataclass(frozen=True)
class Samples:
    """What `sample` returns."""

    tokens: Tensor  # (n, L)
    nfe: int  # calls of the denoiser's body for each sample, counted
    head_rows: float  # rows of the head evaluated, as a fraction of nfe x free positions
    selection: Selection
    policy: Policy
    seed: int
    first: int  # index of the first sample under the seed
    model: str
    digest: str
    _decode: Callable[[list[int]], str] | None = field(repr=False)

    @property
    def selected(self) -> Tensor:
        """(n,): how many positions each sample selected along its path."""
        return (self.selection.selected_at != NEVER).sum(-1)

    @property
    def texts(self) -> list[str]:
        if self._decode is None:
            raise LimpetError(f"{self.model} has no tokenizer, so its samples have no text; use .tokens")
        return [self._decode(ids) for ids in self.tokens.tolist()]

    def rows(self) -> Iterator[dict[str, Any]]:
        """One plain dict a sample, with everything that decides it: what `limpet sample` writes as JSON lines."""
        texts = self.texts if self._decode else [None] * len(self.tokens)
        for i, (ids, text, selected) in enumerate(
            zip(self.tokens.tolist(), texts, self.selected.tolist(), strict=True)
        ):
            yield {
                "text": text, "tokens": ids, "seed": self.seed, "sample": self.first + i, "model": self.model,
                "digest": self.digest, "nfe": self.nfe, "selected": selected, "policy": self.policy.to_dict(),
            }  # fmt: skip


class Watcher(Protocol):
    """Told after every step of every batch."""

    def __call__(self, state: State, info: Info, done: int, total: int) -> None: ...


class Counted(Denoiser):
    """A denoiser that counts: calls of the body, rows of the head."""

    def __init__(self, inner: Denoiser) -> None:
        self.inner, self.calls, self.rows = inner, 0, 0
        self.vocab_size, self.length, self.predicts, self.schedule = (
            inner.vocab_size, inner.length, inner.predicts, inner.schedule,
        )  # fmt: skip

    @property
    def device(self) -> torch.device:
        return self.inner.device

    def body(self, tokens: Tensor, t: float | Tensor) -> Tensor:
        self.calls += 1
        return self.inner.body(tokens, t)

    def head(self, features: Tensor) -> Tensor:
        self.rows += features.shape[:-1].numel()
        return self.inner.head(features)


def prepare(
    denoiser: Denoiser, policy: Policy, stream: Stream, fixed: Tensor, *, replay: Selection | None = None,
    advance: Backend = lazy.advance, trace: bool = False,
) -> Run:  # fmt: skip
    """Resolve a policy, once, for a model and a batch whose given tokens are `fixed` (B, L), -1 where free."""
    two_piece = policy.grid == "two-piece"
    times = process.two_piece_grid(policy.nfe, policy.warmup) if two_piece else process.uniform_grid(policy.nfe)
    warmup = process.warmup_steps(policy.nfe, policy.warmup)
    after = policy.nfe - 1 - warmup  # R: steps that may select
    late = policy.top_p if policy.late_top_p is None else policy.late_top_p
    generated = (fixed < 0).sum(-1)
    count = torch.full_like(generated, policy.count) if policy.count is not None else -(-generated // max(1, after))
    return Run(
        denoiser=denoiser,
        policy=policy,
        stream=stream,
        times=times.tolist(),
        signals=denoiser.schedule.signal(times).tolist(),
        top_p=[policy.top_p] * warmup + [late] * (policy.nfe - warmup),
        warmup=warmup,
        horizon=math.inf if policy.horizon is None else policy.horizon,
        count=count,
        budget=policy.budget * generated.double() / max(1, after),
        fixed=fixed,
        replay=None if replay is None else replay.selected_at,
        label=labels.rule(policy, None if replay is None else replay.labels),
        advance=advance,
        trace=trace,
    )


def sample(
    model: Denoiser,
    policy: Policy | None = None,
    n: int = 8,
    seed: int = 8200,
    length: int | None = None,
    prefix: Given | None = None,
    batch_size: int | None = None,
    progress: bool | Watcher = False,
    *,
    fixed: Mapping[int, int] | Tensor | None = None,
    replay: Selection | None = None,
    first: int = 0,
    advance: Backend = lazy.advance,
) -> Samples:
    """n samples of a model under a policy (default: CRS with 64 calls).

    prefix: text or ids to begin with. fixed: more generally, given tokens anywhere, as {position: token} or a tensor
    (L,) or (n, L) with -1 where the position is free; both hold in state, input and output and are never selected.
    replay: select where and when a recorded run did. first: index of the first sample under the seed, so that
    shards of one set can be made apart. progress: True for a bar, or a function told after every step."""
    policy = Policy() if policy is None else policy
    if n < 1:
        raise LimpetError(f"n is {n}; ask for at least one sample")
    given = _given(model, n, length or model.length, prefix, fixed).to(model.device)
    if replay is not None and replay.selected_at.shape != given.shape:
        raise LimpetError(
            f"the replayed run has shape {tuple(replay.selected_at.shape)}, this one {tuple(given.shape)}"
        )
    batch_size = batch_size or _batch_size(model, given.shape[1])
    counted = Counted(model)
    finished: list[State] = []
    with _watcher(progress) as watch, torch.inference_mode():
        for start in range(0, n, batch_size):
            rows = slice(start, min(n, start + batch_size))
            stream = Stream(seed, torch.arange(first + rows.start, first + rows.stop, device=model.device))
            recorded = None if replay is None else replay[rows]
            run = prepare(counted, policy, stream, given[rows], replay=recorded, advance=advance)
            for state, info in sampler.generate(run):
                watch(state, info, start * policy.nfe + (info.step + 1) * (rows.stop - start), n * policy.nfe)
            finished.append(state)
    batches = len(finished)
    selection = Selection(
        torch.cat([state.selected_at for state in finished]).cpu(),
        torch.cat([state.labels for state in finished]).cpu(),
    )
    tokenizer = model.tokenizer
    return Samples(
        tokens=torch.cat([state.tokens for state in finished]).cpu(),
        nfe=counted.calls // batches,
        head_rows=counted.rows / max(1, int((given < 0).sum()) * policy.nfe),
        selection=selection,
        policy=policy,
        seed=seed,
        first=first,
        model=model.name,
        digest=model.digest,
        _decode=None if tokenizer is None else tokenizer.decode,
    )


def _given(
    model: Denoiser, n: int, length: int, prefix: Given | None, fixed: Mapping[int, int] | Tensor | None
) -> Tensor:
    """(n, L) given tokens, -1 where free, from a prefix and fixed positions, checked."""
    if length < 1:
        raise LimpetError(f"length is {length}; ask for at least one token")
    given = torch.full((n, length), -1)
    if isinstance(fixed, Mapping):
        for position, token in fixed.items():
            if not 0 <= position < length:
                raise LimpetError(f"fixed position {position} is outside a sequence of {length} tokens")
            given[:, position] = token
    elif fixed is not None:
        if fixed.shape not in {(length,), (n, length)}:
            raise LimpetError(f"fixed has shape {tuple(fixed.shape)}; it takes ({length},) or ({n}, {length})")
        given[:] = fixed
    if prefix is not None:
        ids = _prefix_ids(model, prefix)
        if ids.dim() not in (1, 2) or (ids.dim() == 2 and len(ids) != n):
            raise LimpetError(f"prefix has shape {tuple(ids.shape)}; it takes (P,) for all samples or ({n}, P)")
        if ids.shape[-1] > length:
            raise LimpetError(
                f"the prefix has {ids.shape[-1]} tokens, the sequence {length}: shorten it or raise length"
            )
        given[:, : ids.shape[-1]] = ids
    wrong = given[(given < -1) | (given >= model.vocab_size)]
    if len(wrong):
        raise LimpetError(
            f"token {int(wrong[0])} is outside the vocabulary of {model.vocab_size} (0 to {model.vocab_size - 1})"
        )
    return given


def _prefix_ids(model: Denoiser, prefix: Given) -> Tensor:
    if isinstance(prefix, str):
        if model.tokenizer is None:
            raise LimpetError(f"{model.name} has no tokenizer: give the prefix as token ids")
        return torch.tensor(model.tokenizer.encode(prefix), dtype=torch.long)
    ids = torch.as_tensor(prefix, dtype=torch.long)
    if (ids < 0).any():
        raise LimpetError(f"a prefix holds token {int(ids.min())}; tokens are 0 or more")
    return ids


def _batch_size(model: Denoiser, length: int) -> int:
    """Enough rows to keep the device busy, few enough to bound the features' memory."""
    tokens = 65536 if model.device.type == "cuda" else 8192
    return max(1, tokens // length)


@contextmanager
def _watcher(progress: bool | Watcher) -> Iterator[Watcher]:
    if callable(progress):
        yield progress
    elif not progress:
        yield lambda state, info, done, total: None
    else:
        bar = extra("rich.progress", "cli").Progress(
            console=extra("rich.console", "cli").Console(stderr=True), transient=True
        )
        with bar:
            task = bar.add_task("sampling", total=None)
            yield lambda state, info, done, total: bar.update(task, completed=done, total=total)
