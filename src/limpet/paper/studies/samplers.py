"""Every sampler of the field against the best top-p curve, by number of calls: quality at equal entropy.

What a sampler costs is its calls, so arms are compared at equal calls; and since any of them can be made sharper, each
is held against top-p at its own entropy, with whichever final step serves top-p best there."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np

from limpet.evaluation.statistics import Estimate, Floats, hull, interpolate, lowest
from limpet.experiments.claims import Finding, below
from limpet.experiments.contents import Dot, Entry, Panel, Scatter, Table, signed
from limpet.experiments.results import Results
from limpet.experiments.study import Cell
from limpet.models.model_files import MINIS
from limpet.paper.studies.presets import Preset
from limpet.paper.studies.published import NAMES, Beside, Claims
from limpet.samplers import parse

FILE = tomllib.loads(Path(__file__).with_name("samplers.toml").read_text("utf-8"))
CURVES: dict[str, list[str]] = FILE["curves"]  # of top-p, one a final step
RIVALS: dict[str, list[str]] = FILE["rivals"]
FAMILIES = {**CURVES, **RIVALS}
DRAWN: list[str] = FILE["drawn"]
CRS = [name for name in RIVALS if name.startswith("CRS,")]  # what Mend is held against besides
PROMPTED = (*CURVES, *(name for name in CRS if name != "CRS, ancestral"), "Mend")  # that also continue prefixes
STUDY = {"real": str(MINIS / "heldout.txt.xz"), "shown": 2, "digits": 6}
MEASURES = ("ppl", "entropy", "rep-4", "self-bleu")
LESS = ("NLL less best top-p", "Rep-4 less", "Self-BLEU less")  # at equal entropy
X, Y = "unigram entropy, nats", "NLL, nats a token"


def cells(preset: Preset) -> Iterator[Cell]:
    """Cells ROLE/NFE/ARM, and ROLE/prefix NFE/ARM for those that continue prefixes."""
    made = {arm: parse(arm)[1] for arms in FAMILIES.values() for arm in arms}
    for role, nfe in product(preset.captions, preset.nfes):
        model = preset.roles[role]
        for family, arms in FAMILIES.items():
            for arm in arms:
                sampler = made[arm].replace(nfe=nfe)
                yield Cell(f"{role}/{nfe}/{arm}", model, sampler, preset.fine_n)
                if family in PROMPTED and f"{role}/prefix {nfe}" in continued(preset):
                    yield Cell(
                        f"{role}/prefix {nfe}/{arm}", model, sampler, preset.prompted_n, preset.prompted_length,
                        preset.prompts,
                    )  # fmt: skip


def places(preset: Preset) -> dict[str, str]:
    """Where arms stand side by side, and what to call it."""
    return {
        f"{role}/{nfe}": f"{caption}, {nfe} calls" for role, caption in preset.captions.items() for nfe in preset.nfes
    }


def continued(preset: Preset) -> dict[str, str]:
    """The same after prefixes, at few calls and at many."""
    captions = list(preset.captions.items())[: None if preset.judges else 1]  # an exact source has but one length
    return {
        f"{role}/prefix {nfe}": f"{caption}, {nfe} calls after a prefix"
        for role, caption in captions
        for nfe in (preset.nfes[1], preset.nfes[-1])
    }


def there(at: str) -> dict[str, list[str]]:
    """The families that stand at a place."""
    return {family: arms for family, arms in FAMILIES.items() if "prefix" not in at or family in PROMPTED}


def less(
    results: Results, at: str, arm: str, curves: Mapping[str, Sequence[str]] = CURVES, measure: str = "nll"
) -> Estimate:
    """An arm less the best of some curves at its own entropy, shard by shard: of all that pass there, the one with the
    least NLL. Nothing is extrapolated, and a stretch where a curve folds is not read."""

    def along(nodes: Sequence[str], what: str) -> Floats:  # (shards, nodes)
        return np.stack([results.values(f"{at}/{node}", what) for node in nodes], 1)

    curved = [(along(nodes, "entropy"), along(nodes, "nll"), along(nodes, measure)) for nodes in curves.values()]
    entropies, own = results.values(f"{at}/{arm}", "entropy"), results.values(f"{at}/{arm}", measure)
    values, reasons = [], []
    for shard, entropy in enumerate(entropies):
        best, _, reason = lowest([(xs[shard], nlls[shard]) for xs, nlls, _ in curved], entropy)
        xs, _, ys = curved[best]
        values.append(np.nan if reason else own[shard] - interpolate(xs[shard], ys[shard], entropy)[0])
        reasons.append(reason)
    return Estimate(np.array(values), tuple(reasons))


def less_mixed(results: Results, at: str, arm: str, others: Sequence[str]) -> Estimate:
    """An arm's NLL less the least that mixing samples of other arms reaches at its own entropy, shard by shard: for a
    sampler of several parameters, which has no one curve through its arms."""
    xs, ys = (np.stack([results.values(f"{at}/{one}", what) for one in others], 1) for what in ("entropy", "nll"))
    own = zip(*(results.values(f"{at}/{arm}", what) for what in ("entropy", "nll")), strict=True)
    found = [(nll, *interpolate(*hull(x, y), entropy)) for x, y, (entropy, nll) in zip(xs, ys, own, strict=True)]
    return Estimate(np.array([nll - best for nll, best, _ in found]), tuple(reason for *_, reason in found))


def verdicts(results: Beside, preset: Preset) -> Table:
    """Whether each rival's first arm lies below the best top-p curve, by number of calls."""
    words = {"holds": "below", "fails": "above", "open": "open"}

    def entry(at: str, where: str, arm: str) -> Entry:
        found = below(where, less(results, at, arm))
        if math.isnan(found.estimate.mean):
            return Entry(f"no curve at {results(f'{at}/{arm}', 'entropy').mean:.2f}, open")
        return Entry(f"{signed(found.estimate, 3)}, {words[found.outcome]}")

    rows = [
        (Entry(family), Entry(arms[0]), *(entry(at, where, arms[0]) for at, where in places(preset).items()))
        for family, arms in RIVALS.items()
    ]
    return results.table("verdicts", [rows], *places(preset).values())


def tables(results: Beside, preset: Preset) -> Iterator[Table]:
    """Every arm at a number of calls: what was measured, and what it is less the best top-p at equal entropy."""
    yield verdicts(results, preset)
    for at, where in {**places(preset), **continued(preset)}.items():
        held = any("mauve" in results.cells[f"{at}/{arm}"] for arms in there(at).values() for arm in arms)
        measures = (*MEASURES, "mauve") if held else MEASURES

        def measured(cell: str, measures: Sequence[str] = measures) -> Iterator[Entry]:
            for one in measures:
                yield from results.entries(cell, (one,)) if one in results.cells[cell] else (Entry(""),)

        rows = tuple(
            tuple(
                (Entry(family), Entry(arm), *measured(f"{at}/{arm}"),
                 *(Entry(signed(less(results, at, arm, measure=one), 3)) for one in ("nll", "rep-4", "self-bleu")))
                for arm in arms
            )
            for family, arms in there(at).items()
        )  # fmt: skip
        head = ("Family", "Arm", *(NAMES[one] for one in measures), *LESS)
        yield Table(at.replace("/", "-").replace(" ", "-"), f"{where[0].upper()}{where[1:]}.", head, rows, names=2)


def panels(results: Beside, preset: Preset) -> Iterator[Panel]:
    """The families that matter most, legible on paper: one legend, and errors left to the tables."""
    for i, (at, where) in enumerate(places(preset).items()):
        lines = []
        for family in DRAWN:
            line = results.series(family, [f"{at}/{arm}" for arm in FAMILIES[family]], "entropy", "nll")
            lines.append(replace(line, y_error=(), joined=family in CURVES))
        yield Panel(where, X, Y, lines, legend=i == 0)


def scatters(results: Beside, preset: Preset) -> Iterator[Scatter]:
    """Every arm at every place, with its texts."""

    def dot(at: str, family: str, arm: str) -> Dot:
        cell = f"{at}/{arm}"
        return Dot(
            arm, family, results(cell, "entropy"), results(cell, "nll"), cell, tuple(results.texts.get(cell, ()))
        )

    stand = {
        where: [dot(at, family, arm) for family, arms in there(at).items() for arm in arms]
        for at, where in {**places(preset), **continued(preset)}.items()
    }
    yield Scatter("samplers", results.words["shows"], X, f"{Y} ({results.judges[0]})", stand, tuple(CURVES))


def claims(results: Beside, preset: Preset) -> Claims:
    """Of each family its first arm against the best top-p curve; Mend against all arms of CRS too."""

    def held(arm: str, where: Mapping[str, str], bound: float = 0.0) -> list[Finding]:
        return [below(what, less(results, at, arm), bound) for at, what in where.items()]

    def mended(where: Mapping[str, str]) -> list[Finding]:
        return [
            below(what, less_mixed(results, at, "mend", [arm for name in CRS for arm in there(at).get(name, ())]))
            for at, what in where.items()
        ]

    here, after = places(preset), continued(preset)
    return {
        **{family: held(arms[0], here) for family, arms in RIVALS.items()},
        "Mend by .15": held("mend", here, -0.15),
        "Mend against CRS": mended(here),
        "Mend after prefixes": held("mend", after),
        "Mend against CRS after prefixes": mended(after),
    }
