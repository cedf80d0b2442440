"""Parts of HTML pages: JSON in a script, hashes for a security policy, tables, and a page within a notebook."""

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Sequence
from typing import Any


def for_script(value: Any) -> str:
    """JSON for the inside of a <script> element: nothing in it can end the element or open a comment."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def policy_hash(text: str) -> str:
    """The hash by which a content security policy allows a script or a style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of plain texts. Line breaks are kept."""
    cell = "<{0} style='text-align:left;vertical-align:top;white-space:pre-wrap'>{1}</{0}>"

    def line(kind: str, texts: Sequence[str]) -> str:
        return f"<tr>{''.join(cell.format(kind, html.escape(text)) for text in texts)}</tr>"

    body = "".join(line("td", row) for row in rows)
    title = f"<caption style='text-align:left;white-space:pre-line'>{html.escape(caption)}</caption>"
    return f"<table>{title}{line('th', head)}{body}</table>"


def frame(page: str, height: int = 720) -> str:
    """A whole page in an iframe. Its scripts cannot reach anything outside of it."""
    return (
        f'<iframe sandbox="allow-scripts allow-downloads" srcdoc="{html.escape(page)}" width="100%" height="{height}" '
        'style="border:0"></iframe>'
    )
