"""Generated blocks of a page. Each stands between the lines `<!-- NAME -->` and `<!-- end -->`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from limpet.errors import LimpetError


def put(page: Path, name: str, block: str) -> None:
    """Replace the block of a page that has this name."""
    text = page.read_text(encoding="utf-8")
    pattern = re.compile(f"(<!-- {re.escape(name)} -->\n).*?(<!-- end\\b[^>]*-->)", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise LimpetError(f"{page} must have exactly one block {name!r}: put <!-- {name} --> and <!-- end --> there")
    content = block.rstrip("\n") + "\n"
    page.write_text(pattern.sub(lambda found: f"{found[1]}{content}{found[2]}", text), encoding="utf-8")


def block_of(page: Path, name: str) -> str:
    """The block of a page that has this name."""
    found = re.search(f"<!-- {re.escape(name)} -->\n(.*?)\n<!-- end\\b", page.read_text(encoding="utf-8"), re.DOTALL)
    return found[1] if found else ""


def machines(computed_on: Iterable[Mapping[str, Any]]) -> str:
    """In which precision and on which machines numbers were computed, from their provenance."""
    found = {
        f"{one['precision']} on {'a CPU' if one['device'].startswith('cpu') else one['device']}" for one in computed_on
    }
    return " and in ".join(sorted(found))
