"""Many like cases: `make test` tries a few of them, `make test-more` the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from backends import BACKENDS


def thinned(cases: Iterable[Any], every: int = 3) -> list[Any]:
    """The same cases for `parametrize`, of which only every so many is tried by default, beginning with the first."""
    return [
        case
        if number % every == 0
        else pytest.param(*(case if isinstance(case, tuple) else [case]), marks=pytest.mark.more)
        for number, case in enumerate(cases)
    ]


def by_backend(names: str, cases: Iterable[tuple[Any, ...]], fused: int = 1) -> Callable[..., Any]:
    """A decorator: every case on every backend, but by default only so many on the fused one, which an interpreter
    runs."""
    found, listed = [], list(cases)
    for name, backend in BACKENDS.items():
        for number, case in enumerate(listed):
            marks = [pytest.mark.more] if name == "fused" and number >= fused else []
            found.append(
                pytest.param(
                    backend, *case, marks=marks, id="-".join(str(getattr(one, "caption", one)) for one in (name, *case))
                )
            )
    return pytest.mark.parametrize(("backend", *names.split()), found)
