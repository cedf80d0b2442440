"""Audits in the laboratory's report: rows read back, one page for each, an index over all; and what the docs hold."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from audit_cases import smoke
from limpet import studies
from limpet.commands import study
from limpet.denoisers.catalog import load
from limpet.lab import Results, Row, render, report
from limpet.lab.page import Entry, number, signed
from limpet.stats import mean_se
from limpet.studies import hidden, presets, risk, singleton, values
from test_lab_report import Links

REPORTS = Path(__file__).parents[1] / "docs" / "reports"


@pytest.fixture(scope="module")
def done() -> dict[str, Results]:
    words = load("exact:words")
    return {"risk": smoke(risk, words), "hidden": smoke(hidden, words)}


def test_results_come_back_as_they_were_written(done, tmp_path):
    for name, results in done.items():
        report.write(results, tmp_path / name)
        back = Results.from_dict(results.study, json.loads((tmp_path / name / "report.json").read_text()))
        assert json.dumps(back.to_dict()) == json.dumps(results.to_dict())
        for row, as_made in zip(back.rows(), results.rows(), strict=True):
            assert row.estimate.values.tolist() == pytest.approx(as_made.estimate.values.tolist(), nan_ok=True)


def test_a_page_holds_all_that_was_found(done, tmp_path):
    for name, results in done.items():
        page = report.write(results, tmp_path / name).read_text()
        links = Links()
        links.feed(page)
        assert links.found == []
        assert "url(http" not in page
        assert page.count("<svg") == page.count("</svg>") == 1
        text = (tmp_path / name / "report.md").read_text()
        (table,) = results.study.show(results).tables
        for shown in (page, text):
            assert results.study.title in shown
            assert results.provenance["made on"][0]["torch"] in shown
            assert all(entry.text in shown for group in table.groups for line in group for entry in line)
            assert all(what in shown for what in results.study.conventions)
        assert f"](figures/{name}.svg)" in text
        assert {path.name for path in (tmp_path / name / "figures").iterdir()} == {f"{name}.svg", f"{name}.png"}


def test_the_laboratorys_index_leads_to_them(done, tmp_path, capsys):
    """Also where no study has been run yet."""
    report.write(done["risk"], tmp_path / "risk-smoke")
    study.run("report", "all", preset="smoke", store=str(tmp_path / "store"), out_folder=tmp_path)
    assert "risk-smoke/index.html" in (tmp_path / "index.html").read_text()
    assert "(risk-smoke/report.md)" in (tmp_path / "claims.md").read_text()
    assert "holds no run" in capsys.readouterr().err


def test_equal_results_give_equal_bytes(done, tmp_path):
    for again in ("once", "twice"):
        report.write(done["hidden"], tmp_path / again)
    for path in (tmp_path / "once").rglob("*.*"):
        assert path.read_bytes() == (tmp_path / "twice" / path.relative_to(tmp_path / "once")).read_bytes(), path.name


def made_up() -> Results:
    row = Row("a <b> | c", "x & y", {"t": 0.5}, mean_se([1.0, 3.0]), "%", 1200)
    none = Row("mini-distilled", "singleton", {"p": 0.8}, mean_se([math.nan, 3.0]))
    audit = studies.study("singleton", replace(singleton.PRESETS["mini"], models=("a <b> | c",), shards=(1, 2)))
    drawn = replace(audit, show=lambda results: replace(audit.show(results), figures=()))
    provenance = {"models": {"a <b> | c": "0123456789abcdef"}, "judges": [], "shards": [1, 2], "samples in a shard": []}
    return Results(drawn, {**provenance, "what": "<script>alert(1)</script>"}, {}, {"all": [row, none]})


def test_a_table_has_the_paper_beside_and_a_group_for_each_model(monkeypatch):
    for part in ("panels", "claims"):  # they would ask for every row
        monkeypatch.setattr(singleton, part, lambda *arguments: {})
    (table,) = made_up().study.show(made_up()).tables
    assert table.head == ("model", "quantity", "at", "here", "events", "paper")
    assert [len(group) for group in table.groups] == [1, 1]
    assert table.groups[0][0] == tuple(map(Entry, ("a <b> | c", "x & y", "t 0.5", "2.0 ± 1.0 %", "1,200", "")))
    assert table.groups[1][0] == tuple(map(Entry, ("mini-distilled", "singleton", "p 0.8", "none", "", "35.44 ± 0.32")))


def test_text_is_escaped(tmp_path, monkeypatch):
    for part in ("panels", "claims"):  # they would ask for every row
        monkeypatch.setattr(singleton, part, lambda *arguments: {})
    page = report.write(made_up(), tmp_path).read_text()
    assert "<script" not in page
    assert "<b>" not in page
    assert "a &lt;b&gt; | c (0123456789ab)" in page
    assert r"| a \<b> \| c | x & y | t 0.5 | 2.0 ± 1.0 % | 1,200 |" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize("name", studies.AUDITS)
def test_the_docs_hold_what_the_built_in_models_show(name):
    """The committed numbers are of the preset as it stands, and their table is what today's code makes of them."""
    size = "mini" if name in studies.OWN else "mini-gpu"
    module, folder = import_module(f"limpet.studies.{name}"), REPORTS / "mini" / f"{name}-{size}"
    preset, document = module.PRESETS[size], report.stored(folder)
    results = Results.from_dict(studies.study(name, preset), document)
    (settings,) = results.provenance["settings"]
    told = {field: json.loads(json.dumps(getattr(preset.settings, field))) for field in settings}
    assert settings == told
    assert results.provenance["models"].keys() == set(preset.models)
    assert {row.model for row in results.rows()} - set(preset.models) <= {"mini and mini-distilled"}
    text = (folder / "report.md").read_text()
    (table,) = results.study.show(results).tables
    for line in (line for group in table.groups for line in group):
        assert "| " + " | ".join(entry.text for entry in line) + " |" in text


@pytest.mark.parametrize("name", ["mini", "mini-distilled", "words-8", "words-64", "chain-8", "chain-64"])
def test_the_docs_hold_what_refreshed_labels_do(name):
    """Every table of a committed report is what today's code makes of its numbers; the page on audits cites them."""
    folder = REPORTS / "values" / name
    document = report.stored(folder)
    size = presets.preset(document["preset"])
    (model,), (settings,) = document["provenance"]["models"], document["provenance"]["settings"]
    size = replace(size, nfe=settings["nfe"], distilled=model, captions={"base": model, "distilled": model})
    results = Results.from_dict(studies.study("values", size), document)
    text = (folder / "report.md").read_text()
    assert all(render.markdown(table) in text for table in results.study.show(results).tables)
    page = (REPORTS.parent / "audits.md").read_text()
    assert f"(reports/values/{name}/report.md)" in page
    gaps = {arm: results.contrast(arm, "argmax") for arm in values.REFRESHED}
    back = {arm: results.of("labels put back", values=arm)[0].estimate for arm in values.REFRESHED}
    if model.startswith("exact:"):
        cited = [f"{signed(gaps[arm], 4)}, {back[arm].mean:.0f}%" for arm in values.REFRESHED]
        assert f"report.md) | {' | '.join(cited)} |".replace("-", "\N{MINUS SIGN}") in page
    else:
        replaced = [number(results.of("labels replaced", values=arm)[0].estimate, 1) for arm in values.REFRESHED]
        put_back = [number(back[arm], 1) for arm in values.REFRESHED]
        cited = [signed(gaps[arm], 3).replace("-", "\N{MINUS SIGN}") for arm in values.REFRESHED]
        assert all(f"| {' | '.join(line)} |" in page for line in (cited, replaced, put_back))
