"""How few calls the released sampler's quality takes when even and odd positions step in turn: the study `pareto` for
woven arms, at its entropy, with the draw that is the released sampler's default for its last call."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from limpet.lab.claims import below
from limpet.lab.page import Entry, Table, number
from limpet.lab.study import Cell
from limpet.samplers import parse
from limpet.studies import pareto
from limpet.studies.presets import Preset
from limpet.studies.published import Beside, Claims

WOVEN: dict[str, list[str]] = tomllib.loads(Path(__file__).with_name("weave.toml").read_text("utf-8"))
READOUT = "ancestral"
STUDY = {"digits": pareto.STUDY["digits"]}


def every(preset: Preset) -> pareto.Arms:
    """At one and a half times, twice and three times a preset's fewest calls."""
    return dict.fromkeys((3 * preset.nfes[0] // 2, 2 * preset.nfes[0], 3 * preset.nfes[0]), WOVEN)


def cells(preset: Preset) -> Iterator[Cell]:
    """Cells ROLE/NFE/ARM, and the released sampler's."""
    for role in preset.captions:
        arms = [(nfe, arm) for nfe, families in every(preset).items() for arms in families.values() for arm in arms]
        for nfe, arm in [*arms, (preset.most, pareto.RELEASED[READOUT])]:
            yield Cell(f"{role}/{nfe}/{arm}", preset.roles[role], parse(arm)[1].but(nfe=nfe), preset.n)


def tables(results: Beside, preset: Preset) -> Iterator[Table]:
    """What mixtures reach; and each arm by itself."""
    yield from pareto.reached(results, preset, every(preset), [READOUT])
    for role, caption in preset.captions.items():

        def entry(nfe: int, arm: str, role: str = role) -> Entry:
            nll, entropy = (results(f"{role}/{nfe}/{arm}", what) for what in ("nll", "entropy"))
            return Entry(f"{number(nll, 3)} at {entropy.mean:.3f}")

        rows = tuple((Entry(arm), *(entry(nfe, arm) for nfe in every(preset))) for arm in WOVEN["in turn"])
        words = results.words["tables"]["arms"]["caption"].format(caption=caption)
        yield Table(f"arms-{role}", words, ("Arm", *(f"{nfe} calls" for nfe in every(preset))), (rows,))


def claims(results: Beside, preset: Preset) -> Claims:
    """Each number of calls on each model is a claim of its own."""
    return {f"{nfe} calls on {caption}": [
        below(f"{caption}, {nfe} calls in turn", pareto.less(results, preset, role, READOUT, nfe, WOVEN["in turn"]))
    ] for nfe, (role, caption) in product(every(preset), preset.captions.items())}  # fmt: skip
