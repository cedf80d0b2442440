"""Studies that a checker scores: what is stored and reported, with and without a judge."""

import json
from dataclasses import replace

import numpy as np
import pytest

import limpet
from limpet.cli.main import main
from limpet.errors import LimpetError
from limpet.evaluation import evaluate, find_checker
from limpet.evaluation.checkers import sudoku
from limpet.experiments import (
    Cell,
    ModelCache,
    Prompts,
    ReportContent,
    Results,
    Store,
    Study,
    collect,
    local,
    report,
    resolve,
    run,
    study_files,
)

SEEDS, N, NFE = (1, 2), 3, 2
CHECKER = """
class Opening:
    conventions = {"opens": "share of texts that begin with an opening bracket"}

    def check(self, text):
        return {"opens": text[0] in "([{", "a:b": len(set(text))}

    def check_set(self, texts):
        return {"kinds": float(len(set("".join(texts))))}
"""
STUDY = f"""
models = ["exact:grammar", "sudoku"]
checker = "./mine.py:Opening"
seeds = {list(SEEDS)}
samples = {N}
metrics = ["entropy"]
judges = []

[samplers]
native = "native nfe={NFE}"
crs = "crs nfe={NFE}"

[[contrasts]]
of = "crs"
against = "native"
measure = "opens"
"""


def computed(study, tmp_path):
    models, store = ModelCache("cpu"), Store(tmp_path / "store")
    assert not run(study, store, local("cpu", models), models).failed
    return collect(study, store)


def test_a_file_names_a_checker_and_its_values_come_first(tmp_path):
    (tmp_path / "mine.py").write_text(CHECKER)
    path = tmp_path / "checked.toml"
    path.write_text(STUDY)
    one = study_files.load(path, ModelCache("cpu"))
    results = computed(one, tmp_path)
    checker, model = find_checker(f"{tmp_path}/mine.py:Opening"), limpet.load("exact:grammar")
    expected = evaluate(
        [limpet.sample(model, f"crs nfe={NFE}", n=N, seed=seed) for seed in SEEDS], None, ("entropy",), checker=checker
    )
    assert list(expected.measures) == ["opens", "a:b", "kinds", "entropy"]
    for name in expected.measures:
        np.testing.assert_allclose(results.values("exact:grammar/crs", name), expected.values[name], atol=1e-12)
    assert results.checks == ["opens", "a:b", "kinds"]
    assert list(results.cells["exact:grammar/crs"])[:4] == ["opens", "a:b", "kinds", "nll"]
    assert "nll" not in results.cells["sudoku/crs"]  # no judge knows boards
    assert results.provenance["conventions"]["opens"] == "share of texts that begin with an opening bracket"

    first, *_ = one.build_report(results).tables
    assert first.head == ("cell", "opens", "a:b", "kinds", "GenPPL, true distribution (lower is better)")
    texts = {row[0].text: [entry.text for entry in row[1:]] for row in first.groups[0]}
    assert texts["sudoku/native"][0] == "0.000 ± 0.000"
    assert texts["sudoku/native"][3] == ""
    numbers = report.to_dict(results, one.build_report(results))
    again = Results.from_dict(one, numbers)
    assert again.checks == results.checks
    assert report.markdown(again, one.build_report(again)) == report.markdown(results, one.build_report(results))


def test_a_models_own_checker_is_used_and_is_part_of_the_key(tmp_path):
    cell = Cell("solved", "sudoku", limpet.CRS(nfe=NFE), N, prompts=Prompts("sudoku 60", 83, 1))
    one = Study("own", "own", (cell,), SEEDS, lambda results: ReportContent(), metrics=())
    results = computed(one, tmp_path)
    model = limpet.load("sudoku")
    parts = [limpet.sample(model, cell.sampler, n=N, seed=seed, prompt=sudoku.puzzles(N, 60, seed)) for seed in SEEDS]
    expected = evaluate(parts, None, (), checker="sudoku")
    for name in ("solved", "valid", "clues kept", "wrong units"):
        np.testing.assert_allclose(results.values("solved", name), expected.values[name], atol=1e-12)
    assert "judged" not in report.markdown(results, ReportContent())
    models = ModelCache("cpu")
    other = resolve(replace(one, checker="grammar"), models)
    assert {unit.key for unit in other.units}.isdisjoint(unit.key for unit in resolve(one, models).units)


def test_without_a_judge_or_a_checker_a_study_is_one_sentence():
    one = Study("none", "none", (Cell("a", "mini", limpet.CRS(nfe=2), 1),), (1,), lambda results: ReportContent())
    with pytest.raises(LimpetError, match="needs a judge or a checker"):
        resolve(one, ModelCache("cpu"))


def test_bulk_samples_are_scored_by_a_checker(tmp_path, capsys):
    folder = tmp_path / "samples"
    options = ["--model", "exact:grammar", "--sampler", "crs", "--nfe", "8", "--n", "40"]
    assert main(["bulk", str(folder), *options]) == 0
    capsys.readouterr()
    assert main(["score", str(folder), "--judge", "none", "--checker", "grammar", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["files"]
    samples = limpet.sample(limpet.load("exact:grammar"), "crs nfe=8", n=40)
    expected = evaluate(samples, None, (), checker="grammar")
    assert list(found["measures"])[:3] == ["grammatical", "distinct", "leaves distance"]
    assert found["measures"]["grammatical"]["mean"] == pytest.approx(expected.estimate("grammatical").mean)
