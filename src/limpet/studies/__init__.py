"""The paper's tables and figures as studies: one small file each, with its cells at a preset's size, and what it shows
of their results: tables, panels of a figure, scatters, contrasts, and what each claim rests on. The words stand in
studies.toml and audits.toml."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path
from typing import Any

from limpet.errors import LimpetError
from limpet.lab.claims import Claim
from limpet.lab.page import Figure, Page
from limpet.lab.results import Results
from limpet.lab.study import Probe, Study
from limpet.studies import audit
from limpet.studies.presets import PRESETS, Preset, preset
from limpet.studies.published import Beside

WORDS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("studies.toml").read_text("utf-8"))
STUDIES = {name: words["about"] for name, words in WORDS.items()}
PARTS = ("tables", "panels", "contrasts", "claims", "scatters")  # what a study's file may make of its results
# With presets of their own: they look inside paths and forward states.
AUDITS = {name: words["about"] for name, words in audit.FILE.content.items()}


def study(name: str, size: Any) -> Study:
    """A study of the paper by name, at a preset's size; an audit's is one of its own."""
    if name not in {**STUDIES, **AUDITS}:
        raise LimpetError(f"there is no study {name!r}; there are {', '.join(STUDIES)}, or give a .toml file")
    module: Any = importlib.import_module(f"limpet.studies.{name.replace('-', '_')}")
    about = {**WORDS, **audit.FILE.content}[name]

    def show(results: Results) -> Page:
        makers = {"tables": audit.tables, **vars(module)} if name in AUDITS else vars(module)
        beside = Beside(**vars(results), size=size, words=about)
        made = {part: makers[part](beside, size) for part in PARTS if part in makers}
        panels, found = tuple(made.get("panels", ())), made.get("claims", {})
        # In words of its own, or in those that all its claims share.
        claims = {key: about["claim"] for key in found if "claim" in about} | about.get("claims", {})
        rests = {key: found.get(key) or beside.findings(claim) for key, claim in claims.items()}
        return Page(
            tuple(made.get("tables", ())),
            (Figure(name, about["shows"].format(size=size), panels, columns=about.get("columns", 3)),)
            if panels
            else (),
            tuple(made.get("contrasts", ())),
            tuple(
                Claim(one["where"].format(key=key), one["text"].format(key=key, size=size), rests[key])
                for key, one in claims.items()
                if rests[key]
            ),
            tuple(made.get("scatters", ())),
        )

    cells, rules = tuple(module.cells(size)), about.get("conventions", {})
    more = getattr(module, "STUDY", {})  # what else a study has
    models = {model for cell in cells for model in (cell.models if isinstance(cell, Probe) else (cell.model,))}
    toy = size.name == "smoke" or any(model.startswith("exact:") for model in models)
    return Study(
        name,
        about["title"],
        cells,
        size.shards,
        show,
        size.judges,
        preset=size.name,
        conventions=rules,
        toy=toy,
        **more,
    )


__all__ = ["AUDITS", "PRESETS", "STUDIES", "WORDS", "Preset", "preset", "study"]
