"""The paper's tables and figures as studies. Each study is one module with its cells at a preset's size, and functions
that turn results into tables, panels of a figure, scatter plots, contrasts and claims; its texts are in TOML files."""

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

from limpet.errors import LimpetError
from limpet.experiments import Cell, Claim, Figure, Probe, ReportContent, Results, Study
from limpet.paper.studies import audits
from limpet.paper.studies.presets import PRESETS, TEXTS, Preset, defined_cells, preset
from limpet.paper.studies.published import NOT_IN_PAPER, PaperResults

STUDIES = {name: texts["about"] for name, texts in TEXTS.items()}
AUDITS = {name: texts["about"] for name, texts in audits.FILE.content.items()}  # they have presets of their own
PARTS = ("tables", "panels", "contrasts", "claims", "scatters")  # functions that a study's module may have


def module_of(name: str) -> Any:
    """The module of a study or an audit by name; an empty one for a study that studies.toml defines alone."""
    path = f"{__name__}.{name.replace('-', '_')}"
    return importlib.import_module(path) if importlib.util.find_spec(path) else ModuleType(path)


def audit_presets(name: str) -> dict[str, audits.AuditPreset[Any]]:
    """The sizes of an audit by name."""
    presets: dict[str, audits.AuditPreset[Any]] = module_of(name).PRESETS
    return presets


def study(name: str, size: Any) -> Study:
    """A study of the paper by name.

    size: a `Preset`, or an `AuditPreset` for an audit."""
    if name not in {**STUDIES, **AUDITS}:
        raise LimpetError(f"there is no study {name!r}; there are {', '.join(STUDIES)}, or give a .toml file")
    module, texts = module_of(name), {**TEXTS, **audits.FILE.content}[name]
    cells = tuple(module.cells(size) if hasattr(module, "cells") else defined_cells(name, size))
    models = {model for cell in cells for model in (cell.models if isinstance(cell, Probe) else (cell.model,))}

    def build_report(results: Results) -> ReportContent:
        makers = {"tables": audits.tables, **vars(module)} if name in AUDITS else vars(module)
        paper_results = PaperResults(**vars(results), preset=size, study_texts=texts)
        parts = {part: makers[part](paper_results, size) for part in PARTS if part in makers}
        panels = tuple(parts.get("panels", ()))
        caption = texts["shows"].format(preset=size) if panels else ""
        return ReportContent(
            tables=(*paper_results.defined_tables(), *parts.get("tables", ())),
            figures=(Figure(name, caption, panels, columns=texts.get("columns", 3)),) if panels else (),
            contrasts=(*parts.get("contrasts", ()), *paper_results.defined_contrasts()),
            claims=tuple(_claims(paper_results, parts.get("claims", {}))),
            scatters=tuple(parts.get("scatters", ())),
        )

    return Study(
        name,
        texts["title"],
        cells,
        getattr(size, "more_seeds", {}).get(name, size.seeds),
        build_report,
        preset=size.name,
        conventions=texts.get("conventions", {}),
        is_toy=size.name == "smoke" or all(model.startswith("exact:") for model in models),
        **{"judges": size.judges, **getattr(module, "STUDY", {})},
    )


def _claims(results: PaperResults, computed: Mapping[str, Any]) -> list[Claim]:
    """The claims of a study that rest on any finding: those computed by its module, and those defined in its texts."""
    texts = results.study_texts
    shared = {key: texts["claim"] for key in computed if "claim" in texts}
    claims = []
    for key, text in {**shared, **texts.get("claims", {})}.items():
        is_audit = results.study.name in AUDITS
        defined = audits.findings(results, results.preset, text) if is_audit else results.defined_findings(text)
        findings = [*computed.get(key, ()), *defined]
        names = {"key": key, "preset": results.preset}
        if findings:
            where, sentence = (text[field].format(**names) for field in ("where", "text"))
            claims.append(Claim(where, sentence, findings, text.get("why", "")))
    return claims


def all_studies(size: Preset, replacements: Mapping[str, str] = {}) -> list[Study]:
    """Everything that the paper measures, at a preset's size: its audits, then its studies.

    replacements: names of models or judges to replace, and by what."""
    judges = tuple(replace(judge, name=replacements.get(judge.name, judge.name)) for judge in size.judges)
    distilled, base = (replacements.get(model, model) for model in (size.distilled, size.base))
    sizes: dict[str, Any] = dict.fromkeys(STUDIES, replace(size, judges=judges, distilled=distilled, base=base))
    for name in AUDITS:
        if name not in NOT_IN_PAPER:
            known = audit_presets(name)
            if (own := known.get(size.name)) is None:
                raise LimpetError(f"audits have no preset {size.name!r}; they have {', '.join(known)}")
            sizes[name] = replace(own, models=tuple(replacements.get(model, model) for model in own.models))
    return [study(name, sizes[name]) for name in (*AUDITS, *STUDIES) if name not in NOT_IN_PAPER]


def with_length(one: Study, length: int) -> Study:
    """The same study with a default length, for cells that do not set their own."""

    def shortened(cell: Cell | Probe) -> Cell | Probe:
        if isinstance(cell, Cell):
            return replace(cell, length=cell.length or length)
        return replace(cell, settings=replace(cell.settings, length=length))

    return replace(one, cells=tuple(map(shortened, one.cells)))


__all__ = [
    "AUDITS", "NOT_IN_PAPER", "PRESETS", "STUDIES", "TEXTS", "Preset", "all_studies", "audit_presets", "module_of",
    "preset", "study", "with_length",
]  # fmt: skip
