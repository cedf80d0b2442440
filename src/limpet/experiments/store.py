"""Where results live: one immutable pair of files for each unit, written beside and renamed, checked by digests.

    units/ab/abcd.../tokens.safetensors   the tokens, and what the sampler remembered
    units/ab/abcd.../rows.json            the measurements; holds the digest of the tokens and its own seal
    plans/STUDY/abcd....json              which units a study is made of, under a digest of what it asks for
    log/                                  when and where units were made: told apart, as nothing rests on it

The rows are written last: a unit without them does not exist. A unit may name files of its own for the two. The path
may be any that fsspec knows (s3://...); a folder needs no fsspec."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import socket
import time
import uuid
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from limpet.errors import LimpetError, extra
from limpet.models.tensor_files import Unheaded, read_header

TOKENS, ROWS = "tokens.safetensors", "rows.json"
KEY = re.compile(r"[0-9a-f]{40}")
OLD = 7 * 86400.0  # seconds after which what was left half-written is nobody's any more


class Spot(NamedTuple):
    """The two files of a unit: what it holds, and the rows that seal it."""

    data: str
    rows: str


class Result(NamedTuple):
    """What a unit of tensors holds."""

    tensors: dict[str, Tensor]
    rows: dict[str, Any]


class Unwritable(LimpetError):
    """The store takes no more: no use in working on."""


class Damaged(Exception):
    """A unit that is there but does not hold what was written."""


def canonical(value: Any) -> bytes:
    """The one way to write a value as JSON: equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Store:
    """Units by key, and the plans of studies."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path).removeprefix("file://")
        self._local = "://" not in self.path
        if self._local:  # whole, so that workers elsewhere mean the same folder
            self.path = self._root = os.path.abspath(os.path.expanduser(self.path))
            return
        try:
            self._files, self._root = extra("fsspec.core", "lab").url_to_fs(self.path)
        except (ImportError, ValueError, OSError) as error:
            if isinstance(error, LimpetError):
                raise
            raise LimpetError(f"the store {self.path} cannot be opened ({error}): name a folder") from error

    # Units

    def read(self, key: str) -> Result | None:
        """A unit of tensors, None where there is none; raises Damaged where it is not what was written."""
        found = self.sealed(key, _spot(key))
        if found is None:
            return None
        data, rows = found
        try:
            read_header(io.BytesIO(data))
            return Result(safetensors.torch.load(data), rows)
        except (Unheaded, SafetensorError, KeyError) as error:
            raise Damaged(f"{TOKENS} holds no tensors") from error

    def sealed(self, key: str, at: Spot) -> tuple[bytes, dict[str, Any]] | None:
        """The bytes of a unit and its rows, None where there is none; raises Damaged."""
        raw = self._get(at.rows)
        if raw is None:
            return None
        data_name, rows_name = (name.rpartition("/")[2] for name in at)
        try:
            rows = json.loads(raw)
            del rows["seal"]
            sealed = _sealed(rows)
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise Damaged(f"{rows_name} is cut short or overwritten") from error
        if raw != sealed or rows.get("key") != key:
            raise Damaged(f"{rows_name} does not match its seal")
        # A seal shows a slip of the disk, not a hand: that these are the rows of what was asked for, the key shows.
        if key_of(rows.get("facts")) != key:
            raise Damaged(f"{rows_name} tells of other facts than its key")
        data = self._get(at.data)
        if data is None:
            raise Damaged(f"{data_name} is gone")
        if digest(data) != rows.get("tokens"):
            raise Damaged(f"{data_name} does not match its digest")
        return data, rows

    def look(self, key: str, at: Spot | None = None) -> tuple[Any, str]:
        """A unit that is there and whole; or None, and what is wrong with one that is not whole."""
        try:
            return self.read(key) if at is None else self.sealed(key, at), ""
        except Damaged as damage:
            return None, str(damage)

    def write(self, key: str, made: dict[str, Tensor] | bytes, rows: dict[str, Any], at: Spot | None = None) -> None:
        """Publish a unit. Two workers that do so at once write the same bytes, so one result stays."""
        if not isinstance(made, bytes):  # one entry of metadata: safetensors does not promise an order for more
            made = safetensors.torch.save({name: made[name].contiguous() for name in sorted(made)}, {"key": key})
        at = at or _spot(key)
        self._put(at.data, made)
        self._put(at.rows, _sealed({**rows, "key": key, "tokens": digest(made)}))

    # Plans and the log

    def write_plan(self, name: str, plan: dict[str, Any]) -> None:
        self._put(f"plans/{name}.json", json.dumps(plan, indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n")

    def read_plan(self, name: str) -> dict[str, Any]:
        """A study's plan, if it has been run and its plan is whole: cells with names, and as many keys as shards."""
        with suppress(ValueError, RecursionError, KeyError, TypeError, Damaged):
            plan: dict[str, Any] = json.loads(self._get(f"plans/{name}.json") or b"")
            canonical(plan)
            if all(type(cell["name"]) is str and _are_keys(cell["keys"], plan["shards"]) for cell in plan["cells"]):
                return plan
        raise LimpetError(f"the store {self.path} holds no run of {name.partition('/')[0]}: run the study first")

    def log(self, entry: dict[str, Any]) -> None:
        """A remark about a run on this machine; never read by the laboratory."""
        if not self._local:
            return
        path = Path(self._root) / "log" / f"{_runner()}.jsonl"
        with suppress(OSError):  # a full disk must not stop a run for the sake of a remark
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry, sort_keys=True) + "\n")

    # Files

    def _get(self, name: str) -> bytes | None:
        path = f"{self._root}/{name}"
        if self._local and os.path.lexists(path) and not os.path.isfile(path):
            raise Damaged(f"{name.rpartition('/')[2]} is no file")  # and a pipe would be waited for
        try:
            data: bytes = Path(path).read_bytes() if self._local else self._files.cat_file(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise LimpetError(f"the store {self.path} cannot be read ({error})") from error
        return data

    def _put(self, name: str, data: bytes) -> None:
        """All of a file or none of it. Object stores do so by themselves; in a folder it is written beside."""
        path, partial = f"{self._root}/{name}", f"{self._root}/partial/{_runner()}-{uuid.uuid4().hex}"
        try:
            if self._local:
                self._clear(path)
                for file in (partial, path):
                    os.makedirs(os.path.dirname(file), exist_ok=True)
                Path(partial).write_bytes(data)
                os.replace(partial, path)
            else:
                self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
                self._files.pipe_file(path, data)
        except OSError as error:
            raise Unwritable(
                f"the store {self.path} cannot be written ({error.strerror or error}): every finished unit is kept; "
                "make room or name another store, and run again"
            ) from error
        finally:  # a full disk, or Ctrl-C
            if self._local:
                with suppress(OSError):
                    os.unlink(partial)

    def _clear(self, path: str) -> None:
        """Move what is no file out of a unit's way, and what is no folder out of its folders'."""
        folder = os.path.dirname(path)
        parts = [parent for parent in map(str, Path(folder).parents) if parent.startswith(f"{self._root}/")]
        wrong = [one for one in (*parts, folder) if os.path.lexists(one) and not os.path.isdir(one)]
        wrong += [path] if os.path.isdir(path) and not os.path.islink(path) else []
        for one in wrong:
            aside = f"{self._root}/strange/{uuid.uuid4().hex}"
            os.makedirs(os.path.dirname(aside), exist_ok=True)
            os.replace(one, aside)

    def sweep(self) -> None:
        """Take away what runners left half-written that are no more: those of these processes' kind, and whatever has
        lain there for days. Whether a runner in another container or on another machine lives, nobody here can tell."""
        if not self._local:
            return
        for partial in Path(self._root).glob("partial/*"):
            runner, pid, _ = (*partial.name.rsplit("-", 2), "", "")[:3]
            with suppress(OSError):
                dead = runner == _place() and pid.isdecimal() and not _alive(int(pid))
                if dead or time.time() - partial.lstat().st_mtime > OLD:
                    partial.unlink(missing_ok=True)


def _sealed(rows: dict[str, Any]) -> bytes:
    return json.dumps(
        {**rows, "seal": digest(canonical(rows))}, sort_keys=True, indent=0, ensure_ascii=False, allow_nan=False
    ).encode()


def _spot(key: str) -> Spot:
    """Where a unit of tensors lies."""
    return Spot(f"units/{key[:2]}/{key}/{TOKENS}", f"units/{key[:2]}/{key}/{ROWS}")


def key_of(facts: Any) -> str:
    """The key of the unit that facts decide."""
    return digest(canonical(facts))[:40]


def _are_keys(keys: Any, shards: Any) -> bool:
    return len(keys) == len(shards) and all(type(key) is str and KEY.fullmatch(key) for key in keys)


@cache
def _place() -> str:
    """Where process numbers mean the same: this host, since it was started, in this namespace of processes."""
    marks = [socket.gethostname()]
    with suppress(OSError):
        marks.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        marks.append(os.readlink("/proc/self/ns/pid"))
    host = "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in marks[0])
    return f"{host}-{digest(canonical(marks))[:12]}"


def _runner() -> str:
    return f"{_place()}-{os.getpid()}"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's; or a number that no process has
        pass
    return True
