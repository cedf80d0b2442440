"""Ancestral or argmax at the last call, on the same paths (section 5.1, appendix D.2; table 4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

from limpet.lab.claims import Claim, Finding, above, below, claim
from limpet.lab.page import Entry, Table
from limpet.lab.study import Cell
from limpet.studies.presets import Preset
from limpet.studies.published import Beside, Side

TITLE = "What the last call does"
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

    yield Table(
        "endpoint",
        f"{preset.audit_nfe} calls; GenPPL (entropy). The two paired columns share every step but the last.",
        ("Checkpoint", "Support", "Reported ancestral", "Paired ancestral", "Paired argmax"),
        (tuple(tuple(row(*key)) for key in ROWS),),
        names=2,
    )


def claims(results: Beside, preset: Preset) -> Iterator[Claim]:
    def argmax(side: Side, role: str, p: float, measure: str) -> Finding:
        name = f"{'NLL' if measure == 'nll' else measure}, argmax less ancestral, {preset.captions[role]}, p={p:g}"
        return results.finding(side, name, f"{role}/{p}/argmax", f"{role}/{p}/ancestral", measure=measure)

    where = "appendix D.2"
    lowers = [argmax(below, role, p, "entropy") for role, p in ROWS]
    yield claim(where, "Argmax at the last call lowers entropy in every row", lowers)
    improves = [argmax(below, role, 1.0, "nll") for role in ("base", "distilled")]
    yield claim(where, "Argmax improves GenPPL at full support, on both models", improves)
    worsens = [argmax(above, "base", 0.9, "nll")]
    yield claim(where, "Argmax worsens GenPPL of the base model at p=0.9", worsens)
