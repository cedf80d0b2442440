"""Ancestral or argmax at the last call, on the same paths (section 5.1, appendix D.2; table 4)."""

from __future__ import annotations

from collections.abc import Callable

from limpet.lab.claims import Claim, Finding, above, below, claim
from limpet.lab.page import Entry, Page, Table
from limpet.lab.results import Results
from limpet.lab.study import Cell, Study
from limpet.studies.presets import Preset
from limpet.studies.published import nll_difference, value

MEASURES = {"nll": "NLL", "entropy": "entropy"}
PAPER = {  # reported ancestral by Deschenaux et al., paired ancestral, paired argmax: GenPPL (entropy)
    ("base", 1.0): ("96.76 (5.57)", "100.11 (5.58)", "87.62 (5.23)"),
    ("base", 0.9): ("44.24 (5.40)", "44.78 (5.40)", "53.57 (5.22)"),
    ("distilled", 1.0): ("68.35 (5.54)", "61.13 (5.54)", "45.50 (5.40)"),
    ("distilled", 0.9): ("35.92 (5.41)", "34.90 (5.42)", "33.54 (5.35)"),
}


def study(preset: Preset) -> Study:
    native = preset.native.but(nfe=preset.audit_nfe)
    cells = tuple(
        Cell(f"{role}/{p}/{end}", preset.roles[role], native.but(top_p=p, endpoint=end), preset.audit_n)
        for role, p in PAPER
        for end in ("ancestral", "argmax")
    )

    def show(results: Results) -> Page:
        return Page(tables=(_table(results, preset),), claims=_claims(results, preset))

    return Study("endpoint", "What the last call does", cells, preset.shards, show, preset.judges, preset=preset.name)


def _table(results: Results, preset: Preset) -> Table:
    def row(role: str, p: float) -> tuple[Entry, ...]:
        reported, *paired = PAPER[role, p]
        entries = []
        for end, paper in zip(("ancestral", "argmax"), paired, strict=True):
            ppl, entropy = (results(f"{role}/{p}/{end}", measure) for measure in ("ppl", "entropy"))
            entries.append(Entry(f"{ppl.mean:.2f} ({entropy.mean:.2f})", paper))
        return Entry(preset.labels[role]), Entry(f"p={p}"), Entry("", reported), *entries

    return Table(
        "endpoint",
        f"{preset.audit_nfe} calls; GenPPL (entropy). The two paired columns share every step but the last.",
        ("Checkpoint", "Support", "Reported ancestral", "Paired ancestral", "Paired argmax"),
        (tuple(row(*key) for key in PAPER),),
        labels=2,
    )


def _claims(results: Results, preset: Preset) -> tuple[Claim, ...]:
    def argmax(side: Callable[..., Finding], role: str, p: float, measure: str) -> Finding:
        _, ancestral, greedy = PAPER[role, p]
        printed = nll_difference(greedy, ancestral) if measure == "nll" else value(greedy, 1) - value(ancestral, 1)
        return side(
            f"{MEASURES[measure]}, argmax less ancestral, {preset.labels[role]}, p={p:g}",
            results.contrast(f"{role}/{p}/argmax", f"{role}/{p}/ancestral", measure),
            paper=printed,
        )

    return (
        claim(
            "appendix D.2",
            "Argmax at the last call lowers entropy in every row",
            [argmax(below, role, p, "entropy") for role, p in PAPER],
        ),
        claim(
            "appendix D.2",
            "Argmax improves GenPPL at full support, on both models",
            [argmax(below, role, 1.0, "nll") for role in ("base", "distilled")],
        ),
        claim(
            "appendix D.2",
            "Argmax worsens GenPPL of the base model at p=0.9",
            [argmax(above, "base", 0.9, "nll")],
        ),
    )
