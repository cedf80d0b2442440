"""The files of results: each unit is an immutable pair of files, written atomically and checked by digests.

    units/ab/abcd.../tokens.safetensors   the tokens and the sampler's memory
    units/ab/abcd.../rows.json            the measurements, the digest of the tokens, and a checksum of its own
    plans/STUDY/abcd....json              which units a study consists of, under a digest of the study's settings
    leases/abcd...                        which units are being computed, and by which runner
    log/                                  when and where units were computed; no result depends on it

The rows are written last: a unit without them does not exist. Some units have files of other names. The path may be a
folder or any address that fsspec knows, such as s3://bucket/store."""

import hashlib
import json
import os
import socket
import time
import uuid
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
from torch import Tensor

from limpet.errors import LimpetError, import_extra

DATA, ROWS = "tokens.safetensors", "rows.json"
KEY_LENGTH = 40
ABANDONED = 7 * 86400.0  # seconds after which a partial file belongs to no living runner


class UnitPaths(NamedTuple):
    """The two files of a unit: its data, and the rows that hold the digest of the data."""

    data: str
    rows: str


class StoredUnit(NamedTuple):
    """The content of a unit whose data are tensors."""

    tensors: dict[str, Tensor]
    rows: dict[str, Any]


class StoreWriteError(LimpetError):
    """The store cannot be written, so the run must stop."""


class DamagedUnitError(Exception):
    """A unit is there but does not hold what was written."""


def canonical_json(value: Any) -> bytes:
    """A value as JSON bytes; equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest(data: bytes) -> str:
    """The SHA-256 of some bytes."""
    return hashlib.sha256(data).hexdigest()


def unit_key(facts: Any) -> str:
    """The key of the unit whose result these facts decide."""
    return digest(canonical_json(facts))[:KEY_LENGTH]


def unit_paths(key: str) -> UnitPaths:
    """The files of a unit that has no names of its own."""
    return UnitPaths(f"units/{key[:2]}/{key}/{DATA}", f"units/{key[:2]}/{key}/{ROWS}")


class Store:
    """Units by key, and the plans of studies."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path).removeprefix("file://")
        self._local = "://" not in self.path
        if self._local:  # an absolute path, so that other processes mean the same folder
            self.path = self._root = os.path.abspath(os.path.expanduser(self.path))
            return
        try:
            self._files, self._root = import_extra("fsspec.core", "lab").url_to_fs(self.path)
        except (ImportError, ValueError, OSError) as error:
            if isinstance(error, LimpetError):
                raise
            raise LimpetError(f"the store {self.path} cannot be opened ({error}): name a folder") from error

    # Units

    def read(self, key: str) -> StoredUnit | None:
        """A unit of tensors, or None if there is none; raises DamagedUnitError."""
        found = self.read_data(key, unit_paths(key))
        return found and StoredUnit(safetensors.torch.load(found[0]), found[1])

    def read_data(self, key: str, paths: UnitPaths) -> tuple[bytes, dict[str, Any]] | None:
        """The data of a unit as bytes, and its rows, or None if there is none; raises DamagedUnitError."""
        rows = self._read_rows(key, paths)
        if rows is None:
            return None
        data, name = self.content(paths.data), paths.data.rpartition("/")[2]
        if data is None:
            raise DamagedUnitError(f"{name} is missing")
        if digest(data) != rows.get("data_digest"):
            raise DamagedUnitError(f"{name} does not match its digest")
        return data, rows

    def _read_rows(self, key: str, paths: UnitPaths) -> dict[str, Any] | None:
        raw, name = self.content(paths.rows), paths.rows.rpartition("/")[2]
        if raw is None:
            return None
        try:
            rows: dict[str, Any] = json.loads(raw)
            del rows["checksum"]
            written = _with_checksum(rows)
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise DamagedUnitError(f"{name} is cut short or overwritten") from error
        if raw != written or rows.get("key") != key:
            raise DamagedUnitError(f"{name} does not match its checksum")
        # A checksum shows a fault of the disk. The key shows that these are the rows of the unit that was asked for.
        if unit_key(rows.get("facts")) != key:
            raise DamagedUnitError(f"{name} has other facts than its key")
        return rows

    def inspect(self, key: str, paths: UnitPaths | None = None) -> tuple[Any, str]:
        """What `read_data` returns and "", or None and what is wrong with the unit ("" if there is none)."""
        try:
            return self.read_data(key, paths or unit_paths(key)), ""
        except DamagedUnitError as damage:
            return None, str(damage)

    def rows(self, key: str) -> dict[str, Any] | None:
        """The rows of a whole unit of tensors, else None. Its data are there, and are not read."""
        paths = unit_paths(key)
        with suppress(DamagedUnitError):
            return self._read_rows(key, paths) if self.exists(paths.data) else None
        return None

    def write(
        self, key: str, data: dict[str, Tensor] | bytes, rows: dict[str, Any], paths: UnitPaths | None = None
    ) -> None:
        """Publish a unit. Two workers that publish the same unit write the same bytes."""
        if not isinstance(data, bytes):  # one entry of metadata: safetensors promises no order for more
            data = safetensors.torch.save({name: data[name].contiguous() for name in sorted(data)}, {"key": key})
        paths = paths or unit_paths(key)
        self.overwrite(paths.data, data)
        self.overwrite(paths.rows, _with_checksum({**rows, "key": key, "data_digest": digest(data)}))

    # Plans and the log

    def write_plan(self, name: str, plan: dict[str, Any]) -> None:
        """Write which units a study consists of."""
        self.overwrite(
            f"plans/{name}.json", json.dumps(plan, indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n"
        )

    def read_plan(self, name: str) -> dict[str, Any]:
        """A study's plan: cells with names, and one key for each seed. Raises if the study has not been run."""
        with suppress(ValueError):  # also a file that was cut short
            plan: dict[str, Any] = json.loads(self.content(f"plans/{name}.json") or b"")
            return plan
        raise LimpetError(f"the store {self.path} holds no run of {name.partition('/')[0]}: run the study first")

    def log(self, entry: dict[str, Any]) -> None:
        """Note something about a run on this machine. No result depends on it."""
        if not self._local:
            return
        path = Path(self._root) / "log" / f"{runner_id()}.jsonl"
        with suppress(OSError):  # a full disk must not stop a run for the sake of a note
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry, sort_keys=True) + "\n")

    # Files

    def exists(self, name: str) -> bool:
        """Whether a file is there; its content is not read."""
        path = f"{self._root}/{name}"
        return os.path.isfile(path) if self._local else bool(self._files.exists(path))

    def create(self, name: str, data: bytes) -> bool:
        """Write a new file; False if there is one already, in which case it is left as it is."""
        path = f"{self._root}/{name}"
        try:
            if self._local:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "xb") as file:
                    file.write(data)
            else:
                self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
                self._files.pipe_file(path, data, mode="create")
        except FileExistsError:
            return False
        except OSError as error:
            raise self._write_error(error) from error
        return True

    def remove(self, name: str) -> None:
        """Remove a file, if there is one."""
        path = f"{self._root}/{name}"
        with suppress(FileNotFoundError, NotADirectoryError):
            if self._local:
                os.unlink(path)
            else:
                self._files.rm_file(path)

    def content(self, name: str) -> bytes | None:
        """The bytes of a file, or None if there is none."""
        path = f"{self._root}/{name}"
        try:
            data: bytes = Path(path).read_bytes() if self._local else self._files.cat_file(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise LimpetError(f"the store {self.path} cannot be read ({error})") from error
        return data

    def overwrite(self, name: str, data: bytes) -> None:
        """Write all of a file or none of it, in the place of an earlier one. Object stores do so by themselves."""
        path, partial = f"{self._root}/{name}", f"{self._root}/partial/{runner_id()}-{uuid.uuid4().hex}"
        try:
            if self._local:
                for file in (partial, path):
                    os.makedirs(os.path.dirname(file), exist_ok=True)
                Path(partial).write_bytes(data)
                os.replace(partial, path)
            else:
                self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
                self._files.pipe_file(path, data)
        except OSError as error:
            raise self._write_error(error) from error
        finally:  # after a full disk or Ctrl-C
            if self._local:
                with suppress(OSError):
                    os.unlink(partial)

    def _write_error(self, error: OSError) -> StoreWriteError:
        return StoreWriteError(
            f"the store {self.path} cannot be written ({error.strerror or error}): every finished unit is kept; "
            "make room or name another store, and run again"
        )

    def remove_partial_files(self) -> None:
        """Remove the partial files and leases of runners that have died on this machine, and those older than a week.

        Nobody here can tell whether a runner in another container or on another machine is alive."""
        if not self._local:
            return
        for partial in Path(self._root).glob("partial/*"):
            with suppress(OSError):
                if is_dead(partial.name.rpartition("-")[0]) or _is_abandoned(partial):
                    partial.unlink(missing_ok=True)
        for lease in Path(self._root).glob("leases/*"):
            with suppress(OSError, ValueError):
                if is_dead(lease.read_text().partition(" ")[0]) or _is_abandoned(lease):
                    lease.unlink(missing_ok=True)


def _is_abandoned(path: Path) -> bool:
    return time.time() - path.lstat().st_mtime > ABANDONED


def _with_checksum(rows: dict[str, Any]) -> bytes:
    checked = {**rows, "checksum": digest(canonical_json(rows))}
    return json.dumps(checked, sort_keys=True, indent=0, ensure_ascii=False, allow_nan=False).encode()


# Runners


@cache
def process_space() -> str:
    """Where process numbers mean the same: this host since it was started, in this namespace of processes."""
    marks = [socket.gethostname()]
    with suppress(OSError):
        marks.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        marks.append(os.readlink("/proc/self/ns/pid"))
    host = "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in marks[0])
    return f"{host}-{digest(canonical_json(marks))[:12]}"


def runner_id() -> str:
    """The name of this process among all that work on a store."""
    return f"{process_space()}-{os.getpid()}"


def is_dead(runner: str) -> bool:
    """Whether a runner was a process of this machine that has ended; False where nobody here can tell."""
    space, _, pid = runner.rpartition("-")
    return space == process_space() and pid.isdecimal() and not _is_alive(int(pid))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's process, or a number that no process has
        pass
    return True
