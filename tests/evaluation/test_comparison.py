"""`compare`: the same numbers as `evaluate` and `limpet score`, one meaning of a name, and tables that can be read."""

from __future__ import annotations

import json

import matplotlib
import numpy as np
import pytest
import torch

import limpet
from evaluation_cases import VowelChecker, small_tokenizer, tiny
from limpet import CRS, Native
from limpet.cli.common import RunOptions
from limpet.cli.main import main
from limpet.cli.score import run
from limpet.errors import LimpetError
from limpet.evaluation import SampleSet
from limpet.evaluation.comparison import NFE, SAMPLERS, N
from limpet.evaluation.judges import SourceJudge, load_judge
from limpet.models.exact import Mixture
from limpet.samplers import named_samplers
from limpet.samplers.recommended import SHARPNESS

SEEDS = (3, 5)
PAIR = {"native": Native(nfe=4, top_p=0.9), "CRS": CRS(nfe=4)}
MODELS = {"tiny": lambda: tiny(small_tokenizer())}


def compare_and_score(tmp_path, capsys, model, judge, prompt=None, precision="float32", n=2):
    """The same samples under `compare` and, through a file, under `limpet score`."""
    denoiser = MODELS[model]() if model in MODELS else limpet.load(model, device="cpu")
    scorer = None if judge == model else load_judge(judge, "cpu", precision)
    result = limpet.compare(denoiser, PAIR, n=n, seeds=SEEDS, prompt=prompt, judge=scorer)
    for one in result.samplers:
        file = tmp_path / f"{one.name}.jsonl"
        file.write_text("".join(part.lines() for part in one.samples))
        run((str(file),), judge=judge, where=RunOptions("cpu", precision), json=True)
        (document,) = json.loads(capsys.readouterr().out)["files"]
        yield one, result, document


CASES = [
    ("exact:words", "exact:words", None, "exact"),
    ("exact:words", "exact:words", "sand ", "exact"),
    ("exact:words", "exact:words", ["sand ", "sand boat "], "exact"),
    ("exact:chain", "exact:chain", None, "exact"),
    ("exact:chain", "exact:words", "sand ", "exact"),
    ("exact:verses", "exact:verses", None, "exact"),
    ("exact:words", "mini-judge", "sand ", "text"),
    ("mini", "mini-judge", "Once upon a time", "ids"),
    ("tiny", "mini-judge", None, "text"),
    ("tiny", "mini-judge", "the s\u00e9", "text"),  # a continuation, for a judge of another tokenizer
]


@pytest.mark.parametrize(("model", "judge", "prompt", "convention"), CASES)
def test_compare_and_score_agree(tmp_path, capsys, model, judge, prompt, convention):
    few = 1 if model == "mini" else 2
    for one, result, document in compare_and_score(tmp_path, capsys, model, judge, prompt, n=few):
        for name, values in one.scores.values.items():
            np.testing.assert_allclose(values, np.array(document["measures"][name]["values"], float), atol=1e-12)
        scored = document["judge"]
        assert {key: scored[key] for key in result.judge} == result.judge
        assert (scored["convention"], scored["counted"]) == (convention, one.scores.counted)


def test_they_agree_under_a_judge_in_bfloat16(tmp_path, capsys):
    for one, result, document in compare_and_score(tmp_path, capsys, "mini", "mini-judge", precision="bfloat16", n=1):
        np.testing.assert_allclose(one.scores.nll, document["measures"]["nll"]["values"], rtol=0, atol=1e-12)
        assert result.judge["precision"] == document["judge"]["precision"] == "bfloat16"
        assert result.judge["digest"] == document["judge"]["digest"] != load_judge("mini-judge", "cpu").digest


def printed(capsys, *call):
    assert main(list(call)) == 0
    return capsys.readouterr().out


def test_a_name_means_the_same_sampler_everywhere(capsys):
    """`limpet compare` once had two rows called native with different final steps."""
    words = limpet.load("exact:words")
    call = ["compare", "--model", "exact:words", "--n", "2", "--seeds", "3", "5", "--json"]
    by_default = json.loads(printed(capsys, *call))["samplers"]
    assert [one["name"] for one in by_default] == [*SAMPLERS, f"sharpness={SHARPNESS:g}"]
    named = json.loads(printed(capsys, *call, *(word for name in SAMPLERS for word in ("--sampler", name))))["samplers"]
    assert named == by_default[:-1] == limpet.compare(words, SAMPLERS, n=2, seeds=SEEDS).to_dict()["samplers"]
    assert limpet.compare(words, n=2, seeds=SEEDS).to_dict()["samplers"] == by_default
    native = limpet.compare(words, [Native(nfe=NFE)], n=2, seeds=SEEDS).to_dict()["samplers"]
    assert native[0]["measures"] == by_default[0]["measures"]
    assert by_default[0]["sampler"]["final_step"] == "sample"


def test_samplers_are_lists_or_mappings_of_instances_or_texts():
    assert named_samplers(["native", CRS(nfe=8)], 4) == {"native": Native(nfe=4), "crs": CRS(nfe=8)}
    assert named_samplers({"a": "native nfe=3", "b": CRS(nfe=8)}, 4) == {"a": Native(nfe=3), "b": CRS(nfe=8)}
    assert list(named_samplers(["crs nfe=8", "crs nfe=16", "wide: crs spacing=8"])) == [
        "crs nfe=8",
        "crs nfe=16",
        "wide",
    ]
    assert named_samplers(["crs"], None)["crs"] == CRS()
    assert {one.nfe for one in named_samplers(SAMPLERS, 5).values()} == {5}
    with pytest.raises(LimpetError, match="are both 'crs nfe=8': change one, or give it a caption"):
        named_samplers(["crs nfe=8", CRS(nfe=8)])
    with pytest.raises(LimpetError, match="or a text such as"):
        named_samplers([3])


def test_samplers_share_their_random_numbers():
    result = limpet.compare(limpet.load("exact:words"), {"a": Native(nfe=4), "b": Native(nfe=4)}, n=2, seeds=(1,))
    assert torch.equal(result.samplers[0].samples[0].tokens, result.samplers[1].samples[0].tokens)
    assert result.delta_nll(result.samplers[1]).mean == 0
    by_default = limpet.compare(limpet.load("exact:chain"), ["native nfe=2"], seeds=(1,))
    assert len(by_default.samplers[0].samples[0]) == N


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"samplers": {}}, "at least one sampler and one seed"),
        ({"seeds": ()}, "at least one sampler and one seed"),
        ({"seeds": (1, 1)}, "the seeds are 1, 1: each counts once"),
        ({"judge": "nobody/nothing-of-that-name!"}, "nothing-of-that-name"),
    ],
)
def test_errors_are_sentences(options, sentence):
    with pytest.raises(LimpetError, match=sentence):
        limpet.compare(limpet.load("exact:words"), **{"samplers": ["native nfe=2"], "n": 1, "seeds": (1,), **options})


def test_a_source_of_ones_own_needs_no_tokenizer():
    torch.manual_seed(0)
    source = Mixture(torch.rand(3), torch.rand(3, 4, 7), phrases=2)
    result = limpet.compare(source, PAIR, n=5, seeds=SEEDS)
    for one in result.samplers:
        expected = [-source.log_prob(part.tokens).sum() / 40 for part in one.samples]
        np.testing.assert_allclose(one.scores.nll, expected, rtol=0, atol=1e-12)
    assert result.judge["convention"] == "exact"
    drawn = [-source.log_prob(source.draw(5, seed)).sum() / 40 for seed in SEEDS]
    np.testing.assert_allclose(result.data.nll, drawn, rtol=0, atol=1e-12)


def test_the_true_distribution_is_a_row_only_if_it_judges():
    words = limpet.load("exact:words")
    options = {"samplers": ["native nfe=2"], "n": 1, "seeds": (1,)}
    for judge in (None, SourceJudge(words)):
        result = limpet.compare(words, judge=judge, **options)
        assert result.data is not None
        assert result.table().rows[-1][0] == "true distribution"
    assert limpet.compare(words, prompt="sand ", **options).data is None
    assert limpet.compare(words, judge="mini-judge", **options).data is None
    assert limpet.compare(limpet.load("exact:chain"), judge=SourceJudge(words), **options).data is None


def test_a_table_has_four_columns_of_numbers_with_units_and_direction():
    words = limpet.load("exact:words")
    samplers = ["native", "crs", "wide: crs spacing=8 nfe=6", "mend final_step=sample"]
    result = limpet.compare(words, samplers, nfe=4, n=2, seeds=SEEDS, judge="mini-judge")
    head, rows = result.table().head, result.table().rows
    assert head == [
        "sampler",
        "GenPPL (lower is better)",
        "delta NLL against native (nats/token, lower is better)",
        "entropy (nats, higher is more diverse)",
        "rep-4 (lower is less repetitive)",
    ]
    assert [row[0] for row in rows] == [
        "native, nfe=4",
        "crs, nfe=4, final_step=argmax",
        "wide, nfe=6, final_step=argmax",
        "mend final_step=sample, nfe=4",
    ]
    order = sorted(result.samplers, key=lambda one: one.scores.estimate("perplexity").mean)
    assert order == sorted(result.samplers, key=lambda one: result.delta_nll(one).mean)
    text = str(result)
    for part in (row[column] for row in rows for column in range(1, 5)):
        assert part in text
        assert part in result._repr_html_()
    assert max(map(len, text.split("\n")[4:])) < 120
    checked = limpet.compare(words, ["native"], n=2, seeds=SEEDS, checker=VowelChecker())
    assert checked.table().head[1:4] == ["vowels", "starts with s", "distinct texts"]
    assert len(checked.table().head) == 5


def test_a_model_may_name_its_own_checker(tmp_path, monkeypatch):
    file = tmp_path / "mine.py"
    file.write_text('class Short:\n    def check(self, text):\n        return {"short": len(text) < 5}\n')
    words = limpet.load("exact:words")
    monkeypatch.setattr(words, "checker", f"{file}:Short", raising=False)
    result = limpet.compare(words, ["native nfe=2"], n=1, seeds=(1,))
    assert result.table().head[1] == "short"
    assert result.data.values["short"].tolist() == [0]


def test_all_numbers_are_in_the_document_the_frame_and_the_plot():
    matplotlib.use("Agg")
    words = limpet.load("exact:words")
    result = limpet.compare(words, ["native", "crs"], nfe=4, n=2, seeds=SEEDS)
    document = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert document["seeds"] == list(SEEDS)
    frame = result.to_pandas()
    assert len(frame) == 4
    for one, stored in zip(result.samplers, document["samplers"], strict=True):
        own = frame[frame["sampler"] == one.name]
        assert own["nll"].tolist() == stored["measures"]["nll"]["values"] == one.scores.nll.tolist()
        assert own["delta_nll"].tolist() == stored["delta_nll"]["values"]
        assert set(stored["measures"]) == set(document["conventions"])
        assert stored["committed"] == one.committed
    axes = result.plot()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == result.row_names
    assert "lower is better" in axes.get_ylabel()
    drawn = SampleSet.from_tokens(words, words.draw(2, SEEDS[0]))
    assert document["data"]["measures"]["nll"]["values"][0] == limpet.evaluate(drawn, SourceJudge(words)).nll[0]
