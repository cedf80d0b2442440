"""Reading and writing files: atomic writes, texts in UTF-8, JSON lines, and TOML as dataclasses."""

import errno
import json
import lzma
import os
import re
import stat
import sys
import tomllib
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from io import BufferedReader
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from limpet.errors import LimpetError, unknown_name

Name = str | os.PathLike[str]
T = TypeVar("T")
MAX_STEM = 50  # characters of its name that a partial file keeps: a file's name has at most 255 bytes
BARE = re.compile(r"[\w-]+")  # keys that TOML takes without quotes
KINDS = {
    stat.S_ISDIR: "a folder",
    stat.S_ISFIFO: "a pipe",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}
INHERITED = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")  # pipes from the shell, as in `limpet score <(...)`


class NotAFile(OSError):
    """A path of something other than a regular file."""

    def __str__(self) -> str:
        return str(self.strerror)


@contextmanager
def open_regular(path: Name, most: int | None = None) -> Iterator[BufferedReader]:
    """Open a regular file of at most `most` bytes for reading. A pipe or a device, which may never end, is refused."""
    with open(path, "rb", opener=lambda name, flags: os.open(_regular(name), flags | os.O_NONBLOCK)) as file:
        _regular(path, os.fstat(file.fileno()))
        size = os.fstat(file.fileno()).st_size
        if most is not None and size > most:
            raise LimpetError(f"{path} has {size} bytes, and more than {most} is no such file: check the path")
        yield file


def _regular(path: Name, status: os.stat_result | None = None) -> Name:
    mode = (os.stat(path) if status is None else status).st_mode
    kind = next((words for is_kind, words in KINDS.items() if is_kind(mode)), None)
    if kind is not None:
        raise NotAFile(errno.EINVAL, f"it is {kind}, and a file is needed")
    return path


@contextmanager
def atomic_path(path: Name) -> Iterator[Path]:
    """A file beside the path to write to, which then replaces it. A reader finds the old content or the new."""
    path = Path(path)
    if path.exists() and not path.is_file():  # a pipe or a terminal, which cannot be replaced
        yield path
        return
    path = path.resolve()  # a link stays a link
    partial = path.with_name(f"{path.name[:MAX_STEM]}.{uuid.uuid4().hex[:8]}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_file(path: Name, data: bytes | str) -> None:
    """Write bytes or a text to a file, which appears whole or not at all."""
    try:
        with atomic_path(path) as partial:
            partial.write_bytes(data.encode() if isinstance(data, str) else data)
    except OSError as error:
        raise LimpetError(f"{path} cannot be written ({error.strerror or error}): name another file") from error


def read_text(path: Name, advice: str) -> str:
    """The text of a file, plain or .xz, or of standard input for "-", without a byte-order mark.

    `advice` ends the error for a file that cannot be read."""
    try:
        if path == "-":
            return sys.stdin.buffer.read().decode("utf-8-sig")
        if os.fspath(path).startswith(INHERITED):
            return Path(path).read_bytes().decode("utf-8-sig")
        with open_regular(path) as file:
            content = file.read()
            return (lzma.decompress(content) if str(path).endswith(".xz") else content).decode("utf-8-sig")
    except (OSError, ValueError, lzma.LZMAError) as error:
        if isinstance(error, LimpetError):
            raise
        raise LimpetError(f"{path} cannot be read ({error}): {advice}") from error


# Several texts in one file

SEPARATOR = "\f"  # a form feed, on a line of its own after each text that `limpet sample` prints into a pipe


def json_row(line: str, where: str) -> Any:
    """The value of one line of JSON lines. `where` names the line in the error."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LimpetError(
            f"{where} is not JSON ({error}): write one object on each line, or end its name in .txt"
        ) from error


def json_texts(content: str, path: Name) -> list[str] | None:
    """The texts of JSON lines, each a string or an object with "prompt" or "text". None for a file of another kind.

    A file is of this kind if its name ends in .jsonl, or if it begins with an object and its name is not .txt."""
    name = os.fspath(path).removesuffix(".xz")
    if not name.endswith(".jsonl") and (name.endswith(".txt") or not content.lstrip().startswith("{")):
        return None
    texts = []
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        row = json_row(line, f"line {number} of {path}")
        text = row.get("prompt", row.get("text")) if isinstance(row, dict) else row
        if not isinstance(text, str):
            raise LimpetError(f'line {number} of {path} has no text: write {{"text": "..."}}, or a string in quotes')
        texts.append(text)
    return texts


def read_prompts(path: Name) -> list[str]:
    """The prompts of a file: one a line, or JSON lines, whose prompts may hold newlines."""
    content = read_text(path, "name a text file, one prompt a line, or JSON lines")
    prompts = json_texts(content, path)
    if prompts is None:
        prompts = [line.removesuffix("\r") for line in content.split("\n") if line.strip()]
    if not prompts:
        raise LimpetError(f"{path} holds no prompt: write one a line, or JSON lines")
    return prompts


def documents(content: str, path: Name) -> list[str]:
    """The parts of a text between blank lines, or the texts of JSON lines, which may hold blank lines."""
    texts = json_texts(content, path)
    parts = content.replace("\r\n", "\n").split("\n\n") if texts is None else texts
    return [part.strip("\n") for part in parts if part.strip()]


# TOML as dataclasses

WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", dict: "a table"}


class Toml:
    """The content of a TOML file, to be read into dataclasses.

    `Toml(path, "name a recipe").build(Recipe)` is the whole file as a Recipe. An error names the file and the field,
    as in `recipe.toml, [run] rate: ...`. So does an error from the `__post_init__` of a dataclass."""

    def __init__(self, path: Name, advice: str) -> None:
        self.path = Path(path)
        text = read_text(path, advice)
        try:
            self.content = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # of numbers too long and of tables too deep, too
            raise LimpetError(f"{path} is not TOML: {error}") from error

    @contextmanager
    def at(self, *keys: Any) -> Iterator[None]:
        """Errors raised inside are of this field: say where it is."""
        try:
            yield
        except LimpetError as error:
            place = self._place(keys)
            raise LimpetError(f"{self.path}{', ' if place else ''}{place}: {error}") from error

    def check_name(self, known: Iterable[str], what: str, name: str, *keys: Any) -> None:
        """Raise where a name is not known. `what` begins the error, such as "no sampler has a parameter"."""
        with self.at(*keys):
            if name not in known:
                raise unknown_name(what, name, known)

    def build(self, kind: type[T], value: Any = None, *keys: Any) -> T:
        """A table as a dataclass.

        value: the table, which may be a text if only the first field is given (default: the whole file). keys: where
        it is in the file."""
        value, hints = self.content if value is None else value, get_type_hints(kind)
        needed = [one.name for one in fields(kind) if one.default is one.default_factory is MISSING]  # type: ignore[arg-type]
        table, name = {needed[0]: value} if isinstance(value, str) else value, keys[0] if keys else "the file"
        with self.at(*keys):
            if not isinstance(table, dict) or not set(needed) <= set(table):
                raise LimpetError(f"{name} has {value!r}; it takes {' and '.join(needed)}, of {', '.join(hints)}")
        for field in table:
            self.check_name(hints, f"{name} has no field", field, *keys, field)
        values = {field: self._value(hints[field], one, *keys, field) for field, one in table.items()}
        with self.at(*keys):
            return kind(**values)

    def _value(self, kind: Any, value: Any, *keys: Any) -> Any:
        """A value converted to its type: a list to a tuple, for example."""
        kind = get_args(kind)[0] if isinstance(kind, UnionType) else kind  # a field that may be None is left out for it
        origin, items = get_origin(kind) or kind, get_args(kind)
        if isinstance(kind, type) and is_dataclass(kind):
            return self.build(kind, value, *keys)
        if not _fits(kind, value):
            with self.at(*keys):
                raise LimpetError(f"{keys[-1]} is {value!r}; it takes {_takes(kind)}")
        if origin in (list, tuple):
            return origin(self._value(items[0], one, *keys, i) for i, one in enumerate(value))
        if origin is dict:
            return {name: self._value(items[1], one, *keys, name) for name, one in value.items()}
        return value

    def _place(self, keys: tuple[Any, ...]) -> str:
        """A field's place as TOML writes it: [table] field, and for an entry of a list its number from 1."""
        node: Any = self.content
        for key in keys:
            try:
                node = node[key]
            except (LookupError, TypeError):  # a field that the file does not have
                node = None
        table, last = (keys, ()) if isinstance(node, dict) else (keys[:-1], keys[-1:])
        parts = [_joined(part) for part in (table, last)]
        return " ".join([f"[{parts[0]}]"] * bool(parts[0]) + [parts[1]] * bool(parts[1]))


def _joined(keys: Iterable[Any]) -> str:
    """Keys with dots between them; an index as #1."""
    texts = [f" #{key + 1}" if type(key) is int else "." + (key if BARE.fullmatch(key) else repr(key)) for key in keys]
    return "".join(texts).lstrip(". ")


def _fits(kind: Any, value: Any) -> bool:
    """Whether a value is of a type that is no dataclass."""
    origin, items = get_origin(kind) or kind, get_args(kind)
    if origin in (list, tuple):
        return isinstance(value, list) and all(_fits(items[0], one) for one in value)
    if origin is Literal:
        return value in items
    return origin not in WORDS or type(value) is origin or (origin is float and type(value) is int)


def _takes(kind: Any) -> str:
    origin, items = get_origin(kind) or kind, get_args(kind)
    if origin in (list, tuple):
        return f"a list, each {_takes(items[0])}"
    return f"one of {', '.join(items)}" if origin is Literal else WORDS.get(origin, "a table")
