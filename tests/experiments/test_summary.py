"""Reports in short: sentences, units and folded tables follow from the numbers; the committed index is complete."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from limpet.evaluation.statistics import Estimate
from limpet.experiments import Results, claims, render, report, summary
from limpet.experiments.report_content import Contrast, Entry, Point, ReportContent, ScatterPlot, Table
from limpet.experiments.study import Cell, Study
from limpet.samplers import Native

sys.path.append(str(Path(__file__).parents[2] / "tools"))
import pictures

REPORTS = Path(__file__).parents[2] / "docs/reports/mini"


def estimate(mean, spread=0.01):
    return Estimate(np.array([mean - spread, mean, mean + spread]))


def results(build_report=lambda _: ReportContent(), cells=("a", "b")):
    study = Study(
        "s", "A title", tuple(Cell(one, "exact:words", Native(nfe=2), 1) for one in cells), (1, 2, 3), build_report
    )
    numbers = {one: {"nll": estimate(2 + i), "entropy": estimate(4 + i)} for i, one in enumerate(cells)}
    return Results(study, {"models": {}, "samples per seed": [1]}, numbers)


def claim(text, *findings):
    return claims.Claim("section 1", text, findings)


YES = claim("Mend has lower NLL", claims.below("NLL of mend minus crs", estimate(-1)))
NO = claim("CRS keeps entropy", claims.above("entropy, crs minus native", estimate(-0.5)))
OPEN = claim("It is so", claims.below("NLL of x minus y", estimate(0)), claims.below("Rep-4 of x minus y", estimate(0)))
ROWS = (((Entry("m"), Entry("-1, below")),), ((Entry("n"), Entry("3, open")),))
VERDICTS = Table("verdicts", "", ("x", "8"), ROWS)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            ReportContent(claims=(YES, NO, OPEN)),
            "Of 3 claims, 1 is supported, 1 is not supported and 1 is inconclusive. Supported: “Mend has lower NLL” "
            "(-1.00 ± 0.0058, nats/token); not supported: “CRS keeps entropy” (-0.500 ± 0.0058, nats).",
        ),
        (ReportContent(claims=(NO,)), "The one claim is not supported: “CRS keeps entropy” (-0.500 ± 0.0058, nats)."),
        (ReportContent(claims=(OPEN, OPEN)), "All 2 claims are inconclusive. The first is: “It is so” (0 of 2 hold)."),
        (
            ReportContent(contrasts=(Contrast("entropy: a minus b", estimate(0.5)), Contrast("nll: a", estimate(0)))),
            "Of 2 contrasts, 1 differs from 0 by a one-sided 95% bound: entropy: a minus b (+0.5000 ± 0.0058 nats).",
        ),
        (
            ReportContent((VERDICTS,)),
            "Of 2 comparisons of NLL with the best top-p curve at equal entropy, 1 lie below; 1 are open.",
        ),
        (
            ReportContent(),
            "The 2 cells reach an NLL of 2.000 to 3.000 nats/token at an entropy of 4.000 to 5.000 nats. The "
            "report tests no claim.",
        ),
    ],
)  # fmt: skip
def test_a_report_in_short(content, sentence):
    assert report.in_short(results(), content) == sentence


@pytest.mark.parametrize(
    ("name", "text", "unit"),
    [
        ("delta NLL against top-p at equal entropy, D=0.5L", "", "nats/token"),
        ("delta NLL, matched on Rep-4", "At equal Rep-4 global top-p has lower NLL", "nats/token"),
        ("entropy cost (native minus CRS), warmup 0.5", "", "nats"),
        ("Rep-4 of CRS minus top-p at equal entropy", "", "fraction"),
        ("committed share of the length, mini", "", "fraction"),
        ("committed: cap of the whole length minus CRS", "", "tokens"),
        ("mini, 8 calls", "Mend lies below the best top-p curve at its own entropy", "nats/token"),
        ("mini", "Something", ""),
    ],
)
def test_a_unit_follows_from_the_name_else_from_the_claim(name, text, unit):
    assert summary.unit_of(results(), name, text) == unit


def test_a_unit_is_in_the_head_where_all_findings_share_it():
    assert report.findings_table(results(), YES, False).head == ("finding", "expected", "here, nats/token", "outcome")
    mixed = report.findings_table(results(), OPEN, False)
    assert mixed.head[2] == "here"
    assert [row[2].text.rpartition(" ")[2] for row in mixed.groups[0]] == ["nats/token", "fraction"]
    content = summary.with_units(ReportContent((Table("t", "", ("H", "GenPPL", "Entropy", "Late p"), ()),)))
    assert content.tables[0].head == ("H, steps", "GenPPL, lower is better", "Entropy, nats", "Late p")


def family_table(rows=20):
    groups = tuple(tuple((Entry(f), Entry(f"{f} {i}"), Entry(f"{i}.5")) for i in range(rows)) for f in ("CRS", "Mend"))
    return Table("samplers", "At 8 calls", ("Family", "Sampler", "NLL"), groups, names=2)


def test_a_long_table_is_folded_by_its_first_column_and_keeps_every_row():
    page = report.document("t", render.markdown(family_table())).decode()
    assert re.findall("<summary>(.*?)</summary>", page) == ["At 8 calls", "CRS (20)", "Mend (20)"]
    assert page.count("<details class=rows open>") == 1
    assert page.count("<tr>") == 2 + 40
    names = re.findall('<div class=wide tabindex=0 role=group aria-label="([^"]*)"', page)
    assert names == ["Table 1: CRS", "Table 2: Mend"]
    short = report.document("t", render.markdown(family_table(3))).decode()
    assert "<details" not in short
    assert "<script" not in short


def test_the_index_has_every_committed_report_with_its_result():
    index = (REPORTS / "claims.md").read_text()
    page = (REPORTS / "index.html").read_text()
    folders = [path.parent for path in REPORTS.glob("*/report.md")]
    assert REPORTS / "interleave-mini-gpu" in folders
    for folder in folders:
        numbers = report.load_numbers(folder)
        (line,) = [
            line for line in index.splitlines() if line.startswith("- ") and f"]({folder.name}/report.md)" in line
        ]
        short = render.escape_markdown(numbers["in short"])
        assert line.startswith(f"- [{render.escape_markdown(numbers['title'])}]")
        assert line.endswith(short)
        assert f"**In short.** {short}\n" in (folder / "report.md").read_text()
        assert f'href="{folder.name}/index.html"' in page
        assert (folder / "index.html").exists()


@pytest.mark.skipif(pictures.chromium() is None, reason="there is no Chromium here: install one")
def test_outliers_are_drawn_at_the_edge_and_named_and_a_filter_hides_rows_and_points(tmp_path):
    pytest.importorskip("playwright", reason="playwright is not installed: pip install 'limpet[dev]'")
    points = [Point(f"mend {i}", "Mend", estimate(4 + i / 10), estimate(3 + i / 10), "a") for i in range(8)]
    points.append(Point("odd", "CRS", estimate(4.2), estimate(90), "b"))
    plot = ScatterPlot("all", "All of them.", "entropy", "NLL", {"one": points})
    one = results(lambda _: ReportContent((family_table(),), scatters=(plot,)))
    with pictures.browser() as browser:
        tab = browser.new_page(viewport={"width": 390, "height": 844})
        problems = []
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.goto(report.write_report(one, tmp_path).as_uri())
        note = tab.locator(".scatter .note").first
        assert note.text_content().startswith("1 hollow point lies outside the axes, at the nearest edge: odd (")
        assert "outside the axes" in tab.locator(".point.outside").get_attribute("aria-label")
        ys = tab.evaluate(
            "[...document.querySelectorAll('.point:not(.outside)')].map(p => p.getBoundingClientRect().y)"
        )
        assert max(ys) - min(ys) > 100  # the others are not squeezed
        tab.fill(".filter input", "mend 1")
        assert tab.locator("tbody tr:visible").count() == 11  # 1 and 10 to 19
        assert tab.locator(".point").count() == 1
        tab.fill(".filter input", "")
        assert tab.locator("tbody tr:not([hidden])").count() == 40
        assert tab.locator("details[open]").count() == 1
        assert problems == []
