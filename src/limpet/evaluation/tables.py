"""A table of results that prints as plain text and as HTML in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from limpet import html


class Table(NamedTuple):
    """A caption, column names and rows of texts; the first column names the row."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.head, *self.rows, strict=True)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(text.rjust(w) for text, w in zip(row[1:], widths[1:], strict=True))])
            for row in (self.head, *self.rows)
        ]
        return "\n".join([self.caption, *(line.rstrip() for line in lines)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html.table(self.caption, self.head, self.rows)
