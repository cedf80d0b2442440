"""A table as Markdown and LaTeX, the paper's value in brackets after ours; and any of our Markdown as HTML."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from html import escape
from typing import Any

from limpet import style as looks
from limpet.errors import extra
from limpet.experiments.contents import Entry, Table

TEX = str.maketrans(
    {"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$", "±": r"$\pm$", "∞": r"$\infty$", "Δ": r"$\Delta$"}
)
# What Markdown would not leave as it is; an underscore within a word it does.
ACTIVE = re.compile(r"[\\`*\[\]<|]|(?<![^\W_])_|_(?![^\W_])|&(?=#?\w+;)")
ANCHOR = re.compile(r'</a>|<a id="[\w-]+">')  # the only HTML in our Markdown


def plain(text: str) -> str:
    """Words as Markdown that shows just them, on one line."""
    return ACTIVE.sub(lambda found: f"\\{found[0]}", " ".join(text.split()))


def markdown(table: Table) -> str:
    def line(texts: Iterable[str]) -> str:
        return "| " + " | ".join(texts) + " |"

    def shown(entry: Entry) -> str:
        text = f"[{plain(entry.text)}]({entry.link})" if entry.link else plain(entry.text)
        return f"{text} [{plain(entry.paper)}]".strip() if entry.paper else text

    rule = line("---" if i < table.names else "---:" for i in range(len(table.head)))
    rows = [line(map(shown, row)) for group in table.groups for row in group]
    caption = [plain(table.caption), ""] if table.caption else []
    return "\n".join([*caption, line(map(plain, table.head)), rule, *rows, ""])


def latex(table: Table) -> str:
    def line(texts: Iterable[str]) -> str:
        return " & ".join(text.translate(TEX) for text in texts) + r" \\"

    def shown(entry: Entry) -> str:
        return f"{entry.text} [{entry.paper}]".strip() if entry.paper else entry.text

    groups = [[line(map(shown, row)) for row in group] for group in table.groups]
    body = [text for i, group in enumerate(groups) for text in ([r"\midrule"] if i else []) + group]
    columns = "l" * table.names + "r" * (len(table.head) - table.names)
    top, bottom = [r"\begin{table}[H]", r"\centering", r"\small"], [r"\end{table}", ""]
    return "\n".join([
        *top, rf"\begin{{tabular}}{{@{{}}{columns}@{{}}}}", r"\toprule", line(table.head), r"\midrule", *body,
        r"\bottomrule", r"\end{tabular}", rf"\caption{{{table.caption.translate(TEX)}}}", *bottom,
    ])  # fmt: skip


def html(text: str, figures: Mapping[str, bytes] = {}) -> str:
    """Our Markdown as HTML: an image that is one of `figures`, SVG by address, is drawn in place, a link to another
    report's Markdown leads to its page, and of HTML nothing but an anchor is let through."""
    reader = extra("markdown_it", "lab").MarkdownIt("commonmark").enable("table")

    def image(self: Any, tokens: Any, at: int, options: Any, env: Any) -> str:
        svg = figures[tokens[at].attrs["src"]].decode()
        drawn = "\n".join(map(str.strip, looks.recoloured(svg[svg.index("<svg") :]).splitlines()))
        caption = escape(self.renderInlineAsText(tokens[at].children, options, env))
        drawn = drawn.replace("<svg", f'<svg role=img aria-label="{caption}"', 1)
        wide = f"<span class=wide tabindex=0 role=group aria-label=Figure>{drawn}</span>"
        return f"<span class=figure>{wide}{caption}</span>"

    def link(self: Any, tokens: Any, at: int, options: Any, env: Any) -> str:
        return f'<a href="{escape(tokens[at].attrs["href"].replace("/report.md", "/index.html"))}">'

    def raw(self: Any, tokens: Any, at: int, options: Any, env: Any) -> str:
        content = tokens[at].content
        return content if ANCHOR.fullmatch(content) else escape(content)

    for kind, rule in {"image": image, "link_open": link, "html_inline": raw, "html_block": raw}.items():
        reader.add_render_rule(kind, rule)
    return str(reader.render(text))


OUTCOMES = {
    "yes": ("supported", "holds", "below"), "no": ("not supported", "fails", "above"), "wait": ("inconclusive", "open"),
}  # fmt: skip


def marked(page: str) -> str:
    """A page whose verdicts can be told at a glance, by colour and by shape, and whose tables scroll by themselves."""
    for kind, words in OUTCOMES.items():
        said = "|".join(words)
        page = re.sub(f"<strong>({said})</strong>", rf"<strong class={kind}>\1</strong>", page)
        page = re.sub(f"(<td[^>]*>)({said})(?=[,<])", rf"\1<span class={kind}>\2</span>", page)
        page = re.sub(f"(<td[^>]*>[^<]*, )({said})(?=</td>)", rf"\1<span class={kind}>\2</span>", page)
    page = page.replace("<table>", "<div class=wide tabindex=0 role=group aria-label=Table><table>")
    return page.replace("</table>", "</table></div>")


def contents(page: str) -> tuple[str, str]:
    """A page whose sections have names, and links to them."""
    found: list[str] = []

    def name(heading: re.Match[str]) -> str:
        found.append(heading[1])
        return f'<h2 id="part-{len(found)}">{heading[1]}</h2>'

    page = re.sub("<h2>(.*?)</h2>", name, page)
    return page, "".join(f'<a href="#part-{i}">{words}</a>' for i, words in enumerate(found, 1))


def terse(page: str) -> str:
    """A page with its tables in half the bytes: without the end tags that HTML does not need, and with numbers set to
    the right by the page's style sheet instead of each by a style of its own."""
    page = re.sub(r"</t[dhr]>\n", "", page)
    return re.sub(r"<(t[dh])>", r"<\1 class=l>", page).replace(' style="text-align:right"', "")


FORMATS: dict[str, Callable[[Table], str]] = {"html": lambda table: html(markdown(table)), "md": markdown, "tex": latex}
