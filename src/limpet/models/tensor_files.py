"""Tensors on disk: safetensors read with suspicion, matrices stored small, and a digest of what was read.

What a file holds is known before any of it is read (`Unread`); a network then takes its tensors one by one, each in
its own precision and where it will run. So nothing is ever held twice, however large the model."""

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
from limpet.files import opened, whole

HEADER = 4 << 20  # bytes of a safetensors header: room for some ten thousand tensors
RANK = 8  # dimensions of a tensor
SCALE = ".scale"  # an int8 matrix X has its rows' scales beside it, as X.scale


DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class Unread(NamedTuple):
    """A tensor that need not have been read yet: what is known of it, and how to get it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


def held(tensor: Tensor) -> Unread:
    """A tensor that is there already."""
    return Unread(tuple(tensor.shape), tensor.dtype, lambda: tensor)


class Unheaded(Exception):
    """A safetensors file whose header is none, or absurd."""


def read_header(file: IO[bytes]) -> tuple[int, dict[str, Any]]:
    """Where the tensors' bytes begin, and what is said of each; raises unless that is little, and of few dimensions.
    All else the library holds against the file's size before it allocates anything: each offset, and each shape."""
    size = int.from_bytes(file.read(8), "little")
    if size > HEADER:
        raise Unheaded(f"its header claims {size} bytes")
    try:
        tensors = json.loads(file.read(size), object_pairs_hook=unrepeated)
        tensors.pop("__metadata__", None)
        ranks = [len(about["shape"]) for about in tensors.values()]
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
        raise Unheaded(f"its header is no list of tensors: {error}") from error
    if max(ranks, default=0) > RANK:
        raise Unheaded(f"it has a tensor of {max(ranks)} dimensions")
    return 8 + size, tensors


def open_tensors(path: str | os.PathLike[str]) -> dict[str, Unread]:
    """Every tensor of a safetensors file; a file that is broken is refused now, NaN and infinity when they are read.

    Bytes are copied out of the file and never mapped: a mapped file counts as memory beside its copy, and one that
    someone rewrites in place would change the model under its digest."""
    try:
        with opened(path) as file:
            begin, header = read_header(file)
        with safe_open(path, framework="pt"):  # the library holds every offset against its shape and the file's size
            pass
        return {name: _unread(path, name, begin, **about) for name, about in header.items()}
    except LimpetError:
        raise
    except (SafetensorError, OSError, Unheaded, ValueError, TypeError) as error:
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
    """The tensor whose bytes begin there, if they are all there and numbers."""
    tensor = torch.empty(shape, dtype=dtype)
    rest = tensor.reshape(-1).view(torch.uint8).numpy().data
    try:
        with opened(path) as file:
            file.seek(begin)
            while rest and (count := file.readinto(rest)):
                rest = rest[count:]
    except OSError as error:
        raise LimpetError(f"{path} cannot be read ({error.strerror}): check the disk") from error
    if rest:
        raise LimpetError(f"{path} has lost the bytes of {name} since it was opened: fetch or copy it again")
    refuse_nonfinite({name: tensor}, path)
    return tensor


def unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, unless it says anything twice."""
    said = dict(pairs)
    if len(said) < len(pairs):
        often = Counter(name for name, _ in pairs)
        raise ValueError(f"it says {often.most_common(1)[0][0]} twice")
    return said


def read_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, as stored; a file that is broken, or holds NaN or infinity, is refused."""
    return {name: unread.read() for name, unread in open_tensors(path).items()}


def refuse_nonfinite(state: Mapping[str, Tensor], path: str | os.PathLike[str], stored: str = "") -> None:
    """Raise for what is no number; `stored` names the type that a file's finite numbers were brought to."""
    bad = [name for name, tensor in state.items() if tensor.is_floating_point() and not _finite(tensor)]
    if bad and stored:
        raise LimpetError(f"{path} holds numbers too large for {stored} in {some(bad)}: use another precision or model")
    if bad:
        raise LimpetError(f"{path} holds NaN or infinity in {some(bad)}: use a checkpoint from before training broke")


def _finite(tensor: Tensor) -> bool:
    """Whether all are numbers; without a tensor of answers, as the extremes tell: both are NaN where one is."""
    return not tensor.numel() or all(extreme.isfinite() for extreme in tensor.aminmax())


def write_tensors(path: Path, state: Mapping[str, Tensor], about: Mapping[str, str] = {"format": "pt"}) -> None:
    """A safetensors file that appears whole or not at all; what it is about stands in its metadata."""
    try:
        with whole(path) as partial:
            tensors = {name: tensor.contiguous() for name, tensor in state.items()}
            if partial == path:  # a pipe or a device, whose place the library would take
                partial.write_bytes(save(tensors, dict(about)))
            else:
                save_file(tensors, partial, dict(about))
                partial.chmod(0o644)  # safetensors makes it the owner's alone
    except (SafetensorError, OSError) as error:
        raise LimpetError(f"{path} could not be written ({error}): free some space or name another folder") from error


def pack_rows(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each matrix as int8 times one float32 scale a row; all else as it is.

    Scales keep 16 bits of mantissa, so that scale times int8 is exact in float32 and packing what was unpacked
    gives back the same bits."""
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
    """The inverse of every storage: int8 rows times their scales, and any other float, as they are read."""
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
    """The same for tensors that are there, floats as float32."""
    read = {name: one.read() for name, one in unpacked({name: held(one) for name, one in state.items()}).items()}
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in read.items()}


STORAGES: dict[str, Callable[[Mapping[str, Tensor]], dict[str, Tensor]]] = {
    "float32": dict,
    "bfloat16": lambda state: {name: one.bfloat16() if one.dim() == 2 else one for name, one in state.items()},
    "int8": pack_rows,
}


def fill(
    network: nn.Module, state: Mapping[str, Unread], path: Path, what: str, device: torch.device | None = None
) -> None:
    """Give a network, laid out without memory, every one of its tensors and none else, or say what does not fit.

    Each is read when its turn comes, in the network's precision and onto the device. What the network computes itself,
    the frequencies of its rotation, a file need not hold; but if it does, they are those."""
    own, expected = dict(network.named_buffers()), network.state_dict()
    misfits = {"missing": sorted(expected.keys() - state - own.keys()), "unexpected": sorted(state.keys() - expected)}
    misfits["misshapen"] = [
        f"{name} {given.shape}{'' if given.dtype.is_floating_point else f' of {given.dtype}'} for {tuple(size)}"
        for name, given, size in ((name, state[name], expected[name].shape) for name in expected if name in state)
        if given.shape != tuple(size) or not given.dtype.is_floating_point
    ]
    if any(misfits.values()):
        listed = "; ".join(f"{kind}: {some(names)}" for kind, names in misfits.items() if names)
        raise LimpetError(f"{path} does not fit {what} ({listed})")
    told = [name for name in own if name in state]
    if not all(torch.allclose(state[name].read().to(own[name]), own[name], rtol=1e-2) for name in told):
        raise LimpetError(f"{path} turns its queries and keys by other frequencies than {what}: it is another model")
    taken = {}
    for name, tensor in expected.items():
        if name not in own:
            taken[name] = state[name].read().to(device, tensor.dtype)
            refuse_nonfinite({name: taken[name]}, path, str(tensor.dtype).removeprefix("torch."))
    network.load_state_dict({**taken, **own}, assign=True)
    network.to(device).eval().requires_grad_(False)


def digest_of(state: Mapping[str, Tensor], facts: Mapping[str, object] | None = None) -> str:
    """SHA-256 of the facts that tensors cannot tell, and of each tensor's name, dtype, shape and bytes, by name."""
    digest = hashlib.sha256(json.dumps(dict(facts or {}), sort_keys=True).encode())
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def some(names: list[str], shown: int = 6) -> str:
    """A list for a sentence: the first few, and how many more."""
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest > 0 else "")
