"""What stands inside a page: JSON that cannot end its script, the hash by which the page's security policy names a
script or a style, and for notebooks a table and a page within the page."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Sequence
from typing import Any


def for_script(value: Any) -> str:
    """JSON that may stand inside a <script> element: nothing in it can end the element or open a comment."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def hashed(text: str) -> str:
    """A script or a style, as a policy lets it through."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of plain texts, whose line breaks stay."""
    cell = "<{0} style='text-align:left;vertical-align:top;white-space:pre-wrap'>{1}</{0}>"

    def line(kind: str, texts: Sequence[str]) -> str:
        return f"<tr>{''.join(cell.format(kind, html.escape(text)) for text in texts)}</tr>"

    body = "".join(line("td", row) for row in rows)
    title = f"<caption style='text-align:left;white-space:pre-line'>{html.escape(caption)}</caption>"
    return f"<table>{title}{line('th', head)}{body}</table>"


def framed(page: str, height: int = 720) -> str:
    """A whole page in a frame of its own: its scripts run there and reach nothing outside of it."""
    return (
        f'<iframe sandbox="allow-scripts allow-downloads" srcdoc="{html.escape(page)}" width="100%" height="{height}" '
        'style="border:0"></iframe>'
    )
