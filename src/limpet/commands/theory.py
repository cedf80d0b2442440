"""`limpet theory`: the paper's statements on concrete sources, both sides of each, with verdicts and figures."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.table import Table

from limpet.commands import err, out, print_json, progress_bar
from limpet.errors import LimpetError
from limpet.theory import STATEMENTS, Row, Statement

STYLES = {"VIOLATED": "bold red", "below": "cyan", "above": "cyan"}


def run(
    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]")] = None,
    json: bool = False,
    figures: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
) -> int:
    """Evaluate the paper's statements where every law is known: left side, right side, slack, verdict.

    Each is checked on named sources and on a thousand random ones, of which the tightest case is shown. The closed
    loop claims nothing: there, the verdict says which of two measured figures is lower. Exit code 1 if any is violated.

    $ limpet theory
    $ limpet theory closed-loop-exact --figures figures
    $ limpet theory shared-modes --json

    Args:
        name: one statement; all of them unless told
        json: print one JSON document
        figures: a folder to draw each statement into, as NAME.png
    """
    chosen = STATEMENTS if name is None else {name: _named(name)}
    found: dict[str, list[Row]] = {}
    drawn: dict[str, str] = {}
    with _one_thread(), progress_bar() as bar:
        task = bar.add_task("", total=len(chosen), detail="")
        for key, statement in chosen.items():
            bar.update(task, description=key)
            found[key] = statement.rows()
            if figures is not None:
                drawn[key] = str(_draw(statement, figures / f"{key}.png"))
            bar.advance(task)
    if json:
        print_json({"statements": [_document(key, found[key], drawn.get(key)) for key in chosen]})
    else:
        for key in chosen:
            out.print(table(key, found[key]), "")
        for path in drawn.values():
            err.print(f"wrote {path}", markup=False)
    return int(any(row.verdict == "VIOLATED" for rows in found.values() for row in rows))


def table(key: str, rows: list[Row]) -> Table:
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


@contextmanager
def _one_thread() -> Iterator[None]:
    """The tensors are so small that threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _named(name: str) -> Statement:
    if name in STATEMENTS:
        return STATEMENTS[name]
    near = difflib.get_close_matches(name, STATEMENTS, 1)
    hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(STATEMENTS)}"
    raise LimpetError(f"there is no statement {name!r}; {hint}")


def _draw(statement: Statement, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    statement.figure().savefig(path, dpi=120)
    return path


def _document(key: str, rows: list[Row], drawn: str | None) -> dict[str, Any]:
    statement = STATEMENTS[key]
    listed = [{**row._asdict(), "slack": row.slack, "verdict": row.verdict} for row in rows]
    for one in listed:  # JSON knows no infinity: it is written as a string
        one |= {name: str(one[name]) for name in ("left", "right", "slack") if not math.isfinite(one[name])}
    made: dict[str, Any] = {"name": key, "says": statement.says, "where": statement.where, "rows": listed}
    return made if drawn is None else {**made, "figure": drawn}
