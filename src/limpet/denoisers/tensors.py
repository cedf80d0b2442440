"""Tensors on disk: safetensors read with suspicion, matrices stored small, and a digest of what was read."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from limpet.errors import LimpetError
from limpet.files import whole

SCALE = ".scale"  # an int8 matrix X has its rows' scales beside it, as X.scale


def read_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, as stored; a file that is broken, or holds NaN or infinity, is refused.

    The library holds each offset in the header against its shape and the file's size before it allocates anything."""
    try:
        mapped = load_file(path)
    except (SafetensorError, OSError) as error:
        raise LimpetError(f"{path} is not a whole safetensors file ({error}): fetch or copy it again") from error
    # A copy, because a mapped file that someone rewrites in place would change the model under its digest.
    state = {name: tensor.clone() for name, tensor in mapped.items()}
    refuse_nonfinite(state, path)
    return state


def refuse_nonfinite(state: Mapping[str, Tensor], path: str | os.PathLike[str]) -> None:
    bad = [name for name, tensor in state.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if bad:
        raise LimpetError(f"{path} holds NaN or infinity in {some(bad)}: use a checkpoint from before training broke")


def write_tensors(path: Path, state: Mapping[str, Tensor], about: Mapping[str, str] = {"format": "pt"}) -> None:
    """A safetensors file that appears whole or not at all; what it is about stands in its metadata."""
    try:
        with whole(path) as partial:
            save_file({name: tensor.contiguous() for name, tensor in state.items()}, partial, metadata=dict(about))
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


def unpack_rows(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of every storage: int8 rows times their scales, and any other float, as float32."""
    packed = [name for name, tensor in state.items() if tensor.dtype == torch.int8 and name + SCALE in state]
    plain = {name: tensor for name, tensor in state.items() if name.removesuffix(SCALE) not in packed}
    unpacked = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in plain.items()}
    for name in packed:
        matrix, scale = state[name], state[name + SCALE]
        if matrix.dim() != 2 or scale.shape != matrix.shape[:1]:
            raise LimpetError(f"{name} {tuple(matrix.shape)} has row scales {tuple(scale.shape)}: save it again")
        unpacked[name] = matrix.float() * scale.float()[:, None]
    return unpacked


STORAGES: dict[str, Callable[[Mapping[str, Tensor]], dict[str, Tensor]]] = {
    "float32": dict,
    "bfloat16": lambda state: {name: one.bfloat16() if one.dim() == 2 else one for name, one in state.items()},
    "int8": pack_rows,
}


def fill(network: nn.Module, state: Mapping[str, Tensor], path: Path, what: str) -> None:
    """Give a network, laid out without memory, every one of its tensors and none else, or say what does not fit.

    What it computes itself, the frequencies of its rotation, a file need not hold; but if it does, they are those."""
    own = dict(network.named_buffers())
    state = {**own, **state}
    expected = network.state_dict()
    misfits = {"missing": sorted(expected.keys() - state), "unexpected": sorted(state.keys() - expected)}
    misfits["misshapen"] = [
        f"{name} {tuple(given.shape)}{'' if given.is_floating_point() else f' of {given.dtype}'} for {tuple(size)}"
        for name, given, size in ((name, state[name], expected[name].shape) for name in expected if name in state)
        if given.shape != size or not given.is_floating_point()
    ]
    if any(misfits.values()):
        listed = "; ".join(f"{kind}: {some(names)}" for kind, names in misfits.items() if names)
        raise LimpetError(f"{path} does not fit {what} ({listed})")
    if not all(torch.allclose(state[name], buffer, rtol=1e-2) for name, buffer in own.items()):
        raise LimpetError(f"{path} turns its queries and keys by other frequencies than {what}: it is another model")
    network.load_state_dict({**state, **own}, assign=True)
    network.eval().requires_grad_(False)


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
