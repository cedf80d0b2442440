"""A trajectory: everything a viewer needs of one sample's path, as frames, as bytes, and as a file.

A path under N network calls has N + 1 frames. Frame r < N is what call r saw and thought; the last is the output.
A file is the gzip of one line of JSON (the header) and then the frames, each of the same number of bytes; a stream is
the same header and the same frames, one by one. `docs/view.md` describes every field."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from limpet import sampler
from limpet.denoisers import Denoiser, Tokenizer
from limpet.errors import LimpetError
from limpet.policy import Policy
from limpet.sampler import NEVER
from limpet.samples import Given, given_tokens, prepare
from limpet.steps import Backend, Head, Outcome, Transition, lazy, log_law
from limpet.streams import Stream

FORMAT, VERSION = "limpet trajectory", 1
SUFFIX = ".limpet"
CANDIDATES = 4  # top tokens kept at every position of every frame
SELECTED, VISIBLE, GIVEN = 1, 2, 4  # bits of a mark
DEFICIT, MASS = 65535, 255  # what 1 is stored as
MAGIC = b"\x1f\x8b"  # gzip's
MOST_HEADER, MOST_BYTES = 2**25, 2**30  # what a file may unpack to

Array = NDArray[np.integer[Any]]


class Frame(NamedTuple):
    """One call of the denoiser, or, in the last frame, the output."""

    state: Array  # (L,) the noisy tokens before the step; in the last frame, the output
    label: Array  # (L,) the stored label, 0 where there is none
    marks: Array  # (L,) SELECTED | VISIBLE | GIVEN
    deficit: Array  # (L,) 1 - max law, in 65535ths; 0 in the last frame and where the token is given
    ids: Array  # (L, K) the tokens that the law puts first
    mass: Array  # (L, K) their probabilities, in 255ths

    @property
    def input(self) -> Array:
        """(L,) what the denoiser saw: the state with the visible labels written over it."""
        return np.where(self.marks & VISIBLE, self.label, self.state)

    @property
    def selected(self) -> int:
        return int(np.count_nonzero(self.marks & SELECTED))

    @property
    def mean_deficit(self) -> float:
        """Over the positions that are not given."""
        free = (self.marks & GIVEN) == 0
        return float(self.deficit[free].mean() / DEFICIT) if free.any() else 0.0


@dataclass(frozen=True)
class Header:
    """What is known of a path before its first step."""

    arm: str
    model: str
    digest: str
    policy: dict[str, Any]
    seed: int
    sample: int  # index under the seed
    length: int
    vocab_size: int
    times: list[float]  # of every call, the readout's last
    candidates: int

    @property
    def frames(self) -> int:
        return len(self.times) + 1

    def layout(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Name, type and shape of a frame's arrays, in the order of their bytes."""
        token = "<u2" if self.vocab_size <= 2**16 else "<u4"
        one, some = (self.length,), (self.length, self.candidates)
        return [
            ("state", token, one), ("label", token, one), ("marks", "<u1", one), ("deficit", "<u2", one),
            ("ids", token, some), ("mass", "<u1", some),
        ]  # fmt: skip

    @property
    def frame_bytes(self) -> int:
        return sum(np.dtype(kind).itemsize * int(np.prod(shape)) for _, kind, shape in self.layout())

    def pack(self, frame: Frame) -> bytes:
        return b"".join(getattr(frame, name).astype(kind).tobytes() for name, kind, _ in self.layout())

    def unpack(self, data: bytes) -> Frame:
        arrays, start = {}, 0
        for name, kind, shape in self.layout():
            count = int(np.prod(shape))
            arrays[name] = np.frombuffer(data, kind, count, start).reshape(shape)
            start += count * np.dtype(kind).itemsize
        return Frame(**arrays)


@dataclass(frozen=True, eq=False)
class Trajectory:
    """A whole path, with the text of every token in it."""

    header: Header
    frames: list[Frame]
    words: dict[int, str]
    text: str | None = None  # of the output
    scores: dict[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        about = {
            "format": FORMAT, "version": VERSION, **asdict(self.header), "text": self.text, "scores": self.scores,
            "words": {str(token): self.words[token] for token in sorted(self.words)},
        }  # fmt: skip
        line = json.dumps(about, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        return gzip.compress(line + b"\n" + b"".join(map(self.header.pack, self.frames)), mtime=0)

    @classmethod
    def from_bytes(cls, data: bytes, name: str = "the trajectory") -> Trajectory:
        """Read and check; whatever is not a whole trajectory of this version is refused in one sentence."""
        import io

        return _read(io.BytesIO(data), name)

    def save(self, path: str | os.PathLike[str]) -> None:
        path = Path(path)
        partial = path.with_name(path.name + ".partial")
        try:
            partial.write_bytes(self.to_bytes())
            partial.replace(path)
        except OSError as error:
            raise LimpetError(f"{path} cannot be written ({error.strerror}): name another file") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trajectory:
        try:
            with open(path, "rb") as file:
                return _read(file, os.fspath(path))
        except OSError as error:
            raise LimpetError(f"{path} cannot be read ({error.strerror or error}): check the path") from error


def _read(file: IO[bytes], name: str) -> Trajectory:
    foreign = f"{name} is not a limpet trajectory: make one with `limpet sample --record FILE`"
    damaged = f"{name} is damaged: record it again"
    if file.read(2) != MAGIC:
        raise LimpetError(foreign)
    file.seek(0)
    try:
        with gzip.GzipFile(fileobj=file) as unpacked:
            line = unpacked.readline(MOST_HEADER)
            about = _header_line(line, foreign, damaged)
            if about["version"] != VERSION:
                raise LimpetError(
                    f"{name} is a trajectory of version {about['version']!r}, and this limpet reads version {VERSION}: "
                    "record it again, or view it with the limpet that wrote it"
                )
            header, words, text, scores = _checked(about, damaged)
            body = unpacked.read(header.frames * header.frame_bytes + 1)  # one more, to notice what is too much
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise LimpetError(damaged) from error
    size = header.frame_bytes
    if len(body) != header.frames * size:
        raise LimpetError(damaged)
    frames = [header.unpack(body[i : i + size]) for i in range(0, len(body), size)]
    for frame in frames:
        if max(frame.state.max(), frame.label.max(), frame.ids.max()) >= header.vocab_size:
            raise LimpetError(damaged)
    return Trajectory(header, frames, words, text, scores)


def _header_line(line: bytes, foreign: str, damaged: str) -> dict[str, Any]:
    try:
        about = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LimpetError(damaged if line.startswith(b'{"format":"limpet') else foreign) from error
    if not isinstance(about, dict) or about.get("format") != FORMAT or "version" not in about:
        raise LimpetError(foreign)
    return about


def _checked(about: dict[str, Any], damaged: str) -> tuple[Header, dict[int, str], str | None, dict[str, Any]]:
    """The header's parts, every one of the kind it should be."""

    def whole(value: object, low: int, high: int) -> bool:
        return type(value) is int and low <= value <= high

    try:
        header = Header(**{field.name: about[field.name] for field in fields(Header)})
        words = {int(token): word for token, word in about["words"].items()}
        text, scores = about["text"], about["scores"]
        good = (
            all(isinstance(value, str) for value in (header.arm, header.model, header.digest, *words.values()))
            and whole(header.seed, 0, 2**64 - 1)
            and whole(header.sample, 0, 2**63 - 1)
            and whole(header.length, 1, 2**20)
            and whole(header.vocab_size, 1, 2**32 - 1)
            and whole(header.candidates, 1, 64)
            and isinstance(header.times, list)
            and 2 <= len(header.times) <= 2**16
            and all(isinstance(t, float | int) and 0 <= t <= 1 for t in header.times)
            and header.frames * header.frame_bytes <= MOST_BYTES
            and (text is None or isinstance(text, str))
            and isinstance(scores, dict)
        )
        Policy.from_dict(header.policy)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise LimpetError(damaged) from error
    if not good:
        raise LimpetError(damaged)
    return header, words, text, scores


# From a model to frames


class Shared(Denoiser):
    """A denoiser that does not compute the same call twice running: arms in step share every call in which they
    still agree, which is the whole warmup of a native and a CRS arm."""

    def __init__(self, inner: Denoiser) -> None:
        self.inner = inner
        self.vocab_size, self.predicts, self.schedule = inner.vocab_size, inner.predicts, inner.schedule
        self._call: tuple[Tensor, float | Tensor] | None = None
        self._features: Tensor | None = None
        self._logits: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.inner.device

    def body(self, tokens: Tensor, t: float | Tensor) -> Tensor:
        if self._features is None or self._call is None or t != self._call[1] or not tokens.equal(self._call[0]):
            self._call, self._features, self._logits = (tokens, t), self.inner.body(tokens, t), None
        return self._features

    def head(self, features: Tensor) -> Tensor:
        if features is not self._features:
            return self.inner.head(features)
        if self._logits is None:
            self._logits = self.inner.head(features)
        return self._logits


def _noting(candidates: int, noted: list[tuple[Tensor, Tensor]]) -> Backend:
    """The lazy step, which also leaves each position's top tokens and their probabilities in `noted`."""

    def advance(head: Head, features: Tensor, transition: Transition) -> Outcome:
        logits = head(features)  # of every position, once, for the step and for the viewer
        sample, position = torch.ones_like(transition.inspect).nonzero(as_tuple=True)
        law = log_law(logits[sample, position], transition, sample, position)
        values, ids = law.topk(candidates, -1)
        noted.append((ids, (values - law.logsumexp(-1, keepdim=True)).exp()))
        return lazy.advance(_same, logits, transition)

    return advance


def _same(logits: Tensor) -> Tensor:
    return logits


def follow(
    model: Denoiser,
    arms: Mapping[str, Policy],
    seed: int = 8200,
    sample: int = 0,
    length: int | None = None,
    prefix: Given | None = None,
    fixed: Mapping[int, int] | Tensor | None = None,
) -> tuple[list[Header], Iterator[tuple[Frame | None, ...]]]:
    """One sample under each arm, on the same randomness, in step: the headers, and an iterator over the frames.

    Each item has a frame for every arm, None for an arm that has ended. The text is the one that `limpet.sample`
    gives for the same seed and sample."""
    given = given_tokens(model, 1, length or model.length, prefix, fixed).to(model.device)
    if not 0 <= seed < 2**64 or not 0 <= sample < 2**63:
        raise LimpetError(f"seed is {seed} and sample {sample}; they are whole numbers from 0")
    stream = Stream(seed, torch.tensor([sample], device=model.device))
    shared, candidates = Shared(model), min(CANDIDATES, model.vocab_size)
    headers, paths = [], []
    for name, policy in arms.items():
        noted: list[tuple[Tensor, Tensor]] = []
        run = prepare(shared, policy, stream, given, advance=_noting(candidates, noted), trace=True)
        headers.append(
            Header(
                arm=name,
                model=model.name,
                digest=model.digest,
                policy=policy.to_dict(),
                seed=seed,
                sample=sample,
                length=given.shape[1],
                vocab_size=model.vocab_size,
                times=run.times,
                candidates=candidates,
            )
        )
        paths.append(_frames(run, noted))
    return headers, zip_longest(*paths)


def _frames(run: sampler.Run, noted: list[tuple[Tensor, Tensor]]) -> Iterator[Frame]:
    given = ~run.free[0]
    with torch.inference_mode():
        before = sampler.begin(run)
    path = sampler.generate(run, before)
    while True:
        with torch.inference_mode():  # of this thread, and not while the frame is looked at
            after, info = next(path, (None, None))
            if after is None or info is None:
                return
            ids, mass = noted.pop()
            deficit = torch.where(given, 0.0, info.deficit[0]).clamp(0, 1)
            frames = [_frame(before, info.visible[0], given, deficit, ids, mass)]
            if after.step == run.policy.nfe:
                output = after.tokens[0][:, None].expand_as(ids)
                frames.append(_frame(after, info.visible[0], given, deficit * 0, output, mass * 0))
        yield from frames
        before = after


def _frame(state: sampler.State, visible: Tensor, given: Tensor, deficit: Tensor, ids: Tensor, mass: Tensor) -> Frame:
    selected = state.selected_at[0] != NEVER
    marks = selected * SELECTED + visible * VISIBLE + given * GIVEN
    arrays = (
        state.tokens[0], state.labels[0] * selected, marks, (deficit * DEFICIT).round(), ids, (mass * MASS).round(),
    )  # fmt: skip
    return Frame(*(array.long().cpu().numpy() for array in arrays))


class Words:
    """The text of tokens, each told once: what a stream sends beside the frames, and what a file keeps."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.told: dict[int, str] = {}

    def of(self, frame: Frame) -> dict[int, str]:
        """The words of this frame that no earlier one had."""
        tokens = np.unique(np.concatenate([frame.state, frame.label, frame.ids.ravel()]))
        new = {int(token): self._word(int(token)) for token in tokens if int(token) not in self.told}
        self.told |= new
        return new

    def text(self, tokens: Array) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.decode([int(token) for token in tokens])

    def _word(self, token: int) -> str:
        return f"{token} " if self.tokenizer is None else self.tokenizer.decode([token])


def record(
    model: Denoiser,
    policy: Policy | None = None,
    seed: int = 8200,
    sample: int = 0,
    length: int | None = None,
    prefix: Given | None = None,
    fixed: Mapping[int, int] | Tensor | None = None,
    arm: str | None = None,
) -> Trajectory:
    """The path of one sample; its text is the one that `limpet.sample` gives for the same seed and sample."""
    policy = Policy() if policy is None else policy
    (header,), path = follow(model, {arm or name_of(policy): policy}, seed, sample, length, prefix, fixed)
    frames = [frame for (frame,) in path if frame is not None]
    words = Words(model.tokenizer)
    for frame in frames:
        words.of(frame)
    return Trajectory(header, frames, words.told, words.text(frames[-1].state))


def name_of(policy: Policy) -> str:
    """What to call an arm that has no name of its own."""
    name = "native" if policy.horizon == 0 else "CRS" if policy.horizon is None else f"horizon {policy.horizon}"
    top_p = [p for p in (policy.top_p, policy.late_top_p) if p is not None and p < 1]
    return f"{name}, top-p {', '.join(f'{p:g}' for p in top_p)}" if top_p else name


def same_randomness(headers: list[Header]) -> bool:
    """Whether paths started from the same state and used the same uniforms."""
    return len({(h.digest, h.seed, h.sample, h.length) for h in headers}) == 1
