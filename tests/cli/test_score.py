"""`limpet score`: files of every kind, measures with conventions, differences only between files that are paired."""

from __future__ import annotations

import io
import json
import math
import sys

import numpy as np
import pytest
import torch
import tyro
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from limpet.cli.score import run
from limpet.errors import LimpetError
from limpet.evaluation import metrics, statistics
from limpet.evaluation.judges import CONVENTIONS, causal, load_judge, score_samples
from limpet.models.tensor_files import pack_rows, write_tensors

WORDS = "the cat sat on a mat and then it ran off to see some more of the big world".split()
SHAPE = causal.CausalShape(300, 6, 16, 1, 2, 32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a tiny random judge in the built-in layout."""
    folder = tmp_path_factory.mktemp("judge")
    torch.manual_seed(0)
    write_tensors(folder / "model.safetensors", pack_rows(dict(causal.CausalNetwork(SHAPE).named_parameters())))
    (folder / "config.json").write_text(json.dumps({"model_type": "causal", **vars(SHAPE)}))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 9, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def judge(folder):
    return load_judge(str(folder), device="cpu")


SEEDS = (8200, 8210, 8220)


def texts(count, seed):
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, random.integers(5, 9))) for _ in range(count)]


def write(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


def sampled(judge, variant=0, each=4):
    """Rows as `limpet sample` writes them."""
    rows = []
    for seed in SEEDS:
        for i, text in enumerate(texts(each, [variant, seed])):
            ids = judge.tokenizer.encode(text)
            row = {"text": text, "tokens": ids, "seed": seed, "sample": i, "model": "m", "nfe": 8}
            rows.append({**row, "tokenizer": judge.tokenizer.digest})
    return rows


def score(capsys, *files, **options):
    run(tuple(files), json=True, **{"judge": "none", **options})
    document = json.loads(capsys.readouterr().out)
    for file in document["files"]:
        assert all(measure["convention"] for measure in file["measures"].values())
    return document


def test_measures_are_the_numbers_of_the_library(capsys, tmp_path, judge, folder):
    rows = sampled(judge)
    shuffled = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    (file,) = score(capsys, write(tmp_path / "a.jsonl", shuffled), judge=str(folder))["files"]
    got = file["measures"]
    assert (file["samples"], file["seeds"], file["ids"]) == (12, list(SEEDS), "the samples' own ids")
    assert (file["judge"]["convention"], file["judge"]["digest"]) == ("ids", judge.digest)
    assert CONVENTIONS["ids"].rule in file["judge"]["rule"]
    assert file["judge"]["longer_than_context"] == sum(len(row["tokens"]) > 7 for row in rows)
    ids = [row["tokens"] for row in rows]
    by_seed = [ids[i : i + 4] for i in (0, 4, 8)]
    nll = [score_samples(judge, part).pooled for part in by_seed]
    expected = {
        "nll": nll,
        "perplexity": np.exp(nll),
        "entropy": [metrics.entropy(part).mean() for part in by_seed],
        "dist-4": [metrics.dist(part, 4) for part in by_seed],
        "rep-4": [metrics.rep(part, 4).mean() for part in by_seed],
        "self-bleu": [metrics.self_bleu(part).mean() for part in by_seed],
        "self-bleu-all": [metrics.self_bleu(part, "add-one-all").mean() for part in by_seed],
        "length": [np.mean([len(x) for x in part]) for part in by_seed],
    }
    for name, values in expected.items():
        np.testing.assert_allclose(got[name]["values"], values, rtol=0, atol=1e-5, err_msg=name)
        kind = statistics.GeometricMean if name == "perplexity" else statistics.Estimate
        estimate = kind(np.array(got[name]["values"]))
        assert (got[name]["mean"], got[name]["se"]) == (estimate.mean, estimate.se)
        if name != "dist-4":
            assert got[name]["bootstrap"]["low"] <= got[name]["mean"] <= got[name]["bootstrap"]["high"]
    assert got["dropped"]["mean"] == got["ends"]["mean"] == 0


def test_ends_are_counted_in_each_sample(capsys, tmp_path, judge, folder):
    rows = [{**row, "tokens": [*row["tokens"], *[judge.eos] * row["sample"]]} for row in sampled(judge)]
    (file,) = score(capsys, write(tmp_path / "a.jsonl", rows), judge=str(folder))["files"]
    ends = file["measures"]["ends"]
    assert ends["values"] == [1.5] * 3  # 0, 1, 2 and 3 in the samples of each seed
    assert f"id {judge.eos}" in ends["convention"]


def test_the_convention_follows_the_tokenizer_of_the_ids(capsys, tmp_path, judge, folder):
    rows = sampled(judge)
    nameless = [{key: value for key, value in row.items() if key != "tokenizer"} for row in rows]
    files = {
        "own": rows,
        "foreign": [{**row, "tokens": [i + 1 for i in row["tokens"]], "tokenizer": "another"} for row in rows],
        "nameless": nameless,
        "mixed": [*rows[:6], *nameless[6:]],
        "texts": [{"text": row["text"], "seed": row["seed"]} for row in rows],
        "padded": [{**row, "tokens": [*row["tokens"], 300]} for row in rows],  # 300 decodes to nothing, as [PAD] does
    }
    results = {
        name: score(capsys, write(tmp_path / f"{name}.jsonl", content), judge=str(folder))["files"][0]
        for name, content in files.items()
    }
    assert {name: file["judge"]["convention"] for name, file in results.items()} == {
        "own": "ids", "foreign": "text", "nameless": "text", "mixed": "text", "texts": "text", "padded": "ids",
    }  # fmt: skip
    counted = sum(len(row["tokens"]) - 1 for row in rows)
    assert {file["judge"]["counted"] for file in results.values()} == {counted}
    values = {name: file["measures"]["nll"]["mean"] for name, file in results.items()}
    for name in ("texts", "foreign", "padded"):
        assert values["own"] == pytest.approx(values[name], abs=1e-5)
    assert values["texts"] == values["nameless"] == values["mixed"]
    assert results["padded"]["measures"]["dropped"]["mean"] == 1
    assert "ends" not in results["foreign"]["measures"]  # the judge's end-of-text id means something else there
    released = score(capsys, str(tmp_path / "own.jsonl"), judge=str(folder), convention="released")["files"][0]
    assert released["judge"]["convention"] == "released"
    assert released["measures"]["nll"]["mean"] != values["own"]


def test_ids_without_a_tokenizer_are_the_judges_if_the_caller_says_so(capsys, tmp_path, judge, folder):
    """To ask for the convention "ids" says so. It cannot overrule a tokenizer that the file names."""
    rows = sampled(judge)
    bare = [{key: row[key] for key in ("tokens", "seed", "sample")} for row in rows]
    own = score(capsys, write(tmp_path / "own.jsonl", rows), judge=str(folder))["files"][0]
    path = write(tmp_path / "bare.jsonl", bare)
    with pytest.raises(LimpetError, match="ask for the convention ids"):
        run((path,), judge=str(folder))
    assert score(capsys, path, judge=str(folder), convention="ids")["files"][0]["measures"] == own["measures"]
    for content in (rows, bare):
        foreign = write(tmp_path / "foreign.jsonl", [{**row, "tokenizer": "another"} for row in content])
        with pytest.raises(LimpetError, match="only if they belong to the judge's tokenizer"):
            run((foreign,), judge=str(folder), convention="ids")


def test_two_files_are_paired_by_seed_and_sample(capsys, tmp_path, judge, folder):
    a, b = sampled(judge, 0), sampled(judge, 1)
    document = score(capsys, write(tmp_path / "a.jsonl", a), write(tmp_path / "b.jsonl", b[::-1]), judge=str(folder))
    (found,) = document["differences"]
    assert (found["of"], found["from"]) == (str(tmp_path / "b.jsonl"), str(tmp_path / "a.jsonl"))
    assert found["unpaired"] is None
    first, second = (file["measures"] for file in document["files"])
    for name, measure in found["measures"].items():
        expected = statistics.paired(second[name]["values"], first[name]["values"])
        assert measure["mean"] == pytest.approx(expected.mean, abs=1e-12)
        assert measure["se"] == pytest.approx(expected.se, abs=1e-12)
    entropies = [metrics.entropy([row["tokens"] for row in rows]) for rows in (a, b)]
    interval = statistics.bootstrap(entropies[1] - entropies[0], groups=[row["seed"] for row in a])
    got = found["measures"]["entropy"]["bootstrap"]
    assert (got["low"], got["high"]) == pytest.approx((interval.low, interval.high))


def test_unequal_files_are_scored_but_not_paired(capsys, tmp_path, judge):
    whole = sampled(judge)
    files = {
        "fewer seeds": whole[:8],
        "other seeds": [{**row, "seed": row["seed"] + 1} for row in whole],
        "other samples": [{**row, "sample": row["sample"] + 4} for row in whole],
        "unnumbered": [{key: row[key] for key in ("text", "tokens", "seed")} for row in whole],
    }
    paths = [write(tmp_path / f"{name}.jsonl", rows) for name, rows in {"whole": whole, **files}.items()]
    reasons = [difference["unpaired"] for difference in score(capsys, *paths)["differences"]]
    assert "3 seeds, 12 samples and 2 seeds, 8 samples" in reasons[0]
    assert "the same seeds" in reasons[1]
    assert "numbers" in reasons[2]
    assert reasons[3] is None


def test_files_that_are_compared_are_read_alike(capsys, tmp_path, judge, folder):
    """Where one of them is text alone, the ids of the others are not used."""
    rows = sampled(judge)
    paths = [write(tmp_path / "ids.jsonl", rows)]
    paths.append(write(tmp_path / "texts.jsonl", [{key: row[key] for key in ("text", "seed")} for row in rows]))
    document = score(capsys, *paths, judge=str(folder))
    assert {file["judge"]["convention"] for file in document["files"]} == {"text"}
    assert {measure["mean"] for measure in document["differences"][0]["measures"].values()} == {0}


def test_prompts_are_not_counted(capsys, tmp_path, judge, folder):
    prompts, rows = ["the cat", "the big world"], []
    for seed in (1, 2):
        for i, text in enumerate(texts(6, seed)):
            whole = f"{prompts[i % 2]} {text}"
            length = len(judge.tokenizer.encode(prompts[i % 2]))
            row = {"text": whole, "tokens": judge.tokenizer.encode(whole), "seed": seed, "prompt_length": length}
            rows.append({**row, "tokenizer": judge.tokenizer.digest})
    got = score(capsys, write(tmp_path / "ids.jsonl", rows), judge=str(folder))["files"][0]["measures"]
    rest = [row["tokens"][row["prompt_length"] :] for row in rows]
    before = [row["tokens"][: row["prompt_length"]] for row in rows]
    nll = [score_samples(judge, rest[part], "ids", before[part]).pooled for part in (slice(6), slice(6, 12))]
    np.testing.assert_allclose(got["nll"]["values"], nll, atol=1e-5)
    np.testing.assert_allclose(got["entropy"]["values"], metrics.entropy(rest).reshape(2, 6).mean(1))
    bleu = metrics.self_bleu(rest, "method-1", [f"{row['seed']} {row['prompt_length']}" for row in rows])
    np.testing.assert_allclose(got["self-bleu-prompt"]["values"], bleu.reshape(2, 6).mean(1))
    as_text = [{"text": row["text"], "seed": row["seed"], "prompt": prompts[i % 2]} for i, row in enumerate(rows)]
    other = score(capsys, write(tmp_path / "text.jsonl", as_text), judge=str(folder))["files"][0]["measures"]
    for name in ("nll", "self-bleu-prompt"):
        np.testing.assert_allclose(other[name]["values"], got[name]["values"], atol=1e-5)


def test_plain_text_needs_no_judge(capsys, tmp_path, monkeypatch):
    content = "the cat sat on the mat\n\nthe cat sat\r\none\n"
    (tmp_path / "a.txt").write_bytes(content.encode())
    (file,) = score(capsys, str(tmp_path / "a.txt"))["files"]
    assert (file["ids"], file["samples"], file["judge"]) == ("words between spaces", 3, None)
    assert file["measures"]["length"]["mean"] == pytest.approx(10 / 3)
    assert file["measures"]["rep-4"]["mean"] == 0  # of the one text that has a 4-gram
    assert file["measures"]["rep-4"]["se"] is None  # a single seed
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
    assert score(capsys, "-")["files"][0]["measures"] == file["measures"]
    assert score(capsys, str(tmp_path / "a.txt"), separator="\n\n")["files"][0]["samples"] == 2


def test_short_and_long_texts_have_defined_values(capsys, tmp_path, folder, judge):
    long = " ".join(WORDS * 6)
    path = write(tmp_path / "a.jsonl", [{"text": ""}, {"text": "a"}, {"text": long}])
    (file,) = score(capsys, path, judge=str(folder))["files"]
    assert file["judge"]["longer_than_context"] == 1
    ids = judge.tokenizer.encode(long)
    assert file["measures"]["nll"]["mean"] == pytest.approx(float(judge.nll([ids])[0].mean()), abs=1e-5)
    got = score(capsys, write(tmp_path / "one.jsonl", [{"text": "a"}]), judge=str(folder))["files"][0]["measures"]
    assert got["nll"]["mean"] is got["perplexity"]["mean"] is got["self-bleu"]["mean"] is None
    assert got["entropy"]["mean"] == 0


def test_cache_reference_and_checker_are_options(capsys, tmp_path, folder, judge):
    path = write(tmp_path / "a.jsonl", sampled(judge, each=10))
    (tmp_path / "real.txt").write_text("\n".join(texts(30, 5)))
    (tmp_path / "mine.py").write_text(
        'class Long:\n    def check(self, text):\n        return {"long": len(text) > 9}\n'
    )
    options = {"reference": str(tmp_path / "real.txt"), "checker": f"{tmp_path / 'mine.py'}:Long"}
    first = score(capsys, path, judge=str(folder), cache=tmp_path / "scores", **options)
    (file,) = first["files"]
    assert len(file["mauve"]["values"]) == 5
    assert 0 < file["mauve"]["mean"] <= 1
    assert [*file["measures"]][:2] == ["long", "nll"]
    assert 0 < file["measures"]["long"]["mean"] <= 1
    assert len(list((tmp_path / "scores").rglob("*.json"))) == 30
    assert score(capsys, path, judge=str(folder), cache=tmp_path / "scores", **options) == first


def test_the_printed_tables_have_the_same_numbers(capsys, tmp_path, folder, judge):
    paths = [write(tmp_path / f"{i}.jsonl", sampled(judge, i)) for i in (0, 1)]
    tyro.cli(run, args=[*paths, "--judge", str(folder)])
    printed = capsys.readouterr().out
    assert "3 seeds, 12 samples; metrics count the samples' own ids" in " ".join(printed.split())
    assert "1.jsonl minus" in printed
    assert "overlapping windows" in printed
    assert printed.count("│ self-bleu ") == 3
    ids = [row["tokens"] for row in sampled(judge, 0)]
    nll = np.array([score_samples(judge, ids[i : i + 4]).pooled for i in (0, 4, 8)])
    assert f"{nll.mean():.4f} ± {nll.std(ddof=1) / math.sqrt(3):.4f}" in printed


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "holds no text"),
        ("\n \n", "holds no text"),
        ('{"text": 3}', "line 1 of"),
        ('{"text": "a"}\n{"tokens": [1.5]}', "line 2 of"),
        ('{"text": "a"}\n{"text":', "is not JSON"),
        ('{"seed": 1}', 'it needs "text"'),
        ('{"text": "a", "tokens": "b"}', 'it needs "text"'),
        ('{"tokens": [1, -2]}', '"tokens"'),
        ('{"text": "a", "seed": [1]}', '"seed"'),
        ('{"text": "a", "sample": "x"}', '"sample"'),
        ('{"text": "a", "seed": 1}\n{"text": "a", "seed": "1"}', "two kinds"),
        ('{"text": "a", "prompt": "b"}', '"prompt" that is not how'),
        ('{"tokens": [1], "prompt": "b"}', '"prompt" that is not how'),
        ('{"text": "a b", "tokens": [1, 2], "prompt_length": 1, "prompt": 1}', '"prompt" that is not how'),
        ('{"tokens": [1, 2], "prompt_length": 3}', '"prompt_length"'),
        ('{"text": "a", "prompt_length": 1}', '"prompt_length"'),
        ('{"text": "a", "prefix": 0}', "as limpet 0.2 wrote it"),
        ('{"text": "a", "tokenizer": 3}', '"tokenizer"'),
    ],
)
def test_a_bad_file_gets_one_sentence(tmp_path, content, words):
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(LimpetError) as raised:
        run((str(tmp_path / "bad.jsonl"),), judge="none")
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_what_cannot_be_scored_is_one_sentence(tmp_path, folder):
    far = write(tmp_path / "far.jsonl", [{"tokens": [1, 999]}])
    mixed = write(tmp_path / "mixed.jsonl", [{"tokens": [1, 2]}, {"text": "a"}])
    row = {"text": "a b", "tokens": [1, 2], "prompt_length": 1, "tokenizer": "another"}
    counted = write(tmp_path / "counted.jsonl", [row])
    text = write(tmp_path / "text.jsonl", [{"text": "a"}])
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\xfa")
    judged, as_ids = {"judge": str(folder)}, {"judge": str(folder), "convention": "ids"}
    for files, options, words in (
        ([far], judged, "ask for the convention ids"),
        ([far], as_ids, "id 999 is outside the vocabulary"),
        ([far], {"judge": "none", "reference": far}, "name a judge"),
        ([mixed], {"judge": "none"}, "one kind for all"),
        ([mixed], judged, "one kind for all"),
        ([counted], judged, "cannot score .*counted.jsonl"),
        ([text], as_ids, "only if they belong"),
        ([], judged, "nothing to score"),
        ([str(tmp_path / "none.jsonl")], {}, "cannot be read"),
        ([str(tmp_path / "bytes.txt")], {}, "UTF-8"),
    ):
        with pytest.raises(LimpetError, match=words):
            run(tuple(files), **options)
