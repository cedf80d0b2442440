"""The values of a model's checker in the server's answers."""

import json
import sys
from pathlib import Path

import limpet
from limpet.evaluation import SampleSet, evaluate
from limpet.evaluation.checkers import sudoku
from limpet.evaluation.judges import load_judge
from limpet.server import handlers
from limpet.server.handlers import Request, Resources


def scores(model, judge=None, prompt="", n=2):
    samplers = {"native": limpet.samplers.parse("native nfe=2")[1]}
    resources = Resources({model.name: model}, judge, any_text=False)
    request = Request(model.name, samplers, {"native": {}}, 1, n, model.length, prompt, {}, True)
    rows = handlers.samples(resources, request, lambda event, data: None)["native"]
    return [row["scores"] for row in rows], [row["tokens"] for row in rows]


def test_a_checkers_values_come_first_and_need_no_judge():
    model = limpet.load("sudoku", device="cpu")
    puzzle = sudoku.puzzles(1, 60, 3)[0]
    found, tokens = scores(model, load_judge(), puzzle)
    rows = evaluate(SampleSet.from_tokens(model, tokens, 83), None, (), checker="sudoku").sample_rows()
    for one, row in zip(found, rows, strict=True):
        assert list(one)[:4] == ["solved", "valid", "clues kept", "wrong units"]
        assert {name: one[name] for name in list(one)[:4]} == {name: row[name] for name in list(one)[:4]}
        assert "perplexity" not in one  # the built-in judge reads text, not boards


def test_a_source_with_a_checker_keeps_its_true_distribution():
    (one, _), _ = scores(limpet.load("exact:grammar"))
    assert next(iter(one)) == "grammatical"
    assert one["judge"] == "true distribution of exact:grammar"


def test_without_what_a_checker_needs_samples_are_answered(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "rdkit"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rdkit", None)
    handlers._checker.cache_clear()
    found, _ = scores(limpet.load("molecules", device="cpu"))
    assert all("valid" not in one and "entropy" in one for one in found)
    handlers._checker.cache_clear()


def test_the_description_allows_the_values():
    described = json.loads((Path(handlers.__file__).parent / "assets/openapi.json").read_text())
    other = described["components"]["schemas"]["Scores"]["additionalProperties"]
    assert other["type"] == "number"
