"""A table of results that prints as plain text, and as HTML in a notebook."""

from itertools import zip_longest
from textwrap import wrap
from typing import NamedTuple

from limpet import html

HEAD_WIDTH = 18  # characters of a line of a column's name


class ResultTable(NamedTuple):
    """A caption, column names and rows of texts; the first column names the row."""

    caption: str
    head: list[str]
    rows: list[list[str]]

    def __str__(self) -> str:
        head = zip_longest(*(wrap(name, HEAD_WIDTH) for name in self.head), fillvalue="")
        first, *others = zip(*head, *self.rows, strict=True)  # column by column
        columns = [[text.ljust(max(map(len, first))) for text in first]]
        columns += [[text.rjust(max(map(len, column))) for text in column] for column in others]
        return "\n".join([self.caption, *("  ".join(row).rstrip() for row in zip(*columns, strict=True))])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return html.table(self.caption, self.head, self.rows)
