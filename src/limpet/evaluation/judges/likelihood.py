"""The likelihood of generated samples under a judge: which ids it reads, which of them count, and a cache."""

import hashlib
import json
import math
import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from limpet.errors import LimpetError
from limpet.evaluation.judges.base import Judge, Progress
from limpet.evaluation.judges.exact import SourceJudge
from limpet.evaluation.metrics.ngrams import as_ids
from limpet.files import write_file
from limpet.models import Tokenizer

RELEASED_LENGTH = 1024  # the released code truncates a text to as many ids
STAND_INS = 8  # characters by which the decoded text of a part of the ids may exceed its share of the whole text


class JudgeInput(NamedTuple):
    """What a judge reads of one sample: ids, which of them after the first count, and how many were dropped."""

    ids: NDArray[np.int64]
    counted: NDArray[np.bool_]  # (len(ids) - 1,)
    dropped: int = 0

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.ids.astype("<i8").tobytes() + b"|" + self.counted.tobytes()).hexdigest()


def _judge_input(ids: Sequence[int] | NDArray[np.int64], first: int = 0, dropped: int = 0) -> JudgeInput:
    """Every id from index `first` on counts, except the very first, which has no context."""
    array = np.asarray(ids, dtype=np.int64)
    return JudgeInput(array, np.arange(1, len(array)) >= first, dropped)


def _tokenizer(judge: Judge) -> Tokenizer:
    if judge.tokenizer is None:
        raise LimpetError(f"{judge.name} has no tokenizer, so it can score ids but no text")
    return judge.tokenizer


def prompt_ids(tokenizer: Tokenizer, ids: list[int], prompt: str) -> int:
    """How many leading ids end within the prompt: as many as decode to a beginning of it.

    Prompt and continuation are tokenised together. An id belongs to the continuation if any of its bytes does, so an
    id that straddles the boundary counts whole."""
    if not prompt:
        return 0
    prompt = tokenizer.decode(tokenizer.encode(prompt))  # as the tokenizer writes it, if it normalises text
    # Text grows with the number of ids, except that a character cut between ids may decode to up to three stand-ins.
    most = bisect_right(range(len(ids)), len(prompt) + STAND_INS, key=lambda k: len(tokenizer.decode(ids[:k])))
    return next(k for k in range(most, -1, -1) if prompt.startswith(tokenizer.decode(ids[:k])))


def _read_ids(judge: Judge, sample: Any, prompt: Any) -> JudgeInput:
    own, before = as_ids(sample), as_ids([] if prompt is None else prompt)
    pad = judge.vocab_size
    kept, kept_before = own[own != pad], before[before != pad]
    dropped = len(own) + len(before) - len(kept) - len(kept_before)
    return _judge_input(np.concatenate([kept_before, kept]), len(kept_before), dropped)


def _read_text(judge: Judge, sample: Any, prompt: Any) -> JudgeInput:
    tokenizer = _tokenizer(judge)
    ids = tokenizer.encode((prompt or "") + sample)
    return _judge_input(ids, prompt_ids(tokenizer, ids, prompt or ""))


def _decode(judge: Judge, ids: Any) -> str:
    """The text of ids as the released code writes it: [PAD] is a word like any other."""
    tokenizer, array = _tokenizer(judge), as_ids(ids)
    runs = np.split(array, np.flatnonzero(array == judge.vocab_size))
    return "[PAD]".join(tokenizer.decode(run[run != judge.vocab_size].tolist()) for run in runs)


def _read_released(judge: Judge, sample: Any, prompt: Any) -> JudgeInput:
    if prompt is not None and len(prompt):
        raise LimpetError("the released code scores no continuation of a prompt: use the convention ids or text")
    if judge.eos is None:
        raise LimpetError(f"the released rule needs an end-of-text id, and {judge.name} has none")
    limit = min(RELEASED_LENGTH, judge.context)
    text = sample if isinstance(sample, str) else _decode(judge, sample)
    ids = np.asarray(_tokenizer(judge).encode(text)[:limit], dtype=np.int64)
    if judge.eos not in ids and len(ids) < limit:
        ids = np.append(ids, judge.eos)  # the released code pads with this id and counts the first one
    end = ids == judge.eos
    return JudgeInput(ids, (~end | (end.cumsum() == 1))[1:])


def _read_exact(judge: Judge, sample: Any, prompt: Any) -> JudgeInput:
    if not isinstance(judge, SourceJudge):
        raise LimpetError(f"the convention exact needs the true distribution of an exact source; {judge.name} is none")
    before, own = (
        as_ids(_tokenizer(judge).encode(part) if isinstance(part, str) else part)
        for part in ([] if prompt is None else prompt, sample)
    )
    return _judge_input(np.concatenate([[judge.start], before, own]), 1 + len(before))


class Convention(NamedTuple):
    """A way for a judge to read samples."""

    rule: str  # the sentence that is printed with every score
    takes: tuple[str, ...]  # what a sample may be: "ids", "text"
    read: Callable[[Judge, Any, Any], JudgeInput]


CONVENTIONS = {
    "ids": Convention(
        "the sample's own ids, no BOS added, every id but the first counted; [PAD], the id after the judge's last, "
        "dropped",
        ("ids",),
        _read_ids,
    ),
    "text": Convention(
        "text tokenised by the judge, no BOS added, every id but the first counted; after a prompt, every id with a "
        "byte past it",
        ("text",),
        _read_text,
    ),
    "released": Convention(
        "ids decoded, text tokenised by the judge and truncated to 1024 ids or its context; every id but the first "
        "counted, except each end-of-text after the first one; no batch dropped",
        ("text", "ids"),
        _read_released,
    ),
    "exact": Convention("the source's own distribution, every token counted", ("text", "ids"), _read_exact),
}


def describe(judge: Judge, convention: str) -> str:
    """The sentence that is printed with every score: the judge, its precision, and what it reads and counts."""
    return f"{judge.name} ({judge.digest[:12]}), {judge.precision}, {convention}: {CONVENTIONS[convention].rule}"


@dataclass(frozen=True, eq=False)
class JudgeScores:
    """The likelihood of each sample under a judge."""

    judge: str
    digest: str  # of the judge
    precision: str
    convention: str
    nll: NDArray[np.float64]  # (n,) nats, summed over the ids that count
    tokens: NDArray[np.int64]  # (n,) ids that count
    dropped: NDArray[np.int64]  # (n,) ids that the judge could not read
    long: int  # samples longer than the judge's context, read in overlapping windows

    @property
    def mean(self) -> NDArray[np.float64]:
        """(n,) nats per counted id of each sample; NaN if none counts."""
        return np.where(self.tokens > 0, self.nll / np.maximum(self.tokens, 1), np.nan)

    @property
    def pooled(self) -> float:
        """Nats per counted id of all samples together: the GenNLL of one seed. NaN if nothing counts."""
        count = int(self.tokens.sum())
        return float(self.nll.sum()) / count if count else math.nan


class ScoreCache:
    """A folder of NLL sums, one small file for each (reading, judge, convention).

    A file is written whole or not at all. A damaged file is ignored and written anew."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def _file(self, *key: str) -> Path:
        name = _hash(*key)
        return self.folder / name[:2] / f"{name[2:]}.json"

    def get(self, *key: str) -> float | None:
        """The sum that was stored under (reading, judge, convention), or None."""
        try:
            entry = json.loads(self._file(*key).read_bytes())
            nll = float.fromhex(entry["nll"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None
        return nll if entry == _entry(nll, *key) else None

    def put(self, nll: float, *key: str) -> None:
        """Store a sum under (reading, judge, convention)."""
        try:
            self._file(*key).parent.mkdir(parents=True, exist_ok=True)
            write_file(self._file(*key), json.dumps(_entry(nll, *key)))
        except (OSError, LimpetError) as error:
            raise LimpetError(f"scores cannot be kept in {self.folder} ({error}): name another folder") from error


def _entry(nll: float, reading: str, judge: str, convention: str) -> dict[str, str]:
    """The content of a file of the cache; the seal detects damage."""
    seal = _hash(reading, judge, convention, nll.hex())[:16]
    return {"nll": nll.hex(), "seal": seal, "judge": judge, "convention": convention}


def _hash(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def score_samples(
    judge: Judge,
    samples: Sequence[Any],
    convention: str = "ids",
    prompts: Sequence[Any] | None = None,
    cache: ScoreCache | None = None,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> JudgeScores:
    """The likelihood of samples under a judge.

    samples: lists of ids for the convention "ids", texts for "text", either for "released" and "exact". prompts: one
    per sample and of the same kind; a sample is then a continuation, and is scored given its prompt. cache: where
    scores are looked up and kept. batch_size: sequences that the judge reads at once (default: by their length).
    progress: called with (windows read, windows in all) after every batch."""
    if convention not in CONVENTIONS:
        raise LimpetError(f"convention {convention!r} is none of {', '.join(CONVENTIONS)}")
    if prompts is not None and len(prompts) != len(samples):
        raise LimpetError(f"{len(prompts)} prompts for {len(samples)} samples; give each sample one")
    _, takes, read = CONVENTIONS[convention]
    pairs = [*zip(samples, [None] * len(samples) if prompts is None else prompts, strict=True)]
    for sample in (part for pair in pairs for part in pair if part is not None):
        kind = "text" if isinstance(sample, str) else "ids"
        if kind not in takes:
            raise LimpetError(f"the convention {convention!r} scores {' or '.join(takes)}, and a sample here is {kind}")
    readings = [read(judge, *pair) for pair in pairs]
    digests = [reading.digest for reading in readings]
    known = {digest: cache.get(digest, judge.digest, convention) if cache else None for digest in digests}
    missing = {digest: reading for digest, reading in zip(digests, readings, strict=True) if known[digest] is None}
    values = judge.nll([reading.ids for reading in missing.values()], batch_size, progress)
    for (digest, reading), nll in zip(missing.items(), values, strict=True):
        known[digest] = total = float(nll[reading.counted].sum(dtype=np.float64))
        if cache:
            cache.put(total, digest, judge.digest, convention)
    nll = np.array([known[digest] for digest in digests], dtype=np.float64)
    tokens = np.array([reading.counted.sum() for reading in readings], dtype=np.int64)
    dropped = np.array([reading.dropped for reading in readings], dtype=np.int64)
    long = sum(len(reading.ids) > judge.context + 1 for reading in readings)
    return JudgeScores(judge.name, judge.digest, judge.precision, convention, nll, tokens, dropped, long)
