"""Safetensors files: lying headers are refused, tensors are read bit for bit, int8 rows are close, and digests."""

import json
import os
import pickle
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.torch import load_file, save_file

from limpet.errors import LimpetError
from limpet.models import tensor_files
from limpet.models.loading import load
from limpet.models.tensor_files import digest_of, open_tensors, pack_rows, read_tensors, unpack_rows
from model_cases import random_network, refused

pytestmark = pytest.mark.usefixtures("offline")


# Files


def header(tensors, data=b""):
    text = json.dumps(tensors).encode()
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


def test_a_header_larger_than_any_is_refused_before_it_is_read(tmp_path):
    text = json.dumps({"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}).encode()
    most = tensor_files.MAX_HEADER
    for size, match in ((most, "does not hold a Duo model"), (most + 8, "header claims")):
        (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", size) + text.ljust(size))
        refused(tmp_path, match)


def test_a_file_that_shrinks_after_it_was_opened_is_a_sentence(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(1000)}, path)
    unread = open_tensors(path)
    with open(path, "r+b") as file:
        file.truncate(2000)
    with pytest.raises(LimpetError, match="has lost the bytes of a"):
        unread["a"].read()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.int64, torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 4)])
def test_tensors_are_read_bit_for_bit(tmp_path, dtype, shape):
    tensor = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    save_file({"before": torch.ones(3), "x": tensor, "after": torch.ones(2)}, tmp_path / "x.safetensors")
    read = read_tensors(tmp_path / "x.safetensors")["x"]
    assert (read.dtype, read.shape) == (dtype, tensor.shape)
    assert torch.equal(read, tensor)


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


def test_the_digest_depends_on_names_shapes_types_and_bytes_and_no_order():
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
