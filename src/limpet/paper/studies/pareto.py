"""What the released sampler's quality costs: NLL at the entropy that the released sampler has, by number of calls.

The released sampler is top-p .9 at a preset's most calls, read out by one more draw, which is its default, or by
argmax, its greedy tail and the paper's final step. A family is held against it by what its arms at one number of calls
reach at that entropy. A share of the texts from one arm and the rest from another have the means of both, entropy and
NLL alike, so what lies between two arms is reached by mixing their texts, and the lower hull of a family's arms is the
least NLL that it can be asked for. The time that goes with it is another measurement's: benchmarks/pareto.py puts both
together."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from limpet.evaluation.statistics import Estimate, hull
from limpet.experiments.claims import below
from limpet.experiments.contents import Entry, Panel, Series, Table, number, series, signed
from limpet.experiments.results import Results
from limpet.experiments.study import Cell
from limpet.paper.studies import samplers
from limpet.paper.studies.presets import Preset
from limpet.paper.studies.published import Beside, Claims, ticks
from limpet.samplers import parse

OWN: dict[str, list[str]] = tomllib.loads(Path(__file__).with_name("pareto.toml").read_text("utf-8"))
MORE = {family: [arm for arm in samplers.FAMILIES[family] if arm not in arms] for family, arms in OWN.items()}
RELEASED = {
    "argmax": "native top_p=.9",
    "sample": "native top_p=.9 final_step=sample",
}  # by final step
STUDY = {key: samplers.STUDY[key] for key in ("real", "digits")}  # so that it shares that study's cells
Arms = Mapping[int, Mapping[str, Sequence[str]]]  # by number of calls and family
X, Y = "network calls", "NLL less the released sampler's, at its entropy"


def calls(preset: Preset) -> list[int]:
    """A preset's own numbers of calls, fewer of them, and twice the most."""
    first = preset.nfes[0]
    return sorted(
        {few for few in (first // 4, first // 2, 3 * first // 4) if few > 1} | {*preset.nfes, 2 * preset.most}
    )


def families(preset: Preset, nfe: int) -> dict[str, list[str]]:
    """The arms at a number of calls."""
    shared = {family: arms if nfe in preset.nfes else [] for family, arms in MORE.items()}
    return {family: [*arms, *shared[family]] for family, arms in OWN.items() if arms or shared[family]}


def every(preset: Preset) -> Arms:
    return {nfe: families(preset, nfe) for nfe in calls(preset)}


def cells(preset: Preset) -> Iterator[Cell]:
    """Cells ROLE/NFE/ARM, as the study of samplers has them; beyond a preset's most calls fewer samples do."""
    for role, (nfe, families) in product(preset.captions, every(preset).items()):
        n = preset.fine_n if nfe <= preset.most else preset.n
        for arm in (arm for arms in families.values() for arm in arms):
            yield Cell(f"{role}/{nfe}/{arm}", preset.roles[role], parse(arm)[1].replace(nfe=nfe), n)


def released(preset: Preset, final_step: str) -> str:
    """The released sampler's cell, under a role."""
    return f"{preset.most}/{RELEASED[final_step]}"


class Mixture(NamedTuple):
    """Arms that reach an entropy with the least NLL."""

    shares: dict[str, float]  # of the texts, by arm
    slope: float  # of NLL over entropy from one to the other


def mixed(
    results: Results, preset: Preset, role: str, final_step: str, nfe: int, arms: Sequence[str]
) -> Mixture | None:  # fmt: skip
    """Those of some arms that reach the released sampler's entropy with the least NLL, over all shards; None where no
    mixture has that entropy."""
    points = {arm: tuple(results(f"{role}/{nfe}/{arm}", what).mean for what in ("entropy", "nll")) for arm in arms}
    wanted = results(f"{role}/{released(preset, final_step)}", "entropy").mean
    named = {point: arm for arm, point in reversed(points.items())}
    corners = zip(*hull(*zip(*points.values(), strict=True)), strict=True)
    for left, right in pairwise(corners):
        if left[0] <= wanted <= right[0]:
            wide = right[0] - left[0]
            shares = {named[left]: float((right[0] - wanted) / wide), named[right]: float((wanted - left[0]) / wide)}
            return Mixture({arm: share for arm, share in shares.items() if share}, float((right[1] - left[1]) / wide))
    return None


def less(results: Results, preset: Preset, role: str, final_step: str, nfe: int, arms: Sequence[str]) -> Estimate:
    """The NLL that some arms reach at the released sampler's entropy, less the released sampler's. All shards have one
    mixture, which is as diverse on the whole; what it is more or less in a shard of its own is taken off along the
    hull, and is the part that entropy's noise has in the error."""
    found = mixed(results, preset, role, final_step, nfe, arms)
    if found is None:
        none = np.full(len(results.study.shards), np.nan)
        return Estimate(none, ("no mixture of its arms has that entropy",) * len(none))
    more = {
        what: sum(share * results.values(f"{role}/{nfe}/{arm}", what) for arm, share in found.shares.items())
        - results.values(f"{role}/{released(preset, final_step)}", what)
        for what in ("entropy", "nll")
    }
    return Estimate(more["nll"] - found.slope * more["entropy"])


def alone(
    results: Results, preset: Preset, every: Arms, role: str, final_step: str
) -> dict[tuple[int, str, str], Estimate]:
    """The arms that are enough by themselves, by calls and family: their entropy is not less than the released
    sampler's, and their NLL is below its, with the confidence of every finding."""
    base = f"{role}/{released(preset, final_step)}"
    found = {}
    for nfe, families in every.items():
        for family, arm in ((family, arm) for family, arms in families.items() for arm in arms):
            gain = results.contrast(f"{role}/{nfe}/{arm}", base)
            kept = results.contrast(f"{role}/{nfe}/{arm}", base, measure="entropy").mean >= 0
            if kept and below("", gain).outcome == "holds":
                found[nfe, family, arm] = gain
    return found


def named(every: Arms) -> list[str]:
    """The families, wherever they stand."""
    return list(dict.fromkeys(family for families in every.values() for family in families))


def reached(
    results: Beside, preset: Preset, every: Arms, final_steps: Iterable[str] = tuple(RELEASED)
) -> Iterator[Table]:
    """By model and final step: NLL less the released sampler's at its entropy, by family and number of calls."""
    for (role, caption), final_step in product(preset.captions.items(), final_steps):

        def entry(family: str, nfe: int, role: str = role, final_step: str = final_step) -> Entry:
            arms = every[nfe].get(family)
            return Entry(signed(less(results, preset, role, final_step, nfe, arms), 3) if arms else "")

        base = f"{role}/{released(preset, final_step)}"
        at = {what: number(results(base, what), 3) for what in ("nll", "entropy")}
        words = results.words["tables"]["reached"]["caption"]
        yield Table(
            f"reached-{role}-{final_step}",
            words.format(caption=caption, final_step=final_step, calls=preset.most, **at),
            ("Family", *(f"{nfe} calls" for nfe in every)),
            (tuple((Entry(family), *(entry(family, nfe) for nfe in every)) for family in named(every)),),
        )


def tables(results: Beside, preset: Preset) -> Iterator[Table]:
    yield from reached(results, preset, every(preset))


def lines(
    results: Results, preset: Preset, every: Arms, role: str, final_step: str, at: Mapping[tuple[int, str], float]
) -> Iterator[Series]:
    """Each family over what `at` gives its numbers of calls, where it has a value; one without any keeps its place, so
    that a family looks alike in all panels."""
    for family in named(every):
        found = [
            (x, less(results, preset, role, final_step, nfe, every[nfe][one]))
            for (nfe, one), x in at.items()
            if one == family
        ]
        known = [(x, one) for x, one in found if not math.isnan(one.mean)]
        yield series(family, [x for x, _ in known], [one for _, one in known])


def panels(results: Beside, preset: Preset) -> Iterator[Panel]:
    own = every(preset)
    at = {(nfe, family): float(nfe) for nfe, families in own.items() for family in families}
    for (role, caption), final_step in product(preset.captions.items(), RELEASED):
        drawn = list(lines(results, preset, own, role, final_step, at))
        title = f"{caption}, beside top-p .9 at {preset.most} calls, {final_step}"
        yield Panel(title, X, Y, drawn, ticks(calls(preset)), log_x=True)


def claims(results: Beside, preset: Preset) -> Claims:
    """With Mend the fewest of a preset's own numbers of calls are enough."""
    few = preset.nfes[0]
    mend = families(preset, few)["Mend"]
    return {"few": [
        below(f"{caption}, Mend at {few} calls", less(results, preset, role, "argmax", few, mend))
        for role, caption in preset.captions.items()
    ]}  # fmt: skip
