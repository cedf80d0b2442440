"""The look that pages and figures share: one style sheet, which holds every colour, and what each colour stands for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

# What has a colour of its own, by the words in its name; what is named by none of them takes the others in turn.
FAMILIES = {"mend": ("mend",), "crs": ("crs",), "top-p": ("top-p", "top_p"), "native": ("native", "revisable")}
OTHERS = ("rival0", "rival1", "rival2", "ink")
COLOURS = ("native", "top-p", "crs", "mend", *OTHERS)


@cache
def sheet() -> str:
    return Path(__file__).with_suffix(".css").read_text(encoding="utf-8")


@cache
def colours(dark: bool = False) -> dict[str, str]:
    """#rrggbb by the name that it has in the style sheet."""
    part = sheet().split("@media (prefers-color-scheme: dark)")[dark].split("}")[0]
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", part))


def family(name: str) -> str | None:
    """Of which family something is, by its name: a series, an arm, a sampler."""
    words = name.lower()
    return next((key for key, signs in FAMILIES.items() if any(sign in words for sign in signs)), None)


def coloured(names: Sequence[str]) -> list[str]:
    """Which colour each of several things that stand together has."""
    others = list(dict.fromkeys(name for name in names if family(name) is None))
    return [family(name) or OTHERS[others.index(name) % len(OTHERS)] for name in names]


def recoloured(drawing: str) -> str:
    """An SVG whose colours are the page's own, so that they follow it into the dark."""
    names = {value: name for name, value in colours().items() if name in (*COLOURS, "card", "soft", "line")}
    return re.sub(
        r"#[0-9a-f]{6}\b", lambda found: f"var(--{names[found[0]]})" if found[0] in names else found[0], drawing
    )
