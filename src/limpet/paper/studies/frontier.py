"""Top-p against CRS budgets at equal calls (section 5.3; table 5, figure 2 c-d)."""

from collections.abc import Iterable, Iterator

from limpet.experiments import Cell, Panel, Table
from limpet.paper.studies.presets import Preset
from limpet.paper.studies.published import PaperResults

BUDGETS = (0.125, 0.25, 0.5, 1.0)  # of the length: the paper's 128, 256, 512 and 1024
WARMUPS = (0.016, 0.17, 0.33, 0.5)


def sweep(preset: Preset, role: str) -> tuple[Cell, ...]:
    """Both sweeps on one model: cells role/p/TOP_P and role/D/BUDGET.

    The paper takes base Duo's p = 0.95 from the NFE sweep, and ran its other values of p by themselves."""
    model, native, cells = preset.roles[role], preset.native, []
    for p in preset.top_ps:
        first = preset.base_frontier_first if role == "base" and p != 0.95 else 0
        cells.append(Cell(f"{role}/p/{p}", model, native.replace(top_p=p), preset.fine_n, first=first))
    return *cells, *(Cell(f"{role}/D/{d}", model, preset.crs.replace(budget=d), preset.fine_n) for d in BUDGETS)


def cells(preset: Preset) -> Iterable[Cell]:
    warmups = (
        Cell(f"distilled/warmup/{f}", preset.distilled, preset.crs.replace(warmup=f), preset.fine_n) for f in WARMUPS
    )
    mend = (Cell(f"{role}/mend", model, preset.mend, preset.fine_n) for role, model in preset.roles.items())
    return *sweep(preset, "distilled"), *sweep(preset, "base"), *warmups, *mend


def tables(results: PaperResults, preset: Preset) -> Iterator[Table]:
    for role in preset.captions:
        top_ps = {f"{role}/p/{p}": (f"p={p}",) for p in preset.top_ps}
        budgets = {f"{role}/D/{d}": (f"D={d:g}L",) for d in BUDGETS}
        yield results.measure_table(f"frontier-{role}", (top_ps, budgets, {f"{role}/mend": ("Mend",)}))


def panels(results: PaperResults, preset: Preset) -> Iterator[Panel]:
    for role in preset.roles:
        sweeps = {
            "global top-p": {f"{role}/p/{p}": f"{p:g}" for p in preset.top_ps},
            "CRS budget": {f"{role}/D/{d}": f"{d:g}L" for d in BUDGETS},
        }
        lines = [
            results.series(name, list(notes), "entropy", notes=tuple(notes.values())) for name, notes in sweeps.items()
        ]
        lines.append(results.series("Mend", [f"{role}/mend"], "entropy", joined=False))
        if role == "distilled":
            cells = [f"distilled/warmup/{f}" for f in WARMUPS]
            lines.append(results.series("CRS warmup", cells, "entropy", joined=False, open=True))
        yield Panel(preset.captions[role], "unigram entropy, nats", "GenPPL (lower is better)", lines, log_y=True)
