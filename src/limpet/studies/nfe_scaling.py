"""How the tradeoff changes with network calls (section 5.1; tables 2 and 3, figure 2 a-b)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from limpet.lab.page import Entry, Panel, Table
from limpet.lab.study import Cell
from limpet.samplers import CRS, Native, Sampler
from limpet.studies.presets import Preset
from limpet.studies.published import Beside, ticks

ARMS = {"native": "Full support", "p.95": "top-p 0.95", "p.9": "top-p 0.9", "CRS": "CRS"}
MEAN, ERROR = 0, 2  # where they stand in "41.79 ± 0.84", parted


def arms(nfe: int) -> dict[str, Sampler]:
    native = Native(nfe=nfe)
    return {"native": native, "p.95": native.but(top_p=0.95), "p.9": native.but(top_p=0.9), "CRS": CRS(nfe=nfe)}


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
        return results.entries(f"{at}/CRS", ("selected", "visible"))

    yield table("nfe-scaling", partial(tradeoff, part=MEAN))
    yield table("nfe-scaling-errors", partial(tradeoff, part=ERROR))
    yield table("nfe-scaling-selection", selection)


def panels(results: Beside, preset: Preset) -> Iterator[Panel]:
    for role, model in preset.captions.items():
        lines = [
            results.noted(name, [f"{role}/{nfe}/{arm}" for nfe in preset.nfes], preset.nfes, "ppl", note="entropy")
            for arm, name in ARMS.items()
        ]
        yield Panel(model, "NFE", "GenPPL", lines, ticks(preset.nfes), log_x=True, log_y=True)
