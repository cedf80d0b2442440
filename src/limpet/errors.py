"""Errors in one sentence for the person who caused them: what was wrong, what was given, what to do."""

from __future__ import annotations

import difflib
import importlib
import warnings
from collections.abc import Iterable
from types import ModuleType

MAX_SENTENCE = 380  # characters


class LimpetError(ValueError):
    """An error that a user can correct. The command line prints it without a traceback and exits with 2.

    A sentence may quote untrusted text, so it is one line of printable characters and not long."""

    def __init__(self, sentence: object = "") -> None:
        super().__init__(one_line(str(sentence)))


class LimpetWarning(UserWarning):
    """A warning of something that is done, but may not be what the user meant."""


def warn(sentence: str) -> None:
    """Warn the caller of the function that calls this one. The command line prints the warning on one line."""
    warnings.warn(one_line(sentence), LimpetWarning, stacklevel=3)


def one_line(text: str, most: int = MAX_SENTENCE) -> str:
    """A text on one line of at most `most` printable characters. A long text loses its middle."""
    for _ in range(2):  # escapes may make it too long again
        if len(text) > most:
            text = f"{text[: most * 2 // 3]} ... {text[5 - most // 3 :]}"
        text = "".join(map(_printable, text))
    return text if len(text) <= most else text[: most - 3] + "..."


def _printable(letter: str) -> str:
    if letter in "\n\r\t":
        return " "
    return letter if letter.isprintable() else letter.encode("unicode_escape").decode()


def import_extra(module: str, extra: str) -> ModuleType:
    """Import an optional dependency. The error names the extra that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise LimpetError(f"this needs {module.partition('.')[0]}: pip install 'limpet[{extra}]'") from error


def unknown_name(what: str, name: object, known: Iterable[str]) -> LimpetError:
    """The error for a name that is not known, such as ("crs has no parameter", "budgt", ...).

    It names the one that was probably meant, or all that are known."""
    known = list(known)
    near = difflib.get_close_matches(str(name), known, 1)
    return LimpetError(f"{what} {name!r}; " + (f"did you mean {near[0]}?" if near else f"it takes {', '.join(known)}"))
