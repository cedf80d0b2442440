"""What can be named: things built in, of other packages (by entry point), and in a file (`./mine.py:Mine`)."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from limpet.errors import LimpetError


def installed(group: str) -> dict[str, str]:
    """What other packages offer in a group of entry points: name -> "module:object"."""
    points = importlib.metadata.entry_points(group=group)
    return {point.name: point.value.partition("[")[0].strip() for point in points}


def is_file(name: str) -> bool:
    """Whether a name means an object in a Python file."""
    return name.rpartition(":")[0].endswith(".py")


def find(what: str, group: str, builtin: Mapping[str, str], name: str) -> Any:
    """The object that a name means; `what` says in errors what it should have been."""
    if is_file(name):
        return from_file(name)
    targets = builtin if name in builtin else {**builtin, **installed(group)}  # asking the packages takes milliseconds
    if name not in targets:
        raise LimpetError(
            f"there is no {what} {name!r}; there are {', '.join(targets)}, and ./file.py:Name for one of your own"
        )
    try:
        return importlib.metadata.EntryPoint(name, targets[name], group).load()
    except (Exception, SystemExit) as error:  # another package's module may do anything
        raise LimpetError(f"the {what} {name!r} is {targets[name]}, which cannot be loaded ({said(error)})") from error


def from_file(name: str) -> Any:
    """An object of a Python file, which is run once for each content that it has."""
    path, _, attribute = name.rpartition(":")
    try:
        file = Path(path).expanduser().resolve()
        if file.exists() and not file.is_file():
            raise LimpetError(f"{path} cannot be read (it is no file): check the path before the colon")
        content = file.read_bytes()
    except LimpetError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise LimpetError(f"{path} cannot be read ({said(error)}): check the path before the colon") from error
    module_name = f"limpet_file_{hashlib.sha256(str(file).encode() + content).hexdigest()[:16]}"
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, file)
        assert spec is not None
        assert spec.loader is not None  # as for every file that ends in .py
        module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[module_name]
            raise LimpetError(f"{path} cannot be run ({said(error, module)}): mend it there") from error
    try:
        return getattr(sys.modules[module_name], attribute)
    except AttributeError as error:
        raise LimpetError(f"{path} has no {attribute!r}: name what stands in it") from error


def said(error: BaseException, module: ModuleType | None = None) -> str:
    """What an exception is, on one line of a sentence, and in which line of a module it arose."""
    words = " ".join(str(error).split())[:200]
    file = getattr(module, "__file__", None)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f" in line {lines[-1]}" if lines else ""
    return f"{type(error).__name__}{': ' if words else ''}{words}{where}"


def name_of(thing: Any, group: str, builtin: Mapping[str, str]) -> str:
    """The name that `find` takes for a class or function: the one it goes by, or its file."""
    target = f"{thing.__module__}:{thing.__qualname__}"
    offered = builtin if target in builtin.values() else installed(group)  # as in `find`
    for name, value in offered.items():
        if value == target:
            return name
    try:
        return f"{inspect.getsourcefile(thing)}:{thing.__qualname__}"
    except TypeError:  # made where there is no file
        return target


def code_digest(thing: Any) -> str | None:
    """A digest of the file that a class or function stands in; None for what comes with this package."""
    if thing.__module__.partition(".")[0] == __name__.partition(".")[0]:
        return None
    try:
        return hashlib.sha256(Path(inspect.getsourcefile(thing) or "").read_bytes()).hexdigest()
    except (OSError, TypeError):
        return hashlib.sha256(repr(thing).encode()).hexdigest()
