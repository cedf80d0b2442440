"""The style that pages and figures share: one style sheet with every colour, and which colour stands for what."""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

# Families with a colour of their own, by the words in a name. Other names share the colours of OTHERS.
FAMILIES = {"mend": ("mend",), "crs": ("crs",), "top-p": ("top-p", "top_p"), "native": ("native", "revisable")}
OTHERS = ("rival0", "rival1", "rival2", "ink")
COLOURS = ("native", "top-p", "crs", "mend", *OTHERS)


@cache
def style_sheet() -> str:
    """The content of style.css."""
    return Path(__file__).with_suffix(".css").read_text(encoding="utf-8")


@cache
def colours(dark: bool = False) -> dict[str, str]:
    """The colours of the style sheet: name -> #rrggbb."""
    part = style_sheet().split("@media (prefers-color-scheme: dark)")[dark].split("}")[0]
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", part))


def family(name: str) -> str | None:
    """The family of a series or a sampler, by its name. None for others."""
    words = name.lower()
    return next((key for key, signs in FAMILIES.items() if any(sign in words for sign in signs)), None)


def assign_colours(names: Sequence[str]) -> list[str]:
    """The name of a colour for each of several series in one figure or table."""
    others = list(dict.fromkeys(name for name in names if family(name) is None))
    return [family(name) or OTHERS[others.index(name) % len(OTHERS)] for name in names]


def with_page_colours(drawing: str) -> str:
    """An SVG whose colours are variables of the page, so that they follow its dark mode."""
    names = {value: name for name, value in colours().items() if name in (*COLOURS, "card", "soft", "line")}
    return re.sub(
        r"#[0-9a-f]{6}\b", lambda found: f"var(--{names[found[0]]})" if found[0] in names else found[0], drawing
    )
