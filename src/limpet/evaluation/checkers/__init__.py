"""Checkers: they decide from the text alone whether a sample is right, where no judge is needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from limpet import registry
from limpet.errors import LimpetError

GROUP = "limpet.checkers"  # entry points of other packages
BUILTIN = {  # name -> "module:object"
    "molecules": "limpet.evaluation.checkers.molecules:MoleculeChecker",
    "sudoku": "limpet.evaluation.checkers.sudoku:SudokuChecker",
    "grammar": "limpet.evaluation.checkers.grammar:GrammarChecker",
}


class Checker(Protocol):
    """Decides about one text: is this molecule valid, is this sudoku solved?

    Two more members are optional. `check_set(texts) -> {name: number}` is about all texts of one seed together, the
    share of distinct ones for example. `conventions: {name: sentence}` says how each value is taken."""

    def check(self, text: str) -> Mapping[str, bool | float]:
        """Values of one text, by name. A name that is missing, or NaN, is left out of the mean over texts."""
        ...


def find_checker(name: str) -> Checker:
    """The checker of a name: built in, from an entry point of another package, or "./file.py:Name"."""
    found = registry.find("checker", GROUP, BUILTIN, name)
    checker = found() if isinstance(found, type) else found
    if not callable(getattr(checker, "check", None)):
        raise LimpetError(f"the checker {name!r} has no method check(text)")
    return checker  # type: ignore[no-any-return]
