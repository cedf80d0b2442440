"""What a self-contained page takes inside: JSON that cannot end its script, and the hash by which the page's security
policy names a script or a style."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any


def for_script(value: Any) -> str:
    """JSON that may stand inside a <script> element: nothing in it can end the element or open a comment."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def hashed(text: str) -> str:
    """A script or a style, as a policy lets it through."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
