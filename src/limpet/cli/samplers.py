"""`limpet samplers`: every sampler that has a name, and the parameters of one."""

from dataclasses import asdict
from typing import Any

import tyro
from rich.table import Table
from rich.text import Text

from limpet import registry, samplers
from limpet.cli.common import Json, err, show
from limpet.errors import LimpetError
from limpet.samplers import Sampler
from limpet.samplers.builtin import BUILTIN, GROUP


def run(name: tyro.conf.Positional[str | None] = None, /, *, json: Json = False) -> None:
    """List the samplers; of one, also what each parameter means and takes.

    $ limpet samplers
    $ limpet samplers mend
    $ limpet samplers crs --json
    $ limpet samplers ./mine.py:Mine

    Args:
        name: one sampler: built in, of another package, or ./file.py:Name (default: list all that have a name)
    """
    found: dict[str, type[Sampler]] = {}
    for known in [name] if name else {**BUILTIN, **registry.installed(GROUP)}:
        try:
            found[known] = samplers.find(known)
        except LimpetError as error:
            if name:
                raise
            err.print(f"{error}", markup=False)  # a broken package does not hide the others
    entries = [describe(known, kind) for known, kind in found.items()]
    parts = [parameter_table(entries[0])] if name else [overview(entries), "limpet samplers NAME lists its parameters"]
    show(json, entries, parts)


def overview(entries: list[dict[str, Any]]) -> Table:
    """All samplers, each with the first sentence of its description."""
    table = Table("sampler", "", "parameters")
    for entry in entries:
        first = entry["description"].partition(". ")[0].rstrip(".")
        table.add_row(Text(entry["name"]), Text(first), str(len(entry["parameters"])))
    return table


def parameter_table(entry: dict[str, Any]) -> Table:
    """The parameters of one sampler."""
    title = Text(f"{entry['name']}: {entry['description']}")
    table = Table("parameter", "default", "takes", "", title=title, title_justify="left")
    for param in entry["parameters"]:
        table.add_row(*(Text(str(param[part])) for part in ("name", "default", "takes", "help")))
    return table


def describe(name: str, kind: type[Sampler]) -> dict[str, Any]:
    """A sampler as plain values."""
    parameters = [
        {key: value for key, value in asdict(param).items() if key != "since"}
        | {"kind": param.kind.__name__, "takes": param.takes}
        for param in samplers.params(kind).values()
    ]
    return {"name": name, "description": samplers.describe(kind), "parameters": parameters}
