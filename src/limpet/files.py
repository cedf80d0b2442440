"""Files that appear whole or not at all, and texts in UTF-8, with a sentence where one cannot be written or read."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from limpet.errors import LimpetError

Name = str | os.PathLike[str]


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
        return (sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LimpetError(f"{path} cannot be read ({error}): {what}") from error
