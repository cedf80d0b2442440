"""How the tradeoff changes with network calls (section 5.1; tables 2 and 3, figure 2 a-b)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from limpet.lab.claims import Claim, Finding, below, claim
from limpet.lab.page import Entry, Figure, Panel, Table, entry
from limpet.lab.study import Cell
from limpet.samplers import CRS, Native, Sampler
from limpet.studies.presets import Preset
from limpet.studies.published import Beside, ticks

TITLE = "How does the tradeoff change with network calls?"
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
    def table(name: str, caption: str, head: Iterable[str], row: Callable[[str], Iterable[Entry]]) -> Table:
        groups = (
            tuple((Entry(f"{model} / {nfe}"), *row(f"{role}/{nfe}")) for nfe in preset.nfes)
            for role, model in preset.captions.items()
        )
        return Table(name, caption, ("Checkpoint / NFE", *head), tuple(groups))

    def tradeoff(at: str, part: int) -> Iterator[Entry]:
        """GenPPL and entropy of every arm in one field each: their means, or their errors."""

        def both(texts: Sequence[str]) -> str:
            return " / ".join(text.partition(" ± ")[part] or "n/a" for text in texts) if any(texts) else ""

        for arm in ARMS:
            here, paper, _ = zip(*results.entries(f"{at}/{arm}", ("ppl", "entropy")), strict=True)
            yield Entry(both(here), both(paper))

    def selection(at: str) -> Iterator[Entry]:
        cell = f"{at}/CRS"
        return (entry(results(cell, what), 2, results.paper(cell, what)) for what in ("selected", "visible"))

    means, errors = (partial(tradeoff, part=part) for part in (MEAN, ERROR))
    caption = "GenPPL / mean unigram entropy, argmax at the last call."
    yield table("nfe-scaling", caption, ARMS.values(), means)
    yield table("nfe-scaling-errors", "Standard errors over shards of the table above.", ARMS.values(), errors)
    caption = "Positions that CRS selects along a path, and labels visible at once on average after warmup."
    yield table("nfe-scaling-selection", caption, ("Selected", "Visible"), selection)


def figures(results: Beside, preset: Preset) -> Iterator[Figure]:
    def panel(role: str, model: str) -> Panel:
        lines = (
            results.noted(name, [f"{role}/{nfe}/{arm}" for nfe in preset.nfes], preset.nfes, "ppl", note="entropy")
            for arm, name in ARMS.items()
        )
        return Panel(model, "NFE", "GenPPL", tuple(lines), ticks(preset.nfes), log_x=True, log_y=True)

    caption = "GenPPL over network calls, argmax at the last call; parentheses give unigram entropy."
    yield Figure("nfe-scaling", caption, tuple(panel(*model) for model in preset.captions.items()))


def claims(results: Beside, preset: Preset) -> Iterator[Claim]:
    def lower(role: str) -> Iterator[Finding]:
        for nfe in preset.nfes:
            for arm in list(ARMS)[:-1]:
                name = f"NLL of CRS less {ARMS[arm].lower()}, {nfe} calls"
                yield results.finding(below, name, f"{role}/{nfe}/CRS", f"{role}/{nfe}/{arm}")

    yield claim(
        "section 5.1",
        "On the distilled model CRS with top-p disabled has lower GenPPL at every number of calls than native "
        "sampling with p in {1.0, 0.95, 0.9}",
        lower("distilled"),
    )
    yield claim("section 5.1", "The base model shows the same ordering at every number of calls", lower("base"))
