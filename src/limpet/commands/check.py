"""`limpet check MODEL`: whether a model and samplers, one's own or built in, keep the contract."""

from __future__ import annotations

from typing import Annotated

import tyro

from limpet import samplers
from limpet.check import NFE, Row, arm_rows, model_rows, verdict
from limpet.commands import ARM_HELP, IN_FLOAT32, Somewhere, out, print_json


def run(
    model: tyro.conf.Positional[str] = "exact:words",
    /,
    *,
    arm: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(help=ARM_HELP)] = (),
    nfe: int = NFE,
    length: int | None = None,
    where: Somewhere = IN_FLOAT32,
    json: bool = False,
) -> int:
    """Hold a model, and samplers on it, to what every part of limpet relies on. Exit code 1 if a check fails.

    $ limpet check ./my.py:factory
    $ limpet check --arm ./mine.py:Mine
    $ limpet check mini --arm "crs budget=.25" --json

    Args:
        model: built-in name, folder, file, owner/name on the hub, exact:NAME, a package's model, or ./my.py:factory
        nfe: network calls of every arm that does not say otherwise
        length: tokens in a sample; the model's own unless told, or fewer for a large vocabulary
        json: print one JSON document
    """
    denoiser = where.load(model)

    def say(line: str) -> None:
        if not json:
            out.print(line, markup=False)

    found: list[tuple[str | None, Row]] = []
    for subject in (None, *(arm or samplers.available())):
        say("\nthe model" if subject is None else f"\narm {subject}")
        for row in model_rows(denoiser, length) if subject is None else arm_rows(denoiser, subject, nfe, length):
            found.append((subject, row))
            say(f"{'ok' if row.ok else 'FAILED':<7} {row.what}: {row.found}")
    said = verdict(denoiser, [row for _, row in found])
    say(f"\n{said}")
    if json:
        checks = [{"arm": subject, **row._asdict()} for subject, row in found]
        print_json({"model": denoiser.name, "digest": denoiser.digest, "checks": checks, "verdict": said})
    return 0 if all(row.ok for _, row in found) else 1
