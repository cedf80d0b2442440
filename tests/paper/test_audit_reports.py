"""Audits in the laboratory's report: rows read back, one page for each, an index over all; and that docs/audits.md says
what the committed reports found."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from test_lab_report import Links

import audits
from audit_cases import smoke
from blocks import put
from limpet.cli import study
from limpet.errors import LimpetError
from limpet.evaluation.statistics import Estimate, mean_se, paired
from limpet.experiments import Results, Row, render, report
from limpet.experiments.contents import Entry, number, signed
from limpet.models.loading import load
from limpet.paper import studies
from limpet.paper.studies import final_step, hidden, presets, risk, selection, singleton, storage, values
from limpet.paper.studies.audits import figure, one, with_error
from limpet.paper.studies.published import printed

REPORTS = Path(__file__).parents[2] / "docs" / "reports"


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
        (table,) = results.study.build_report(results).tables
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
    (table,) = made_up().study.build_report(made_up()).tables
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
    module, folder = import_module(f"limpet.paper.studies.{name}"), REPORTS / "mini" / f"{name}-{size}"
    preset, document = module.PRESETS[size], report.stored(folder)
    results = Results.from_dict(studies.study(name, preset), document)
    (settings,) = results.provenance["settings"]
    told = {field: json.loads(json.dumps(getattr(preset.settings, field))) for field in settings}
    assert settings == told
    assert results.provenance["models"].keys() == set(preset.models)
    assert {row.model for row in results.rows()} - set(preset.models) <= {"mini and mini-distilled"}
    text = (folder / "report.md").read_text()
    (table,) = results.study.build_report(results).tables
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
    assert all(render.markdown(table) in text for table in results.study.build_report(results).tables)
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


# The page's generated tables, and what its sentences say of them

BOTH = ("mini", "mini-distilled")


def test_a_block_is_put_between_its_marks(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- x (y) -->\nold\n<!-- end of it -->\nb\n<!-- z -->\n<!-- end -->\n")
    for block in ("new \\1", "new \\1\n"):
        put(page, "x (y)", block)
        assert page.read_text() == "a\n<!-- x (y) -->\nnew \\1\n<!-- end of it -->\nb\n<!-- z -->\n<!-- end -->\n"
    with pytest.raises(LimpetError, match="no one place for 'w'"):
        put(page, "w", "new")
    page.write_text(page.read_text() * 2)
    with pytest.raises(LimpetError, match="no one place for 'z'"):
        put(page, "z", "new")


@pytest.fixture(scope="module")
def found() -> dict[str, Results]:
    return audits.committed(REPORTS / "mini")


@pytest.fixture(scope="module")
def said() -> str:
    """What the page says, wherever its lines break."""
    return " ".join((REPORTS.parent / "audits.md").read_text().split())


def test_the_pages_tables_stand_as_they_come_out(found):
    page = (REPORTS.parent / "audits.md").read_text()
    made = audits.blocks(found)
    assert len(made) == 8
    for name, block in made.items():
        assert f"<!-- {name} -->\n{block}<!-- end -->" in page, name


def spread(numbers: list[float], digits: int = 0) -> str:
    return f"{min(numbers):.{digits}f} to {max(numbers):.{digits}f}"


def test_singletons_are_rarer_here(found, said):
    often = [
        one(found["singleton"], quantity, model, p=p).mean / figure("singleton", quantity, p=p).mean
        for quantity in singleton.QUANTITIES[:2] for model in BOTH for p in (0.8, 0.9)
    ]  # fmt: skip
    assert f"{spread(often, 2)} times as common" in said


def test_argmax_readouts_do_as_the_page_says(found, said):
    other = {}
    for role, p in final_step.ROWS:
        cells = [f"{role}/{p}/{end}" for end in ("argmax", "sample")]
        gap = found["final_step"].contrast(*cells)
        assert abs(gap.mean) > 2 * gap.se
        assert found["final_step"].contrast(*cells, measure="entropy").mean < 0
        other[role, p] = gap.mean * printed("nll", *cells).mean < 0
    assert [key for key, differs in other.items() if differs] == [("base", 1.0), ("distilled", 0.9)]
    assert "Two of four signs differ: argmax worsens mini at p = 1 and mini-distilled at p = .9" in said


def test_selections_differ_as_the_page_says(found, said):
    results, times = found["selection"], selection.Settings.times
    apart = [abs(row.estimate.mean) for row in results.of("fixed-position accuracy, difference")]
    most = figure("selection", "fixed-position accuracy, difference").most
    assert f"differs by {max(apart):.2f} points at most, against {most} in the paper" in said
    paper, overlap = figure("selection", "self error"), figure("selection", "Jaccard")
    for model in BOTH:
        errors = [one(results, "self error", model, t=t).mean for t in times]
        assert errors == sorted(errors)
        assert errors[0] < paper.least
        assert errors[-1] > 2 * paper.most
        excess = {t: sure(results, model, t) for t in times}
        assert min(over.mean for over in excess.values()) > 0
        assert [t for t, over in excess.items() if over.mean < 2 * over.se] == [0.2]
        assert max(excess, key=lambda t: excess[t].mean) >= 0.67
    assert min(row.estimate.mean for row in results.of("Jaccard")) > overlap.most
    modest = [row.estimate.mean - 100 * row.at["confidence"] for row in results.of("reliability")]
    assert f"by {spread(modest, 1)} points" in said
    believed, right = (one(results, quantity, "mini", t=0.67).mean for quantity in ("confidence", "self accuracy"))
    assert f"at t = .67, mini believes {believed:.1f}% and has {right:.1f}%" in said
    every, committed = results.of("reliability", "mini"), results.of("self error", "mini")[0]
    texts = 16 * len(results.study.shards)
    per_text = committed.events // texts, sum(row.events for row in every) // len(times) // texts
    assert "{} positions of {} are committed".format(*per_text) in said


def sure(results: Results, model: str, t: float) -> Estimate:
    """By how many points what a model selects is believed more than it is right."""
    believed, right = (one(results, quantity, model, t=t).values for quantity in ("confidence", "self accuracy"))
    return paired(believed, right)


def test_temperatures_explain_as_little_as_the_page_says(found, said):
    results, (settings,) = found["temperature"], found["temperature"].provenance["settings"]
    for model in BOTH:
        residual, paper = one(results, "residual", model), figure("temperature", "residual")
        assert abs(residual.mean - paper.mean) < paper.se
        assert 75 < residual.mean < 85
        assert one(results, "top-rank change", model).mean > figure("temperature", "top-rank change").mean
        bound = results.of("optimum at a bound", model)[0]
        assert round(bound.estimate.mean * bound.events / 100) == 1
    assert "One fit of each model ends at a bound" in said
    pairs = len(results.study.shards) * math.prod(settings[key] for key in ("paths", "calls", "positions"))
    assert f"Pairs are {pairs}, less" in said


def test_refreshed_values_do_as_the_page_says(found, said):
    results = found["values"]
    gain = mean_se(-results.contrast("refreshed", "argmax").values)
    assert gain.mean > 2 * gain.se
    assert 0.2 < -gain.mean / printed("nll", "refreshed", "argmax").mean < 0.3
    less = -results.contrast("refreshed", "argmax", measure="entropy").mean
    assert f"they gain {gain:.3f} nats at 64 calls, a quarter of the paper's gain, at {less:.2f} less entropy" in said
    entropy = [f"{results(arm, 'entropy').mean:.2f}" for arm in ("refreshed-in-turn", "argmax")]
    assert f"and {' against '.join(entropy)} there at 64 calls" in said
    assert results("nucleus", "ppl").mean > 2 * results("second", "ppl").mean
    gaps = {}
    for model in BOTH:
        cells = report.stored(REPORTS / "values" / model)["cells"]
        nll = {arm: Estimate.from_dict(cells[arm]["nll"]) for arm in ("argmax", "refreshed")}
        gaps[model] = paired(nll["refreshed"].values, nll["argmax"].values)
        own = " against ".join(f"{cells[arm]['entropy']['mean']:.2f}" for arm in ("refreshed-in-turn", "argmax"))
        assert f"{own} on `{model}`" in said
    assert gaps["mini"].mean > 2 * gaps["mini"].se
    assert abs(gaps["mini-distilled"].mean) < gaps["mini-distilled"].se


def test_labels_are_believed_as_the_page_says(found, said):
    results = found["hidden"]
    here, there, seen = [], [], {model: [] for model in BOTH}
    for offset in (1, 2, 4, 8):
        there.append(
            figure("hidden", "restored", offset=offset).mean - figure("hidden", "revisable", offset=offset).mean
        )
        for model in BOTH:
            shown, restored, revisable = (
                one(results, quantity, model, offset=offset).mean
                for quantity in ("overwritten", "restored", "revisable")
            )
            here.append(restored - revisable)
            seen[model].append(shown - restored)
    assert f"{spread(here)} points against {spread(there)}" in said
    assert f"by {spread([abs(gap) for gaps in seen.values() for gap in gaps])} points" in said
    assert max(seen["mini"]) < 0 < min(seen["mini-distilled"])
    for model in BOTH:
        rise = [one(results, "restored", model, offset=offset).mean for offset in (1, 2, 8)]
        assert rise[1] - rise[0] > (rise[2] - rise[0]) / 2
        events = [results.of("restored", model, offset=offset)[0].events for offset in (1, 2, 4, 8)]
        assert events == [3 * count for count in (256, 224, 224, 224)]
    assert len(results.study.shards) == 3 * 4


def test_seeing_labels_helps_as_the_page_says(found, said):
    results = found["storage"]
    higher, share, mended, apart = [], [], [], []
    for p in storage.MASSES:
        crs, copied, revisable, mend = (f"{p}/{arm}" for arm in ("CRS", "final-only", "revisable", "mend"))
        gap = results.contrast(crs, copied)
        assert gap.mean < -2 * gap.se
        higher.append(results.contrast(crs, copied, measure="entropy").mean)
        share.append(100 * results.contrast(copied, revisable).mean / results.contrast(crs, revisable).mean)
        mended.append(-results.contrast(mend, crs).mean)
        apart.append(abs(results.contrast(mend, crs, measure="entropy").mean))
    assert f"higher by {spread(higher, 3)})" in said
    assert f"({spread(share)}% of it)" in said
    assert f"another {spread(mended, 2)} nats, with entropy within {max(apart):.3f} of that of CRS" in said


def test_error_falls_with_noise_as_the_page_says(found, said):
    results = found["risk"]
    for model in audits.BASE, audits.DISTILLED, audits.CHAIN, audits.WORDS:
        for quantity in ("error", "committed error"):
            errors = [row.estimate.mean for row in results.of(quantity, model)]
            assert len(errors) == 9
            assert errors == sorted(errors)
    start = [one(results, "committed error", model, t=0.67).mean for model in BOTH]
    start += [one(found["selection"], "self error", model, t=0.67).mean for model in BOTH]
    assert f"the minis are at {spread(start)}% (here and in `selection`)" in said
    wrong, believed = (results.of(f"committed {what}", "exact:words") for what in ("error", "deficit"))
    assert len({row.estimate.mean for row in wrong}) == len({row.estimate.mean for row in believed}) == 1
    assert f"({with_error(wrong[0].estimate)} against {believed[0].estimate.mean:.1f}% believed)" in said
