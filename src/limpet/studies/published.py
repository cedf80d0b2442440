"""Arithmetic on the values that the paper prints: differences of what its tables give as strings."""

from __future__ import annotations

import math
import re

NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


def value(text: str, i: int = 0) -> float:
    """The i-th number of an entry, its error not counted: "41.79 ± 0.84", "76.89 / 5.269", "100.11 (5.58)"."""
    return float(NUMBER.findall(re.sub(r"±\s*[\d.]+", "", text))[i])


def nll(text: str) -> float:
    """The log of a GenPPL."""
    return math.log(value(text))


def nll_difference(text: str, against: str) -> float:
    return nll(text) - nll(against)
