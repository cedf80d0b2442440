"""Errors that are sentences for the person who caused them: what was wrong, what was given, what to do."""

from __future__ import annotations

import difflib
import importlib
import warnings
from collections.abc import Iterable
from types import ModuleType

MOST = 380  # characters of a sentence


class LimpetError(ValueError):
    """Raised for anything a user can mend; the command line prints it without a traceback and exits with 2.

    What it quotes may be a stranger's: it is one line, of characters that can be seen, and not long."""

    def __init__(self, sentence: object = "") -> None:
        super().__init__(plain(str(sentence)))


class Remark(UserWarning):
    """A warning of something that is done all the same, and may not be what was meant."""


def remark(sentence: str) -> None:
    """Warn whoever called what calls this; the command line prints it as one line."""
    warnings.warn(plain(sentence), Remark, stacklevel=3)


def plain(text: str, most: int = MOST) -> str:
    """A text on one line, what cannot be seen escaped; of one that is too long, the beginning and the end."""
    for _ in range(2):  # escapes may make it too long again
        if len(text) > most:
            text = f"{text[: most * 2 // 3]} ... {text[5 - most // 3 :]}"
        text = "".join(map(_shown, text))
    return text if len(text) <= most else text[: most - 3] + "..."


def _shown(letter: str) -> str:
    if letter in "\n\r\t":
        return " "
    return letter if letter.isprintable() else letter.encode("unicode_escape").decode()


def extra(module: str, name: str) -> ModuleType:
    """Import an optional dependency, or say which extra brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise LimpetError(f"this needs {module.partition('.')[0]}: pip install 'limpet[{name}]'") from error


def unknown(what: str, name: object, known: Iterable[str]) -> LimpetError:
    """That there is no such name ("crs has no parameter", "budgt"), with the one that was meant or all that there are."""
    known = list(known)
    near = difflib.get_close_matches(str(name), known, 1)
    return LimpetError(f"{what} {name!r}; " + (f"did you mean {near[0]}?" if near else f"it takes {', '.join(known)}"))
