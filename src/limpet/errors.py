"""Errors that are sentences for the person who caused them: what was wrong, what was given, what to do."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from types import ModuleType


class LimpetError(ValueError):
    """Raised for anything a user can mend; the command line prints it without a traceback and exits with 2."""


def extra(module: str, name: str) -> ModuleType:
    """Import an optional dependency, or say which extra brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise LimpetError(f"this needs {module.partition('.')[0]}: pip install 'limpet[{name}]'") from error


def unknown(what: str, name: object, known: Iterable[str]) -> LimpetError:
    """That there is no such name ("crs has no knob", "budgt"), with the one that was meant or all that there are."""
    known = list(known)
    near = difflib.get_close_matches(str(name), known, 1)
    return LimpetError(f"{what} {name!r}; " + (f"did you mean {near[0]}?" if near else f"it takes {', '.join(known)}"))
