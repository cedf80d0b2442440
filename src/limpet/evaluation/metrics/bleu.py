"""Self-BLEU-4: BLEU of each sequence against the other sequences of its set, for all sequences at once."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from limpet.errors import LimpetError
from limpet.evaluation.metrics.ngrams import Floats, Ints, Tokens, ngrams, pack, tally

ORDERS = 4
EPSILON = 0.1  # method 1's count for an order that matches nothing
ABOVE_UNIGRAMS: Floats = np.array([0.0, 1, 1, 1])[:, None]

# Each maps (orders, n) matches and totals to precisions.
SMOOTHINGS: dict[str, Callable[[Floats, Floats], Floats]] = {
    # NLTK's method 2: one more match and one more n-gram above unigrams
    "add-one": lambda matched, total: np.divide(matched + ABOVE_UNIGRAMS, total + ABOVE_UNIGRAMS),
    "add-one-all": lambda matched, total: (matched + 1) / (total + 1),  # the same for unigrams too
    "method-1": lambda matched, total: np.where(matched > 0, matched, EPSILON) / total,
}


def _clipped(code: Ints, sequence: Ints, size: int) -> Floats:
    """For each sequence, the clipped count of its n-grams that some other sequence contains.

    BLEU clips the count of an n-gram to its largest count in any reference. Sort the sequences that contain an n-gram
    by their counts. All but the last keep their count, since a later one has at least as many; the last is clipped to
    the second largest count."""
    sequence, code, count = tally(code, sequence)
    order = np.lexsort((count, code))
    sequence, code, count = sequence[order], code[order], count[order]
    changes = code[1:] != code[:-1]
    first, last = np.append(True, changes)[: len(code)], np.append(changes, True)[: len(code)]
    second = np.where(first, 0, np.roll(count, 1))
    return np.bincount(sequence, weights=np.where(last, second, count), minlength=size).astype(np.float64)


def _closest(lengths: Ints, groups: Ints) -> Floats:
    """For each sequence, the closest length of another one in its group, the shorter on a tie; NaN if it is alone."""
    order = np.lexsort((lengths, groups))
    sorted_lengths = lengths[order].astype(np.float64)
    same = groups[order][1:] == groups[order][:-1]
    below = np.append(np.nan, np.where(same, sorted_lengths[:-1], np.nan))[: len(order)]
    above = np.append(np.where(same, sorted_lengths[1:], np.nan), np.nan)[: len(order)]
    take_above = np.isnan(below) | (above - sorted_lengths < sorted_lengths - below)
    closest = np.empty(len(order))
    closest[order] = np.where(take_above, above, below)
    return closest


def self_bleu(tokens: Tokens, smoothing: str = "add-one", groups: Sequence[Any] | None = None) -> Floats:
    """BLEU-4 of each sequence against all others of its set: (n,) scores, NaN for a sequence without references.

    tokens: the sequences. smoothing: a name in SMOOTHINGS. groups: one per sequence; references are then the other
    sequences of the same group. Orders 1 to 4 have equal weights, counts are clipped, and the brevity penalty uses the
    closest reference length. The score is 0 where no unigram is shared, whatever the smoothing, as in NLTK."""
    if smoothing not in SMOOTHINGS:
        raise LimpetError(f"smoothing {smoothing!r} is none of {', '.join(SMOOTHINGS)}")
    packed = pack(tokens)
    size = len(packed.lengths)
    if groups is not None and len(groups) != size:
        raise LimpetError(f"{len(groups)} groups for {size} sequences; give each sequence one")
    group = np.zeros(size, np.int64) if groups is None else np.unique(np.asarray(groups), return_inverse=True)[1]
    matched = np.stack([_clipped(code, sequence, size) for code, sequence in ngrams(packed, ORDERS, group)])
    total = np.maximum(1, packed.lengths - np.arange(ORDERS)[:, None]).astype(np.float64)
    precision = SMOOTHINGS[smoothing](matched, total)
    some = matched[0] > 0
    score = np.where(some, np.exp(np.log(np.where(some, precision, 1)).mean(0)), 0)
    closest = _closest(packed.lengths, group)
    penalty = np.exp(np.minimum(0, 1 - closest / np.maximum(packed.lengths, 1)))  # NaN where there is no reference
    return score * penalty
