"""How the tradeoff changes with network calls (section 5.1; tables 2 and 3, figure 2 a-b)."""

from __future__ import annotations

from collections.abc import Mapping

from limpet.lab.claims import Claim, Finding, below, claim
from limpet.lab.page import Entry, Figure, Page, Panel, Series, Table
from limpet.lab.results import Results
from limpet.lab.study import Cell, Study
from limpet.policy import Policy
from limpet.studies.presets import Preset
from limpet.studies.published import nll_difference

ARMS = {"native": "Full support", "p.95": "top-p 0.95", "p.9": "top-p 0.9", "CRS": "CRS"}

# GenPPL / entropy, and their errors, of tables 2 and 3
PAPER = {
    ("distilled", 8): ("76.89 / 5.269", "65.60 / 5.282", "56.11 / 5.255", "39.57 / 5.136"),
    ("distilled", 16): ("54.58 / 5.376", "44.91 / 5.362", "38.82 / 5.324", "31.80 / 5.318"),
    ("distilled", 32): ("46.76 / 5.380", "37.94 / 5.360", "32.57 / 5.320", "30.08 / 5.338"),
    ("distilled", 64): ("41.79 / 5.351", "34.34 / 5.326", "29.76 / 5.296", "28.27 / 5.317"),
    ("base", 8): ("131.66 / 4.897", "109.31 / 4.938", "95.32 / 4.943", "46.04 / 4.755"),
    ("base", 16): ("99.31 / 5.138", "78.18 / 5.189", "64.41 / 5.176", "37.49 / 5.105"),
    ("base", 32): ("85.11 / 5.216", "65.72 / 5.242", "54.66 / 5.229", "37.26 / 5.185"),
    ("base", 64): ("78.31 / 5.231", "59.53 / 5.250", "47.20 / 5.220", "35.75 / 5.184"),
}
PAPER_ERRORS = {
    ("distilled", 8): ("0.84 / 0.006", "0.79 / 0.005", "0.31 / 0.008", "0.11 / 0.005"),
    ("distilled", 16): ("0.43 / 0.001", "0.26 / 0.004", "0.18 / 0.006", "0.26 / 0.004"),
    ("distilled", 32): ("0.64 / 0.007", "0.59 / 0.010", "0.51 / 0.009", "0.18 / 0.008"),
    ("distilled", 64): ("0.84 / 0.015", "0.39 / 0.014", "0.19 / 0.009", "0.53 / 0.015"),
    ("base", 8): ("1.61 / 0.003", "0.99 / 0.003", "1.15 / 0.002", "0.19 / 0.012"),
    ("base", 16): ("0.76 / 0.009", "0.56 / 0.003", "0.64 / 0.006", "0.12 / 0.004"),
    ("base", 32): ("1.62 / 0.008", "1.40 / 0.011", "0.90 / 0.010", "0.64 / 0.012"),
    ("base", 64): ("1.62 / 0.011", "0.64 / 0.009", "0.77 / 0.009", "0.62 / 0.012"),
}
PAPER_SELECTED = {  # coordinates selected along a path, and labels visible at once after warmup
    ("distilled", 64): ("991.23 ± 1.02", "508.23 ± 0.19"),
    ("base", 64): ("963.73 ± 0.73", "502.68 ± 0.16"),
    ("distilled", 8): ("799.94", ""),
    ("base", 8): ("795.50", ""),
}


def arms(nfe: int) -> dict[str, Policy]:
    crs = Policy(nfe=nfe)
    native = crs.but(horizon=0)
    return {"native": native, "p.95": native.but(top_p=0.95), "p.9": native.but(top_p=0.9), "CRS": crs}


def study(preset: Preset) -> Study:
    cells = tuple(
        Cell(f"{role}/{nfe}/{arm}", model, policy, preset.n)
        for role, model in preset.roles.items()
        for nfe in preset.nfes
        for arm, policy in arms(nfe).items()
    )

    def show(results: Results) -> Page:
        return Page(
            tables=_tables(results, preset), figures=(_figure(results, preset),), claims=_claims(results, preset)
        )

    return Study(
        "nfe-scaling", "How does the tradeoff change with network calls?", cells, preset.shards, show, preset.judges,
        preset=preset.name,
    )  # fmt: skip


def _tables(results: Results, preset: Preset) -> tuple[Table, ...]:
    def published(values: Mapping[tuple[str, int], tuple[str, ...]], role: str, nfe: int, i: int) -> str:
        return values.get((role, nfe), ("",) * 4)[i]

    def row(role: str, nfe: int, errors: bool) -> tuple[Entry, ...]:
        entries = [Entry(f"{preset.labels[role]} / {nfe}")]
        for i, arm in enumerate(ARMS):
            ppl, entropy = (results(f"{role}/{nfe}/{arm}", measure) for measure in ("ppl", "entropy"))
            ours = f"{ppl.se:.2f} / {entropy.se:.3f}" if errors else f"{ppl.mean:.2f} / {entropy.mean:.3f}"
            entries.append(Entry(ours, published(PAPER_ERRORS if errors else PAPER, role, nfe, i)))
        return tuple(entries)

    def selection(role: str, nfe: int) -> tuple[Entry, ...]:
        cell = f"{role}/{nfe}/CRS"
        paper = PAPER_SELECTED.get((role, nfe), ("", ""))
        counts = [Entry(f"{e.mean:.2f} ± {e.se:.2f}", p) for e, p in zip(
            (results(cell, "selected"), results(cell, "visible")), paper, strict=True)]  # fmt: skip
        return Entry(f"{preset.labels[role]} / {nfe}"), *counts

    head = ("Checkpoint / NFE", *ARMS.values())

    def grouped(errors: bool) -> tuple[tuple[tuple[Entry, ...], ...], ...]:
        return tuple(tuple(row(role, nfe, errors) for nfe in preset.nfes) for role in preset.roles)

    return (
        Table("nfe-scaling", "GenPPL / mean unigram entropy, argmax at the last call.", head, grouped(False)),
        Table("nfe-scaling-errors", "Standard errors over shards of the table above.", head, grouped(True)),
        Table(
            "nfe-scaling-selection",
            "Positions that CRS selects along a path, and labels visible at once on average after warmup.",
            ("Checkpoint / NFE", "Selected", "Visible"),
            tuple(tuple(selection(role, nfe) for nfe in preset.nfes) for role in preset.roles),
        ),
    )


def _figure(results: Results, preset: Preset) -> Figure:
    def panel(role: str) -> Panel:
        series = []
        for arm, label in ARMS.items():
            cells = [f"{role}/{nfe}/{arm}" for nfe in preset.nfes]
            ppl = [results(cell, "ppl") for cell in cells]
            notes = tuple(f"({results(cell, 'entropy').mean:.2f})" for cell in cells)
            series.append(Series(label, preset.nfes, tuple(e.mean for e in ppl), tuple(e.se for e in ppl), notes=notes))
        ticks = tuple((float(nfe), str(nfe)) for nfe in preset.nfes)
        return Panel(preset.labels[role], "NFE", "GenPPL", tuple(series), ticks, log_x=True, log_y=True)

    caption = "GenPPL over network calls, argmax at the last call; parentheses give unigram entropy."
    return Figure("nfe-scaling", caption, tuple(panel(role) for role in preset.roles))


def _claims(results: Results, preset: Preset) -> tuple[Claim, ...]:
    def finding(role: str, nfe: int, i: int, arm: str) -> Finding:
        printed = PAPER.get((role, nfe))
        return below(
            f"NLL of CRS less {ARMS[arm].lower()}, {nfe} calls",
            results.contrast(f"{role}/{nfe}/CRS", f"{role}/{nfe}/{arm}"),
            paper=None if printed is None else nll_difference(printed[-1], printed[i]),
        )

    def lower(role: str) -> list[Finding]:
        return [finding(role, nfe, i, arm) for nfe in preset.nfes for i, arm in enumerate(ARMS) if arm != "CRS"]

    return (
        claim(
            "section 5.1",
            "On the distilled model CRS with top-p disabled has lower GenPPL at every number of calls than native "
            "sampling with p in {1.0, 0.95, 0.9}",
            lower("distilled"),
        ),
        claim("section 5.1", "The base model shows the same ordering at every number of calls", lower("base")),
    )
