"""The paper's tables and figures as studies: one small file each, with its cells at a preset's size, and what it shows
of their results: tables, panels of a figure, scatters, contrasts, and what each claim rests on. The words stand in
studies.toml and audits.toml."""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from limpet.errors import LimpetError
from limpet.experiments.claims import Claim
from limpet.experiments.contents import Figure, Page
from limpet.experiments.results import Results
from limpet.experiments.study import Cell, Probe, Study
from limpet.paper.studies import audits
from limpet.paper.studies.presets import PRESETS, Preset, preset
from limpet.paper.studies.published import Beside

WORDS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("studies.toml").read_text("utf-8"))
STUDIES = {name: words["about"] for name, words in WORDS.items()}
PARTS = ("tables", "panels", "contrasts", "claims", "scatters")  # what a study's file may make of its results
# With presets of their own: they look inside paths and forward states.
AUDITS = {name: words["about"] for name, words in audits.FILE.content.items()}
OWN = ("samplers", "forms", "pareto", "interleave", "mending")  # limpet's, and not the paper's


def study(name: str, size: Any) -> Study:
    """A study of the paper by name, at a preset's size; an audit's is one of its own."""
    if name not in {**STUDIES, **AUDITS}:
        raise LimpetError(f"there is no study {name!r}; there are {', '.join(STUDIES)}, or give a .toml file")
    module: Any = importlib.import_module(f"limpet.paper.studies.{name.replace('-', '_')}")
    about = {**WORDS, **audits.FILE.content}[name]

    def show(results: Results) -> Page:
        makers = {"tables": audits.tables, **vars(module)} if name in AUDITS else vars(module)
        beside = Beside(**vars(results), size=size, words=about)
        made = {part: makers[part](beside, size) for part in PARTS if part in makers}
        panels, found = tuple(made.get("panels", ())), made.get("claims", {})
        # In words of its own, or in those that all its claims share.
        claims = {key: about["claim"] for key in found if "claim" in about} | about.get("claims", {})
        rests = {key: [*found.get(key, ()), *beside.findings(claim)] for key, claim in claims.items()}
        return Page(
            tuple(made.get("tables", ())),
            (Figure(name, about["shows"].format(size=size), panels, columns=about.get("columns", 3)),)
            if panels
            else (),
            tuple(made.get("contrasts", ())),
            tuple(
                Claim(
                    one["where"].format(key=key), one["text"].format(key=key, size=size), rests[key], one.get("why", "")
                )
                for key, one in claims.items()
                if rests[key]
            ),
            tuple(made.get("scatters", ())),
        )

    cells, rules = tuple(module.cells(size)), about.get("conventions", {})
    more = getattr(module, "STUDY", {})  # what else a study has
    models = {model for cell in cells for model in (cell.models if isinstance(cell, Probe) else (cell.model,))}
    toy = size.name == "smoke" or all(model.startswith("exact:") for model in models)
    return Study(
        name,
        about["title"],
        cells,
        getattr(size, "more", {}).get(name, size.shards),
        show,
        size.judges,
        preset=size.name,
        conventions=rules,
        toy=toy,
        **more,
    )


def whole(size: Preset, stand: Mapping[str, str] = {}) -> list[Study]:
    """All that the paper measures, at a preset's size: its audits, which score nothing, and then its studies. `stand`
    names what stands for a model or a judge."""
    judges = tuple(replace(one, name=stand.get(one.name, one.name)) for one in size.judges)
    distilled, base = (stand.get(model, model) for model in (size.distilled, size.base))
    sizes: dict[str, Any] = dict.fromkeys(STUDIES, replace(size, judges=judges, distilled=distilled, base=base))
    for name in AUDITS:
        if name not in OWN:
            known = importlib.import_module(f"limpet.paper.studies.{name}").PRESETS
            if (own := known.get(size.name)) is None:
                raise LimpetError(f"audits have no preset {size.name!r}; they have {', '.join(known)}")
            sizes[name] = replace(own, models=tuple(stand.get(model, model) for model in own.models))
    return [study(name, sizes[name]) for name in (*AUDITS, *STUDIES) if name not in OWN]


def shortened(one: Study, length: int) -> Study:
    """The same study on samples of so many tokens, where it does not say itself how many."""
    return replace(one, cells=tuple(
        replace(cell, length=cell.length or length) if isinstance(cell, Cell) else
        replace(cell, settings=replace(cell.settings, length=length))
        for cell in one.cells
    ))  # fmt: skip


__all__ = ["AUDITS", "OWN", "PRESETS", "STUDIES", "WORDS", "Preset", "preset", "shortened", "study", "whole"]
