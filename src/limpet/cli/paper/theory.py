"""`limpet paper theory`: the paper's statements on concrete sources, with verdicts and figures."""

import math
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.table import Table

from limpet.cli.common import Json, err, progress, show
from limpet.errors import LimpetError, unknown_name
from limpet.experiments import Figure
from limpet.experiments.figures import draw
from limpet.files import write_file
from limpet.paper.theory import STATEMENTS, Check

STYLES = {"VIOLATED": "bold red", "below": "cyan", "above": "cyan"}


def run(
    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]")] = None,
    json: Json = False,
    figures: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
) -> int:
    """Check the paper's statements on sources whose distributions are known.

    Each row shows both sides of a relation, for a named source or for the tightest of a thousand random ones. Rows
    with ~ claim nothing: their verdict says which of two measured values is lower. The exit code is 1 if a claim is
    violated.

    $ limpet paper theory
    $ limpet paper theory closed-loop-exact --figures figures
    $ limpet paper theory shared-modes --json

    Args:
        name: one statement (default: all)
        figures: a folder to draw figures into, as NAME.png; closed-loop, closed-loop-exact and closed-loop-interleave
            have one
    """
    if name is not None and name not in STATEMENTS:
        raise unknown_name("there is no statement", name, STATEMENTS)
    if figures is not None:
        if name is not None and STATEMENTS[name].panels is None:
            having = [key for key, statement in STATEMENTS.items() if statement.panels is not None]
            raise LimpetError(f"{name} has no figure; {', '.join(having)} have one")
        _create_folder(figures)
    chosen = list(STATEMENTS) if name is None else [name]
    rows: dict[str, list[Check]] = {}
    drawn: dict[str, str] = {}
    torch.set_num_threads(1)  # the tensors are too small for several threads
    with progress(total=len(chosen)) as update:
        for key in chosen:
            update(description=key)
            rows[key] = STATEMENTS[key].checks()
            statement = STATEMENTS[key]
            if figures is not None and statement.panels is not None:
                drawn[key] = str(figures / f"{key}.png")
                figure = Figure(key, "", tuple(statement.panels()), statement.caption)
                write_file(drawn[key], draw(figure)["png"])
            update(advance=1)
    document = {"statements": [to_dict(key, rows[key], drawn.get(key)) for key in chosen]}
    show(json, document, (part for key in chosen for part in (table(key, rows[key]), "")))
    for path in drawn.values():
        err.print(f"wrote {path}", markup=False)
    return int(any(row.verdict == "VIOLATED" for checks in rows.values() for row in checks))


def _create_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise LimpetError(f"--figures takes a folder; {folder} is a file or lies under one") from error


def table(key: str, checks: list[Check]) -> Table:
    """The rows of one statement; the slack of a Monte Carlo estimate has its standard error."""
    statement = STATEMENTS[key]
    title = f"{key}: {statement.summary} ({statement.where})"
    result = Table(title=title, title_justify="left", title_style="bold")
    for column in ("statement", "source"):
        result.add_column(column)
    for column in ("left", "", "right", "slack"):
        result.add_column(column, justify="right", no_wrap=True)
    result.add_column("verdict", no_wrap=True)
    for row in checks:
        slack = f"{row.slack:.2g}" + (f" ± {row.error:.1g}" if row.error else "")
        cells = (row.statement, row.source, f"{row.left:.5g}", row.relation, f"{row.right:.5g}", slack, row.verdict)
        result.add_row(*cells, style=STYLES.get(row.verdict))
    return result


def to_dict(key: str, checks: list[Check], figure: str | None) -> dict[str, Any]:
    """One statement as JSON, in which an infinite number is a string."""
    rows = []
    for check in checks:
        numbers = {"left": check.left, "right": check.right, "slack": check.slack}
        written = {side: value if math.isfinite(value) else str(value) for side, value in numbers.items()}
        rows.append({**check._asdict(), **written, "verdict": check.verdict})
    statement = STATEMENTS[key]
    document: dict[str, Any] = {"name": key, "summary": statement.summary, "where": statement.where, "rows": rows}
    return document if figure is None else {**document, "figure": figure}
