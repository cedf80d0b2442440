"""From a model and a sampler to samples: the one loop (`rollout`), and `sample`, `steps` and `reply`, which call it."""

from __future__ import annotations

import json
import math
import operator
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple, SupportsIndex, overload

import numpy as np
import torch
from torch import Tensor

from limpet.diffusion.backends import Backend, Outcome, fastest
from limpet.diffusion.rng import SAMPLE_LIMIT, SEED_LIMIT, CounterRNG
from limpet.errors import LimpetError, import_extra, one_line, warn
from limpet.files import read_text, write_file
from limpet.html import table
from limpet.models import (
    Canvas,
    Denoiser,
    ModelInput,
    PromptLayout,
    WrappedDenoiser,
    check_model,
    tokenizer_digest,
)
from limpet.samplers import Context, Sampler, State, StepInfo, choose_sampler, from_dict

SEED = 8200  # default seed
SEEDS = (8200, 8210, 8220, 8230)  # default seeds of comparisons and studies: the paper's
SHOWN = 8  # samples that a notebook shows of many
BATCH_TOKENS = {"cpu": 8192}  # default number of positions in a batch, by kind of device
ACCELERATOR_BATCH_TOKENS = 65536  # of every other kind

Ids = Sequence[int]
Prompt = str | Ids | Tensor | Sequence[str] | Sequence[Ids]  # text, ids, or (n, P) ids; or one for each sample
Fixed = Mapping[int, int | str | Ids] | Tensor  # a token, or text or ids from a position on; or (L,) or (n, L) ids
Progress = Callable[[int, int], None]  # called after every network call: calls done, of how many


# The one loop


@dataclass(frozen=True)
class Inputs:
    """What one batch is sampled from, besides model and sampler."""

    fixed: Tensor  # (B, L) fixed tokens, -1 where a position is free
    rng: CounterRNG  # random numbers of the batch's samples
    replay: tuple[Tensor, ...] | None = None  # the final memory of the trajectories whose choices are repeated
    backend: Backend | None = None  # default: the fastest on the device
    trace: bool = False  # inspect every prediction, also those that the sampler does not read


@dataclass(frozen=True, repr=False)
class Step:
    """One network call of a batch: what the network read, what it predicted, and the state after it."""

    context: Context
    state: State  # after the call
    info: StepInfo

    @property
    def call(self) -> int:
        """The number of the call, from 0."""
        return self.info.call

    @property
    def t(self) -> float:
        """The time of the call, from 1 (noise) towards 0 (clean)."""
        return self.info.t

    @property
    def tokens(self) -> Tensor:
        """(B, L) the noisy tokens after the call; after the last call, the output."""
        return self.state.tokens

    @property
    def model_input(self) -> Tensor:
        """(B, L) the tokens that the network was given."""
        return self.info.model_input

    @property
    def outcome(self) -> Outcome:
        """What was read of the predictions: `top`, `deficit` and `gain`, where they were inspected."""
        return self.info.outcome

    @property
    def deficit(self) -> Tensor:
        """(B, L) 1 - max prob of each prediction; inf where it was not inspected."""
        return self.info.outcome.deficit

    @property
    def masks(self) -> Mapping[str, Tensor]:
        """(B, L) bool by name: what the sampler did where."""
        return self.info.masks

    @property
    def committed(self) -> Tensor:
        """(B, L) bool: committed before this call."""
        return self.info.masks.get("committed", self.context.no_positions)

    @property
    def visible(self) -> Tensor:
        """(B, L) bool: committed tokens that stand in the model input."""
        return self.info.masks.get("visible", self.context.no_positions)

    def text(self, sample: int = 0) -> str:
        """The text of one sample after the call."""
        model = self.context.model
        if model.tokenizer is None:
            raise LimpetError(f"{model.name} has no tokenizer, so its samples have no text; use .tokens")
        return model.tokenizer.decode(self.tokens[sample].tolist())

    def __repr__(self) -> str:
        return f"<Step: call {self.call} at t {self.t:.4g}, {len(self.tokens)} samples, masks {[*self.masks]}>"


def context_of(model: Denoiser, inputs: Inputs, refresh: int = 1) -> Context:
    """What stays the same while a batch is sampled, on the fastest backend of its device by default.

    refresh: of the sampler, where it makes calls."""
    backend = inputs.backend or fastest(inputs.fixed.device)
    return Context(model, inputs.rng, inputs.fixed, backend, inputs.trace, refresh)


def first_state(sampler: Sampler, context: Context, inputs: Inputs) -> State:
    """The state before the first call, of a replay where there is one."""
    return sampler.init(context) if inputs.replay is None else sampler.replay(context, inputs.replay)


def rollout(
    model: Denoiser,
    sampler: Sampler,
    inputs: Inputs,
    start: State | None = None,
    stop: int | None = None,
    *,
    until_finished: bool = False,
) -> Iterator[Step]:
    """Sample one batch, call by call: the only code that begins, steps and finishes a trajectory.

    start: go on from this state, also from one of another sampler's trajectory (default: the beginning). stop: end
    before the call of this number (default: after the last). until_finished: end as soon as the sampler says that no
    later call changes any sample. Yields a `Step` after every network call."""
    context = context_of(model, inputs, sampler.refresh)
    with torch.inference_mode():
        state = first_state(sampler, context, inputs) if start is None else start
    last = sampler.nfe if stop is None else min(stop, sampler.nfe)
    while state.call < last:
        due = state.call + 1
        with torch.inference_mode():
            state, info = sampler.step(context, state)
        if state.call != due:
            raise LimpetError(f"{sampler.name} returned a state of {state.call} calls after call {due}: count them")
        if model.self_conditioned and state.previous is None:
            raise LimpetError(
                f"{model.name} is self-conditioned, and {sampler.name} does not pass features on: return "
                "state.next(tokens, features, memory)"
            )
        yield Step(context, state, info)
        if until_finished and bool(sampler.finished(state).all()):
            break
    context.check_finite()


class CountingDenoiser(WrappedDenoiser):
    """A denoiser that counts network calls, the positions of its backbone, and the rows of its head."""

    def __init__(self, inner: Denoiser) -> None:
        super().__init__(inner)
        self.calls, self.positions, self.rows = 0, 0, 0

    def backbone(self, inputs: ModelInput) -> Tensor:
        self.calls += 1
        some = None if inputs.cache is None else inputs.cache.compute
        self.positions += inputs.tokens.numel() if some is None else len(some)
        return super().backbone(inputs)

    def head(self, features: Tensor) -> Tensor:
        self.rows += features.shape[:-1].numel()
        return super().head(features)


# Samples


@dataclass(frozen=True)
class Sample:
    """One sample, with everything that decides it."""

    text: str | None  # None where the model has no tokenizer
    tokens: list[int]
    seed: int
    index: int  # its number under the seed
    model: str
    digest: str  # of the model
    precision: str  # that the model ran in
    tokenizer: str | None  # its digest
    nfe: int
    committed: int  # positions committed by the end
    prompt_length: int  # how many first tokens were fixed
    prompt: str | None  # their text
    fixed: list[list[int]]  # [position, token] of the fixed tokens after the prompt
    sampler: dict[str, Any]  # as `Sampler.to_dict` writes it

    def to_dict(self) -> dict[str, Any]:
        """A plain dictionary: a line of what `limpet sample --json` writes."""
        return {("sample" if name == "index" else name): value for name, value in asdict(self).items()}


@dataclass(frozen=True, eq=False, repr=False)
class Samples(Sequence[Sample]):
    """What `sample` returns: a sequence of `Sample`, with their tokens as one tensor.

    Samples are equal where all their records are. `save` writes one line of JSON for each, as `limpet sample --json`
    does; `load` reads them back, without the memory that a replay needs."""

    tokens: Tensor  # (n, L)
    nfe: int  # network calls for each sample, counted
    head_rows: float  # rows of the head that were computed, as a fraction of nfe x free positions
    committed: Tensor  # (n,) how many positions were committed in each
    memory: tuple[Tensor, ...]  # (n, L) each: the sampler's final memory; `replay` takes it
    sampler: Sampler
    seed: int
    indices: Tensor  # (n,) the number of each sample under the seed
    fixed: Tensor  # (n, L) the fixed tokens, -1 where a position was free
    model: str
    digest: str
    precision: str
    tokenizer: str | None
    _decode: Callable[[list[int]], str] | None

    @property
    def first(self) -> int:
        """The number of the first sample under the seed."""
        return int(self.indices[0])

    @property
    def prompt_lengths(self) -> Tensor:
        """(n,) how many first tokens of each were fixed."""
        return (self.fixed >= 0).long().cumprod(1).sum(1)

    @property
    def prompt_length(self) -> int:
        """How many first tokens of every sample were fixed."""
        return int(self.prompt_lengths.min())

    @property
    def texts(self) -> list[str]:
        """The text of each sample."""
        if self._decode is None:
            raise LimpetError(f"{self.model} has no tokenizer, so its samples have no text; use .tokens")
        return [self._decode(ids) for ids in self.tokens.tolist()]

    def __len__(self) -> int:
        return len(self.tokens)

    def __iter__(self) -> Iterator[Sample]:
        committed, indices, sampler = self.committed.tolist(), self.indices.tolist(), self.sampler.to_dict()
        for i, (tokens, length) in enumerate(zip(self.tokens.tolist(), self.prompt_lengths.tolist(), strict=True)):
            positions = (self.fixed[i] >= 0).nonzero().flatten().tolist()
            prompt, rest = (None, None) if self._decode is None else split_text(self._decode, tokens, length)
            yield Sample(
                text=None if prompt is None or rest is None else prompt + rest,
                tokens=tokens,
                seed=self.seed,
                index=indices[i],
                model=self.model,
                digest=self.digest,
                precision=self.precision,
                tokenizer=self.tokenizer,
                nfe=self.nfe,
                committed=committed[i],
                prompt_length=length,
                prompt=prompt,
                fixed=[[position, tokens[position]] for position in positions if position >= length],
                sampler=sampler,
            )

    @overload
    def __getitem__(self, which: SupportsIndex) -> Sample: ...

    @overload
    def __getitem__(self, which: slice) -> Samples: ...

    def __getitem__(self, which: SupportsIndex | slice) -> Sample | Samples:
        if not isinstance(which, slice):
            index = operator.index(which)
            if not -len(self) <= index < len(self):
                raise IndexError(f"there are {len(self)} samples, and none is number {index}")
            index %= len(self)
            return next(iter(self[index : index + 1]))
        rows = torch.arange(len(self))[list(range(*which.indices(len(self))))]
        parts = [part[rows] for part in self.memory]
        return replace(
            self,
            tokens=self.tokens[rows],
            committed=self.committed[rows],
            indices=self.indices[rows],
            fixed=self.fixed[rows],
            memory=memory_like(self.memory, parts),
        )

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Samples) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{self.caption}>"

    @property
    def caption(self) -> str:
        """A line that says what they are."""
        n, length = self.tokens.shape
        count = f"{n} sample{'' if n == 1 else 's'} of {length} tokens"
        return f"{count}: {self.model} in {self.precision}, {self.sampler!r}, seed {self.seed}"

    def _repr_html_(self) -> str:
        texts = self.texts if self._decode else [str(ids) for ids in self.tokens.tolist()]
        rows = [
            [str(index), str(committed), text]
            for index, committed, text in zip(self.indices.tolist(), self.committed.tolist(), texts, strict=True)
        ]
        more = f"; the first {SHOWN}" if len(self) > SHOWN else ""
        return table(self.caption + more, ["sample", "committed", "text"], rows[:SHOWN])

    def to_pandas(self) -> Any:
        """A data frame with one row for each sample; the sampler's parameters are columns of their own."""
        return import_extra("pandas", "notebook").json_normalize([sample.to_dict() for sample in self], sep=" ")

    def lines(self) -> str:
        """One line of JSON for each sample."""
        return "".join(json.dumps(sample.to_dict(), ensure_ascii=False) + "\n" for sample in self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one line of JSON for each sample; `limpet score` reads such a file too."""
        write_file(path, self.lines())

    @classmethod
    def load(cls, path: str | os.PathLike[str], sampler: Sampler | None = None) -> Samples:
        """Read what `save` or `limpet sample --out` wrote.

        sampler: needed where the samples were drawn by a sampler in a Python file, since loading runs no file."""
        try:
            lines = read_text(path, "name a file of samples").split("\n")  # a text may contain other line ends
            return _read_samples([json.loads(line) for line in lines if line], sampler)
        except (ValueError, TypeError, LookupError, RecursionError, RuntimeError) as error:
            reason = str(error) if isinstance(error, LimpetError) else repr(error)
            raise LimpetError(f"{path} does not hold the samples of one run ({reason})") from error


SAME = ("seed", "model", "digest", "precision", "tokenizer", "nfe", "sampler")  # equal in all samples of a run


def memory_like(memory: tuple[Tensor, ...], parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Parts as a tuple of the same class as a memory."""
    return tuple(parts) if type(memory) is tuple else type(memory)(*parts)


def _read_samples(rows: list[dict[str, Any]], sampler: Sampler | None) -> Samples:
    """Samples from the records of one run. The share of head rows is not in them, as it depends on the batch."""
    if not rows:
        raise LimpetError("it is empty")
    first = rows[0]
    for i, row in enumerate(rows):
        if any(row[name] != first[name] for name in SAME):
            raise LimpetError(f"line {i + 1} is of another run than line 1")
    if sampler is None:
        if ".py:" in (name := str(first["sampler"])):  # also as the predictor of another sampler
            raise LimpetError(f"they were drawn by {name}, a file that loading does not run: give sampler=")
        sampler = from_dict(first["sampler"])
    elif sampler.to_dict() != first["sampler"]:
        raise LimpetError(f"they were drawn by {first['sampler']}, not by {sampler}")
    texts = {tuple(row["tokens"]): str(row["text"]) for row in rows}
    texts |= {tuple(row["tokens"][: row["prompt_length"]]): str(row["prompt"]) for row in rows}
    tokens = torch.as_tensor(whole_numbers([row["tokens"] for row in rows], "a row of tokens")).long()
    fixed = torch.full_like(tokens, -1)
    for i, row in enumerate(rows):
        positions = [*range(row["prompt_length"]), *(position for position, _ in row["fixed"])]
        fixed[i, positions] = tokens[i, positions]
    return Samples(
        tokens=tokens,
        nfe=first["nfe"],
        head_rows=math.nan,
        committed=torch.tensor([row["committed"] for row in rows], dtype=torch.long),
        memory=(),
        sampler=sampler,
        seed=first["seed"],
        indices=torch.tensor([row["sample"] for row in rows], dtype=torch.long),
        fixed=fixed,
        model=first["model"],
        digest=first["digest"],
        precision=first["precision"],
        tokenizer=first["tokenizer"],
        _decode=None if first["text"] is None else lambda ids: texts[tuple(ids)],
    )


def split_text(decode: Callable[[list[int]], str], ids: list[int], length: int) -> tuple[str, str]:
    """The text of some ids, split where the first `length` of them end: the two parts are the whole. A character that
    needs ids of both sides belongs to the second part."""
    text, prompt = decode(ids), decode(ids[:length]) if length else ""
    end = len(prompt)
    if not text.startswith(prompt):
        end = next(i for i in range(end) if text[: i + 1] != prompt[: i + 1])
    return text[:end], text[end:]


# Sampling


def sample(
    model: Denoiser,
    sampler: Sampler | str | None = None,
    n: int = 8,
    seed: int = SEED,
    length: int | None = None,
    prompt: Prompt | None = None,
    fixed: Fixed | None = None,
    batch_size: int | None = None,
    progress: bool | Progress = False,
    *,
    nfe: int | None = None,
    sharpness: float | None = None,
    replay: tuple[Tensor, ...] | None = None,
    first: int = 0,
    backend: Backend | None = None,
) -> Samples:
    """Draw n samples of a model.

    model: what `limpet.load` returns. sampler: a Sampler or a text such as "crs nfe=16" (default: the one that
    `limpet.recommended` returns for nfe and sharpness). nfe: network calls for each sample, where the sampler does
    not set its own (default: 64). sharpness: from 0 (diverse) to 1 (sharp), in place of a sampler. seed: a sample
    depends on its seed and number alone, not on its batch, up to a network's rounding. length: tokens of a sample
    (default: the model's). prompt: text or ids that every sample begins with, or a list of n of them. fixed: tokens
    anywhere, as {position: token}, as {position: text or ids} from there on, or as a tensor (L,) or (n, L) with -1
    where a position is free; fixed tokens stay in state, model input and output. batch_size: samples in one batch
    (default: by device). progress: True for a bar, or a function of the calls done and their total. replay: the
    `memory` of other samples, to commit where and when they did. first: the number of the first sample under the
    seed. backend: how a step is computed (default: the fastest)."""
    check_model(model)
    chosen = choose_sampler(sampler, nfe, sharpness, model)
    _check_counts(n, seed, first, batch_size)
    tokens = fixed_tokens(model, n, model.length if length is None else length, prompt, fixed).to(model.device)
    for part in replay or ():
        if part.shape != tokens.shape:
            raise LimpetError(
                f"the replayed samples have shape {tuple(part.shape)}, these {tuple(tokens.shape)}: "
                "ask for as many samples of the same length"
            )
    size = batch_size or default_batch_size(model.device, tokens.shape[1])
    counting = CountingDenoiser(model)
    ends: list[Step] = []
    with progress_bar(progress) as report:
        for start in range(0, n, size):
            rows = slice(start, min(n, start + size))
            indices = torch.arange(first + rows.start, first + rows.stop, device=model.device)
            recorded = None if replay is None else tuple(part[rows].to(model.device) for part in replay)
            for step in rollout(counting, chosen, Inputs(tokens[rows], CounterRNG(seed, indices), recorded, backend)):
                report(start * chosen.nfe + (step.call + 1) * (rows.stop - start), n * chosen.nfe)
            ends.append(step)
    memory = [torch.cat(parts).cpu() for parts in zip(*(end.state.memory for end in ends), strict=True)]
    return Samples(
        tokens=torch.cat([end.tokens for end in ends]).cpu(),
        nfe=counting.calls // len(ends),
        head_rows=counting.rows / max(1, int((tokens < 0).sum()) * chosen.nfe),
        committed=torch.cat([end.committed.sum(-1) for end in ends]).cpu(),
        memory=memory_like(ends[0].state.memory, memory),
        sampler=chosen,
        seed=seed,
        indices=torch.arange(first, first + n),
        fixed=tokens.cpu(),
        _decode=None if model.tokenizer is None else model.tokenizer.decode,
        **_about(model),
    )


def steps(
    model: Denoiser,
    sampler: Sampler | str | None = None,
    n: int = 1,
    seed: int = SEED,
    length: int | None = None,
    prompt: Prompt | None = None,
    fixed: Fixed | None = None,
    *,
    nfe: int | None = None,
    sharpness: float | None = None,
    first: int = 0,
    backend: Backend | None = None,
    trace: bool = True,
) -> Iterator[Step]:
    """Sample one batch of n and yield a `Step` after every network call; arguments as in `sample`.

    trace: inspect every prediction and draw every noisy token, so that `Step.deficit` is known everywhere; False
    computes only what the sampler needs and is faster. Model inputs and output are the same."""
    check_model(model)
    chosen = choose_sampler(sampler, nfe, sharpness, model)
    _check_counts(n, seed, first, None)
    tokens = fixed_tokens(model, n, model.length if length is None else length, prompt, fixed).to(model.device)
    rng = CounterRNG(seed, torch.arange(first, first + n, device=model.device))
    return rollout(model, chosen, Inputs(tokens, rng, backend=backend, trace=trace))


def infill(
    model: Denoiser,
    left: str,
    right: str,
    gap: int = 16,
    sampler: Sampler | str | None = None,
    n: int = 8,
    seed: int = SEED,
    batch_size: int | None = None,
    progress: bool | Progress = False,
    *,
    nfe: int | None = None,
    sharpness: float | None = None,
) -> Samples:
    """Draw what stands between two texts.

    left, right: the texts before and after. gap: tokens between them. A sample is as long as all three together. Other
    arguments as in `sample`."""
    check_model(model)
    if not isinstance(gap, int | np.integer) or gap < 1:
        raise LimpetError(f"gap is {gap!r}; it takes a whole number of tokens from 1")
    if isinstance(model, Canvas) or model.prompt_layout is not None:
        raise LimpetError(f"{model.name} takes a prompt of its own form: give prompt= or fixed= to limpet.sample")
    before, after = (ids_of(model, text, "the text") if text else [] for text in (left, right))
    fixed = dict(enumerate(before)) | dict(enumerate(after, len(before) + gap))
    length = len(before) + gap + len(after)
    return sample(model, sampler, n, seed, length, None, fixed, batch_size, progress, nfe=nfe, sharpness=sharpness)


def _about(model: Denoiser) -> dict[str, Any]:
    return {
        "model": model.name,
        "digest": model.digest,
        "precision": model.precision,
        "tokenizer": tokenizer_digest(model.tokenizer),
    }


# Texts of several canvases


class Replies(NamedTuple):
    """Replies of one batch."""

    tokens: Tensor  # (B, canvases x L), padded after each end
    committed: Tensor  # (B,) positions committed in all canvases
    calls: int  # of the network
    rows: int  # of its head


def reply(
    model: Canvas,
    sampler: Sampler | str | None = None,
    n: int = 8,
    seed: int = SEED,
    length: int | None = None,
    prompt: Prompt = "",
    batch_size: int | None = None,
    progress: bool | Progress = False,
    *,
    nfe: int | None = None,
    sharpness: float | None = None,
    first: int = 0,
) -> Samples:
    """Draw n replies to a prompt, canvas by canvas.

    prompt: text, which goes through the model's chat template, or ids as they are. length: the most tokens of a reply,
    rounded up to whole canvases. A reply ends with its first end-of-text token and is padded after it. A sampler that
    finishes early saves the remaining calls of a batch once all its samples are finished. Other arguments as in
    `sample`. The first canvas is what `sample` draws of `model.after(prompt)`. `Samples.nfe` is of the longest
    reply."""
    chosen = choose_sampler(sampler, nfe, sharpness, model)
    _check_counts(n, seed, first, batch_size)
    canvases = -(-(model.length if length is None else length) // model.length)
    if canvases < 1:
        raise LimpetError(f"length is {length}; ask for at least one token")
    ids = model.prompt(prompt) if isinstance(prompt, str) else whole_numbers(prompt, "the prompt").ravel().tolist()
    text = torch.as_tensor(ids_of(model, ids, "the prompt")).long().reshape(1, -1)
    if not text.numel() and model.begin is not None:
        text = torch.tensor([[model.begin]])
    fixed_tokens(model, 1, text.shape[1], text, None)  # checks every id
    begun = model.after(text) if text.numel() else model
    size = min(n, batch_size or default_batch_size(model.device, model.length))
    with progress_bar(progress) as report, torch.inference_mode():
        parts = []
        for start in range(0, n, size):
            indices = torch.arange(first + start, first + min(n, start + size), device=model.device)
            done, total = start * chosen.nfe * canvases, n * chosen.nfe * canvases
            parts.append(
                replies(begun, chosen, CounterRNG(seed, indices), canvases, partial(_shifted, report, done, total))
            )
    longest = max(part.tokens.shape[1] for part in parts)
    padded = [torch.nn.functional.pad(one.tokens, (0, longest - one.tokens.shape[1]), value=model.pad) for one in parts]
    free = sum(one.calls * len(one.tokens) for one in parts) * model.length
    tokenizer = model.tokenizer
    return Samples(
        tokens=torch.cat(padded).cpu(),
        nfe=max(one.calls for one in parts),
        head_rows=sum(one.rows for one in parts) / max(1, free),
        committed=torch.cat([one.committed for one in parts]).cpu(),
        memory=(),
        sampler=chosen,
        seed=seed,
        indices=torch.arange(first, first + n),
        fixed=torch.full((n, longest), -1),
        _decode=None if tokenizer is None else lambda ids: tokenizer.decode([i for i in ids if i not in model.ends]),
        **{**_about(model), "digest": begun.digest},
    )


def _shifted(report: Progress, before: int, total: int, done: int) -> None:
    report(before + done, total)


def _ignore(tokens: Tensor) -> None:
    pass


def replies(
    model: Canvas,
    sampler: Sampler,
    randomness: CounterRNG,
    canvases: int,
    report: Callable[[int], None],
    on_canvas: Callable[[Tensor], None] = _ignore,
) -> Replies:
    """The replies of one batch. A sample that has ended leaves the batch, and its context leaves the cache.

    model: what `Canvas.after` returned for the prompt of all samples, or for the prompt of each. report: called after
    every network call, with the calls done for all samples. on_canvas: called after every canvas with all tokens so far
    (B, canvases x L)."""
    indices, size, width = randomness.samples, len(randomness.samples), model.length
    tokens = torch.full((size, canvases * width), model.pad, device=indices.device)
    committed, unfinished = torch.zeros_like(indices), torch.arange(size, device=indices.device)
    context, calls, rows, canvas = model, 0, 0, 0
    for canvas in range(canvases):
        counting = CountingDenoiser(context)
        rng = randomness.of(unfinished, canvas)
        free = torch.full((len(unfinished), width), -1, device=indices.device)
        for step in rollout(counting, sampler, Inputs(free, rng), until_finished=True):
            report((canvas * sampler.nfe + step.call + 1) * size)
        calls, rows = calls + counting.calls, rows + counting.rows
        committed[unfinished] += step.committed.sum(-1)
        padded, goes_on = pad_after_end(step.tokens, model.ends, model.pad)
        tokens[unfinished, canvas * width : (canvas + 1) * width] = padded
        on_canvas(tokens[:, : (canvas + 1) * width])
        if not goes_on.any():
            break
        if canvas < canvases - 1:
            context = context.after(step.tokens[goes_on], goes_on.nonzero()[:, 0])
            unfinished = unfinished[goes_on]
    return Replies(tokens[:, : (canvas + 1) * width], committed, calls, rows)


def pad_after_end(tokens: Tensor, ends: tuple[int, ...], pad: int) -> tuple[Tensor, Tensor]:
    """(B, L) a canvas with everything after its first end token padded, and (B,) bool: whether it has no end token."""
    is_end = torch.isin(tokens, torch.tensor(ends, dtype=torch.long, device=tokens.device))
    after = is_end.cumsum(-1) - is_end.long() > 0
    return tokens.masked_fill(after, pad), ~is_end.any(-1)


# What a caller may ask for


def _check_counts(n: int, seed: int, first: int, batch_size: int | None) -> None:
    """Raise unless there are such samples, and they can be computed in such batches."""
    numbers = {"n": n, "seed": seed, "first": first, "batch_size": 1 if batch_size is None else batch_size}
    for name, value in numbers.items():
        if not isinstance(value, int | np.integer):
            raise LimpetError(f"{name} is {value!r}; it takes a whole number")
    if n < 1:
        raise LimpetError(f"n is {n}; ask for at least one sample")
    if batch_size is not None and batch_size < 1:
        raise LimpetError(f"batch_size is {batch_size}; compute at least one sample at once, or leave it out")
    if not 0 <= seed < SEED_LIMIT or not 0 <= first <= SAMPLE_LIMIT - n:
        raise LimpetError(
            f"seed is {seed} and first {first}; they are whole numbers from 0, the seed of at most 64 bits"
        )


def default_batch_size(device: torch.device, length: int) -> int:
    """Samples in a batch: enough to keep the device busy, few enough to bound the memory of features."""
    return max(1, BATCH_TOKENS.get(device.type, ACCELERATOR_BATCH_TOKENS) // length)


def fixed_tokens(model: Denoiser, n: int, length: int, prompt: Prompt | None, fixed: Fixed | None) -> Tensor:
    """(n, L) fixed tokens, -1 where a position is free, from a prompt and fixed positions, checked."""
    if not isinstance(length, int | np.integer) or length < 1:
        raise LimpetError(f"length is {length!r}; it takes a whole number from 1")
    if length > model.length:
        warn(f"length is {length}, and {model.name} was trained on {model.length}: it has learnt nothing of the rest")
    tokens = torch.full((n, length), -1)
    if isinstance(fixed, Mapping):
        for position, token in fixed_ids(model, fixed.items(), length).items():
            tokens[:, position] = token
    elif fixed is not None:
        wanted = whole_numbers(fixed, "what is fixed")
        if wanted.shape not in {(length,), (n, length)}:
            raise LimpetError(f"fixed has shape {wanted.shape}; it takes ({length},) or ({n}, {length})")
        tokens[:] = torch.as_tensor(wanted)
    if prompt is not None:
        for rows, own in _prompts(prompt, n):
            ids = torch.tensor(prompt_tokens(model, own), dtype=torch.long)
            if len(ids) > length:
                which = "the prompt" if isinstance(rows, slice) else f"prompt {rows + 1} of {n}"
                raise LimpetError(f"{which} has {len(ids)} tokens, the sequence {length}: shorten it or raise length")
            begins = tokens[rows, : len(ids)]
            conflicts = ((begins >= 0) & (begins != ids)).nonzero()[:, -1:]
            if len(conflicts):
                raise LimpetError(
                    f"prompt and fixed give position {int(conflicts[0])} different tokens: leave it out of one"
                )
            tokens[rows, : len(ids)] = ids
    for token in tokens[(tokens < -1) | (tokens >= model.vocab_size)].tolist():
        _check_token(model, token)
    if model.prompt_layout is not None:
        _complete_prompts(model, model.prompt_layout, tokens)
    return tokens


def _complete_prompts(model: Denoiser, layout: PromptLayout, tokens: Tensor) -> None:
    """Fix what is free of each prompt to the empty one's tokens: the model was never trained on noise there."""
    if tokens.shape[1] != layout.length:
        raise LimpetError(
            f"length is {tokens.shape[1]}, and {model.name} knows rows of {layout.length} tokens: leave length out"
        )
    empty = torch.tensor(prompt_tokens(model, layout.empty))
    begins = tokens[:, : len(empty)]
    begins[:] = torch.where(begins < 0, empty, begins)


def _prompts(prompt: Prompt, n: int) -> Iterator[tuple[int | slice, Any]]:
    """Which samples begin with what: all with one prompt, or each with its own."""
    if isinstance(prompt, str):
        yield slice(None), prompt
        return
    shape = tuple(prompt.shape) if hasattr(prompt, "shape") else (len(prompt),) if isinstance(prompt, Sequence) else ()
    is_list = bool(shape and shape[0]) and (isinstance(prompt[0], str) or np.ndim(prompt[0]) > 0)
    if len(shape) not in (1, 2) or (is_list and shape[0] != n):
        raise LimpetError(f"prompt has shape {shape}; it takes (P,) for all samples or ({n}, P), or {n} texts")
    yield from enumerate(prompt) if is_list else [(slice(None), prompt)]


def fixed_ids(model: Denoiser, texts: Iterable[tuple[int, int | str | Ids]], length: int) -> dict[int, int]:
    """{position: token} of tokens, and of texts or ids that begin at a position."""
    fixed: dict[int, int] = {}
    for start, text in texts:
        if not isinstance(start, int | np.integer):
            raise LimpetError(f"fixed position {one_line(ascii(start), 40)} is no whole number")
        ids, shown = ids_of(model, text, "what is fixed"), one_line(ascii(text), 40)
        if not 0 <= start < length:
            raise LimpetError(f"fixed position {start} is outside a sequence of {length} tokens")
        if start + len(ids) > length:
            raise LimpetError(
                f"{shown} takes {len(ids)} tokens from position {start}, past the {length} of the sequence: "
                "shorten it or raise length"
            )
        for position, token in enumerate(ids, start):
            if position in fixed:
                raise LimpetError(f"position {position} is fixed twice: move {shown}")
            fixed[position] = token
    return fixed


def prompt_tokens(model: Denoiser, prompt: int | str | Ids | Tensor) -> list[int]:
    """A prompt as the model's own ids. A text is written in the model's prompt layout first, if it has one."""
    if isinstance(prompt, str) and model.prompt_layout is not None:
        prompt = model.prompt_layout.write(prompt)
    return ids_of(model, prompt, "the prompt")


def ids_of(model: Denoiser, tokens: int | str | Ids | Tensor, what: str) -> list[int]:
    """Text as the model's own ids, or one or more ids as they are, checked."""
    if isinstance(tokens, str):
        if model.tokenizer is None:
            raise LimpetError(f"{model.name} has no tokenizer: give {what} as token ids")
        return model.tokenizer.encode(tokens)
    numbers = np.atleast_1d(whole_numbers(tokens, what))
    if numbers.ndim > 1:
        raise LimpetError(f"{what} has shape {numbers.shape}; it takes (P,) ids")
    ids: list[int] = numbers.tolist()
    for token in ids:
        _check_token(model, token)
    return ids


def whole_numbers(ids: Any, what: str) -> np.ndarray[Any, Any]:
    """Ids as an array. Raises where one is not a whole number: a fraction would lose its digits."""
    try:
        numbers = np.asarray(ids.cpu() if isinstance(ids, Tensor) else ids)
    except (ValueError, TypeError, RuntimeError):  # of lists of several lengths, for example
        numbers = np.asarray(None)
    if numbers.size and numbers.dtype.kind not in "iu":
        raise LimpetError(f"{what} is {one_line(ascii(ids), 80)}; token ids are whole numbers of at most 64 bits")
    return numbers


def _check_token(model: Denoiser, token: int) -> None:
    if not 0 <= token < model.vocab_size:
        last = model.vocab_size - 1
        raise LimpetError(f"token {token} is outside the vocabulary of {model.vocab_size} (0 to {last})")


@contextmanager
def progress_bar(progress: bool | Progress) -> Iterator[Progress]:
    """A function that reports progress: the caller's, one that does nothing, or one that draws on standard error."""
    if callable(progress):
        yield progress
    elif not progress:
        yield lambda done, total: None
    else:
        from rich.console import Console
        from rich.progress import Progress as Bar

        console = Console(stderr=True)
        if console.is_jupyter or not console.is_terminal:
            yield partial(_print_line, console.is_jupyter)
            return
        with Bar(console=console, transient=True) as bar:
            task = bar.add_task("sampling", total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


def _print_line(every_call: bool, done: int, total: int) -> None:
    """Progress without a terminal: in a notebook a line that is overwritten; elsewhere only the last one."""
    if every_call or done == total:
        sys.stderr.write(f"\r{done:,} of {total:,} calls" + "\n" * (done == total))
        sys.stderr.flush()
