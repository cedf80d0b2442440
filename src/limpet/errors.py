"""Errors that are sentences for the person who caused them: what was wrong, what was given, what to do."""

from __future__ import annotations

import importlib
from types import ModuleType


class LimpetError(ValueError):
    """Raised for anything a user can mend; the command line prints it without a traceback and exits with 2."""


def extra(module: str, name: str) -> ModuleType:
    """Import an optional dependency, or say which extra brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise LimpetError(f"this needs {module.partition('.')[0]}: pip install 'limpet[{name}]'") from error
