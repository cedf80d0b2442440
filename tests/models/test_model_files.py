"""Names and files to models: the released layouts load completely, and a damaged or hostile file is one sentence."""

import json
import os
import re
import socket
import threading

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_duo import RELEASED

from limpet.cli import main
from limpet.errors import LimpetError
from limpet.models import model_files
from limpet.models import tokenizers as limpet_tokenizers
from limpet.models.duo import Duo, DuoNetwork, DuoShape
from limpet.models.loading import load
from model_cases import TINY, Settings, hub_like, lightning, random_network, refused, same

pytestmark = pytest.mark.usefixtures("offline")


# The released shape


def test_the_released_shape_loads_from_both_layouts(tmp_path):
    """130 tensors, 169,627,218 parameters, from a hub-like folder and a Lightning-like file with its EMA list."""
    with torch.device("meta"):
        network = DuoNetwork(DuoShape())
    # Each tensor is one number everywhere, its place in the released order: enough to see that none went astray.
    numbered = {name: torch.full(tensor.shape, float(i)) for i, (name, tensor) in enumerate(network.named_parameters())}
    buffer = {"rotary_emb.inv_freq": 10000 ** (-torch.arange(0, 64, 2) / 64)}

    folder, checkpoint = tmp_path / "hub", tmp_path / "duo.ckpt"
    folder.mkdir()
    save_file({f"backbone.{name}": t for name, t in (numbered | buffer).items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "duo", "n_heads": 12, "model_length": 1024}))
    from_folder = load(folder, device="cpu")
    os.unlink(folder / "model.safetensors")
    assert from_folder.network.shape == DuoShape()
    assert [int(p.reshape(-1)[-1]) for p in from_folder.network.parameters()] == list(range(130))
    digest = from_folder.digest
    del from_folder

    raw = {
        f"backbone.{name}": torch.tensor(-1.0).expand(t.shape) for name, t in numbered.items()
    }  # no bytes to speak of
    tree = {"state_dict": raw | {"backbone.rotary_emb.inv_freq": buffer["rotary_emb.inv_freq"]}}
    torch.save(tree | {"ema": {"shadow_params": list(numbered.values())}, "hyper_parameters": Settings()}, checkpoint)
    del numbered
    from_checkpoint = load(checkpoint, device="cpu")
    os.unlink(checkpoint)
    assert [name for name, _ in from_checkpoint.network.named_parameters()] == RELEASED
    assert sum(p.numel() for p in from_checkpoint.network.parameters()) == 169_627_218
    assert from_checkpoint.network.shape == DuoShape()
    assert from_checkpoint.digest == digest  # the running average's, and so not the raw -1 everywhere
    assert from_checkpoint.info["weights"] == "ema"


# Small models: prefixes, running averages, what config.json says and what is inferred


def test_a_hub_like_folder_loads(tmp_path):
    network = random_network()
    model = load(hub_like(network, tmp_path / "model"), device="cpu")
    assert same(model, network)
    assert model.network.shape == TINY  # the tensors' 16, not the config's cond_dim of 129
    assert model.info["source"] == "folder"
    assert (model.predicts, model.schedule.name) == ("leave-one-out", "log-linear")
    assert not any(parameter.is_meta or parameter.requires_grad for parameter in model.network.parameters())


def test_a_posterior_model_says_so(tmp_path):
    assert load(hub_like(random_network(), tmp_path / "m", predicts="posterior"), device="cpu").predicts == "posterior"


def test_one_file_needs_no_config(tmp_path):
    network = random_network()
    save_file(network.state_dict(), tmp_path / "weights.safetensors")
    model = load(tmp_path / "weights.safetensors", device="cpu")
    assert same(model, network)
    assert (model.network.shape.heads, model.length) == (2, 1024)
    assert "1024" in model.info["assumed"]


def test_the_number_of_heads_must_be_known(tmp_path):
    parameters = dict(random_network().named_parameters())
    save_file(parameters, tmp_path / "model.safetensors")
    refused(tmp_path, "how many heads")
    (tmp_path / "config.json").write_text('{"n_heads": 2}')
    assert load(tmp_path, device="cpu").network.shape.heads == 2
    (tmp_path / "config.json").write_text('{"n_heads": 3}')
    refused(tmp_path, "3 heads do not share evenly")


def test_config_and_rotary_buffer_must_agree(tmp_path):
    refused(hub_like(random_network(), tmp_path / "m", n_heads=4), r"misshapen: rotary_emb.inv_freq \(8,\) for \(4,\)")


def test_a_checkpoints_running_average_is_used(tmp_path):
    network = random_network()
    path = lightning(network, tmp_path / "last.ckpt")
    averaged, raw = load(path, device="cpu"), load(path, device="cpu", weights="raw")
    assert same(averaged, network, shift=1)
    assert same(raw, network)
    assert (averaged.info["weights"], raw.info["weights"]) == ("ema", "raw")
    assert averaged.network.shape == raw.network.shape == DuoShape(**{**vars(TINY), "length": 1024})
    assert averaged.digest != raw.digest


def test_a_checkpoint_without_running_average_says_so(tmp_path):
    network = random_network()
    model = load(lightning(network, tmp_path / "last.ckpt", ema=False), device="cpu")
    assert same(model, network)
    assert model.info["weights"] == "raw, as the file holds no running average"


def test_a_short_running_average_is_refused(tmp_path):
    path = lightning(random_network(), tmp_path / "last.ckpt", ema=False)
    tree = torch.load(path, weights_only=False)
    torch.save({**tree, "ema": {"shadow_params": [torch.ones(3)] * 7}}, path)
    refused(path, "running average of 7 tensors for 40 parameters")
    torch.save({**tree, "ema": {"shadow_params": Settings()}}, path)
    assert load(path, device="cpu").info["weights"].startswith("raw, as")


@pytest.mark.parametrize("prefix", ["", "backbone.", "model.backbone.", "module.", "module.backbone.", "_orig_mod."])
def test_wrappers_prefixes_are_taken_off(tmp_path, prefix):
    network = random_network()
    state = {prefix + name: tensor for name, tensor in network.state_dict().items()}
    save_file({**state, "teacher.anything": torch.ones(2)}, tmp_path / "model.safetensors")
    assert same(load(tmp_path, device="cpu"), network)


def test_a_model_under_two_prefixes_is_refused(tmp_path):
    state = random_network().state_dict()
    twice = {f"{prefix}{name}": t.clone() for prefix in ("module.", "backbone.") for name, t in state.items()}
    save_file(twice, tmp_path / "model.safetensors")
    refused(tmp_path, "under two prefixes")


def test_a_plain_torch_state_dict_loads(tmp_path):
    network = random_network()
    torch.save(network.state_dict(), tmp_path / "weights.pt")
    assert same(load(tmp_path / "weights.pt", device="cpu"), network)


# Names


def test_built_in_models_are_found_and_listed(tmp_path, monkeypatch):
    """They share one tokenizer, which is beside their folders; saving one of them writes a full folder."""
    for module in (model_files, limpet_tokenizers):
        monkeypatch.setattr(module, "BUILTIN_FOLDER", tmp_path)
    for name in ("mini", "mini-distilled"):
        Duo(random_network()).save(tmp_path / name, storage="int8")
    shared = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    shared.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "judge").mkdir()
    (tmp_path / "judge" / "config.json").write_text('{"model_type": "causal"}')
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "config.json").write_text("{")
    assert model_files.builtin_names() == ["mini", "mini-distilled"]
    model = load("mini", device="cpu")
    assert (model.name, model.info["source"], model.info["tokenizer"]) == ("mini", "built in", "beside the weights")
    model.save(tmp_path / "elsewhere" / "saved")
    assert load(tmp_path / "elsewhere" / "saved", device="cpu").tokenizer.digest == model.tokenizer.digest
    refused("other", r"no model 'other': it is neither built in \(mini, mini-distilled\)")
    refused("judge", "the built-in judge lacks model.safetensors: install limpet again")
    (tmp_path / "mini-distilled" / "config.json").write_text('{"model_type": "causal"}')
    refused("mini-distilled", "built-in model 'mini-distilled' is damaged: .* has model_type 'causal'")
    (tmp_path / "mini" / "model.safetensors").write_bytes(b"")
    refused("mini", "built-in model 'mini' is damaged: .* not a whole safetensors file")
    (tmp_path / "mini" / "model.safetensors").unlink()
    (tmp_path / "tokenizer.json").unlink()
    refused("mini", "the built-in mini lacks model.safetensors, tokenizer.json: install limpet again")


def test_a_path_that_is_not_there(tmp_path):
    refused(tmp_path / "missing", "nor a path that exists")
    refused("runs/missing.ckpt", "nor a path that exists")
    refused("../missing", "nor a path that exists")
    refused("no--such/name", "could not be fetched")
    refused(tmp_path, "holds no model")
    (tmp_path / "a.ckpt").touch()
    (tmp_path / "b.ckpt").touch()
    refused(tmp_path, r"holds a\.ckpt, b\.ckpt: name one of them")
    refused(tmp_path, "revision 'main' is for names on the hub", revision="main")


def test_wrong_options(tmp_path):
    folder = hub_like(random_network(), tmp_path / "m")
    refused(folder, "precision is one of", precision="half")
    refused(folder, 'weights is "ema" or "raw"', weights="best")
    refused("mini", "^precision is one of", precision="half")
    refused("mini", "^mini cannot be asked for a model .*'colour'", colour="blue")
    with pytest.raises(LimpetError, match="device 'abacus' cannot be used"):
        load(folder, device="abacus")


@pytest.mark.parametrize("hub", ["offline", "no name server", "no answer"])
def test_a_hub_name_without_network_is_refused(monkeypatch, hub):
    """Also where the hub accepts a request and never answers it."""
    import huggingface_hub

    def unresolved(*_, **__):
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", hub == "offline")
    monkeypatch.setattr(model_files, "HUB_SECONDS", 0.1)
    if hub == "no answer":
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: threading.Event().wait())
    monkeypatch.setattr(socket, "getaddrinfo", unresolved)
    sentence = refused("s-sahoo/duo-distilled", "not in the local cache and could not be fetched from the hub")
    assert all(words in sentence for words in ("path of a folder or file", "cache", "built-in model"))


def test_a_cached_hub_name_loads_without_network(tmp_path, monkeypatch):
    from huggingface_hub import constants

    network, commit = random_network(), "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--owner--name"
    for revision in ("main", "v1"):
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / revision).write_text(commit)
    (repository / "snapshots").mkdir()
    hub_like(network, repository / "snapshots" / commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    model = load("owner/name", device="cpu", revision="v1")
    assert same(model, network)
    assert (model.name, model.info["source"]) == ("owner/name", f"hub, commit {commit}")
    refused("owner/name", "owner/name at revision v2 is not in the local cache", revision="v2")


# Damaged and hostile files


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    return hub_like(random_network(), tmp_path_factory.mktemp("complete") / "m")


def damaged(complete, tmp_path, change):
    """A copy of the complete model's folder with changed weights."""
    state = load_file(complete / "model.safetensors")
    change(state)
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((complete / "config.json").read_bytes())
    return tmp_path


def test_missing_unexpected_and_misshapen_tensors_are_listed_together(complete, tmp_path):
    def change(state):
        del state["backbone.blocks.1.norm2.weight"], state["backbone.output_layer.linear.bias"]
        state["backbone.extra"] = torch.ones(2)
        state["backbone.blocks.0.attn_out.weight"] = torch.ones(32, 31)
        state["backbone.blocks.2.mlp.0.bias"] = torch.ones(80, dtype=torch.int64)

    sentence = refused(damaged(complete, tmp_path, change), "does not fit a Duo model of 3 blocks")
    assert "missing: blocks.1.norm2.weight, output_layer.linear.bias" in sentence
    assert "unexpected: extra" in sentence
    assert "misshapen: blocks.0.attn_out.weight (32, 31) for (32, 32)" in sentence
    assert "blocks.2.mlp.0.bias (80,) of torch.int64 for (80,)" in sentence


def test_no_tensor_may_be_missing(complete, tmp_path):
    for name in RELEASED[:15] + RELEASED[-5:]:
        refused(damaged(complete, tmp_path, lambda state, name=name: state.pop("backbone." + name)), re.escape(name))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(complete, tmp_path, value):
    def change(state):
        state["backbone.blocks.1.attn_qkv.weight"][3, 4] = value

    refused(damaged(complete, tmp_path, change), r"NaN or infinity in backbone\.blocks\.1\.attn_qkv\.weight")
    network = random_network()
    with torch.no_grad():
        network.blocks[0].norm1.weight[0] = value
    refused(lightning(network, tmp_path / "x.ckpt"), r"NaN or infinity in blocks\.0\.norm1\.weight")


def test_other_frequencies_are_another_model(complete, tmp_path):
    def change(state):
        state["backbone.rotary_emb.inv_freq"] = state["backbone.rotary_emb.inv_freq"].clone() ** 0.9

    refused(damaged(complete, tmp_path, change), "other frequencies")


def test_some_other_model_is_refused(tmp_path):
    save_file({"weight": torch.ones(3, 3)}, tmp_path / "model.safetensors")
    refused(tmp_path, "does not hold a Duo model")
    save_file({}, tmp_path / "model.safetensors")
    refused(tmp_path, "does not hold a Duo model")
    torch.save([1, 2, {"three": 4}], tmp_path / "list.ckpt")
    refused(tmp_path / "list.ckpt", "does not hold a Duo model")


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"model_type": "mdlm"}, "model_type 'mdlm', and the families known here are duo"),
        ({"model_type": 3}, "model_type 3, and a model takes a text"),
        ({"causal": True}, "causal True, and a Duo model takes false"),
        ({"n_heads": "12"}, "n_heads '12'"),
        ({"n_heads": True}, "n_heads True"),
        ({"model_length": 0}, "model_length 0"),
        ({"schedule": "linear"}, "schedule 'linear', and a Duo model takes log-linear or cosine"),
        ({"schedule": []}, "schedule"),
        ({"predicts": "noise"}, "predicts 'noise'"),
        ([1], "holds a list"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("\x00\xff", "is not JSON"),
    ],
)
def test_a_config_that_is_not_a_duos(complete, tmp_path, config, match):
    (tmp_path / "model.safetensors").write_bytes((complete / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config), encoding="latin-1")
    refused(tmp_path, match)


def test_absurdly_many_blocks_are_refused(complete, tmp_path):
    def change(state):
        state.update({f"backbone.blocks.{i}.x": torch.zeros(0) for i in range(20_000)})

    refused(damaged(complete, tmp_path, change), "names 20000 blocks")


@pytest.fixture(scope="module")
def formats(tmp_path_factory):
    """The bytes of one small model in either format."""
    folder = tmp_path_factory.mktemp("formats")
    network = random_network(DuoShape(vocab_size=5, length=4, width=4, blocks=1, heads=1, cond=2, hidden=4))
    hub_like(network, folder)
    checkpoint = lightning(network, folder / "x.ckpt").read_bytes()
    return {"safetensors": (folder / "model.safetensors").read_bytes(), "ckpt": checkpoint}


@given(kind=st.sampled_from(["ckpt", "safetensors"]), at=st.floats(0, 1, exclude_max=True))
@settings(max_examples=60, deadline=None)
def test_a_torn_file_is_refused_wherever_it_is_torn(formats, tmp_path_factory, kind, at):
    path = tmp_path_factory.mktemp("torn") / f"model.{kind}"
    path.write_bytes(formats[kind][: int(at * len(formats[kind]))])
    refused(path, "is not a")


@given(kind=st.sampled_from(["ckpt", "safetensors"]), at=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
@settings(max_examples=150, deadline=None)
def test_a_flipped_byte_loads_or_is_a_sentence(formats, tmp_path_factory, kind, at, byte):
    """Never a traceback: any single byte of either format may be anything."""
    content = bytearray(formats[kind])
    content[int(at * len(content))] = byte
    path = tmp_path_factory.mktemp("flipped") / f"model.{kind}"
    path.write_bytes(content)
    sentence = ""
    try:
        load(path, device="cpu")
    except LimpetError as error:
        sentence = str(error)
    assert "\n" not in sentence


# The command


def test_info_describes_the_loaded_model(tmp_path, capsys):
    folder = hub_like(random_network(), tmp_path / "model")
    model = load(folder, device="cpu")
    assert main.main(["info", str(folder), "--device", "cpu", "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert about["digest"] == model.digest
    assert about["parameters"] == sum(p.numel() for p in random_network().parameters())
    assert (about["tensors"], about["shape"]) == (40, vars(TINY))
    assert (about["source"], about["weights"], about["precision"]) == ("folder", "as stored", "float32")
    assert (about["predicts"], about["schedule"]) == ("leave-one-out", "log-linear")
    assert about["signal"]["t = 1"] == pytest.approx(1e-3)
    assert about["tokenizer"].startswith("none: no tokenizer.json")
    assert main.main(["info", str(folder), "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert all(str(part) in text for part in (model.digest, f"{about['parameters']:,}", "log-linear", str(folder)))
