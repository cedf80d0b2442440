"""A report: one self-contained page, and beside it every table, figure and number as a file of its own; and an index
over several, with every claim of the paper."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from limpet.errors import LimpetError
from limpet.lab import figures, render, units
from limpet.lab.claims import FEW, LEVEL, Claim
from limpet.lab.page import Contrast, Entry, Figure, Page, Table, signed
from limpet.lab.results import Results
from limpet.stats import Estimate

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#111;background:#fff}
table{border-collapse:collapse;margin:1rem 0 2rem;font-variant-numeric:tabular-nums}
caption,figcaption{text-align:left;padding:.3rem 0;color:#444;max-width:60rem}
th,td{padding:.2rem .7rem;text-align:right;font-weight:normal}thead th{border-bottom:1px solid}
th[scope=row],thead th:first-child{text-align:left}tbody+tbody{border-top:1px solid #aaa}
tbody:last-child{border-bottom:1px solid}
.paper{color:#666;font-size:85%;white-space:nowrap}figure{margin:1rem 0}figure svg{max-width:100%;height:auto}
.verdict{font-weight:bold}.claim{border-left:4px solid #888;padding-left:.8rem;margin:1.5rem 0}
.claim table{margin:.3rem 0}.claim p{margin:0}.left td,.left th{text-align:left;vertical-align:top}
.supported{border-color:#009E73}.not-supported{border-color:#D55E00;border-left-style:double}
.inconclusive{border-left-style:dashed}pre{white-space:pre-wrap;font-size:85%}
"""


BRACKETS = "In brackets: the paper's values, of its own models at its own sizes."


def write(results: Results, folder: Path) -> Path:
    """Write a study's report into a folder of its own; returns the page."""
    page = results.study.show(results)
    drawn = {figure.name: figures.draw(figure) for figure in page.figures}
    files: dict[str, bytes] = {"index.html": _html(results, page, drawn).encode()}
    for table in page.tables:
        files |= {f"tables/{table.name}.{kind}": make(table).encode() for kind, make in render.FORMATS.items()}
    for name, kinds in drawn.items():
        files |= {f"figures/{name}.{kind}": data for kind, data in kinds.items()}
    files["report.md"] = _markdown(results, page).encode()
    files["report.json"] = compact(to_dict(results, page))
    write_files(files, folder)
    return folder / "index.html"


def compact(document: Mapping[str, Any]) -> bytes:
    """A document of numbers, for programs to read."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def write_files(files: Mapping[str, bytes], folder: Path) -> None:
    """Files by their paths in a folder, which is made even if there are none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, data in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
    except OSError as error:
        raise LimpetError(
            f"the report cannot be written to {folder} ({error.strerror}): name another folder"
        ) from error


def to_dict(results: Results, page: Page) -> dict[str, Any]:
    """Every number of a report."""
    measures = ["ppl", "nll", *results.study.metrics, "selected", "visible", "nfe"]
    measures += [f"nll:{judge}" for judge in results.judges[1:]]
    return {
        "study": results.study.name,
        "title": results.study.title,
        "preset": results.study.preset,
        "provenance": provenance(results),
        "claims": [claim.to_dict() for claim in page.claims],
        "contrasts": [{"name": c.name, **_estimate(c.estimate), "paper": c.paper} for c in page.contrasts],
        "cells": {
            cell.name: {measure: _estimate(results(cell.name, measure)) for measure in measures}
            for cell in results.study.cells
        },
    }


def provenance(results: Results) -> dict[str, Any]:
    """What made these numbers: every distinct machine, and what decided the results."""
    rows = [rows for cell in results.units.values() for rows in cell]
    made = sorted({json.dumps(row["provenance"], sort_keys=True) for row in rows})
    plan = results.plan
    return {
        "models": plan["models"],
        "judges": plan["judges"],
        "conventions": plan["conventions"],
        "shards": plan["shards"],
        "samples in a shard": sorted({cell["n"] for cell in plan["cells"]}),
        "units": len(rows),
        "law": plan["law"],
        "made on": [json.loads(entry) for entry in made],
    }


def _estimate(estimate: Estimate) -> dict[str, Any]:
    def plain(value: float) -> float | None:
        return None if value != value else value

    values = [plain(value) for value in estimate.values.tolist()]
    return {"mean": plain(estimate.mean), "se": plain(estimate.se), "shards": values}


def _html(results: Results, page: Page, drawn: dict[str, dict[str, bytes]]) -> str:
    study = results.study

    def parts() -> Iterator[str]:
        yield f"<h1>{escape(study.title)}</h1><p>{escape(_summary(results))}</p>"
        if page.claims:
            yield f"<h2>Claims of the paper</h2><p>{escape(_rule())}</p>"
        for i, claim in enumerate(page.claims):
            yield (
                f'<div id=claim-{i} class="claim {claim.verdict.replace(" ", "-")}"><p>{escape(claim.text)} '
                f"({escape(claim.where)}). <span class=verdict>{claim.verdict.capitalize()}</span>, {claim.count}.</p>"
                f"{render.html(findings(claim))}</div>"
            )
        if page.tables:
            yield f"<h2>Tables</h2><p>{BRACKETS}</p>"
        yield from (render.html(table) for table in page.tables)
        yield "<h2>Figures</h2>" if page.figures else ""
        yield from (_drawn(figure, drawn[figure.name]["svg"]) for figure in page.figures)
        yield _contrasts_html(page.contrasts) if page.contrasts else ""
        yield f"<h2>Provenance</h2><pre>{escape(json.dumps(provenance(results), indent=1, ensure_ascii=False))}</pre>"

    return document(study.title, "".join(parts()))


def document(title: str, body: str) -> str:
    head = f"<meta charset=utf-8><meta name=viewport content='width=device-width'><title>{escape(title)}</title>"
    return f"<!doctype html><html lang=en>{head}<style>{STYLE}</style><body>{body}</body></html>\n"


def _drawn(figure: Figure, svg: bytes) -> str:
    image = svg.decode()
    return f"<figure>{image[image.index('<svg') :]}<figcaption>{escape(figure.caption)}</figcaption></figure>"


def _contrasts_html(contrasts: tuple[Contrast, ...]) -> str:
    rows = "".join(
        f"<tr><th scope=row>{escape(c.name)}</th><td>{signed(c.estimate, 4)}</td>"
        f"<td class=paper>{escape(c.paper)}</td></tr>"
        for c in contrasts
    )
    head = "<thead><tr><th>Contrast</th><th>here</th><th>paper</th></tr></thead>"
    return f"<h2>Contrasts, paired by shard</h2><table>{head}<tbody>{rows}</tbody></table>"


def _markdown(results: Results, page: Page) -> str:
    lines = [f"# {results.study.title}", "", _summary(results), ""]
    if page.claims:
        lines += ["## Claims of the paper", "", _rule(), ""]
        for claim in page.claims:
            lines += [f"**{claim.text}** ({claim.where}). Here: **{claim.verdict}**, {claim.count}.", ""]
            lines += [render.markdown(findings(claim))]
        lines += ["## Tables and figures", "", BRACKETS, ""]
    lines += [render.markdown(table) for table in page.tables]
    lines += [f"![{figure.caption}](figures/{figure.name}.svg)\n" for figure in page.figures]
    if page.contrasts:
        lines += ["| contrast, paired by shard | here | paper |", "| --- | ---: | ---: |"]
        lines += [f"| {c.name} | {signed(c.estimate, 4)} | {c.paper} |" for c in page.contrasts] + [""]
    made = json.dumps(provenance(results), indent=1, ensure_ascii=False)
    return "\n".join([*lines, "## Provenance", "", "```json", made, "```", ""])


def _summary(results: Results) -> str:
    plan, study = results.plan, results.study
    models = ", ".join(f"{name} ({digest[:12]})" for name, digest in plan["models"].items())
    counts = sorted({cell["n"] for cell in plan["cells"]})
    return (
        f"Study {study.name}{f', preset {study.preset}' if study.preset else ''}: {len(plan['cells'])} cells on "
        f"{models}; {len(plan['shards'])} shards of {' or '.join(map(str, counts))} samples; judged by "
        f"{', '.join(results.judges)}. Mean ± standard error over shards."
    )


def _rule() -> str:
    return (
        f"A finding holds when its whole {LEVEL:.0%} interval (Student's t over shards) is on the wanted side, and "
        "fails when it is all on the other; a claim is supported when all its findings hold, and not when one fails."
    )


def findings(claim: Claim) -> Table:
    """What a claim rests on, a line each."""
    rows = tuple(
        (Entry(f.name), Entry(f.here), Entry("" if f.paper is None else f.there), Entry(f.wanted), Entry(f.outcome))
        for f in claim.findings
    )
    return Table("findings", "", ("finding", "here", "paper", "wanted", "outcome"), (rows,))


# The index


class Section(NamedTuple):
    """One report of several: a folder with index.html and report.md, and the claims that it tests, if any."""

    name: str
    folder: str  # under that of the index
    claims: tuple[Claim, ...] = ()


def section(results: Results) -> Section:
    return Section(results.study.name, units.name(results.study), results.study.show(results).claims)


def read_sections(folder: Path) -> list[Section]:
    """The sections of an index that was written, from the numbers in their folders."""
    found = []
    for path in sorted(folder.glob("*/report.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        found.append(Section(document["study"], path.parent.name, tuple(map(Claim.from_dict, document["claims"]))))
    return found


def beside(folder: Path, sections: Sequence[Section]) -> list[Section]:
    """Whatever else has a page in the index's folder: audits, studies of one's own, other presets. Linked, no more."""
    known = {one.folder for one in sections}
    names = sorted(path.parent.name for path in folder.glob("*/index.html"))
    return [Section(name, name) for name in names if name not in known]


def write_index(sections: Sequence[Section], folder: Path) -> Path:
    """One page over several reports, and the same as claims.md: every claim with the paper's numbers, ours and the
    verdict, and a link to every report."""
    links = "".join(
        f"<li><a href='{quote(one.folder)}/index.html'>{escape(one.name)}</a></li>" for one in _ordered(sections)
    )
    rows = []
    for one, i, claim in _by_place(sections):
        link = f"{quote(one.folder)}/index.html#claim-{i}"
        texts = (claim.text, claim.there, claim.here, f"{claim.verdict}, {claim.count}")
        cells = "".join(f"<td>{escape(text)}</td>" for text in texts)
        rows.append(f"<tr><th scope=row><a href='{link}'>{escape(claim.where)}</a></th>{cells}</tr>")
    head = "".join(f"<th>{name}</th>" for name in HEAD)
    body = (
        f"<h1>Claims of the paper</h1><p>{escape(tally(sections))} {escape(_rule())} {escape(UNITS)}</p>"
        f"<table class=left><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        f"<h2>Reports</h2><ul>{links}</ul>"
    )
    text = "\n".join([
        "# Claims of the paper", "", f"{tally(sections)} {_rule()} {UNITS}", "", overview(sections), "## Reports", "",
        *(f"- [{one.name}]({quote(one.folder)}/report.md)" for one in _ordered(sections)), "",
    ])  # fmt: skip
    write_files({"index.html": document("Claims of the paper", body).encode(), "claims.md": text.encode()}, folder)
    return folder / "index.html"


UNITS = (
    "Numbers are differences, in nats per token where the claim is about likelihood; a range where there are more than "
    f"{FEW} of them, and the side alone where the paper prints none."
)
HEAD = ("Where", "Claim", "Paper", "Here", "Verdict")


def overview(sections: Sequence[Section], base: str = "") -> str:
    """Every claim as one row of a Markdown table, in the order of the paper; links start at `base`."""
    rows = tuple(
        (Entry(f"[{claim.where}]({base}{quote(one.folder)}/report.md)"), Entry(claim.text), Entry(claim.there),
         Entry(claim.here), Entry(f"{claim.verdict}, {claim.count}"))
        for one, _, claim in _by_place(sections)
    )  # fmt: skip
    return render.markdown(Table("claims", "", HEAD, (rows,), labels=len(HEAD)))


def tally(sections: Sequence[Section]) -> str:
    verdicts = [claim.verdict for one in sections for claim in one.claims]
    counts = (f"{verdicts.count(verdict)} {verdict}" for verdict in ("supported", "not supported", "inconclusive"))
    return f"{len(verdicts)} claims: {', '.join(counts)}."


def _ordered(sections: Sequence[Section]) -> list[Section]:
    return sorted(sections, key=lambda one: one.name)


def _by_place(sections: Sequence[Section]) -> list[tuple[Section, int, Claim]]:
    """Claims by where they stand in the paper: sections before appendices."""
    found = [(one, i, claim) for one in _ordered(sections) for i, claim in enumerate(one.claims)]
    return sorted(found, key=lambda entry: (not entry[2].where.startswith("section"), entry[2].where))
