"""How the tradeoff changes with network calls (section 5.1; tables 2 and 3, figure 2 a-b)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from limpet.evaluation.statistics import Estimate
from limpet.experiments.claims import Finding, Printed, above, between
from limpet.experiments.contents import Entry, Panel, Table
from limpet.experiments.study import Cell
from limpet.paper.studies.presets import Preset
from limpet.paper.studies.published import Beside, Claims, printed, ticks
from limpet.samplers import CRS, Mend, Native, Sampler

ARMS = {"native": "Full support", "p.95": "top-p 0.95", "p.9": "top-p 0.9", "CRS": "CRS", "mend": "Mend"}
LENGTH = 1024  # of the paper's samples
MEAN, ERROR = 0, 2  # where they stand in "41.79 ± 0.84", parted


def arms(nfe: int) -> dict[str, Sampler]:
    """The paper's four, and Mend."""
    native = Native(nfe=nfe)
    return {
        "native": native, "p.95": native.replace(top_p=0.95), "p.9": native.replace(top_p=0.9), "CRS": CRS(nfe=nfe),
        "mend": Mend(nfe=nfe),
    }  # fmt: skip


def cells(preset: Preset) -> Iterable[Cell]:
    return (
        Cell(f"{role}/{nfe}/{arm}", model, sampler, preset.n)
        for role, model in preset.roles.items()
        for nfe in preset.nfes
        for arm, sampler in arms(nfe).items()
    )


def tables(results: Beside, preset: Preset) -> Iterator[Table]:
    def table(name: str, row: Callable[[str], Iterable[Entry]]) -> Table:
        groups = (
            [(Entry(f"{model} / {nfe}"), *row(f"{role}/{nfe}")) for nfe in preset.nfes]
            for role, model in preset.captions.items()
        )
        return results.table(name, groups)

    def tradeoff(at: str, part: int) -> Iterator[Entry]:
        """GenPPL and entropy of every arm in one field each: their means, or their errors."""

        def both(texts: Sequence[str]) -> str:
            return " / ".join(text.partition(" ± ")[part] or "n/a" for text in texts) if any(texts) else ""

        for arm in ARMS:
            here, paper, _ = zip(*results.entries(f"{at}/{arm}", ("ppl", "entropy")), strict=True)
            yield Entry(both(here), both(paper))

    def selection(at: str) -> Iterable[Entry]:
        return results.entries(f"{at}/CRS", ("committed", "visible"))

    yield table("nfe-scaling", partial(tradeoff, part=MEAN))
    yield table("nfe-scaling-errors", partial(tradeoff, part=ERROR))
    yield table("nfe-scaling-selection", selection)


def claims(results: Beside, preset: Preset) -> Claims:
    """What CRS selects along a path, of the length, and how much of that is visible at once."""

    def of_length(role: str, nfe: int, bound: float) -> Finding:
        cell = f"{role}/{nfe}/CRS"
        paper = printed("committed", cell)
        shown = paper and Printed(*(value / LENGTH for value in paper))
        share = Estimate(results.values(cell, "committed") / preset.lengths[role])
        return above(f"committed of the length, {preset.captions[role]}, {nfe} calls", share, bound, shown)

    def at_once(role: str) -> Finding:
        cell = f"{role}/{preset.most}/CRS"
        share = Estimate(results.values(cell, "visible") / results.values(cell, "committed"))
        visible, committed = printed("visible", cell), printed("committed", cell)
        paper = visible and committed and Printed(visible.mean / committed.mean, visible.mean / committed.mean)
        return between(
            f"visible of the committed, {preset.captions[role]}, {preset.most} calls", share, 0.25, 0.75, paper
        )

    return {
        "most": [of_length(role, nfe, bound) for nfe, bound in ((preset.most, 0.9), (preset.nfes[0], 0.5))
                 for role in preset.captions],
        "gradual": [at_once(role) for role in preset.captions],
    }  # fmt: skip


def panels(results: Beside, preset: Preset) -> Iterator[Panel]:
    for role, model in preset.captions.items():
        lines = [
            results.noted(name, [f"{role}/{nfe}/{arm}" for nfe in preset.nfes], preset.nfes, "ppl", note="entropy")
            for arm, name in ARMS.items()
        ]
        yield Panel(model, "NFE", "GenPPL", lines, ticks(preset.nfes), log_x=True, log_y=True)
