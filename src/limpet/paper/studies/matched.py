"""CRS against top-p at equal diversity, by four statistics (appendix E.4), from the cells of the frontier."""

from collections.abc import Iterable, Iterator

from limpet.experiments import DIVERSITY_METRICS, Cell, Entry, Table, format_signed, within
from limpet.paper.studies import frontier
from limpet.paper.studies.presets import Preset
from limpet.paper.studies.published import METRIC_CAPTIONS, Claims, PaperResults, published


def cells(preset: Preset) -> Iterable[Cell]:
    return frontier.sweep(preset, "distilled")


def tables(results: PaperResults, preset: Preset) -> Iterator[Table]:
    def entry(cell: str, on: str) -> Entry:
        return Entry(format_signed(results.at_equal(cell, on), 3), results.paper_text(f"{cell} at equal {on}", "nll"))

    rows = [
        (Entry(f"D={d:g}L"), *(entry(f"distilled/D/{d}", on) for on in DIVERSITY_METRICS)) for d in frontier.BUDGETS
    ]
    yield results.table("matched", [rows], *(METRIC_CAPTIONS[on] for on in DIVERSITY_METRICS))


def claims(results: PaperResults, preset: Preset) -> Claims:
    effect = published("nll", "distilled/D/0.5 at equal entropy")
    assert effect is not None
    half = abs(effect.mean) / 2
    return {
        "close": [results.finding(within, "delta NLL, matched on Dist-4", "distilled/D/0.5", on="dist-4", bound=half)]
    }
