"""Names in command lines and files: built in, of another package (entry points), or in a file (`./mine.py:Mine`).

Nothing else needs a name: samplers and models are ordinary Python objects. A file that is named is loaded as a module
below this one, whose name holds the file's path, so that another process can import it again to read a pickle."""

import ast
import contextlib
import difflib
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import operator
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any
from urllib.parse import quote, unquote

from limpet.errors import LimpetError, warn

PREFIX = f"{__name__}.file:"  # of the name of a module that was loaded from a file: the path and a digest follow
__path__: list[str] = []  # modules of files are imported as submodules of this one, which installs their finder
ABOUT_TEXT = ("__doc__", "__firstlineno__", "__static_attributes__")  # of a class; no call depends on them


# Objects by name


def installed(group: str) -> dict[str, str]:
    """What other packages offer in a group of entry points: name -> "module:object". Nothing is imported."""
    return _entry_points(group, tuple((place, _changed_at(place)) for place in sys.path))


@functools.lru_cache(maxsize=8)
def _entry_points(group: str, places: tuple[tuple[str, int | None], ...]) -> dict[str, str]:
    """Reading them takes milliseconds, and every name of a sampler asks. Installing a package changes its folder."""
    points = importlib.metadata.entry_points(group=group)
    return {point.name: point.value.partition("[")[0].strip() for point in points}


def _changed_at(place: str) -> int | None:
    with contextlib.suppress(OSError):
        return os.stat(place or ".").st_mtime_ns
    return None


def is_file(name: str) -> bool:
    """Whether a name means an object in a Python file."""
    return name.rpartition(":")[0].endswith(".py")


def find(what: str, group: str, builtin: Mapping[str, str], name: str) -> Any:
    """The object of a name.

    what: says in errors what it should be, such as "sampler". group: of entry points. builtin: name ->
    "module:object", which comes before other packages. Capital letters do not matter."""
    if is_file(name):
        return from_file(name)
    targets = builtin if name in builtin else {**builtin, **installed(group)}
    if name not in targets:
        known = {one.lower(): one for one in targets}
        near = difflib.get_close_matches(name.lower(), known, 1)
        if name.lower() not in known:
            raise LimpetError(
                f"there is no {what} {name!r}{f', did you mean {known[near[0]]}?' if near else ';'} there are "
                f"{', '.join(targets)}, and ./file.py:Name for one of your own"
            )
        name = known[name.lower()]
    try:
        with prints_aside():
            return importlib.metadata.EntryPoint(name, targets[name], group).load()
    except (Exception, SystemExit) as error:  # another package's module may raise anything
        reason = describe_error(error)
        raise LimpetError(f"the {what} {name!r} is {targets[name]}, which cannot be loaded ({reason})") from error


def from_file(name: str) -> Any:
    """The object of a name such as `./mine.py:Mine`.

    The file is run once for each content that it has. A module of this file that Python imported itself, such as the
    script that runs, is used as it is."""
    path, _, attribute = name.rpartition(":")
    try:
        file = Path(path).expanduser().resolve()
        if file.exists() and not file.is_file():
            raise LimpetError(f"{path} cannot be read (it is no file): check the path before the colon")
        module_name = _module_name(file)
    except LimpetError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        reason = describe_error(error)
        raise LimpetError(f"{path} cannot be read ({reason}): check the path before the colon") from error
    try:
        with prints_aside():
            module = _imported(file) or importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the file may raise anything
        raise LimpetError(f"{path} cannot be run ({describe_error(error, str(file))}): correct it there") from error
    try:
        return operator.attrgetter(attribute)(module)
    except AttributeError as error:
        raise LimpetError(f"{path} has no {attribute!r}: name a class or function that is in it") from error


def prints_aside() -> AbstractContextManager[Any]:
    """What foreign code prints while it is loaded goes to standard error: standard output may be read as JSON."""
    return contextlib.redirect_stdout(sys.stderr)


def describe_error(error: BaseException, file: str | None = None) -> str:
    """An exception on one line, with the line of a file in which it arose."""
    words = " ".join(str(error).split())[:200]
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f" in line {lines[-1]}" if lines else ""
    return f"{type(error).__name__}{': ' if words else ''}{words}{where}"


# Modules of files


def _module_name(file: Path) -> str:
    """The name of the module of a file's present content. Dots would separate packages, so they are written as %2E."""
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    return f"{PREFIX}{quote(str(file)).replace('.', '%2E')}:{digest}"


def _imported(file: Path) -> ModuleType | None:
    """The module of a file that Python imported itself, such as `__main__`."""
    modules = [(name, module) for name, module in sys.modules.items() if not name.startswith(PREFIX)]
    return next((module for _, module in modules if getattr(module, "__file__", None) == str(file)), None)


class FileLoader(SourceFileLoader):
    """Loads a file without Python's cache of compiled files, which tells contents apart by time and size alone."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


class FileFinder(MetaPathFinder):
    """Finds the modules of files, by the paths in their names."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if not fullname.startswith(PREFIX):
            return None
        file = Path(unquote(fullname.removeprefix(PREFIX).rpartition(":")[0]))
        if not file.is_file() or _module_name(file) != fullname:
            raise ModuleNotFoundError(f"{file} is not there or was changed after it was loaded", name=fullname)
        return importlib.util.spec_from_file_location(fullname, file, loader=FileLoader(fullname, str(file)))


sys.meta_path.append(FileFinder())


# Names and digests of objects


def name_of(thing: Any, group: str, builtin: Mapping[str, str]) -> str:
    """The name that `find` takes for a class or function: that of the table or entry point, or its file.

    What was defined where no file is, or within a function, cannot be found again by name. A warning says so once, and
    its own name is returned."""
    target = f"{thing.__module__}:{thing.__qualname__}"
    offered = builtin if target in builtin.values() else installed(group)
    for name, value in offered.items():
        if value == target or _is_imported_as(thing, value):
            return name
    try:
        file = inspect.getsourcefile(thing)
    except (TypeError, OSError):
        file = None
    if file is None or "<" in thing.__qualname__ or not Path(file).is_file():
        _warn_of_no_name(thing.__module__, thing.__qualname__)
        return str(thing.__qualname__.rpartition(".")[2])
    return f"{file}:{thing.__qualname__}"


def _is_imported_as(thing: Any, target: str) -> bool:
    """Whether an entry point's "module:object" is this object under another name. Nothing is imported for that."""
    module, _, attribute = target.partition(":")
    try:
        return operator.attrgetter(attribute)(sys.modules[module]) is thing
    except (KeyError, AttributeError):
        return False


@functools.cache
def _warn_of_no_name(module: str, name: str) -> None:  # once for each name, also where a notebook's cell is run again
    warn(f"{name} is not at the top level of a file, so it cannot be found again by name")


def code_digest(thing: Any) -> str | None:
    """A digest of the code of a class or function. None for what comes with this package.

    It is of the file, and of the modules beside it that it imports. Where there is no file, it is of the bytecode."""
    if thing.__module__.partition(".")[0] == __name__.partition(".")[0] and not thing.__module__.startswith(PREFIX):
        return None
    try:
        file = Path(inspect.getsourcefile(thing) or "")
        files = {file: file.read_bytes(), **_imports_beside(file)}
    except (OSError, TypeError, SyntaxError, ValueError):
        return hashlib.sha256(repr(_bytecode(thing)).encode()).hexdigest()
    digest = hashlib.sha256(files.pop(file))
    for helper in sorted(files):
        digest.update(f"\n{helper.relative_to(file.parent)}\n".encode() + files[helper])
    return digest.hexdigest()


def _imports_beside(file: Path) -> dict[Path, bytes]:
    """The content of every Python file beside a file that it imports, directly or through others."""
    found: dict[Path, bytes] = {}
    waiting = [file] if not file.parent.name.endswith("-packages") else []  # there, everything installed is beside it
    while waiting:
        for name in _imported_names(ast.parse(waiting.pop().read_bytes())):
            package = file.parent / name
            helpers = [file.parent / f"{name}.py"] if not package.is_dir() else sorted(package.rglob("*.py"))
            for helper in helpers:
                if helper.is_file() and helper != file and helper not in found:
                    found[helper] = helper.read_bytes()
                    waiting.append(helper)
    return found


def _imported_names(tree: ast.AST) -> Iterator[str]:
    """The first name of every module that code imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.ImportFrom):  # from . import name
            yield from (alias.name for alias in node.names)


def _bytecode(thing: Any) -> Any:
    """What a class, a function or a constant does, without its place in a file: it has the same repr in any process."""
    if isinstance(thing, type):
        return [(name, _bytecode(value)) for name, value in sorted(vars(thing).items()) if name not in ABOUT_TEXT]
    if isinstance(thing, CodeType):
        return [thing.co_code, thing.co_names, _bytecode(thing.co_consts)]
    if isinstance(thing, tuple):
        return [_bytecode(one) for one in thing]
    if isinstance(thing, frozenset):
        return sorted(repr(_bytecode(one)) for one in thing)
    if isinstance(thing, property):
        return _bytecode(thing.fget)
    function = inspect.unwrap(getattr(thing, "__func__", thing)) if callable(thing) else thing
    code = getattr(function, "__code__", None)
    return _bytecode(code) if code else thing if isinstance(thing, (str, bytes, int, float, type(None))) else None
