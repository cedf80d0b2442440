"""The checker `grammar`: are the brackets of a text balanced?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import ClassVar

from limpet.evaluation.checkers.molecules import total_variation
from limpet.models.brackets import BRACKETS, is_balanced


class GrammarChecker:
    """Checks the samples of exact:grammar: every bracket is closed by its own kind, in the right order."""

    conventions: ClassVar[Mapping[str, str]] = {
        "grammatical": "share of samples whose brackets are balanced",
        "distinct": "different texts among the grammatical ones of a seed, as a share; it falls with more samples",
        "leaves distance": "total variation (0 to 1) between grammatical samples and all balanced strings of their "
        "lengths in the number of leaves, which are brackets closed by the next character",
    }

    def check(self, text: str) -> dict[str, bool]:
        """Whether one text is balanced."""
        return {"grammatical": is_balanced(text)}

    def check_set(self, texts: Sequence[str]) -> dict[str, float]:
        """The share of different texts among the balanced ones, and how far their number of leaves is from that of all
        balanced strings; NaN where none is balanced."""
        balanced = [text for text in texts if is_balanced(text)]
        expected: dict[int, float] = {}
        for length, count in Counter(map(len, balanced)).items():
            for k, share in leaf_shares(length // 2).items():
                expected[k] = expected.get(k, 0.0) + count * share
        return {
            "distinct": len(set(balanced)) / len(balanced) if balanced else math.nan,
            "leaves distance": total_variation(Counter(map(leaves, balanced)), expected),
        }


def leaves(text: str) -> int:
    """How many brackets of a balanced text the next character closes."""
    return sum(text.count(BRACKETS[i : i + 2]) for i in range(0, len(BRACKETS), 2))


def leaf_shares(pairs: int) -> dict[int, float]:
    """The share of balanced strings of so many pairs that have each number of leaves: the Narayana numbers.

    Every pair has its kind independently of where it stands, so the number of kinds does not matter."""
    if pairs == 0:
        return {0: 1.0}
    total = math.comb(2 * pairs, pairs) // (pairs + 1)
    return {k: math.comb(pairs, k) * math.comb(pairs, k - 1) / pairs / total for k in range(1, pairs + 1)}
