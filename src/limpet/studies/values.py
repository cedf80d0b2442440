"""Other tokens at the selected positions (section 5.2, appendix E.2): all else is replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from limpet.denoisers import Denoiser
from limpet.engine.path import Path, State, generate
from limpet.lab.claims import Claim, Finding, above, below, claim
from limpet.lab.page import Contrast, Entry, Table, entry, signed
from limpet.lab.results import Results
from limpet.lab.study import Cell, Probe, Seen
from limpet.samplers import CRS
from limpet.studies.audit import one, percent
from limpet.studies.paths import Settings, opened
from limpet.studies.presets import Preset
from limpet.studies.published import nll_difference

TITLE = "Do the values of selected tokens matter?"
ARMS = {"argmax": "argmax", "second": "second-ranked", "nucleus": "top-p=0.9 alternative", "refreshed": "refreshed"}
PAPER = {
    "argmax": "28.27 ± 0.53", "second": "77.75 ± 1.80", "nucleus": "78.36 ± 1.56", "refreshed": "26.42 ± 0.39",
    "native": "41.79 ± 0.84",
}  # fmt: skip
REFRESHED = {  # two of them our own, to tell labels that are revised from labels that are revised all at once
    "refreshed": "every call", "refreshed-half": "every second call", "refreshed-in-turn": "every second position",
}  # fmt: skip
CONVENTIONS = {
    "labels replaced": "of the visible labels, those that a call's refresh changes, all calls together",
    "labels put back": "of those, the ones that go back to the value before their last change",
}


def cells(preset: Preset) -> Iterator[Cell | Probe]:
    yield Cell("native", preset.distilled, preset.native, preset.n)
    yield Cell("argmax", preset.distilled, preset.crs, preset.n)
    for values in list({**ARMS, **REFRESHED})[1:]:
        yield Cell(values, preset.distilled, preset.crs.but(values=values), preset.n, replay="argmax")
    yield Probe("changes", (preset.distilled,), look, Settings(paths=preset.n, nfe=preset.nfe))


class Changes(NamedTuple):
    """How many labels were visible, over all calls of a path, how many a call replaced, how many it put back."""

    visible: int
    replaced: int
    back: int


def look(models: Sequence[Denoiser], settings: Settings, shard: int, shards: tuple[int, ...]) -> Iterator[Seen]:
    """What becomes of the labels of arms that refresh them, all at the positions of one CRS run."""
    crs = CRS(nfe=settings.nfe)
    for model in models:
        path = opened(model, settings, shards[shard])
        start = crs.begin(path)
        while start.call < crs.early:  # nothing is selected before: all arms share the path so far
            start, _ = crs.step(path, start)
        *_, (end, _) = generate(crs, path, start)
        for values in REFRESHED:
            arm = crs.but(values=values)
            found = followed(arm, path, start._replace(memory=arm.replay(path, end.memory).memory))
            yield Seen(model.name, "labels replaced", {"values": values}, *percent(found.replaced, found.visible))
            yield Seen(model.name, "labels put back", {"values": values}, *percent(found.back, found.replaced))


def followed(arm: CRS, path: Path, state: State) -> Changes:
    """What becomes of the visible labels of a path, from a state on."""
    former = torch.full_like(state.tokens, -1)  # what a label was before its last change
    visible = replaced = back = 0
    for after, info in generate(arm, path, state):
        if info.call < arm.nfe - 1:  # nothing is stored at the readout
            was, now, seen = state.memory[0], after.memory[0], info.marks["visible"]
            changed = seen & (now != was)
            visible, replaced = visible + int(seen.sum()), replaced + int(changed.sum())
            back += int((changed & (now == former)).sum())
            former = torch.where(changed, was, former)
        state = after
    return Changes(visible, replaced, back)


def tables(results: Results, preset: Preset) -> Iterator[Table]:
    rows = tuple(
        (Entry(name), *results.entries(cell, ("ppl", "entropy"), [PAPER[cell]]))
        for cell, name in {**ARMS, "native": "none (native)"}.items()
    )
    caption = (
        f"{preset.captions['distilled']}: selected positions of one CRS run with other values; {preset.nfe} calls."
    )
    yield Table("values", caption, ("Value of a label", "GenPPL", "Entropy"), (rows,))
    if set(REFRESHED) <= set(results.cells):  # reports written before these arms were added do without
        yield _refreshed(results, preset)


def _refreshed(results: Results, preset: Preset) -> Table:
    """How often labels are refreshed."""

    def row(values: str, name: str) -> tuple[Entry, ...]:
        gap = Entry(signed(results.contrast(values, "argmax"), 4))
        changes = (entry(one(results, quantity, values=values), 1) for quantity in CONVENTIONS)
        return Entry(name), *results.entries(values, ("ppl", "entropy")), gap, *changes

    caption = f"{preset.captions['distilled']}: the same positions, refreshed in other rhythms; not in the paper."
    head = ("Refreshed", "GenPPL", "Entropy", "ΔNLL, less argmax", "Labels replaced, %", "Of these put back, %")
    return Table("values-refreshed", caption, head, (tuple(row(*arm) for arm in REFRESHED.items()),))


def contrasts(results: Results, preset: Preset) -> Iterator[Contrast]:
    for arm in list(ARMS)[1:]:
        paper = f"{nll_difference(PAPER[arm], PAPER['argmax']):+.3f}"
        yield Contrast(f"NLL of {ARMS[arm]} less argmax", results.contrast(arm, "argmax"), paper)


def claims(results: Results, preset: Preset) -> Iterator[Claim]:
    def less(side: Callable[..., Finding], against: str, *arms: str) -> list[Finding]:
        name = {**ARMS, "native": "native"}
        return [
            side(f"NLL of {name[arm]} less {name[against]}", results.contrast(arm, against),
                 paper=nll_difference(PAPER[arm], PAPER[against])) for arm in arms
        ]  # fmt: skip

    yield claim(
        "section 5.2",
        "Replacing stored argmax labels by nearby alternatives reverses the likelihood gain over native sampling",
        less(above, "native", "second", "nucleus"),
    )
    yield claim(
        "appendix E.2",
        "Token identity matters: nearby alternatives at the same positions have higher NLL than argmax labels",
        less(above, "argmax", "second", "nucleus"),
    )
    yield claim(
        "appendix E.2",
        "Immutable identity is not required: values refreshed from each current argmax keep the gain over native",
        less(below, "native", "refreshed"),
    )
    yield claim("appendix E.2", "Refreshed values have lower NLL than stored ones", less(below, "argmax", "refreshed"))
