"""How few calls the released sampler's quality takes when even and odd positions step in turn: the study `pareto` for
interleaved arms, at its entropy, with the draw that is the released sampler's default for its last call."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from limpet.evaluation.statistics import Estimate
from limpet.experiments.claims import below
from limpet.experiments.contents import Entry, Table, number, signed
from limpet.experiments.results import Results
from limpet.experiments.study import Cell
from limpet.paper.studies import pareto, samplers
from limpet.paper.studies.presets import Preset
from limpet.paper.studies.published import Beside, Claims
from limpet.samplers import parse

INTERLEAVED: dict[str, list[str]] = tomllib.loads(Path(__file__).with_name("interleave.toml").read_text("utf-8"))
FAMILY = "in turn"  # of the arms that are to reach the released sampler
FINAL_STEP = "sample"
STUDY = {"digits": pareto.STUDY["digits"]}


def every(preset: Preset) -> pareto.Arms:
    """At one and a half times, twice and three times a preset's fewest calls."""
    return {nfe: {FAMILY: INTERLEAVED[FAMILY]} for nfe in (3 * preset.nfes[0] // 2, twice(preset), 3 * preset.nfes[0])}


def twice(preset: Preset) -> int:
    """The number of calls at which Mend is held against top-p, both in turn."""
    return 2 * preset.nfes[0]


def cells(preset: Preset) -> Iterator[Cell]:
    """Cells ROLE/NFE/ARM, and the released sampler's."""
    reaching = [(nfe, arm) for nfe in every(preset) for arm in INTERLEAVED[FAMILY]]
    held = [(twice(preset), arm) for arm in (*INTERLEAVED["curve"], *INTERLEAVED["mend"])]
    for role in preset.captions:
        for nfe, arm in dict.fromkeys([*reaching, (preset.most, pareto.RELEASED[FINAL_STEP]), *held]):
            yield Cell(f"{role}/{nfe}/{arm}", preset.roles[role], parse(arm)[1].replace(nfe=nfe), preset.n)


def tables(results: Beside, preset: Preset) -> Iterator[Table]:
    """What mixtures reach; and each arm by itself."""
    yield from pareto.reached(results, preset, every(preset), [FINAL_STEP])
    for role, caption in preset.captions.items():

        def entry(nfe: int, arm: str, role: str = role) -> Entry:
            nll, entropy = (results(f"{role}/{nfe}/{arm}", what) for what in ("nll", "entropy"))
            return Entry(f"{number(nll, 3)} at {entropy.mean:.3f}")

        rows = tuple((Entry(arm), *(entry(nfe, arm) for nfe in every(preset))) for arm in INTERLEAVED[FAMILY])
        words = results.words["tables"]["arms"]["caption"].format(caption=caption)
        yield Table(f"arms-{role}", words, ("Arm", *(f"{nfe} calls" for nfe in every(preset))), (rows,))
        arms = [*INTERLEAVED["curve"], *INTERLEAVED["mend"]]
        rows = tuple(
            (
                Entry(arm),
                entry(twice(preset), arm),
                Entry(signed(sharper(results, preset, role, arm), 3) if arm in INTERLEAVED["mend"] else ""),
            )
            for arm in arms
        )
        words = results.words["tables"]["sharper"]["caption"].format(caption=caption, calls=twice(preset))
        yield Table(f"sharper-{role}", words, ("Arm", "NLL at entropy", "less top-p in turn"), (rows,))


def sharper(results: Results, preset: Preset, role: str, arm: str) -> Estimate:
    """An arm less the curve of top-p, both in turn, at its own entropy."""
    return samplers.less(results, f"{role}/{twice(preset)}", arm, {"": INTERLEAVED["curve"]})


def claims(results: Beside, preset: Preset) -> Claims:
    """Each number of calls on each model is a claim of its own."""
    return {f"{nfe} calls on {caption}": [
        below(f"{caption}, {nfe} calls in turn", pareto.less(results, preset, role, FINAL_STEP, nfe, INTERLEAVED[FAMILY]))
    ] for nfe, (role, caption) in product(every(preset), preset.captions.items())}  # fmt: skip
