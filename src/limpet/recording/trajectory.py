"""Trajectories: the recorded steps of one sample as frames, as bytes and as a file, for any sampler.

A trajectory of N network calls has N + 1 frames. Frame r < N holds what call r was given and what it predicted; the
last frame is the output. A file is the gzip of one line of JSON (the header) and then the frames, each of the same
number of bytes; the server streams the same header and frames one by one. `docs/files.md` describes every field.

A recording holds no keys and values of a sampler with `refresh`: what goes on from a frame begins with a full call."""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import chain, zip_longest
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from limpet.diffusion.backends import Backend, Head, NetworkCall, Outcome, Transition, log_probs, sparse
from limpet.diffusion.rng import SEED_LIMIT, CounterRNG
from limpet.errors import LimpetError
from limpet.files import open_regular, write_file
from limpet.generation import SEED, Fixed, Inputs, Prompt, context_of, first_state, fixed_tokens, rollout
from limpet.models import Denoiser, ModelInput, Tokenizer, WrappedDenoiser, all_rows
from limpet.recording import drawings
from limpet.samplers import Sampler, choose_sampler

FORMAT, VERSION = "limpet trajectory", 3
CANDIDATES = 4  # most probable tokens that are kept of every position and call
FIXED = "fixed"  # the first mask of every trajectory; the others are the sampler's own
MAX_MASKS = 8  # bits of a byte
DEFICIT, PROB = 65535, 255  # the integers that stand for 1
MAX_HEADER, MAX_BYTES = 2**23, 2**27  # of an unpacked file
SPOILT = (EOFError, gzip.BadGzipFile, zlib.error, KeyError, TypeError, AttributeError, ValueError, RecursionError)
RANGES = {  # of the numbers in a header
    "seed": (0, SEED_LIMIT - 1), "sample": (0, 2**63 - 1), "length": (1, 2**20), "vocab_size": (1, 2**32 - 1),
    "calls": (1, 2**16), "candidates": (1, 64),
}  # fmt: skip

Array = NDArray[Any]


class Frame(NamedTuple):
    """One network call, or, as the last frame, the output."""

    t: float  # the time of the call; 0 in the last frame
    tokens: Array  # (L,) the noisy tokens before the call; in the last frame, the output
    model_input: Array  # (L,) what the network was given; in the last frame, the output
    masks: Array  # (L,) bit i: the header's mask i; in the last frame, as in the one before
    deficit: Array  # (L,) 1 - max prob, in 65535ths; 0 in the last frame and where the token is fixed
    top_tokens: Array  # (L, K) the most probable tokens
    top_probs: Array  # (L, K) their probabilities, in 255ths

    @property
    def mean_deficit(self) -> float:
        """The mean over the positions that are not fixed."""
        free = (self.masks & 1) == 0
        return float(self.deficit[free].mean() / DEFICIT) if free.any() else 0.0


@dataclass(frozen=True)
class Header:
    """What is known of a trajectory before its first frame."""

    name: str  # of the configured sampler, such as "crs budget=0.25"
    model: str
    digest: str
    sampler: dict[str, Any]  # as its to_dict writes it; only shown, never loaded
    masks: list[str]  # what the bits of a frame's masks mean
    seed: int
    sample: int  # index under the seed
    length: int
    vocab_size: int
    calls: int
    candidates: int
    layout: str | None = None  # of the model's rows, by which viewers draw them; None for plain text

    @property
    def frames(self) -> int:
        return self.calls + 1

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    def mask(self, frame: Frame, name: str) -> NDArray[np.bool_]:
        """(L,) where a frame has a mask; nowhere if the sampler has no such mask."""
        bit = 1 << self.masks.index(name) if name in self.masks else 0
        return (frame.masks & bit) > 0

    @property
    def frame_dtype(self) -> np.dtype[np.void]:
        """A frame's arrays in the order of their bytes, without padding."""
        token = "<u2" if self.vocab_size <= 2**16 else "<u4"
        one, several = (self.length,), (self.length, self.candidates)
        return np.dtype([
            ("t", "<f8"), ("tokens", token, one), ("model_input", token, one), ("masks", "u1", one),
            ("deficit", "<u2", one), ("top_tokens", token, several), ("top_probs", "u1", several),
        ])  # fmt: skip

    def pack(self, frame: Frame) -> bytes:
        return np.array(tuple(frame), self.frame_dtype).tobytes()

    def unpack(self, data: bytes) -> list[Frame]:
        return [Frame(*row) for row in np.frombuffer(data, self.frame_dtype)]


@dataclass(eq=False, repr=False)
class Trajectory:
    """The frames so far, with the text of every token in them."""

    header: Header
    frames: list[Frame] = field(default_factory=list)
    token_texts: dict[int, str] = field(default_factory=dict)
    text: str | None = None  # of the output
    scores: dict[str, Any] = field(default_factory=dict)
    drawing: str | None = None  # of the output, as an image in a data URI, where the model's checker has one

    def __repr__(self) -> str:
        header = self.header
        return f"<Trajectory of {header.model} under {header.name}: {len(self.frames)} of {header.frames} frames>"

    def _repr_html_(self) -> str:
        from limpet.recording.page import inline  # that module imports this one

        return inline(self)._repr_html_()

    def add(self, frame: Frame, tokenizer: Tokenizer | None) -> dict[int, str]:
        """Append a frame. Returns the texts of the tokens that no earlier frame had."""
        tokens = np.unique(np.concatenate([frame.tokens, frame.model_input, frame.top_tokens.ravel()])).tolist()
        new = {
            token: f"{token} " if tokenizer is None else tokenizer.decode([token])
            for token in tokens if token not in self.token_texts
        }  # fmt: skip
        self.frames.append(frame)
        self.token_texts |= new
        if len(self.frames) == self.header.frames and tokenizer is not None:
            self.text = tokenizer.decode(frame.tokens.tolist())
        return new

    def to_bytes(self) -> bytes:
        """The content of a file."""
        texts = {str(token): self.token_texts[token] for token in sorted(self.token_texts)}
        values = {**self.header.to_dict(), "text": self.text, "scores": self.scores, "token_texts": texts}
        values |= {} if self.drawing is None else {"drawing": self.drawing}
        line = json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        return gzip.compress(line + b"\n" + b"".join(map(self.header.pack, self.frames)), mtime=0)

    @classmethod
    def from_bytes(cls, data: bytes, name: str = "the trajectory") -> Trajectory:
        """Read and check the content of a file. name: what errors call it."""
        return _read(io.BytesIO(data), name)

    def save(self, path: str | os.PathLike[str]) -> None:
        write_file(path, self.to_bytes())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trajectory:
        try:
            with open_regular(path) as file:
                return _read(file, os.fspath(path))
        except OSError as error:
            raise LimpetError(f"{path} cannot be read ({error.strerror or error}): check the path") from error


def _read(file: IO[bytes], name: str) -> Trajectory:
    damaged = LimpetError(
        f"{name} is damaged or not a limpet trajectory: record it again with `limpet sample --record FILE`"
    )
    try:
        with gzip.GzipFile(fileobj=file) as unpacked:
            values = json.loads(unpacked.readline(MAX_HEADER))
            if values["format"] != FORMAT:
                raise damaged
            if values["version"] != VERSION:
                raise LimpetError(
                    f"{name} is a trajectory of version {values['version']!r}; this limpet reads version {VERSION}: "
                    "record it again, or view it with the limpet that wrote it"
                )
            trajectory = _without_frames(values)
            size = trajectory.header.frames * trajectory.header.frame_dtype.itemsize
            data = unpacked.read(size + 1)  # one byte more, to notice a file that is too long
    except LimpetError:  # which is a ValueError
        raise
    except SPOILT as error:
        raise damaged from error
    if len(data) != size:
        raise damaged
    trajectory.frames = trajectory.header.unpack(data)
    for frame in trajectory.frames:
        largest = max(frame.tokens.max(), frame.model_input.max(), frame.top_tokens.max())
        has_unknown_mask = frame.masks.max() >> len(trajectory.header.masks)
        if largest >= trajectory.header.vocab_size or has_unknown_mask or not 0 <= frame.t <= 1:
            raise damaged
    return trajectory


def _without_frames(values: dict[str, Any]) -> Trajectory:
    """The trajectory of a header line; ValueError unless every value is of the right kind and in its range."""
    header = Header(**{one.name: values[one.name] for one in fields(Header) if one.name in values})
    texts = {int(token): text for token, text in values["token_texts"].items()}
    good = (
        all(isinstance(value, str) for value in (header.name, header.model, header.digest, *texts.values()))
        and all(type(values[name]) is int and low <= values[name] <= high for name, (low, high) in RANGES.items())
        and header.frames * header.frame_dtype.itemsize <= MAX_BYTES
        and all(map(_is_flat, (header.sampler, values["scores"])))
        and isinstance(values["text"], str | None)
        and isinstance(header.layout, str | None)
        and _is_drawing(values.get("drawing"))
        and _are_masks(header.masks)
    )
    if not good:
        raise ValueError(header)
    return Trajectory(header, [], texts, values["text"], values["scores"], values.get("drawing"))


def _is_drawing(value: object) -> bool:
    return value is None or (isinstance(value, str) and value.startswith(drawings.PREFIX))


def _is_flat(values: object) -> bool:
    """Whether it is an object of texts, booleans, finite numbers and nulls."""
    return isinstance(values, dict) and all(
        value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
        for value in values.values()
    )


def _are_masks(names: Any) -> bool:
    are_texts = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return are_texts and names[:1] == [FIXED] and len(set(names)) == len(names) <= MAX_MASKS


# Recording


class CallCache(WrappedDenoiser):
    """A denoiser that does not repeat a network call that it has just made, unless that kept keys and values. Its
    features are the logits.

    Samplers that are recorded together share every call in which they still agree, such as the warmup of native
    sampling and of CRS."""

    _inputs: ModelInput | None = None
    _logits: Tensor

    def backbone(self, inputs: ModelInput) -> Tensor:
        if inputs.cache is not None:
            return self.inner.head(self.inner.backbone(inputs))
        if self._inputs is None or not _are_equal(inputs, self._inputs):
            self._inputs = inputs
            self._logits = self.inner.head(self.inner.backbone(inputs._replace(rows=all_rows)))
        return self._logits

    def head(self, features: Tensor) -> Tensor:
        return features


def _are_equal(one: ModelInput, two: ModelInput) -> bool:
    pairs = ((one.tokens, two.tokens), (one.clean, two.clean), (one.previous, two.previous))
    return bool(one.t == two.t) and all(
        a is b or (a is not None and b is not None and a.equal(b)) for a, b in pairs
    )  # fmt: skip


class TracedPlan(NamedTuple):
    """A plan of the sparse backend, for a model that computes all positions that it can, as a viewer shows them all."""

    inner: Any
    transition: Transition
    call: NetworkCall

    def needed(self) -> Tensor | None:
        return self.inner.needed()  # type: ignore[no-any-return]


def _tracing_backend(candidates: int, found: list[tuple[Tensor, Tensor]]) -> Backend:
    """The sparse backend; it also appends each position's most probable tokens and their probabilities to `found`."""

    def plan(transition: Transition, call: NetworkCall) -> TracedPlan:
        return TracedPlan(sparse.BACKEND.plan(transition, call), transition, call)

    def advance(head: Head, features: Tensor, plan: TracedPlan) -> Outcome:
        logits = head(features)
        outcome = sparse.BACKEND.advance(lambda rows: rows, logits, plan.inner)
        every = torch.ones_like(plan.call.tokens).nonzero()
        scores = log_probs(logits[0], every, plan.call, plan.transition.temperature)
        values, top_tokens = scores.topk(candidates, -1)
        found.append((top_tokens, (values - scores.logsumexp(-1, keepdim=True)).exp()))
        return outcome

    return Backend(plan, advance, sparse.BACKEND.select)


def follow(
    model: Denoiser,
    samplers: Mapping[str, Sampler],
    seed: int = SEED,
    sample: int = 0,
    length: int | None = None,
    prompt: Prompt | None = None,
    fixed: Fixed | None = None,
) -> tuple[list[Trajectory], Iterator[list[dict[int, str] | None]]]:
    """Record one sample under each of several samplers, on the same randomness, call by call.

    samplers: by name. sample: index under the seed; the text is the one that `limpet.sample` returns for this seed and
    index. length, prompt, fixed: as in `limpet.sample`. Returns the trajectories, and an iterator that adds one frame
    to each; it yields, for each trajectory, the texts of tokens that are new, or None if the trajectory has ended."""
    tokens = fixed_tokens(model, 1, model.length if length is None else length, prompt, fixed).to(model.device)
    if not 0 <= seed < SEED_LIMIT or not 0 <= sample < 2**63:
        raise LimpetError(f"seed is {seed} and sample {sample}; they are whole numbers from 0")
    rng = CounterRNG(seed, torch.tensor([sample], device=model.device))
    cache, candidates = CallCache(model), min(CANDIDATES, model.vocab_size)
    layout = None if model.prompt_layout is None else model.prompt_layout.name
    trajectories, recordings = [], []
    for name, sampler in samplers.items():
        found: list[tuple[Tensor, Tensor]] = []
        inputs = Inputs(tokens, rng, backend=_tracing_backend(candidates, found), trace=True)
        recording = _frames(cache, sampler, inputs, found)
        masks, first = next(recording)  # the first call says which masks the sampler has
        sizes = tokens.shape[1], model.vocab_size, sampler.nfe, candidates
        header = Header(name, model.name, model.digest, sampler.to_dict(), masks, seed, sample, *sizes, layout)
        trajectories.append(Trajectory(header))
        recordings.append(chain([first], (frame for _, frame in recording)))

    def add_frames() -> Iterator[list[dict[int, str] | None]]:
        for frames in zip_longest(*recordings):
            texts = [
                None if frame is None else trajectory.add(frame, model.tokenizer)
                for trajectory, frame in zip(trajectories, frames, strict=True)
            ]
            for trajectory in trajectories:
                if trajectory.text is not None and trajectory.drawing is None:
                    trajectory.drawing = drawings.draw(model.checker, trajectory.text)
            yield texts

    return trajectories, add_frames()


def _frames(
    model: Denoiser, sampler: Sampler, inputs: Inputs, found: list[tuple[Tensor, Tensor]]
) -> Iterator[tuple[list[str], Frame]]:
    """Every frame of a trajectory, with the names of its masks."""
    with torch.inference_mode():
        state = first_state(sampler, context_of(model, inputs), inputs)
    before, is_fixed = state.tokens, inputs.fixed[0] >= 0
    names: list[str] = []
    for step in rollout(model, sampler, inputs, state):
        names = names or [FIXED, *step.masks]
        if names != [FIXED, *step.masks] or not _are_masks(names):
            raise LimpetError(
                f"{sampler.name} has the masks {', '.join(step.masks) or 'none'} in call {step.call}; a sampler has at "
                f"most {MAX_MASKS - 1} masks, none of them called {FIXED}, and the same ones in every call"
            )
        if not found:
            raise LimpetError(f"{sampler.name} made call {step.call} without ctx.call: its predictions are unknown")
        top_tokens, top_probs = found[0]  # of the call's first transition
        found.clear()
        masks = [is_fixed, *(mask[0] for mask in step.masks.values())]
        bits = torch.stack([mask.long() << bit for bit, mask in enumerate(masks)]).sum(0)
        deficit = torch.where(is_fixed, 0.0, step.deficit[0]).clamp(0, 1)
        yield names, _frame(step.t, before, step.model_input, bits, deficit, top_tokens, top_probs)
        before = step.tokens
    output = before[0][:, None].expand_as(top_tokens)
    yield names, _frame(0.0, before, before, bits, deficit * 0, output, top_probs * 0)


def _frame(
    t: float, tokens: Tensor, model_input: Tensor, masks: Tensor, deficit: Tensor, top_tokens: Tensor, top_probs: Tensor
) -> Frame:
    arrays = (tokens[0], model_input[0], masks, (deficit * DEFICIT).round(), top_tokens, (top_probs * PROB).round())
    return Frame(t, *(array.long().cpu().numpy() for array in arrays))


def record(
    model: Denoiser,
    sampler: Sampler | str | None = None,
    seed: int = SEED,
    sample: int = 0,
    length: int | None = None,
    prompt: Prompt | None = None,
    fixed: Fixed | None = None,
    name: str | None = None,
) -> Trajectory:
    """The trajectory of one sample; its text is the one that `limpet.sample` returns for the same seed and index, up to
    a network's rounding in another batch.

    sampler: an instance or a text such as "crs nfe=16" (default: the recommended one). sample: index under the seed.
    length, prompt, fixed: as in `limpet.sample`. name: what viewers call the trajectory (default: the sampler's
    caption)."""
    chosen = choose_sampler(sampler, model=model)
    (trajectory,), frames = follow(model, {name or chosen.caption: chosen}, seed, sample, length, prompt, fixed)
    for _ in frames:
        pass
    return trajectory


def share_randomness(headers: list[Header]) -> bool:
    """Whether trajectories started from the same tokens and used the same random numbers."""
    return len({(h.digest, h.seed, h.sample, h.length) for h in headers}) == 1
