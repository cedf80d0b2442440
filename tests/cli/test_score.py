"""`limpet score`: files of every kind in, rows with conventions out, paired where pairing is honest."""

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
from limpet.evaluation.judges import CONVENTIONS, causal, gen_nll, load_judge
from limpet.models.tensor_files import pack_rows, write_tensors

WORDS = "the cat sat on a mat and then it ran off to see some more of the big world".split()
SHAPE = causal.Shape(300, 6, 16, 1, 2, 32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random judge in the built-in layout."""
    folder = tmp_path_factory.mktemp("judge")
    torch.manual_seed(0)
    write_tensors(folder / "model.safetensors", pack_rows(dict(causal.Network(SHAPE).named_parameters())))
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


def texts(count, seed, words=WORDS):
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(words, random.integers(5, 9))) for _ in range(count)]


def write(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


def sampled(judge, seed=0, shards=(8200, 8210, 8220), each=4):
    """Rows as `limpet sample` writes them."""
    rows = []
    for shard in shards:
        for i, text in enumerate(texts(each, [seed, shard])):
            ids = judge.tokenizer.encode(text)
            row = {"text": text, "tokens": ids, "seed": shard, "sample": i, "model": "m", "nfe": 8}
            rows.append({**row, "tokenizer": judge.tokenizer.digest})
    return rows


def score(capsys, *files, **options):
    run(tuple(files), json=True, **{"judge": "none", **options})
    document = json.loads(capsys.readouterr().out)
    for file in document["files"]:
        assert all(row["convention"] for row in file["rows"])
    return document


def rows_of(table):
    return {row["metric"]: row for row in table["rows"]}


def test_rows_are_the_librarys_own_numbers(capsys, tmp_path, judge, folder):
    rows = sampled(judge)
    random = np.random.default_rng(0)
    shuffled = [rows[i] for i in random.permutation(len(rows))]
    document = score(capsys, write(tmp_path / "a.jsonl", shuffled), judge=str(folder))
    (file,) = document["files"]
    got = rows_of(file)
    assert (file["samples"], file["shards"], file["ids"]) == (12, [8200, 8210, 8220], "the file's ids")
    assert file["judge"]["convention"] == "ids"
    assert file["judge"]["digest"] == judge.digest
    assert file["judge"]["longer_than_context"] == sum(len(row["tokens"]) > 7 for row in rows)
    ids = [row["tokens"] for row in rows]
    by_shard = [ids[i : i + 4] for i in (0, 4, 8)]
    nll = [gen_nll(judge, part).pooled for part in by_shard]
    expected = {
        "gen-nll": nll,
        "gen-ppl": np.exp(nll),
        "entropy": [metrics.entropy(part).mean() for part in by_shard],
        "dist-4": [metrics.dist(part, 4) for part in by_shard],
        "rep-4": [metrics.rep(part, 4).mean() for part in by_shard],
        "self-bleu": [metrics.self_bleu(part).mean() for part in by_shard],
        "self-bleu-all": [metrics.self_bleu(part, "add-one-all").mean() for part in by_shard],
        "length": [np.mean([len(x) for x in part]) for part in by_shard],
    }
    for name, values in expected.items():
        np.testing.assert_allclose(got[name]["values"], values, rtol=0, atol=1e-5, err_msg=name)
        estimate = statistics.mean_se(got[name]["values"])
        assert (got[name]["mean"], got[name]["se"]) == (estimate.mean, estimate.se)
        if name != "dist-4":
            assert got[name]["bootstrap"]["low"] <= got[name]["mean"] <= got[name]["bootstrap"]["high"]
    assert CONVENTIONS["ids"].rule in got["gen-nll"]["convention"]
    assert got["dropped"]["mean"] == got["ends"]["mean"] == 0


def test_ends_are_counted_in_each_sample(capsys, tmp_path, judge, folder):
    rows = [{**row, "tokens": [*row["tokens"], *[judge.eos] * row["sample"]]} for row in sampled(judge)]
    (file,) = score(capsys, write(tmp_path / "a.jsonl", rows), judge=str(folder))["files"]
    ends = rows_of(file)["ends"]
    assert ends["values"] == [1.5] * 3  # 0, 1, 2 and 3 in each shard
    assert f"id {judge.eos}" in ends["convention"]


def test_the_convention_follows_the_ids(capsys, tmp_path, judge, folder):
    rows = sampled(judge)
    foreign = [{**row, "tokens": [token + 1 for token in row["tokens"]], "tokenizer": "another"} for row in rows]
    nameless = [{key: value for key, value in row.items() if key != "tokenizer"} for row in rows]
    mixed = [*rows[:6], *nameless[6:]]
    texts_alone = [{"text": row["text"], "seed": row["seed"]} for row in rows]
    padded = [{**row, "tokens": [*row["tokens"], 300]} for row in rows]  # decodes to nothing, as [PAD] does
    files = {
        "own": rows,
        "foreign": foreign,
        "nameless": nameless,
        "mixed": mixed,
        "texts": texts_alone,
        "padded": padded,
    }
    results = {
        name: score(capsys, write(tmp_path / f"{name}.jsonl", made), judge=str(folder))["files"][0]
        for name, made in files.items()
    }
    assert {name: file["judge"]["convention"] for name, file in results.items()} == {
        "own": "ids", "foreign": "text", "nameless": "text", "mixed": "text", "texts": "text", "padded": "ids",
    }  # fmt: skip
    counted = sum(len(row["tokens"]) - 1 for row in rows)
    for file in results.values():
        assert (file["judge"]["precision"], file["judge"]["counted"]) == ("float32", counted)
    values = {name: rows_of(file)["gen-nll"]["mean"] for name, file in results.items()}
    assert values["own"] == pytest.approx(values["texts"], abs=1e-5)
    assert values["own"] == pytest.approx(values["foreign"], abs=1e-5)
    assert values["own"] == pytest.approx(values["padded"], abs=1e-5)
    assert values["texts"] == values["nameless"] == values["mixed"]
    assert rows_of(results["padded"])["dropped"]["mean"] == 1
    assert "ends" not in rows_of(results["foreign"])  # the judge's end-of-text means nothing there
    released = score(capsys, str(tmp_path / "own.jsonl"), judge=str(folder), convention="released")["files"][0]
    assert released["judge"]["convention"] == "released"
    assert rows_of(released)["gen-nll"]["mean"] != values["own"]


def test_ids_that_name_no_tokenizer_are_vouched_for(capsys, tmp_path, judge, folder):
    """To ask for ids is to say that they are the judge's; against a tokenizer that is named it says nothing."""
    rows = sampled(judge)
    bare = [{key: row[key] for key in ("tokens", "seed", "sample")} for row in rows]
    own = score(capsys, write(tmp_path / "own.jsonl", rows), judge=str(folder))["files"][0]
    with pytest.raises(LimpetError, match="vouch with --convention ids"):
        run((write(tmp_path / "bare.jsonl", bare),), judge=str(folder))
    vouched = score(capsys, str(tmp_path / "bare.jsonl"), judge=str(folder), convention="ids")["files"][0]
    assert vouched["rows"] == own["rows"]
    foreign = write(tmp_path / "foreign.jsonl", [{**row, "tokenizer": "another"} for row in rows])
    with pytest.raises(LimpetError, match="only where both have one tokenizer"):
        run((foreign,), judge=str(folder), convention="ids")
    with pytest.raises(LimpetError, match="for which both need a tokenizer"):
        run((write(tmp_path / "both.jsonl", [{**row, "tokenizer": "another"} for row in bare]),), judge=str(folder))


def test_two_files_are_paired_by_shard_and_sample(capsys, tmp_path, judge, folder):
    a, b = sampled(judge, 0), sampled(judge, 1)
    document = score(capsys, write(tmp_path / "a.jsonl", a), write(tmp_path / "b.jsonl", b[::-1]), judge=str(folder))
    (contrast,) = document["contrasts"]
    assert (contrast["a"], contrast["b"]) == (str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"))
    assert contrast["unpaired"] is None
    first, second = map(rows_of, document["files"])
    for name, row in rows_of(contrast).items():
        difference = statistics.paired(second[name]["values"], first[name]["values"])
        assert row["mean"] == pytest.approx(difference.mean, abs=1e-12)
        assert row["se"] == pytest.approx(difference.se, abs=1e-12)
    entropies = [metrics.entropy([row["tokens"] for row in rows]) for rows in (a, b)]
    shards = [row["seed"] for row in a]
    interval = statistics.bootstrap(entropies[1] - entropies[0], shards=shards)
    got = rows_of(contrast)["entropy"]["bootstrap"]
    assert (got["low"], got["high"]) == pytest.approx((interval.low, interval.high))
    assert rows_of(contrast)["gen-nll"]["bootstrap"]["low"] < rows_of(contrast)["gen-nll"]["mean"]


def test_unequal_files_are_scored_but_not_paired(capsys, tmp_path, judge):
    whole = sampled(judge)
    files = {
        "fewer shards": whole[:8],
        "other seeds": [{**row, "seed": row["seed"] + 1} for row in whole],
        "other samples": [{**row, "sample": row["sample"] + 4} for row in whole],
        "unnumbered": [{key: row[key] for key in ("text", "tokens", "seed")} for row in whole],
    }
    paths = [write(tmp_path / f"{name}.jsonl", rows) for name, rows in {"whole": whole, **files}.items()]
    reasons = [contrast["unpaired"] for contrast in score(capsys, *paths)["contrasts"]]
    assert "3 shards, 12 samples and 2 shards, 8 samples" in reasons[0]
    assert "the same seeds" in reasons[1]
    assert "differently" in reasons[2]
    assert reasons[3] is None


def test_prefixes_stand_apart(capsys, tmp_path, judge, folder):
    given = ["the cat", "the big world"]
    rows = []
    for shard in (1, 2):
        for i, text in enumerate(texts(6, shard)):
            whole = f"{given[i % 2]} {text}"
            ids = judge.tokenizer.encode(whole)
            rows.append(
                {"text": whole, "tokens": ids, "seed": shard, "prefix": len(judge.tokenizer.encode(given[i % 2])),
                 "tokenizer": judge.tokenizer.digest}
            )  # fmt: skip
    file = score(capsys, write(tmp_path / "ids.jsonl", rows), judge=str(folder))["files"][0]
    got = rows_of(file)
    rest = [row["tokens"][row["prefix"] :] for row in rows]
    before = [row["tokens"][: row["prefix"]] for row in rows]
    nll = [gen_nll(judge, rest[part], "ids", before[part]).pooled for part in (slice(6), slice(6, 12))]
    np.testing.assert_allclose(got["gen-nll"]["values"], nll, atol=1e-5)
    np.testing.assert_allclose(got["entropy"]["values"], metrics.entropy(rest).reshape(2, 6).mean(1))
    groups = [f"{row['seed']} {row['prefix']}" for row in rows]
    bleu = metrics.self_bleu(rest, "method-1", groups)
    np.testing.assert_allclose(got["self-bleu-prefix"]["values"], bleu.reshape(2, 6).mean(1))
    as_text = [{"text": row["text"], "seed": row["seed"], "prefix": given[i % 6 % 2]} for i, row in enumerate(rows)]
    other = rows_of(score(capsys, write(tmp_path / "text.jsonl", as_text), judge=str(folder))["files"][0])
    np.testing.assert_allclose(other["gen-nll"]["values"], nll, atol=1e-5)
    np.testing.assert_allclose(other["self-bleu-prefix"]["values"], got["self-bleu-prefix"]["values"])


def test_plain_text_needs_no_judge(capsys, tmp_path, monkeypatch):
    content = "the cat sat on the mat\n\nthe cat sat\r\none\n"
    (tmp_path / "a.txt").write_bytes(content.encode())
    (file,) = score(capsys, str(tmp_path / "a.txt"))["files"]
    got = rows_of(file)
    assert (file["ids"], file["samples"], file["judge"]) == ("words between spaces", 3, None)
    assert got["length"]["mean"] == pytest.approx(10 / 3)
    assert got["rep-4"]["mean"] == 0  # of the one text that has a 4-gram
    assert got["rep-4"]["se"] is None  # one shard
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
    assert score(capsys, "-")["files"][0]["rows"] == file["rows"]
    parts = score(capsys, str(tmp_path / "a.txt"), separator="\n\n")["files"][0]
    assert parts["samples"] == 2


def test_short_and_long_texts_have_defined_rows(capsys, tmp_path, folder, judge):
    long = " ".join(WORDS * 6)
    path = write(tmp_path / "a.jsonl", [{"text": ""}, {"text": "a"}, {"text": long}])
    (file,) = score(capsys, path, judge=str(folder))["files"]
    got = rows_of(file)
    assert file["judge"]["longer_than_context"] == 1
    ids = judge.tokenizer.encode(long)
    assert got["gen-nll"]["mean"] == pytest.approx(float(judge.nll([ids])[0].mean()), abs=1e-5)
    alone = write(tmp_path / "one.jsonl", [{"text": "a"}])
    got = rows_of(score(capsys, alone, judge=str(folder))["files"][0])
    assert got["gen-nll"]["mean"] is got["gen-ppl"]["mean"] is got["self-bleu"]["mean"] is None
    assert got["entropy"]["mean"] == 0


def test_scores_are_kept_where_told(capsys, tmp_path, folder, judge):
    path = write(tmp_path / "a.jsonl", sampled(judge))
    first = score(capsys, path, judge=str(folder), cache=tmp_path / "scores")
    kept = list((tmp_path / "scores").rglob("*.json"))
    assert len(kept) == 12
    assert score(capsys, path, judge=str(folder), cache=tmp_path / "scores") == first


def test_mauve_against_a_reference(capsys, tmp_path, folder, judge):
    path = write(tmp_path / "a.jsonl", sampled(judge, each=10))
    (tmp_path / "real.txt").write_text("\n".join(texts(30, 5)))
    got = rows_of(score(capsys, path, judge=str(folder), reference=str(tmp_path / "real.txt"))["files"][0])["mauve"]
    assert got["over"] == "k-means seeds"
    assert len(got["values"]) == 5
    assert 0 < got["mean"] <= 1


def test_words_on_the_terminal(capsys, tmp_path, folder, judge):
    paths = [write(tmp_path / f"{i}.jsonl", sampled(judge, i)) for i in (0, 1)]
    tyro.cli(run, args=[*paths, "--judge", str(folder)])
    printed = capsys.readouterr().out
    assert "12 samples, 3 shards, the file's ids" in printed
    assert f"{paths[1]} - {paths[0]}, paired" in printed
    assert "overlapping windows" in printed
    assert printed.count("self-bleu ") == 3
    ids = [row["tokens"] for row in sampled(judge, 0)]
    nll = np.array([gen_nll(judge, ids[i : i + 4]).pooled for i in (0, 4, 8)])
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
        ('{"text": "a", "seed": [1]}', '"seed"'),
        ('{"text": "a", "sample": "x"}', '"sample"'),
        ('{"text": "a", "seed": 1}\n{"text": "a", "seed": "1"}', "two kinds"),
        ('{"text": "a", "prefix": "b"}', '"prefix"'),
        ('{"tokens": [1, 2], "prefix": 3}', '"prefix"'),
        ('{"text": "a", "prefix": 1}', '"prefix"'),
        ('{"text": "a b", "tokens": [1, 2], "prefix": 1, "prefix_text": "b"}', '"prefix_text" that is not how'),
        ('{"text": "a b", "tokens": [1, 2], "prefix": 1, "prefix_text": 1}', '"prefix_text" that is not how'),
        ('{"tokens": [1, -2]}', '"tokens"'),
        ('{"text": "a", "tokenizer": 3}', '"tokenizer"'),
    ],
)
def test_a_bad_file_gets_one_sentence(tmp_path, content, words):
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(LimpetError) as raised:
        run((str(tmp_path / "bad.jsonl"),), judge="none")
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_what_cannot_be_scored_says_so(tmp_path, folder):
    far = write(tmp_path / "far.jsonl", [{"tokens": [1, 999]}])
    for options, words in (
        ({"judge": str(folder)}, "ids alone, or a prefix counted in ids"),
        ({"judge": str(folder), "convention": "ids"}, "id 999 is outside the vocabulary"),
        ({"judge": "none", "reference": far}, "name a judge"),
    ):
        with pytest.raises(LimpetError, match=words):
            run((far,), **options)
    mixed = write(tmp_path / "mixed.jsonl", [{"tokens": [1, 2]}, {"text": "a"}])
    for name in ("none", str(folder)):
        with pytest.raises(LimpetError, match="others text alone"):
            run((mixed,), judge=name)
    counted = write(
        tmp_path / "counted.jsonl", [{"text": "a b", "tokens": [1, 2], "prefix": 1, "tokenizer": "another"}]
    )
    with pytest.raises(LimpetError, match="cannot score these files"):
        run((counted,), judge=str(folder))
    text = write(tmp_path / "text.jsonl", [{"text": "a"}])
    with pytest.raises(LimpetError, match='needs "tokens"'):
        run((text,), judge=str(folder), convention="ids")
    with pytest.raises(LimpetError, match="nothing to score"):
        run(())
    with pytest.raises(LimpetError, match="cannot be read"):
        run((str(tmp_path / "none.jsonl"),))
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(LimpetError, match="UTF-8"):
        run((str(tmp_path / "bytes.txt"),))
