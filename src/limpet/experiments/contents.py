"""What a study has to show: tables, figures, scatters, contrasts and claims, as plain data that any format can be made
from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from limpet.evaluation.statistics import Estimate
from limpet.experiments.claims import Claim

PAPER = "paper"  # the head of a column with its values


class Entry(NamedTuple):
    """One field of a table: ours, and what the paper prints there."""

    text: str
    paper: str = ""
    link: str = ""  # where the text leads


@dataclass(frozen=True)
class Table:
    """Rows under a head, in groups with a rule between them; the first `names` columns name the row."""

    name: str
    caption: str
    head: tuple[str, ...]
    groups: tuple[tuple[tuple[Entry, ...], ...], ...]
    names: int = 1


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
    # Which of the figures' styles, that of its turn in the panel unless told; or matplotlib's own short form of one
    # ("-" joins points, "." does not, "k:" is a dotted black line).
    style: int | str | None = None


@dataclass(frozen=True)
class Panel:
    title: str
    x: str
    y: str
    series: Sequence[Series]
    ticks: tuple[tuple[float, str], ...] = ()  # of x, where they are not left to the axis
    log_x: bool = False
    log_y: bool = False
    reverse_x: bool = False
    bars: bool = False  # side by side at every x, instead of lines
    legend: bool = True  # or one of the panels before has it
    axes: Mapping[str, Any] = field(default_factory=dict)  # what else matplotlib is told of them: scales, limits


@dataclass(frozen=True)
class Figure:
    name: str
    caption: str
    panels: tuple[Panel, ...]
    title: str = ""  # drawn over the panels
    columns: int = 3  # panels to a row


class Dot(NamedTuple):
    """One arm in a panel of a scatter: what it is, where it stands, and the cell whose texts it shows."""

    arm: str
    family: str
    x: Estimate
    y: Estimate
    cell: str
    texts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scatter:
    """A figure to be looked into: panels by title, one at a time; dots coloured by family, each with its texts. It
    stands for the figure of its name, which is what is left where no script runs."""

    name: str
    caption: str
    x: str
    y: str
    panels: Mapping[str, Sequence[Dot]]
    joined: tuple[str, ...] = ()  # families that are curves, in the order of their dots


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
    scatters: tuple[Scatter, ...] = ()


def alone(page: Page) -> Page:
    """The same without the paper: neither its values nor verdicts on what it claims."""
    return replace(
        page, claims=(), contrasts=tuple(one._replace(paper="") for one in page.contrasts),
        tables=tuple(map(_alone, page.tables)),
    )  # fmt: skip


def _alone(table: Table) -> Table:
    """Entries without the paper's beside them, and no column of its own."""
    kept = [i for i, head in enumerate(table.head) if head != PAPER]
    head = tuple(table.head[i] for i in kept)
    groups = (tuple(tuple(line[i]._replace(paper="") for i in kept) for line in group) for group in table.groups)
    return replace(table, head=head, groups=tuple(groups))


def number(estimate: Estimate, digits: int) -> str:
    """41.79 ± 0.84; no error for one shard alone, no number where one has none."""
    return f"{estimate:.{digits}f}"


def signed(estimate: Estimate, digits: int) -> str:
    text = number(estimate, digits)
    return text if text.startswith(("-", "n")) else f"+{text}"


def series(name: str, x: Sequence[float], estimates: Sequence[Estimate], **style: Any) -> Series:
    """A line through means over x, with their errors."""
    return Series(name, tuple(x), tuple(one.mean for one in estimates), tuple(one.se for one in estimates), **style)
