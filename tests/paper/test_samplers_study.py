"""The study of samplers: its cells and places, how deltas are read off curves, MAUVE, verdicts, and its report."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from limpet.evaluation import heldout_text as heldout
from limpet.evaluation import sample_sets, scores
from limpet.evaluation.metrics import mauve
from limpet.evaluation.statistics import FOLD, Estimate, interpolate
from limpet.experiments import (
    Cell,
    ModelCache,
    ReportContent,
    Results,
    Store,
    Study,
    collect,
    local,
    report,
    resolve,
    run,
)
from limpet.experiments.units import MAUVE_RULE, read_reference_text
from limpet.paper.studies import preset, samplers, study
from limpet.samplers import Native

GPU = preset("mini-gpu")
REPORT = Path(__file__).parents[2] / "docs/reports/mini/samplers-mini-gpu"


def invented(size=GPU, seed=0):
    """Results of the study at a preset's size with invented numbers; its texts are pieces of books."""
    one, generator, cells, texts = study("samplers", size), np.random.default_rng(seed), {}, {}
    book = read_reference_text(one)
    for cell in one.sample_cells:
        sharp = generator.uniform(0, 1.5)
        if any(cell.name.split("/")[2] in nodes for nodes in samplers.CURVES.values()):
            sharp = 1.5 * (1 - cell.sampler.top_p)
        noise, some = generator.normal(size=(2, len(size.seeds))), generator.uniform(size=(6, len(size.seeds)))
        measures = {
            "nll": 4.2 - sharp + noise[0] / 50, "entropy": 5.2 - sharp + noise[1] / 100, "dist-4": some[0],
            "rep-4": some[1], "self-bleu": some[2], "committed": some[3], "visible": some[4],
            "nfe": np.full(len(size.seeds), float(cell.sampler.nfe)),
            **({"mauve": some[0]} if cell.prompts is None else {}),
        }  # fmt: skip
        cells[cell.name] = {name: Estimate(values) for name, values in measures.items()}
        length = 1000 if cell.prompts is None else 400
        starts = generator.integers(len(book) - length, size=2)
        texts[cell.name] = [book[start : start + length] for start in starts]
    provenance = {"models": {}, "samples per seed": [256], "conventions": {}}
    return Results(one, provenance, cells, texts=texts)


# Cells


@pytest.mark.parametrize("size", ["mini-gpu", "mini", "exact", "smoke"])
def test_every_model_has_at_least_forty_samplers_at_every_number_of_calls(size):
    size, found = preset(size), {}
    for cell in study("samplers", size).sample_cells:
        role, at, text = cell.name.split("/", 2)
        found.setdefault((role, at), []).append(text)
        assert cell.sampler.nfe == int(at.split()[-1])
        assert (cell.prompts is not None) == at.startswith("prompt")
    for role in size.captions:
        for nfe in size.nfes:
            assert len(found[role, str(nfe)]) == len(set(found[role, str(nfe)])) >= 40
    every = [text for texts in samplers.FAMILIES.values() for text in texts]
    assert len(every) == len(set(every))
    assert {text for texts in found.values() for text in texts} == set(every)


def test_every_family_that_is_named_exists():
    assert set(samplers.PROMPTED) <= set(samplers.FAMILIES)
    assert set(samplers.CURVES) <= set(samplers.PLOTTED) <= set(samplers.FAMILIES)
    assert len(samplers.PLOTTED) <= 7  # legible


# At equal entropy

CURVES = {"one": ["a", "b", "c"], "two": ["d", "e", "f"]}


def placed(**measures):
    """Results with one place and two seeds: by measure and sampler, a value for each seed or one for both."""
    names = [f"here/{name}" for name in measures["nll"]]
    both = {
        name: {what: Estimate(np.broadcast_to(1.0 * np.array(by[name[5:]]), 2)) for what, by in measures.items()}
        for name in names
    }
    cells = tuple(Cell(name, "exact:words", Native(nfe=2), 1) for name in names)
    return Results(Study("invented", "Invented", cells, (1, 2), lambda _: ReportContent()), {}, both)


def test_a_sampler_is_compared_with_the_curve_that_is_best_at_its_entropy():
    """One: y = x - 1 over 1 to 3; two: y = 1 over 2 to 4. They cross at x = 2; by hand."""
    entropy = {
        "a": 3,
        "b": 2,
        "c": 1,
        "d": 4,
        "e": 3,
        "f": 2,
        "low": 1.5,
        "mid": 2.5,
        "high": 3.5,
        "both": [1.25, 2.75],
    }
    nll = {"a": 2, "b": 1, "c": 0, "d": 1, "e": 1, "f": 1, "low": 0.25, "mid": 1.25, "high": 0.5, "both": [1, 2]}
    results = placed(entropy=entropy, nll=nll)
    found = {name: samplers.delta(results, "here", name, CURVES) for name in ("low", "mid", "high", "both")}
    assert found["low"].values == pytest.approx([-0.25, -0.25])  # 0.25 - (1.5 - 1): only the first passes
    assert found["mid"].values == pytest.approx([0.25, 0.25])  # 1.25 - 1: the second is lower than 1.5 there
    assert found["high"].values == pytest.approx([-0.5, -0.5])  # 0.5 - 1: only the second passes
    assert found["both"].values == pytest.approx([0.75, 1.0])  # each seed by what is best in it
    assert all(not any(one.reasons) for one in found.values())


def test_nothing_is_read_outside_every_curve_and_on_folds():
    entropy = {"a": 3, "b": 1, "c": 2, "d": 6, "e": 5, "f": 4, "out": [0.5, 4.5], "fold": [1.5, 2.5], "kept": 4.25}
    results = placed(entropy=entropy, nll=dict.fromkeys(entropy, 1.0))
    found = {name: samplers.delta(results, "here", name, CURVES) for name in ("out", "fold", "kept")}
    assert math.isnan(found["out"].values[0])
    assert "outside the curve, 1 to 3" in found["out"].reasons[0]
    assert found["out"].values[1] == 0
    assert np.isnan(found["fold"].values).tolist() == [True, True]  # b-c lies over half of a-b
    assert found["fold"].reasons == (FOLD, FOLD)
    assert found["kept"].values == pytest.approx([0, 0])
    assert math.isnan(found["out"].mean)  # no claim rests on half of the seeds


def test_another_measure_is_read_off_the_curve_that_is_best_by_nll():
    entropy = {"a": 3, "b": 2, "c": 1, "d": 3, "e": 2, "f": 1, "mine": 1.5}
    nll = {**dict.fromkeys("abc", 1), **dict.fromkeys("def", 2), "mine": 0}
    rep = {"a": 0.3, "b": 0.2, "c": 0.1, **dict.fromkeys("def", 0.0), "mine": 0.5}
    results = placed(**{"entropy": entropy, "nll": nll, "rep-4": rep})
    assert samplers.delta(results, "here", "mine", CURVES, "rep-4").values == pytest.approx([0.35, 0.35])


def test_delta_is_its_literal_transcription():
    """Seed by seed, curve by curve, node by node, on the study's own curves."""
    results = invented(replace(GPU, nfes=(8, 16), captions={"base": "mini"}))
    for text in ("crs", "mend", "native", "gidd-correction final_step=argmax"):
        for measure in ("nll", "rep-4"):
            wanted = []
            for seed in range(4):

                def of(name, what, seed=seed):
                    return float(results.values(f"base/8/{name}", what)[seed])

                passing = []
                for nodes in samplers.CURVES.values():
                    xs, x = [of(node, "entropy") for node in nodes], of(text, "entropy")
                    at = [interpolate(xs, [of(node, what) for node in nodes], x)[0] for what in ("nll", measure)]
                    passing += [] if math.isnan(at[0]) else [at]
                wanted.append(of(text, measure) - min(passing)[1] if passing else math.nan)
            found = samplers.delta(results, "base/8", text, measure=measure)
            np.testing.assert_allclose(found.values, wanted, rtol=0, atol=1e-12)


def test_a_sampler_is_compared_with_the_best_mixture_of_others():
    """Corners (1, 0), (3, 0), (4, 2); (2, 1) lies above their hull; by hand. Under the second seed it is a corner."""
    entropy = {"a": 1, "b": 2, "c": 3, "d": 4, "on": 3.5, "under": 2, "out": [2, 5]}
    nll = {"a": 0, "b": [1, -1], "c": 0, "d": 2, "on": 1, "under": -0.5, "out": 0}
    results = placed(entropy=entropy, nll=nll)
    found = {name: samplers.delta_to_mixtures(results, "here", name, list("bdca")) for name in ("on", "under", "out")}
    assert found["on"].values == pytest.approx([0, 0])
    assert found["under"].values == pytest.approx([-0.5, 0.5])
    assert math.isnan(found["out"].mean)
    assert "outside the curve, 1 to 4" in found["out"].reasons[1]


# MAUVE


def test_mauve_follows_its_rule_and_is_taken_without_prompts_only(tmp_path):
    """On few short samples, equal to a computation here; the rule is in the provenance and in the unit's key."""
    free = Cell("free", "mini", Native(nfe=2, final_step="argmax"), 4, 24)
    prompted = replace(free, name="prompted", prompts=replace(GPU.prompts, tokens=8, each=1))
    reference = samplers.STUDY["reference_text"]
    one = Study(
        "mauve", "MAUVE", (free, prompted), (1,), lambda _: ReportContent(), GPU.judges, reference_text=reference
    )
    models, store = ModelCache("cpu"), Store(tmp_path)
    assert run(one, store, local(models=models), models).failed == {}
    found = {unit.cell.name: (unit.facts, store.read(unit.key)) for unit in resolve(one, models).units}
    model, ((_, judge),) = models.model("mini"), models.judges(one.judges, models.model("mini"))
    pieces = [ids for _, ids in sample_sets.text_pieces(model, read_reference_text(one), 24).ids]
    assert len(pieces) > 1000
    chosen = [pieces[round(i * (len(pieces) - 1) / 3)] for i in range(4)]  # the first, the last, two between
    facts, unit = found["free"]
    ours, theirs = (
        scores.features(judge, sample_sets.SampleSet.from_tokens(model, rows))
        for rows in (unit.tensors["tokens"], chosen)
    )
    assert unit.rows["sets"]["mauve"] == pytest.approx(float(mauve(ours, theirs, seeds=5, starts=1).mean()), abs=1e-9)
    assert facts["mauve"] == collect(one, store).provenance["conventions"]["mauve"] == MAUVE_RULE
    facts, unit = found["prompted"]
    assert not {"mauve", "reference"} & {*facts, *unit.rows["sets"]}


def test_mauve_does_not_distinguish_a_page_from_the_same_page_between_end_tokens():
    """Models of text are trained with end tokens, and so write them."""
    models = ModelCache("cpu")
    model, end = models.model("mini"), models.model("mini").tokenizer.special["eos"]
    ((_, judge),) = models.judges(GPU.judges, model)
    pages = [ids for _, ids in sample_sets.text_pieces(model, heldout(), 24).ids][:60]
    sets = [pages, [[end, *page, end] for page in pages], [[end, *page, end] for page in pages[1::2]]]
    bare, ours, others = (scores.features(judge, sample_sets.SampleSet.from_tokens(model, rows)) for rows in sets)
    np.testing.assert_array_equal(bare, ours)
    assert mauve(others, bare[::2], seeds=3).mean() > 0.5


def test_a_true_distribution_has_no_mauve():
    plan = resolve(study("samplers", preset("smoke")), ModelCache("cpu"))
    assert "mauve" not in plan.document["conventions"]
    assert not any({"mauve", "reference"} & set(unit.facts) for unit in plan.units)


# What it shows


@pytest.fixture(scope="module")
def full():
    return invented()


@pytest.fixture(scope="module")
def content(full):
    return full.study.build_report(full)


def test_every_family_has_a_verdict_at_every_number_of_calls(content):
    """The table and the claims say the same."""
    table, places = content.tables[0], samplers.places(GPU)
    assert len(places) == 8
    assert table.head[2:] == tuple(places.values())
    ((*rows,),) = table.groups
    assert [row[0].text for row in rows] == list(samplers.RIVALS)
    first = {claim.where: claim for claim in content.claims if "first sampler" in claim.text}
    words = {"holds": "below", "fails": "above", "open": "open"}
    outcomes = set()
    for row in rows:
        claim = first[row[0].text]
        assert [finding.name for finding in claim.findings] == list(places.values())
        for entry, finding in zip(row[2:], claim.findings, strict=True):
            assert entry.text.endswith(f", {words[finding.outcome]}")
            outcomes.add(finding.outcome)
    assert len(outcomes) > 1
    assert len(content.claims) == len(first) + 4


def test_mauve_is_in_the_tables_where_it_was_taken(content):
    heads = {table.name: table.head for table in content.tables[1:]}
    assert len(heads) == 12
    assert all(("MAUVE" in head) == ("prompt" not in name) for name, head in heads.items())


def test_the_scatter_plot_has_every_sampler_of_every_place(full, content):
    (scatter,) = content.scatters
    assert list(scatter.panels) == [*samplers.places(GPU).values(), *samplers.prompted_places(GPU).values()]
    assert scatter.joined == tuple(samplers.CURVES)
    points = [point for points in scatter.panels.values() for point in points]
    assert sorted(point.cell for point in points) == sorted(full.cells)
    for point in points:
        assert point.sampler in samplers.FAMILIES[point.family]
        assert (point.x, point.y) == (full.cells[point.cell]["entropy"], full.cells[point.cell]["nll"])
        assert list(point.texts) == full.texts[point.cell]


def test_the_printed_figure_is_legible(content):
    (figure,) = content.figures
    assert (len(figure.panels), figure.columns) == (8, 4)  # one row for each model
    for panel in figure.panels:
        assert [line.name for line in panel.series] == samplers.PLOTTED
        assert [line.joined for line in panel.series] == [name in samplers.CURVES for name in samplers.PLOTTED]


def test_a_full_report_is_small_and_can_be_read_again(full, tmp_path):
    report.write_report(full, tmp_path)
    assert sum((tmp_path / name).stat().st_size for name in ("index.html", "report.json")) < 2_000_000
    assert report.read_report(full.study, tmp_path).texts == full.texts
    assert set(json.loads((tmp_path / "report.json").read_text())["cells"]) == set(full.cells)


@pytest.fixture(scope="module")
def committed() -> Results:
    return report.read_report(study("samplers", GPU), REPORT)


def test_the_committed_study_is_complete(committed):
    assert set(committed.cells) == {cell.name for cell in committed.study.sample_cells}
    assert [one["device"] for one in committed.provenance["computed on"]] == ["NVIDIA H200"]
    assert all(one["nll"].values.shape == (4,) for one in committed.cells.values())
    assert committed.texts.keys() == committed.cells.keys()
    assert min(map(len, committed.texts.values())) >= 2
    assert (REPORT / "index.html").stat().st_size < 2_000_000


def test_the_committed_study_supports_the_claims_about_mend(committed):
    """Against the best top-p curve and all mixtures of CRS samplers, with and without prompts."""
    found = [claim for claim in committed.study.build_report(committed).claims if claim.where == "Mend"]
    assert len(found) == 5
    assert {claim.verdict for claim in found} == {"supported"}
    for finding in (finding for claim in found for finding in claim.findings):  # and by two errors
        assert finding.estimate.mean + 2 * finding.estimate.se < finding.criterion.high, finding.name
