"""The paper's tables and figures as studies: one small file each, with a title, its cells at a preset's size, and what
it shows of their results: tables, figures, contrasts and claims."""

from __future__ import annotations

import importlib
from dataclasses import fields
from typing import Any

from limpet.errors import LimpetError
from limpet.lab.page import Page
from limpet.lab.results import Results
from limpet.lab.study import Study
from limpet.studies.presets import PRESETS, Preset, preset, sized
from limpet.studies.published import Beside

STUDIES = {
    "nfe-scaling": "GenPPL and entropy over network calls: tables 2 and 3, figure 2 a-b",
    "frontier": "top-p against CRS budgets at equal calls: table 5, figure 2 c-d",
    "endpoint": "ancestral or argmax at the last call, on the same paths: table 4",
    "warmup": "selection that starts later, by how long labels stay visible: tables 6 and 7, figure 3",
    "factorial": "late top-p by visibility: table 8",
    "interaction": "what visibility gains as support shrinks: figure 4",
    "prefix": "continuations of fixed prefixes: table 9 and its contrasts",
    "storage": "labels copied to the output or also shown to the denoiser: figure 5",
    "values": "other tokens at the selected positions: appendix E.2",
    "matched": "CRS against top-p at equal entropy, Dist-4, Rep-4 or Self-BLEU: appendix E.4",
}
AUDITS = {  # with presets of their own: they look inside paths and forward states
    "singleton": "how often top-p leaves one token, and whether it lasts: appendix D.1",
    "selection": "what two checkpoints select on the same states: appendix D.3",
    "temperature": "visible context against the best temperature: appendix E.1",
    "hidden": "later belief in a stored label, hidden at its own position: appendix E.3",
    "risk": "how often a selected label is wrong, against noise: proposition 2",
}


def study(name: str, size: Any) -> Study:
    """A study of the paper by name, at a preset's size; an audit's is one of its own."""
    if name not in {**STUDIES, **AUDITS}:
        raise LimpetError(f"there is no study {name!r}; there are {', '.join(STUDIES)}, or give a .toml file")
    module: Any = importlib.import_module(f"limpet.studies.{name.replace('-', '_')}")

    def show(results: Results) -> Page:
        parts = {part.name: getattr(module, part.name, None) for part in fields(Page)}
        beside = Beside(**vars(results))
        return Page(**{part: tuple(make(beside, size)) for part, make in parts.items() if make})

    conventions = getattr(module, "CONVENTIONS", {})
    cells = tuple(module.cells(size))
    return Study(name, module.TITLE, cells, size.shards, show, size.judges, preset=size.name, conventions=conventions)


__all__ = ["AUDITS", "PRESETS", "STUDIES", "Preset", "preset", "sized", "study"]
