"""A report: one self-contained page, and beside it every table, figure and number as a file of its own; and an index
over several, with every claim of the paper."""

from __future__ import annotations

import base64
import json
import lzma
import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any, NamedTuple, get_args
from urllib.parse import quote

import numpy as np

from limpet import style as looks
from limpet.errors import LimpetError
from limpet.evaluation.statistics import numbers
from limpet.experiments import figures, render, units
from limpet.experiments.claims import FEW, LEVEL, Claim, PaperVerdict, Verdict
from limpet.experiments.contents import PAPER, Dot, Entry, Page, Scatter, Table, alone, signed
from limpet.experiments.results import Results
from limpet.experiments.study import Study
from limpet.files import write_whole
from limpet.html import for_script, hashed

HERE = Path(__file__).parent
BACK = "<a href=../index.html>All reports</a>"
TITLE = "Claims of the paper"
HEAD = ("Where", "Claim", "Paper", "The rule on the paper's numbers", "Here", "The rule here")
OWN_RULE = (
    f"A finding holds when its one-sided {LEVEL:.0%} bound (Student's t over shards) is on the wanted side, and fails "
    "when the bound from the other side is on the wrong one; a claim is supported when all its findings hold, and not "
    "when one fails."
)
RULE = (
    f"{OWN_RULE} The paper's numbers are judged by the same rule with the errors that it prints, by their sign "
    "where it prints none, and stand as words where there is no number."
)
UNITS = (
    "Numbers are differences, in nats per token where the claim is about likelihood; a range where there are more than "
    f"{FEW} of them, with the largest error, and the side alone where the paper prints none."
)
BRACKETS = "In brackets: the paper's values, of its own models at its own sizes."


def shown(results: Results) -> Page:
    """What a report shows: of toys, nothing of the paper."""
    page = results.study.show(results)
    return alone(page) if results.study.toy else page


def write(
    results: Results, folder: Path, among: bool = False, tell: Callable[[str], None] = lambda remark: None
) -> Path:
    """Write a study's report into a folder of its own, alone or among others with an index; returns the page. Without
    matplotlib it has no figures, which is told."""
    results = kept(results)
    page = shown(results)
    try:
        drawn = {figure.name: figures.draw(figure) for figure in page.figures}
    except LimpetError as error:
        tell(f"{results.study.name} has tables alone: {error}")
        drawn, page = {}, replace(page, figures=())
    text = markdown(results, page)
    every = json.dumps(to_dict(results, page), ensure_ascii=False, separators=(",", ":"))
    files = {"report.md": text.encode(), "report.json": f"{every}\n".encode()}
    for table in page.tables:
        files |= {f"tables/{table.name}.{kind}": make(table).encode() for kind, make in render.FORMATS.items()}
    for name, kinds in drawn.items():
        files |= {f"figures/{name}.{kind}": data for kind, data in kinds.items()}
    files["index.html"] = document(results.study.title, text, files, page.scatters, BACK if among else "")
    write_files(files, folder)
    return folder / "index.html"


def document(
    title: str, text: str, drawn: Mapping[str, bytes] = {}, scatters: Sequence[Scatter] = (), back: str = ""
) -> bytes:
    """Our Markdown as one page that needs nothing else, with its contents and a way back; only scatters need a
    script."""
    head = "<meta charset=utf-8><meta name=viewport content='width=device-width,initial-scale=1'>"
    head += f"<title>{escape(title)}</title>"
    body, links = render.contents(render.terse(render.marked(render.html(text, drawn))))
    body = f"<nav aria-label=Contents><a href=#top>Top</a>{back}{links}</nav><main id=top>{body}</main>"
    style = looks.sheet() + asset("report.css")
    if scatters:
        style, script = style + asset("scatter.css"), asset("scatter.js")
        # Tables and figures have styles of their own inline; nothing but this script runs, and nothing is fetched.
        policy = f"default-src 'none'; script-src {hashed(script)}; style-src 'unsafe-inline'; form-action 'none'"
        head += f'<meta http-equiv=Content-Security-Policy content="{policy}">'
        body += f"<script type=application/json id=scatters>{for_script(packed(scatters))}</script>"
        body += f"<script>{script}</script>"
    return f"<!doctype html><html lang=en>{head}<style>\n{style}</style><body>{body}</body></html>\n".encode()


def asset(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


# Scatters: what a page's script is given


def packed(scatters: Sequence[Scatter]) -> dict[str, Any]:
    """Scatters as a page holds them: numbers rounded, every arm named once, and deflated together each dot's cell and
    texts, in the order of the dots."""
    texts = [[dot.cell, *dot.texts] for one in scatters for dots in one.panels.values() for dot in dots]
    small = zlib.compress(json.dumps(texts, separators=(",", ":")).encode(), 9)
    return {"scatters": list(map(_packed, scatters)), "texts": base64.b64encode(small).decode()}


def _packed(scatter: Scatter) -> dict[str, Any]:
    arms = dict.fromkeys((dot.arm, dot.family) for dots in scatter.panels.values() for dot in dots)
    index = {arm: i for i, arm in enumerate(arms)}

    def row(dot: Dot) -> list[Any]:
        rounded = numbers([round(value, 4) for one in (dot.x, dot.y) for value in (one.mean, one.se)])
        return [index[dot.arm, dot.family], *rounded]

    return {
        "name": scatter.name,
        "caption": scatter.caption,
        "x": scatter.x,
        "y": scatter.y,
        "joined": scatter.joined,
        "arms": list(arms),
        "colours": looks.coloured(list(dict.fromkeys(family for _, family in arms))),
        "panels": [{"title": title, "dots": list(map(row, dots))} for title, dots in scatter.panels.items()],
    }


def texts_of(page: str) -> dict[str, list[str]]:
    """The texts that a written page holds, by cell."""
    found = re.search("<script type=application/json id=scatters>(.*?)</script>", page)
    small = base64.b64decode(json.loads(found[1])["texts"]) if found else b""
    return {cell: texts for cell, *texts in (json.loads(zlib.decompress(small)) if small else ()) if texts}


# Files


def write_files(files: Mapping[str, bytes], folder: Path) -> None:
    """Files by their paths in a folder, which is made even if there are none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, data in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            write_whole(folder / path, data)
    except OSError as error:
        raise LimpetError(
            f"the report cannot be written to {folder} ({error.strerror}): name another folder"
        ) from error


def kept(results: Results) -> Results:
    """Results as a report keeps them: to the digits of its study. All of a report is made from these, so that it can be
    made anew from report.json."""
    cells = {
        cell: {name: replace(one, values=np.array(short(one.values.tolist(), results.study.digits), dtype=np.float64))
               for name, one in measures.items()}
        for cell, measures in results.cells.items()
    }  # fmt: skip
    return replace(results, cells=cells)


def short(value: Any, digits: int | None) -> Any:
    """A number to so many significant digits, a whole one without a point; and so within whatever holds numbers."""
    if isinstance(value, dict):
        return {key: short(one, digits) for key, one in value.items()}
    if isinstance(value, list):
        return [short(one, digits) for one in value]
    if digits is None or not isinstance(value, float) or not math.isfinite(value):
        return value
    value = float(f"{value:.{digits}g}")
    return int(value) if value.is_integer() else value


def to_dict(results: Results, page: Page) -> dict[str, Any]:
    """Every number of a report; `Results.from_dict` takes it back."""
    study, every = results.study, results.to_dict()
    return {
        "study": study.name,
        "title": study.title,
        "preset": study.preset,
        "provenance": every.pop("provenance"),
        "claims": short([claim.to_dict() for claim in page.claims], study.digits),
        "contrasts": [{"name": c.name, **c.estimate.to_dict(), "paper": c.paper} for c in page.contrasts],
        **every,
        "cells": short(every["cells"], study.digits),
    }


def stored(folder: Path) -> dict[str, Any]:
    """Every number of a report that was written: report.json, or that compressed."""
    small = folder / "report.json.xz"
    document = lzma.decompress(small.read_bytes()) if small.exists() else (folder / "report.json").read_bytes()
    return dict(json.loads(document))


def read(study: Study, folder: Path) -> Results:
    """The results of a report that was written: its numbers from report.json, its texts from the page."""
    try:
        found = Results.from_dict(study, stored(folder))
        page = folder / "index.html"
        return replace(found, texts=texts_of(page.read_text(encoding="utf-8"))) if study.shown else found
    except (OSError, lzma.LZMAError, ValueError, KeyError) as error:
        raise LimpetError(f"{folder} holds no report of {units.name(study)} ({error!r})") from error


def markdown(results: Results, page: Page) -> str:
    lines = [f"# {render.plain(results.study.title)}", "", render.plain(_summary(results)), ""]
    drawn = {figure.name: f"![{render.plain(figure.caption)}](figures/{figure.name}.svg)" for figure in page.figures}
    for scatter in page.scatters:  # first, at the place that its script looks for
        still = drawn.pop(scatter.name, render.plain(scatter.caption))
        lines += [f'<a id="scatter-{scatter.name}"></a>{still}', ""]
    paper = any(finding.paper for claim in page.claims for finding in claim.findings)  # or they are limpet's own
    if page.claims:
        lines += [f"## {TITLE}", "", RULE, ""] if paper else ["## Claims", "", OWN_RULE, ""]
        for i, claim in enumerate(page.claims):
            anchor = f'<a id="claim-{i}"></a>'
            said = f"{anchor}**{claim.text}** ({claim.where}). Here: **{claim.verdict}**, {claim.count}."
            printed = any(finding.paper for finding in claim.findings)
            lines += [f"{said} The rule on the paper's numbers: {claim.paper_verdict}." if printed else said, ""]
            lines += [f"Bounds: {' '.join(claim.why.split())}.", ""] if claim.why else []
            lines += [render.markdown(findings(claim, paper))]
        lines += ["## Tables and figures", "", *([BRACKETS, ""] if paper else [])]
    lines += [render.markdown(one) for one in page.tables]
    lines += [f"{image}\n" for image in drawn.values()]
    if page.contrasts:
        rows = tuple((Entry(c.name), Entry(signed(c.estimate, 4)), Entry(c.paper)) for c in page.contrasts)
        table = Table("contrasts", "", ("contrast, paired by shard", "here", PAPER), (rows,))
        (table,) = alone(Page((table,))).tables if results.study.toy else (table,)
        lines += [render.markdown(table)]
    made = json.dumps(results.provenance, indent=1, ensure_ascii=False)
    return "\n".join([*lines, "## Provenance", "", "```json", made, "```", ""])


def _summary(results: Results) -> str:
    study, made = results.study, results.provenance
    models = ", ".join(f"{name} ({digest[:12]})" for name, digest in made["models"].items())
    counts = " or ".join(map(str, made["samples in a shard"]))
    samples = f" of {counts} samples; judged by {', '.join(results.judges)}" if counts else ""
    cells = len(results.cells) + len(results.probes)
    return (
        f"Study {study.name}{f', preset {study.preset}' if study.preset else ''}: {cells} cells on "
        f"{models}; {len(study.shards)} shards{samples}. Mean ± standard error over shards."
    )


def findings(claim: Claim, paper: bool = True) -> Table:
    """What a claim rests on, a line each, beside the paper's where it is the paper's claim."""
    head = ("finding", "wanted", "here", "outcome", *(("paper", "by the same rule") if paper else ()))
    rows = tuple(
        tuple(map(Entry, (f.name, f.wanted, f.here, f.outcome, "" if f.paper is None else f.there, f.paper_outcome)))
        for f in claim.findings
    )
    return Table("findings", "", head, (tuple(row[: len(head)] for row in rows),), names=2)


# The index


class Section(NamedTuple):
    """One report of several: a folder with index.html and report.md, and the claims that it tests, if any."""

    name: str
    folder: str  # under that of the index
    claims: tuple[Claim, ...] = ()


def section(results: Results) -> Section:
    return Section(results.study.name, units.name(results.study), shown(kept(results)).claims)


def write_index(sections: Sequence[Section], folder: Path) -> Path:
    """One page over several reports, and the same as claims.md: every claim with the paper's numbers, ours and the
    verdict, and a link to every report; also to whatever else has a page in the folder, an audit or another preset."""
    known = {one.folder for one in sections}
    others = (path.parent.name for path in folder.glob("*/index.html") if path.parent.name not in known)
    every = sorted([*sections, *(Section(name, name) for name in others)])
    links = (f"- [{render.plain(one.name)}]({quote(one.folder)}/report.md)" for one in every)
    claims = ["## Claims", "", f"{tally(sections)} {RULE} {UNITS}", "", overview(sections)]
    text = "\n".join([f"# {TITLE}", "", "## Reports", "", *links, "", *claims])
    write_files({"index.html": document(TITLE, text), "claims.md": text.encode()}, folder)
    return folder / "index.html"


def in_order(sections: Sequence[Section]) -> list[tuple[Claim, Section, int]]:
    """Every claim with its report and its number there, in the order of the paper."""
    found = [(claim, one, i) for one in sorted(sections) for i, claim in enumerate(one.claims)]
    return sorted(found, key=lambda entry: (not entry[0].where.startswith("section"), entry[0].where))


def told_twice(claims: Sequence[Claim]) -> list[int]:
    """How many findings of each claim are numbers that another claim rests on: one of fewer findings, or the first."""
    known: set[tuple[Any, ...]] = set()
    counts = [0] * len(claims)
    for i in sorted(range(len(claims)), key=lambda i: len(claims[i].findings)):
        # Values without any spread are a count of none or of all, which others may be by chance.
        own = {(one.side, *numbers(one.estimate.values)) for one in claims[i].findings if one.estimate.se > 0}
        counts[i] = len(own & known)
        known |= own
    return counts


def overview(sections: Sequence[Section], base: str = "") -> str:
    """Every claim as one row of a Markdown table, in the order of the paper; links start at `base`."""
    found = in_order(sections)
    again = told_twice([claim for claim, *_ in found])
    rows = []
    for (claim, one, i), before in zip(found, again, strict=True):
        shared = f"; {before} of its numbers in another claim too" if before else ""
        where = Entry(claim.where, link=f"{base}{quote(one.folder)}/report.md#claim-{i}")
        ours = f"{claim.verdict}, {claim.count}{shared}"
        rows.append((where, *map(Entry, (claim.text, claim.there, claim.paper_verdict, claim.here, ours))))
    return render.markdown(Table("claims", "", HEAD, (tuple(rows),), names=len(HEAD)))


def tally(sections: Sequence[Section]) -> str:
    """Verdicts on all claims, here and of the same rule on the paper's numbers. A claim all of whose numbers are
    those of another is not counted again."""
    found = [claim for claim, *_ in in_order(sections)]
    own = [claim for claim, before in zip(found, told_twice(found), strict=True) if before < len(claim.findings)]

    def counts(verdicts: Sequence[str], names: Sequence[str]) -> str:
        return ", ".join(f"{verdicts.count(name)} {name}" for name in names)

    here = counts([claim.verdict for claim in own], get_args(Verdict))
    there = counts([claim.paper_verdict for claim in own], get_args(PaperVerdict))
    return f"{len(own)} claims. Here: {here}. The rule on the paper's own numbers: {there}."
