"""`limpet check MODEL`: whether a model and samplers, one's own or built in, keep the contract."""

from __future__ import annotations

import tyro

from limpet import samplers
from limpet.cli.common import HERE, Arms, Json, Length, Model, Somewhere, out, show
from limpet.conformance import NFE, Row, arm_rows, model_rows, verdict


def run(
    model: tyro.conf.Positional[Model] = "exact:words",
    /,
    *,
    arm: Arms = (),
    nfe: int = NFE,
    length: Length = None,
    where: Somewhere = HERE,
    json: Json = False,
) -> int:
    """Hold a model, and samplers on it, to what every part of limpet relies on. Exit code 1 if a check fails.

    Unless told how long, a model with a large vocabulary is checked on shorter sequences than its own.

    $ limpet check ./my.py:factory
    $ limpet check --arm ./mine.py:Mine
    $ limpet check mini --arm "crs budget=.25" --json

    Args:
        nfe: network calls of every arm that does not say otherwise
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
    checks = [{"arm": subject, **row._asdict()} for subject, row in found]
    show(json, {"model": denoiser.name, "digest": denoiser.digest, "checks": checks, "verdict": said}, [f"\n{said}"])
    return 0 if all(row.ok for _, row in found) else 1
