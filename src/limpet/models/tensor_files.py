"""Tensors on disk: safetensors files that may be hostile, smaller storage of matrices, and digests.

The names and shapes in a file are known before any tensor is read (`Unread`). A network then takes its tensors one by
one, each in its own precision and on its device, so that nothing is in memory twice, however large the model."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from torch import Tensor, nn

from limpet.errors import LimpetError
from limpet.files import atomic_path, open_regular

MAX_HEADER = 4 << 20  # bytes of a safetensors header: room for some ten thousand tensors
MAX_RANK = 8  # dimensions of a tensor
SCALE = ".scale"  # an int8 matrix X has its rows' scales beside it, as X.scale


DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class Unread(NamedTuple):
    """A tensor that need not have been read yet: its shape and type, and how to read it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


def already_read(tensor: Tensor) -> Unread:
    """A tensor in memory, as one that can be read."""
    return Unread(tuple(tensor.shape), tensor.dtype, lambda: tensor)


class BadHeader(Exception):
    """A safetensors file whose header cannot be used."""


def read_header(file: IO[bytes]) -> tuple[int, dict[str, Any]]:
    """Where the tensors' bytes begin, and the header's entry of each.

    Raises for a header that is too large, and for tensors of too many dimensions. The safetensors library compares all
    else, each offset and each shape, with the file's size before it allocates anything."""
    size = int.from_bytes(file.read(8), "little")
    if size > MAX_HEADER:
        raise BadHeader(f"its header claims {size} bytes")
    try:
        tensors = json.loads(file.read(size), object_pairs_hook=unique_keys)
        tensors.pop("__metadata__", None)
        ranks = [len(about["shape"]) for about in tensors.values()]
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
        raise BadHeader(f"its header is no list of tensors: {error}") from error
    if max(ranks, default=0) > MAX_RANK:
        raise BadHeader(f"it has a tensor of {max(ranks)} dimensions")
    return 8 + size, tensors


def open_tensors(path: str | os.PathLike[str]) -> dict[str, Unread]:
    """Every tensor of a safetensors file. A broken file is refused now, NaN and infinity when a tensor is read.

    Bytes are copied out of the file and not mapped. A mapped file counts as memory beside its copy, and if somebody
    rewrote it in place the model would change under its digest."""
    try:
        with open_regular(path) as file:
            begin, header = read_header(file)
        with safe_open(path, framework="pt"):  # the library checks the header
            pass
        return {name: _unread(path, name, begin, **about) for name, about in header.items()}
    except LimpetError:
        raise
    except (SafetensorError, OSError, BadHeader, ValueError, TypeError) as error:
        raise LimpetError(f"{path} is not a whole safetensors file ({error}): fetch or copy it again") from error


def _unread(
    path: str | os.PathLike[str], name: str, begin: int, dtype: str, shape: list[int], data_offsets: list[int]
) -> Unread:
    if dtype not in DTYPES:
        raise LimpetError(f"{path} holds {name} in {dtype}, which is not read here: convert it to float32 or bfloat16")
    kind, (first, last) = DTYPES[dtype], data_offsets
    if last - first != prod(shape) * kind.itemsize:
        raise ValueError(f"{name} has {last - first} bytes for its shape {shape}")
    return Unread(tuple(shape), kind, partial(_read, path, name, begin + first, tuple(shape), kind))


def _read(path: str | os.PathLike[str], name: str, begin: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The tensor whose bytes begin at `begin`. Raises if some are missing, NaN or infinite."""
    tensor = torch.empty(shape, dtype=dtype)
    rest = tensor.reshape(-1).view(torch.uint8).numpy().data
    try:
        with open_regular(path) as file:
            file.seek(begin)
            while rest and (count := file.readinto(rest)):
                rest = rest[count:]
    except OSError as error:
        raise LimpetError(f"{path} cannot be read ({error.strerror}): check the disk") from error
    if rest:
        raise LimpetError(f"{path} has lost the bytes of {name} since it was opened: fetch or copy it again")
    refuse_nonfinite({name: tensor}, path)
    return tensor


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, for `object_pairs_hook`. Raises if it has a key twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"it says {counts.most_common(1)[0][0]} twice")
    return found


def read_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, as stored. Raises for a file that is broken, or holds NaN or infinity."""
    return {name: unread.read() for name, unread in open_tensors(path).items()}


def refuse_nonfinite(state: Mapping[str, Tensor], path: str | os.PathLike[str], stored: str = "") -> None:
    """Raise for NaN or infinity. `stored` names the type that a file's numbers were converted to, if they were."""
    bad = [name for name, tensor in state.items() if tensor.is_floating_point() and not _finite(tensor)]
    if bad and stored:
        raise LimpetError(f"{path} holds numbers too large for {stored} in {some(bad)}: use another precision or model")
    if bad:
        raise LimpetError(f"{path} holds NaN or infinity in {some(bad)}: use a checkpoint from before training broke")


def _finite(tensor: Tensor) -> bool:
    """Whether no number is NaN or infinite. The extremes tell: both are NaN if any number is."""
    return not tensor.numel() or all(extreme.isfinite() for extreme in tensor.aminmax())


def write_tensors(path: Path, state: Mapping[str, Tensor], about: Mapping[str, str] = {"format": "pt"}) -> None:
    """Write a safetensors file that appears whole or not at all, with `about` as its metadata."""
    try:
        with atomic_path(path) as partial:
            tensors = {name: tensor.contiguous() for name, tensor in state.items()}
            if partial == path:  # a pipe or a device, which the library would replace with a file
                partial.write_bytes(save(tensors, dict(about)))
            else:
                save_file(tensors, partial, dict(about))
                partial.chmod(0o644)  # safetensors lets the owner alone read it
    except (SafetensorError, OSError) as error:
        raise LimpetError(f"{path} could not be written ({error}): free some space or name another folder") from error


def pack_rows(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each matrix as int8 times one float32 scale for each row. All else stays as it is.

    Scales keep 16 bits of mantissa, so that scale times int8 is exact in float32, and packing an unpacked matrix gives
    back the same bits."""
    packed: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if tensor.dim() != 2 or not tensor.is_floating_point():
            packed[name] = tensor
            continue
        scale = tensor.float().abs().amax(1) / 127
        scale = ((scale.view(torch.int32) + 0x80) & ~0xFF).view(torch.float32).clamp(min=2.0**-100)
        packed[name] = (tensor.float() / scale[:, None]).round().to(torch.int8)
        packed[name + SCALE] = scale
    return packed


def unpacked(state: Mapping[str, Unread]) -> dict[str, Unread]:
    """The inverse of every storage: an int8 matrix is multiplied by its scales when it is read."""
    packed = [name for name, one in state.items() if one.dtype == torch.int8 and name + SCALE in state]
    plain = {name: one for name, one in state.items() if name.removesuffix(SCALE) not in packed}
    for name in packed:
        matrix, scale = state[name], state[name + SCALE]
        if len(matrix.shape) != 2 or scale.shape != matrix.shape[:1]:
            raise LimpetError(f"{name} {matrix.shape} has row scales {scale.shape}: save it again")
        plain[name] = Unread(matrix.shape, torch.float32, partial(_scaled, matrix, scale))
    return plain


def _scaled(matrix: Unread, scale: Unread) -> Tensor:
    return matrix.read().float().mul_(scale.read().float()[:, None])


def unpack_rows(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same for tensors in memory, with floats as float32."""
    read = {name: already_read(tensor) for name, tensor in state.items()}
    tensors = {name: one.read() for name, one in unpacked(read).items()}
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


STORAGES: dict[str, Callable[[Mapping[str, Tensor]], dict[str, Tensor]]] = {
    "float32": dict,
    "bfloat16": lambda state: {name: one.bfloat16() if one.dim() == 2 else one for name, one in state.items()},
    "int8": pack_rows,
}


def fill(
    network: nn.Module, state: Mapping[str, Unread], path: Path, what: str, device: torch.device | None = None
) -> None:
    """Give a network that is laid out without memory every one of its tensors. Raises if any does not fit.

    They are read one after the other, in the network's precision and onto the device. The frequencies of the rotation,
    which the network computes itself, need not be in a file. If they are, they must be the same."""
    own, expected = dict(network.named_buffers()), network.state_dict()
    misfits = {"missing": sorted(expected.keys() - state - own.keys()), "unexpected": sorted(state.keys() - expected)}
    misfits["misshapen"] = [
        f"{name} {one.shape}{'' if one.dtype.is_floating_point else f' of {one.dtype}'} for {tuple(size)}"
        for name, one, size in ((name, state[name], expected[name].shape) for name in expected if name in state)
        if one.shape != tuple(size) or not one.dtype.is_floating_point
    ]
    if any(misfits.values()):
        listed = "; ".join(f"{kind}: {some(names)}" for kind, names in misfits.items() if names)
        raise LimpetError(f"{path} does not fit {what} ({listed})")
    stored = [name for name in own if name in state]
    if not all(torch.allclose(state[name].read().to(own[name]), own[name], rtol=1e-2) for name in stored):
        raise LimpetError(f"{path} turns its queries and keys by other frequencies than {what}: it is another model")
    taken = {}
    for name, tensor in expected.items():
        if name not in own:
            taken[name] = state[name].read().to(device, tensor.dtype)
            refuse_nonfinite({name: taken[name]}, path, str(tensor.dtype).removeprefix("torch."))
    network.load_state_dict({**taken, **own}, assign=True)
    network.to(device).eval().requires_grad_(False)


def digest_of(state: Mapping[str, Tensor], facts: Mapping[str, object] | None = None) -> str:
    """SHA-256 of `facts`, which the tensors cannot tell, and of each tensor's name, type, shape and bytes."""
    digest = hashlib.sha256(json.dumps(dict(facts or {}), sort_keys=True).encode())
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def some(names: list[str], shown: int = 6) -> str:
    """Names for a sentence: the first few, and how many more there are."""
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest > 0 else "")
