"""The checker `grammar`: are the brackets of a text balanced?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from limpet.models.brackets import is_balanced


class GrammarChecker:
    """Checks the samples of exact:grammar: every bracket is closed by its own kind, in the right order."""

    conventions: ClassVar[Mapping[str, str]] = {
        "grammatical": "share of samples whose brackets are balanced",
        "distinct": "different texts among the grammatical ones of a seed, as a share; it falls with more samples",
    }

    def check(self, text: str) -> dict[str, bool]:
        """Whether one text is balanced."""
        return {"grammatical": is_balanced(text)}

    def check_set(self, texts: Sequence[str]) -> dict[str, float]:
        """The share of different texts among the balanced ones; NaN where none is balanced."""
        balanced = [text for text in texts if is_balanced(text)]
        return {"distinct": len(set(balanced)) / len(balanced) if balanced else float("nan")}
