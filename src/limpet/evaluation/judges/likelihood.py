"""How a generated sample becomes a score: which ids the judge reads, which of them count, and a cache of results."""

from __future__ import annotations

import hashlib
import json
import math
import os
import tomllib
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
from limpet.files import write_whole
from limpet.models import Tokenizer

RELEASED_LENGTH = 1024  # where the released code cuts a text


class Reading(NamedTuple):
    """What a judge reads of one sample: ids, which of them after the first count, and how many were dropped."""

    ids: NDArray[np.int64]
    counted: NDArray[np.bool_]  # (len(ids) - 1,)
    dropped: int = 0

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.ids.astype("<i8").tobytes() + b"|" + self.counted.tobytes()).hexdigest()


def _reading(ids: Sequence[int] | NDArray[np.int64], first: int = 0, dropped: int = 0) -> Reading:
    """Every id from place `first` on counts, but for the very first: nothing stands before it."""
    array = np.asarray(ids, dtype=np.int64)
    return Reading(array, np.arange(1, len(array)) >= first, dropped)


def _tokenizer(judge: Judge) -> Tokenizer:
    if judge.tokenizer is None:
        raise LimpetError(f"{judge.name} has no tokenizer, so it can score ids but no text")
    return judge.tokenizer


def boundary(tokenizer: Tokenizer, ids: list[int], prefix: str) -> int:
    """How many leading ids end within the prefix: the most whose text is a beginning of it.

    The rule at the byte boundary: prefix and continuation are tokenised together, and an id belongs to the
    continuation if any of its bytes does. One that straddles the boundary counts whole."""
    if not prefix:
        return 0
    prefix = tokenizer.decode(tokenizer.encode(prefix))  # as the tokenizer writes it, should it normalise text
    # Text grows with ids, but for a character cut between ids, which may read as up to three stand-ins. Past this
    # many characters no count can fit.
    most = bisect_right(range(len(ids)), len(prefix) + 8, key=lambda k: len(tokenizer.decode(ids[:k])))
    return next(k for k in range(most, -1, -1) if prefix.startswith(tokenizer.decode(ids[:k])))


def _ids(judge: Judge, sample: Any, prefix: Any) -> Reading:
    own, before = as_ids(sample), as_ids([] if prefix is None else prefix)
    pad = judge.vocab_size
    kept, kept_before = own[own != pad], before[before != pad]
    dropped = len(own) + len(before) - len(kept) - len(kept_before)
    return _reading(np.concatenate([kept_before, kept]), len(kept_before), dropped)


def _text(judge: Judge, sample: Any, prefix: Any) -> Reading:
    tokenizer = _tokenizer(judge)
    ids = tokenizer.encode((prefix or "") + sample)
    return _reading(ids, boundary(tokenizer, ids, prefix or ""))


def _decode(judge: Judge, ids: Any) -> str:
    """Ids as the released code writes them out: [PAD] is a word like others."""
    tokenizer = _tokenizer(judge)
    array = as_ids(ids)
    runs = np.split(array, np.flatnonzero(array == judge.vocab_size))
    return "[PAD]".join(tokenizer.decode([int(i) for i in run if i != judge.vocab_size]) for run in runs)


def _released(judge: Judge, sample: Any, prefix: Any) -> Reading:
    if prefix is not None and len(prefix):
        raise LimpetError("the released code scores no continuation of a prefix: use the convention ids or text")
    if judge.eos is None:
        raise LimpetError(f"the released rule needs an end-of-text id, and {judge.name} has none")
    limit = min(RELEASED_LENGTH, judge.context)
    text = sample if isinstance(sample, str) else _decode(judge, sample)
    ids = np.asarray(_tokenizer(judge).encode(text)[:limit], dtype=np.int64)
    if judge.eos not in ids and len(ids) < limit:
        ids = np.append(ids, judge.eos)  # padding is this same id, and the first of it counts
    end = ids == judge.eos
    return Reading(ids, (~end | (end.cumsum() == 1))[1:])


def _source(judge: Judge, sample: Any, prefix: Any) -> Reading:
    if not isinstance(judge, SourceJudge):
        raise LimpetError(
            f"the convention distribution is for the true distribution of an exact source, and {judge.name} is none"
        )
    before, own = (
        as_ids(_tokenizer(judge).encode(part) if isinstance(part, str) else part)
        for part in ([] if prefix is None else prefix, sample)
    )
    return _reading(np.concatenate([[judge.start], before, own]), 1 + len(before))


class Convention(NamedTuple):
    """A way to read samples, and the sentence that says how."""

    rule: str
    takes: tuple[str, ...]  # what a sample may be: "ids", "text"
    read: Callable[[Judge, Any, Any], Reading]


READERS = {"ids": _ids, "text": _text, "released": _released, "exact": _source}
WORDS = tomllib.loads(Path(__file__).with_name("conventions.toml").read_text("utf-8"))
CONVENTIONS = {name: Convention(words["rule"], tuple(words["takes"]), READERS[name]) for name, words in WORDS.items()}


@dataclass(frozen=True, eq=False)
class Scores:
    """What a judge says of each sample: who it is, what it computed in, how it read, what it counted."""

    judge: str
    digest: str  # of the judge
    precision: str
    convention: str
    nll: NDArray[np.float64]  # (n,) nats, summed over the ids that count
    tokens: NDArray[np.int64]  # (n,) how many count
    dropped: NDArray[np.int64]  # (n,) ids that the judge could not read
    long: int  # samples longer than the judge's context, read in overlapping windows

    @property
    def mean(self) -> NDArray[np.float64]:
        """Nats per counted id of each sample; NaN where none counts."""
        return np.where(self.tokens > 0, self.nll / np.maximum(self.tokens, 1), np.nan)

    @property
    def pooled(self) -> float:
        """Nats per counted id of all samples together: the GenNLL of one shard. NaN where nothing counts."""
        count = int(self.tokens.sum())
        return float(self.nll.sum()) / count if count else math.nan


class ScoreCache:
    """Sums of NLL in a folder, one small file for each (reading, judge, convention).

    Files appear whole or not at all; one that does not hold what it should is not believed, and is written anew."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def _file(self, *key: str) -> Path:
        name = _hash(*key)
        return self.folder / name[:2] / f"{name[2:]}.json"

    def get(self, *key: str) -> float | None:
        try:
            entry = json.loads(self._file(*key).read_bytes())
            nll = float.fromhex(entry["nll"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None
        return nll if entry == _entry(nll, *key) else None

    def put(self, nll: float, *key: str) -> None:
        try:
            self._file(*key).parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._file(*key), json.dumps(_entry(nll, *key)))
        except (OSError, LimpetError) as error:
            raise LimpetError(f"scores cannot be kept in {self.folder} ({error}): name another folder") from error


def _entry(nll: float, reading: str, judge: str, convention: str) -> dict[str, str]:
    """What a file holds, sealed."""
    seal = _hash(reading, judge, convention, nll.hex())[:16]
    return {"nll": nll.hex(), "seal": seal, "judge": judge, "convention": convention}


def _hash(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def gen_nll(
    judge: Judge,
    samples: Sequence[Any],
    convention: str = "ids",
    prefixes: Sequence[Any] | None = None,
    cache: ScoreCache | None = None,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> Scores:
    """Score samples: lists of ids for the convention "ids", texts for "text", either for "released" and "distribution".

    With `prefixes`, of the same kind, a sample is a continuation, and is scored given its prefix."""
    if convention not in CONVENTIONS:
        raise LimpetError(f"convention {convention!r} is none of {', '.join(CONVENTIONS)}")
    if prefixes is not None and len(prefixes) != len(samples):
        raise LimpetError(f"{len(prefixes)} prefixes for {len(samples)} samples; give each sample one")
    _, takes, read = CONVENTIONS[convention]
    pairs = [*zip(samples, [None] * len(samples) if prefixes is None else prefixes, strict=True)]
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
    return Scores(judge.name, judge.digest, judge.precision, convention, nll, tokens, dropped, long)
