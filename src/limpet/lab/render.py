"""A table as HTML, Markdown and LaTeX; the paper's value stands in brackets after ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html import escape

from limpet.lab.page import Entry, Table

TEX = str.maketrans(
    {"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$", "±": r"$\pm$", "∞": r"$\infty$", "Δ": r"$\Delta$"}
)


def html(table: Table) -> str:
    def place(entry: Entry, tag: str) -> str:
        paper = f" <span class=paper>[{escape(entry.paper)}]</span>" if entry.paper else ""
        return f"<{tag}>{escape(entry.text)}{paper}</{tag}>"

    def row(entries: tuple[Entry, ...]) -> str:
        cells = (place(entry, "th scope=row" if i < table.labels else "td") for i, entry in enumerate(entries))
        return "<tr>" + "".join(cells).replace("</th scope=row>", "</th>") + "</tr>"

    head = "".join(f"<th scope=col>{escape(name)}</th>" for name in table.head)
    bodies = "".join("<tbody>" + "".join(map(row, group)) + "</tbody>" for group in table.groups)
    caption = f"<caption>{escape(table.caption)}</caption>" if table.caption else ""
    return f"<table>{caption}<thead><tr>{head}</tr></thead>{bodies}</table>\n"


def markdown(table: Table) -> str:
    def line(texts: Iterator[str]) -> str:
        return "| " + " | ".join(text.replace("|", r"\|") for text in texts) + " |"

    rule = line("---" if i < table.labels else "---:" for i in range(len(table.head)))
    rows = [line(_bracketed(entry) for entry in row) for group in table.groups for row in group]
    caption = [table.caption, ""] if table.caption else []
    return "\n".join([*caption, line(iter(table.head)), rule, *rows, ""])


def latex(table: Table) -> str:
    def line(texts: Iterator[str]) -> str:
        return " & ".join(text.translate(TEX) for text in texts) + r" \\"

    groups = [[line(_bracketed(entry) for entry in row) for row in group] for group in table.groups]
    body = [text for i, group in enumerate(groups) for text in ([r"\midrule"] if i else []) + group]
    columns = "l" * table.labels + "r" * (len(table.head) - table.labels)
    top, bottom = [r"\begin{table}[H]", r"\centering", r"\small"], [r"\end{table}", ""]
    return "\n".join([
        *top, rf"\begin{{tabular}}{{@{{}}{columns}@{{}}}}", r"\toprule", line(iter(table.head)), r"\midrule", *body,
        r"\bottomrule", r"\end{tabular}", rf"\caption{{{table.caption.translate(TEX)}}}", *bottom,
    ])  # fmt: skip


def _bracketed(entry: Entry) -> str:
    return f"{entry.text} [{entry.paper}]".strip() if entry.paper else entry.text


FORMATS: dict[str, Callable[[Table], str]] = {"html": html, "md": markdown, "tex": latex}
