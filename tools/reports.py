"""Write docs/reports, the claims in docs/reproduce.md and the tables of docs/audits.md from numbers as JSON.

python tools/reports.py NUMBERS.json     # {"nfe-scaling-mini-gpu": collect(...).to_dict(), ...}, for any of them
python tools/reports.py                  # again, from the committed numbers

For a study whose page shows texts, "texts" stands beside its cells. A committed report is its page, its Markdown, its
SVGs and its compressed numbers; `report.write_report` makes other formats from them."""

from __future__ import annotations

import json
import lzma
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import audits
from audits import audit_study, values_study
from blocks import put
from limpet.experiments import Results, Study, report, study_files
from limpet.paper import studies

DOCS = Path(__file__).parents[1] / "docs"
REPORTS = DOCS / "reports"
FOLDER = REPORTS / "mini"
CLAIMS = "claims: report.count_verdicts and report.claims_table of reports/mini"
NOT_IN_PAPER = (("samplers", "mini-gpu"), ("samplers", "exact"), ("forms", "mini-gpu"), ("pareto", "mini-gpu"),
                ("interleave", "mini-gpu"), ("truth", "mini-cpu"))  # fmt: skip
STUDY_FILES = ("final-step-sample", "readings", "readings-prompt")  # studies from TOML files


def other_studies() -> Iterator[tuple[Path, Study]]:
    """Committed reports of other models and sizes than a preset's, with their folders."""
    for folder in sorted(REPORTS.glob("values/*")):
        yield folder, values_study(folder)
    for folder in sorted(REPORTS.glob("revision/*")):
        yield folder, audit_study("revision", folder)
    yield FOLDER / "selection-other-text", audit_study("selection", FOLDER / "selection-other-text")


def write(numbers: Mapping[str, Any], several: Iterable[Study]) -> Iterator[report.IndexEntry]:
    """Write reports from new numbers, or again from the committed ones."""
    for one in several:
        folder = FOLDER / one.full_name
        if one.full_name in numbers:
            new = numbers[one.full_name]
            results = replace(Results.from_dict(one, new), texts=new.get("texts", {}))
        else:
            results = report.read_report(one, folder)
        report.write_report(results, folder, in_index=True)
        yield report.index_entry(results)


def compress(folder: Path) -> None:
    """Reduce a report to the files that are committed."""
    for file in (*folder.glob("figures/*.png"), *folder.glob("tables/*")):
        file.unlink()
    if (folder / "tables").is_dir():
        (folder / "tables").rmdir()
    if (numbers := folder / "report.json").exists():
        (folder / "report.json.xz").write_bytes(lzma.compress(numbers.read_bytes(), preset=9))
        numbers.unlink()


def main(file: Path | None) -> None:
    numbers = {} if file is None else json.loads(file.read_text(encoding="utf-8"))
    entries = list(write(numbers, studies.all_studies(studies.preset("mini-gpu"))))
    others = [studies.study(name, studies.preset(size)) for name, size in NOT_IN_PAPER]
    others.append(studies.study("revision", studies.audit_presets("revision")["mini"]))
    list(write(numbers, [*others, *(study_files.load(FOLDER / f"{name}.toml") for name in STUDY_FILES)]))
    for folder, study in other_studies():
        page = report.write_report(report.read_report(study, folder), folder, in_index=folder.parent == FOLDER)
        if folder.parent != FOLDER:
            page.unlink()  # its Markdown is enough
    for folder in REPORTS.glob("*/*/"):
        compress(folder)
    report.write_index(entries, FOLDER)
    tally = report.count_verdicts(entries)
    put(DOCS / "reproduce.md", CLAIMS, f"{tally}\n\n{report.claims_table(entries, 'reports/mini/')}")
    for name, block in audits.blocks(audits.committed(REPORTS)).items():
        put(DOCS / "audits.md", name, block)
    print(tally)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
