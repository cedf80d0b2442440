"""Where results live: one immutable pair of files for each unit, written beside and renamed, checked by digests.

    units/ab/abcd.../tokens.safetensors   the tokens, and what the sampler remembered
    units/ab/abcd.../rows.json            the measurements; holds the digest of the tokens and its own seal
    plans/STUDY.json                      which units a study is made of
    log/                                  when and where units were made: told apart, as nothing rests on it

The rows are written last: a unit without them does not exist. The path may be any that fsspec knows (s3://...)."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
from torch import Tensor

from limpet.errors import LimpetError, extra

TOKENS, ROWS = "tokens.safetensors", "rows.json"


class Result(NamedTuple):
    """What a unit holds."""

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
        self.path = os.fspath(path)
        try:
            self._files, self._root = extra("fsspec.core", "lab").url_to_fs(self.path)
        except (ImportError, ValueError, OSError) as error:
            raise LimpetError(f"the store {self.path} cannot be opened ({error}): name a folder") from error
        self._local = "file" in (self._files.protocol if isinstance(self._files.protocol, tuple) else ())
        if self._local:
            self.path = self._root  # whole, so that workers elsewhere mean the same folder

    # Units

    def read(self, key: str) -> Result | None:
        """A unit, None where there is none; raises Damaged where it is not what was written."""
        raw = self._get(f"{self._folder(key)}/{ROWS}")
        if raw is None:
            return None
        try:
            rows = json.loads(raw)
            del rows["seal"]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise Damaged(f"{ROWS} is cut short or overwritten") from error
        if raw != _sealed(rows) or rows.get("key") != key:
            raise Damaged(f"{ROWS} does not match its seal")
        tokens = self._get(f"{self._folder(key)}/{TOKENS}")
        if tokens is None:
            raise Damaged(f"{TOKENS} is gone")
        if digest(tokens) != rows["tokens"]:
            raise Damaged(f"{TOKENS} does not match its digest")
        return Result(safetensors.torch.load(tokens), rows)

    def look(self, key: str) -> tuple[Result | None, str]:
        """A unit that is there and whole; or None, and what is wrong with one that is not whole."""
        try:
            return self.read(key), ""
        except Damaged as damage:
            return None, str(damage)

    def write(self, key: str, tensors: dict[str, Tensor], rows: dict[str, Any]) -> None:
        """Publish a unit. Two workers that do so at once write the same bytes, so one result stays."""
        # One entry of metadata: safetensors does not promise an order for more.
        tokens = safetensors.torch.save({name: tensors[name].contiguous() for name in sorted(tensors)}, {"key": key})
        folder = self._folder(key)
        self._put(f"{folder}/{TOKENS}", tokens)
        self._put(f"{folder}/{ROWS}", _sealed({**rows, "key": key, "tokens": digest(tokens)}))

    def _folder(self, key: str) -> str:
        return f"units/{key[:2]}/{key}"

    # Plans and the log

    def write_plan(self, name: str, plan: dict[str, Any]) -> None:
        self._put(f"plans/{name}.json", json.dumps(plan, indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n")

    def read_plan(self, name: str) -> dict[str, Any]:
        """A study's plan, if it has been run and its plan is whole."""
        raw = self._get(f"plans/{name}.json") or b""
        with suppress(ValueError):
            if isinstance(plan := json.loads(raw), dict):
                return plan
        raise LimpetError(f"the store {self.path} holds no run of {name}: run the study first")

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
        try:
            data: bytes = self._files.cat_file(f"{self._root}/{name}")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise LimpetError(f"the store {self.path} cannot be read ({error})") from error
        return data

    def _put(self, name: str, data: bytes) -> None:
        """All of a file or none of it. Object stores do so by themselves; in a folder it is written beside."""
        path = f"{self._root}/{name}"
        partial = f"{self._root}/partial/{_runner()}-{uuid.uuid4().hex}" if self._local else path
        try:
            for file in (partial, path):
                self._files.makedirs(file.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(partial, data)
            if self._local:
                os.replace(partial, path)
        except OSError as error:
            raise Unwritable(
                f"the store {self.path} cannot be written ({error.strerror or error}): every finished unit is kept; "
                "make room or name another store, and run again"
            ) from error
        finally:  # a full disk, or Ctrl-C
            if self._local:
                with suppress(OSError):
                    os.unlink(partial)

    def sweep(self) -> None:
        """Take away what runners of this machine that are no more left half-written."""
        if not self._local:
            return
        for partial in Path(self._root).glob("partial/*"):
            host, pid, _ = (*partial.name.rsplit("-", 2), "", "")[:3]
            if host == _host() and pid.isdigit() and not _alive(int(pid)):
                partial.unlink(missing_ok=True)


def _sealed(rows: dict[str, Any]) -> bytes:
    return json.dumps(
        {**rows, "seal": digest(canonical(rows))}, sort_keys=True, indent=0, ensure_ascii=False, allow_nan=False
    ).encode()


def _host() -> str:
    return socket.gethostname().replace("/", "_")


def _runner() -> str:
    return f"{_host()}-{os.getpid()}"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)  # it may be another user's
    return True
