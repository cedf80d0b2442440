"""Top-p against CRS budgets at equal calls (section 5.3; table 5, figure 2 c-d)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from limpet.evaluation.statistics import Estimate
from limpet.experiments.claims import Finding, above, below
from limpet.experiments.contents import Contrast, Panel, Table
from limpet.experiments.study import Cell
from limpet.paper.studies.presets import Preset
from limpet.paper.studies.published import Beside, Claims, printed

BUDGETS = (0.125, 0.25, 0.5, 1.0)  # of the length: the paper's 128, 256, 512 and 1024
MATCHABLE = {"distilled": BUDGETS, "base": BUDGETS[1:]}  # with an entropy on the model's curve, as the paper finds it
WARMUPS = (0.016, 0.17, 0.33, 0.5)


def sweep(preset: Preset, role: str) -> tuple[Cell, ...]:
    """Both sweeps on one model: cells role/p/MASS and role/D/BUDGET.

    Of base Duo's, the paper takes p = 0.95 from the NFE sweep, and ran the other thresholds again by themselves."""
    model = preset.roles[role]
    masses = [
        Cell(f"{role}/p/{p}", model, preset.native.replace(top_p=p), preset.fine_n,
             first=preset.own_launch if role == "base" and p != 0.95 else 0)
        for p in preset.masses
    ]  # fmt: skip
    return *masses, *(Cell(f"{role}/D/{d}", model, preset.crs.replace(budget=d), preset.fine_n) for d in BUDGETS)


def residual(results: Beside, preset: Preset, cell: str, on: str = "entropy", measure: str = "nll") -> Estimate:
    """A cell less its model's global top-p at equal diversity, on the curve without its part near p = 1 that folds."""
    role = cell.partition("/")[0]
    return results.matched(cell, [f"{role}/p/{p}" for p in preset.nodes[role]], on, measure)


def cells(preset: Preset) -> Iterable[Cell]:
    warmups = (
        Cell(f"distilled/warmup/{f}", preset.distilled, preset.crs.replace(warmup=f), preset.fine_n) for f in WARMUPS
    )
    mended = (Cell(f"{role}/mend", model, preset.mend, preset.fine_n) for role, model in preset.roles.items())
    return *sweep(preset, "distilled"), *sweep(preset, "base"), *warmups, *mended


def tables(results: Beside, preset: Preset) -> Iterator[Table]:
    for role in preset.captions:
        masses = {f"{role}/p/{p}": (f"p={p}",) for p in preset.masses}
        budgets = {f"{role}/D/{d}": (f"D={d:g}L",) for d in BUDGETS}
        yield results.measured(f"frontier-{role}", (masses, budgets, {f"{role}/mend": ("Mend",)}))


def panels(results: Beside, preset: Preset) -> Iterator[Panel]:
    for role in preset.roles:
        sweeps = {
            "global top-p": {f"{role}/p/{p}": f"{p:g}" for p in preset.masses},
            "CRS budget": {f"{role}/D/{d}": f"{d:g}L" for d in BUDGETS},
        }
        series = [
            results.series(name, list(notes), "entropy", notes=tuple(notes.values())) for name, notes in sweeps.items()
        ]
        series.append(results.series("Mend", [f"{role}/mend"], "entropy", joined=False))
        if role == "distilled":
            cells = [f"distilled/warmup/{f}" for f in WARMUPS]
            series.append(results.series("CRS warmup", cells, "entropy", joined=False, open=True))
        yield Panel(preset.captions[role], "unigram entropy", "GenPPL", series, log_y=True)


def contrasts(results: Beside, preset: Preset) -> Iterator[Contrast]:
    for role, model in preset.captions.items():
        for cell, d in ((f"{role}/D/{d}", d) for d in MATCHABLE[role]):
            paper = results.paper(f"{cell} at equal entropy", "nll")
            name = f"NLL of CRS D={d:g}L less top-p at equal entropy, {model}"
            yield Contrast(name, residual(results, preset, cell), paper)


def claims(results: Beside, preset: Preset) -> Claims:
    def matched(cell: str, what: str) -> Finding:
        paper = printed("nll", f"{cell} at equal entropy")
        return below(f"NLL less top-p at equal entropy, {what}", residual(results, preset, cell), paper=paper)

    rep = residual(results, preset, "distilled/D/0.5", measure="rep-4")

    def at(role: str, budgets: Iterable[float]) -> list[Finding]:
        return [matched(f"{role}/D/{d}", f"D={d:g}L") for d in budgets]

    return {
        "distilled": at("distilled", [0.5]),
        "budgets": at("distilled", [d for d in BUDGETS if d != 0.5]),
        "base": at("base", MATCHABLE["base"]),
        "warmups": [matched(f"distilled/warmup/{f}", f"warmup {f:g}") for f in WARMUPS],
        "repetition": [above("Rep-4 of CRS D=0.5L less top-p at equal entropy", rep)],
    }
