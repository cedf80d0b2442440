"""From a model and a policy to samples: what is fixed, which batches, what comes back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from limpet import labels, process, sampler, steps
from limpet.denoisers import Denoiser, Needed
from limpet.errors import LimpetError, extra
from limpet.policy import Policy
from limpet.sampler import NEVER, Info, Run, State
from limpet.steps import Backend
from limpet.streams import Stream

Given = str | Sequence[int] | Tensor  # a prompt: text, ids, or (n, P) ids


@dataclass(frozen=True)
class Selection:
    """Where and when a run selected, and what it stored: enough to replay it."""

    selected_at: Tensor  # (n, L) the step, or sampler.NEVER
    labels: Tensor  # (n, L)

    def __getitem__(self, rows: slice) -> Selection:
        return Selection(self.selected_at[rows], self.labels[rows])

    def to(self, device: torch.device) -> Selection:
        return Selection(self.selected_at.to(device), self.labels.to(device))


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
    prefix: int  # how many leading tokens were given
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
                "digest": self.digest, "nfe": self.nfe, "selected": selected, "prefix": self.prefix,
                "policy": self.policy.to_dict(),
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

    def body_at(self, tokens: Tensor, t: float | Tensor, needed: Needed) -> Tensor:
        self.calls += 1
        return self.inner.body_at(tokens, t, needed)

    def head(self, features: Tensor) -> Tensor:
        self.rows += features.shape[:-1].numel()
        return self.inner.head(features)


def prepare(
    denoiser: Denoiser, policy: Policy, stream: Stream, fixed: Tensor, *, replay: Selection | None = None,
    advance: Backend | None = None, trace: bool = False,
) -> Run:  # fmt: skip
    """Resolve a policy, once, for a model and a batch whose given tokens are `fixed` (B, L), -1 where free."""
    two_piece = policy.grid == "two-piece"
    times = process.two_piece_grid(policy.nfe, policy.warmup) if two_piece else process.uniform_grid(policy.nfe)
    warmup = process.warmup_steps(policy.nfe, policy.warmup)
    after = policy.nfe - 1 - warmup  # R: steps that may select
    late = policy.top_p if policy.late_top_p is None else policy.late_top_p
    generated = (fixed < 0).sum(-1)
    plan, advance = steps.fastest(fixed.device) if advance is None else (steps.unplanned, advance)
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
        free=fixed < 0,
        replay=None if replay is None else replay.selected_at,
        label=labels.rule(policy, None if replay is None else replay.labels),
        select=steps.selector(fixed.device),
        plan=plan,
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
    advance: Backend | None = None,
) -> Samples:
    """n samples of a model under a policy (default: CRS with 64 calls).

    prefix: text or ids to begin with. fixed: more generally, given tokens anywhere, as {position: token} or a tensor
    (L,) or (n, L) with -1 where the position is free; both hold in state, input and output and are never selected.
    replay: select where and when a recorded run did. first: index of the first sample under the seed, so that
    shards of one set can be made apart. progress: True for a bar, or a function told after every step."""
    policy = Policy() if policy is None else policy
    if n < 1:
        raise LimpetError(f"n is {n}; ask for at least one sample")
    if batch_size is not None and batch_size < 1:
        raise LimpetError(f"batch_size is {batch_size}; compute at least one sample at once, or leave it out")
    fixed = given_tokens(model, n, model.length if length is None else length, prefix, fixed).to(model.device)
    if replay is not None and replay.selected_at.shape != fixed.shape:
        raise LimpetError(
            f"the replayed run has shape {tuple(replay.selected_at.shape)}, this one {tuple(fixed.shape)}: "
            "ask for as many samples of the same length"
        )
    batch_size = batch_size or _batch_size(model, fixed.shape[1])
    counted = Counted(model)
    finished: list[State] = []
    with _watcher(progress) as watch, torch.inference_mode():
        for start in range(0, n, batch_size):
            rows = slice(start, min(n, start + batch_size))
            stream = Stream(seed, torch.arange(first + rows.start, first + rows.stop, device=model.device))
            recorded = None if replay is None else replay[rows].to(model.device)
            run = prepare(counted, policy, stream, fixed[rows], replay=recorded, advance=advance)
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
        head_rows=counted.rows / max(1, int((fixed < 0).sum()) * policy.nfe),
        selection=selection,
        policy=policy,
        seed=seed,
        first=first,
        prefix=int((fixed >= 0).all(0).cumprod(0).sum()),
        model=model.name,
        digest=model.digest,
        _decode=None if tokenizer is None else tokenizer.decode,
    )


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
        ids = _prefix_ids(model, prefix)
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


def _prefix_ids(model: Denoiser, prefix: Given) -> Tensor:
    if isinstance(prefix, str):
        if model.tokenizer is None:
            raise LimpetError(f"{model.name} has no tokenizer: give the prefix as token ids")
        return torch.tensor(model.tokenizer.encode(prefix), dtype=torch.long)
    ids = torch.as_tensor(prefix, dtype=torch.long)
    for token in ids[ids < 0].tolist():
        _check_token(model, token)
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
