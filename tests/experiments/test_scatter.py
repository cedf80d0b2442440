"""Scatter plots on a page: everything is on it once, nothing of it is markup, nothing is fetched, and equal data give
equal bytes. In a browser, by mouse, keyboard and touch, the texts of any points are shown side by side."""

import base64
import io
import json
import math
import re
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from limpet.evaluation.statistics import Estimate
from limpet.experiments import Results, render, report
from limpet.experiments.report_content import Entry, Figure, Panel, Point, ReportContent, ScatterPlot, Series, Table
from limpet.experiments.study import Cell, Study
from limpet.html import for_script, policy_hash
from limpet.samplers import Native

sys.path.append(str(Path(__file__).parents[2] / "tools"))
import pictures
from accessibility import SCREENS, on_screen, serious
from pages import Page

HOSTILE = "</script><script>alert(1)</script><!--<script>]]>&amp;\"'\\u003c\u2028\u2029 \U0001f41a"
UNPRINTABLE = f"{HOSTILE}\x00\x1b\ud800"  # no file could hold it as it is
SAMPLERS = {
    "top-p": ["native", "native top_p=.9", "native top_p=.5"],
    "CRS": ["crs", f"odd {HOSTILE}"],
    "Mend": ["mend"],
}
TITLES = ("words, 4 calls", "words, 8 calls", f"after {HOSTILE}")


def estimate(mean, spread=0.01):
    return Estimate(np.array([mean - spread, mean, mean + spread]))


def point(panel, family, sampler):
    """Points of a panel are far enough apart for a pointer to select one."""
    i = [name for names in SAMPLERS.values() for name in names].index(sampler)
    texts = (f"{sampler} writes <b>first</b> in {panel}", UNPRINTABLE)
    return Point(sampler, family, estimate(3 + i / 7), estimate(5 - i / 3 + panel / 3), f"{panel}/{sampler}", texts)


PANELS = {
    title: [point(panel, family, name) for family, names in SAMPLERS.items() for name in names]
    for panel, title in enumerate(TITLES)
}
SCATTER = ScatterPlot("all", f"All of them. {HOSTILE}", "entropy", "NLL", PANELS, ("top-p",))
STILL = Figure("all", "All, still.", (Panel("p", "x", "y", (Series("s", (1, 2), (1, 2)),)),))


def results(build_report=lambda _: ReportContent(figures=(STILL,), scatters=(SCATTER,))):
    cells = tuple(Cell(one.cell, "exact:words", Native(nfe=2), 1) for points in PANELS.values() for one in points)
    study = Study("scattered", "Scattered", cells, (1, 2, 3), build_report, texts_per_cell=2)
    numbers = {one.cell: {"nll": one.y, "entropy": one.x} for points in PANELS.values() for one in points}
    texts = {one.cell: list(one.texts) for points in PANELS.values() for one in points}
    return Results(study, {"models": {}, "samples per seed": [1]}, numbers, texts=texts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("reports") / "scattered"
    report.write_report(results(), path)
    return path


def parsed(folder):
    return Page((folder / "index.html").read_text())


# The page


def test_every_point_is_on_the_page_once_with_rounded_numbers(folder):
    data, _ = parsed(folder).scripts
    (scatter,) = json.loads(data)["scatters"]
    assert [panel["title"] for panel in scatter["panels"]] == list(TITLES)
    assert scatter["joined"] == ["top-p"]
    for panel, points in zip(scatter["panels"], PANELS.values(), strict=True):
        found = [scatter["samplers"][i] for i, *_ in panel["points"]]
        assert found == [[sampler, family] for family, samplers in SAMPLERS.items() for sampler in samplers]
        for (_, *numbers), one in zip(panel["points"], points, strict=True):
            assert numbers == pytest.approx([one.x.mean, one.x.se, one.y.mean, one.y.se], abs=5e-5)
            assert numbers == [round(number, 4) for number in numbers]


def test_a_missing_number_is_null():
    missing = SCATTER.panels[TITLES[0]][0]._replace(y=Estimate(np.array([1.0, math.nan])))
    (scatter,) = report.packed([replace(SCATTER, panels={"one": [missing]})])["scatters"]
    assert scatter["panels"][0]["points"][0][3:] == [None, None]


def test_texts_are_stored_once_and_read_back(folder):
    assert report.texts_of((folder / "index.html").read_text()) == results().texts
    for other in ("report.json", "report.md"):
        assert "writes" not in (folder / other).read_text()
    assert report.read_report(results().study, folder).texts == results().texts


def test_a_report_with_texts_is_written_again_the_same(folder, tmp_path):
    report.write_report(report.read_report(results().study, folder), tmp_path)
    written = [path.relative_to(folder) for path in folder.rglob("*.*")]
    assert Path("index.html") in written
    for path in written:
        assert (tmp_path / path).read_bytes() == (folder / path).read_bytes()


def test_no_text_is_markup_and_nothing_is_fetched(folder):
    """There are two scripts, the data and ours, and no address. The policy lets no other script run."""
    tags = parsed(folder)
    assert [attributes for tag, attributes in tags.tags if tag == "script"] == [
        {"type": "application/json", "id": "scatters"},
        {},
    ]
    _, script = tags.scripts
    assert script == report._asset("scatter.js")
    fetched = {"src", "href", "xlink:href", "data", "action"}
    links = [value for _, attributes in tags.tags for name, value in attributes.items() if name in fetched]
    assert all(link.startswith("#") for link in links)
    assert not {"link", "iframe", "img", "object", "form"} & {tag for tag, _ in tags.tags}
    page = (folder / "index.html").read_text()
    assert set(re.findall(r"url\((?!#)|@import|fetch\(|XMLHttpRequest|WebSocket|innerHTML", page)) == set()
    (policy,) = [one["content"] for tag, one in tags.tags if one.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ")
    assert f"script-src {policy_hash(script)};" in policy


def test_the_still_figure_is_the_fallback(folder):
    page, text = (folder / "index.html").read_text(), (folder / "report.md").read_text()
    wide = '<span class=wide tabindex=0 role=group aria-label="Figure 1">'
    assert f'<p><a id="scatter-all"></a><span class=figure>{wide}<svg' in page
    assert '<a id="scatter-all"></a>![All, still.](figures/all.svg)' in text
    assert text.count("figures/all.svg") == 1


def test_a_page_without_scatters_has_no_script():
    assert b"<script" not in report.document("A title", "# A title")


def test_a_minified_table_says_the_same():
    rows = (((Entry("<td>"), Entry("1 ± 2", "3")), (Entry('a style="text-align:right"'), Entry(""))),)
    whole = render.html(render.markdown(Table("t", "A </td>\ncaption", ("sampler", "GenPPL"), rows)))
    short = render.minify(whole)
    assert len(short) < len(whole)
    for read in (lambda page: re.sub("<[^>]*>", " ", page).split(), lambda page: [tag for tag, _ in Page(page).tags]):
        assert read(short) == read(whole)
    left = [one.get("class") for tag, one in Page(short).tags if tag in ("td", "th")]
    assert left == ["l", None] * 3


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from([UNPRINTABLE, "<!--", "]]>", "</ScRiPt "]),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(json_values)
def test_json_in_a_script_is_the_value_and_cannot_end_the_script(value):
    text = for_script(value)
    assert json.loads(text) == value
    assert not set("<>&") & set(text)
    assert text.isascii()


def test_texts_are_compressed_as_browsers_read_them():
    small = base64.b64decode(report.packed([SCATTER])["texts"])
    assert json.loads(zlib.decompress(small))[0] == ["0/native", *SCATTER.panels[TITLES[0]][0].texts]


# In a browser

here = pytest.mark.skipif(
    pictures.chromium() is None, reason="there is no Chromium here: install one, or name it in LIMPET_CHROMIUM"
)


@pytest.fixture(scope="module")
def browser():
    pytest.importorskip("playwright", reason="playwright is not installed: pip install 'limpet[dev]'")
    with pictures.browser() as opened:
        yield opened


@pytest.fixture
def open_page(browser, folder):
    """Opens the page; the test fails if the page throws, logs an error or requests anything."""
    contexts, problems = [], []

    def opened(**how):
        context = browser.new_context(**{"viewport": {"width": 1100, "height": 900}, **how})
        contexts.append(context)
        tab = context.new_page()
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        tab.on("dialog", lambda dialog: problems.append(dialog.message))
        tab.on("request", lambda request: problems.append(request.url) if request.url[:5] != "file:" else None)
        tab.goto((folder / "index.html").as_uri())
        return tab

    yield opened
    for context in contexts:
        context.close()
    assert problems == []


def mark(tab, sampler):
    return tab.locator(f'.point[aria-label^="{sampler},"]')


def shown(tab):
    return tab.locator(".texts h3").all_text_contents()


@here
def test_pointing_at_a_point_names_its_sampler(open_page):
    tab = open_page()
    assert not tab.locator(".popover").is_visible()
    mark(tab, "mend").hover()
    assert tab.locator(".popover b").text_content() == "mend"
    assert tab.locator(".popover span").all_text_contents() == ["Mend", "entropy: 3.714 ± 0.006", "NLL: 3.333 ± 0.006"]
    tab.mouse.move(2, 2)
    assert not tab.locator(".popover").is_visible()
    assert tab.locator(".plot .point").count() == 6
    assert tab.locator(".plot .curve").count() == 1
    assert not tab.locator("span.figure").is_visible()


@here
def test_a_click_shows_texts_side_by_side_and_a_button_removes_them(open_page):
    tab = open_page()
    for sampler in ("native", "mend"):
        mark(tab, sampler).click()
    tab.locator(".texts article").nth(1).wait_for()
    assert shown(tab) == ["native", "mend"]
    boxes = [tab.locator(".texts article").nth(i).bounding_box() for i in (0, 1)]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    samples = tab.locator(".texts .sample").all_text_contents()
    assert samples[0] == "native writes <b>first</b> in 0"
    assert samples[2] == "mend writes <b>first</b> in 0"
    assert samples[1].startswith(HOSTILE)
    # Samplers of different panels can be compared.
    tab.select_option(".choose select", index=1)
    mark(tab, "crs").click()
    tab.locator(".texts article").nth(2).wait_for()
    assert "crs writes <b>first</b> in 1" in tab.locator(".texts .sample").all_text_contents()
    mark(tab, "native top_p=.9").click()
    tab.locator(".note", has_text="native top_p=.9 replaces native.").wait_for()
    assert shown(tab) == ["mend", "crs", "native top_p=.9"]
    tab.locator(".texts button").first.click()
    tab.locator(".note", has_text="Texts of mend removed.").wait_for()
    assert shown(tab) == ["crs", "native top_p=.9"]


@here
def test_it_works_from_the_keyboard(open_page):
    tab = open_page()
    tab.locator(".choose select").focus()
    tab.keyboard.press("ArrowDown")
    assert tab.locator(".choose select").input_value() == TITLES[1]
    for _ in range(3):  # two buttons, and the point that has the Tab key
        tab.keyboard.press("Tab")
    assert tab.locator(".popover b").text_content() == "native"
    tab.keyboard.press("ArrowRight")
    assert tab.locator(".popover b").text_content() == "native top_p=.9"
    tab.keyboard.press("Enter")
    tab.keyboard.press("End")
    assert tab.locator(".popover b").text_content() == "mend"
    tab.keyboard.press(" ")
    tab.locator(".texts article").nth(1).wait_for()
    assert shown(tab) == ["native top_p=.9", "mend"]
    assert mark(tab, "mend").get_attribute("aria-pressed") == "true"
    tab.keyboard.press("Enter")
    tab.locator(".note", has_text="Texts of mend removed.").wait_for()
    assert shown(tab) == ["native top_p=.9"]
    tab.keyboard.press("Tab")
    tab.keyboard.press("Enter")  # the first family of the legend
    assert tab.locator(".legend button").first.get_attribute("aria-pressed") == "false"
    assert tab.locator(".plot .point").count() == 3


@here
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_a_tap_selects(open_page, scheme):
    tab = open_page(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True, color_scheme=scheme)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    for sampler in ("mend", "crs"):
        mark(tab, sampler).tap()
        tab.locator(".texts h3", has_text=sampler).wait_for()
    assert shown(tab) == ["mend", "crs"]


REPORTS = Path(__file__).parents[2] / "docs/reports/mini"


@here
@pytest.mark.parametrize(("width", "scheme"), SCREENS)
def test_a_report_is_accessible(open_page, width, scheme):
    """axe-core finds nothing on a page with a scatter plot, two committed reports and the index; none scrolls sideways,
    and links lead from each to the others."""
    tab = open_page()
    on_screen(tab, width, scheme)
    for page in (None, REPORTS / "frontier-mini-gpu/index.html", REPORTS / "revision-mini/index.html"):
        if page:
            tab.goto(page.as_uri())
        assert serious(tab) == []
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
    tab.click("nav a:text('All reports')")
    assert tab.url == (REPORTS / "index.html").as_uri()
    assert serious(tab) == []
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    tab.click("main li a >> nth=0")
    tab.locator("nav a", has_text="All reports").wait_for()


@here
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_a_table_that_scrolls_shows_that_it_does(open_page, scheme):
    """A shadow stands at the edge where more is: at the right before it is scrolled, at the left after."""
    image = pytest.importorskip("PIL.Image", reason="pillow reads the screenshot")
    tab = open_page()
    on_screen(tab, 390, scheme)
    tab.goto((REPORTS / "frontier-mini-gpu/index.html").as_uri())
    wide = tab.locator("div.wide", has=tab.locator("table:visible")).first
    more = wide.evaluate("(one) => one.scrollWidth - one.clientWidth")
    assert more > 100

    def edges():
        """Whether the most frequent colour near the left and the right edge is another than the page's."""
        shot = image.open(io.BytesIO(wide.screenshot())).convert("RGB")
        columns = ([shot.getpixel((x, y)) for y in range(shot.height)] for x in (3, shot.width - 4))
        paper = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        page = tuple(int(part) for part in re.findall(r"\d+", paper)[:3])
        return [max(set(column), key=column.count) != page for column in columns]

    assert edges() == [False, True]
    wide.evaluate("(one) => one.scrollTo(one.scrollWidth, 0)")
    assert edges() == [True, False]


@here
def test_the_still_figure_is_shown_without_scripts(open_page):
    tab = open_page(java_script_enabled=False)
    assert tab.locator("span.figure svg").is_visible()
    assert tab.locator(".scatter").count() == 0
