"""CRS against top-p at equal diversity, by four statistics (appendix E.4), from the cells of the frontier."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from limpet.experiments import DIVERSITY_METRICS, Cell, Entry, Table, above, below, format_signed, within
from limpet.paper.studies import frontier
from limpet.paper.studies.frontier import difference_at_equal
from limpet.paper.studies.presets import Preset
from limpet.paper.studies.published import METRIC_CAPTIONS, Claims, PaperResults, published


def cells(preset: Preset) -> Iterable[Cell]:
    return frontier.sweep(preset, "distilled")


def tables(results: PaperResults, preset: Preset) -> Iterator[Table]:
    def entry(cell: str, on: str) -> Entry:
        estimate = difference_at_equal(results, preset, cell, on)
        return Entry(format_signed(estimate, 3), results.paper_text(f"{cell} at equal {on}", "nll"))

    rows = [
        (Entry(f"D={d:g}L"), *(entry(f"distilled/D/{d}", on) for on in DIVERSITY_METRICS)) for d in frontier.BUDGETS
    ]
    yield results.table("matched", [rows], *(METRIC_CAPTIONS[on] for on in DIVERSITY_METRICS))


def claims(results: PaperResults, preset: Preset) -> Claims:
    cell = "distilled/D/0.5"
    estimates = {on: difference_at_equal(results, preset, cell, on) for on in DIVERSITY_METRICS}
    paper = {on: published("nll", f"{cell} at equal {on}") for on in DIVERSITY_METRICS}
    names = {on: f"delta NLL, matched on {METRIC_CAPTIONS[on]}" for on in DIVERSITY_METRICS}
    effect = paper["entropy"]
    assert effect is not None
    half = abs(effect.mean) / 2
    return {
        "lower": [below(names["self-bleu"], estimates["self-bleu"], paper=paper["self-bleu"])],
        "close": [within(names["dist-4"], estimates["dist-4"], half, paper["dist-4"])],
        "higher": [above(names["rep-4"], estimates["rep-4"], paper=paper["rep-4"])],
    }
