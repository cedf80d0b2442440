"""Files that appear whole or not at all, texts in UTF-8, one a line or as JSON lines, and TOML as dataclasses, with a
sentence for what is wrong."""

from __future__ import annotations

import errno
import json
import os
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

from limpet.errors import LimpetError, unknown

Name = str | os.PathLike[str]
T = TypeVar("T")


KINDS = {stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket", stat.S_ISCHR: "a device",
         stat.S_ISBLK: "a device"}  # fmt: skip
OPEN = (
    "/dev/fd/",
    "/dev/stdin",
    "/proc/self/fd/",
)  # pipes that somebody writes to already, as in `limpet score <(...)`


class NoFile(OSError):
    """Something that has a path, and is no file."""

    def __str__(self) -> str:
        return str(self.strerror)


@contextmanager
def opened(path: Name, most: int | None = None) -> Iterator[BufferedReader]:
    """A file to read, of at most so many bytes; anything else that has a name may never end, and is refused."""
    with open(path, "rb", opener=lambda name, flags: os.open(_regular(name), flags | os.O_NONBLOCK)) as file:
        _regular(path, os.fstat(file.fileno()))
        size = os.fstat(file.fileno()).st_size
        if most is not None and size > most:
            raise LimpetError(f"{path} has {size} bytes, and more than {most} is no such file: check the path")
        yield file


def _regular(path: Name, found: os.stat_result | None = None) -> Name:
    mode = (os.stat(path) if found is None else found).st_mode
    kind = next((words for test, words in KINDS.items() if test(mode)), None)
    if kind is not None:
        raise NoFile(errno.EINVAL, f"it is {kind}, and a file is needed")
    return path


@contextmanager
def whole(path: Name) -> Iterator[Path]:
    """A file beside the path to write to, which then takes its place: a reader finds the old one or the new one."""
    path = Path(path)
    if path.exists() and not path.is_file():  # a pipe or a terminal: nothing can take its place
        yield path
        return
    path = path.resolve()  # a link stays one
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(path: Name, data: bytes | str) -> None:
    """A file of these bytes, or of this text."""
    try:
        with whole(path) as partial:
            partial.write_bytes(data.encode() if isinstance(data, str) else data)
    except OSError as error:
        raise LimpetError(f"{path} cannot be written ({error.strerror or error}): name another file") from error


def read_text(path: Name, what: str) -> str:
    """A file's text, or what stands on standard input where that is called -; `what` says what to do without one."""
    try:
        if path == "-":
            return sys.stdin.buffer.read().decode("utf-8")
        if os.fspath(path).startswith(OPEN):
            return Path(path).read_bytes().decode("utf-8")
        with opened(path) as file:
            return file.read().decode("utf-8")
    except (OSError, ValueError) as error:
        if isinstance(error, LimpetError):
            raise
        raise LimpetError(f"{path} cannot be read ({error}): {what}") from error


# Several texts in one file


def json_row(line: str, where: str) -> Any:
    """What a line of JSON lines holds."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LimpetError(
            f"{where} is not JSON ({error}): write one object on each line, or end its name in .txt"
        ) from error


def json_texts(content: str, path: Name) -> list[str] | None:
    """The texts of JSON lines, each a string or an object with "prompt" or "text"; None where it is no such file.

    It is one by its name, or as it begins like an object and its name does not end in .txt."""
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
    """One prompt a line, or JSON lines, whose prompts may hold newlines."""
    content = read_text(path, "name a text file, one prompt a line, or JSON lines")
    prompts = json_texts(content, path)
    if prompts is None:
        prompts = [line.removesuffix("\r") for line in content.split("\n") if line.strip()]
    if not prompts:
        raise LimpetError(f"{path} holds no prompt: write one a line, or JSON lines")
    return prompts


def documents(content: str, path: Name) -> list[str]:
    """What stands between blank lines, or the texts of JSON lines, which may hold blank lines."""
    texts = json_texts(content, path)
    parts = content.replace("\r\n", "\n").split("\n\n") if texts is None else texts
    return [part.strip("\n") for part in parts if part.strip()]


# TOML as dataclasses

LONG = 10_000_000  # lines times characters: of a longer file it is not told in which line a mistake stands
WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", dict: "a table"}


class Toml:
    """A TOML file to be read into dataclasses: what it holds, and the line of each of its fields.

    `Toml(path, "name a recipe").build(Recipe)` is the whole file as a Recipe. A mistake is one sentence that begins
    with the line it stands in; so is whatever a dataclass says in its own `__post_init__`."""

    def __init__(self, path: Name, what: str) -> None:
        self.path, self.text = Path(path), read_text(path, what)
        try:
            self.content = tomllib.loads(self.text)
        except (ValueError, RecursionError) as error:  # numbers too long to read, and depth, are its own kinds
            raise LimpetError(f"{path} is not TOML: {error}") from error

    @contextmanager
    def at(self, *field: Any) -> Iterator[None]:
        """Errors inside are of this field: say where it stands."""
        try:
            yield
        except LimpetError as error:
            lines = _lines(self.text)
            line = next(lines[field[:n]] for n in range(len(field), -1, -1) if field[:n] in lines)
            raise LimpetError(f"{self.path}, line {line}: {error}") from error

    def hold(self, known: Iterable[str], what: str, name: str, *where: Any) -> None:
        """Raise where a name is none of those known."""
        with self.at(*where):
            if name not in known:
                raise unknown(what, name, known)

    def build(self, kind: type[T], value: Any = None, *where: Any) -> T:
        """A table, the whole file unless told, as a dataclass; a text is one whose first field alone is given."""
        value, hints = self.content if value is None else value, get_type_hints(kind)
        needed = [one.name for one in fields(kind) if one.default is one.default_factory is MISSING]  # type: ignore[arg-type]
        table, name = {needed[0]: value} if isinstance(value, str) else value, where[0] if where else "the file"
        with self.at(*where):
            if not isinstance(table, dict) or not set(needed) <= set(table):
                raise LimpetError(f"{name} has {value!r}; it takes {' and '.join(needed)}, of {', '.join(hints)}")
        for field in table:
            self.hold(hints, f"{name} has no field", field, *where, field)
        values = {field: self._value(hints[field], one, *where, field) for field, one in table.items()}
        with self.at(*where):
            return kind(**values)

    def _value(self, kind: Any, value: Any, *where: Any) -> Any:
        """A value as its type has it: a list as a tuple, say."""
        kind = get_args(kind)[0] if isinstance(kind, UnionType) else kind  # or None: then it is left out
        plain, items = get_origin(kind) or kind, get_args(kind)
        if isinstance(kind, type) and is_dataclass(kind):
            return self.build(kind, value, *where)
        if not _fits(kind, value):
            with self.at(*where):
                raise LimpetError(f"{where[-1]} is {value!r}; it takes {_takes(kind)}")
        if plain in (list, tuple):
            return plain(self._value(items[0], one, *where, i) for i, one in enumerate(value))
        if plain is dict:
            return {name: self._value(items[1], one, *where, name) for name, one in value.items()}
        return value


def _fits(kind: Any, value: Any) -> bool:
    """Whether a value is of a type, as far as it is no dataclass's."""
    plain, items = get_origin(kind) or kind, get_args(kind)
    if plain in (list, tuple):
        return isinstance(value, list) and all(_fits(items[0], one) for one in value)
    if plain is Literal:
        return value in items
    return plain not in WORDS or type(value) is plain or (plain is float and type(value) is int)


def _takes(kind: Any) -> str:
    plain, items = get_origin(kind) or kind, get_args(kind)
    if plain in (list, tuple):
        return f"a list, each {_takes(items[0])}"
    return f"one of {', '.join(items)}" if plain is Literal else WORDS.get(plain, "a table")


def _lines(text: str) -> dict[tuple[Any, ...], int]:
    """Where each table and field begins. tomllib does not tell, so ever more lines are read: what is new whenever they
    make a whole began after those that made one before."""
    found: dict[tuple[Any, ...], int] = {(): 1}
    lines, start = text.split("\n"), 1
    if len(lines) * len(text) > LONG:
        return found
    for end in range(1, len(lines) + 1):
        try:
            document = tomllib.loads("\n".join([*lines[:end], ""]))
        except ValueError:
            continue
        for path in _paths(document):
            found.setdefault(path, start)
        start = end + 1
    return found


def _paths(node: Any, *path: Any) -> Iterator[tuple[Any, ...]]:
    """The way to every table, list and value."""
    yield path
    within = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, child in within:
        yield from _paths(child, *path, name)
