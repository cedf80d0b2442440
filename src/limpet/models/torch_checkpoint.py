"""Torch's zip files (.ckpt, .pt) read as data: the pickle inside is walked, never run.

A pickle is a program that may name any function and call it. Here its instructions drive a small machine that knows
numbers, strings, containers and tensors; anything else they name is `Inert`, and calling or filling it does nothing.
"""

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

PICKLE_LIMIT = 64 << 20  # bytes of pickle: names and settings alone, a Lightning file's takes a few megabytes
RANK, SIDE = 8, 1 << 48  # more dimensions, or elements along one or between two, than any tensor has
NAME = 200  # characters of a class or function, or of a storage's key: a longer one is none that is sought here

KINDS = ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Bool")
DTYPES: dict[str, torch.dtype] = {f"torch.{kind}Storage": getattr(torch, kind.lower()) for kind in KINDS}
DTYPES |= {"torch.CharStorage": torch.int8, "torch.ByteStorage": torch.uint8}


@dataclass(frozen=True, eq=False)
class Inert:
    """Something the file names, and nothing more."""

    name: str = ""


@dataclass(frozen=True, eq=False)
class Storage:
    """Where a tensor's bytes lie: the zip entry data/KEY."""

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
    """A pickle's word for bytes kept elsewhere in the zip: ("storage", type, key, device, elements)."""
    match identity:
        case (_, Inert(kind), str(key), *_) if kind in DTYPES and len(key) <= NAME:
            return Storage(key, DTYPES[kind])
    return Inert()


def _call(function: Any, arguments: Any) -> Any:
    """What a call in the pickle yields: an empty dict, a tensor, or nothing that can act."""
    match function, arguments:
        case Inert("collections.OrderedDict"), ():
            return {}
        case Inert("torch._utils._rebuild_tensor_v2"), (
            Storage() as storage, int(offset), tuple(shape), tuple(stride), *_
        ):  # fmt: skip
            if len(shape) > RANK or len(shape) != len(stride):
                raise ValueError(f"a tensor has {len(shape)} sizes and {len(stride)} strides")
            if not all(type(size) is int and 0 <= size < SIDE for size in (*shape, *stride, offset)):
                raise ValueError("a tensor has a size that is negative or absurd")
            return Stored(storage, offset, shape, stride)
        case Inert("torch._utils._rebuild_parameter"), (Stored() as stored, *_):
            return stored
    return Inert()


def _named(items: list[Any]) -> dict[str, Any]:
    """Keys and values in turn as a dict. Text keys alone: nothing sought here has others, and hashing what a stranger
    nested can overflow the stack."""
    return {key: value for key, value in zip(items[::2], items[1::2], strict=True) if type(key) is str}


def walk_pickle(data: bytes | bytearray) -> Any:
    """The value that a pickle describes, with every class and function in it inert.

    The standard library knows of each instruction what it takes off the stack and whether it puts something there."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    argument: Any
    made: Any = None
    for opcode, argument, _ in pickletools.genops(bytes(data)):
        before, after = opcode.stack_before, opcode.stack_after
        since_mark = markobject in before  # and what stands below the mark, if it takes that too
        start = marks.pop() - before.index(markobject) if since_mark else len(stack) - len(before)
        if start < 0:
            raise ValueError("its pickle takes more than it has")
        taken = stack[start:]
        del stack[start:]
        match opcode.name:
            case "MARK":
                marks.append(len(stack))
                continue
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                memo[int(argument)] = stack[-1]
            case "MEMOIZE":
                made = memo[len(memo)] = taken[0]
            case "GET" | "BINGET" | "LONG_BINGET":
                made = memo[int(argument)]
            case "DUP":
                (made,) = taken
                stack.append(made)
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                made = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[opcode.name]
            case "EMPTY_LIST" | "EMPTY_SET" | "LIST" | "FROZENSET":
                made = taken
            case "EMPTY_TUPLE" | "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                made = tuple(taken)
            case "EMPTY_DICT" | "DICT":
                made = _named(taken)
            case "APPEND" | "APPENDS" | "ADDITEMS":
                made, *items = taken
                if isinstance(made, list):
                    made.extend(items)
            case "SETITEM" | "SETITEMS":
                made, *items = taken
                if isinstance(made, dict):
                    made.update(_named(items))
            case "GLOBAL":
                made = Inert(argument.replace(" ", "."))
            case "STACK_GLOBAL":
                short = all(type(part) is str and len(part) <= NAME for part in taken)
                made = Inert(".".join(taken) if short else "")
            case "REDUCE":
                made = _call(*taken)
            case "BINPERSID":
                made = _storage(*taken)
            case "BUILD" | "STOP":  # a state is dropped; what it was for stays as it was
                made = taken[0]
            case "NEXT_BUFFER" | "READONLY_BUFFER":
                raise ValueError("its pickle keeps buffers outside the file")
            case _:  # a number, text or bytes, which the instruction carries; or an object of a class
                made = Inert() if anyobject in after else argument
        if after:
            stack.append(made)
    return made


class TorchFile:
    """An open torch zip file: `tree` is what was saved, with `Stored` for each tensor; `read` fetches some of them."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path
        with ExitStack() as opened:
            try:
                self._zip = opened.enter_context(zipfile.ZipFile(path))
                self._size = os.path.getsize(path)
                self._entries = {entry.filename: entry for entry in self._zip.infolist()}
                roots = [name.removesuffix("data.pkl") for name in self._entries if name.endswith("/data.pkl")]
                if len(roots) != 1:
                    raise ValueError(f"it has {len(roots)} entries named data.pkl, not one")
                self._root = roots[0]
                if self._root + "byteorder" in self._entries and self._bytes("byteorder", 16) != b"little":
                    raise ValueError("it was written on a big-endian machine")
                self.tree = walk_pickle(self._bytes("data.pkl", PICKLE_LIMIT))
            except Exception as error:  # whatever goes wrong while a stranger's file is taken apart is the file's doing
                raise self._broken(error) from error
            opened.pop_all()  # it stays open

    def __enter__(self) -> TorchFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    def read(self, wanted: Mapping[str, Stored]) -> dict[str, Tensor]:
        """The wanted tensors, each in memory of its own, and together no larger than the file."""
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
        """A tensor in memory of its own: that of its storage, if it is all of it and no other's."""
        if stored.elements == 0:
            return torch.empty(stored.shape, dtype=stored.storage.dtype)
        held = len(data) // stored.storage.dtype.itemsize
        last = stored.offset + sum((n - 1) * step for n, step in zip(stored.shape, stored.stride, strict=True))
        if last >= held or stored.elements > held:
            raise ValueError("a tensor reaches beyond its bytes")
        flat = torch.frombuffer(data, dtype=stored.storage.dtype, count=held)
        view = flat.as_strided(stored.shape, stored.stride, stored.offset)
        return view if alone and view.is_contiguous() and stored.elements == held else view.contiguous().clone()

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
