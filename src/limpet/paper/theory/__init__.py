"""The paper's statements as code that runs: each module evaluates one where every distribution is known.

A module has `checks()`, the rows of its table, and perhaps `panels()`, the panels of a figure. theory.toml has the
titles."""

import importlib
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from limpet.experiments import Panel
from limpet.paper.theory.checks import Check as Check


class Statement(NamedTuple):
    """One entry of the table of statements."""

    summary: str
    where: str  # in the paper
    checks: Callable[[], list[Check]]
    panels: Callable[[], Iterable[Panel]] | None  # of its figure, if it has one
    caption: str = ""  # of the figure


STATEMENTS: dict[str, Statement] = {}
for _name, _texts in tomllib.loads(Path(__file__).with_name("theory.toml").read_text("utf-8")).items():
    _module = importlib.import_module(f"{__name__}.{_name.replace('-', '_')}")
    STATEMENTS[_name] = Statement(**_texts, checks=_module.checks, panels=getattr(_module, "panels", None))
