"""`limpet theory`: the paper's statements on concrete sources, both sides of each, with verdicts and figures."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.table import Table

from limpet.cli.common import Json, err, progress, show
from limpet.errors import unknown
from limpet.experiments.contents import Figure
from limpet.experiments.figures import draw
from limpet.files import write_whole
from limpet.paper.theory import STATEMENTS, Sides

STYLES = {"VIOLATED": "bold red", "below": "cyan", "above": "cyan"}


def run(
    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]")] = None,
    json: Json = False,
    figures: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
) -> int:
    """Evaluate the paper's statements where every distribution is known: left side, right side, slack, verdict.

    Each is checked on named sources and on a thousand random ones, of which the tightest case is shown. The closed
    loop claims nothing: there, the verdict says which of two measured figures is lower. Exit code 1 if any is violated.

    $ limpet theory
    $ limpet theory closed-loop-exact --figures figures
    $ limpet theory shared-modes --json

    Args:
        name: one statement; all of them unless told
        figures: a folder to draw each statement into, as NAME.png
    """
    if name is not None and name not in STATEMENTS:
        raise unknown("there is no statement", name, STATEMENTS)
    chosen = STATEMENTS if name is None else {name: STATEMENTS[name]}
    found: dict[str, list[Sides]] = {}
    drawn: dict[str, str] = {}
    torch.set_num_threads(1)  # the tensors are so small that threads would only wait for each other
    with progress(total=len(chosen)) as tell:
        for key, statement in chosen.items():
            tell(description=key)
            found[key] = statement.sides()
            if figures is not None:
                figures.mkdir(parents=True, exist_ok=True)
                drawn[key] = str(figures / f"{key}.png")
                figure = Figure(key, "", tuple(statement.panels()), statement.shows)
                write_whole(drawn[key], draw(figure)["png"])
            tell(advance=1)
    document = {"statements": [_document(key, found[key], drawn.get(key)) for key in chosen]}
    show(json, document, (part for key in chosen for part in (table(key, found[key]), "")))
    for path in drawn.values():
        err.print(f"wrote {path}", markup=False)
    return int(any(row.verdict == "VIOLATED" for rows in found.values() for row in rows))


def table(key: str, rows: list[Sides]) -> Table:
    """One statement's rows; a Monte Carlo figure's slack carries its standard error."""
    statement = STATEMENTS[key]
    made = Table(title=f"{key}: {statement.says} ({statement.where})", title_justify="left", title_style="bold")
    for column in ("statement", "source"):
        made.add_column(column)
    for column in ("left", "", "right", "slack"):
        made.add_column(column, justify="right", no_wrap=True)
    made.add_column("verdict", no_wrap=True)
    for row in rows:
        slack = f"{row.slack:.2g}" + (f" ± {row.error:.1g}" if row.error else "")
        made.add_row(
            row.statement, row.source, f"{row.left:.5g}", row.relation, f"{row.right:.5g}", slack, row.verdict,
            style=STYLES.get(row.verdict),
        )  # fmt: skip
    return made


def _document(key: str, rows: list[Sides], drawn: str | None) -> dict[str, Any]:
    statement = STATEMENTS[key]
    listed = [{**row._asdict(), "slack": row.slack, "verdict": row.verdict} for row in rows]
    for one in listed:  # JSON knows no infinity: it is written as a string
        one |= {name: str(one[name]) for name in ("left", "right", "slack") if not math.isfinite(one[name])}
    made: dict[str, Any] = {"name": key, "says": statement.says, "where": statement.where, "rows": listed}
    return made if drawn is None else {**made, "figure": drawn}
