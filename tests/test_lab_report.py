"""Reports: verdicts come from intervals, tables and figures hold the numbers, equal results give equal bytes."""

import json
import math
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import scipy.stats

from limpet.denoisers.sources import source
from limpet.judges import CONVENTIONS
from limpet.lab import Shelf, Store, claims, collect, figures, render, report, run
from limpet.lab.page import Entry, Figure, Panel, Series, Table, number, signed
from limpet.lab.places import local
from limpet.stats import Estimate
from limpet.studies import preset, study


def estimate(mean, se, n=4):
    """n values with this mean and standard error."""
    spread = np.linspace(-1, 1, n)
    return Estimate(mean + spread * se * math.sqrt(n) / spread.std(ddof=1))


@pytest.mark.parametrize("df", [1, 2, 3, 7, 30])
@pytest.mark.parametrize("level", [0.5, 0.95, 0.99])
def test_students_quantile(df, level):
    """Against the density itself: with t = sqrt(df) tan a, that of a is cos(a)^(df - 1)."""
    angle = np.linspace(0, np.pi / 2, 200_001)
    mass = np.cos(angle) ** (df - 1)
    cumulated = np.concatenate([[0.0], np.cumsum((mass[1:] + mass[:-1]) / 2)])
    expected = math.sqrt(df) * math.tan(float(np.interp(level * cumulated[-1], cumulated, angle)))
    assert claims.student(df, level) == pytest.approx(expected, rel=1e-4)


def test_an_interval_is_students():
    low, high = claims.interval(estimate(2.0, 0.5))
    assert (low, high) == pytest.approx(scipy.stats.t.interval(0.95, 3, 2.0, 0.5), rel=1e-4)
    assert claims.interval(Estimate(np.array([1.0]))) == (-math.inf, math.inf)
    assert claims.interval(Estimate(np.array([1.0, math.nan]))) == (-math.inf, math.inf)


@pytest.mark.parametrize(
    ("finding", "outcome"),
    [
        (claims.below("x", estimate(-1, 0.1)), "holds"),
        (claims.below("x", estimate(-1, 0.4)), "open"),
        (claims.below("x", estimate(1, 0.1)), "fails"),
        (claims.above("x", estimate(1, 0.1)), "holds"),
        (claims.above("x", estimate(-1, 0.1)), "fails"),
        (claims.within("x", estimate(0.01, 0.001), 0.05), "holds"),
        (claims.within("x", estimate(0.04, 0.01), 0.05), "open"),
        (claims.within("x", estimate(-0.2, 0.01), 0.05), "fails"),
        (claims.below("x", Estimate(np.array([math.nan, -1.0]), ("outside the curve", None))), "open"),
    ],
)
def test_a_finding_rests_on_its_whole_interval(finding, outcome):
    assert finding.outcome == outcome


def test_a_verdict_needs_all_findings():
    yes, no, perhaps = (claims.below("x", e) for e in (estimate(-1, 0.1), estimate(1, 0.1), estimate(-1, 1)))
    verdicts = {
        (yes, yes): "supported",
        (yes, perhaps): "inconclusive",
        (yes, perhaps, no): "not supported",
        (): "inconclusive",
    }
    for findings, verdict in verdicts.items():
        assert claims.Claim("section 1", "Something", findings).verdict == verdict


def test_a_claim_in_short_and_as_json():
    """Few values one by one, many as their range; the paper's number where it prints one, else the side."""
    few = claims.Claim("section 1", "Few", [claims.below("x", estimate(-1, 0.1), paper=-0.5),
                                            claims.above("y", estimate(-2, 0.1))])  # fmt: skip
    assert (few.here, few.there, few.count) == ("-1.00 ± 0.1; -2.00 ± 0.1", "-0.500; above 0", "1 of 2 hold")
    gone = claims.below("z", Estimate(np.array([math.nan, 1.0]), ("outside the curve", None)))
    assert gone.here == "no value (outside the curve)"
    many = claims.Claim("section 1", "Many", [claims.below("x", estimate(-i, 0.1), paper=i / 2) for i in (3, 1, 2)]
                        + [gone])  # fmt: skip
    assert (many.here, many.there) == ("-3.00 to -1.00, 1 without a value", "+0.500 to +1.50")
    for claim in (few, many):
        stored = json.loads(json.dumps(claim.to_dict(), allow_nan=False))
        assert (stored["where"], stored["text"], stored["verdict"]) == (claim.where, claim.text, claim.verdict)
        for kept, finding in zip(stored["findings"], claim.findings, strict=True):
            own = Estimate.from_dict(kept)
            np.testing.assert_array_equal(own.values, finding.estimate.values)
            words = kept["name"], kept["wanted"], kept["outcome"], kept["paper"], own.reasons
            assert words == (*finding[:1], *finding[2:], finding.estimate.reasons)


def test_numbers():
    assert number(estimate(41.789, 0.84), 2) == "41.79 ± 0.84"
    assert number(Estimate(np.array([1.0])), 1) == "1.0"
    assert signed(estimate(0.5, 0.1), 1) == "+0.5 ± 0.1"
    assert signed(estimate(-0.5, 0.1), 1) == "-0.5 ± 0.1"
    assert signed(Estimate(np.array([math.nan, 1.0])), 1) == "n/a"


TABLE = Table(
    "t", "A < B & 5%", ("Arm", "GenPPL"),
    (((Entry("a_1"), Entry("1.0 ± 0.1", "2.0")),), ((Entry("∞"), Entry("3")),)),
)  # fmt: skip


def test_a_table_in_three_languages():
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
def test_what_a_user_named_is_shown_as_it_is(name):
    """In the one Markdown, and so in the page: no tag, no link, no emphasis comes of it."""

    class Text(HTMLParser):
        def __init__(self):
            super().__init__()
            self.tags, self.words = set(), []

        def handle_starttag(self, tag, attributes):
            self.tags.add(tag)

        def handle_data(self, data):
            self.words.append(data)

    table = Table("t", f"of {name}", ("Arm", name), (((Entry(name), Entry("1", name)),),))
    text = Text()
    text.feed(render.FORMATS["html"](table))
    assert text.tags == {"p", "table", "thead", "tbody", "tr", "th", "td"}
    shown = " ".join(name.split())
    assert [word for word in text.words if word.strip()] == [f"of {shown}", "Arm", shown, shown, f"1 [{shown}]"]


FIGURE = Figure(
    "f", "caption",
    (Panel("one", "x", "y", tuple(Series(str(i), (1, 2), (i, i + 1), (0.1, math.nan), ("a", "b")) for i in range(4))),
     Panel("two", "x", "y", (Series("s", (1, 2), (1, 2), joined=False, open=True),), ((1, "one"),), True, True, True),
     Panel("", "", "%", tuple(Series(s, (0, 1), (1, 2), (0.1, 0.2)) for s in "ab"), ((0, "a"), (1, "b")), bars=True)),
)  # fmt: skip


def test_a_figure_is_the_same_bytes_and_survives_grey():
    first = figures.draw(FIGURE)
    assert first == figures.draw(FIGURE)
    assert first["png"].startswith(b"\x89PNG")
    assert b"<svg" in first["svg"]
    markers, lines = ({style[i] for style in figures.STYLES} for i in (1, 2))
    assert len(markers) == len(lines) == len(figures.STYLES)
    greys = sorted(sum(w * int(style[0][i : i + 2], 16) for w, i in ((0.3, 1), (0.59, 3), (0.11, 5)))
                   for style in figures.STYLES[:4])  # fmt: skip
    assert greys[0] == 0


class Links(HTMLParser):
    """Whatever a page would fetch."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        names = {"src", "href", "xlink:href", "data"}
        self.found += [v for k, v in attributes if k in names and v and not v.startswith("#")]
        self.found += [tag] if tag in ("script", "link", "iframe") else []


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return Store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def finished(store):
    shelf, made = Shelf(), replace(study("frontier", preset("smoke")), toy=False)
    run(made, store, local(shelf=shelf), shelf)
    return collect(made, store)


def test_a_report_is_one_page_and_a_folder(finished, tmp_path):
    page = report.write(finished, tmp_path / "a")
    links = Links()
    links.feed(page.read_text())
    assert links.found == []
    assert "url(http" not in page.read_text()
    names = {str(path.relative_to(tmp_path / "a")) for path in (tmp_path / "a").rglob("*.*")}
    assert {"tables/frontier-base.tex", "tables/frontier-distilled.md", "figures/frontier.svg", "figures/frontier.png",
            "report.md", "report.json", "index.html"} <= names  # fmt: skip
    report.write(finished, tmp_path / "b")
    for path in (tmp_path / "a").rglob("*.*"):
        assert path.read_bytes() == (tmp_path / "b" / path.relative_to(tmp_path / "a")).read_bytes()


def test_a_report_holds_the_numbers(finished, store, tmp_path):
    report.write(finished, tmp_path)
    document = json.loads((tmp_path / "report.json").read_text())
    cell = document["cells"]["distilled/D/0.5"]
    keys = next(one["keys"] for one in store.read_plan("frontier-smoke")["cells"] if one["name"] == "distilled/D/0.5")
    rows = [store.read(key).rows for key in keys]
    nll = [np.sum(r["columns"]["nll:0"]) / np.sum(r["columns"]["tokens:0"]) for r in rows]
    assert cell["nll"]["shards"] == pytest.approx(nll)
    assert cell["ppl"]["mean"] == pytest.approx(np.exp(nll).mean())
    assert cell["nll"]["se"] == pytest.approx(np.std(nll, ddof=1) / math.sqrt(2))
    made = document["provenance"]["made on"][0]
    assert {"device", "precision", "torch", "limpet"} <= set(made)
    assert set(document["provenance"]["models"]) == {"exact:words", "exact:chain"}
    laws = [source(name) for name in ("exact:words", "exact:chain")]
    assert document["provenance"]["judges"] == [
        {"name": f"true law of {law.name}", "digest": law.digest, "precision": "float64", "convention": "law"}
        for law in laws
    ]
    assert document["provenance"]["conventions"]["law"] == CONVENTIONS["law"].rule
    counted = 2 * 4 * sum(laws[cell.model == "exact:chain"].length for cell in finished.study.cells)
    assert document["provenance"]["counted tokens"] == {"true law": counted}
    markdown = (tmp_path / "tables/frontier-distilled.md").read_text()
    assert f"| D=0.5L | {cell['ppl']['mean']:.2f} ± {cell['ppl']['se']:.2f} [28.27 ± 0.53]" in markdown
    for claim in document["claims"]:
        assert claim["verdict"] in ("supported", "not supported", "inconclusive")
        assert claim["verdict"] in (tmp_path / "report.md").read_text()


def test_a_toy_does_not_stand_beside_the_paper(finished, tmp_path):
    """Neither the paper's numbers nor verdicts on its claims, on any page: the smallest preset and exact sources are
    toys, and the built-in models are none."""
    assert [study("frontier", preset(name)).toy for name in ("smoke", "exact", "mini", "paper")] == [
        True,
        True,
        False,
        False,
    ]
    toy = replace(finished, study=replace(finished.study, toy=True))
    assert "[28.27 ± 0.53]" in report.markdown(finished, report.shown(finished))
    report.write(toy, tmp_path)
    document = json.loads((tmp_path / "report.json").read_text())
    assert document["claims"] == []
    assert {one["paper"] for one in document["contrasts"]} == {""}
    for path in (*tmp_path.rglob("*.md"), *tmp_path.rglob("*.tex"), tmp_path / "index.html"):
        text = path.read_text()
        assert "[28.27" not in text
        assert "upported" not in text
        assert "| paper |" not in text
    assert report.section(toy).claims == ()
    assert document["cells"] == report.to_dict(report.kept(toy), report.shown(toy))["cells"]


def test_without_matplotlib_a_report_has_its_tables(finished, tmp_path, monkeypatch):
    told: list[str] = []
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib", None)
        page = report.write(finished, tmp_path / "a", told.append)
    assert told == ["frontier has tables alone: this needs matplotlib: pip install 'limpet[figures]'"]
    assert not (tmp_path / "a/figures").exists()
    assert "figures/" not in (tmp_path / "a/report.md").read_text()
    assert "<table" in page.read_text()
    report.write(finished, tmp_path / "b", told.append)
    assert len(told) == 1
    for table in (tmp_path / "b/tables").iterdir():
        assert (tmp_path / "a/tables" / table.name).read_bytes() == table.read_bytes()


def test_an_index_over_reports(finished, tmp_path):
    """Every claim with its numbers and verdict, in the order of the paper; other pages in the folder are linked."""
    report.write(finished, tmp_path / "frontier-smoke")
    (tmp_path / "audits").mkdir()
    (tmp_path / "audits/index.html").write_text("")
    page = report.write_index([report.section(finished)], tmp_path)
    assert '<a href="frontier-smoke/index.html">frontier</a>' in page.read_text()
    assert '<a href="audits/index.html">audits</a>' in page.read_text()
    text = (tmp_path / "claims.md").read_text()
    assert text.endswith("- [audits](audits/report.md)\n- [frontier](frontier-smoke/report.md)\n")
    tested = finished.study.show(finished).claims
    for claim in tested:
        row = next(line for line in text.splitlines() if claim.text in line)
        assert f"| {claim.there} | {claim.here} | {claim.verdict}, {claim.count} |" in row
    places = [re.match(r"\| \[(.*?)\]", line).group(1) for line in text.splitlines() if line.startswith("| [")]
    assert places == sorted(claim.where for claim in tested)
    assert report.overview([report.section(report.read(finished.study, tmp_path / "frontier-smoke"))]) in text
    anchors = re.findall(r"frontier-smoke/index.html#(claim-\d+)", page.read_text())
    assert all(f'<a id="{anchor}"></a>' in (tmp_path / "frontier-smoke/index.html").read_text() for anchor in anchors)
    assert len(set(anchors)) == len(tested)


def test_verdicts_are_told_apart():
    yes, no = (claims.Claim("appendix A", "x", [claims.below("x", estimate(m, 0.1))]) for m in (-1, 1))
    sections = [report.Section("a", "a", (no, yes)), report.Section("b", "b", (yes,)), report.Section("c", "c")]
    assert report.tally(sections) == "3 claims: 2 supported, 1 not supported, 0 inconclusive."
