"""What the paper prints, and results with that beside them: both know cells, measures, and differences of cells."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from limpet.lab.claims import Finding
from limpet.lab.page import Entry, Series, Table
from limpet.lab.results import Results
from limpet.stats import Estimate

NAMES = {"ppl": "GenPPL", "entropy": "Entropy", "dist-4": "Dist-4", "rep-4": "Rep-4", "self-bleu": "Self-BLEU"}
Side = Callable[..., Finding]  # below, above or within a bound

# By study, by row, by measure. Rows of the same name are of the same cells, so that studies can share them.
TABLES: dict[str, dict[str, dict[str, str]]] = tomllib.loads(Path(__file__).with_name("paper.toml").read_text("utf-8"))
PRINTED = {row: texts for rows in TABLES.values() for row, texts in rows.items()}


def value(text: str) -> float:
    """The number of an entry, its error not counted: "41.79 ± 0.84"."""
    return float(text.partition(" ± ")[0])


def nll_difference(text: str, against: str) -> float:
    """Of two GenPPLs."""
    return math.log(value(text)) - math.log(value(against))


def row(*cells: str) -> str:
    """Where the numbers of a cell stand, of a difference of two, or of a difference of two such differences."""
    return "({} - {}) - ({} - {})".format(*cells) if len(cells) == 4 else " - ".join(cells)


def printed(measure: str, *cells: str) -> float | None:
    """The paper's number: the one that it prints, or else the difference of those that it prints, where it does."""
    texts = PRINTED.get(row(*cells), {})
    if measure in texts:
        return value(texts[measure])
    if len(cells) == 1:
        ppl = texts.get(measure.replace("nll", "ppl"))
        return math.log(value(ppl)) if ppl else None
    half = len(cells) // 2
    one, other = printed(measure, *cells[:half]), printed(measure, *cells[half:])
    return None if one is None or other is None else one - other


class Beside(Results):
    """Results, and beside them what the paper prints for the same cells."""

    def theirs(self, measure: str) -> str:
        """A measure as the paper's: its judges are the first and the second, whatever their names here."""
        name, _, judge = measure.partition(":")
        i = self.judges.index(judge) if judge else 0
        return f"{name}:{i + 1}" if i else name

    def paper(self, row: str, measure: str) -> str:
        """As it is printed, if it is."""
        return PRINTED.get(row, {}).get(self.theirs(measure), "")

    def entries(self, cell: str, measures: Sequence[str], paper: Sequence[str] = ()) -> tuple[Entry, ...]:
        return super().entries(cell, measures, paper or [self.paper(cell, measure) for measure in measures])

    def table(
        self,
        name: str,
        caption: str,
        head: tuple[str, ...],
        groups: Iterable[Mapping[str, tuple[str, ...]]],
        measures: Sequence[str] = ("ppl", "entropy"),
    ) -> Table:
        """Measures of cells, which are given with what names their rows; `head` stands over these names."""
        heads = (measure.partition(":")[2] or NAMES[measure] for measure in measures)
        rows = (
            tuple((*map(Entry, names), *self.entries(cell, measures)) for cell, names in group.items())
            for group in groups
        )
        return Table(name, caption, (*head, *heads), tuple(rows), names=len(head))

    def noted(self, name: str, cells: Sequence[str], x: Sequence[float], y: str, note: str) -> Series:
        """A line of a figure with another measure at its points, in parentheses."""
        notes = tuple(f"({self(cell, note).mean:.2f})" for cell in cells)
        return self.series(name, cells, x, y, notes=notes)

    def difference(self, *cells: str, measure: str = "nll") -> Estimate:
        """Of two cells, or of two such differences."""
        made: Callable[..., Estimate] = self.contrast if len(cells) == 2 else self.interaction
        return made(*cells, measure)

    def finding(self, side: Side, name: str, *cells: str, measure: str = "nll", **bound: float) -> Finding:
        """On which side a difference falls, with the paper's."""
        paper = printed(self.theirs(measure), *cells)
        return side(name, self.difference(*cells, measure=measure), paper=paper, **bound)


def ticks(at: Iterable[float]) -> tuple[tuple[float, str], ...]:
    """Of an axis, where there are points and nowhere else."""
    return tuple((float(x), f"{x:g}") for x in at)
