"""Blocks of a page that a tool makes: each stands between the lines `<!-- NAME -->` and `<!-- end -->`, and says where
its numbers are from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from limpet.errors import LimpetError


def put(page: Path, name: str, block: str) -> None:
    """Write a block in place of the one that the page has by that name."""
    text = page.read_text(encoding="utf-8")
    marks = re.compile(f"(<!-- {re.escape(name)} -->\n).*?(<!-- end\\b[^>]*-->)", re.DOTALL)
    if len(marks.findall(text)) != 1:
        raise LimpetError(f"{page} has no one place for {name!r}: put <!-- {name} --> and <!-- end --> on lines there")
    whole = block.rstrip("\n") + "\n"
    page.write_text(marks.sub(lambda found: f"{found[1]}{whole}{found[2]}", text), encoding="utf-8")


def places(made_on: Iterable[Mapping[str, Any]]) -> str:
    """In what precision and on which machines numbers were made, from their provenance."""
    found = {
        f"{one['precision']} on {'a CPU' if one['device'].startswith('cpu') else one['device']}" for one in made_on
    }
    return " and in ".join(sorted(found))
