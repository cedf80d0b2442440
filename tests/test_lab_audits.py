"""Audits in the laboratory's report: kept results read back, one page with their sections, and what is no result."""

from __future__ import annotations

import json
import math
import re

import pytest

from limpet.audits import AUDITS, Models
from limpet.audits.result import Result, Row
from limpet.commands import study
from limpet.denoisers.catalog import load
from limpet.errors import LimpetError
from limpet.lab.audits import Kept, found, keep, made_on, ready, table, write
from limpet.stats import mean_se
from test_lab_report import Links


@pytest.fixture(scope="module")
def kept() -> list[Kept]:
    """Two audits of an exact source, not in the order of the audits."""
    models = Models((load("exact:words"),))
    return [Kept("smoke", AUDITS[name](models, "smoke"), made_on(models)) for name in ("risk", "hidden")]


@pytest.fixture
def folder(kept, tmp_path):
    for one in kept:
        keep(one, tmp_path)
    return tmp_path


def test_results_come_back_as_they_were_kept(kept, folder):
    back = found(folder)
    assert [one.name for one in back] == ["hidden-smoke", "risk-smoke"]
    for one, other in zip(back, reversed(kept), strict=True):
        assert json.dumps(one.to_dict()) == json.dumps(other.to_dict())
        for row, as_made in zip(one.result.rows, other.result.rows, strict=True):
            assert row.estimate.values.tolist() == pytest.approx(as_made.estimate.values.tolist(), nan_ok=True)
    keep(Kept("paper", kept[0].result, {}), folder)  # another preset stands beside, not in its place
    assert [one.name for one in found(folder)] == ["hidden-smoke", "risk-paper", "risk-smoke"]


def test_one_page_holds_a_section_for_each(kept, folder):
    page = write(folder).read_text()
    links = Links()
    links.feed(page)
    assert links.found == []
    assert "url(http" not in page
    assert re.findall(r'<section id="([^"]*)">', page) == ["hidden-smoke", "risk-smoke"]
    assert page.count("<svg") == page.count("</svg>") == 2
    text = (folder / "report.md").read_text()
    for one in kept:
        audit = AUDITS[one.result.audit]
        for shown in (page, text):
            assert audit.title in shown
            assert audit.asks.replace("'", "&#x27;") in shown or audit.asks in shown
            assert one.provenance["made on"]["exact:words"]["torch"] in shown
            assert all(str(row) in shown for row in one.result.rows)
        assert f"]({one.name}.svg)" in text
        assert {f"{one.name}.{kind}" for kind in ("json", "svg", "png")} <= {path.name for path in folder.iterdir()}


def test_the_laboratorys_index_leads_to_them(kept, tmp_path, capsys):
    """Also where no study has been run yet."""
    keep(kept[0], tmp_path / "audits")
    write(tmp_path / "audits")
    study.run("report", "all", preset="smoke", store=str(tmp_path / "store"), out_folder=tmp_path)
    assert "'audits/index.html'" in (tmp_path / "index.html").read_text()
    assert "(audits/report.md)" in (tmp_path / "claims.md").read_text()
    assert "holds no run" in capsys.readouterr().err


def test_equal_results_give_equal_bytes(kept, folder, tmp_path_factory):
    write(folder)
    again = tmp_path_factory.mktemp("again")
    for one in kept:
        keep(one, again)
    write(again)
    for path in folder.iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes(), path.name


def made_up(**more: str) -> Kept:
    row = Row("a <b> | c", "x & y", {"t": 0.5}, mean_se([1.0, 3.0]), "%", 1200, "3 ± 1")
    none = Row("another", "x", {}, mean_se([math.nan, 3.0]))
    settings = {"shards": [1, 2], "paths": 3}
    return Kept("mini", Result("singleton", settings, {"a <b> | c": "0123456789abcdef"}, [row, none], more), {})


def test_a_table_has_the_paper_beside_and_a_group_for_each_model():
    made = table(made_up().result, "caption")
    assert [len(group) for group in made.groups] == [1, 1]
    assert [entry.text for entry in made.groups[0][0]] == [
        "a <b> | c", "x & y", "t 0.5", "2.0 ± 1.0 %", "1,200", "3 ± 1",
    ]  # fmt: skip
    assert [entry.text for entry in made.groups[1][0]] == ["another", "x", "", "none", "", ""]


def test_text_is_escaped(tmp_path, monkeypatch):
    monkeypatch.setattr("limpet.lab.audits.drawn", lambda kept: {"svg": b"<svg></svg>", "png": b""})
    keep(made_up(what="<script>alert(1)</script>"), tmp_path)
    page = write(tmp_path).read_text()
    assert "<script" not in page
    assert "<b>" not in page
    assert "a &lt;b&gt; | c" in page
    assert "a &lt;b&gt; | c (0123456789ab)" in page
    assert r"| a <b> \| c | x & y | t 0.5 | 2.0 ± 1.0 % | 1,200 | 3 ± 1 |" in (tmp_path / "report.md").read_text()


def test_what_is_no_result(tmp_path):
    ready(tmp_path / "new" / "folder")
    assert found(tmp_path / "none") == []
    (tmp_path / "file").write_text("")
    with pytest.raises(LimpetError, match="name another folder"):
        ready(tmp_path / "file")
    for text in ("{", "[]", "{}", json.dumps({**made_up().to_dict(), "audit": "unheard-of"})):
        (tmp_path / "some.json").write_text(text)
        with pytest.raises(LimpetError, match="is not the result of an audit"):
            found(tmp_path)
