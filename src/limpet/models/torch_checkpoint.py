"""Torch's zip files (.ckpt, .pt) read as data: the pickle inside is interpreted, and no code of it is run.

A pickle is a program that may name any function and call it. Here its instructions only create numbers, strings,
containers and tensors. Anything else they name becomes `Inert`, and calling or filling it does nothing."""

from __future__ import annotations

import os
import pickletools
import zipfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pickletools import anyobject, markobject
from typing import Any

import torch
from torch import Tensor

from limpet.errors import LimpetError

MAX_PICKLE = 64 << 20  # bytes; a Lightning file's pickle, names and settings alone, takes a few megabytes
MAX_INSTRUCTIONS = 2_000_000  # of a pickle; each may take 64 bytes of memory, and a Lightning file has some 10,000
MAX_RANK = 8  # dimensions of a tensor
MAX_SIDE = 1 << 48  # elements along a dimension, or between two
MAX_NAME = 200  # characters of a class or function, or of a storage's key, that is looked for here

KINDS = ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Bool")
DTYPES: dict[str, torch.dtype] = {f"torch.{kind}Storage": getattr(torch, kind.lower()) for kind in KINDS}
DTYPES |= {"torch.CharStorage": torch.int8, "torch.ByteStorage": torch.uint8}


@dataclass(frozen=True, eq=False)
class Inert:
    """Something that the file names and that is not created."""

    name: str = ""


@dataclass(frozen=True, eq=False)
class Storage:
    """The bytes of a tensor: the zip entry data/KEY."""

    key: str
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor of the file, not yet read."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * self.storage.dtype.itemsize


def _storage(identity: Any) -> Storage | Inert:
    """What stands for bytes elsewhere in the zip: ("storage", type, key, device, elements)."""
    match identity:
        case (_, Inert(kind), str(key), *_) if kind in DTYPES and len(key) <= MAX_NAME:
            return Storage(key, DTYPES[kind])
    return Inert()


def _call(function: Any, arguments: Any) -> Any:
    """The result of a call in the pickle: an empty dict, a tensor, or something inert."""
    match function, arguments:
        case Inert("collections.OrderedDict"), ():
            return {}
        case Inert("torch._utils._rebuild_tensor_v2"), (
            Storage() as storage, int(offset), tuple(shape), tuple(stride), *_
        ):  # fmt: skip
            if len(shape) > MAX_RANK or len(shape) != len(stride):
                raise ValueError(f"a tensor has {len(shape)} sizes and {len(stride)} strides")
            if not all(type(size) is int and 0 <= size < MAX_SIDE for size in (*shape, *stride, offset)):
                raise ValueError("a tensor has a size that is negative or absurd")
            return Stored(storage, offset, shape, stride)
        case Inert("torch._utils._rebuild_parameter"), (Stored() as stored, *_):
            return stored
    return Inert()


def _named(items: list[Any]) -> dict[str, Any]:
    """Alternating keys and values as a dict of those with text keys.

    Nothing that is read here has other keys, and hashing a deeply nested one can overflow the stack."""
    return {key: value for key, value in zip(items[::2], items[1::2], strict=True) if type(key) is str}


def read_pickle(data: bytes | bytearray) -> Any:
    """The value that a pickle describes, with every class and function in it inert.

    pickletools knows what each instruction takes off the stack and whether it puts something there."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    value: Any = None
    argument: Any
    for count, (opcode, argument, _) in enumerate(pickletools.genops(bytes(data))):
        if count >= MAX_INSTRUCTIONS:
            raise ValueError(f"its pickle has more than {MAX_INSTRUCTIONS} instructions")
        name, before, after = opcode.name, opcode.stack_before, opcode.stack_after
        since_mark = markobject in before  # and what is below the mark, if the instruction takes that too
        start = marks.pop() - before.index(markobject) if since_mark else len(stack) - len(before)
        if start < 0:
            raise ValueError("its pickle takes more than it has")
        taken = stack[start:]
        del stack[start:]
        if name == "MARK":
            marks.append(len(stack))
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[int(argument)] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = taken[0]
            stack.append(taken[0])
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[int(argument)])
        elif name == "DUP":
            stack += taken * 2
        else:
            value = _value(name, argument, taken, anyobject in after)
            if after:
                stack.append(value)
    return value


def _value(name: str, argument: Any, taken: list[Any], is_object: bool) -> Any:
    """What an instruction puts on the stack, from its argument and from what it took off the stack.

    is_object: whether it may create an object of a class."""
    match name:
        case "NONE" | "NEWTRUE" | "NEWFALSE":
            return {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name]
        case "EMPTY_LIST" | "EMPTY_SET" | "LIST" | "FROZENSET":
            return taken
        case "EMPTY_TUPLE" | "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
            return tuple(taken)
        case "EMPTY_DICT" | "DICT":
            return _named(taken)
        case "APPEND" | "APPENDS" | "ADDITEMS" | "SETITEM" | "SETITEMS":
            return _filled(taken[0], taken[1:], name)
        case "GLOBAL":
            return Inert(argument.replace(" ", "."))
        case "STACK_GLOBAL":
            short = all(type(part) is str and len(part) <= MAX_NAME for part in taken)
            return Inert(".".join(taken) if short else "")
        case "REDUCE":
            return _call(*taken)
        case "BINPERSID":
            return _storage(*taken)
        case "BUILD" | "STOP":  # the state of an object is dropped
            return taken[0]
        case "NEXT_BUFFER" | "READONLY_BUFFER":
            raise ValueError("its pickle keeps buffers outside the file")
    return Inert() if is_object else argument  # an object of a class; or a number, text or bytes


def _filled(container: Any, items: list[Any], name: str) -> Any:
    """A container with more items, if it is one of the kind that the instruction fills."""
    if name.startswith("SETITEM"):
        if isinstance(container, dict):
            container.update(_named(items))
    elif isinstance(container, list):
        container.extend(items)
    return container


class TorchFile:
    """An open torch zip file: `tree` is what was saved, with a `Stored` for each tensor, and `read` reads some."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path
        with ExitStack() as stack:
            try:
                self._zip = stack.enter_context(zipfile.ZipFile(path))
                self._size = os.path.getsize(path)
                self._entries = {entry.filename: entry for entry in self._zip.infolist()}
                roots = [name.removesuffix("data.pkl") for name in self._entries if name.endswith("/data.pkl")]
                if len(roots) != 1:
                    raise ValueError(f"it has {len(roots)} entries named data.pkl, not one")
                self._root = roots[0]
                if self._root + "byteorder" in self._entries and self._bytes("byteorder", 16) != b"little":
                    raise ValueError("it was written on a big-endian machine")
                self.tree = read_pickle(self._bytes("data.pkl", MAX_PICKLE))
            except Exception as error:  # whatever goes wrong, the file caused it
                raise self._broken(error) from error
            stack.pop_all()  # the file stays open

    def __enter__(self) -> TorchFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    def read(self, wanted: Mapping[str, Stored]) -> dict[str, Tensor]:
        """The wanted tensors, each in memory of its own. Raises if they are together larger than the file."""
        if sum(stored.bytes for stored in wanted.values()) > self._size:
            raise self._broken("its tensors claim more bytes than it has")
        by_storage: dict[str, dict[str, Stored]] = {}
        for name, stored in wanted.items():
            by_storage.setdefault(stored.storage.key if stored.elements else "", {})[name] = stored
        read: dict[str, Tensor] = {}
        try:
            for key, views in by_storage.items():  # each storage once, however many tensors are parts of it
                data = self._bytes(f"data/{key}", self._size) if key else bytearray()
                read |= {name: self._tensor(stored, data, len(views) == 1) for name, stored in views.items()}
        except Exception as error:
            raise self._broken(error) from error
        return {name: read[name] for name in wanted}

    def _tensor(self, stored: Stored, data: bytearray, alone: bool) -> Tensor:
        """A tensor in memory of its own: that of its storage, if no other tensor is in it."""
        if stored.elements == 0:
            return torch.empty(stored.shape, dtype=stored.storage.dtype)
        available = len(data) // stored.storage.dtype.itemsize
        last = stored.offset + sum((n - 1) * step for n, step in zip(stored.shape, stored.stride, strict=True))
        if last >= available or stored.elements > available:
            raise ValueError("a tensor reaches beyond its bytes")
        flat = torch.frombuffer(data, dtype=stored.storage.dtype, count=available)
        view = flat.as_strided(stored.shape, stored.stride, stored.offset)
        return view if alone and view.is_contiguous() and stored.elements == available else view.contiguous().clone()

    def _bytes(self, name: str, limit: int) -> bytearray:
        entry = self._entries.get(self._root + name)
        if entry is None:
            raise ValueError(f"its entry {name} is missing")
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise ValueError(f"its entry {name} is compressed, which torch never does")
        if entry.file_size > min(limit, self._size):
            raise ValueError(f"its entry {name} claims {entry.file_size} bytes")
        return bytearray(self._zip.read(entry))

    def _broken(self, why: object) -> LimpetError:
        return LimpetError(f"{self.path} is not a checkpoint that can be read ({why}): fetch or copy it again")
