"""Judges against the loss of transformers, conventions against literal transcriptions, the cache against damage."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from limpet.errors import LimpetError
from limpet.evaluation.judges import (
    ScoreCache,
    base,
    causal,
    has_builtin,
    load_judge,
    prompt_ids,
    score_samples,
)
from limpet.evaluation.judges.base import windows
from limpet.models.tensor_files import pack_rows, unpack_rows, write_tensors

LICENSE = (Path(__file__).parents[2] / "LICENSE").read_text()
END = "<|endoftext|>"
VOCAB, CONTEXT = 400, 32


def write_tokenizer(path):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([LICENSE], trainer)
    tokenizer.save(str(path))


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory):
    """A folder with a small randomly initialised GPT-2, as the hub stores it."""
    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # far from uniform: a wrong target changes the loss
    model.save_pretrained(folder)
    write_tokenizer(folder / "tokenizer.json")
    return folder


@pytest.fixture(scope="module")
def gpt2(gpt2_folder):
    return load_judge(str(gpt2_folder), device="cpu")


@pytest.fixture(scope="module")
def theirs(gpt2_folder):
    return transformers.AutoModelForCausalLM.from_pretrained(gpt2_folder).eval()


SHAPE = causal.CausalShape(VOCAB, CONTEXT, 32, 2, 2, 64)


@pytest.fixture(scope="module")
def causal_folder(tmp_path_factory):
    """A small random network in the built-in judge's layout, int8 by rows."""
    folder = tmp_path_factory.mktemp("causal")
    torch.manual_seed(1)
    network = causal.CausalNetwork(SHAPE)
    state = {name: 10 * p.detach() if "embedding" in name else p.detach() for name, p in network.named_parameters()}
    write_tensors(folder / "model.safetensors", pack_rows(state))
    (folder / "config.json").write_text(json.dumps({"model_type": "causal", **vars(SHAPE)}))
    write_tokenizer(folder / "tokenizer.json")
    return folder


@pytest.fixture(scope="module")
def small(causal_folder):
    return load_judge(str(causal_folder), device="cpu")


def ragged(count=12, longest=CONTEXT + 1, seed=0):
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCAB, random.integers(0, longest + 1)).tolist() for _ in range(count)]


# Reading


def test_nll_is_the_loss_of_transformers(gpt2, theirs):
    for length in (2, 17, CONTEXT):
        ids = torch.randint(VOCAB, (3, length))
        with torch.no_grad():
            loss = theirs(input_ids=ids, labels=ids).loss.item()
        nll = gpt2.nll(list(ids))
        assert all(values.shape == (length - 1,) for values in nll)
        assert np.mean(nll) == pytest.approx(loss, abs=1e-5)
    assert loss > 6.5  # a uniform distribution would give ln 400 = 5.99


def test_a_model_that_caps_its_logits_is_scored_with_the_cap(tmp_path):
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=CONTEXT, final_logit_softcapping=0.05,
    )  # fmt: skip
    model = transformers.Gemma2ForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    capped = load_judge(str(tmp_path), device="cpu")
    ids = torch.randint(97, (2, 20))
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss.item()
        plain = torch.nn.functional.cross_entropy(model.lm_head(model.model(ids)[0])[:, :-1].mT, ids[:, 1:]).item()
    assert abs(loss - plain) > 1e-3
    assert np.mean(capped.nll(list(ids))) == pytest.approx(loss, abs=1e-5)
    assert capped.features(list(ids)).shape == (2, 32)


def test_the_built_in_layout_is_read_exactly(small, causal_folder):
    network = causal.CausalNetwork(SHAPE)
    state = unpack_rows(dict(_stored(causal_folder)))
    network.load_state_dict(state, strict=False)
    ids = torch.randint(VOCAB, (2, CONTEXT))
    with torch.no_grad():
        log_probs = network(ids)[:, :-1].log_softmax(-1)
    expected = -log_probs.gather(-1, ids[:, 1:, None])[..., 0]
    np.testing.assert_allclose(np.stack(small.nll(list(ids))), expected, atol=1e-5)
    assert (small.context, small.vocab_size, small.eos) == (CONTEXT, VOCAB, 0)


def _stored(folder):
    from limpet.models.tensor_files import read_tensors

    return read_tensors(folder / "model.safetensors")


@pytest.mark.parametrize("which", ["gpt2", "small"])
def test_nll_does_not_depend_on_batch_size_or_order(which, request):
    reader = request.getfixturevalue(which)
    sequences = ragged(longest=3 * CONTEXT)
    alone = [reader.nll([ids])[0] for ids in sequences]
    for batch_size in (None, 1, 5):
        together = reader.nll(sequences, batch_size)
        for a, b in zip(alone, together, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    for a, b in zip(alone[::-1], reader.nll(sequences[::-1], 4), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def test_the_head_runs_on_a_few_rows_at_a_time(gpt2, monkeypatch):
    sequences = ragged()
    expected = gpt2.nll(sequences)
    rows = []
    head = gpt2.head
    monkeypatch.setattr(base, "MAX_LOGITS", 7 * VOCAB)
    monkeypatch.setattr(gpt2, "head", lambda features: rows.append(len(features)) or head(features))
    for a, b in zip(expected, gpt2.nll(sequences), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    assert max(rows) == 7
    assert sum(rows) == sum(max(len(ids) - 1, 0) for ids in sequences)  # no row for padding


@given(st.integers(0, 60), st.integers(1, 20))
def test_windows_score_each_id_once_with_half_the_context(length, context):
    scored = []
    for window in windows(length, context):
        assert 0 <= window.start < window.first
        assert window.inputs <= context
        scored += range(window.first, window.end)
        assert window.start == 0 or window.first - window.start >= context - context // 2
    assert scored == list(range(1, length))


def test_a_text_longer_than_the_context_is_read_in_windows(gpt2, theirs):
    ids = torch.randint(VOCAB, (2 * CONTEXT + 9,))
    got = gpt2.nll([ids])[0]
    for target in (1, CONTEXT, CONTEXT + 1, CONTEXT + 17, len(ids) - 1):
        window = next(w for w in windows(len(ids), CONTEXT) if w.first <= target < w.end)
        with torch.no_grad():
            logits = theirs(input_ids=ids[None, window.start : target]).logits[0, -1]
        assert got[target - 1] == pytest.approx(-logits.log_softmax(-1)[ids[target]].item(), abs=1e-5)
    assert score_samples(gpt2, [ids.tolist(), [1, 2]]).long == 1


def test_features_are_the_last_hidden_state(gpt2, theirs):
    sequences = [ids for ids in ragged(longest=2 * CONTEXT) if ids]
    got = gpt2.features(sequences, batch_size=3)
    for ids, row in zip(sequences, got, strict=True):
        with torch.no_grad():
            states = theirs(input_ids=torch.tensor([ids[-CONTEXT:]]), output_hidden_states=True).hidden_states
        np.testing.assert_allclose(row, states[-1][0, -1], atol=1e-5)


# Conventions


def test_ids_count_all_but_the_first_and_pad_is_dropped_and_counted(gpt2):
    ids = ragged(seed=3)[0]
    padded = [*ids[:2], VOCAB, *ids[2:], VOCAB]
    scores = score_samples(gpt2, [ids, padded, [], [5], [VOCAB]])
    assert scores.tokens.tolist() == [len(ids) - 1, len(ids) - 1, 0, 0, 0]
    assert scores.dropped.tolist() == [0, 2, 0, 0, 1]
    assert scores.nll[0] == scores.nll[1] == pytest.approx(float(gpt2.nll([ids])[0].sum()), abs=1e-4)
    assert np.isnan(scores.mean[2:]).all()
    assert (scores.convention, scores.judge) == ("ids", gpt2.name)
    assert scores.pooled == pytest.approx(scores.nll.sum() / scores.tokens.sum())


def test_text_is_tokenised_by_the_judge(gpt2):
    text = "This License does not grant permission" + END + " to use the trade names."
    scores = score_samples(gpt2, [text, "", "T"], "text")
    ids = gpt2.tokenizer.encode(text)
    assert 0 in ids
    assert scores.tokens.tolist() == [len(ids) - 1, 0, 0]
    assert scores.nll[0] == pytest.approx(float(gpt2.nll([ids])[0].sum()), abs=1e-4)


def released_by_hand(model, tokenizer, texts, limit):
    """The released evaluation, as it goes over one batch: pad with EOS on the right, mask, shift, rule, sum."""
    rows = [tokenizer.encode(text)[:limit] for text in texts]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits
    nll = torch.nn.functional.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none")
    before_second_end = (ids == 0).cumsum(-1) == 1
    counted = (before_second_end | (ids != 0))[:, 1:]
    return (nll * counted).sum(-1).tolist(), counted.sum(-1).tolist()


def test_released_is_the_released_rule(gpt2, theirs):
    longest = LICENSE[:400]  # longer than the context, so the others are padded and it is cut
    texts = [
        END + "Apache License" + END + "Version" + END + END + "2.0",
        "You may add" + END + "Your own" + END,
        "no end in this one",
        longest,
    ]
    nll, counted = released_by_hand(theirs, gpt2.tokenizer, texts, CONTEXT)
    scores = score_samples(gpt2, texts, "released")
    assert scores.tokens.tolist() == counted
    np.testing.assert_allclose(scores.nll, nll, rtol=0, atol=1e-4)
    ids = gpt2.tokenizer.encode(texts[1])
    from_ids = score_samples(gpt2, [[*ids[:3], VOCAB, *ids[3:]]], "released")
    whole = gpt2.tokenizer.decode(ids[:3]) + "[PAD]" + gpt2.tokenizer.decode(ids[3:])
    assert from_ids.nll[0] == score_samples(gpt2, [whole], "released").nll[0]


def test_a_continuation_is_scored_given_its_prompt(gpt2):
    ids = ragged(seed=3)[0]
    assert len(ids) > 6
    whole = gpt2.nll([ids])[0]
    scores = score_samples(gpt2, [ids[4:], ids, ids[1:]], "ids", [ids[:4], [], [ids[0]]])
    assert scores.tokens.tolist() == [len(ids) - 4, len(ids) - 1, len(ids) - 1]
    np.testing.assert_allclose(scores.nll, [whole[3:].sum(), whole.sum(), whole.sum()], atol=1e-4)
    block = torch.tensor([ids, ids])
    from_tensors = score_samples(gpt2, block[:, 4:], "ids", block[:, :4])
    assert from_tensors.nll.tolist() == [scores.nll[0]] * 2
    assert score_samples(gpt2, block[:, 4:].numpy(), "ids", block[:, :4].numpy()).nll.tolist() == [scores.nll[0]] * 2


TEXT = st.text(st.sampled_from("the licens ABé漢🙂\n"), max_size=12)


@given(TEXT, TEXT)
@settings(max_examples=200, deadline=None)
def test_an_id_belongs_to_the_continuation_if_any_of_its_bytes_does(small, prompt, rest):
    ids = small.tokenizer.encode(prompt + rest)
    # A byte-level token is written with one character a byte.
    ends = np.cumsum([len(small.tokenizer._tokens.id_to_token(i)) for i in ids])
    expected = int((ends <= len(prompt.encode())).sum())
    assert prompt_ids(small.tokenizer, ids, prompt) == expected
    scores = score_samples(small, [rest], "text", [prompt])
    nll = small.nll([ids])[0]
    assert scores.tokens[0] == max(len(ids) - max(expected, 1), 0)
    assert scores.nll[0] == pytest.approx(float(nll[max(expected, 1) - 1 :].sum()), abs=1e-4)


# The cache


class Counting:
    """A judge that counts the sequences it is asked to read."""

    def __init__(self, inner):
        self.inner, self.read = inner, 0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def nll(self, tokens, *rest):
        self.read += len(tokens)
        return self.inner.nll(tokens, *rest)


def test_the_cache_is_keyed_by_what_is_read_judge_and_convention(gpt2, small, tmp_path):
    cache = ScoreCache(tmp_path / "scores")
    texts = ["the License", "the Work", "the License"]
    counting = Counting(gpt2)
    first = score_samples(counting, texts, "text", cache=cache)
    assert counting.read == 2  # one of them is there twice
    again = score_samples(counting, texts[::-1], "text", cache=cache)
    assert counting.read == 2
    assert again.nll.tolist() == first.nll[::-1].tolist()
    assert again.tokens.tolist() == first.tokens[::-1].tolist()
    ended = "the License" + END  # the same ids under both conventions
    score_samples(counting, [ended], "text", cache=cache)
    score_samples(counting, [ended], "released", cache=cache)
    assert counting.read == 4
    other = Counting(small)
    score_samples(other, texts[:1], "text", cache=cache)
    assert other.read == 1
    score_samples(
        counting, [texts[0][3:]], "text", [texts[0][:3]], cache=cache
    )  # the same ids, but fewer of them count
    assert counting.read == 5
    for convention in ("text", "released"):  # each is still there
        score_samples(counting, [ended], convention, cache=cache)
    assert counting.read == 5
    assert not list(tmp_path.rglob("*.partial"))


def test_a_damaged_score_is_computed_again(gpt2, tmp_path):
    cache = ScoreCache(tmp_path)
    expected = score_samples(gpt2, ["the License"], "text", cache=cache).nll[0]
    (file,) = tmp_path.rglob("*.json")
    good = file.read_text()
    entry = json.loads(good)
    forged = json.dumps({**entry, "nll": (expected + 1).hex()})
    for damage in (b"", good[:20].encode(), forged.encode(), b"[]", b"{}", b"\xff\xfe", b'{"nll": 3, "seal": 4}'):
        file.write_bytes(damage)
        counting = Counting(gpt2)
        assert score_samples(counting, ["the License"], "text", cache=cache).nll[0] == expected
        assert counting.read == 1
        assert file.read_text() == good
    (tmp_path / "file").write_text("")
    with pytest.raises(LimpetError, match="cannot be kept"):
        score_samples(gpt2, ["a"], "text", cache=ScoreCache(tmp_path / "file"))


# Loading


def test_the_digest_covers_what_decides_the_scores(gpt2, gpt2_folder, small, causal_folder):
    assert load_judge(str(gpt2_folder), device="cpu").digest == gpt2.digest
    assert load_judge(str(causal_folder), device="cpu").digest == small.digest
    half = {str(folder): load_judge(str(folder), "cpu", "bfloat16") for folder in (gpt2_folder, causal_folder)}
    assert len({gpt2.digest, small.digest, *(reader.digest for reader in half.values())}) == 4
    sequences = [ids for ids in ragged() if len(ids) > 1]
    for reader, rough in zip((gpt2, small), half.values(), strict=True):
        for a, b in zip(reader.nll(sequences), rough.nll(sequences), strict=True):
            assert 0 < np.abs(a - b).max() < 0.5


def test_no_pickle_is_read(gpt2_folder, tmp_path):
    (tmp_path / "config.json").write_text((gpt2_folder / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")
    with pytest.raises(LimpetError, match="safetensors"):
        load_judge(str(tmp_path))


def test_a_broken_file_is_one_sentence(gpt2_folder, tmp_path):
    for name in ("config.json", "model.safetensors"):
        content = (gpt2_folder / name).read_bytes()
        (tmp_path / name).write_bytes(content[: len(content) // 2] if name.startswith("model") else content)
    with pytest.raises(LimpetError, match="cannot be loaded as a judge") as raised:
        load_judge(str(tmp_path))
    assert "\n" not in str(raised.value)


def test_no_remote_code_is_run(gpt2_folder, tmp_path):
    config = json.loads((gpt2_folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(LimpetError, match="cannot be loaded as a judge"):
        load_judge(str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_a_judge_without_tokenizer_scores_ids_alone(gpt2_folder, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((gpt2_folder / name).read_bytes())
    bare = load_judge(str(tmp_path), device="cpu")
    assert score_samples(bare, [[1, 2, 3]]).tokens.tolist() == [2]
    with pytest.raises(LimpetError, match="no tokenizer"):
        score_samples(bare, ["text"], "text")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda j: score_samples(j, [[1, VOCAB + 1]]), f"id {VOCAB + 1} is outside the vocabulary"),
        (lambda j: j.nll([[-1]]), "id -1 is outside"),
        (lambda j: score_samples(j, [[1]], "paper"), "none of ids, text, released"),
        (lambda j: score_samples(j, ["text"], "ids"), "scores ids, and a sample here is text"),
        (lambda j: score_samples(j, [[1]], "text"), "scores text, and a sample here is ids"),
        (lambda j: score_samples(j, ["a"], "text", []), "0 prompts for 1 samples"),
        (lambda j: score_samples(j, ["a"], "released", ["b"]), "no continuation"),
        (lambda j: j.features([[]]), "empty text"),
        (lambda j: load_judge(j.name, precision="float16"), "one of float32, bfloat16, not 'float16'"),
    ],
)
def test_errors_are_sentences(gpt2, call, words):
    with pytest.raises(LimpetError) as raised:
        call(gpt2)
    assert words in str(raised.value)


def test_a_folder_whose_weights_do_not_fit_is_refused(causal_folder, tmp_path):
    for file in causal_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden": 128}))
    with pytest.raises(LimpetError, match="does not fit"):
        load_judge(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({**config, "colour": "blue"}))
    with pytest.raises(LimpetError, match="gives no sizes"):
        load_judge(str(tmp_path))


@pytest.mark.skipif(not has_builtin(), reason="no built-in judge in this installation")
def test_the_built_in_judge_knows_text_from_noise():
    mini = load_judge("mini-judge", device="cpu")
    text = "She opened the door and looked into the garden, where the old man was sitting under a tree."
    noise = " ".join(word[::-1] for word in text.split()[::-1])
    scores = score_samples(mini, [text, noise], "text").mean
    assert scores[0] < scores[1] - 1
