"""How many calls the quality of the released sampler needs: NLL at the released sampler's entropy, by number of calls.

The released sampler is top-p .9 at a preset's most calls, with final step sample (its default) or argmax (its greedy
tail, and the paper's final step). Mixing texts of two samplers mixes their mean entropy and their mean NLL alike. So a
family reaches, at the released entropy, the lower hull of its samplers at one number of calls. benchmarks/pareto.py
adds the time of each number of calls."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np

from limpet.evaluation import Estimate, hull
from limpet.experiments import (
    Cell,
    Entry,
    Panel,
    Results,
    Series,
    Table,
    below,
    estimate_series,
    format_estimate,
    format_signed,
)
from limpet.paper.studies.presets import Preset
from limpet.paper.studies.published import Claims, PaperResults, ticks
from limpet.paper.studies.samplers import FAMILIES, FILE
from limpet.paper.studies.samplers import STUDY as SAMPLERS_STUDY
from limpet.samplers import parse

OWN: dict[str, list[str]] = FILE["pareto"]
MORE = {family: [text for text in FAMILIES[family] if text not in own] for family, own in OWN.items()}
RELEASED = {"argmax": "native top_p=.9 final_step=argmax", "sample": "native top_p=.9"}  # by final step
STUDY = {key: SAMPLERS_STUDY[key] for key in ("reference_text", "digits")}  # so that it shares that study's cells
SamplersByCalls = Mapping[int, Mapping[str, Sequence[str]]]  # by number of calls and family
X, Y = "network calls", "delta NLL at the released entropy"


def calls(preset: Preset) -> list[int]:
    """A preset's own numbers of calls, smaller ones, and twice the largest."""
    first = preset.nfes[0]
    fewer = {few for few in (first // 4, first // 2, 3 * first // 4) if few > 1}
    return sorted(fewer | {*preset.nfes, 2 * preset.max_nfe})


def families(preset: Preset, nfe: int) -> dict[str, list[str]]:
    """The samplers at a number of calls, by family."""
    shared = {family: texts if nfe in preset.nfes else [] for family, texts in MORE.items()}
    return {family: [*texts, *shared[family]] for family, texts in OWN.items() if texts or shared[family]}


def by_calls(preset: Preset) -> SamplersByCalls:
    """All samplers of the study."""
    return {nfe: families(preset, nfe) for nfe in calls(preset)}


def cells(preset: Preset) -> Iterator[Cell]:
    """Cells ROLE/NFE/SAMPLER, as in the study of samplers; beyond a preset's most calls with fewer samples."""
    for role, (nfe, families) in product(preset.captions, by_calls(preset).items()):
        n = preset.fine_n if nfe <= preset.max_nfe else preset.n
        for text in (text for texts in families.values() for text in texts):
            yield Cell(f"{role}/{nfe}/{text}", preset.roles[role], parse(text)[1].replace(nfe=nfe), n)


def released_cell(preset: Preset, final_step: str) -> str:
    """The released sampler's cell, without its role."""
    return f"{preset.max_nfe}/{RELEASED[final_step]}"


class SamplerMixture(NamedTuple):
    """The samplers that reach an entropy with the lowest NLL."""

    shares: dict[str, float]  # of the texts, by sampler
    slope: float  # of NLL against entropy, from one to the other


def best_mixture(
    results: Results, preset: Preset, role: str, final_step: str, nfe: int, texts: Sequence[str]
) -> SamplerMixture | None:
    """The mixture of some samplers with the released entropy and the lowest NLL, over all seeds; None if there is
    none with that entropy."""
    points = {text: tuple(results(f"{role}/{nfe}/{text}", name).mean for name in ("entropy", "nll")) for text in texts}
    wanted = results(f"{role}/{released_cell(preset, final_step)}", "entropy").mean
    sampler_at = {point: text for text, point in reversed(points.items())}
    corners = zip(*hull(*zip(*points.values(), strict=True)), strict=True)
    for left, right in pairwise(corners):
        if left[0] <= wanted <= right[0]:
            width = right[0] - left[0]
            shares = {
                sampler_at[left]: float((right[0] - wanted) / width),
                sampler_at[right]: float((wanted - left[0]) / width),
            }
            used = {text: share for text, share in shares.items() if share}
            return SamplerMixture(used, float((right[1] - left[1]) / width))
    return None


def delta(results: Results, preset: Preset, role: str, final_step: str, nfe: int, texts: Sequence[str]) -> Estimate:
    """The NLL of the best mixture minus the released sampler's.

    All seeds share one mixture, which has the released entropy on average. The difference of entropy within a seed is
    removed along the hull, so that the error includes the noise of entropy."""
    found = best_mixture(results, preset, role, final_step, nfe, texts)
    if found is None:
        count = len(results.study.seeds)
        return Estimate(np.full(count, math.nan), ("no mixture of its samplers has that entropy",) * count)
    base, difference = f"{role}/{released_cell(preset, final_step)}", {}
    for name in ("entropy", "nll"):
        mixed = sum(share * results.values(f"{role}/{nfe}/{text}", name) for text, share in found.shares.items())
        difference[name] = mixed - results.values(base, name)
    return Estimate(difference["nll"] - found.slope * difference["entropy"])


def all_families(samplers: SamplersByCalls) -> list[str]:
    """The families at any number of calls."""
    return list(dict.fromkeys(family for families in samplers.values() for family in families))


def reached(
    results: PaperResults, preset: Preset, samplers: SamplersByCalls, final_steps: Iterable[str] = tuple(RELEASED)
) -> Iterator[Table]:
    """By model and final step: delta NLL at the released entropy, by family and number of calls."""
    for (role, caption), final_step in product(preset.captions.items(), final_steps):

        def entry(family: str, nfe: int, role: str = role, final_step: str = final_step) -> Entry:
            texts = samplers[nfe].get(family)
            return Entry(format_signed(delta(results, preset, role, final_step, nfe, texts), 3) if texts else "")

        base = f"{role}/{released_cell(preset, final_step)}"
        at = {name: format_estimate(results(base, name), 3) for name in ("nll", "entropy")}
        rows = [(Entry(family), *(entry(family, nfe) for nfe in samplers)) for family in all_families(samplers)]
        yield results.table(
            f"reached/{role}/{final_step}",
            [rows],
            *(f"{nfe} calls" for nfe in samplers),
            caption=caption,
            final_step=final_step,
            calls=str(preset.max_nfe),
            **at,
        )


def tables(results: PaperResults, preset: Preset) -> Iterator[Table]:
    yield from reached(results, preset, by_calls(preset))


def lines(
    results: Results,
    preset: Preset,
    samplers: SamplersByCalls,
    role: str,
    final_step: str,
    at: Mapping[tuple[int, str], float],
) -> Iterator[Series]:
    """A line for each family over the x that `at` gives its numbers of calls, where it has a value. A family without
    a value keeps its place, so that it looks alike in all panels."""
    for family in all_families(samplers):
        found = [
            (x, delta(results, preset, role, final_step, nfe, samplers[nfe][one]))
            for (nfe, one), x in at.items()
            if one == family
        ]
        known = [(x, one) for x, one in found if not math.isnan(one.mean)]
        yield estimate_series(family, [x for x, _ in known], [one for _, one in known])


def panels(results: PaperResults, preset: Preset) -> Iterator[Panel]:
    samplers = by_calls(preset)
    at = {(nfe, family): float(nfe) for nfe, families in samplers.items() for family in families}
    for (role, caption), final_step in product(preset.captions.items(), RELEASED):
        title = f"{caption}, against top-p .9 at {preset.max_nfe} calls, {final_step}"
        found = list(lines(results, preset, samplers, role, final_step, at))
        yield Panel(title, X, Y, found, ticks(calls(preset)), log_x=True)


def claims(results: PaperResults, preset: Preset) -> Claims:
    """With Mend, the smallest of a preset's own numbers of calls is enough."""
    few = preset.nfes[0]
    mend, found = families(preset, few)["Mend"], []
    for role, caption in preset.captions.items():
        found.append(below(f"{caption}, Mend at {few} calls", delta(results, preset, role, "argmax", few, mend)))
    return {"few": found}
