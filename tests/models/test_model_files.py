"""Names and files to models: the released layouts load whole, and a damaged or hostile file is one sentence."""

import io
import json
import os
import pickle
import socket
import struct
import time
import zipfile
from pathlib import Path

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.torch import load_file, save_file
from model_cases import RELEASED, TINY, random_network

from limpet.cli import info as info_command
from limpet.cli.common import Where
from limpet.errors import LimpetError
from limpet.models import model_files, tensor_files, torch_checkpoint
from limpet.models.duo import Duo, DuoNetwork, DuoShape
from limpet.models.loading import load
from limpet.models.tensor_files import digest_of, pack_rows, read_tensors, unpack_rows
from limpet.models.torch_checkpoint import Inert, Stored, read_pickle

pytestmark = pytest.mark.usefixtures("offline")


class Settings:
    """Stands in for the configuration object that Lightning pickles beside the weights."""

    def __init__(self):
        self.model = {"length": 1024, 5: ("six", frozenset({7}))}


def lightning(network, path, ema=True, **more):
    """Save a network as the released training code does; the running average differs from the weights by one."""
    state = {f"backbone.{name}": tensor for name, tensor in network.state_dict().items()}
    tree = {"state_dict": state, "hyper_parameters": {"config": Settings()}, "loops": {"epoch": 3}, **more}
    if ema:
        shadow = [parameter.detach() + 1 for parameter in network.parameters()]
        tree["ema"] = {"decay": 0.9999, "num_updates": 10, "shadow_params": shadow}
    torch.save(tree, path)
    return path


def hub_like(network, folder, **config):
    """Save a network as it lies on the hub: prefixed names, the rotary buffer, and a config without a tokenizer."""
    folder.mkdir(exist_ok=True)
    shape = network.shape
    save_file({f"backbone.{name}": t for name, t in network.state_dict().items()}, folder / "model.safetensors")
    said = {"model_type": "duo", "n_heads": shape.heads, "model_length": shape.length, "cond_dim": 129, **config}
    (folder / "config.json").write_text(json.dumps(said))
    return folder


def refused(path, match, **options):
    """The file is refused in one sentence, within seconds."""
    begin = time.monotonic()
    with pytest.raises(LimpetError, match=match) as caught:
        load(path, device="cpu", **options)
    assert time.monotonic() - begin < 5
    assert "\n" not in str(caught.value)
    return str(caught.value)


def same(model, network, shift=0.0):
    """The model holds exactly the network's parameters."""
    theirs = dict(network.named_parameters())
    ours = dict(model.network.named_parameters())
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name] + shift) for name in ours)


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


# The same in small: prefixes, running averages, what is told and what is inferred


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


def test_heads_must_be_told_by_someone(tmp_path):
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


def test_views_and_parameters_of_a_torch_file(tmp_path):
    base = torch.arange(60.0).reshape(6, 10)
    saved = {"turned": base.T, "part": base[1:3, 2:9:3], "parameter": torch.nn.Parameter(base), "half": base.half()}
    saved |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "flags": base > 7}
    torch.save(saved, tmp_path / "x.pt")
    with torch_checkpoint.TorchFile(tmp_path / "x.pt") as file:
        assert all(isinstance(value, Stored) for value in file.tree.values())
        for name in saved:
            read = file.read({name: file.tree[name]})[name]
            assert read.dtype == saved[name].dtype
            assert torch.equal(read, saved[name])


# Names


def test_built_in_models_are_found_and_listed(tmp_path, monkeypatch):
    monkeypatch.setattr(model_files, "BUILTIN_FOLDER", tmp_path)
    for name in ("mini", "mini-distilled"):
        Duo(random_network()).save(tmp_path / name, storage="int8")
        tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(
            str(tmp_path / name / "tokenizer.json")
        )
    (tmp_path / "judge").mkdir()
    (tmp_path / "judge" / "config.json").write_text('{"model_type": "causal"}')
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "config.json").write_text("{")
    assert model_files.builtin_names() == ["mini", "mini-distilled"]
    model = load("mini", device="cpu")
    assert (model.name, model.info["source"]) == ("mini", "built in")
    refused("other", r"no model 'other': it is neither built in \(mini, mini-distilled\)")
    refused("judge", "the built-in judge lacks model.safetensors, tokenizer.json: install limpet again")
    (tmp_path / "mini-distilled" / "config.json").write_text('{"model_type": "causal"}')
    refused("mini-distilled", "built-in model 'mini-distilled' is damaged: .* has model_type 'causal'")
    (tmp_path / "mini" / "model.safetensors").write_bytes(b"")
    refused("mini", "built-in model 'mini' is damaged: .* not a whole safetensors file")
    (tmp_path / "mini" / "model.safetensors").unlink()
    refused("mini", "the built-in mini lacks model.safetensors: install limpet again")


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


def test_wrong_words(tmp_path):
    folder = hub_like(random_network(), tmp_path / "m")
    refused(folder, "precision is one of", precision="half")
    refused(folder, 'weights is "ema" or "raw"', weights="best")
    refused("mini", "^precision is one of", precision="half")
    refused("mini", "^mini cannot be asked for a model .*'colour'", colour="blue")
    with pytest.raises(LimpetError, match="device 'abacus' cannot be used"):
        load(folder, device="abacus")


@pytest.mark.parametrize("reachable", ["offline", "no name server", "no answer"])
def test_a_hub_name_without_network_fails_in_seconds(monkeypatch, reachable):
    import huggingface_hub

    def silent(*_, **__):
        time.sleep(30)

    def unresolved(*_, **__):
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", reachable == "offline")
    monkeypatch.setattr(model_files, "HUB_SECONDS", 0.5)
    if reachable == "no answer":
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", silent)
    monkeypatch.setattr(socket, "getaddrinfo", unresolved)
    said = refused("s-sahoo/duo-distilled", "not in the local cache and could not be fetched from the hub")
    assert "path of a folder or file" in said
    assert "cache" in said
    assert "built-in model" in said


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
def whole(tmp_path_factory):
    return hub_like(random_network(), tmp_path_factory.mktemp("whole") / "m")


def damaged(whole, tmp_path, change):
    """A copy of the whole model's folder with its weights changed."""
    state = load_file(whole / "model.safetensors")
    change(state)
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((whole / "config.json").read_bytes())
    return tmp_path


def test_missing_unexpected_and_misshapen_tensors_are_listed_together(whole, tmp_path):
    def change(state):
        del state["backbone.blocks.1.norm2.weight"], state["backbone.output_layer.linear.bias"]
        state["backbone.extra"] = torch.ones(2)
        state["backbone.blocks.0.attn_out.weight"] = torch.ones(32, 31)
        state["backbone.blocks.2.mlp.0.bias"] = torch.ones(80, dtype=torch.int64)

    said = refused(damaged(whole, tmp_path, change), "does not fit a Duo model of 3 blocks")
    assert "missing: blocks.1.norm2.weight, output_layer.linear.bias" in said
    assert "unexpected: extra" in said
    assert "misshapen: blocks.0.attn_out.weight (32, 31) for (32, 32)" in said
    assert "blocks.2.mlp.0.bias (80,) of torch.int64 for (80,)" in said


@pytest.mark.parametrize("name", RELEASED[:15] + RELEASED[-5:])
def test_no_tensor_may_be_missing(whole, tmp_path, name):
    refused(damaged(whole, tmp_path, lambda state: state.pop("backbone." + name)), name.replace(".", r"\."))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(whole, tmp_path, value):
    def change(state):
        state["backbone.blocks.1.attn_qkv.weight"][3, 4] = value

    refused(damaged(whole, tmp_path, change), r"NaN or infinity in backbone\.blocks\.1\.attn_qkv\.weight")
    network = random_network()
    with torch.no_grad():
        network.blocks[0].norm1.weight[0] = value
    refused(lightning(network, tmp_path / "x.ckpt"), r"NaN or infinity in blocks\.0\.norm1\.weight")


def test_other_frequencies_are_another_model(whole, tmp_path):
    def change(state):
        state["backbone.rotary_emb.inv_freq"] = state["backbone.rotary_emb.inv_freq"].clone() ** 0.9

    refused(damaged(whole, tmp_path, change), "other frequencies")


def test_some_other_model_is_refused(tmp_path):
    save_file({"weight": torch.ones(3, 3)}, tmp_path / "model.safetensors")
    refused(tmp_path, "does not hold a Duo model")
    save_file({}, tmp_path / "model.safetensors")
    refused(tmp_path, "does not hold a Duo model")
    torch.save([1, 2, {"three": 4}], tmp_path / "list.ckpt")
    refused(tmp_path / "list.ckpt", "does not hold a Duo model")


@pytest.mark.parametrize(
    ("said", "match"),
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
def test_a_config_that_is_not_a_duos(whole, tmp_path, said, match):
    (tmp_path / "model.safetensors").write_bytes((whole / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_text(said if isinstance(said, str) else json.dumps(said), encoding="latin-1")
    refused(tmp_path, match)


def test_absurdly_many_blocks_are_refused(whole, tmp_path):
    def change(state):
        state.update({f"backbone.blocks.{i}.x": torch.zeros(0) for i in range(20_000)})

    refused(damaged(whole, tmp_path, change), "names 20000 blocks")


def header(tensor_files, data=b""):
    text = json.dumps(tensor_files).encode()
    return struct.pack("<Q", len(text)) + text + data


LYING = {
    "empty": b"",
    "short": b"abc",
    "text": b"this is a model card, not a model" * 10,
    "legacy pickle": pickle.dumps({"a": 1}),
    "header longer than the file": struct.pack("<Q", 1 << 62) + b"{}",
    "header a little longer": struct.pack("<Q", 90_000_000) + b"{}",
    "nested header": struct.pack("<Q", 100_000) + b"[" * 100_000,
    "four tebibytes": header({"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}, b"0000"),
    "offsets against shape": header({"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4]}}, b"0000"),
    "overflowing shape": header({"a": {"dtype": "F32", "shape": [1 << 62, 4], "data_offsets": [0, 0]}}),
    "negative shape": header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"0000"),
    "overlap": header({n: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for n in "ab"}, b"0000"),
    "trailing bytes": header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"00000000"),
    "unknown dtype": header({"a": {"dtype": "Z9", "shape": [1], "data_offsets": [0, 4]}}, b"0000"),
}


@pytest.mark.parametrize("kind", LYING)
def test_lying_safetensors_are_refused(tmp_path, kind):
    (tmp_path / "model.safetensors").write_bytes(LYING[kind])
    refused(tmp_path, "not a whole safetensors file")
    (tmp_path / "model.ckpt").write_bytes(LYING[kind])
    refused(tmp_path / "model.ckpt", "not a checkpoint in torch's zip format")


def test_a_zero_sized_matrix_with_a_huge_side(tmp_path):
    empty = {"dtype": "F32", "shape": [0, 1 << 62], "data_offsets": [0, 0]}
    names = ("vocab_embed.embedding", "sigma_map.mlp.2.weight", "blocks.0.mlp.0.weight")
    (tmp_path / "model.safetensors").write_bytes(header(dict.fromkeys(names, empty)))
    refused(tmp_path, "does not hold a Duo model")


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
    said = ""
    try:
        load(path, device="cpu")
    except LimpetError as error:
        said = str(error)
    assert "\n" not in said


# Pickles


class Command:
    """Pickles as a call of a real function."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


class Filled(dict):
    """Pickles as an object with state, items and a class of its own."""


def test_a_pickle_that_runs_a_command_runs_nothing_and_yields_its_tensors(tmp_path):
    witness = tmp_path / "ran"
    network = random_network()
    evil = [
        Command(os.system, f"touch {witness}"),
        Command(exec, f"open({str(witness)!r}, 'w')"),
        Command(eval, f"open({str(witness)!r}, 'w')"),
    ]
    path = lightning(network, tmp_path / "evil.ckpt", callbacks=evil, hooks={"a": Filled(b=evil)})
    assert same(load(path, device="cpu"), network, shift=1)
    assert not witness.exists()
    torch.load(path, weights_only=False)  # the same file does run it when it is unpickled
    assert witness.exists()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_survive_every_protocol(protocol):
    plain = {"a": [1, -2, 3.5, True, None, 2**70, "é", b"bytes" if protocol > 2 else "x"], "b": {"c": (1, (2,), ())}}
    plain["shared"] = plain["b"]
    walked = read_pickle(pickle.dumps(plain, protocol))
    assert walked == plain
    assert walked["shared"] is walked["b"]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_everything_else_is_inert_in_every_protocol(protocol, tmp_path):
    witness = tmp_path / "ran"
    things = [Settings(), Filled(a=1), {1, 2}, frozenset({3}), complex(1, 2), Settings, len, io.BytesIO]
    things += [Command(os.mkdir, str(witness)), bytearray(b"x"), type("Local", (), {}).__mro__[1]]
    walked = read_pickle(pickle.dumps({"things": things, "end": 1}, protocol))
    assert walked["end"] == 1
    assert len(walked["things"]) == len(things)
    assert all(isinstance(value, (Inert, list, bytes, bytearray)) for value in walked["things"])
    assert not witness.exists()


@pytest.mark.parametrize(
    "text",
    [
        b"cos\nsystem\n(S'touch {}'\ntR.",
        b"(S'touch {}'\nios\nsystem\n.",
        b"(cos\nsystem\nS'touch {}'\no.",
        b"\x80\x02cos\nsystem\n(X\x08\x00\x00\x00touch {}t\x81.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x08touch {}\x85R.",
        b"\x80\x02cbuiltins\nexec\n}b.",
    ],
)
def test_old_and_hand_written_calls_are_inert(text):
    assert isinstance(read_pickle(text), Inert)


def torch_zip(path, pickled, entries=None, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled)
        for name, content in (entries or {}).items():
            archive.writestr(f"archive/{name}", content)
    return path


def tensor_pickle(shape, stride, offset=0, key="0", dtype="FloatStorage"):
    """What torch writes for {"state_dict": {"vocab_embed.embedding": tensor}}, with sizes of our own."""

    def number(value):
        return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)

    def numbers(values):
        return b"(" + b"".join(map(number, values)) + b"t"

    def text(value):
        return b"X" + struct.pack("<I", len(value)) + value.encode()

    storage = b"(" + text("storage") + f"ctorch\n{dtype}\n".encode() + text(key) + text("cpu") + b"K\x04tQ"
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + number(offset)
    tensor += numbers(shape) + numbers(stride) + b"\x89}tR"
    return b"\x80\x02}" + text("state_dict") + b"}" + text("vocab_embed.embedding") + tensor + b"ss."


FOUR = {"data/0": bytes(16)}
HOSTILE = {
    "a bomb of strides": (tensor_pickle([1 << 20, 1 << 20], [0, 0]), FOUR, "claim more bytes"),
    "sizes beyond the bytes": (tensor_pickle([2, 4], [4, 1]), FOUR, "reaches beyond|claim more"),
    "an offset beyond the bytes": (tensor_pickle([2, 2], [2, 1], offset=1), FOUR, "reaches beyond"),
    "strides beyond the bytes": (tensor_pickle([2, 2], [1 << 40, 1], 0), FOUR, "reaches beyond"),
    "negative sizes": (tensor_pickle([-1, -4], [4, 1]), FOUR, "negative"),
    "a negative offset": (tensor_pickle([2, 2], [2, 1], offset=-1), FOUR, "negative"),
    "overlapping elements": (tensor_pickle([3, 2], [1, 1]), FOUR, "reaches beyond"),
    "no bytes": (tensor_pickle([2, 2], [2, 1]), {}, "missing"),
    "a key that climbs": (tensor_pickle([2, 2], [2, 1], key="../../x"), FOUR, "missing"),
    "a dtype of no storage": (tensor_pickle([2, 2], [2, 1], dtype="load"), FOUR, "does not hold a Duo model"),
    "another byte order": (tensor_pickle([2, 2], [2, 1]), FOUR | {"byteorder": b"big"}, "big-endian"),
    "no pickle": (b"", {}, "can be read"),
    "an endless string": (b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"x.", {}, "can be read"),
    "an endless bytearray": (b"\x80\x05\x96" + struct.pack("<Q", 1 << 60) + b"x.", {}, "can be read"),
    "a far memo": (b"\x80\x02Nr\xff\xff\xff\xff.", {}, "does not hold a Duo model"),
    "an unknown memo": (b"\x80\x02h\x07.", {}, "can be read"),
    "a popped stack": (b"\x80\x020.", {}, "can be read"),
    "deep nesting as a key": (b"\x80\x02}" + b")" + b"\x85" * 100_000 + b"Ns.", {}, "does not hold a Duo model"),
    "odd items": (b"\x80\x02}(NNNu.", {}, "can be read"),
    "outside buffers": (b"\x80\x05\x97.", {}, "can be read"),
    "another opcode": (b"\x80\x02\xfe.", {}, "can be read"),
}


def read_everything(path):
    """Fetch every tensor that the file claims to have, and then try it as a model."""
    with torch_checkpoint.TorchFile(path) as file:
        state = file.tree["state_dict"] if isinstance(file.tree, dict) and "state_dict" in file.tree else {}
        file.read({name: value for name, value in state.items() if isinstance(value, Stored)})
    load(path, device="cpu")


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_checkpoints_are_refused(tmp_path, kind):
    pickled, entries, match = HOSTILE[kind]
    path = torch_zip(tmp_path / "x.ckpt", pickled, entries)
    with pytest.raises(LimpetError, match=match) as caught:
        read_everything(path)
    assert "\n" not in str(caught.value)
    refused(path, "can be read|does not hold a Duo model")


def test_a_storage_is_read_once_however_many_tensors_are_parts_of_it(tmp_path, monkeypatch):
    views = torch.arange(400.0)
    torch.save({"whole": views, **{str(i): views[i : i + 2] for i in range(50)}}, tmp_path / "x.pt")
    read, original = [], torch_checkpoint.TorchFile._bytes
    monkeypatch.setattr(torch_checkpoint.TorchFile, "_bytes", lambda *given: read.append(given[1]) or original(*given))
    with torch_checkpoint.TorchFile(tmp_path / "x.pt") as file:
        made = file.read(file.tree)
    assert [name for name in read if name.startswith("data/")] == ["data/0"]
    assert torch.equal(made["7"], views[7:9])
    made["7"].zero_()
    assert torch.equal(made["whole"], views)  # each has memory of its own


def test_a_header_larger_than_any_is_refused_before_it_is_read(tmp_path):
    text = json.dumps({"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}).encode()
    for size, match in ((tensor_files.MAX_HEADER, "does not hold a Duo model"), (tensor_files.MAX_HEADER + 8, "header claims")):
        (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", size) + text.ljust(size))
        refused(tmp_path, match)


def test_the_hostile_pickles_differ_from_an_honest_one_in_what_they_claim(tmp_path):
    with torch_checkpoint.TorchFile(torch_zip(tmp_path / "x.ckpt", tensor_pickle([2, 2], [2, 1]), FOUR)) as file:
        assert torch.equal(file.read(file.tree["state_dict"])["vocab_embed.embedding"], torch.zeros(2, 2))


def test_compressed_entries_are_refused(tmp_path):
    path = torch_zip(tmp_path / "x.ckpt", b"\x80\x02}" + b"0}" * 10_000_000 + b".", compression=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 100_000
    refused(path, "compressed")


def test_a_zip_that_is_no_checkpoint_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.ckpt", "w") as archive:
        archive.writestr("readme.txt", "hello")
    refused(tmp_path / "x.ckpt", "0 entries named data.pkl")


def test_nothing_here_can_unpickle():
    """Neither reader so much as imports what could run a pickle."""
    for module in (model_files, torch_checkpoint):
        source = Path(module.__file__).read_text()
        assert "import pickle\n" not in source
        assert "torch.load" not in source


# Rows of int8, and the digest


@given(arrays("float32", (5, 7), elements=st.floats(-(2.0**60), 2.0**60, width=32)))
@settings(max_examples=200, deadline=None)
def test_rows_are_close_and_packing_is_idempotent(matrix):
    state = {"x": torch.from_numpy(matrix), "bias": torch.arange(3.0)}
    packed = pack_rows(state)
    assert packed["x"].dtype == torch.int8
    assert packed["x.scale"].shape == (5,)
    unpacked = unpack_rows(packed)
    assert unpacked.keys() == state.keys()
    assert torch.equal(unpacked["bias"], state["bias"])
    largest = state["x"].abs().amax(1, keepdim=True)
    assert ((unpacked["x"] - state["x"]).abs() <= 0.5001 * largest / 127 + 2.0**-100).all()
    again = pack_rows(unpacked)
    assert torch.equal(again["x"], packed["x"])
    assert torch.equal(again["x.scale"], packed["x.scale"])


def test_rows_without_their_scales_are_refused(tmp_path):
    save_file(pack_rows(random_network().state_dict()), tmp_path / "model.safetensors")
    assert load(tmp_path, device="cpu").network.shape.heads == 2
    state = load_file(tmp_path / "model.safetensors")
    del state["blocks.0.attn_qkv.weight.scale"]
    save_file(state, tmp_path / "model.safetensors")
    refused(tmp_path, r"misshapen: blocks\.0\.attn_qkv\.weight")
    state["blocks.0.attn_qkv.weight.scale"] = torch.ones(5)
    save_file(state, tmp_path / "model.safetensors")
    refused(tmp_path, r"blocks\.0\.attn_qkv\.weight \(96, 32\) has row scales \(5,\)")


def test_the_digest_sees_names_shapes_dtypes_and_bytes_and_no_order():
    a, b = torch.arange(6.0).reshape(2, 3), torch.ones(2)
    same_thing = [digest_of({"a": a, "b": b}), digest_of({"b": b, "a": a.T.contiguous().T})]
    others = [
        digest_of({"a": a, "c": b}),
        digest_of({"a": a.reshape(3, 2), "b": b}),
        digest_of({"a": a.double(), "b": b}),
        digest_of({"a": a + 1e-6, "b": b}),
        digest_of({"a": a, "b": b}, {"heads": 2}),
    ]
    assert len(set(same_thing)) == 1
    assert len({*same_thing, *others}) == 6


def test_reading_is_not_tied_to_the_file(tmp_path):
    save_file({"a": torch.zeros(4)}, tmp_path / "x.safetensors")
    state = read_tensors(tmp_path / "x.safetensors")
    with open(tmp_path / "x.safetensors", "r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(struct.pack("<f", 7.0))
    assert torch.equal(state["a"], torch.zeros(4))


# The command


def test_info_says_what_was_loaded(tmp_path, capsys):
    folder = hub_like(random_network(), tmp_path / "model")
    model = load(folder, device="cpu")
    info_command.run(str(folder), where=Where("cpu", "float32"), json=True)
    about = json.loads(capsys.readouterr().out)
    assert about["digest"] == model.digest
    assert about["parameters"] == sum(p.numel() for p in random_network().parameters())
    assert (about["tensors"], about["shape"]) == (40, vars(TINY))
    assert (about["source"], about["weights"], about["precision"]) == ("folder", "as stored", "float32")
    assert (about["predicts"], about["schedule"]) == ("leave-one-out", "log-linear")
    assert about["signal"]["t = 1"] == pytest.approx(1e-3)
    assert about["tokenizer"].startswith("none: no tokenizer.json")
    info_command.run(str(folder), where=Where("cpu", "float32"))
    text = capsys.readouterr().out
    assert all(str(part) in text for part in (model.digest, f"{about['parameters']:,}", "log-linear", str(folder)))
