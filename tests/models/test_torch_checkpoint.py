"""Torch's zip files read as data: no code in a pickle runs, and hostile ones are refused in one sentence."""

import io
import os
import pickle
import struct
import zipfile
from pathlib import Path

import pytest
import torch

from limpet.errors import LimpetError
from limpet.models import model_files, torch_checkpoint
from limpet.models.loading import load
from limpet.models.torch_checkpoint import Inert, Stored, read_pickle
from model_cases import Settings, lightning, random_network, refused, same

pytestmark = pytest.mark.usefixtures("offline")


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
    value = read_pickle(pickle.dumps(plain, protocol))
    assert value == plain
    assert value["shared"] is value["b"]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_everything_else_is_inert_in_every_protocol(protocol, tmp_path):
    witness = tmp_path / "ran"
    things = [Settings(), Filled(a=1), {1, 2}, frozenset({3}), complex(1, 2), Settings, len, io.BytesIO]
    things += [Command(os.mkdir, str(witness)), bytearray(b"x"), type("Local", (), {}).__mro__[1]]
    value = read_pickle(pickle.dumps({"things": things, "end": 1}, protocol))
    assert value["end"] == 1
    assert len(value["things"]) == len(things)
    assert all(isinstance(value, (Inert, list, bytes, bytearray)) for value in value["things"])
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
    reads, original = [], torch_checkpoint.TorchFile._bytes
    monkeypatch.setattr(torch_checkpoint.TorchFile, "_bytes", lambda *args: reads.append(args[1]) or original(*args))
    with torch_checkpoint.TorchFile(tmp_path / "x.pt") as file:
        tensors = file.read(file.tree)
    assert [name for name in reads if name.startswith("data/")] == ["data/0"]
    assert torch.equal(tensors["7"], views[7:9])
    tensors["7"].zero_()
    assert torch.equal(tensors["whole"], views)  # each has memory of its own


def test_the_hostile_pickles_differ_from_an_honest_one_in_what_they_claim(tmp_path):
    with torch_checkpoint.TorchFile(torch_zip(tmp_path / "x.ckpt", tensor_pickle([2, 2], [2, 1]), FOUR)) as file:
        assert torch.equal(file.read(file.tree["state_dict"])["vocab_embed.embedding"], torch.zeros(2, 2))


def test_a_pickle_of_very_many_objects_is_refused(tmp_path):
    """Every byte of it may create an object that takes 64 bytes, and is not looked at beyond a limit."""
    many = torch_zip(tmp_path / "x.ckpt", b"\x80\x02" + b"}" * torch_checkpoint.MAX_INSTRUCTIONS + b".")
    refused(many, "its pickle has more than 2000000 instructions")


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
