"""Reports: verdicts come from intervals, tables and figures hold the numbers, equal results give equal bytes."""

import itertools
import json
import math
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from limpet import style
from limpet.evaluation.judges import CONVENTIONS
from limpet.evaluation.statistics import Estimate
from limpet.experiments import ModelCache, Store, claims, collect, figures, local, render, report, run, units
from limpet.experiments.claims import PublishedValue
from limpet.experiments.report_content import Entry, Panel, Series, Table, format_estimate, format_signed
from limpet.models.exact_sources import source
from limpet.paper.studies import preset, study
from pages import Page


def estimate(mean, se, n=4):
    """n values with this mean and standard error."""
    spread = np.linspace(-1, 1, n)
    return Estimate(mean + spread * se * math.sqrt(n) / spread.std(ddof=1))


def test_bounds_are_students_and_one_sided():
    """Each is wrong once in twenty, so the interval between them has 90%."""
    assert claims.bounds(2.0, 0.5, 4) == pytest.approx(scipy.stats.t.interval(0.9, 3, 2.0, 0.5), rel=1e-4)
    assert claims.bounds(1.0, math.nan, 1) == (-math.inf, math.inf)
    assert claims.bounds(math.nan, math.nan, 4) == (-math.inf, math.inf)


@pytest.mark.parametrize(
    ("finding", "outcome"),
    [
        (claims.below("x", estimate(-1, 0.1)), "holds"),
        (claims.below("x", estimate(-1, 0.44)), "open"),
        (claims.below("x", estimate(-1, 0.4)), "holds"),
        (claims.below("x", estimate(1, 0.1)), "fails"),
        (claims.above("x", estimate(1, 0.1)), "holds"),
        (claims.above("x", estimate(-1, 0.1)), "fails"),
        (claims.within("x", estimate(0.01, 0.001), 0.05), "holds"),
        (claims.within("x", estimate(0.04, 0.01), 0.05), "open"),
        (claims.within("x", estimate(-0.2, 0.01), 0.05), "fails"),
        (claims.within("x", estimate(0, 0), 0), "holds"),
        (claims.below("x", estimate(0, 0)), "open"),
        (claims.between("x", estimate(0.5, 0.05), 0.25, 0.75), "holds"),
        (claims.between("x", estimate(0.7, 0.05), 0.25, 0.75), "open"),
        (claims.between("x", estimate(0.9, 0.05), 0.25, 0.75), "fails"),
        (claims.not_below("x", estimate(-0.1, 0.1)), "holds"),
        (claims.not_below("x", estimate(-1, 0.1)), "fails"),
        (claims.not_above("x", estimate(1, 0.1)), "fails"),
        (claims.not_above("x", Estimate(np.array([-1.0]))), "open"),
        (claims.equivalent("x", estimate(0.04, 0.001), PublishedValue(0.02, 0.02, 0.011)), "holds"),
        (claims.equivalent("x", estimate(0.06, 0.001), PublishedValue(0.02, 0.02, 0.011)), "fails"),
        (claims.below("x", Estimate(np.array([math.nan, -1.0]), ("outside the curve", None))), "open"),
    ],
)
def test_the_outcome_of_a_finding_follows_from_its_bounds(finding, outcome):
    assert finding.outcome == outcome


@pytest.mark.parametrize(
    ("paper", "outcome"),
    [
        (None, ""),
        (PublishedValue(-1, -1), "right sign"),
        (PublishedValue(-2, -1), "right sign"),
        (PublishedValue(-1, 1), "wrong sign"),
        (PublishedValue(-1, -1, 0.4), "holds"),
        (PublishedValue(-1, -1, 0.44), "open"),
        (PublishedValue(1, 1, 0.4), "fails"),
    ],
)
def test_the_papers_numbers_are_judged_by_the_same_rule(paper, outcome):
    assert claims.below("x", estimate(1, 0.1), paper=paper).paper_outcome == outcome


def test_a_verdict_on_the_papers_numbers():
    held, signed, left, wrong = (
        claims.below("x", estimate(1, 0.1), paper=paper)
        for paper in (
            PublishedValue(-1, -1, 0.1),
            PublishedValue(-1, -1),
            PublishedValue(-1, -1, 1),
            PublishedValue(1, 1),
        )
    )
    for findings, verdict in {
        (held,): "supported",
        (held, signed): "by sign",
        (held, signed, left): "inconclusive",
        (held, wrong, left): "not supported",
        (claims.below("x", estimate(1, 0.1)),): "in words",
    }.items():
        assert claims.Claim("section 1", "Something", findings).paper_verdict == verdict


def test_one_sided_bounds_err_as_often_as_their_level_says():
    """Without any effect one finding in twenty holds and one fails: 4000 draws, within four standard errors."""
    rng, count = np.random.default_rng(0), 4000
    outcomes = [claims.below("x", Estimate(rng.normal(size=4))).outcome for _ in range(count)]
    error = 4 * math.sqrt(0.05 * 0.95 / count)
    for outcome in ("holds", "fails"):
        assert abs(outcomes.count(outcome) / count - 0.05) < error


def test_a_verdict_needs_all_findings():
    yes, no, perhaps = (claims.below("x", e) for e in (estimate(-1, 0.1), estimate(1, 0.1), estimate(-1, 1)))
    verdicts = {
        (yes, yes): "supported",
        (yes, perhaps): "inconclusive",
        (yes, perhaps, no): "not supported",
        (claims.below("x", Estimate(np.array([math.nan, math.nan]))),): "not tested",
    }
    for findings, verdict in verdicts.items():
        assert claims.Claim("section 1", "Something", findings).verdict == verdict


def test_a_claim_in_short_and_as_json():
    """Few values one by one, many as their range; the paper's number where it prints one, else the criterion."""
    one = claims.below("x", estimate(-1, 0.1), paper=PublishedValue(-0.5, -0.5, 0.05))
    few = claims.Claim("section 1", "Few", [one, claims.above("y", estimate(-2, 0.1))])
    assert (few.measured, few.published, few.count) == (
        "-1.00 ± 0.1; -2.00 ± 0.1",
        "-0.500 ± 0.05; above 0",
        "1 of 2 hold",
    )
    gone = claims.below("z", Estimate(np.array([math.nan, 1.0]), ("outside the curve", None)))
    assert gone.measured == "no value (outside the curve)"
    values = {i: PublishedValue(i / 2, i / 2) for i in (3, 1, 2)}
    findings = [claims.below("x", estimate(-i, i / 10), paper=value) for i, value in values.items()]
    many = claims.Claim("section 1", "Many", [*findings, gone])
    assert (many.measured, many.published) == ("-3.00 to -1.00 (± 0.3 at most), 1 without a value", "+0.500 to +1.50")
    for claim in (few, many):
        stored = json.loads(json.dumps(claim.to_dict(), allow_nan=False))
        assert (stored["where"], stored["text"], stored["verdict"]) == (claim.where, claim.text, claim.verdict)
        for kept, finding in zip(stored["findings"], claim.findings, strict=True):
            own = Estimate.from_dict(kept)
            np.testing.assert_array_equal(own.values, finding.estimate.values)
            values = kept["name"], kept["expected"], kept["outcome"], kept["paper_outcome"], own.reasons
            expected = finding.name, finding.expected, finding.outcome, finding.paper_outcome, finding.estimate.reasons
            assert values == expected


def test_numbers():
    assert format_estimate(estimate(41.789, 0.84), 2) == "41.79 ± 0.84"
    assert format_estimate(Estimate(np.array([1.0])), 1) == "1.0"
    assert format_signed(estimate(0.5, 0.1), 1) == "+0.5 ± 0.1"
    assert format_signed(estimate(-0.5, 0.1), 1) == "-0.5 ± 0.1"
    assert format_signed(Estimate(np.array([math.nan, 1.0])), 1) == "n/a"


TABLE = Table(
    "t", "A < B & 5%", ("sampler", "GenPPL"),
    (((Entry("a_1"), Entry("1.0 ± 0.1", "2.0")),), ((Entry("∞"), Entry("3")),)),
)  # fmt: skip


def test_a_table_in_three_formats():
    html = render.FORMATS["html"](TABLE)
    assert "A &lt; B &amp; 5%" in html
    assert html.count("<tr>") == 3
    assert '<td style="text-align:right">1.0 ± 0.1 [2.0]</td>' in html
    assert "<td>a_1</td>" in html
    assert "| a_1 | 1.0 ± 0.1 [2.0] |" in render.markdown(TABLE)
    latex = render.latex(TABLE)
    assert r"a\_1 & 1.0 $\pm$ 0.1 [2.0] \\" in latex
    assert latex.count(r"\midrule") == 2
    assert r"A < B \& 5\%" in latex


NASTY = (
    "<script>alert(1)</script>", "<a id=\"x\"></a>", "[a](http://b.c)", "![a](b.svg)", "a | b", "*a*", "_a_ b_c", "`a`",
    "a\\b", "&lt;", "<http://b.c>", "a\nb", "</table>", "[a]: b", "**", "a_", "__init__",
)  # fmt: skip


@pytest.mark.parametrize("name", NASTY)
def test_a_users_name_is_shown_as_it_is(name):
    """In Markdown and so in the page: it makes no tag, no link and no emphasis."""

    class Text(HTMLParser):
        def __init__(self):
            super().__init__()
            self.tags, self.words = set(), []

        def handle_starttag(self, tag, attributes):
            self.tags.add(tag)

        def handle_data(self, data):
            self.words.append(data)

    table = Table("t", f"of {name}", ("sampler", name), (((Entry(name), Entry("1", name)),),))
    text = Text()
    text.feed(render.FORMATS["html"](table))
    assert text.tags == {"p", "table", "thead", "tbody", "tr", "th", "td"}
    shown = " ".join(name.split())
    assert [word for word in text.words if word.strip()] == [f"of {shown}", "sampler", shown, shown, f"1 [{shown}]"]


@pytest.mark.parametrize("name", ["samplers", "frontier", "nfe-scaling", "warmup", "storage"])
def test_no_legend_covers_data(name, monkeypatch):
    """Of the committed reports' figures: legends and panels share no point."""
    canvas, drawn = pytest.importorskip("matplotlib.figure"), []

    class Kept(canvas.Figure):
        def savefig(self, *args, **named):
            drawn.append(self)
            super().savefig(*args, **named)

    monkeypatch.setattr(canvas, "Figure", Kept)
    one = study(name, preset("mini-gpu"))
    results = report.read_report(one, Path(__file__).parents[2] / "docs/reports/mini" / one.full_name)
    for figure in report.content_of(results).figures:
        figures.draw(figure)
    legends = [*drawn[0].legends, *(axes.get_legend() for axes in drawn[0].axes if axes.get_legend())]
    assert legends
    for legend, axes in itertools.product(legends, drawn[0].axes):
        assert not legend.get_window_extent().overlaps(axes.get_window_extent())


def test_a_family_has_one_colour_and_its_members_differ_in_marker():
    names = ("CRS, argmax", "native", "Psi", "Mend", "top-p .9", "CRS, keep", "native, top-p .8", "Gibbs")
    lines = figures.styled(Panel("", "x", "y", tuple(Series(name, (1,), (1,)) for name in names)))
    kinds = ("crs", "native", "rival0", "mend", "top-p", "crs", "top-p", "rival1")
    assert [colour for colour, _, _ in lines] == [style.colours()[kind] for kind in kinds]
    assert len({(marker, line) for _, marker, line in lines}) == len(names)


@pytest.mark.parametrize("dark", [False, True])
def test_every_colour_has_contrast(dark):
    """By WCAG's formula: three to one for what is drawn."""

    def light(colour):
        parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        linear = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    found = style.colours(dark)
    assert found.keys() >= set(style.COLOURS)
    for name in style.COLOURS:
        one, two = sorted((light(found[name]), light(found["card"])))
        assert (two + 0.05) / (one + 0.05) >= 3, name


def test_verdicts_have_a_colour_and_a_sign_and_tables_scroll_by_themselves(finished):
    yes, no = (claims.Claim("appendix A", "x", [claims.below("x", estimate(m, 0.1))]) for m in (-1, 1))
    text = "\n".join(
        [f"Here: **{one.verdict}**.\n\n{render.markdown(report.findings_table(finished, one))}" for one in (yes, no)]
    )
    page = report.document("t", f"{text}\n{report.claims_table([report.IndexEntry('a', 'a', (yes, no))])}").decode()
    for mark in ("<strong class=yes>supported</strong>", "<strong class=no>not supported</strong>",
                 "<span class=yes>holds</span>", "<span class=no>fails</span>", "<span class=yes>supported</span>, ",
                 "<span class=no>not supported</span>, "):  # fmt: skip
        assert mark in page
    assert page.count("<div class=wide tabindex=0") == page.count("<table>") == 3


def test_a_page_has_its_contents_and_a_way_back():
    page = report.document("t", "# t\n\n## One & two\n\n## Three", back=report.BACK).decode()
    assert '<a href="#part-1">One &amp; two</a><a href="#part-2">Three</a></nav>' in page
    assert '<h2 id="part-2">Three</h2>' in page
    assert "<a href=../index.html>All reports</a>" in page


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return Store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def finished(store):
    models, one = ModelCache(), replace(study("frontier", preset("smoke")), is_toy=False)
    run(one, store, local(models=models), models)
    return collect(one, store)


def test_a_report_is_one_page_and_a_folder(finished, tmp_path):
    page = report.write_report(finished, tmp_path / "a")
    tags = Page(page.read_text()).tags
    links = [one[name] for _, one in tags for name in ("src", "href", "xlink:href", "data") if one.get(name)]
    assert all(link.startswith("#") for link in links)
    assert not {"script", "link", "iframe"} & {tag for tag, _ in tags}
    assert "url(http" not in page.read_text()
    names = {str(path.relative_to(tmp_path / "a")) for path in (tmp_path / "a").rglob("*.*")}
    assert {"tables/frontier-base.tex", "tables/frontier-distilled.md", "figures/frontier.svg", "figures/frontier.png",
            "report.md", "report.json", "index.html"} <= names  # fmt: skip
    report.write_report(finished, tmp_path / "b")
    for path in (tmp_path / "a").rglob("*.*"):
        assert path.read_bytes() == (tmp_path / "b" / path.relative_to(tmp_path / "a")).read_bytes()


def test_a_report_holds_the_numbers(finished, store, tmp_path):
    report.write_report(finished, tmp_path)
    document = json.loads((tmp_path / "report.json").read_text())
    cell = document["cells"]["distilled/D/0.5"]
    plan = store.read_plan(units.plan_name(finished.study))
    keys = next(one["keys"] for one in plan["cells"] if one["name"] == "distilled/D/0.5")
    rows = [store.read(key).rows for key in keys]
    nll = [np.sum(r["columns"]["nll:0"]) / np.sum(r["columns"]["tokens:0"]) for r in rows]
    assert cell["nll"]["values"] == pytest.approx(nll)
    assert cell["ppl"]["mean"] == pytest.approx(np.exp(nll).mean())
    assert cell["nll"]["se"] == pytest.approx(np.std(nll, ddof=1) / math.sqrt(2))
    machine = document["provenance"]["computed on"][0]
    assert {"device", "precision", "torch", "limpet"} <= set(machine)
    assert set(document["provenance"]["models"]) == {"exact:words", "exact:chain"}
    distributions = [source(name) for name in ("exact:words", "exact:chain")]
    assert document["provenance"]["judges"] == [
        {
            "name": f"true distribution of {probs.name}",
            "digest": probs.digest,
            "precision": "float64",
            "convention": "exact",
        }
        for probs in distributions
    ]
    assert document["provenance"]["conventions"]["exact"] == CONVENTIONS["exact"].rule
    counted = 2 * 4 * sum(distributions[cell.model == "exact:chain"].length for cell in finished.study.cells)
    assert document["provenance"]["counted tokens"] == {"true distribution": counted}
    markdown = (tmp_path / "tables/frontier-distilled.md").read_text()
    assert f"| D=0.5L | {cell['ppl']['mean']:.2f} ± {cell['ppl']['se']:.2f} [28.27 ± 0.53]" in markdown
    for claim in document["claims"]:
        assert claim["verdict"] in ("supported", "not supported", "inconclusive", "not tested")
        assert claim["verdict"] in (tmp_path / "report.md").read_text()


def test_a_toy_is_not_compared_with_the_paper(finished, tmp_path):
    """No page has the paper's numbers or verdicts on its claims. Toys are the smallest preset and exact sources."""
    assert [study("frontier", preset(name)).is_toy for name in ("smoke", "exact", "mini", "paper")] == [
        True,
        True,
        False,
        False,
    ]
    toy = replace(finished, study=replace(finished.study, is_toy=True))
    assert "[28.27 ± 0.53]" in report.markdown(finished, report.content_of(finished))
    report.write_report(toy, tmp_path)
    document = json.loads((tmp_path / "report.json").read_text())
    assert document["claims"] == []
    assert {one["paper"] for one in document["contrasts"]} == {""}
    for path in (*tmp_path.rglob("*.md"), *tmp_path.rglob("*.tex"), tmp_path / "index.html"):
        text = path.read_text()
        assert "[28.27" not in text
        assert "upported" not in text
        assert "| paper |" not in text
    assert report.index_entry(toy).claims == ()
    assert document["cells"] == report.to_dict(report.rounded(toy), report.content_of(toy))["cells"]


def test_without_matplotlib_a_report_has_its_tables(finished, tmp_path, monkeypatch):
    warnings: list[str] = []
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib", None)
        page = report.write_report(finished, tmp_path / "a", warn=warnings.append)
    assert warnings == ["the report of frontier has no figures: this needs matplotlib: pip install 'limpet[figures]'"]
    assert not (tmp_path / "a/figures").exists()
    assert "figures/" not in (tmp_path / "a/report.md").read_text()
    assert "<table" in page.read_text()
    report.write_report(finished, tmp_path / "b", warn=warnings.append)
    assert len(warnings) == 1
    for table in (tmp_path / "b/tables").iterdir():
        assert (tmp_path / "a/tables" / table.name).read_bytes() == table.read_bytes()


def test_an_index_over_reports(finished, tmp_path):
    """Every claim with its numbers and verdict, in the order of the paper; other pages in the folder are linked."""
    report.write_report(finished, tmp_path / "frontier-smoke")
    (tmp_path / "audits").mkdir()
    (tmp_path / "audits/index.html").write_text("")
    page = report.write_index([report.index_entry(finished)], tmp_path)
    title, short = finished.study.title, report.in_short(finished, report.content_of(finished))
    assert f'<a href="frontier-smoke/index.html">{title}</a> (frontier, smoke). {short}' in page.read_text()
    assert '<a href="audits/index.html">audits</a>' in page.read_text()
    text = (tmp_path / "claims.md").read_text()
    links = f"- [audits](audits/report.md)\n- [{title}](frontier-smoke/report.md) (frontier, smoke). {short}\n"
    assert text.startswith(f"# {report.TITLE}\n\n## Reports\n\n{links}\n## Claims\n")  # the reports first
    tested = finished.study.build_report(finished).claims
    for claim in tested:
        row = next(line for line in text.splitlines() if claim.text in line)
        assert f"| {claim.published} | {claim.paper_verdict} | {claim.measured} | {claim.verdict}, {claim.count}" in row
    places = [re.match(r"\| \[(.*?)\]", line).group(1) for line in text.splitlines() if line.startswith("| [")]
    assert places == sorted((claim.where for claim in tested), key=lambda where: (where[0] != "s", where))
    assert (
        report.claims_table([report.index_entry(report.read_report(finished.study, tmp_path / "frontier-smoke"))])
        in text
    )
    anchors = re.findall(r"frontier-smoke/index.html#(claim-\d+)", page.read_text())
    assert all(f'<a id="{anchor}"></a>' in (tmp_path / "frontier-smoke/index.html").read_text() for anchor in anchors)
    assert len(set(anchors)) == len(tested)


def test_verdicts_are_counted():
    yes, no = (claims.Claim("appendix A", "x", [claims.below("x", estimate(m, 0.1))]) for m in (-1, 1))
    entries = [report.IndexEntry("a", "a", (no, yes)), report.IndexEntry("b", "b", (yes,)), report.IndexEntry("c", "c")]
    assert report.count_verdicts(entries) == (
        "2 claims. Here: 1 supported, 1 not supported, 0 inconclusive, 0 not tested. The same rule on the paper's "
        "numbers: 0 supported, 0 not supported, 0 inconclusive, 0 by sign, 2 in words."
    )


def test_a_number_in_two_claims_is_counted_once():
    one, other = estimate(-1, 0.1), estimate(-1, 0.2)
    both = claims.Claim("section 1", "both", [claims.below("x", one), claims.below("y", other)])
    alone, none = (claims.Claim("section 2", "alone", [claims.below("x", e)]) for e in (one, estimate(0, 0)))
    assert report.shared_findings([both, alone, none, none]) == [1, 0, 0, 0]
    found = [report.IndexEntry("a", "a", (both, alone))]
    assert report.count_verdicts(found).startswith("2 claims.")
    lines = report.claims_table(found).splitlines()
    assert lines[2].endswith("| supported, 2 of 2 hold; 1 of its numbers in another claim too |")
    assert lines[3].endswith("| supported, 1 of 1 hold |")
    again = [*found, report.IndexEntry("b", "b", (claims.Claim("section 3", "again", [claims.below("x", one)]),))]
    assert report.count_verdicts(again).startswith("2 claims.")
