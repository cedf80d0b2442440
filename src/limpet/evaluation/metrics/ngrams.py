"""Exact n-gram codes of a whole set of sequences at once, and the metrics that count them."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from limpet.errors import LimpetError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Tokens = Any  # (n, L) integers as an array or tensor, or a list of n id lists, arrays or tensors of any lengths


class Pack(NamedTuple):
    """A set of sequences, concatenated."""

    ids: Ints
    lengths: Ints

    @property
    def sequence(self) -> Ints:
        """Which sequence each id belongs to."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)


def as_ids(ids: Any) -> NDArray[Any]:
    """A list, array or tensor of ids, on any device, as an array."""
    array = np.asarray(ids.cpu() if hasattr(ids, "cpu") else ids)
    if array.size and array.dtype.kind not in "iu":
        raise LimpetError(f"token ids are integers, not {array.dtype}")
    return array.astype(np.int64)


def pack(tokens: Tokens) -> Pack:
    """Concatenate a set of sequences, without padding."""
    if isinstance(tokens, Pack):
        return tokens
    rows = [as_ids(row) for row in tokens]
    if any(row.ndim != 1 for row in rows):
        raise LimpetError(
            "a metric takes a set of sequences, (n, L) or a list of id lists; wrap a single one in a list"
        )
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    return Pack(np.concatenate([*rows, np.empty(0, np.int64)]), lengths)


def _rank(values: Ints) -> Ints:
    """The rank of each value among the distinct values: ranks are equal exactly where values are."""
    inverse: Ints = np.unique(values, return_inverse=True)[1]
    return inverse.reshape(-1)


def ngrams(packed: Pack, n: int, groups: Ints | None = None) -> Iterator[tuple[Ints, Ints]]:
    """For orders 1 to n, (code, sequence) of every n-gram: codes are equal exactly where n-grams are.

    The code of an n-gram is the rank of (code of its first n - 1 tokens, last token), so there are no hash collisions.
    With `groups`, one per sequence, n-grams of different groups never share a code."""
    sequence = packed.sequence
    token = _rank(packed.ids)
    base = int(token.max(initial=0)) + 1
    room = np.repeat(packed.lengths.cumsum(), packed.lengths) - np.arange(len(token))  # ids from here to the end
    code = token if groups is None else _rank(groups[sequence] * base + token)
    yield code, sequence
    for order in range(2, n + 1):
        code = _rank(code[:-1] * base + token[order - 1 :])
        inside = room[: len(code)] >= order  # not across the boundary of two sequences
        yield code[inside], sequence[: len(code)][inside]


def _last(packed: Pack, n: int) -> tuple[Ints, Ints]:
    if n < 1:
        raise LimpetError(f"an n-gram has n of at least 1, not {n}")
    *_, pair = ngrams(packed, n)
    return pair


def tally(code: Ints, sequence: Ints) -> tuple[Ints, Ints, Ints]:
    """(sequence, code, count) of every distinct n-gram within its sequence."""
    base = int(code.max(initial=0)) + 1
    key, count = np.unique(sequence * base + code, return_counts=True)
    return key // base, key % base, count


def entropy(tokens: Tokens) -> Floats:
    """-sum p ln p of each sequence's own unigram frequencies, in nats; NaN for an empty sequence."""
    packed = pack(tokens)
    sequence, _, count = tally(*_last(packed, 1))
    length = packed.lengths[sequence]
    terms = count / length * np.log(length / count)
    total = np.bincount(sequence, weights=terms, minlength=len(packed.lengths))
    return np.where(packed.lengths > 0, total, np.nan)


def rep(tokens: Tokens, n: int = 4) -> Floats:
    """Rep-n of each sequence: 1 - distinct / all of its n-grams; NaN if it is shorter than n."""
    packed = pack(tokens)
    code, sequence = _last(packed, n)
    size = len(packed.lengths)
    distinct = np.bincount(tally(code, sequence)[0], minlength=size)
    total = np.bincount(sequence, minlength=size)
    return np.where(total > 0, 1 - distinct / np.maximum(total, 1), np.nan)


def dist(tokens: Tokens, n: int = 4) -> float:
    """Dist-n of a set: distinct n-grams of all sequences together / all n-grams; NaN if there are none.

    It falls as the set grows: compare sets of the same size."""
    code, _ = _last(pack(tokens), n)
    return len(np.unique(code)) / len(code) if len(code) else float("nan")


def novelty(tokens: Tokens, known: Tokens, n: int = 8) -> Floats:
    """The share of the n-grams of each sequence that no known sequence has; NaN if it is shorter than n."""
    packed, real = pack(tokens), pack(known)
    size = len(packed.lengths)
    both = Pack(np.concatenate([packed.ids, real.ids]), np.concatenate([packed.lengths, real.lengths]))
    code, sequence = _last(both, n)
    is_own = sequence < size
    is_new = ~np.isin(code[is_own], code[~is_own])
    new, total = (np.bincount(sequence[is_own], weights, minlength=size) for weights in (is_new.astype(float), None))
    return np.where(total > 0, new / np.maximum(total, 1), np.nan)


def length(tokens: Tokens) -> Floats:
    """The number of tokens of each sequence."""
    return pack(tokens).lengths.astype(np.float64)
