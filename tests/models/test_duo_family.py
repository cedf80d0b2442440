"""UDLM, SDLLM-Duo and larger shapes are Duo's network over other vocabularies, with their own tokenizers and masks."""

import json
import math

import pytest
import torch

import limpet
from duo_transcription import forward
from limpet import conformance
from limpet.diffusion.rng import CounterRNG
from limpet.errors import LimpetError
from limpet.generation import Inputs, context_of
from limpet.models import model_files
from limpet.models.duo import Duo, DuoNetwork, DuoShape
from limpet.models.loading import load
from limpet.models.tokenizers import read_tokenizer
from model_cases import bert_like, check, failed, hub_like, random_network, refused, tiktoken_like

pytestmark = pytest.mark.usefixtures("offline")


def shape_of(vocab_size, **sizes):
    return DuoShape(**{"vocab_size": vocab_size, "length": 12, "width": 32, "blocks": 2, "heads": 2, "cond": 16,
                    "hidden": 80, **sizes})  # fmt: skip


@pytest.fixture
def udlm(tmp_path):
    (tmp_path / "udlm").mkdir()
    shape = shape_of(bert_like(tmp_path / "udlm"))
    return hub_like(random_network(shape), tmp_path / "udlm", model_type="udlm", vocab_size=shape.vocab_size)


@pytest.fixture
def sdllm(tmp_path):
    """A head width that is not Duo's, an odd number of heads, a mask in the middle of the specials."""
    (tmp_path / "sdllm").mkdir()
    size = tiktoken_like(tmp_path / "sdllm", ["<unk>", "<s>", "</s>", "<mask>", "<pad>"])
    return hub_like(random_network(shape_of(size, width=48, heads=3)), tmp_path / "sdllm", model_type="sdllm-duo")


def logits_of(folder, tokens, t):
    """The literal transcription of Duo on the weights of a folder."""
    model = load(folder, device="cpu")
    parameters = {name: parameter.detach() for name, parameter in model.network.named_parameters()}
    sigma = -math.log(1 - 0.999 * t)
    return torch.stack([forward(parameters, row, sigma, model.network.shape.heads) for row in tokens])


def test_udlm_is_duos_network_with_berts_tokenizer(udlm):
    model = load(udlm, device="cpu")
    tokens = torch.randint(model.vocab_size, (3, 12), generator=torch.Generator().manual_seed(2))
    assert (model.logits(tokens, 0.4) - logits_of(udlm, tokens, 0.4)).abs().max() < 1e-5
    assert (model.schedule.name, model.predicts, model.mask) == ("log-linear", "leave-one-out", None)
    assert model.tokenizer.special == {"eos": 3, "pad": 0, "mask": 4}
    assert model.tokenizer.decode(model.tokenizer.encode("The limpets, turning")) == "the limpets, turning"
    out = limpet.sample(model, limpet.CRS(nfe=4), n=2, prompt="the rock")
    assert all(text.startswith("the rock") for text in out.texts)


def test_sdllms_mask_has_probability_zero(sdllm):
    model = load(sdllm, device="cpu")
    assert (model.tokenizer.special, model.mask) == ({"eos": 2, "pad": 4, "mask": 3}, 3)
    tokens = torch.randint(model.vocab_size, (3, 12), generator=torch.Generator().manual_seed(2))
    tokens[:, 5] = 3  # noise may be the mask: the channel is over every token
    ours, theirs = model.logits(tokens, 0.4), logits_of(sdllm, tokens, 0.4)
    assert (ours[..., 3] == -math.inf).all()
    kept = [token for token in range(model.vocab_size) if token != 3]
    assert (ours - theirs)[..., kept].abs().max() < 1e-5
    for sampler in (limpet.Native(nfe=4), limpet.CRS(nfe=4), limpet.Mend(nfe=4)):
        assert not (limpet.sample(model, sampler, n=16, seed=1).tokens == 3).any()


def test_the_noise_of_a_model_with_a_mask_is_still_every_token(sdllm):
    """Duo's prior is over the whole vocabulary, whatever the head excludes."""
    model = load(sdllm, device="cpu")
    inputs = Inputs(torch.full((400, 12), -1), CounterRNG(8, torch.arange(400)))
    start = context_of(model, inputs).noise()
    assert (start == 3).any()


def test_the_mask_is_in_the_digest_and_is_saved(sdllm, tmp_path):
    model = load(sdllm, device="cpu")
    model.save(tmp_path / "again")
    again = load(tmp_path / "again", device="cpu")
    assert (again.mask, again.digest) == (3, model.digest)
    assert Duo(model.network).digest != model.digest


def test_the_mask_must_be_known_and_be_a_token(sdllm):
    config = json.loads((sdllm / "config.json").read_text())
    (sdllm / "config.json").write_text(json.dumps(config | {"mask_token_id": 7}))
    assert load(sdllm, device="cpu").mask == 7
    for wrong in (-1, "3", True, 1.5):
        (sdllm / "config.json").write_text(json.dumps(config | {"mask_token_id": wrong}))
        refused(sdllm, "mask_token_id .*, and a Duo model takes a token's id or null")
    (sdllm / "config.json").write_text(json.dumps(config | {"mask_token_id": 10**6}))
    refused(sdllm, "mask_token_id 1000000, and its model 300 tokens")
    (sdllm / "config.json").write_text(json.dumps(config))
    (sdllm / "tokenizer.json").unlink()
    refused(sdllm, "does not tell which token is the mask")


@pytest.mark.parametrize("kind", ["udlm", "sdllm"])
def test_each_passes_the_conformance_test(kind, request):
    folder = request.getfixturevalue(kind)
    rows = check(load(folder, device="cpu"), "native", "crs", "mend")
    assert not failed(rows)
    assert conformance.verdict(load(folder, device="cpu"), rows).endswith("0 failed")


def test_a_tokenizer_that_changes_text_is_reported(udlm):
    (found,) = [row.found for row in check(load(udlm, device="cpu")) if row.what == "text"]
    assert "once encoded" in found


def test_the_sizes_of_the_large_ones():
    """Laid out without memory: 1.7 billion parameters at 28 blocks, width 2176, 17 heads and 131072 tokens."""
    with torch.device("meta"):
        network = DuoNetwork(DuoShape(131072, 2048, 2176, 28, 17, 128, 4 * 2176))
        medium = DuoNetwork(DuoShape(50258, 1024, 1024, 24, 16, 128, 4096))
    assert 1.6e9 < sum(parameter.numel() for parameter in network.blocks.parameters()) < 1.8e9
    assert 4.0e8 < sum(parameter.numel() for parameter in medium.parameters()) < 4.4e8


def test_berts_public_tokenizer_is_looked_for_by_size(tmp_path, monkeypatch):
    found, reason = model_files.find_tokenizer(tmp_path, 30522)
    assert found is None
    assert reason.startswith("none: BERT's is neither beside the weights nor in the cache")
    (tmp_path / "cached").mkdir()
    bert_like(tmp_path / "cached")
    names = []
    monkeypatch.setattr(model_files, "cached_folder", lambda name, *rest: names.append(name) or tmp_path / "cached")
    found, reason = model_files.find_tokenizer(tmp_path, 30522)
    assert (reason, names[0]) == ("BERT's", "google-bert/bert-base-uncased")
    assert found.special["eos"] == 3


def test_sumi_like_and_gidd_like_specials_are_found(tmp_path):
    for special, expected in (
        (["<|beginoftext|>", "<|endoftext|>", "<|pad|>"], {"eos": 1, "pad": 2}),
        (["<|begin_of_text|>", "<|end_of_text|>", "<|padding|>", "<|mask|>"], {"eos": 1, "pad": 2, "mask": 3}),
    ):
        tiktoken_like(tmp_path, special)
        tokenizer = read_tokenizer(tmp_path)
        assert tokenizer.special == expected
        text = "It's 1234567 limpets —\n\n  née 日本 🙂"
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.encode(special[0] + "the")[0] == 0


def test_an_unknown_family_is_named(udlm):
    config = json.loads((udlm / "config.json").read_text())
    (udlm / "config.json").write_text(json.dumps(config | {"model_type": "mdlm"}))
    with pytest.raises(LimpetError, match="families known here are duo, udlm, sdllm-duo"):
        load(udlm, device="cpu")
