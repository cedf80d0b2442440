"""The numbers that the paper prints, and results with those numbers beside them."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from limpet.evaluation import Estimate
from limpet.experiments import (
    SIDES,
    Contrast,
    Entry,
    Finding,
    PublishedValue,
    Results,
    Series,
    Table,
    estimate_series,
    format_estimate,
    published_difference,
)
from limpet.paper.studies.presets import combinations, filled, read_toml

METRIC_CAPTIONS = {
    "ppl": "GenPPL",
    "entropy": "Entropy",
    "dist-4": "Dist-4",
    "rep-4": "Rep-4",
    "self-bleu": "Self-BLEU",
    "mauve": "MAUVE",
}
DIGITS = {"ppl": 2, "entropy": 3, "committed": 2, "visible": 2}  # of a measure in a table; 4 for the others
Claims = Mapping[str, Sequence[Finding]]  # the findings of each claim of a study

# By study, row and measure. Rows of the same name are of the same cells, so that studies can share them.
TABLES: dict[str, dict[str, dict[str, str]]] = read_toml("paper.toml")
PRINTED = {row: texts for rows in TABLES.values() for row, texts in rows.items()}
NOT_IN_PAPER = ("samplers", "forms", "pareto", "interleave", "truth", "revision")  # studies of limpet's own


def parse_published(text: str) -> PublishedValue | None:
    """A printed entry as a number: "41.79 ± 0.84", "0.9 to 2.1 over t", "99.75 or more" (percent), "0.25 or less in
    size". None for words."""
    words = text.split()
    try:
        first = float(words[0])
    except (ValueError, IndexError):
        return None
    match words[1:]:
        case []:
            return PublishedValue(first, first)
        case ["±", error]:
            return PublishedValue(first, first, float(error))
        case ["to", last, *_]:
            return PublishedValue(first, float(last))
        case ["or", "more", *_]:
            return PublishedValue(first, 100.0)
        case ["or", "less", *_]:
            return PublishedValue(-first, first)
    return None


def row_name(*cells: str) -> str:
    """The row of a cell, of a difference of two, or of a difference of two such differences."""
    return "({} - {}) - ({} - {})".format(*cells) if len(cells) == 4 else " - ".join(cells)


def published(measure: str, *cells: str) -> PublishedValue | None:
    """The paper's value of a measure, or of a difference of it between cells.

    A printed value is used if there is one, then the sum of two printed differences, then the difference of printed
    values."""
    if text := PRINTED.get(row_name(*cells), {}).get(measure):
        return parse_published(text)
    if len(cells) == 1:
        ppl = _parse_row(cells[0], measure.replace("nll", "ppl")) if "nll" in measure else None
        return ppl and PublishedValue(math.log(ppl.low), math.log(ppl.high), ppl.se / ppl.mean)
    if len(cells) == 2:
        if direct := _printed_difference(measure, *cells):
            return direct
        for middle in dict.fromkeys(name for pair in PRINTED for name in pair.split(" - ") if " - " in pair):
            one, other = (_printed_difference(measure, cell, middle) for cell in cells)
            if one and other:
                return published_difference(one, other)
    half = len(cells) // 2
    one, other = published(measure, *cells[:half]), published(measure, *cells[half:])
    return one and other and published_difference(one, other)


def _parse_row(row: str, measure: str) -> PublishedValue | None:
    return parse_published(PRINTED.get(row, {}).get(measure, ""))


def _printed_difference(measure: str, a: str, b: str) -> PublishedValue | None:
    """a - b, if either order of it is printed."""
    if forward := _parse_row(row_name(a, b), measure):
        return forward
    back = _parse_row(row_name(b, a), measure)
    return back and PublishedValue(-back.high, -back.low, back.se)


@dataclass(frozen=True, kw_only=True)
class PaperResults(Results):
    """Results of a study, with the paper's numbers beside them."""

    preset: Any  # of the study
    study_texts: Mapping[str, Any]  # of the study, from studies.toml or audits.toml

    def paper_measure(self, measure: str) -> str:
        """The paper's name of a measure: its judges are the first and the second, whatever their names here."""
        name, _, judge = measure.partition(":")
        i = self.judges.index(judge) if judge else 0
        return f"{name}:{i + 1}" if i else name

    def paper_text(self, row: str, measure: str) -> str:
        """What the paper prints, or nothing."""
        rows = {} if self.study.name in NOT_IN_PAPER else PRINTED
        return rows.get(row, {}).get(self.paper_measure(measure), "")

    def entries(self, cell: str, measures: Sequence[str]) -> tuple[Entry, ...]:
        """Table entries: each measure of a cell with its error, and the paper's value."""
        digits = (DIGITS.get(measure.partition(":")[0], 4) for measure in measures)
        return tuple(
            Entry(format_estimate(self(cell, measure), count), self.paper_text(cell, measure))
            for measure, count in zip(measures, digits, strict=True)
        )

    def table(self, name: str, groups: Iterable[Iterable[Iterable[Entry]]], *columns: str, **fields: str) -> Table:
        """A table with the caption and columns from the study's texts, and more columns.

        name: of the table in the texts; a suffix after "/" tells several apart. fields: what else the caption names."""
        texts = self.study_texts["tables"][name.partition("/")[0]]
        head = tuple(one.format(preset=self.preset) for one in (*texts["head"], *texts.get("columns", ())))
        rows = tuple(tuple(map(tuple, group)) for group in groups)
        caption = texts["caption"].format(preset=self.preset, **fields)
        return Table(name.replace("/", "-").replace(" ", "-"), caption, (*head, *columns), rows, len(texts["head"]))

    def measure_table(
        self, name: str, groups: Iterable[Mapping[str, Sequence[str]]], measures: Sequence[str] = ("ppl", "entropy")
    ) -> Table:
        """A table of measures of cells; `groups` give each cell the texts that name its row."""
        rows = (
            ((*map(Entry, names), *self.entries(cell, measures)) for cell, names in group.items()) for group in groups
        )
        return self.table(name, rows, *(measure.partition(":")[2] or METRIC_CAPTIONS[measure] for measure in measures))

    def defined_tables(self) -> Iterator[Table]:
        """The tables of measures whose rows the study's texts define."""
        for name, texts in self.study_texts.get("tables", {}).items():
            groups: dict[Any, dict[str, list[str]]] = {}
            for i, rule in enumerate(texts.get("rows", ())):
                for fields in combinations(rule, self.preset):
                    cell, *names = filled([rule["cell"], *rule["names"]], fields)
                    groups.setdefault((i, fields.get(rule.get("group"))), {})[cell] = names
            if groups:
                of_judges = [f"ppl:{judge}" for judge in self.judges]
                each = (of_judges if one == "ppl of each judge" else [one] for one in texts["measures"])
                yield self.measure_table(name, groups.values(), [one for some in each for one in some])

    def series(self, name: str, cells: Sequence[str], x: str | Sequence[float], y: str = "ppl", **style: Any) -> Series:
        """A line of a figure: a measure of some cells against numbers, or against another of their measures."""
        values = [self(cell, x).mean for cell in cells] if isinstance(x, str) else x
        return estimate_series(name, values, [self(cell, y) for cell in cells], **style)

    def annotated_series(self, name: str, cells: Sequence[str], x: Sequence[float], y: str, note: str) -> Series:
        """A line of a figure with another measure at its points, in parentheses."""
        notes = tuple(f"({self(cell, note).mean:.2f})" for cell in cells)
        return self.series(name, cells, x, y, notes=notes)

    def at_equal(self, cell: str, on: str = "entropy", measure: str = "nll") -> Estimate:
        """A cell minus its model's global top-p at equal diversity, on the part of the curve that does not fold."""
        role = cell.partition("/")[0]
        return self.matched(cell, [f"{role}/p/{p}" for p in self.preset.curve_top_ps[role]], on, measure)

    def finding(
        self, make: Callable[..., Finding], name: str, *cells: str, measure: str = "nll", on: str = "", **bound: float
    ) -> Finding:
        """A finding about a difference of cells, or about a cell against global top-p at equal `on`, with the paper's
        value.

        measure: "nll:2" is under the second judge, which may be missing here."""
        if on:
            estimate, cells = self.at_equal(cells[0], on, measure), (f"{cells[0]} at equal {on}",)
        elif measure != "nll:2":
            estimate, measure = self.contrast(*cells, measure=measure), self.paper_measure(measure)
        elif len(self.judges) > 1:
            name, estimate = f"{name} ({self.judges[1]})", self.contrast(*cells, measure=f"nll:{self.judges[1]}")
        else:
            name, estimate = f"{name} (second judge)", self.missing("one judge here")
        return make(name, estimate, paper=published(measure, *cells), **bound)

    def missing(self, reason: str) -> Estimate:
        """An estimate without a value in any seed, and why."""
        count = len(self.study.seeds)
        return Estimate(np.full(count, math.nan), (reason,) * count)

    def expanded(self, rule: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
        """The name and the cells of a rule of the study's texts, at every combination of its `each`."""
        for fields in combinations(rule, self.preset):
            name, *cells = (text.format(**fields) for text in (rule["name"], *rule["cells"]))
            yield name, cells

    def defined_findings(self, claim: Mapping[str, Any]) -> list[Finding]:
        """The findings that the study's texts define for a claim."""
        found = []
        for rule in claim.get("findings", ()):
            options = {name: rule[name] for name in ("measure", "bound", "on") if name in rule}
            found += [self.finding(SIDES[rule["side"]], name, *cells, **options) for name, cells in self.expanded(rule)]
        return found

    def defined_contrasts(self) -> Iterator[Contrast]:
        """The contrasts of NLL that the study's texts define, under the first judge or under one after the other."""
        rules, by_judge = self.study_texts.get("contrasts", ()), self.study_texts.get("contrasts_by_judge", False)
        judges = {f"nll:{judge}": f" ({judge})" for judge in self.judges} if by_judge else {"nll": ""}
        for (measure, suffix), rule in product(judges.items(), rules):
            for name, cells in self.expanded(rule):
                if on := rule.get("on", ""):
                    row, estimate = f"{cells[0]} at equal {on}", self.at_equal(cells[0], on)
                else:
                    row, estimate = row_name(*cells), self.contrast(*cells, measure=measure)
                paper = self.paper_text(row, measure) if rule.get("paper") == "printed" else ""
                if rule.get("paper") == "derived" and (value := published("nll", *cells)):
                    paper = f"{value.mean:+.3f}"
                yield Contrast(name + suffix, estimate, paper)


def ticks(values: Iterable[float]) -> tuple[tuple[float, str], ...]:
    """Axis ticks at the points and nowhere else."""
    return tuple((float(x), f"{x:g}") for x in values)
