"""`limpet samplers`: every sampler that can be named, and the parameters of one."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import tyro
from rich.table import Table
from rich.text import Text

from limpet import registry, samplers
from limpet.cli.common import Json, err, show
from limpet.errors import LimpetError
from limpet.samplers import Sampler
from limpet.samplers.base import BUILTIN, GROUP


def run(name: tyro.conf.Positional[str | None] = None, /, *, json: Json = False) -> None:
    """Say what each sampler does; of one, also what each of its parameters takes.

    $ limpet samplers
    $ limpet samplers mend
    $ limpet samplers crs --json
    $ limpet samplers ./mine.py:Mine

    Args:
        name: one sampler, built in, of another package, or ./file.py:Name; all that have a name unless told
    """
    found: dict[str, type[Sampler]] = {}
    for known in [name] if name else {**BUILTIN, **registry.installed(GROUP)}:
        try:
            found[known] = samplers.find(known)
        except LimpetError as error:
            if name:
                raise
            err.print(f"{error}", markup=False)  # a package that is broken does not hide the others
    about = [describe(known, kind) for known, kind in found.items()]
    shown = (
        [table(one) for one in about]
        if name
        else [overview(about), "limpet samplers NAME says what its parameters take"]
    )
    show(json, about, shown)


def overview(about: list[dict[str, Any]]) -> Table:
    """All of them, each in its first sentence."""
    made = Table("sampler", "", "parameters")
    for one in about:
        first = one["words"].partition(". ")[0].rstrip(".")
        made.add_row(Text(one["name"]), Text(first), str(len(one["parameters"])))
    return made


def table(one: dict[str, Any]) -> Table:
    made = Table(
        "parameter", "as it comes", "takes", "", title=Text(f"{one['name']}: {one['words']}"), title_justify="left"
    )
    for param in one["parameters"]:
        made.add_row(*(Text(str(param[part])) for part in ("name", "default", "takes", "words")))
    return made


def describe(name: str, kind: type[Sampler]) -> dict[str, Any]:
    """A sampler as plain values."""
    listed = [
        {key: value for key, value in asdict(param).items() if key != "since"}
        | {"kind": param.kind.__name__, "takes": param.takes}
        for param in samplers.params(kind).values()
    ]
    return {"name": name, "words": samplers.words(kind), "parameters": listed}
