"""Top-p against CRS budgets at equal calls (section 5.3; table 5, figure 2 c-d)."""

from __future__ import annotations

from limpet.lab.claims import Claim, Finding, above, below, claim
from limpet.lab.page import Contrast, Entry, Figure, Page, Panel, Series, Table, entry
from limpet.lab.results import Results
from limpet.lab.study import Cell, Study
from limpet.studies.presets import Preset
from limpet.studies.published import value

BUDGETS = (0.125, 0.25, 0.5, 1.0)  # of the length: the paper's 128, 256, 512 and 1024
WARMUPS = (0.016, 0.17, 0.33, 0.5)

PAPER = {
    "distilled": {
        1.0: ("41.79 ± 0.84", "5.351 ± 0.015"), 0.95: ("34.34 ± 0.39", "5.326 ± 0.014"),
        0.9: ("29.76 ± 0.19", "5.296 ± 0.009"), 0.85: ("25.94 ± 0.34", "5.251 ± 0.013"),
        0.8: ("23.34 ± 0.39", "5.205 ± 0.016"), 0.75: ("20.38 ± 0.23", "5.148 ± 0.017"),
    },
    "base": {
        1.0: ("80.35 ± 2.28", "5.233 ± 0.011"), 0.95: ("59.53 ± 0.64", "5.250 ± 0.009"),
        0.9: ("48.42 ± 1.82", "5.221 ± 0.014"), 0.85: ("39.86 ± 0.73", "5.195 ± 0.009"),
        0.8: ("32.34 ± 0.72", "5.114 ± 0.009"), 0.75: ("28.33 ± 0.64", "5.075 ± 0.012"),
    },
}  # fmt: skip
PAPER_CRS = {
    "distilled": {
        0.125: ("33.09 ± 0.69", "5.336 ± 0.014"), 0.25: ("30.54 ± 0.62", "5.328 ± 0.015"),
        0.5: ("28.27 ± 0.53", "5.317 ± 0.015"), 1.0: ("27.62 ± 0.42", "5.312 ± 0.014"),
    },
    "base": {
        0.125: ("51.96 ± 0.78", "5.243 ± 0.011"), 0.25: ("41.99 ± 0.46", "5.216 ± 0.011"),
        0.5: ("35.75 ± 0.62", "5.184 ± 0.012"), 1.0: ("34.60 ± 0.53", "5.170 ± 0.014"),
    },
}  # fmt: skip
PAPER_MATCHED = {0.125: "-0.089 ± 0.029", 0.25: "-0.130 ± 0.038", 0.5: "-0.154 ± 0.031", 1.0: "-0.155 ± 0.030"}


def sweep(preset: Preset, role: str) -> tuple[Cell, ...]:
    """Both sweeps on one model: cells role/p/MASS and role/D/BUDGET."""
    model = preset.roles[role]
    masses = [Cell(f"{role}/p/{p}", model, preset.native.but(top_p=p), preset.fine_n) for p in preset.masses]
    return *masses, *(Cell(f"{role}/D/{d}", model, preset.policy.but(budget=d), preset.fine_n) for d in BUDGETS)


def curve(preset: Preset, role: str) -> list[str]:
    """The global top-p curve that CRS is matched against, without the part near p = 1 where entropy folds."""
    return [f"{role}/p/{p}" for p in preset.nodes[role]]


def study(preset: Preset) -> Study:
    warmups = tuple(
        Cell(f"distilled/warmup/{f}", preset.distilled, preset.policy.but(warmup=f), preset.fine_n) for f in WARMUPS
    )
    cells = (*sweep(preset, "distilled"), *sweep(preset, "base"), *warmups)

    def show(results: Results) -> Page:
        return Page(
            tables=tuple(_table(results, preset, role) for role in preset.roles),
            figures=(_figure(results, preset),),
            contrasts=_contrasts(results, preset),
            claims=_claims(results, preset),
        )

    return Study(
        "frontier", "Are support restriction and persistent context interchangeable?", cells, preset.shards, show,
        preset.judges, preset=preset.name,
    )  # fmt: skip


def _table(results: Results, preset: Preset, role: str) -> Table:
    def row(label: str, cell: str, paper: tuple[str, str]) -> tuple[Entry, ...]:
        ppl, entropy = results(cell, "ppl"), results(cell, "entropy")
        return Entry(label), entry(ppl, 2, paper[0]), entry(entropy, 3, paper[1])

    masses = tuple(row(f"p={p}", f"{role}/p/{p}", PAPER[role].get(p, ("", ""))) for p in preset.masses)
    budgets = tuple(row(f"D={d:g}L", f"{role}/D/{d}", PAPER_CRS[role][d]) for d in BUDGETS)
    caption = f"{preset.labels[role]}: top-p at every step, and CRS by budget, at {preset.nfe} calls."
    return Table(f"frontier-{role}", caption, ("Control", "GenPPL", "Entropy"), (masses, budgets))


def _series(results: Results, name: str, cells: list[str], notes: tuple[str, ...], **style: bool) -> Series:
    ppl = [results(cell, "ppl") for cell in cells]
    entropy = tuple(results(cell, "entropy").mean for cell in cells)
    return Series(name, entropy, tuple(e.mean for e in ppl), tuple(e.se for e in ppl), notes, **style)


def _figure(results: Results, preset: Preset) -> Figure:
    def panel(role: str) -> Panel:
        series = [
            _series(
                results,
                "global top-p",
                [f"{role}/p/{p}" for p in preset.masses],
                tuple(f"{p:g}" for p in preset.masses),
            ),
            _series(results, "CRS budget", [f"{role}/D/{d}" for d in BUDGETS], tuple(f"{d:g}L" for d in BUDGETS)),
        ]
        if role == "distilled":
            cells = [f"distilled/warmup/{f}" for f in WARMUPS]
            series.append(_series(results, "CRS warmup", cells, (), joined=False, open=True))
        return Panel(preset.labels[role], "unigram entropy", "GenPPL", tuple(series), log_y=True)

    caption = f"GenPPL over entropy at {preset.nfe} calls: sweeps of top-p, of the budget, and of the warmup."
    return Figure("frontier", caption, tuple(panel(role) for role in preset.roles))


def _contrasts(results: Results, preset: Preset) -> tuple[Contrast, ...]:
    return tuple(
        Contrast(
            f"NLL of CRS D={d:g}L less top-p at equal entropy, {preset.labels[role]}",
            results.matched(f"{role}/D/{d}", curve(preset, role), "entropy"),
            PAPER_MATCHED[d] if role == "distilled" else "",
        )
        for role in preset.roles
        for d in BUDGETS
        if role == "distilled" or d > 0.125
    )


def _claims(results: Results, preset: Preset) -> tuple[Claim, ...]:
    def matched(cell: str, label: str, role: str, paper: float | None = None) -> Finding:
        estimate = results.matched(cell, curve(preset, role), "entropy")
        return below(f"NLL less top-p at equal entropy, {label}", estimate, paper=paper)

    return (
        claim(
            "section 5.3 and appendix E.4",
            "At matched entropy CRS has lower GenNLL than global top-p on the distilled model, across the budgets",
            [matched(f"distilled/D/{d}", f"D={d:g}L", "distilled", value(PAPER_MATCHED[d])) for d in BUDGETS],
        ),
        claim(
            "section 5.3",
            "On the base model too CRS has lower GenNLL than global top-p at matched entropy",
            [matched(f"base/D/{d}", f"D={d:g}L", "base") for d in BUDGETS if d > 0.125],
        ),
        claim(
            "section 5.2",
            "All four warmup endpoints lie below the matched global top-p curve",
            [matched(f"distilled/warmup/{f}", f"warmup {f:g}", "distilled") for f in WARMUPS],
        ),
        claim(
            "section 5.3",
            "Global top-p has lower Rep-4 than CRS at matched entropy",
            [
                above(
                    "Rep-4 of CRS D=0.5L less top-p at equal entropy",
                    results.matched("distilled/D/0.5", curve(preset, "distilled"), "entropy", "rep-4"),
                )
            ],
        ),
    )
