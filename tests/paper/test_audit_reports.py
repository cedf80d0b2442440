"""Reports of audits: numbers read back, one page for each, an index of all; and that docs/audits.md says what the
committed reports show."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

import audits
from audit_cases import run_smoke
from blocks import put
from limpet.errors import LimpetError
from limpet.evaluation.statistics import Estimate, mean_se, paired
from limpet.experiments import Entry, ProbeRow, Results, render, report
from limpet.models.loading import load
from limpet.paper import studies
from limpet.paper.studies import final_step, hidden, risk, selection, singleton, storage
from limpet.paper.studies.audits import estimate_of, paper_value, with_error
from limpet.paper.studies.published import published

DOCS = Path(__file__).parents[2] / "docs"
REPORTS = DOCS / "reports"
BOTH = ("mini", "mini-distilled")


@pytest.fixture(scope="module")
def finished() -> dict[str, Results]:
    words = load("exact:words")
    return {"risk": run_smoke(risk, words), "hidden": run_smoke(hidden, words)}


def test_a_page_holds_everything_that_was_found(finished, tmp_path):
    for name, results in finished.items():
        page = report.write_report(results, tmp_path / name).read_text()
        assert "http://" not in page.replace("http://www.w3.org", "")
        assert page.count("<svg") == page.count("</svg>") == 1
        text = (tmp_path / name / "report.md").read_text()
        (table,) = results.study.build_report(results).tables
        for document in (page, text):
            assert results.study.title in document
            assert results.provenance["computed on"][0]["torch"] in document
            assert all(entry.text in document for group in table.groups for line in group for entry in line)
            assert all(quantity in document for quantity in results.study.conventions)
        assert f"](figures/{name}.svg)" in text
        assert {path.name for path in (tmp_path / name / "figures").iterdir()} == {f"{name}.svg", f"{name}.png"}


def invented() -> Results:
    """Results with markup in their names; they lack the rows that claims and figures need."""
    row = ProbeRow("a <b> | c", "x & y", {"t": 0.5}, mean_se([1.0, 3.0]), "%", 1200)
    none = ProbeRow("mini-distilled", "singleton", {"p": 0.8}, mean_se([math.nan, 3.0]))
    audit = studies.study("singleton", replace(singleton.PRESETS["mini"], models=("a <b> | c",), seeds=(1, 2)))
    plain = replace(audit, build_report=lambda results: replace(audit.build_report(results), figures=()))
    provenance = {"models": {"a <b> | c": "0123456789abcdef"}, "judges": [], "seeds": [1, 2], "samples per seed": []}
    return Results(plain, {**provenance, "what": "<script>alert(1)</script>"}, {}, {"all": [row, none]})


def test_a_table_holds_the_papers_values_and_its_text_is_escaped(tmp_path, monkeypatch):
    monkeypatch.setattr(singleton, "panels", lambda *arguments: ())
    monkeypatch.setattr(studies.audits, "findings", lambda *arguments: [])
    results = invented()
    (table,) = results.study.build_report(results).tables
    assert table.head == ("model", "quantity", "at", "here", "events", "paper")
    assert [len(group) for group in table.groups] == [1, 1]
    assert table.groups[0][0] == tuple(map(Entry, ("a <b> | c", "x & y", "t 0.5", "2.0 ± 1.0 %", "1,200", "")))
    assert table.groups[1][0] == tuple(map(Entry, ("mini-distilled", "singleton", "p 0.8", "none", "", "35.44 ± 0.32")))
    page = report.write_report(results, tmp_path).read_text()
    assert "<script" not in page
    assert "<b>" not in page
    assert "a &lt;b&gt; | c (0123456789ab)" in page
    assert r"| a \<b> \| c | x & y | t 0.5 | 2.0 ± 1.0 % | 1,200 |" in (tmp_path / "report.md").read_text()


# Committed reports


@pytest.mark.parametrize("name", studies.AUDITS)
def test_committed_audits_are_of_their_presets(name):
    """Their table is what today's code builds from their numbers."""
    size = "mini" if name in studies.NOT_IN_PAPER else "mini-gpu"
    preset, folder = studies.audit_presets(name)[size], REPORTS / "mini" / f"{name}-{size}"
    results = report.read_report(studies.study(name, preset), folder)
    (settings,) = results.provenance["settings"]
    assert settings == {field: json.loads(json.dumps(getattr(preset.settings, field))) for field in settings}
    assert results.provenance["models"].keys() == set(preset.models)
    assert {row.model for row in results.rows()} - set(preset.models) <= {"mini and mini-distilled"}
    (table,) = results.study.build_report(results).tables
    assert render.markdown(table) in (folder / "report.md").read_text()


def test_a_block_is_put_between_its_marks(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- x (y) -->\nold\n<!-- end of it -->\nb\n<!-- z -->\n<!-- end -->\n")
    for block in ("new \\1", "new \\1\n"):
        put(page, "x (y)", block)
        assert page.read_text() == "a\n<!-- x (y) -->\nnew \\1\n<!-- end of it -->\nb\n<!-- z -->\n<!-- end -->\n"
    with pytest.raises(LimpetError, match="exactly one block 'w'"):
        put(page, "w", "new")
    page.write_text(page.read_text() * 2)
    with pytest.raises(LimpetError, match="exactly one block 'z'"):
        put(page, "z", "new")


# What docs/audits.md says of them


@pytest.fixture(scope="module")
def found() -> dict[str, Results]:
    return audits.committed(REPORTS)


@pytest.fixture(scope="module")
def text() -> str:
    """The text of the page, wherever its lines break."""
    return " ".join((DOCS / "audits.md").read_text().split())


def test_the_tables_of_the_page_are_what_the_tool_writes(found):
    page, blocks = (DOCS / "audits.md").read_text(), audits.blocks(found)
    assert len(blocks) == 12
    for name, block in blocks.items():
        assert f"<!-- {name} -->\n{block}<!-- end -->" in page, name
    assert all(f"(reports/{folder}/report.md)" in page for folder in found if "/" in folder)


def spread(numbers: list[float], digits: int = 0) -> str:
    return f"{min(numbers):.{digits}f} to {max(numbers):.{digits}f}"


def test_singletons_are_rarer_here(found, text):
    ratios = [
        estimate_of(found["singleton"], quantity, model, p=p).mean / paper_value("singleton", quantity, p=p).mean
        for quantity in singleton.QUANTITIES[:2] for model in BOTH for p in (0.8, 0.9)
    ]  # fmt: skip
    assert f"{spread(ratios, 2)} times as common" in text


def test_final_steps_do_as_the_page_says(found, text):
    differs = {}
    for role, p in final_step.ROWS:
        cells = [f"{role}/{p}/{final}" for final in ("argmax", "sample")]
        gap = found["final-step"].contrast(*cells)
        assert abs(gap.mean) > 2 * gap.se
        assert found["final-step"].contrast(*cells, measure="entropy").mean < 0
        differs[role, p] = gap.mean * published("nll", *cells).mean < 0
    assert [key for key, value in differs.items() if value] == [("base", 1.0), ("distilled", 0.9)]
    assert "Two of four signs differ from the paper: argmax worsens mini at p = 1 and mini-distilled at p = .9" in text


def test_selections_differ_as_the_page_says(found, text):
    results, times = found["selection"], selection.SelectionSettings.times
    apart = [abs(row.estimate.mean) for row in results.find("fixed-position accuracy, difference")]
    most = paper_value("selection", "fixed-position accuracy, difference").high
    assert f"differs by {max(apart):.2f} points at most, against {most} in the paper" in text
    paper, overlap = paper_value("selection", "self error"), paper_value("selection", "Jaccard")
    for model in BOTH:
        errors = [estimate_of(results, "self error", model, t=t).mean for t in times]
        assert errors == sorted(errors)
        assert errors[0] < paper.low
        assert errors[-1] > 2 * paper.high
        excess = {t: overconfidence(results, model, t) for t in times}
        assert min(over.mean for over in excess.values()) > 0
        assert [t for t, over in excess.items() if over.mean < 2 * over.se] == [0.2]
        assert max(excess, key=lambda t: excess[t].mean) >= 0.67
    assert min(row.estimate.mean for row in results.find("Jaccard")) > overlap.high
    under = [row.estimate.mean - 100 * row.at["confidence"] for row in results.find("reliability")]
    assert f"by {spread(under, 1)} points" in text
    sure, right = (estimate_of(results, quantity, "mini", t=0.67).mean for quantity in ("confidence", "self accuracy"))
    assert f"at t = .67, mini predicts {sure:.1f}% and reaches {right:.1f}%" in text
    every, committed = results.find("reliability", "mini"), results.find("self error", "mini")[0]
    texts = 16 * len(results.study.seeds)
    per_text = committed.events // texts, sum(row.events for row in every) // len(times) // texts
    assert "{} positions of {} are committed".format(*per_text) in text


def overconfidence(results: Results, model: str, t: float) -> Estimate:
    """By how many points confidence exceeds accuracy, where a model selects."""
    return paired(*(estimate_of(results, name, model, t=t).values for name in ("confidence", "self accuracy")))


def test_temperatures_explain_as_little_as_the_page_says(found, text):
    results, (settings,) = found["temperature"], found["temperature"].provenance["settings"]
    for model in BOTH:
        residual, paper = estimate_of(results, "residual", model), paper_value("temperature", "residual")
        assert abs(residual.mean - paper.mean) < paper.se
        assert 75 < residual.mean < 85
        changes = estimate_of(results, "top-rank change", model)
        assert changes.mean > paper_value("temperature", "top-rank change").mean
        bound = results.find("optimum at a bound", model)[0]
        assert round(bound.estimate.mean * bound.events / 100) == 1
    assert "One fit of each model ends at a bound" in text
    pairs = len(results.study.seeds) * math.prod(settings[key] for key in ("n", "calls", "positions"))
    assert f"Pairs are {pairs}, less" in text


def test_refreshed_values_do_as_the_page_says(found, text):
    results = found["values"]
    gain = mean_se(-results.contrast("refreshed", "argmax").values)
    assert gain.mean > 2 * gain.se
    assert 0.2 < -gain.mean / published("nll", "refreshed", "argmax").mean < 0.3
    less = -results.contrast("refreshed", "argmax", measure="entropy").mean
    assert f"gain {gain:.3f} nats at 64 calls, a quarter of the paper's gain, at {less:.2f} less entropy" in text
    assert results("nucleus", "ppl").mean > 2 * results("second", "ppl").mean
    for model, where in {"mini": "on `mini`", "mini-distilled": "on `mini-distilled`", "": "there at 64 calls"}.items():
        own = found[f"values/{model}"] if model else results
        cells = [f"{own(cell, 'entropy').mean:.2f}" for cell in ("refreshed-interleaved", "argmax")]
        assert f"{' against '.join(cells)} {where}" in text
        gap = own.contrast("refreshed", "argmax")
        assert {"mini": gap.mean > 2 * gap.se, "mini-distilled": abs(gap.mean) < gap.se}.get(model, True)


def test_committed_tokens_stay_as_probable_as_the_page_says(found, text):
    results = found["hidden"]
    here, there, visible = [], [], {model: [] for model in BOTH}
    for offset in (1, 2, 4, 8):
        paper = [paper_value("hidden", view, offset=offset).mean for view in ("restored", "revisable")]
        there.append(paper[0] - paper[1])
        for model in BOTH:
            overwritten, restored, revisable = (
                estimate_of(results, view, model, offset=offset).mean for view in hidden.VIEWS
            )
            here.append(restored - revisable)
            visible[model].append(overwritten - restored)
    assert f"{spread(here)} points against {spread(there)}" in text
    assert f"by {spread([abs(gap) for gaps in visible.values() for gap in gaps])} points" in text
    assert max(visible["mini"]) < 0 < min(visible["mini-distilled"])
    for model in BOTH:
        rise = [estimate_of(results, "restored", model, offset=offset).mean for offset in (1, 2, 8)]
        assert rise[1] - rise[0] > (rise[2] - rise[0]) / 2
        events = [results.find("restored", model, offset=offset)[0].events for offset in (1, 2, 4, 8)]
        assert events == [3 * count for count in (256, 224, 224, 224)]
    assert len(results.study.seeds) == 3 * 4


def test_visible_tokens_help_as_the_page_says(found, text):
    results = found["storage"]
    higher, share, revised, apart = [], [], [], []
    for p in storage.TOP_PS:
        crs, final_only, revisable, mend = (f"{p}/{name}" for name in ("CRS", "final-only", "revisable", "mend"))
        gap = results.contrast(crs, final_only)
        assert gap.mean < -2 * gap.se
        higher.append(results.contrast(crs, final_only, measure="entropy").mean)
        share.append(100 * results.contrast(final_only, revisable).mean / results.contrast(crs, revisable).mean)
        revised.append(-results.contrast(mend, crs).mean)
        apart.append(abs(results.contrast(mend, crs, measure="entropy").mean))
    assert f"higher by {spread(higher, 3)})" in text
    assert f"({spread(share)}% of it)" in text
    assert f"another {spread(revised, 2)} nats, with entropy within {max(apart):.3f} of that of CRS" in text


def test_error_falls_with_noise_as_the_page_says(found, text):
    results = found["risk"]
    for model in audits.BASE, audits.DISTILLED, audits.CHAIN, audits.WORDS:
        for quantity in ("error", "committed error"):
            errors = [row.estimate.mean for row in results.find(quantity, model)]
            assert len(errors) == 9
            assert errors == sorted(errors)
    start = [estimate_of(results, "committed error", model, t=0.67).mean for model in BOTH]
    start += [estimate_of(found["selection"], "self error", model, t=0.67).mean for model in BOTH]
    assert f"the built-in models are at {spread(start)}% (here and in `selection`)" in text
    wrong, predicted = (results.find(f"committed {name}", "exact:words") for name in ("error", "deficit"))
    assert len({row.estimate.mean for row in wrong}) == len({row.estimate.mean for row in predicted}) == 1
    assert f"({with_error(wrong[0].estimate)} against {predicted[0].estimate.mean:.1f}% predicted)" in text
