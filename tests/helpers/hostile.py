"""A corpus of hostile files, and a program that reads them all in one process.

The program prints one line of JSON for each: its name, CPU seconds, bytes of memory, and the error message."""

import gzip
import json
import os
import resource
import socket
import struct
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import torch

from limpet.cli.score import read_samples
from limpet.errors import LimpetError
from limpet.evaluation.judges import load_judge
from limpet.experiments import study_files
from limpet.models.duo import Duo, DuoNetwork, DuoShape
from limpet.models.loading import load
from limpet.models.model_files import INDEX
from limpet.models.tokenizers import read_tokenizer
from limpet.recording.trajectory import Trajectory
from limpet.training import recipe

TINY = DuoShape(vocab_size=5, length=4, width=4, blocks=1, heads=1, cond=2, hidden=4)
ANCHORS = ("vocab_embed.embedding", "sigma_map.mlp.2.weight", "blocks.0.mlp.0.weight")


# Readers, by the kind of file

READERS = {
    "model": lambda path: load(path, device="cpu"),
    "bfloat16": lambda path: load(path, device="cpu", precision="bfloat16"),
    "judge": lambda path: load_judge(str(path), device="cpu"),
    "tokenizer": lambda path: read_tokenizer(path).decode(read_tokenizer(path).encode("a sea of words")),
    "trajectory": Trajectory.load,
    "study": study_files.load,
    "recipe": recipe.read,
    "samples": lambda path: read_samples(str(path)),
    "sampler": lambda path: load(f"{path}:make"),
}


# Pickles


def text(value):
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def number(value):
    return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)


def tensor(shape, stride, key="0", offset=0):
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text(key) + text("cpu") + b"K\x04tQ"
    sizes, strides = (b"(" + b"".join(map(number, values)) + b"t" for values in (shape, stride))
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + number(offset) + sizes + strides + b"\x89}tR"


def named(tensors):
    return b"}(" + b"".join(text(name) + value for name, value in tensors.items()) + b"u"


def checkpoint(path, pickled, **entries):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + pickled + b".")
        for name, content in entries.items():
            archive.writestr(f"archive/data/{name.lstrip('_')}", content)
    return path


def averaged(folder):
    """About 761 bytes: a running average of no tensors, for a network whose frequencies alone take 8.6 GB."""
    state = dict.fromkeys(ANCHORS, tensor([1 << 32, 1 << 32], [1, 1]))
    state["rotary_emb.inv_freq"] = tensor([1 << 31], [1])
    tree = named({"state_dict": named(state), "ema": named({"shadow_params": b"]"})})
    return checkpoint(folder / "x.ckpt", tree)


def many_views(folder):
    """Thousands of tensors that are all parts of one storage."""
    views = {name: tensor([2, 2], [2, 1]) for name in ANCHORS}
    views |= {f"blocks.0.x{i}": tensor([1], [1]) for i in range(2000)}
    return checkpoint(folder / "x.ckpt", named({"state_dict": named(views)}), _0=bytes(500_000))


def shared_sizes(folder):
    """A shape of a hundred thousand sizes, used over and over."""
    sizes = b"(" + b"K\x01" * 100_000 + b"tq\x01"
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x04tQq\x02"
    again = b"ctorch._utils\n_rebuild_tensor_v2\n(h\x02K\x00h\x01h\x01\x89}tR0"
    return checkpoint(folder / "x.ckpt", sizes + b"0" + storage + b"0" + again * 10_000 + b"}")


def long_names(folder):
    """One name of half a megabyte, joined to itself ten thousand times."""
    body = text("x" * 400_000) + b"q\x010" + b"h\x01h\x01\x93" * 10_000
    return checkpoint(folder / "x.ckpt", body)


def doubling_key(folder):
    """A storage's key that is a pair of pairs of pairs: small in memory, endless as text."""
    key = b"K\x01" + b"2\x86" * 60
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + key + text("cpu") + b"K\x04tQ"
    return checkpoint(folder / "x.ckpt", storage)


def dimensions(folder):
    return checkpoint(folder / "x.ckpt", named({"state_dict": named({ANCHORS[0]: tensor([1] * 30_000, [1] * 30_000)})}))


def many_objects(folder):
    """A megabyte in which every byte creates a dictionary, 16 times over."""
    return checkpoint(folder / "x.ckpt", b"}" * (16 << 20))


def deep_list(folder):
    return checkpoint(folder / "x.ckpt", b"]" + b"q\x01" + b"]h\x01a" * 100_000)


def text_pickle(folder):
    return checkpoint(folder / "x.ckpt", b"I" + b"9" * 400_000 + b"\n")


# Safetensors


def safetensors(folder, header, data=b""):
    written = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(written)) + written + data)
    return folder


def entry(shape, begin=0, end=0):
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


def many_tensors(folder):
    return safetensors(folder, {str(i): entry([0]) for i in range(12_000)})


def many_dimensions(folder):
    return safetensors(folder, {name: entry([1] * 100_000, 0, 4) for name in ANCHORS[:1]}, b"0000")


def hostile_names(folder):
    return safetensors(folder, {f"\x1b]0;owned\x07\n\u202e{'x' * 50_000}{i}": entry([0]) for i in range(8)})


def hostile_config(field):
    def make(folder):
        value = {"text": "\x1b[2J" + "x" * 500_000, "deep": [[[]]], "number": int("9" * 4000)}[field]
        (folder / "config.json").write_text(json.dumps({"model_type": "duo", "n_heads": value}))
        return safetensors(folder, {})

    return make


def large_numbers(dtype, value):
    """A complete model with one number that the type it is converted to cannot represent."""

    def make(folder):
        torch.manual_seed(0)
        Duo(DuoNetwork(TINY)).save(folder)
        from safetensors.torch import load_file, save_file

        state = load_file(folder / "model.safetensors")
        name = next(name for name in state if name.endswith("linear.weight"))
        state[name] = state[name].to(dtype)
        state[name][0, 0] = value
        save_file(state, folder / "model.safetensors")
        return folder

    return make


def large_rows(folder):
    """Rows of int8 that their scales make infinite."""
    torch.manual_seed(0)
    Duo(DuoNetwork(TINY)).save(folder, storage="int8")
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    for name in state:
        if name.endswith(".scale"):
            state[name].fill_(3e38)
        elif state[name].dtype == torch.int8:
            state[name].fill_(127)
    save_file(state, folder / "model.safetensors")
    return folder


# Judges


def judge(**sizes):
    def make(folder):
        usual = {"vocab_size": 5, "length": 4, "width": 4, "blocks": 1, "heads": 1, "hidden": 4}
        (folder / "config.json").write_text(json.dumps({"model_type": "causal", **usual, **sizes}))
        return safetensors(folder, {})

    return make


# Tokenizers


def tokenizer(**parts):
    def make(folder):
        usual = {"type": "BPE", "vocab": {letter: i for i, letter in enumerate("abcdefg ")}, "merges": []}
        about = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None, "decoder": None,
                 "post_processor": None, "truncation": None, "padding": None, "model": usual, **parts}  # fmt: skip
        (folder / "tokenizer.json").write_text(json.dumps(about))
        return folder

    return make


DOUBLING = {"type": "Sequence", "normalizers": [
    {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"} for _ in range(34)]}  # fmt: skip
UNIGRAM = {"type": "Unigram", "unk_id": 9, "vocab": [["a", -1.0]], "byte_fallback": True}
CHARSMAP = {"type": "Precompiled", "precompiled_charsmap": "AAAAAQ=="}


# Trajectories, and texts


def trajectory(line, body=b""):
    def make(folder):
        (folder / "x.limpet").write_bytes(gzip.compress(line + b"\n" + body))
        return folder / "x.limpet"

    return make


def spread(folder):
    """A megabyte that unpacks to most of a gigabyte."""
    with gzip.open(folder / "x.limpet", "wb") as packed:
        packed.write(b'{"format":"limpet trajectory","x":"')
        for _ in range(900):
            packed.write(bytes(1 << 20))
    return folder / "x.limpet"


def file(name, content):
    def make(folder):
        (folder / name).write_bytes(content)
        return folder / name

    return make


def index(listed, part=None):
    """A model in parts, with this index. `part` is the kind of special file in place of its only part."""

    def make(folder):
        written = listed if isinstance(listed, bytes) else json.dumps({"weight_map": listed}).encode()
        (folder / INDEX).write_bytes(written)
        if part is not None:
            special("a.safetensors", part)(folder)
        return folder

    return make


def toml_lines(folder):
    """Many lines, and a mistake in the last."""
    lines = "".join(f"a{i} = {i}\n" for i in range(40_000))
    (folder / "x.toml").write_text(lines + '[samplers]\nx = "nothing"\n')
    return folder / "x.toml"


# Special files


def special(name, kind):
    def make(folder):
        path = folder / name
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "socket":
            short = tempfile.mkdtemp()  # a socket's path is short
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(f"{short}/s")
            path.symlink_to(f"{short}/s")
        else:
            path.symlink_to("/dev/zero")
        return path if "/" not in name else path.parent

    return make


def beside(name, kind):
    """A good model with a special file in place of one of its own."""

    def make(folder):
        torch.manual_seed(0)
        Duo(DuoNetwork(TINY)).save(folder)
        (folder / name).unlink(missing_ok=True)
        special(name, kind)(folder)
        return folder

    return make


CASES = {
    "761 bytes that ask for gigabytes": ("model", averaged),
    "two thousand views of one storage": ("model", many_views),
    "a shape used over and over": ("model", shared_sizes),
    "names joined over and over": ("model", long_names),
    "a key that doubles": ("model", doubling_key),
    "thousands of dimensions in a pickle": ("model", dimensions),
    "a list in a list": ("model", deep_list),
    "millions of objects": ("model", many_objects),
    "a number of many digits": ("model", text_pickle),
    "many tensors": ("model", many_tensors),
    "thousands of dimensions": ("model", many_dimensions),
    "names that move the cursor": ("model", hostile_names),
    "an index of many parts": ("model", index({f"x{i}": f"{i}.safetensors" for i in range(20_000)})),
    "an index of parts elsewhere": ("model", index({"\x1b[2J" * 50: "../../\n\x07.safetensors"})),
    "an index of a part with a zero": ("model", index({"x": "a\0.safetensors"})),
    **{f"a {kind} as a part": ("model", index({"x": "a.safetensors"}, kind)) for kind in ("pipe", "device", "socket")},
    "a config of escapes": ("model", hostile_config("text")),
    "a config of lists": ("model", hostile_config("deep")),
    "a config of digits": ("model", hostile_config("number")),
    "float64 beyond float32": ("model", large_numbers(torch.float64, 1e300)),
    "rows beyond float32": ("model", large_rows),
    "float32 beyond bfloat16": ("bfloat16", large_numbers(torch.float32, 3.4028e38)),
    "a judge of a billion blocks": ("judge", judge(blocks=10**9)),
    "a judge wider than memory": ("judge", judge(width=1 << 40)),
    "a judge of fractions": ("judge", judge(width=4.5)),
    "a tokenizer that doubles": ("tokenizer", tokenizer(normalizer=DOUBLING)),
    "a tokenizer that doubles back": ("tokenizer", tokenizer(decoder={
        "type": "Sequence", "decoders": DOUBLING["normalizers"]})),
    "a tokenizer of a broken map": ("tokenizer", tokenizer(normalizer=CHARSMAP)),
    "a tokenizer without its unknown": ("tokenizer", tokenizer(model=UNIGRAM)),
    "a tokenizer of brackets": ("tokenizer", lambda folder: file("tokenizer.json", b"[" * 500_000)(folder).parent),
    "a tokenizer that is a list": ("tokenizer", lambda folder: file("tokenizer.json", b"[1]")(folder).parent),
    "a tokenizer of huge ids": ("tokenizer", tokenizer(model={"type": "BPE", "vocab": {"a": 2**32 - 1}, "merges": []})),
    "a trajectory that spreads": ("trajectory", spread),
    "a trajectory of brackets": ("trajectory", trajectory(b"[" * 500_000)),
    "a trajectory of escapes": ("trajectory", trajectory(json.dumps(
        {"format": "limpet trajectory", "version": "\x1b[2J" + "9" * 100_000}).encode())),
    "a study of many lines": ("study", toml_lines),
    "a study of brackets": ("study", file("x.toml", b"a = " + b"[" * 500_000)),
    "a study of digits": ("study", file("x.toml", b"a = " + b"9" * 500_000)),
    "a recipe of escapes": ("recipe", file("x.toml", '"\\u001b[2J" = "{}"'.format("x" * 300_000).encode())),
    "samples of brackets": ("samples", file("x.jsonl", b'{"text":' + b"[" * 500_000)),
    "samples of digits": ("samples", file("x.jsonl", b'{"text": "a", "seed": ' + b"9" * 500_000 + b"}")),
    "samples of bytes": ("samples", file("x.jsonl", bytes(range(256)))),
    **{f"a {kind} as {name}": (reader, special(name, kind)) for kind in ("pipe", "device", "socket") for reader, name in
       (("model", "x.ckpt"), ("model", "x.safetensors"), ("trajectory", "x.limpet"), ("study", "x.toml"),
        ("samples", "x.jsonl"), ("sampler", "x.py"))},
    **{f"a {kind} as {name} beside a model": ("model", beside(name, kind)) for kind in ("pipe", "device", "socket")
       for name in ("config.json", "tokenizer.json", "model.safetensors")},
    **{f"a {kind} as an index": ("model", special(INDEX, kind)) for kind in ("pipe", "device", "socket")},
}  # fmt: skip


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main():
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name, (reader, create) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            path = create(Path(folder))
            start, before, message = time.process_time(), peak(), None
            try:
                READERS[reader](path)
            except LimpetError as error:
                message = str(error)
            except BaseException as error:
                message = f"TRACEBACK {type(error).__name__}: {str(error)[:300]}"
            seconds = time.process_time() - start
            row = {"name": name, "seconds": seconds, "bytes": peak() - before, "message": message}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    sys.exit(main())
