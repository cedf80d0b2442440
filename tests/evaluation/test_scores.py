"""`evaluate`: which ids a judge reads as ids, what is counted, and that every caller gets the same numbers."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import limpet
from evaluation_cases import VowelChecker, small_tokenizer, tiny
from limpet import CRS, Native
from limpet.errors import LimpetError
from limpet.evaluation import METRICS, SampleSet, ScoreCache, evaluate, features, metrics, text_pieces
from limpet.evaluation.checkers import find_checker
from limpet.evaluation.judges import SourceJudge, describe, load_judge, score_samples, source_judge
from limpet.evaluation.sample_sets import convention_for, reading_mode
from limpet.generation import Samples

SEEDS = (3, 5)


@pytest.fixture(scope="module")
def words():
    return limpet.load("exact:words")


@pytest.fixture(scope="module")
def mini_judge():
    return load_judge("mini-judge", "cpu")


def nll_of(model, tokens, judge, prompt_length=0, **options):
    """The likelihood alone, of one seed."""
    return evaluate(SampleSet.from_tokens(model, tokens, prompt_length), judge, (), **options).judged[0]


# Ids or text


def judge_with(tokenizer, is_source=False):
    kind = SourceJudge if is_source else SimpleNamespace
    judge = kind.__new__(kind)
    judge.name, judge.digest, judge.tokenizer = "j", "digest of j", tokenizer
    return judge


OURS, NONE = SimpleNamespace(digest="ours"), None


@pytest.mark.parametrize(
    ("tokenizer", "is_source", "samples_tokenizer", "has_text", "wanted", "found"),
    [
        (OURS, False, "ours", True, "auto", "ids"),
        (OURS, False, "ours", False, "auto", "ids"),
        (OURS, False, "theirs", True, "auto", "text"),
        (OURS, False, None, True, "auto", "text"),
        (OURS, False, "theirs", False, "auto", None),
        (OURS, False, None, False, "auto", None),
        (NONE, False, "theirs", True, "auto", None),
        (OURS, False, "ours", True, "text", "text"),
        (OURS, False, "ours", False, "text", None),
        (OURS, False, "theirs", True, "ids", None),
        (OURS, False, None, True, "ids", "ids"),  # the caller states that they are the judge's
        (NONE, False, "theirs", True, "ids", "ids"),
        (OURS, False, "theirs", True, "released", "released"),
        (OURS, False, "ours", False, "released", "released"),
        (NONE, False, "theirs", True, "released", None),
        (OURS, False, "ours", True, "exact", None),
        (OURS, True, "ours", True, "auto", "exact"),
        (OURS, True, "theirs", True, "auto", "exact"),
        (OURS, True, "theirs", False, "auto", None),
        (NONE, True, "the judge's model", False, "auto", "exact"),
        (OURS, True, "ours", True, "ids", None),
        (OURS, True, "ours", True, "text", None),
        (OURS, True, "ours", True, "released", None),
    ],
)
def test_ids_are_read_as_ids_only_if_they_are_the_judges(
    tokenizer, is_source, samples_tokenizer, has_text, wanted, found
):
    judge = judge_with(tokenizer, is_source)
    samples = SampleSet(
        ids=[([], [1])],
        stored_texts=[("", "a")] if has_text else None,
        name="m",
        model="digest of j" if samples_tokenizer == "the judge's model" else None,
        tokenizers=frozenset([samples_tokenizer]),
    )
    if found is not None:
        mode = reading_mode(judge, [samples], wanted)
        assert mode.convention == found
        assert found not in ("ids", "text") or mode.as_ids == (found == "ids")
        return
    with pytest.raises(LimpetError, match="j cannot score m by the convention") as raised:
        reading_mode(judge, [samples], wanted)
    assert "\n" not in str(raised.value)


def test_an_unknown_convention_is_one_sentence():
    with pytest.raises(LimpetError, match="convention 'paper' is none of auto, ids, text, released, exact"):
        reading_mode(judge_with(OURS), [SampleSet.from_texts(["a"])], "paper")


def test_ids_of_another_tokenizer_are_scored_as_text(mini_judge):
    """Ids of another vocabulary are within the judge's range, but mean something else there."""
    model = tiny(small_tokenizer())
    tokens = limpet.sample(model, Native(nfe=2), n=2).tokens
    found = nll_of(model, tokens, mini_judge)
    texts = [model.tokenizer.decode(row) for row in tokens.tolist()]
    assert found.convention == convention_for(mini_judge, model) == "text"
    assert found.nll.tolist() == score_samples(mini_judge, texts, "text").nll.tolist()
    assert abs(found.pooled - score_samples(mini_judge, tokens).pooled) > 0.1
    with pytest.raises(LimpetError, match="only if they belong to the judge's tokenizer"):
        nll_of(model, tokens, mini_judge, convention="ids")
    with pytest.raises(LimpetError, match="ask for the convention ids"):
        nll_of(tiny(None), tokens, mini_judge)
    as_ids = nll_of(tiny(None), tokens, mini_judge, convention="ids")
    assert as_ids.pooled == score_samples(mini_judge, tokens).pooled


def test_the_prompt_of_each_sample_is_not_counted(words, mini_judge):
    samples = limpet.sample(words, Native(nfe=4), n=2, prompt=["sand ", "sand boat "])
    assert evaluate(samples, SourceJudge(words)).judged[0].tokens.tolist() == [155, 150]
    scores = evaluate(samples, mini_judge)
    prompts = ["sand ", "sand boat "]
    rest = [text[len(prompt) :] for text, prompt in zip(samples.texts, prompts, strict=True)]
    assert scores.judged[0].nll.tolist() == score_samples(mini_judge, rest, "text", prompts).nll.tolist()
    own = [row[k:] for row, k in zip(samples.tokens.tolist(), (5, 10), strict=True)]
    np.testing.assert_array_equal(scores.columns()["entropy"], metrics.entropy(own))
    assert scores.columns()["length"].tolist() == [155, 150]


# The judge


def test_an_exact_source_is_its_own_judge(words):
    own = source_judge(words)
    assert (own.name, own.digest, own.precision) == ("true distribution of exact:words", words.digest, "float64")
    assert source_judge(limpet.load("mini", device="cpu")) is None


@pytest.mark.parametrize("name", ["exact:words", "exact:chain", "exact:verses"])
def test_a_true_distribution_does_not_depend_on_the_batch(name):
    source = limpet.load(name)
    judge = SourceJudge(source)
    rows = [[judge.start, *row[: 1 + 7 * i % 40]] for i, row in enumerate(source.draw(12, 1).tolist())]
    rows += [[judge.start, *row] for row in source.draw(5, 2).tolist()] + [[judge.start]]
    reports = []
    together = judge.nll(rows, progress=lambda done, total: reports.append((done, total)))
    for size in (1, 2, 5):
        assert all((a == b).all() for a, b in zip(together, judge.nll(rows, size), strict=True))
    assert reports[-1] == (17, 17)  # the last row is empty
    assert [len(values) for values in together] == [len(row) - 1 for row in rows]
    whole = torch.tensor([row[1:] for row in rows[12:17]])
    np.testing.assert_allclose([values.sum() for values in together[12:17]], -source.log_prob(whole), atol=1e-10)


def test_an_impossible_sample_has_an_infinite_nll():
    verses = limpet.load("exact:verses")
    tokens = verses.draw(2, 0)
    tokens[1, 3] = (tokens[1, 3] + 13) % 27
    scores = evaluate(SampleSet.from_tokens(verses, tokens), SourceJudge(verses))
    assert math.isfinite(scores.columns()["nll"][0])
    assert scores.columns()["nll"][1] == scores.nll[0] == scores.perplexity[0] == math.inf
    assert scores.to_dict()["measures"]["nll"]["mean"] is None
    assert "nan" not in str(scores.table()).lower()


def test_a_true_distribution_reads_text_in_its_letters(words):
    judge, tokens = SourceJudge(words), words.draw(3, 0)
    texts = [words.tokenizer.decode(row) for row in tokens.tolist()]
    assert score_samples(judge, texts, "exact").nll.tolist() == score_samples(judge, tokens, "exact").nll.tolist()
    after = score_samples(judge, [text[5:] for text in texts], "exact", [text[:5] for text in texts])
    assert after.tokens.tolist() == [155] * 3
    chain = SourceJudge(limpet.load("exact:chain"))
    with pytest.raises(LimpetError, match="is of 128 tokens; a sample here has 160"):
        nll_of(words, words.draw(1, 0), chain)
    with pytest.raises(LimpetError, match="have no features under it"):
        chain.features([[1, 2, 3]])
    with pytest.raises(LimpetError, match="letters a to z"):
        score_samples(chain, ["Sand!"], "exact")


# Scores


def test_scores_name_the_judge_and_what_it_read(tmp_path, words, mini_judge):
    tokens = words.draw(2, 0)
    scores = evaluate(SampleSet.from_tokens(words, tokens), mini_judge, cache=ScoreCache(tmp_path))
    judged = scores.judged[0]
    assert (judged.judge, judged.digest, judged.precision) == ("mini-judge", mini_judge.digest, "float32")
    texts = [words.tokenizer.decode(row) for row in tokens.tolist()]
    assert judged.tokens.tolist() == [len(mini_judge.tokenizer.encode(text)) - 1 for text in texts]
    assert scores.nll[0] == judged.nll.sum() / judged.tokens.sum()
    assert scores.counted == judged.tokens.sum()
    assert len(list(tmp_path.rglob("*.json"))) == 2
    rule = describe(mini_judge, "text")
    assert rule.startswith(f"mini-judge ({mini_judge.digest[:12]}), float32, text: text tokenised by the judge")
    assert scores.judge["rule"] == rule
    assert rule in str(scores.table())


def test_every_form_of_the_same_samples_has_the_same_scores(tmp_path, words, mini_judge):
    parts = [limpet.sample(words, CRS(nfe=4), 3, seed) for seed in SEEDS]
    expected = evaluate(parts, mini_judge).to_dict()
    for form in (
        [SampleSet.from_samples(part) for part in parts],
        [SampleSet.from_tokens(words, part.tokens, 0, part.seed) for part in parts],
        [SampleSet.from_tokens(words, part.tokens.numpy(), 0, part.seed) for part in parts],
        [SampleSet.from_tokens(words, part.tokens.tolist(), 0, part.seed) for part in parts],
    ):
        assert evaluate(form, mini_judge).to_dict() == expected
    assert evaluate(parts, "mini-judge").to_dict()["measures"] == expected["measures"]
    for part in parts:
        part.save(tmp_path / f"{part.seed}.jsonl")
    loaded = [Samples.load(tmp_path / f"{seed}.jsonl") for seed in SEEDS]
    assert evaluate(loaded, mini_judge).to_dict() == expected
    texts = evaluate(parts[0].texts, mini_judge, ())  # likelihood is of the text; metrics would count other ids
    assert texts.nll[0] == expected["measures"]["nll"]["values"][0]


def test_scores_are_values_of_samples_and_seeds(words):
    parts = [limpet.sample(words, Native(nfe=3), 4, seed)[1:] for seed in SEEDS]
    scores = evaluate(parts, SourceJudge(words))
    assert scores.seeds == SEEDS
    assert list(scores.values)[:2] == ["nll", "perplexity"]
    assert "self-bleu-prompt" not in scores.values
    for i, part in enumerate(parts):
        assert scores.values["entropy"][i] == metrics.entropy(part.tokens).mean()
        assert scores.set_values(i) == {"dist-4": metrics.dist(part.tokens, 4)}
        rows = [row for row in scores.sample_rows() if row["seed"] == part.seed]
        assert [row["sample"] for row in rows] == [1, 2, 3]
        np.testing.assert_allclose([row["nll"] for row in rows], -words.log_prob(part.tokens) / 160, atol=1e-12)
    frame = scores.to_pandas()
    assert len(frame) == 6
    assert frame["entropy"].tolist() == [row["entropy"] for row in scores.sample_rows()]
    document = json.loads(json.dumps(scores.to_dict(intervals=True), allow_nan=False))
    for name, measure in document["measures"].items():
        assert measure["values"] == scores.values[name].tolist()
        assert measure["convention"]
        if name != "dist-4":
            assert measure["bootstrap"]["low"] <= measure["mean"] <= measure["bootstrap"]["high"]
    assert scores.estimate("perplexity").mean == pytest.approx(math.exp(scores.nll.mean()))
    assert f"{scores.estimate('rep-4'):.4f}" in scores._repr_html_()
    with pytest.raises(LimpetError, match="did you mean entropy"):
        scores.estimate("entrpy")


def test_self_bleu_within_a_prompt_compares_only_its_continuations():
    tokens = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [7, 8, 9, 1, 2], [7, 8]]
    model = tiny(None)
    free = evaluate(SampleSet.from_tokens(model, tokens), None, ("rep-4", "dist-4", "self-bleu", "self-bleu-prompt"))
    assert list(free.values) == ["rep-4", "dist-4", "self-bleu"]
    assert math.isnan(free.columns()["rep-4"][3])
    prompted = [[prompt, *row] for prompt, row in zip((20, 20, 21, 22), tokens, strict=True)]
    scores = evaluate(SampleSet.from_tokens(model, prompted, 1), None, ("self-bleu", "self-bleu-prompt"))
    within = scores.columns()["self-bleu-prompt"]
    assert np.isnan(within[2:]).all()
    assert within[0] == within[1] > 0
    np.testing.assert_array_equal(scores.columns()["self-bleu"], free.columns()["self-bleu"])


def test_text_without_a_judge_is_counted_in_words():
    scores = evaluate(["the cat sat on the mat", "the cat sat", "one"])
    assert scores.counted_ids == "words between spaces"
    assert scores.columns()["length"].tolist() == [6, 3, 1]
    assert scores.judge is None
    with pytest.raises(LimpetError, match="no measure 'nll'"):
        scores.estimate("nll")


def test_mauve_compares_all_samples_with_real_text(mini_judge):
    mini = limpet.load("mini", device="cpu")
    parts = [limpet.sample(mini, Native(nfe=2), 6, seed, length=16) for seed in SEEDS]
    real = text_pieces(mini, "The old man walked along the beach and looked for shells. " * 20, 16)
    scores = evaluate(parts, mini_judge, (), reference=real, mauve_starts=1)
    ours, theirs = features(mini_judge, parts), features(mini_judge, real)
    assert scores.mauve.tolist() == metrics.mauve(ours, theirs, starts=1).tolist()
    again = evaluate(parts, mini_judge, (), reference=theirs, mauve_starts=1)
    assert again.to_dict() == scores.to_dict()
    assert "mauve" in str(scores.table())
    with pytest.raises(LimpetError, match="name a judge"):
        evaluate(parts, None, (), reference=real)


class CountedTensor(torch.Tensor):
    """A tensor that counts the operations on it."""

    calls = 0

    @classmethod
    def __torch_function__(cls, function, kinds, args=(), kwargs=None):
        CountedTensor.calls += 1
        return super().__torch_function__(function, kinds, args, kwargs or {})


def test_tokens_are_read_at_once_and_not_one_by_one(mini_judge):
    """Reading each element of a tensor takes 40 times as long as `tolist`."""
    mini, calls = limpet.load("mini", device="cpu"), []
    for length in (8, 64):
        tokens = torch.randint(1000, (4, length)).as_subclass(CountedTensor)
        CountedTensor.calls = 0
        evaluate(SampleSet.from_tokens(mini, tokens), mini_judge)
        calls.append(CountedTensor.calls)
    assert calls[0] == calls[1] < 8


# Checkers


def test_a_checker_reads_whole_texts_and_comes_first(tmp_path, words):
    parts = [limpet.sample(words, Native(nfe=3), 3, seed, prompt="sand ") for seed in SEEDS]
    scores = evaluate(parts, SourceJudge(words), checker=VowelChecker())
    assert list(scores.values)[:4] == ["vowels", "starts with s", "distinct texts", "nll"]
    assert scores.values["starts with s"].tolist() == [1, 1]  # the prompt belongs to the text
    assert scores.values["vowels"][0] == np.mean([VowelChecker().check(text)["vowels"] for text in parts[0].texts])
    assert scores.set_values(0)["distinct texts"] == 1
    assert scores.measures["vowels"].convention == "share of vowels in a text"
    assert math.isnan(evaluate([" ", "sat"], checker=VowelChecker()).columns()["vowels"][0])
    file = tmp_path / "mine.py"
    file.write_text(
        'class Short:\n    def check(self, text):\n        return {"short": len(text) < 5}\nclass Wrong: ...\n'
    )
    assert evaluate(["a", "long text"], checker=f"{file}:Short").values["short"].tolist() == [0.5]
    with pytest.raises(LimpetError, match="has no method check"):
        find_checker(f"{file}:Wrong")
    with pytest.raises(LimpetError, match="there is no checker 'nothing'"):
        find_checker("nothing")
    with pytest.raises(LimpetError, match="has no tokenizer"):
        evaluate(SampleSet.from_tokens(tiny(None), [[1, 2]]), checker=VowelChecker())
    clash = SimpleNamespace(check=lambda text: {"entropy": 1.0})
    with pytest.raises(LimpetError, match="both have a measure 'entropy'"):
        evaluate(["a"], checker=clash)


# Differences and errors


def test_a_difference_is_paired_by_seed_and_sample(words):
    a, b = ([limpet.sample(words, sampler, 3, seed) for seed in SEEDS] for sampler in (Native(nfe=3), CRS(nfe=3)))
    first, second = evaluate(a, SourceJudge(words)), evaluate(b, SourceJudge(words))
    difference = second.difference(first)
    assert "perplexity" not in difference
    for name, measure in difference.items():
        np.testing.assert_allclose(measure.values, second.values[name] - first.values[name], atol=1e-12)
    assert difference["dist-4"].interval is None
    low, high = difference["nll"].interval
    assert low < difference["nll"].estimate.mean < high
    for other, reason in ((evaluate(a[:1]), "2 seeds, 6 samples"), (evaluate([part[:2] for part in a]), "same seeds")):
        with pytest.raises(LimpetError, match=reason):
            first.difference(other)
    with pytest.raises(LimpetError, match="the same samples"):
        evaluate([part[1:] for part in a]).difference(evaluate([part[:2] for part in a]))


@pytest.mark.parametrize(
    ("samples", "options", "sentence"),
    [
        ([], {}, "nothing to evaluate"),
        ("one text", {}, "not str"),
        ([3], {}, "not int"),
        (["a"], {"metrics": ["entrpy"]}, "did you mean entropy"),
        ([SampleSet.from_texts(["a"]), SampleSet([([], [1])], numbers=[0])], {}, "one kind for all"),
    ],
)
def test_errors_are_sentences(samples, options, sentence):
    with pytest.raises(LimpetError, match=sentence) as raised:
        evaluate(samples, **options)
    assert "\n" not in str(raised.value)


def test_every_metric_names_its_convention():
    assert all(metric.convention for metric in METRICS.values())
