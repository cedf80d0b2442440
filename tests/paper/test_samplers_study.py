"""The study of samplers: its arms and places, what `less` reads off curves, its MAUVE, its verdicts, and how big its
report is."""

import json
import math
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from limpet.evaluation import scoring
from limpet.evaluation.metrics import mauve
from limpet.evaluation.statistics import FOLD, Estimate, interpolate
from limpet.experiments import Cell, Results, Shelf, Store, Study, collect, report, run, units
from limpet.experiments.contents import Page
from limpet.experiments.executors import local
from limpet.paper.studies import preset, samplers, study
from limpet.paper.studies.trajectories import heldout
from limpet.samplers import Native

GPU = preset("mini-gpu")


def made_up(size=GPU, seed=0):
    """Results of the study at a preset's size, of numbers that nobody measured; its texts are pieces of books."""
    one, numbers, cells, texts = study("samplers", size), np.random.default_rng(seed), {}, {}
    book = units.real(one)
    for cell in one.samples:
        sharp = numbers.uniform(0, 1.5)
        if any(cell.name.split("/")[2] in nodes for nodes in samplers.CURVES.values()):
            sharp = 1.5 * (1 - cell.sampler.top_p)
        noise, some = numbers.normal(size=(2, len(size.shards))), numbers.uniform(size=(6, len(size.shards)))
        selects = hasattr(cell.sampler, "budget")
        measures = {
            "nll": 4.2 - sharp + noise[0] / 50, "entropy": 5.2 - sharp + noise[1] / 100, "dist-4": some[0],
            "rep-4": some[1], "self-bleu": some[2], "committed": some[3] * selects, "visible": some[4] * selects,
            "nfe": np.full(len(size.shards), float(cell.sampler.nfe)),
            **({"mauve": some[0]} if cell.prompts is None else {}),
            **({"chosen": some[5]} if numbers.uniform() < 0.75 else {}),
        }  # fmt: skip
        cells[cell.name] = {name: Estimate(values) for name, values in measures.items()}
        length = 1000 if cell.prompts is None else 400
        starts = numbers.integers(len(book) - length, size=2)
        texts[cell.name] = [book[start : start + length] for start in starts]
    made = {"models": {}, "samples in a shard": [256], "conventions": {}}
    return Results(one, made, cells, texts=texts)


# Cells


@pytest.mark.parametrize("size", ["mini-gpu", "mini", "exact", "smoke"])
def test_at_least_forty_arms_a_model_at_every_number_of_calls(size):
    size = preset(size)
    names = [cell.name.split("/", 2) for cell in study("samplers", size).samples]
    for role in size.captions:
        for nfe in size.nfes:
            arms = [arm for one, at, arm in names if (one, at) == (role, str(nfe))]
            assert len(arms) == len(set(arms)) >= 40
    every = [arm for arms in samplers.FAMILIES.values() for arm in arms]
    assert len(every) == len(set(every))
    assert {arm for *_, arm in names} == set(every)


def test_every_family_that_is_named_is_one():
    assert set(samplers.DRAWN) <= set(samplers.FAMILIES)
    assert set(samplers.PROMPTED) <= set(samplers.FAMILIES)
    assert len(samplers.DRAWN) <= 7  # legible
    assert set(samplers.CURVES) <= set(samplers.DRAWN)


def test_cells_have_the_calls_of_their_place_and_prefixes_where_told():
    for cell in study("samplers", GPU).samples:
        _, at, _ = cell.name.split("/", 2)
        assert cell.sampler.nfe == int(at.split()[-1])
        assert (cell.prompts is not None) == at.startswith("prefix")


# At equal entropy

CURVES = {"one": ["a", "b", "c"], "two": ["d", "e", "f"]}


def placed(**measures):
    """Results with one place, of two shards: by measure, by arm, a value for each or one for both."""
    arms = [f"here/{arm}" for arm in measures["nll"]]
    both = {
        arm: {what: Estimate(np.broadcast_to(float(1) * np.array(by[arm[5:]]), 2)) for what, by in measures.items()}
        for arm in arms
    }
    cells = tuple(Cell(arm, "exact:words", Native(nfe=2), 1) for arm in arms)
    return Results(Study("made-up", "Made up", cells, (1, 2), lambda _: Page()), {}, both)


def test_an_arm_is_held_against_the_curve_that_is_best_at_its_entropy():
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
    found = {arm: samplers.less(results, "here", arm, CURVES) for arm in ("low", "mid", "high", "both")}
    assert found["low"].values == pytest.approx([-0.25, -0.25])  # 0.25 - (1.5 - 1): only the first passes
    assert found["mid"].values == pytest.approx([0.25, 0.25])  # 1.25 - 1: the second is lower than 1.5 there
    assert found["high"].values == pytest.approx([-0.5, -0.5])  # 0.5 - 1: only the second passes
    assert found["both"].values == pytest.approx([0.75, 1.0])  # each shard by what is best in it
    assert all(not any(one.reasons) for one in found.values())


def test_outside_every_curve_and_on_folds_nothing_is_read():
    entropy = {"a": 3, "b": 1, "c": 2, "d": 6, "e": 5, "f": 4, "out": [0.5, 4.5], "fold": [1.5, 2.5], "kept": 4.25}
    results = placed(entropy=entropy, nll=dict.fromkeys(entropy, 1.0))
    found = {arm: samplers.less(results, "here", arm, CURVES) for arm in ("out", "fold", "kept")}
    assert math.isnan(found["out"].values[0])
    assert "outside the curve, 1 to 3" in found["out"].reasons[0]
    assert found["out"].values[1] == 0
    assert np.isnan(found["fold"].values).tolist() == [True, True]  # b-c lies over half of a-b
    assert found["fold"].reasons == (FOLD, FOLD)
    assert found["kept"].values == pytest.approx([0, 0])
    assert math.isnan(found["out"].mean)  # and no claim rests on half of the shards


def test_another_measure_is_read_off_the_curve_that_is_best_by_nll():
    entropy = {"a": 3, "b": 2, "c": 1, "d": 3, "e": 2, "f": 1, "arm": 1.5}
    nll = {**dict.fromkeys("abc", 1), **dict.fromkeys("def", 2), "arm": 0}
    rep = {"a": 0.3, "b": 0.2, "c": 0.1, **dict.fromkeys("def", 0.0), "arm": 0.5}
    results = placed(**{"entropy": entropy, "nll": nll, "rep-4": rep})
    assert samplers.less(results, "here", "arm", CURVES, "rep-4").values == pytest.approx([0.35, 0.35])


def test_less_is_its_literal_transcription():
    """Shard by shard, curve by curve, node by node, on the study's own curves."""
    results = made_up(replace(GPU, nfes=(8, 16), captions={"base": "mini"}))
    for arm in ("crs", "mend", "native", "gidd-correction"):
        for measure in ("nll", "rep-4"):
            wanted = []
            for shard in range(4):

                def of(name, what, shard=shard):
                    return float(results.values(f"base/8/{name}", what)[shard])

                passing = []
                for nodes in samplers.CURVES.values():
                    xs = [of(node, "entropy") for node in nodes]
                    at = [interpolate(xs, [of(node, what) for node in nodes], of(arm, "entropy"))[0]
                          for what in ("nll", measure)]  # fmt: skip
                    passing += [] if math.isnan(at[0]) else [at]
                wanted.append(of(arm, measure) - min(passing)[1] if passing else math.nan)
            found = samplers.less(results, "base/8", arm, measure=measure)
            np.testing.assert_allclose(found.values, wanted, rtol=0, atol=1e-12)


def test_an_arm_is_held_against_the_best_mixture_of_others():
    """Corners (1, 0), (3, 0), (4, 2); (2, 1) lies above their hull; by hand. In the second shard it is a corner."""
    entropy = {"a": 1, "b": 2, "c": 3, "d": 4, "on": 3.5, "under": 2, "out": [2, 5]}
    nll = {"a": 0, "b": [1, -1], "c": 0, "d": 2, "on": 1, "under": -0.5, "out": 0}
    results = placed(entropy=entropy, nll=nll)
    found = {arm: samplers.less_mixed(results, "here", arm, list("bdca")) for arm in ("on", "under", "out")}
    assert found["on"].values == pytest.approx([0, 0])
    assert found["under"].values == pytest.approx([-0.5, 0.5])
    assert math.isnan(found["out"].mean)
    assert "outside the curve, 1 to 4" in found["out"].reasons[1]


# MAUVE


def test_mauve_is_taken_by_its_rule_and_only_without_prefixes(tmp_path):
    """On few short samples, held to the same computed here; the rule stands in the provenance and in the key."""
    free = Cell("free", "mini", Native(nfe=2), 4, 24)
    led = Cell("led", "mini", Native(nfe=2), 4, 24, replace(GPU.prompts, tokens=8, each=1))
    one = Study("held", "Held", (free, led), (1,), lambda _: Page(), GPU.judges, real=samplers.STUDY["real"])
    shelf, store = Shelf("cpu"), Store(tmp_path)
    assert run(one, store, local(shelf=shelf), shelf).failed == {}
    plan = units.resolve(one, shelf)
    found = {unit.cell.name: (unit.facts, store.read(unit.key)) for unit in plan.units}
    model, ((_, judge),) = shelf.model("mini"), shelf.judges(one.judges, shelf.model("mini"))
    pieces = scoring.pieces(model, units.real(one), 24)
    assert len(pieces) > 1000
    chosen = [pieces[round(i * (len(pieces) - 1) / 3)] for i in range(4)]  # the first, the last, two between
    facts, unit = found["free"]
    ours, theirs = (scoring.features(judge, model, rows) for rows in (unit.tensors["tokens"], chosen))
    assert unit.rows["sets"]["mauve"] == pytest.approx(float(mauve(ours, theirs, seeds=5, redo=1).mean()), abs=1e-9)
    assert facts["mauve"] == collect(one, store).provenance["conventions"]["mauve"] == units.MAUVE_RULE
    assert "5 k-means seeds, 1 start each" in units.MAUVE_RULE
    facts, unit = found["led"]
    assert not {"mauve", "real"} & {*facts, *unit.rows["sets"]}


def test_mauve_does_not_tell_a_page_from_the_same_page_between_ends_of_text():
    """As models of text are trained, and so as they write."""
    shelf = Shelf("cpu")
    model, end = shelf.model("mini"), shelf.model("mini").tokenizer.special["eos"]
    ((_, judge),) = shelf.judges(GPU.judges, model)
    pages = scoring.pieces(model, heldout(), 24)[:60]
    framed = [[end, *page, end] for page in pages]
    bare, ours = (scoring.features(judge, model, rows) for rows in (pages, framed))
    np.testing.assert_array_equal(bare, ours)
    assert judge.features([[end, end]]).shape == (1, bare.shape[1])
    others = scoring.features(judge, model, [[end, *page, end] for page in pages[1::2]])
    assert mauve(others, bare[::2], seeds=3).mean() > 0.5


def test_a_true_law_has_no_mauve():
    plan = units.resolve(study("samplers", preset("smoke")), Shelf("cpu"))
    assert "mauve" not in plan.document["conventions"]
    assert not any({"mauve", "real"} & set(unit.facts) for unit in plan.units)


# What it shows


@pytest.fixture(scope="module")
def full():
    return made_up()


@pytest.fixture(scope="module")
def page(full):
    return full.study.build_report(full)


def test_a_verdict_for_every_rival_at_every_number_of_calls(full, page):
    """The table and the claims say the same, by the rule of the lab."""
    table = page.tables[0]
    places = samplers.places(GPU)
    assert len(places) == 8
    assert table.head[2:] == tuple(places.values())
    ((*rows,),) = table.groups
    assert [row[0].text for row in rows] == list(samplers.RIVALS)
    assert {"CRS, argmax", "CRS, copied", "Mend", "Psi", "informed Gibbs"} <= set(samplers.RIVALS)
    by_family = {
        claim.where: claim for claim in page.claims if claim.where in samplers.RIVALS and "first arm" in claim.text
    }
    outcomes = {"holds": "below", "fails": "above", "open": "open"}
    seen = set()
    for row in rows:
        claim = by_family[row[0].text]
        assert [finding.name for finding in claim.findings] == list(places.values())
        for entry, finding in zip(row[2:], claim.findings, strict=True):
            assert entry.text.endswith(f", {outcomes[finding.outcome]}")
            seen.add(finding.outcome)
    assert len(seen) > 1  # numbers of which all say the same would show nothing
    texts = [claim.text for claim in page.claims]
    assert sum("Mend lies" in text or "too Mend lies" in text for text in texts) == 4


def test_mauve_stands_where_it_was_taken(page):
    heads = {table.name: table.head for table in page.tables[1:]}
    assert len(heads) == 12
    for name, head in heads.items():
        assert ("MAUVE" in head) == ("prefix" not in name)


def test_the_scatter_has_every_arm_of_every_place(full, page):
    (scatter,) = page.scatters
    assert list(scatter.panels) == [*samplers.places(GPU).values(), *samplers.continued(GPU).values()]
    assert scatter.joined == tuple(samplers.CURVES)
    dots = [dot for dots in scatter.panels.values() for dot in dots]
    assert {dot.cell for dot in dots} == set(full.cells)
    assert len(dots) == len(full.cells)
    for dot in dots:
        assert dot.arm in samplers.FAMILIES[dot.family]
        assert (dot.x, dot.y) == (full.cells[dot.cell]["entropy"], full.cells[dot.cell]["nll"])
        assert list(dot.texts) == full.texts[dot.cell]


def test_the_still_figure_is_legible(page):
    (figure,) = page.figures
    assert (len(figure.panels), figure.columns) == (8, 4)  # a row a model
    for panel in figure.panels:
        assert [line.name for line in panel.series] == samplers.DRAWN
        assert [line.joined for line in panel.series] == [name in samplers.CURVES for name in samplers.DRAWN]


def test_a_full_report_is_small_and_soon_written(full, tmp_path):
    """Two models, four numbers of calls, prefixes, and two texts of a thousand characters a cell: below 2 MB, and a
    minute at most (it takes ten seconds)."""
    begun = time.process_time()
    report.write(full, tmp_path)
    assert time.process_time() - begun < 60
    sizes = [(tmp_path / name).stat().st_size for name in ("index.html", "report.json")]
    assert sum(sizes) < 2_000_000
    assert report.read(full.study, tmp_path).texts == full.texts
    assert set(json.loads((tmp_path / "report.json").read_text())["cells"]) == set(full.cells)


# The committed report


REPORT = Path(__file__).parents[2] / "docs/reports/mini/samplers-mini-gpu"


@pytest.fixture(scope="module")
def committed() -> Results:
    return report.read(study("samplers", GPU), REPORT)


def test_the_committed_study_is_whole(committed):
    """Every arm of both models, on the machine and of the size that it says, and texts of each to look at."""
    assert set(committed.cells) == {cell.name for cell in committed.study.cells}
    arms = {cell.name.partition("/")[0]: set() for cell in committed.study.cells}
    for cell in committed.study.cells:
        role, _, arm = cell.name.split("/", 2)
        arms[role].add(arm)
    assert {role: len(own) >= 40 for role, own in arms.items()} == {"base": True, "distilled": True}
    assert [one["device"] for one in committed.provenance["made on"]] == ["NVIDIA H200"]
    assert all(one["nll"].values.shape == (4,) for one in committed.cells.values())
    assert committed.texts.keys() == committed.cells.keys()
    assert min(map(len, committed.texts.values())) >= 2
    assert (REPORT / "index.html").stat().st_size < 2_000_000


def test_the_committed_study_says_where_mend_stands(committed):
    """Against the best top-p curve and all mixtures of CRS's arms, free and after prefixes, by the rule of the lab."""
    found = {claim.text: claim for claim in committed.study.build_report(committed).claims if claim.where == "Mend"}
    assert len(found) == 5
    assert {claim.verdict for claim in found.values()} == {"supported"}
    for claim in found.values():
        for finding in claim.findings:  # and by two errors
            assert finding.estimate.mean + 2 * finding.estimate.se < finding.side.high, (claim.text, finding.name)
