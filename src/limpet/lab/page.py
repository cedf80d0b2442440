"""What a study has to show: tables, figures, contrasts and claims, as plain data that any format can be made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from limpet.lab.claims import Claim
from limpet.stats import Estimate


class Entry(NamedTuple):
    """One place of a table: ours, and what the paper prints there."""

    text: str
    paper: str = ""


@dataclass(frozen=True)
class Table:
    """Rows under a head, in groups with a rule between them; the first `labels` columns name the row."""

    name: str
    caption: str
    head: tuple[str, ...]
    groups: tuple[tuple[tuple[Entry, ...], ...], ...]
    labels: int = 1


@dataclass(frozen=True)
class Series:
    """One line of a panel: points joined in order, with errors and notes where there are such."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    y_error: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()
    joined: bool = True
    open: bool = False  # hollow markers


@dataclass(frozen=True)
class Panel:
    title: str
    x: str
    y: str
    series: tuple[Series, ...]
    ticks: tuple[tuple[float, str], ...] = ()  # of x, where they are not left to the axis
    log_x: bool = False
    log_y: bool = False
    reverse_x: bool = False


@dataclass(frozen=True)
class Figure:
    name: str
    caption: str
    panels: tuple[Panel, ...]


class Contrast(NamedTuple):
    """A difference paired by shard, with the paper's where it gives one."""

    name: str
    estimate: Estimate
    paper: str = ""


@dataclass(frozen=True)
class Page:
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()
    contrasts: tuple[Contrast, ...] = ()
    claims: tuple[Claim, ...] = ()


def entry(estimate: Estimate, digits: int, paper: str = "", error: bool = True) -> Entry:
    return Entry(number(estimate, digits, error), paper)


def number(estimate: Estimate, digits: int, error: bool = True) -> str:
    """41.79 ± 0.84, or the reason why there is no number."""
    if estimate.mean != estimate.mean:
        return "n/a"
    alone = not error or len(estimate.values) < 2
    return f"{estimate.mean:.{digits}f}" + ("" if alone else f" ± {estimate.se:.{digits}f}")


def signed(estimate: Estimate, digits: int) -> str:
    text = number(estimate, digits)
    return text if text.startswith(("-", "n")) else f"+{text}"
