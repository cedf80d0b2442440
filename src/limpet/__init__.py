"""limpet: the laboratory and the fast sampler for uniform-state discrete diffusion language models.

Which names are public, and where each is at home, stands in `__init__.pyi`. They are fetched when first asked for:
torch alone takes a second, and `limpet --help` has no use for it."""

import ast
import pathlib
from typing import Any as _Any

__version__ = "0.2.0"
_written = ast.parse(pathlib.Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
_homes = {one.name: line.module for line in _written if isinstance(line, ast.ImportFrom) for one in line.names}
__all__ = sorted(_homes)


def __getattr__(name: str) -> _Any:
    if name not in _homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = __import__(_homes[name], fromlist=[name])  # `from home import name`, which also finds a module in a package
    globals()[name] = getattr(home, name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
