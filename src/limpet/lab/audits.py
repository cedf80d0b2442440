"""Audits in the report: results kept in a folder, a file and a figure each, and one page with a section for each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from limpet.audits import AUDITS, Models, Result, Row
from limpet.audits.result import with_error
from limpet.errors import LimpetError, extra
from limpet.lab import figures, render, report
from limpet.lab.bench import provenance
from limpet.lab.page import Entry, Table

HEAD = ("model", "quantity", "at", "here", "events", "paper")
READING = "Mean ± standard error over shards. The paper's figures are of Duo and Duo-distilled, at its own sizes."


@dataclass(frozen=True)
class Kept:
    """An audit's result, with the name of its preset and what made it."""

    preset: str
    result: Result
    provenance: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.result.audit}-{self.preset}"

    def to_dict(self) -> dict[str, Any]:
        return {"preset": self.preset, **self.result.to_dict(), "provenance": self.provenance}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Kept:
        return cls(stored["preset"], Result.from_dict(stored), stored["provenance"])


def made_on(models: Models) -> dict[str, Any]:
    """What made a result: where each model ran, and who judged."""
    judge = {} if models.judge is None else {models.judge.name: models.judge.digest}
    return {"judge": judge, "made on": {model.name: provenance(model) for model in models.denoisers}}


# A folder of results


def ready(folder: Path) -> None:
    """Make a folder for results, or say what is wrong with it before any work is done."""
    report.write_files({}, folder)
    found(folder)


def keep(kept: Kept, folder: Path) -> None:
    """Add a result to a folder."""
    report.write_files({f"{kept.name}.json": report.compact(kept.to_dict())}, folder)


def found(folder: Path) -> list[Kept]:
    """The results kept in a folder, in the order of the audits."""
    order = list(AUDITS)
    kept: list[tuple[int, str, Kept]] = []
    for file in sorted(folder.glob("*.json")):
        try:
            one = Kept.from_dict(json.loads(file.read_text(encoding="utf-8")))
            kept.append((order.index(one.result.audit), one.preset, one))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LimpetError(f"{file} is not the result of an audit ({error!r}): take it out of {folder}") from error
    return [one for *_, one in sorted(kept, key=lambda entry: entry[:2])]


def write(folder: Path) -> Path:
    """One page over every result in a folder, the same in Markdown, and the figures as files; returns the page."""
    kept = found(folder)
    figure = {one.name: drawn(one) for one in kept}
    files = {f"{name}.{kind}": data for name, kinds in figure.items() for kind, data in kinds.items()}
    sections = "".join(html(one, figure[one.name]["svg"]) for one in kept)
    body = f"<h1>Audits</h1><p>{escape(READING)}</p>{sections}"
    files["index.html"] = report.document("Audits", body).encode()
    files["report.md"] = "\n".join(["# Audits", "", READING, "", *map(markdown, kept)]).encode()
    report.write_files(files, folder)
    return folder / "index.html"


# A section


def table(result: Result, caption: str) -> Table:
    """One line a row: where, ours with its error, how many events, and the paper's."""
    groups = tuple(tuple(map(_line, rows)) for _, rows in groupby(result.rows, lambda row: row.model))
    return Table(result.audit, caption, HEAD, groups, labels=3)


def _line(row: Row) -> tuple[Entry, ...]:
    at = ", ".join(f"{name} {value}" for name, value in row.at.items())
    unit = f" {row.unit}" if row.unit else ""
    events = "" if row.events is None else f"{row.events:,}"
    return tuple(map(Entry, (row.model, row.quantity, at, with_error(row.estimate) + unit, events, row.paper)))


def drawn(kept: Kept) -> dict[str, bytes]:
    """The audit's figure as SVG and PNG, in the laboratory's colours; equal results give equal bytes."""
    matplotlib = extra("matplotlib", "figures")
    colours = matplotlib.cycler(color=[colour for colour, *_ in figures.STYLES[1:]])  # black is for errors
    audit = AUDITS[kept.result.audit]
    return figures.saved(kept.name, lambda: audit.figure(kept.result), **{"axes.prop_cycle": colours})


def html(kept: Kept, svg: bytes) -> str:
    """The section of one result: what it asks, the table, the figure, the conventions and the provenance."""
    audit, image = AUDITS[kept.result.audit], svg.decode()
    conventions = "".join(
        f"<li>{escape(what)}: {escape(convention)}</li>" for what, convention in kept.result.conventions.items()
    )
    return (
        f'<section id="{escape(kept.name)}"><h2>{escape(audit.title)}</h2><p>{escape(audit.asks)}</p>'
        f"{render.html(table(kept.result, _summary(kept)))}"
        f"<figure>{image[image.index('<svg') :]}</figure><ul>{conventions}</ul>"
        f"<details><summary>Provenance</summary><pre>{escape(_facts(kept))}</pre></details></section>"
    )


def markdown(kept: Kept) -> str:
    audit = AUDITS[kept.result.audit]
    lines = [f"## {audit.title}", "", audit.asks, "", render.markdown(table(kept.result, _summary(kept)))]
    lines += [f"![{audit.title}]({kept.name}.svg)", ""]
    lines += [f"- {what}: {convention}" for what, convention in kept.result.conventions.items()]
    return "\n".join([*lines, "", "```json", _facts(kept), "```", ""])


def _summary(kept: Kept) -> str:
    settings, models = kept.result.settings, kept.result.models
    named = ", ".join(f"{name} ({digest[:12]})" for name, digest in models.items())
    return (
        f"Audit {kept.result.audit}, preset {kept.preset}: {len(settings['shards'])} shards of {settings['paths']} "
        f"on {named}"
    )


def _facts(kept: Kept) -> str:
    facts = {"settings": kept.result.settings, "models": kept.result.models, **kept.provenance}
    return json.dumps(facts, indent=1, ensure_ascii=False)
