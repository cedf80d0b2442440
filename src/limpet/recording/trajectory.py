"""A trajectory: everything a viewer needs of one sample's path as frames, as bytes and as a file; it knows no sampler.

A path under N network calls has N + 1 frames. Frame r < N is what call r saw and thought; the last is the output.
A file is the gzip of one line of JSON (the header) and then the frames, each of the same number of bytes; a stream is
the same header and the same frames, one by one. `docs/view.md` describes every field."""

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

from limpet.diffusion.backends import Backend, Head, Input, Outcome, Transition, log_probs, sparse
from limpet.diffusion.rng import SEEDS, CounterRNG
from limpet.errors import LimpetError
from limpet.files import opened, write_whole
from limpet.generation import Fixed, Given, given_tokens
from limpet.models import Denoiser, Needed, Tokenizer, Wrapped
from limpet.samplers import CRS, Sampler
from limpet.samplers.context import Context, generate, open_context

FORMAT, VERSION = "limpet trajectory", 2
CANDIDATES = 4  # top tokens kept at every position of every frame
GIVEN = "given"  # the mark that every path has, its first; the others are the sampler's own
MOST_MARKS = 8  # bits of a byte
DEFICIT, MASS = 65535, 255  # what 1 is stored as
MAGIC = b"\x1f\x8b"  # gzip's
MOST_HEADER, MOST_BYTES = 2**23, 2**27  # what a file may unpack to
SPOILT = (EOFError, gzip.BadGzipFile, zlib.error, KeyError, TypeError, AttributeError, ValueError, RecursionError)
WHOLE = {  # what the numbers of a header may be
    "seed": (0, SEEDS - 1), "sample": (0, 2**63 - 1), "length": (1, 2**20), "vocab_size": (1, 2**32 - 1),
    "calls": (1, 2**16), "candidates": (1, 64),
}  # fmt: skip

Array = NDArray[Any]


class Frame(NamedTuple):
    """One call of the denoiser, or, in the last frame, the output."""

    t: float  # the time of the call; 0 in the last frame
    state: Array  # (L,) the noisy tokens before the call; in the last frame, the output
    input: Array  # (L,) what the denoiser saw; in the last frame, the output
    marks: Array  # (L,) bit i: the position has the header's mark i; in the last frame, as in the one before
    deficit: Array  # (L,) 1 - max distribution, in 65535ths; 0 in the last frame and where the token is given
    ids: Array  # (L, K) the tokens that the distribution puts first
    mass: Array  # (L, K) their probabilities, in 255ths

    @property
    def mean_deficit(self) -> float:
        """Over the positions that are not given."""
        free = (self.marks & 1) == 0
        return float(self.deficit[free].mean() / DEFICIT) if free.any() else 0.0


@dataclass(frozen=True)
class Header:
    """What is known of a path before its first frame."""

    arm: str
    model: str
    digest: str
    sampler: dict[str, Any]  # as its to_dict writes it; data to show, never code to load
    marks: list[str]  # what the bits of a frame's marks mean
    seed: int
    sample: int  # index under the seed
    length: int
    vocab_size: int
    calls: int
    candidates: int

    @property
    def frames(self) -> int:
        return self.calls + 1

    def about(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    def marked(self, frame: Frame, mark: str) -> NDArray[np.bool_]:
        """(L,) where a frame has a mark: nowhere, if the sampler knows no such mark."""
        bit = 1 << self.marks.index(mark) if mark in self.marks else 0
        return (frame.marks & bit) > 0

    @property
    def layout(self) -> np.dtype[np.void]:
        """A frame's arrays in the order of their bytes, without padding."""
        token = "<u2" if self.vocab_size <= 2**16 else "<u4"
        one, some = (self.length,), (self.length, self.candidates)
        return np.dtype([
            ("t", "<f8"), ("state", token, one), ("input", token, one), ("marks", "u1", one), ("deficit", "<u2", one),
            ("ids", token, some), ("mass", "u1", some),
        ])  # fmt: skip

    def pack(self, frame: Frame) -> bytes:
        return np.array(tuple(frame), self.layout).tobytes()

    def unpack(self, data: bytes) -> list[Frame]:
        return [Frame(*row) for row in np.frombuffer(data, self.layout)]


@dataclass(eq=False, repr=False)
class Trajectory:
    """A path as far as it has come, with the text of every token in it."""

    header: Header
    frames: list[Frame] = field(default_factory=list)
    words: dict[int, str] = field(default_factory=dict)
    text: str | None = None  # of the output
    scores: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        about = self.header
        return f"<Trajectory of {about.model} under {about.arm}: {len(self.frames)} of {about.frames} frames>"

    def _repr_html_(self) -> str:
        from limpet.recording.page import inline  # it is made of trajectories

        return inline(self)._repr_html_()

    def add(self, frame: Frame, tokenizer: Tokenizer | None) -> dict[int, str]:
        """Go on by a frame -> the words in it that no earlier one had."""
        tokens = np.unique(np.concatenate([frame.state, frame.input, frame.ids.ravel()])).tolist()
        new = {
            token: f"{token} " if tokenizer is None else tokenizer.decode([token])
            for token in tokens if token not in self.words
        }  # fmt: skip
        self.frames.append(frame)
        self.words |= new
        if len(self.frames) == self.header.frames and tokenizer is not None:
            self.text = tokenizer.decode(frame.state.tolist())
        return new

    def to_bytes(self) -> bytes:
        words = {str(token): self.words[token] for token in sorted(self.words)}
        about = {**self.header.about(), "text": self.text, "scores": self.scores, "words": words}
        line = json.dumps(about, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        return gzip.compress(line + b"\n" + b"".join(map(self.header.pack, self.frames)), mtime=0)

    @classmethod
    def from_bytes(cls, data: bytes, name: str = "the trajectory") -> Trajectory:
        """Read and check; whatever is not a whole trajectory of this version is refused in one sentence."""
        return _read(io.BytesIO(data), name)

    def save(self, path: str | os.PathLike[str]) -> None:
        write_whole(path, self.to_bytes())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trajectory:
        try:
            with opened(path) as file:
                return _read(file, os.fspath(path))
        except OSError as error:
            raise LimpetError(f"{path} cannot be read ({error.strerror or error}): check the path") from error


def _read(file: IO[bytes], name: str) -> Trajectory:
    foreign = LimpetError(f"{name} is not a limpet trajectory: make one with `limpet sample --record FILE`")
    damaged = LimpetError(f"{name} is damaged: record it again")
    if file.read(2) != MAGIC:
        raise foreign
    file.seek(0)
    line, about = b"", None
    try:
        with gzip.GzipFile(fileobj=file) as unpacked:
            line = unpacked.readline(MOST_HEADER)
            about = json.loads(line)
            if not isinstance(about, dict) or about.get("format") != FORMAT or "version" not in about:
                raise foreign
            if about["version"] != VERSION:
                raise LimpetError(
                    f"{name} is a trajectory of version {about['version']!r}, and this limpet reads version {VERSION}: "
                    "record it again, or view it with the limpet that wrote it"
                )
            path = _checked(about)
            size = path.header.frames * path.header.layout.itemsize
            body = unpacked.read(size + 1)  # one more, to notice what is too much
    except LimpetError:
        raise
    except SPOILT as error:
        strange = about is None and line and not line.startswith(b'{"format":"limpet')
        raise (foreign if strange else damaged) from error
    if len(body) != size:
        raise damaged
    path.frames = path.header.unpack(body)
    for frame in path.frames:
        tokens = max(frame.state.max(), frame.input.max(), frame.ids.max())
        if tokens >= path.header.vocab_size or frame.marks.max() >> len(path.header.marks) or not 0 <= frame.t <= 1:
            raise damaged
    return path


def _checked(about: dict[str, Any]) -> Trajectory:
    """A trajectory without its frames; ValueError unless all is of the kind it should be."""

    def plain(values: object) -> bool:
        """An object of texts, truths, numbers and nulls."""
        return isinstance(values, dict) and all(
            value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
            for value in values.values()
        )

    header = Header(**{one.name: about[one.name] for one in fields(Header)})
    words = {int(token): word for token, word in about["words"].items()}
    good = (
        all(isinstance(value, str) for value in (header.arm, header.model, header.digest, *words.values()))
        and all(type(about[name]) is int and low <= about[name] <= high for name, (low, high) in WHOLE.items())
        and header.frames * header.layout.itemsize <= MOST_BYTES
        and all(map(plain, (header.sampler, about["scores"])))
        and isinstance(about["text"], str | None)
        and _are_marks(header.marks)
    )
    if not good:
        raise ValueError(header)
    return Trajectory(header, [], words, about["text"], about["scores"])


def _are_marks(names: Any) -> bool:
    named = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return named and names[:1] == [GIVEN] and len(set(names)) == len(names) <= MOST_MARKS


# From a model to frames


class Shared(Wrapped):
    """A denoiser that does not compute the same call twice running: arms in step share every call in which they
    still agree, which is the whole warmup of a native and a CRS arm. Its features are the logits."""

    _call: tuple[float | Tensor, Tensor, Tensor | None, Tensor | None] | None = None
    _logits: Tensor

    def body(self, tokens: Tensor, t: float | Tensor) -> Tensor:
        return self.body_told(tokens, t, lambda: None, None)

    def body_at(self, tokens: Tensor, t: float | Tensor, needed: Needed) -> Tensor:
        return self.body(tokens, t)

    def body_told(self, tokens: Tensor, t: float | Tensor, needed: Needed, clean: Tensor | None) -> Tensor:
        return self.body_carried(tokens, t, clean, None)

    def body_carried(self, tokens: Tensor, t: float | Tensor, clean: Tensor | None, carried: Tensor | None) -> Tensor:
        before, inner = self._call, self.inner
        if before is None or t != before[0] or any(map(_other, (tokens, clean, carried), before[1:])):
            if inner.carries:
                body = inner.body_carried(tokens, t, clean, carried)
            else:
                body = inner.body(tokens, t) if clean is None else inner.body_told(tokens, t, lambda: None, clean)
            self._call, self._logits = (t, tokens, clean, carried), inner.head(body)
        return self._logits

    def head(self, features: Tensor) -> Tensor:
        return features


def _other(one: Tensor | None, two: Tensor | None) -> bool:
    """Whether two tensors, or none, differ."""
    return one is not two and (one is None or two is None or not one.equal(two))


def _noting(candidates: int, noted: list[tuple[Tensor, Tensor]]) -> Backend:
    """The lazy step, which also leaves each position's top tokens and their probabilities in `noted`."""

    def plan(transition: Transition, input: Input) -> sparse.Tossed:
        # A viewer looks everywhere, so every position is read, whether the step needs it or not.
        return sparse.plan(transition, input)._replace(rows=torch.ones_like(input.tokens).nonzero())

    def advance(head: Head, features: Tensor, plan: sparse.Tossed) -> Outcome:
        logits = head(features)  # of every position, once, for the step and for the viewer
        outcome = sparse.advance(lambda rows: rows, logits, plan)
        probs = log_probs(logits[0], plan.input.tokens[0], plan.input, plan.transition.temperature)
        values, ids = probs.topk(candidates, -1)
        noted.append((ids, (values - probs.logsumexp(-1, keepdim=True)).exp()))
        return outcome

    return Backend(plan, advance, sparse.BACKEND.select)


def follow(
    model: Denoiser,
    arms: Mapping[str, Sampler],
    seed: int = 8200,
    sample: int = 0,
    length: int | None = None,
    prefix: Given | None = None,
    fixed: Fixed | None = None,
) -> tuple[list[Trajectory], Iterator[list[dict[int, str] | None]]]:
    """One sample under each arm, on the same randomness, in step: the paths, and an iterator that makes them longer.

    Each of its items has the new words of every arm's new frame, None for an arm that has ended. The text is the one
    that `limpet.sample` gives for the same seed and sample."""
    given = given_tokens(model, 1, model.length if length is None else length, prefix, fixed).to(model.device)
    if not 0 <= seed < SEEDS or not 0 <= sample < 2**63:
        raise LimpetError(f"seed is {seed} and sample {sample}; they are whole numbers from 0")
    rng = CounterRNG(seed, torch.tensor([sample], device=model.device))
    shared, candidates = Shared(model), min(CANDIDATES, model.vocab_size)
    paths, walks = [], []
    for name, sampler in arms.items():
        noted: list[tuple[Tensor, Tensor]] = []
        path = open_context(shared, rng, given, _noting(candidates, noted), trace=True)
        frames = _frames(sampler, path, noted)
        marks, first = next(frames)  # the first call tells what the sampler marks
        sizes = given.shape[1], model.vocab_size, sampler.nfe, candidates
        paths.append(Trajectory(Header(name, model.name, model.digest, sampler.to_dict(), marks, seed, sample, *sizes)))
        walks.append(chain([first], (frame for _, frame in frames)))

    def walk() -> Iterator[list[dict[int, str] | None]]:
        for together in zip_longest(*walks):
            yield [
                None if frame is None else path.add(frame, model.tokenizer)
                for path, frame in zip(paths, together, strict=True)
            ]

    return paths, walk()


@torch.inference_mode()  # while a frame is made, not while it is looked at
def _frames(sampler: Sampler, path: Context, noted: list[tuple[Tensor, Tensor]]) -> Iterator[tuple[list[str], Frame]]:
    """Every frame of a path, with the names of its marks."""
    before, given, names = sampler.begin(path), ~path.free[0], None
    for after, info in generate(sampler, path, before):
        names = names or [GIVEN, *info.marks]
        if names != [GIVEN, *info.marks] or not _are_marks(names):
            raise LimpetError(
                f"{sampler.name} marks {', '.join(info.marks) or 'nothing'} in call {info.call}; a sampler has at most "
                f"{MOST_MARKS - 1} marks, none of them called {GIVEN}, and names the same ones in every call"
            )
        if not noted:
            raise LimpetError(
                f"{sampler.name} made call {info.call} without path.call: nothing is known of its distributions"
            )
        ids, mass = noted[0]  # of the call's first transition
        noted.clear()
        masks = [given, *(mask[0] for mask in info.marks.values())]
        marks = torch.stack([mask.long() << bit for bit, mask in enumerate(masks)]).sum(0)
        deficit = torch.where(given, 0.0, info.outcome.deficit[0]).clamp(0, 1)
        yield names, _frame(info.t, before.tokens, info.input, marks, deficit, ids, mass)
        if after.call == sampler.nfe:
            output = after.tokens[0][:, None].expand_as(ids)
            yield names, _frame(0.0, after.tokens, after.tokens, marks, deficit * 0, output, mass * 0)
        before = after


def _frame(t: float, state: Tensor, input: Tensor, marks: Tensor, deficit: Tensor, ids: Tensor, mass: Tensor) -> Frame:
    arrays = (state[0], input[0], marks, (deficit * DEFICIT).round(), ids, (mass * MASS).round())
    return Frame(t, *(array.long().cpu().numpy() for array in arrays))


def record(
    model: Denoiser,
    sampler: Sampler | None = None,
    seed: int = 8200,
    sample: int = 0,
    length: int | None = None,
    prefix: Given | None = None,
    fixed: Fixed | None = None,
    arm: str | None = None,
) -> Trajectory:
    """The path of one sample; its text is the one that `limpet.sample` gives for the same seed and sample."""
    sampler = CRS() if sampler is None else sampler
    (path,), walk = follow(model, {arm or sampler.caption: sampler}, seed, sample, length, prefix, fixed)
    for _ in walk:
        pass
    return path


def same_randomness(headers: list[Header]) -> bool:
    """Whether paths started from the same state and used the same uniforms."""
    return len({(h.digest, h.seed, h.sample, h.length) for h in headers}) == 1
