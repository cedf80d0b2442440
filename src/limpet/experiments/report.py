"""Reports: one self-contained page with its tables, figures and numbers as files beside it, and an index of several."""

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

from limpet import style
from limpet.errors import LimpetError
from limpet.evaluation.statistics import numbers
from limpet.experiments import figures, render
from limpet.experiments.claims import FEW, LEVEL, Claim, PaperVerdict, Verdict
from limpet.experiments.report_content import (
    PAPER,
    Contrast,
    Entry,
    Point,
    ReportContent,
    ScatterPlot,
    Table,
    format_signed,
    without_paper,
)
from limpet.experiments.results import Results
from limpet.experiments.study import Study
from limpet.experiments.summary import common_unit, in_short, unit_of, with_unit, with_units
from limpet.files import write_file
from limpet.html import for_script, policy_hash

FORMAT = 2  # of report.json
HERE = Path(__file__).parent
BACK = "<a href=../index.html>All reports</a>"
TITLE = "Claims of the paper"
CLAIM_COLUMNS = ("Where", "Claim", "Paper", "Verdict on the paper's numbers", "Here", "Verdict here")
OWN_RULE = (
    f"A finding holds when its one-sided {LEVEL:.0%} bound (Student's t over seeds) meets the criterion. It fails when "
    "the bound from the other side does not. A claim is supported when all its findings hold, and not supported when "
    "one fails."
)
RULE = (
    f"{OWN_RULE} The paper's numbers are judged by the same rule with the errors that it prints, and by their sign "
    "where it prints none. Where it prints no number, the criterion stands in words."
)
UNITS = (
    "Numbers are differences, in nats per token where the claim is about likelihood. More than "
    f"{FEW} numbers are given as a range with the largest error. The criterion alone is given where the paper prints "
    "no number."
)
BRACKETS = "The paper's values are in brackets. They are of its own models at its own sizes."


# One report


def content_of(results: Results) -> ReportContent:
    """The content of a study's report; a toy study is not compared with the paper."""
    content = with_units(results.study.build_report(results))
    return without_paper(content) if results.study.is_toy else content


def write_report(
    results: Results, folder: Path, in_index: bool = False, warn: Callable[[str], None] = lambda sentence: None
) -> Path:
    """Write a study's report into a folder of its own and return the path of its page.

    in_index: whether an index page stands in the folder above. warn: is told that there are no figures where
    matplotlib is not installed."""
    results = rounded(results)
    content = content_of(results)
    try:
        drawings = {figure.name: figures.draw(figure) for figure in content.figures}
    except LimpetError as error:
        warn(f"the report of {results.study.name} has no figures: {error}")
        drawings, content = {}, replace(content, figures=())
    text = markdown(results, content)
    values = json.dumps(to_dict(results, content), ensure_ascii=False, separators=(",", ":"))
    files = {"report.md": text.encode(), "report.json": f"{values}\n".encode()}
    for table in content.tables:
        files |= {f"tables/{table.name}.{kind}": make(table).encode() for kind, make in render.FORMATS.items()}
    for name, kinds in drawings.items():
        files |= {f"figures/{name}.{kind}": data for kind, data in kinds.items()}
    files["index.html"] = document(results.study.title, text, files, content.scatters, BACK if in_index else "")
    write_files(files, folder)
    return folder / "index.html"


def read_report(study: Study, folder: Path) -> Results:
    """The results in a written report: its numbers from report.json, its texts from the page."""
    try:
        found = Results.from_dict(study, load_numbers(folder))
        page = folder / "index.html"
        return replace(found, texts=texts_of(page.read_text(encoding="utf-8"))) if study.texts_per_cell else found
    except (OSError, lzma.LZMAError, ValueError, KeyError) as error:
        if isinstance(error, LimpetError):
            raise
        raise LimpetError(f"{folder} holds no report of {study.full_name} ({error!r})") from error


def load_numbers(folder: Path) -> dict[str, Any]:
    """Every number of a written report, from report.json or the same file compressed (.xz)."""
    compressed = folder / "report.json.xz"
    raw = lzma.decompress(compressed.read_bytes()) if compressed.exists() else (folder / "report.json").read_bytes()
    values = dict(json.loads(raw))
    if values.get("format") != FORMAT:
        raise LimpetError(
            f"the report in {folder} has format {values.get('format', 1)}, and this version of limpet reads format "
            f"{FORMAT}: run the study again"
        )
    return values


def write_files(files: Mapping[str, bytes], folder: Path) -> None:
    """Write files by their paths in a folder, which is created even if there are none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, data in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            write_file(folder / path, data)
    except OSError as error:
        raise LimpetError(
            f"the report cannot be written to {folder} ({error.strerror}): name another folder"
        ) from error


# Numbers


def rounded(results: Results) -> Results:
    """Results to the study's digits. A report is built from these alone, so report.json is enough to build it again."""
    digits = results.study.digits

    def short(measures: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: replace(one, values=np.array(round_numbers(one.values.tolist(), digits), dtype=np.float64))
            for name, one in measures.items()
        }

    return replace(results, cells={cell: short(measures) for cell, measures in results.cells.items()})


def round_numbers(value: Any, digits: int | None) -> Any:
    """Numbers to so many significant digits, whole ones without a point, also inside lists and dictionaries."""
    if isinstance(value, dict):
        return {key: round_numbers(one, digits) for key, one in value.items()}
    if isinstance(value, list):
        return [round_numbers(one, digits) for one in value]
    if digits is None or not isinstance(value, float) or not math.isfinite(value):
        return value
    value = float(f"{value:.{digits}g}")
    return int(value) if value.is_integer() else value


def to_dict(results: Results, content: ReportContent) -> dict[str, Any]:
    """Every number of a report. `Results.from_dict` reads it."""
    study, values = results.study, results.to_dict()
    return {
        "format": FORMAT,
        "study": study.name,
        "title": study.title,
        "preset": study.preset,
        "in short": in_short(results, content),
        "provenance": values["provenance"],
        "claims": round_numbers([claim.to_dict() for claim in content.claims], study.digits),
        "contrasts": [{"name": c.name, **c.estimate.to_dict(), "paper": c.paper} for c in content.contrasts],
        "cells": round_numbers(values["cells"], study.digits),
        "rows": values["rows"],
    }


# The text


def markdown(results: Results, content: ReportContent) -> str:
    """The text of a report."""
    short = f"**In short.** {render.escape_markdown(in_short(results, content))}"
    about = render.escape_markdown(_summary(results))
    lines = [f"# {render.escape_markdown(results.study.title)}", "", short, "", about, ""]
    images = {
        figure.name: f"![{render.escape_markdown(figure.caption)}](figures/{figure.name}.svg)"
        for figure in content.figures
    }
    for scatter in content.scatters:  # first, at the anchor that the page's script looks for
        still = images.pop(scatter.name, render.escape_markdown(scatter.caption))
        lines += [f'<a id="scatter-{scatter.name}"></a>{still}', ""]
    has_paper = any(finding.paper for claim in content.claims for finding in claim.findings)
    if content.claims:
        lines += [f"## {TITLE}", "", RULE, ""] if has_paper else ["## Claims", "", OWN_RULE, ""]
        for i, claim in enumerate(content.claims):
            lines += _claim_lines(results, i, claim, has_paper)
        lines += ["## Tables and figures", "", *([BRACKETS, ""] if has_paper else [])]
    lines += [render.markdown(one) for one in content.tables]
    lines += [f"{image}\n" for image in images.values()]
    if content.contrasts:

        def value(one: Contrast) -> str:
            return f"{format_signed(one.estimate, 4)} {unit_of(results, one.name)}".strip()

        rows = tuple((Entry(c.name), Entry(value(c)), Entry(c.paper)) for c in content.contrasts)
        table = Table("contrasts", "", ("contrast, paired by seed", "here", PAPER), (rows,))
        if results.study.is_toy:
            (table,) = without_paper(ReportContent((table,))).tables
        lines += [render.markdown(table)]
    provenance = json.dumps(results.provenance, indent=1, ensure_ascii=False)
    return "\n".join([*lines, "## Provenance", "", "```json", provenance, "```", ""])


def _summary(results: Results) -> str:
    study, about = results.study, results.provenance
    models = ", ".join(f"{name} ({digest[:12]})" for name, digest in about["models"].items())
    counts = " or ".join(map(str, about["samples per seed"]))
    judged = [f"judged by {', '.join(results.judges)}"] if about.get("judges", True) else []
    judged += ["with checkers"] if results.checks else []
    samples = f" x {counts} samples, {' and '.join(judged)}" if counts else ""
    preset = f", preset {study.preset}" if study.preset else ""
    cells = len(results.cells) + len(results.probes)
    return (
        f"Study {study.name}{preset}: {cells} cells on {models}; {len(study.seeds)} seeds{samples}. "
        "Mean ± standard error over seeds."
    )


def _claim_lines(results: Results, number: int, claim: Claim, has_paper: bool) -> list[str]:
    anchor = f'<a id="claim-{number}"></a>'
    sentence = f"{anchor}**{claim.text}** ({claim.where}). Here: **{claim.verdict}**, {claim.count}."
    if any(finding.paper for finding in claim.findings):
        sentence += f" The same rule on the paper's numbers: {claim.paper_verdict}."
    why = [f"Bounds: {' '.join(claim.why.split())}.", ""] if claim.why else []
    return [sentence, "", *why, render.markdown(findings_table(results, claim, has_paper))]


def findings_table(results: Results, claim: Claim, has_paper: bool = True) -> Table:
    """What a claim rests on, one finding per row, with the paper's values beside ours.

    A unit that all share is in the head."""
    unit = common_unit(results, claim)
    here = f"here, {unit}" if unit else "here"
    head = ("finding", "expected", here, "outcome", *(("paper", "by the same rule") if has_paper else ()))
    rows = []
    for finding in claim.findings:
        paper = "" if finding.paper is None else finding.published
        value = finding.measured if unit else with_unit(results, finding, claim)
        texts = (finding.name, finding.expected, value, finding.outcome, paper, finding.paper_outcome)
        rows.append(tuple(map(Entry, texts[: len(head)])))
    return Table("findings", "", head, (tuple(rows),), names=2)


# The page


def document(
    title: str, text: str, drawings: Mapping[str, bytes] = {}, scatters: Sequence[ScatterPlot] = (), back: str = ""
) -> bytes:
    """Our Markdown as one page that needs no other file. It has scripts only for scatter plots and for folded tables.

    drawings: SVG files by address. back: a link to the index."""
    head = "<meta charset=utf-8><meta name=viewport content='width=device-width,initial-scale=1'>"
    head += f"<title>{escape(title)}</title>"
    page = render.fold_tables(render.html(text, drawings))
    body, links = render.link_sections(render.minify(render.mark_verdicts(page)))
    body = f"<nav aria-label=Contents><a href=#top>Top</a>{back}{links}</nav><main id=top>{body}</main>"
    sheet = style.style_sheet() + _asset("report.css")
    scripts = ["filter.js"] if "<details class=rows" in body else []
    if scatters:
        sheet, scripts = sheet + _asset("scatter.css"), ["scatter.js", *scripts]
        body += f"<script type=application/json id=scatters>{for_script(packed(scatters))}</script>"
    if scripts:
        sources = list(map(_asset, scripts))
        # Tables and figures have inline styles. No other script runs, and nothing is fetched.
        allowed = " ".join(map(policy_hash, sources))
        policy = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; form-action 'none'"
        head += f'<meta http-equiv=Content-Security-Policy content="{policy}">'
        body += "".join(f"<script>{source}</script>" for source in sources)
    return f"<!doctype html><html lang=en>{head}<style>\n{sheet}</style><body>{body}</body></html>\n".encode()


def _asset(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def packed(scatters: Sequence[ScatterPlot]) -> dict[str, Any]:
    """Scatter plots as a page's script reads them: numbers rounded, and each point's cell and texts compressed."""
    points = [point for one in scatters for panel in one.panels.values() for point in panel]
    texts = json.dumps([[point.cell, *point.texts] for point in points], separators=(",", ":"))
    compressed = base64.b64encode(zlib.compress(texts.encode(), 9)).decode()
    return {"scatters": list(map(_packed_plot, scatters)), "texts": compressed}


def _packed_plot(scatter: ScatterPlot) -> dict[str, Any]:
    samplers = dict.fromkeys((point.sampler, point.family) for panel in scatter.panels.values() for point in panel)
    index = {sampler: i for i, sampler in enumerate(samplers)}

    def row(point: Point) -> list[Any]:
        values = [round(value, 4) for one in (point.x, point.y) for value in (one.mean, one.se)]
        return [index[point.sampler, point.family], *numbers(values)]

    return {
        "name": scatter.name,
        "caption": scatter.caption,
        "x": scatter.x,
        "y": scatter.y,
        "joined": scatter.joined,
        "samplers": list(samplers),
        "colours": style.assign_colours(list(dict.fromkeys(family for _, family in samplers))),
        "panels": [{"title": title, "points": list(map(row, panel))} for title, panel in scatter.panels.items()],
    }


def texts_of(page: str) -> dict[str, list[str]]:
    """The texts that a written page holds, by cell."""
    found = re.search("<script type=application/json id=scatters>(.*?)</script>", page)
    if found is None:
        return {}
    texts = json.loads(zlib.decompress(base64.b64decode(json.loads(found[1])["texts"])))
    return {cell: own for cell, *own in texts if own}


# The index


class IndexEntry(NamedTuple):
    """One report of several: a folder with index.html and report.md, and the claims that it tests."""

    name: str
    folder: str  # inside the folder of the index
    claims: tuple[Claim, ...] = ()


def index_entry(results: Results) -> IndexEntry:
    """The entry of a study's report."""
    return IndexEntry(results.study.name, results.study.full_name, content_of(rounded(results)).claims)


def write_index(entries: Sequence[IndexEntry], folder: Path) -> Path:
    """Write one page over several reports, and the same as claims.md: every report with its result, and every claim.

    The reports are those of the entries and all others in the folder, such as those of another preset. Returns the
    path of the page."""
    folders = {one.folder for one in entries} | {path.parent.name for path in folder.glob("*/index.html")}
    links = (_index_line(folder / name) for name in sorted(folders))
    claims = ["## Claims", "", f"{count_verdicts(entries)} {RULE} {UNITS}", "", claims_table(entries)]
    text = "\n".join([f"# {TITLE}", "", "## Reports", "", *links, "", *claims])
    write_files({"index.html": document(TITLE, text), "claims.md": text.encode()}, folder)
    return folder / "index.html"


def _index_line(folder: Path) -> str:
    """A report's title, its name and its result in short, as far as its folder holds them."""
    address = f"{quote(folder.name)}/report.md"
    try:
        numbers = load_numbers(folder)
    except OSError:
        return f"- [{render.escape_markdown(folder.name)}]({address})"
    title, name, short = (render.escape_markdown(numbers.get(key, "")) for key in ("title", "study", "in short"))
    preset = f", {render.escape_markdown(numbers['preset'])}" if numbers.get("preset") else ""
    return f"- [{title}]({address}) ({name}{preset}). {short}"


def in_paper_order(entries: Sequence[IndexEntry]) -> list[tuple[Claim, IndexEntry, int]]:
    """Every claim with its report and its number there, in the order of the paper."""
    found = [(claim, one, i) for one in sorted(entries) for i, claim in enumerate(one.claims)]
    return sorted(found, key=lambda claim: (not claim[0].where.startswith("section"), claim[0].where))


def shared_findings(claims: Sequence[Claim]) -> list[int]:
    """How many findings of each claim are numbers that another claim rests on: one of fewer findings, or the first."""
    known: set[tuple[Any, ...]] = set()
    counts = [0] * len(claims)
    for i in sorted(range(len(claims)), key=lambda i: len(claims[i].findings)):
        # Values without any spread are a count of none or of all, which other findings may have by chance.
        findings = [one for one in claims[i].findings if one.estimate.se > 0]
        own = {(one.criterion, *numbers(one.estimate.values)) for one in findings}
        counts[i] = len(own & known)
        known |= own
    return counts


def claims_table(entries: Sequence[IndexEntry], base: str = "") -> str:
    """Every claim as one row of a Markdown table, in the order of the paper; links start at `base`."""
    found = in_paper_order(entries)
    rows = []
    for (claim, one, i), count in zip(found, shared_findings([claim for claim, *_ in found]), strict=True):
        shared = f"; {count} of its numbers in another claim too" if count else ""
        where = Entry(claim.where, link=f"{base}{quote(one.folder)}/report.md#claim-{i}")
        verdict = f"{claim.verdict}, {claim.count}{shared}"
        texts = (claim.text, claim.published, claim.paper_verdict, claim.measured, verdict)
        rows.append((where, *map(Entry, texts)))
    return render.markdown(Table("claims", "", CLAIM_COLUMNS, (tuple(rows),), names=len(CLAIM_COLUMNS)))


def count_verdicts(entries: Sequence[IndexEntry]) -> str:
    """The verdicts on all claims in one sentence. A claim that repeats the numbers of others is not counted."""
    found = [claim for claim, *_ in in_paper_order(entries)]
    own = [claim for claim, count in zip(found, shared_findings(found), strict=True) if count < len(claim.findings)]

    def counts(verdicts: Sequence[str], names: Sequence[str]) -> str:
        return ", ".join(f"{verdicts.count(name)} {name}" for name in names)

    here = counts([claim.verdict for claim in own], get_args(Verdict))
    paper = counts([claim.paper_verdict for claim in own], get_args(PaperVerdict))
    return f"{len(own)} claims. Here: {here}. The same rule on the paper's numbers: {paper}."
