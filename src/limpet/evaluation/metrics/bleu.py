"""Self-BLEU-4: how much of each sequence's n-grams the other sequences of its set hold, all sequences at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from limpet.errors import LimpetError
from limpet.evaluation.metrics.ngrams import Floats, Ints, Tokens, ngrams, pack, tally

ORDERS = 4
EPSILON = 0.1  # method 1's count for an order that matches nothing
ABOVE_UNIGRAMS: Floats = np.array([0.0, 1, 1, 1])[:, None]

# From (orders, n) matches and n-grams in all to precisions.
SMOOTHINGS: dict[str, Callable[[Floats, Floats], Floats]] = {
    # one more match and one more n-gram above unigrams: NLTK's method 2
    "add-one": lambda matched, total: np.divide(matched + ABOVE_UNIGRAMS, total + ABOVE_UNIGRAMS),
    "add-one-all": lambda matched, total: (matched + 1) / (total + 1),  # the same for unigrams too
    "method-1": lambda matched, total: np.where(matched > 0, matched, EPSILON) / total,
}


def _clipped(code: Ints, sequence: Ints, size: int) -> Floats:
    """For each sequence, how many of its n-grams find a partner in some other sequence.

    BLEU clips an n-gram's count to the largest count in any reference. Among the holders of one n-gram, in order of
    count, everyone but the last has a holder above and keeps the whole count; the last is clipped to the runner-up."""
    sequence, code, count = tally(code, sequence)
    order = np.lexsort((count, code))
    sequence, code, count = sequence[order], code[order], count[order]
    changes = code[1:] != code[:-1]
    first, last = np.append(True, changes)[: len(code)], np.append(changes, True)[: len(code)]
    runner_up = np.where(first, 0, np.roll(count, 1))
    return np.bincount(sequence, weights=np.where(last, runner_up, count), minlength=size).astype(np.float64)


def _closest(lengths: Ints, groups: Ints) -> Floats:
    """The length nearest to each sequence's own among the others of its group, the shorter on a tie; NaN if alone."""
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
    """Each sequence's BLEU-4 against all others of its set, or of its group: (n,) scores, NaN for one alone.

    Equal weights on orders 1 to 4, clipped counts, brevity penalty by the closest length; 0 where not even a
    unigram is shared, whatever the smoothing, as in NLTK."""
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
