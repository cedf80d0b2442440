"""The paper's statements as code that runs: each file evaluates one of them on sources whose distributions are known.

A statement has `sides()`, what stands on its two sides on each source, with computed verdicts, and `panels()` of a
figure. The words stand in theory.toml."""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from limpet.experiments.contents import Panel
from limpet.paper.theory.sides import Sides as Sides


class Statement(NamedTuple):
    """One entry of the table of statements."""

    says: str
    where: str  # in the paper
    shows: str  # the figure
    sides: Callable[[], list[Sides]]
    panels: Callable[[], Iterable[Panel]]


STATEMENTS = {}
for _name, _words in tomllib.loads(Path(__file__).with_name("theory.toml").read_text("utf-8")).items():
    _module = importlib.import_module(f"{__name__}.{_name.replace('-', '_')}")
    STATEMENTS[_name] = Statement(**_words, sides=_module.sides, panels=_module.panels)
