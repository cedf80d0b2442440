"""Ancestral or argmax at the last call, on the same paths (section 5.1, appendix D.2; table 4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

from limpet.lab.page import Entry, Table
from limpet.lab.study import Cell
from limpet.studies.presets import Preset
from limpet.studies.published import Beside

ROWS = tuple(product(("base", "distilled"), (1.0, 0.9)))  # role and top-p
ENDS = ("ancestral", "argmax")


def cells(preset: Preset) -> Iterable[Cell]:
    native = preset.native.but(nfe=preset.audit_nfe)
    return (
        Cell(f"{role}/{p}/{end}", preset.roles[role], native.but(top_p=p, endpoint=end), preset.audit_n)
        for role, p in ROWS
        for end in ENDS
    )


def tables(results: Beside, preset: Preset) -> Iterator[Table]:
    def both(ppl: str, entropy: str) -> str:
        return f"{ppl} ({entropy})"

    def row(role: str, p: float) -> Iterator[Entry]:
        yield Entry(preset.captions[role])
        yield Entry(f"p={p}")
        for end in ("reported", *ENDS):  # the first by others, and not run here
            cell, measures = f"{role}/{p}/{end}", ("ppl", "entropy")
            here = both(*(f"{results(cell, measure).mean:.2f}" for measure in measures)) if end in ENDS else ""
            yield Entry(here, both(*(results.paper(cell, measure) for measure in measures)))

    yield results.table("endpoint", [[row(*key) for key in ROWS]])
