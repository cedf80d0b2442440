"""Tables as Markdown and LaTeX, and our Markdown as HTML. The paper's value stands in brackets after ours."""

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from html import escape, unescape
from typing import Any

from limpet import style
from limpet.errors import import_extra
from limpet.experiments.report_content import Entry, Table

TEX = str.maketrans(
    {"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$", "±": r"$\pm$", "∞": r"$\infty$", "Δ": r"$\Delta$"}
)
# What Markdown would interpret. It leaves an underscore within a word alone.
ACTIVE = re.compile(r"[\\`*\[\]<|]|(?<![^\W_])_|_(?![^\W_])|&(?=#?\w+;)")
ANCHOR = re.compile(r'</a>|<a id="[\w-]+">')  # the only HTML in our Markdown


def escape_markdown(text: str) -> str:
    """Words as Markdown that shows exactly them, on one line."""
    return ACTIVE.sub(lambda found: f"\\{found[0]}", " ".join(text.split()))


def markdown(table: Table) -> str:
    """A table as Markdown, its caption above it."""

    def line(texts: Iterable[str]) -> str:
        return "| " + " | ".join(texts) + " |"

    def field(entry: Entry) -> str:
        text = escape_markdown(entry.text)
        text = f"[{text}]({entry.link})" if entry.link else text
        return f"{text} [{escape_markdown(entry.paper)}]".strip() if entry.paper else text

    rule = line("---" if i < table.names else "---:" for i in range(len(table.head)))
    rows = [line(map(field, row)) for group in table.groups for row in group]
    caption = [escape_markdown(table.caption), ""] if table.caption else []
    return "\n".join([*caption, line(map(escape_markdown, table.head)), rule, *rows, ""])


def latex(table: Table) -> str:
    """A table as LaTeX with booktabs."""

    def line(texts: Iterable[str]) -> str:
        return " & ".join(text.translate(TEX) for text in texts) + r" \\"

    def field(entry: Entry) -> str:
        return f"{entry.text} [{entry.paper}]".strip() if entry.paper else entry.text

    groups = [[line(map(field, row)) for row in group] for group in table.groups]
    body = [text for i, group in enumerate(groups) for text in ([r"\midrule"] if i else []) + group]
    columns = "l" * table.names + "r" * (len(table.head) - table.names)
    lines = [
        r"\begin{table}[H]",
        r"\centering",
        r"\small",
        rf"\begin{{tabular}}{{@{{}}{columns}@{{}}}}",
        r"\toprule",
        line(table.head),
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
        rf"\caption{{{table.caption.translate(TEX)}}}",
        r"\end{table}",
        "",
    ]
    return "\n".join(lines)


def html(text: str, figures: Mapping[str, bytes] = {}) -> str:
    """Our Markdown as HTML.

    figures: SVG files by address; an image with one of these addresses is drawn in place. A link to another report's
    Markdown leads to its page. No HTML but an anchor passes."""
    reader = import_extra("markdown_it", "lab").MarkdownIt("commonmark").enable("table")

    def image(self: Any, tokens: Any, index: int, options: Any, env: Any) -> str:
        svg = figures[tokens[index].attrs["src"]].decode()
        drawing = "\n".join(map(str.strip, style.with_page_colours(svg[svg.index("<svg") :]).splitlines()))
        caption = escape(self.renderInlineAsText(tokens[index].children, options, env))
        drawing = drawing.replace("<svg", f'<svg role=img aria-label="{caption}"', 1)
        number = env["figures"] = env.get("figures", 0) + 1
        wide = f'<span class=wide tabindex=0 role=group aria-label="Figure {number}">{drawing}</span>'
        return f"<span class=figure>{wide}{caption}</span>"

    def link(self: Any, tokens: Any, index: int, options: Any, env: Any) -> str:
        return f'<a href="{escape(tokens[index].attrs["href"].replace("/report.md", "/index.html"))}">'

    def raw(self: Any, tokens: Any, index: int, options: Any, env: Any) -> str:
        content = tokens[index].content
        return content if ANCHOR.fullmatch(content) else escape(content)

    for kind, rule in {"image": image, "link_open": link, "html_inline": raw, "html_block": raw}.items():
        reader.add_render_rule(kind, rule)
    return str(reader.render(text, {}))


OUTCOMES = {  # by the class that the style sheet gives a colour and a sign
    "yes": ("supported", "holds", "below"),
    "no": ("not supported", "fails", "above"),
    "wait": ("inconclusive", "open"),
}


def mark_verdicts(page: str) -> str:
    """A page whose verdicts differ in colour and sign."""
    for kind, words in OUTCOMES.items():
        verdict = "|".join(words)
        page = re.sub(f"<strong>({verdict})</strong>", rf"<strong class={kind}>\1</strong>", page)
        page = re.sub(f"(<td[^>]*>)({verdict})(?=[,<])", rf"\1<span class={kind}>\2</span>", page)
        page = re.sub(f"(<td[^>]*>[^<]*, )({verdict})(?=</td>)", rf"\1<span class={kind}>\2</span>", page)
    return page


TABLE = re.compile(
    r"(<p>(?P<caption>[^<]*)</p>\n)?<table>\n(?P<head><thead>.*?</thead>)\n<tbody>\n(?P<rows>.*?)</tbody>\n</table>",
    re.S,
)
FOLDED_ROWS = 30  # a table with more is folded by its first column
FOLDED_FINDINGS = 5  # of a claim


def fold_tables(page: str) -> str:
    """A page whose tables scroll by themselves and have names, and whose long ones are folded.

    A long table becomes one folded part for each value of its first column, in a part of its own: the first is open."""
    count = itertools.count(1)
    long = itertools.count()

    def scrolling(head: str, rows: str, name: str) -> str:
        title = f"Table {next(count)}{': ' if name else ''}{name}"[:90]
        table = f"<table>\n{head}\n<tbody>\n{rows}</tbody>\n</table>"
        return f'<div class=wide tabindex=0 role=group aria-label="{escape(unescape(title))}">{table}</div>'

    def fold(found: re.Match[str]) -> str:
        caption, head, rows = found["caption"] or "", found["head"], found["rows"]
        every = re.findall(r"<tr>.*?</tr>\n", rows, re.S)
        if "<th>finding</th>" in head and len(every) > FOLDED_FINDINGS:
            table = scrolling(head, rows, "findings")
            return f"{found[1] or ''}<details><summary>{len(every)} findings</summary>{table}</details>"
        if len(every) <= FOLDED_ROWS or "<th>Where</th>" in head:
            return (found[1] or "") + scrolling(head, rows, caption)
        parts = []
        for name, group in itertools.groupby(every, lambda row: re.split("</?td[^>]*>", row)[1]):
            own = list(group)
            table = scrolling(head, "".join(own), name)
            parts.append(f"<details><summary>{name} ({len(own)})</summary>{table}</details>")
        is_open = "" if next(long) else " open"
        return f"<details class=rows{is_open}><summary>{caption or 'Rows'}</summary>{''.join(parts)}</details>"

    return TABLE.sub(fold, page)


def link_sections(page: str) -> tuple[str, str]:
    """A page whose sections have anchors, and links to them."""
    found: list[str] = []

    def anchor(heading: re.Match[str]) -> str:
        found.append(heading[1])
        return f'<h2 id="part-{len(found)}">{heading[1]}</h2>'

    page = re.sub("<h2>(.*?)</h2>", anchor, page)
    return page, "".join(f'<a href="#part-{i}">{title}</a>' for i, title in enumerate(found, 1))


def minify(page: str) -> str:
    """A page with its tables in half the bytes: without optional end tags and without a style for each number."""
    page = re.sub(r"</t[dhr]>\n", "", page)
    return re.sub(r"<(t[dh])>", r"<\1 class=l>", page).replace(' style="text-align:right"', "")


FORMATS: dict[str, Callable[[Table], str]] = {"html": lambda table: html(markdown(table)), "md": markdown, "tex": latex}
