"""From tokens to numbers, one way: whose ids are read as ids, and that `compare` and `score` never disagree."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

import limpet
from limpet import CRS, Native
from limpet.cli.common import Where
from limpet.cli.main import main
from limpet.cli.score import run
from limpet.errors import LimpetError
from limpet.evaluation import scoring, statistics
from limpet.evaluation.judges import ScoreCache, SourceJudge, gen_nll, load_judge
from limpet.models.duo import Duo, Network, Shape
from limpet.models.exact import Mixture
from limpet.models.tokenizers import Tokenizer

SHARDS = (3, 5)
ARMS = {"native": Native(nfe=4, top_p=0.9), "CRS": CRS(nfe=4)}


def letters_of_its_own() -> Tokenizer:
    """A small byte-level tokenizer that no built-in model has."""
    tokens = tokenizers.Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
    tokens.train_from_iterator(["the sea and the sand and the salt"] * 9, trainer)
    return Tokenizer(tokens, 280)


def tiny(tokenizer: Tokenizer | None) -> Duo:
    torch.manual_seed(0)
    network = Network(Shape(vocab_size=280, length=24, width=16, blocks=1, heads=2, cond=8, hidden=32))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(0, 0.3)
    return Duo(network.eval(), name="tiny", tokenizer=tokenizer)


MODELS = {"tiny": lambda: tiny(letters_of_its_own())}


def both(tmp_path, capsys, model, judge, prefix=None, precision="float32", n=2, shards=SHARDS):
    """The same samples under `compare` and, through a file, under `score`: pairs of values for each shard."""
    denoiser = MODELS[model]() if model in MODELS else limpet.load(model, device="cpu")
    scorer = None if judge == model else load_judge(judge, "cpu", precision)
    result = limpet.compare(denoiser, ARMS, n, shards, prefix=prefix, judge=scorer)
    for arm in result.arms:
        file = tmp_path / f"{arm.name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for made in arm.samples for row in made.rows()))
        run((str(file),), judge=judge, where=Where("cpu", precision), json=True)
        (document,) = json.loads(capsys.readouterr().out)["files"]
        rows = {row["metric"]: row["values"] for row in document["rows"]}
        yield arm, result, document["judge"], [
            (arm.nll, rows["gen-nll"]), (np.exp(arm.nll), rows["gen-ppl"]),
            *((arm.values[name], rows[name]) for name in ("entropy", "rep-4")),
        ]  # fmt: skip


CASES = [
    ("exact:words", "exact:words", None, "exact"),
    ("exact:words", "exact:words", "sand ", "exact"),
    ("exact:chain", "exact:chain", None, "exact"),
    ("exact:chain", "exact:words", None, "exact"),
    ("exact:verses", "exact:verses", None, "exact"),
    ("exact:words", "mini-judge", None, "text"),
    ("mini", "mini-judge", None, "ids"),
    ("mini", "mini-judge", "Once upon a time", "ids"),
    ("tiny", "mini-judge", None, "text"),
    ("tiny", "mini-judge", "the sea", "text"),  # a continuation, for a judge of another tokenizer
    ("tiny", "mini-judge", "the s\u00e9", "text"),
    ("exact:words", "mini-judge", "sand ", "text"),
    ("exact:chain", "exact:words", "sand ", "exact"),
]


@pytest.mark.parametrize(("model", "judge", "prefix", "convention"), CASES)
def test_compare_and_score_agree(tmp_path, capsys, model, judge, prefix, convention):
    for arm, result, scored, pairs in both(tmp_path, capsys, model, judge, prefix):
        for ours, theirs in pairs:
            np.testing.assert_allclose(ours, np.array(theirs, dtype=float), rtol=0, atol=1e-12)
        told = {key: result.judge[key] for key in ("name", "digest", "precision", "convention")}
        assert told == {key: scored[key] for key in told}
        assert (scored["convention"], scored["counted"]) == (convention, arm.counted)


def test_they_agree_under_a_judge_in_bfloat16(tmp_path, capsys):
    for _, result, scored, pairs in both(tmp_path, capsys, "mini", "mini-judge", precision="bfloat16"):
        for ours, theirs in pairs:
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
        assert result.judge["precision"] == scored["precision"] == "bfloat16"
        assert result.judge["digest"] == scored["digest"] != load_judge("mini-judge", "cpu").digest


def test_the_commands_agree(tmp_path, capsys):
    file = tmp_path / "words.jsonl"
    lines = []
    for seed in SHARDS:
        arm = ["--arm", "crs budget=.25", "--nfe", "4", "--n", "3"]
        assert main(["sample", "--model", "exact:words", *arm, "--seed", str(seed), "--json"]) == 0
        lines.append(capsys.readouterr().out)
    file.write_text("".join(lines))
    shards = ["--shards", *map(str, SHARDS)]
    assert main(["compare", "--model", "exact:words", *arm, *shards, "--json"]) == 0
    (compared,) = json.loads(capsys.readouterr().out)["arms"]
    assert main(["score", str(file), "--judge", "exact:words", "--json"]) == 0
    (scored,) = json.loads(capsys.readouterr().out)["files"]
    rows = {row["metric"]: row for row in scored["rows"]}
    for ours, theirs in (("nll", "gen-nll"), ("perplexity", "gen-ppl"), ("entropy", "entropy"), ("rep-4", "rep-4")):
        assert compared[ours]["shards"] == pytest.approx(rows[theirs]["values"], abs=1e-12)
        assert compared[ours]["se"] == pytest.approx(rows[theirs]["se"], abs=1e-12)
    assert compared["counted"] == scored["judge"]["counted"] == 2 * 3 * 160


# Whose ids


def judge_with(tokenizer, probs=False):
    kind = SourceJudge if probs else SimpleNamespace
    judge = kind.__new__(kind)
    judge.name, judge.digest, judge.tokenizer = "j", "digest of j", tokenizer
    return judge


OURS, NONE = SimpleNamespace(digest="ours"), None


@pytest.mark.parametrize(
    ("tokenizer", "exact", "made_by", "text", "wanted", "found"),
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
        (OURS, False, None, True, "ids", "ids"),  # vouched for
        (NONE, False, "theirs", True, "ids", "ids"),
        (OURS, False, "theirs", True, "released", "released"),
        (OURS, False, "ours", False, "released", "released"),
        (NONE, False, "theirs", True, "released", None),
        (OURS, False, "ours", True, "exact", None),
        (OURS, True, "ours", True, "auto", "exact"),
        (OURS, True, "theirs", True, "auto", "exact"),  # the text in its letters
        (OURS, True, "theirs", False, "auto", None),
        (NONE, True, "digest of j", False, "auto", "exact"),  # its own model's
        (OURS, True, "ours", True, "ids", None),
        (OURS, True, "ours", True, "text", None),
        (OURS, True, "ours", True, "released", None),
    ],
)
def test_ids_are_read_as_ids_only_where_they_are_the_judges(tokenizer, probs, made_by, text, wanted, found):
    judge = judge_with(tokenizer, probs)
    if found is not None:
        assert scoring.way(judge, made_by, text, "m", wanted).convention == found
        return
    with pytest.raises(LimpetError, match="j cannot score m by the convention") as raised:
        scoring.way(judge, made_by, text, "m", wanted)
    assert "\n" not in str(raised.value)


def test_an_unknown_convention_is_a_sentence():
    with pytest.raises(LimpetError, match="convention 'paper' is none of auto, ids, text, released, distribution"):
        scoring.way(judge_with(OURS), "ours", True, "m", "paper")


def test_a_foreign_models_ids_are_not_given_to_a_judge():
    """Ids of another vocabulary fit the judge's range, and mean nothing there: its texts are read."""
    model, judge = tiny(letters_of_its_own()), load_judge("mini-judge", "cpu")
    tokens = limpet.sample(model, Native(nfe=2), n=2).tokens
    found = scoring.score(judge, model, tokens)
    texts = [model.tokenizer.decode(row) for row in tokens.tolist()]
    assert found.convention == "text"
    assert found.nll.tolist() == gen_nll(judge, texts, "text").nll.tolist()
    assert abs(found.pooled - gen_nll(judge, tokens).pooled) > 0.1
    with pytest.raises(LimpetError, match="only where both have one tokenizer"):
        scoring.score(judge, model, tokens, convention="ids")
    with pytest.raises(LimpetError, match="for which both need a tokenizer"):
        scoring.score(judge, tiny(None), tokens)
    assert scoring.score(judge, tiny(None), tokens, convention="ids").pooled == gen_nll(judge, tokens).pooled


def test_what_was_given_is_not_counted():
    model, judge = limpet.load("exact:words"), load_judge("mini-judge", "cpu")
    tokens = limpet.sample(model, Native(nfe=4), n=2, prefix="sand ").tokens
    assert scoring.score(SourceJudge(model), model, tokens, 5).tokens.tolist() == [155, 155]
    text = scoring.score(judge, model, tokens, 5)
    rest = [model.tokenizer.decode(row) for row in tokens[:, 5:].tolist()]
    assert text.nll.tolist() == gen_nll(judge, rest, "text", ["sand "] * 2).nll.tolist()


# Who judges


def test_the_judge_is_the_one_given_or_the_true_law():
    words, mini = limpet.load("exact:words"), limpet.load("mini", device="cpu")
    judge = load_judge("mini-judge", "cpu")
    assert scoring.judge_of(words, judge) is judge
    own = scoring.judge_of(words, None)
    assert (own.name, own.digest, own.precision) == ("true distribution of exact:words", words.digest, "float64")
    assert scoring.source_judge(mini) is None
    with pytest.raises(LimpetError, match="the true distribution of mini is not known: give a judge"):
        scoring.judge_of(mini, None)


def test_a_source_of_ones_own_needs_no_tokenizer(tmp_path):
    torch.manual_seed(0)
    source = Mixture(torch.rand(3), torch.rand(3, 4, 7), phrases=2)
    result = limpet.compare(source, ARMS, n=5, shards=SHARDS)
    for arm in result.arms:
        wanted = [-source.log_prob(made.tokens).sum() / 40 for made in arm.samples]
        np.testing.assert_allclose(arm.nll, wanted, rtol=0, atol=1e-12)
    assert result.judge["convention"] == "exact"
    assert result.data is not None
    drawn = [-source.log_prob(source.draw(5, seed)).sum() / 40 for seed in SHARDS]
    np.testing.assert_allclose(result.data.nll, drawn, rtol=0, atol=1e-12)


def test_the_sources_own_texts_are_a_row_only_where_its_law_judges():
    words = limpet.load("exact:words")
    arms = {"native": Native(nfe=2)}
    assert limpet.compare(words, arms, 1, (1,)).data is not None
    assert limpet.compare(words, arms, 1, (1,), judge=SourceJudge(words)).data is not None
    assert limpet.compare(words, arms, 1, (1,), prefix="sand ").data is None
    assert limpet.compare(words, arms, 1, (1,), judge=load_judge("mini-judge", "cpu")).data is None
    assert limpet.compare(limpet.load("exact:chain"), arms, 1, (1,), judge=SourceJudge(words)).data is None


# The true distribution


@pytest.mark.parametrize("name", ["exact:words", "exact:chain", "exact:verses"])
def test_batches_of_one_length_change_nothing(name):
    source = limpet.load(name)
    probs = SourceJudge(source)
    rows = [[probs.start, *row[: 1 + 7 * i % 40]] for i, row in enumerate(source.draw(12, 1).tolist())]
    rows += [[probs.start, *row] for row in source.draw(5, 2).tolist()] + [[probs.start]]
    told = []
    together = probs.nll(rows, progress=lambda done, total: told.append((done, total)))
    for size in (1, 2, 5):
        assert all((a == b).all() for a, b in zip(together, probs.nll(rows, size), strict=True))
    assert told[-1] == (17, 17)  # the last is empty: there is nothing to read
    assert [len(values) for values in together] == [len(row) - 1 for row in rows]
    whole = torch.tensor([row[1:] for row in rows[12:17]])
    np.testing.assert_allclose([values.sum() for values in together[12:17]], -source.log_prob(whole), atol=1e-10)


def test_what_cannot_be_is_infinitely_unlikely():
    """And is not left out as if it were no text."""
    verses = limpet.load("exact:verses")
    tokens = verses.draw(2, 0)
    tokens[1, 3] = (tokens[1, 3] + 13) % 27
    found = scoring.score(SourceJudge(verses), verses, tokens)
    assert math.isfinite(found.nll[0])
    assert found.nll[1] == found.pooled == math.inf
    assert found.pooled == math.inf


def test_a_true_law_says_what_it_cannot_do(tmp_path):
    probs = SourceJudge(limpet.load("exact:chain"))
    words = limpet.load("exact:words")
    with pytest.raises(LimpetError, match="is of 128 tokens; a sample here has 160"):
        scoring.score(probs, words, words.draw(1, 0))
    with pytest.raises(LimpetError, match="have no features under it"):
        probs.features([[1, 2, 3]])
    with pytest.raises(LimpetError, match="letters a to z"):
        gen_nll(probs, ["Sand!"], "exact")


def test_a_true_law_reads_text_in_its_letters():
    words = limpet.load("exact:words")
    probs, tokens = SourceJudge(words), words.draw(3, 0)
    texts = [words.tokenizer.decode(row) for row in tokens.tolist()]
    assert gen_nll(probs, texts, "exact").nll.tolist() == gen_nll(probs, tokens, "exact").nll.tolist()
    after = gen_nll(probs, [text[5:] for text in texts], "exact", [text[:5] for text in texts])
    assert after.tokens.tolist() == [155] * 3


# What stands with a score


def test_a_score_says_who_how_and_over_what(tmp_path):
    model, judge = limpet.load("exact:words"), load_judge("mini-judge", "cpu")
    tokens = model.draw(2, 0)
    found = scoring.score(judge, model, tokens, cache=ScoreCache(tmp_path))
    assert (found.judge, found.digest, found.precision) == ("mini-judge", judge.digest, "float32")
    assert found.convention == "text"
    texts = [model.tokenizer.decode(row) for row in tokens.tolist()]
    assert found.tokens.tolist() == [len(judge.tokenizer.encode(text)) - 1 for text in texts]
    assert found.pooled == found.nll.sum() / found.tokens.sum()
    assert len(list(tmp_path.rglob("*.json"))) == 2
    words = scoring.rule(judge, "text")
    assert words.startswith(f"mini-judge ({judge.digest[:12]}), float32, text: text tokenised by the judge")
    assert math.isnan(gen_nll(judge, [[3], []]).pooled)


def test_diversity_is_of_a_shard_and_within_its_prompts():
    tokens = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [7, 8, 9, 1, 2], [7, 8]]
    columns, sets = scoring.diversity(tokens, ["rep-4", "dist-4", "self-bleu"])
    assert (list(columns), list(sets)) == (["rep-4", "self-bleu"], ["dist-4"])
    assert columns["rep-4"][3] is None
    alone, _ = scoring.diversity(tokens, ["self-bleu"], ["a", "a", "b", "c"])
    assert alone["self-bleu"][2] is alone["self-bleu"][3] is None
    assert alone["self-bleu"][0] == alone["self-bleu"][1] > 0
    assert scoring.conventions(["self-bleu"], prompted=True) == {"self-bleu": scoring.WITHIN_PROMPT}
    assert statistics.mean(columns["rep-4"]) == 0
    assert math.isnan(statistics.mean([math.nan]))
