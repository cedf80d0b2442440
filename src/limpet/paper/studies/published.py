"""What the paper prints, and results with that beside them: both know cells, measures, and differences of cells."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from limpet.evaluation.statistics import Estimate
from limpet.experiments import claims
from limpet.experiments.claims import Finding, Printed, difference
from limpet.experiments.contents import Entry, Series, Table, number, series
from limpet.experiments.results import Results

NAMES = {
    "ppl": "GenPPL", "entropy": "Entropy", "dist-4": "Dist-4", "rep-4": "Rep-4", "self-bleu": "Self-BLEU",
    "mauve": "MAUVE",
}  # fmt: skip
DIGITS = {"ppl": 2, "entropy": 3, "committed": 2, "visible": 2}  # of a measure in a table; 4 of the others
Side = Callable[..., Finding]  # of a bound
SIDES: dict[str, Side] = {
    side.__name__.replace("_", " "): side
    for side in (claims.below, claims.above, claims.not_below, claims.not_above, claims.within, claims.alike)
}
Claims = Mapping[str, Sequence[Finding]]  # what each claim of a study rests on

# By study, by row, by measure. Rows of the same name are of the same cells, so that studies can share them.
TABLES: dict[str, dict[str, dict[str, str]]] = tomllib.loads(Path(__file__).with_name("paper.toml").read_text("utf-8"))
PRINTED = {row: texts for rows in TABLES.values() for row, texts in rows.items()}


def read(text: str) -> Printed | None:
    """An entry as a number with its error ("41.79 ± 0.84"), a range ("0.9 to 2.1 over t"), a bound of shares in percent
    ("99.75 or more") or of sizes ("0.25 or less in size"); None of words."""
    words = text.split()
    try:
        first = float(words[0])
    except (ValueError, IndexError):
        return None
    match words[1:]:
        case []:
            return Printed(first, first)
        case ["±", error]:
            return Printed(first, first, float(error))
        case ["to", last, *_]:
            return Printed(first, float(last))
        case ["or", "more", *_]:
            return Printed(first, 100.0)
        case ["or", "less", *_]:
            return Printed(-first, first)
    return None


def row(*cells: str) -> str:
    """Where the numbers of a cell stand, of a difference of two, or of a difference of two such differences."""
    return "({} - {}) - ({} - {})".format(*cells) if len(cells) == 4 else " - ".join(cells)


def printed(measure: str, *cells: str) -> Printed | None:
    """The paper's number: the one that it prints, the sum of two differences that it prints, or else the difference of
    those of the cells, where it prints them."""
    if text := PRINTED.get(row(*cells), {}).get(measure):
        return read(text)
    if len(cells) == 1:
        ppl = read(PRINTED.get(cells[0], {}).get(measure.replace("nll", "ppl"), "")) if "nll" in measure else None
        return ppl and Printed(math.log(ppl.least), math.log(ppl.most), ppl.se / ppl.mean)
    if len(cells) == 2:
        if back := _step(measure, *cells):
            return back
        for middle in dict.fromkeys(name for pair in PRINTED for name in pair.split(" - ") if " - " in pair):
            one, other = _step(measure, cells[0], middle), _step(measure, cells[1], middle)
            if one and other:
                return difference(one, other)
    half = len(cells) // 2
    one, other = printed(measure, *cells[:half]), printed(measure, *cells[half:])
    return one and other and difference(one, other)


def _step(measure: str, a: str, b: str) -> Printed | None:
    """a - b, if either order of it is printed."""
    if text := PRINTED.get(row(a, b), {}).get(measure):
        return read(text)
    back = read(PRINTED.get(row(b, a), {}).get(measure, ""))
    return back and Printed(-back.most, -back.least, back.se)


@dataclass(frozen=True, kw_only=True)
class Beside(Results):
    """Results, and beside them what the paper prints for the same cells."""

    size: Any  # the study's preset
    words: Mapping[str, Any]  # and what is written down of it

    def theirs(self, measure: str) -> str:
        """A measure as the paper's: its judges are the first and the second, whatever their names here."""
        name, _, judge = measure.partition(":")
        i = self.judges.index(judge) if judge else 0
        return f"{name}:{i + 1}" if i else name

    def paper(self, row: str, measure: str) -> str:
        """As it is printed, if it is."""
        return PRINTED.get(row, {}).get(self.theirs(measure), "")

    def entries(self, cell: str, measures: Sequence[str]) -> tuple[Entry, ...]:
        """Fields of a table: each measure with its error, and the paper's beside."""
        return tuple(
            Entry(number(self(cell, measure), DIGITS.get(measure.partition(":")[0], 4)), self.paper(cell, measure))
            for measure in measures
        )

    def table(self, name: str, groups: Iterable[Iterable[Iterable[Entry]]], *columns: str) -> Table:
        """Rows under the caption and the head that the study's words give a table, and more columns."""
        words = self.words["tables"][name]
        heads = (one.format(size=self.size) for one in (*words["head"], *words.get("columns", ())))
        rows = tuple(tuple(map(tuple, group)) for group in groups)
        return Table(name, words["caption"].format(size=self.size), (*heads, *columns), rows, len(words["head"]))

    def measured(
        self, name: str, groups: Iterable[Mapping[str, Sequence[str]]], measures: Sequence[str] = ("ppl", "entropy")
    ) -> Table:
        """Measures of cells, which are given with what names their rows."""
        rows = (((*map(Entry, names), *self.entries(cell, measures)) for cell, names in one.items()) for one in groups)
        return self.table(name, rows, *(measure.partition(":")[2] or NAMES[measure] for measure in measures))

    def series(self, name: str, cells: Sequence[str], x: str | Sequence[float], y: str = "ppl", **style: Any) -> Series:
        """A line of a figure: a measure of some cells over numbers, or over another of their measures."""
        over = [self(cell, x).mean for cell in cells] if isinstance(x, str) else x
        return series(name, over, [self(cell, y) for cell in cells], **style)

    def noted(self, name: str, cells: Sequence[str], x: Sequence[float], y: str, note: str) -> Series:
        """A line of a figure with another measure at its points, in parentheses."""
        notes = tuple(f"({self(cell, note).mean:.2f})" for cell in cells)
        return self.series(name, cells, x, y, notes=notes)

    def finding(self, side: Side, name: str, *cells: str, measure: str = "nll", **bound: float) -> Finding:
        """On which side a difference falls, with the paper's."""
        paper = printed(self.theirs(measure), *cells)
        return side(name, self.contrast(*cells, measure=measure), paper=paper, **bound)

    def missing(self, reason: str) -> Estimate:
        """No value in any shard, and why."""
        shards = len(self.study.shards)
        return Estimate(np.full(shards, math.nan), (reason,) * shards)

    def findings(self, claim: Mapping[str, Any]) -> list[Finding]:
        """What a claim rests on by the study's words: every rule, at every combination of what it names."""
        found = []
        for rule in claim.get("findings", ()):
            each = {
                key: getattr(self.size, of) if isinstance(of, str) else of for key, of in rule.get("each", {}).items()
            }
            how = {key: rule[key] for key in ("measure", "bound") if key in rule}
            for values in product(*each.values()):
                at = {"size": self.size, **dict(zip(each, values, strict=True))}
                name, *cells = (text.format(**at) for text in (rule["name"], *rule["cells"]))
                found.append(self.finding(SIDES[rule["side"]], name, *cells, **how))
        return found


def ticks(at: Iterable[float]) -> tuple[tuple[float, str], ...]:
    """Of an axis, where there are points and nowhere else."""
    return tuple((float(x), f"{x:g}") for x in at)
