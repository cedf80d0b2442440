"""How quality changes with the number of network calls (section 5.1; tables 2 and 3, figure 2 a-b)."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from limpet.evaluation import Estimate
from limpet.experiments import Entry, Finding, Panel, PublishedValue, Table, above, between
from limpet.paper.studies.presets import Preset
from limpet.paper.studies.published import Claims, PaperResults, published, ticks

SAMPLERS = {"native": "Full support", "p.95": "top-p 0.95", "p.9": "top-p 0.9", "CRS": "CRS", "mend": "Mend"}
PAPER_LENGTH = 1024  # tokens of the paper's samples
MEAN, ERROR = 0, 2  # their places in "41.79 ± 0.84", partitioned


def tables(results: PaperResults, preset: Preset) -> Iterator[Table]:
    def table(name: str, row: Callable[[str], Iterable[Entry]]) -> Table:
        groups = (
            [(Entry(f"{model} / {nfe}"), *row(f"{role}/{nfe}")) for nfe in preset.nfes]
            for role, model in preset.captions.items()
        )
        return results.table(name, groups)

    def tradeoff(at: str, part: int) -> Iterator[Entry]:
        """GenPPL and entropy of every sampler in one field each: their means, or their errors."""

        def both(texts: list[str]) -> str:
            return " / ".join(text.partition(" ± ")[part] or "n/a" for text in texts) if any(texts) else ""

        for name in SAMPLERS:
            entries = results.entries(f"{at}/{name}", ("ppl", "entropy"))
            yield Entry(both([entry.text for entry in entries]), both([entry.paper for entry in entries]))

    def selection(at: str) -> Iterable[Entry]:
        return results.entries(f"{at}/CRS", ("committed", "visible"))

    yield table("nfe-scaling", partial(tradeoff, part=MEAN))
    yield table("nfe-scaling-errors", partial(tradeoff, part=ERROR))
    yield table("nfe-scaling-selection", selection)


def claims(results: PaperResults, preset: Preset) -> Claims:
    """How many positions CRS commits, of the length, and how many of those are visible at once."""

    def committed_share(role: str, nfe: int, bound: float) -> Finding:
        cell = f"{role}/{nfe}/CRS"
        paper = published("committed", cell)
        share = Estimate(results.values(cell, "committed") / preset.lengths[role])
        paper_share = paper and PublishedValue(*(value / PAPER_LENGTH for value in paper))
        name = f"committed share of the length, {preset.captions[role]}, {nfe} calls"
        return above(name, share, bound, paper_share)

    def visible_share(role: str) -> Finding:
        cell = f"{role}/{preset.max_nfe}/CRS"
        share = Estimate(results.values(cell, "visible") / results.values(cell, "committed"))
        visible, committed = published("visible", cell), published("committed", cell)
        paper = None
        if visible is not None and committed is not None:
            paper = PublishedValue(visible.mean / committed.mean, visible.mean / committed.mean)
        name = f"visible share of the committed, {preset.captions[role]}, {preset.max_nfe} calls"
        return between(name, share, 0.25, 0.75, paper)

    bounds = ((preset.max_nfe, 0.9), (preset.nfes[0], 0.5))
    return {
        "most": [committed_share(role, nfe, bound) for nfe, bound in bounds for role in preset.captions],
        "gradual": [visible_share(role) for role in preset.captions],
    }


def panels(results: PaperResults, preset: Preset) -> Iterator[Panel]:
    for role, model in preset.captions.items():
        cells = {name: [f"{role}/{nfe}/{name}" for nfe in preset.nfes] for name in SAMPLERS}
        lines = [
            results.annotated_series(caption, cells[name], preset.nfes, "ppl", note="entropy")
            for name, caption in SAMPLERS.items()
        ]
        yield Panel(model, "NFE", "GenPPL (lower is better)", lines, ticks(preset.nfes), log_x=True, log_y=True)
