"""What docs/reports/mini, the claims in docs/reproduce.md and the tables of docs/audits.md are made of: numbers made
elsewhere, as JSON.

python tools/reports.py NUMBERS.json     # {"nfe-scaling-mini-gpu": lab.collect(...).to_dict(), ...}, any of them
python tools/reports.py                  # from the numbers that are committed, again

Of a study that shows texts, `"texts"` stand beside its cells. A committed report is its page, its Markdown with the
SVGs, and its numbers, compressed: tables in other formats and PNGs come out of `report.write` again."""

from __future__ import annotations

import json
import lzma
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import audits
from blocks import put
from limpet.experiments import Results, Study, report, units
from limpet.paper import studies
from limpet.paper.studies import mending

DOCS = Path(__file__).parents[1] / "docs"
FOLDER = DOCS / "reports" / "mini"
CLAIMS = "claims: report.tally and report.overview of reports/mini"


OWN = (("samplers", "mini-gpu"), ("samplers", "exact"), ("forms", "mini-gpu"), ("pareto", "mini-gpu"),
       ("interleave", "mini-gpu"))  # fmt: skip


def written(made: Mapping[str, Any], several: Iterator[Study]) -> Iterator[report.Section]:
    """Reports, each from its new numbers or from those that are committed."""
    for one in several:
        name = units.name(one)
        if name in made:
            results = replace(Results.from_dict(one, made[name]), texts=made[name].get("texts", {}))
        else:
            results = report.read(one, FOLDER / name)
        report.write(results, FOLDER / name, among=True)
        yield report.section(results)


def thin(folder: Path) -> None:
    """A report as it is committed."""
    for file in (*folder.glob("figures/*.png"), *folder.glob("tables/*")):
        file.unlink()
    if (folder / "tables").is_dir():
        (folder / "tables").rmdir()
    if (numbers := folder / "report.json").exists():
        (folder / "report.json.xz").write_bytes(lzma.compress(numbers.read_bytes(), preset=9))
        numbers.unlink()


def main(numbers: Path | None) -> None:
    made = {} if numbers is None else json.loads(numbers.read_text(encoding="utf-8"))
    sections = list(written(made, iter(studies.whole(studies.preset("mini-gpu")))))
    list(written(made, (studies.study(name, studies.preset(size)) for name, size in OWN)))
    list(written(made, iter([studies.study("mending", mending.PRESETS["mini"])])))
    report.write_index(sections, FOLDER)
    for folder in (DOCS / "reports").glob("*/*/"):
        thin(folder)
    put(DOCS / "reproduce.md", CLAIMS, f"{report.tally(sections)}\n\n{report.overview(sections, 'reports/mini/')}")
    for name, block in audits.blocks(audits.committed(FOLDER)).items():
        put(DOCS / "audits.md", name, block)
    print(report.tally(sections))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
