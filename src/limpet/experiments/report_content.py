"""The content of a report as plain data: tables, figures, scatter plots, contrasts and claims."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from limpet.evaluation.statistics import Estimate
from limpet.experiments.claims import Claim

PAPER = "paper"  # the head of a column that holds the paper's values


class Entry(NamedTuple):
    """One field of a table: our value, and the paper's beside it."""

    text: str
    paper: str = ""
    link: str = ""  # where the text links to


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
    """One line of a panel: points in order, with optional errors and notes."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    y_error: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()
    joined: bool = True
    open: bool = False  # hollow markers
    # The number of one of the figures' styles (default: by the position in the panel), or matplotlib's short form:
    # "-" joins points, "." does not, "k:" is a dotted black line.
    style: int | str | None = None


@dataclass(frozen=True)
class Panel:
    """One plot of a figure."""

    title: str
    x: str
    y: str
    series: Sequence[Series]
    ticks: tuple[tuple[float, str], ...] = ()  # of x; default: matplotlib's choice
    log_x: bool = False
    log_y: bool = False
    reverse_x: bool = False
    bars: bool = False  # bars side by side at every x, instead of lines
    legend: bool = True  # False where an earlier panel has it
    axes: Mapping[str, Any] = field(default_factory=dict)  # further settings of matplotlib's axes: scales, limits


@dataclass(frozen=True)
class Figure:
    """Panels in rows."""

    name: str
    caption: str
    panels: tuple[Panel, ...]
    title: str = ""  # drawn over the panels
    columns: int = 3  # panels in a row


class Point(NamedTuple):
    """One sampler in a panel of a scatter plot, and the cell whose texts it shows."""

    sampler: str
    family: str
    x: Estimate
    y: Estimate
    cell: str
    texts: tuple[str, ...] = ()


@dataclass(frozen=True)
class ScatterPlot:
    """An interactive figure: one panel at a time, points coloured by family, each with its texts.

    It replaces the still figure of the same name where scripts run."""

    name: str
    caption: str
    x: str
    y: str
    panels: Mapping[str, Sequence[Point]]
    joined: tuple[str, ...] = ()  # families drawn as curves, in the order of their points


class Contrast(NamedTuple):
    """A difference paired by seed, with the paper's value where it prints one."""

    name: str
    estimate: Estimate
    paper: str = ""


@dataclass(frozen=True)
class ReportContent:
    """What a report holds besides the provenance."""

    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()
    contrasts: tuple[Contrast, ...] = ()
    claims: tuple[Claim, ...] = ()
    scatters: tuple[ScatterPlot, ...] = ()


def without_paper(content: ReportContent) -> ReportContent:
    """The same content without the paper's values and without verdicts on its claims."""
    return replace(
        content,
        claims=(),
        contrasts=tuple(contrast._replace(paper="") for contrast in content.contrasts),
        tables=tuple(map(_table_without_paper, content.tables)),
    )


def _table_without_paper(table: Table) -> Table:
    kept = [i for i, head in enumerate(table.head) if head != PAPER]
    head = tuple(table.head[i] for i in kept)
    groups = (tuple(tuple(row[i]._replace(paper="") for i in kept) for row in group) for group in table.groups)
    return replace(table, head=head, groups=tuple(groups))


def format_estimate(estimate: Estimate, digits: int) -> str:
    """An estimate as "41.79 ± 0.84"; without an error for one seed, "n/a" without a value."""
    return f"{estimate:.{digits}f}"


def format_signed(estimate: Estimate, digits: int) -> str:
    """An estimate with its sign, as "+0.12 ± 0.03"."""
    text = format_estimate(estimate, digits)
    return text if text.startswith(("-", "n")) else f"+{text}"


def estimate_series(name: str, x: Sequence[float], estimates: Sequence[Estimate], **style: Any) -> Series:
    """A series of means over x, with their standard errors."""
    means, errors = tuple(one.mean for one in estimates), tuple(one.se for one in estimates)
    return Series(name, tuple(x), means, errors, **style)
