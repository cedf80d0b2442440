"""How few calls reach the quality of the released sampler when even and odd positions are updated alternately.

This is the study `pareto` for interleaved samplers, with the released sampler's default final step."""

from collections.abc import Iterator
from itertools import product

from limpet.evaluation import Estimate
from limpet.experiments import Cell, Entry, Results, Table, below, format_estimate, format_signed
from limpet.paper.studies import pareto, samplers
from limpet.paper.studies.presets import Preset
from limpet.paper.studies.published import Claims, PaperResults
from limpet.samplers import parse

SAMPLERS: dict[str, list[str]] = samplers.FILE["interleave"]
FAMILY = "interleaved"  # the samplers that are mixed to reach the released entropy
FINAL_STEP = "sample"
STUDY = {"digits": pareto.STUDY["digits"]}


def by_calls(preset: Preset) -> pareto.SamplersByCalls:
    """The mixed samplers at one and a half times, twice and three times a preset's fewest calls."""
    first = preset.nfes[0]
    return {nfe: {FAMILY: SAMPLERS[FAMILY]} for nfe in (3 * first // 2, compared_calls(preset), 3 * first)}


def compared_calls(preset: Preset) -> int:
    """The number of calls at which Mend is compared with top-p, both interleaved."""
    return 2 * preset.nfes[0]


def cells(preset: Preset) -> Iterator[Cell]:
    """Cells ROLE/NFE/SAMPLER, and the released sampler's."""
    mixed = [(nfe, text) for nfe in by_calls(preset) for text in SAMPLERS[FAMILY]]
    compared = [(compared_calls(preset), text) for text in (*SAMPLERS["curve"], *SAMPLERS["mend"])]
    released = (preset.max_nfe, pareto.RELEASED[FINAL_STEP])
    for role in preset.captions:
        for nfe, text in dict.fromkeys([*mixed, released, *compared]):
            yield Cell(f"{role}/{nfe}/{text}", preset.roles[role], parse(text)[1].replace(nfe=nfe), preset.n)


def tables(results: PaperResults, preset: Preset) -> Iterator[Table]:
    """What mixtures reach, and each sampler by itself."""
    yield from pareto.reached(results, preset, by_calls(preset), [FINAL_STEP])
    calls = compared_calls(preset)
    for role, caption in preset.captions.items():

        def entry(nfe: int, text: str, role: str = role) -> Entry:
            nll, entropy = (results(f"{role}/{nfe}/{text}", name) for name in ("nll", "entropy"))
            return Entry(f"{format_estimate(nll, 3)} at {entropy.mean:.3f}")

        rows = [(Entry(text), *(entry(nfe, text) for nfe in by_calls(preset))) for text in SAMPLERS[FAMILY]]
        columns = (f"{nfe} calls" for nfe in by_calls(preset))
        yield results.table(f"samplers/{role}", [rows], *columns, caption=caption)
        rows = [(Entry(text), entry(calls, text), Entry("")) for text in SAMPLERS["curve"]]
        for text in SAMPLERS["mend"]:
            against = format_signed(mend_against_top_p(results, preset, role, text), 3)
            rows.append((Entry(text), entry(calls, text), Entry(against)))
        yield results.table(f"best/{role}", [rows], caption=caption, calls=str(calls))


def mend_against_top_p(results: Results, preset: Preset, role: str, text: str) -> Estimate:
    """The delta NLL of a sampler against the curve of top-p, both interleaved, at the sampler's entropy."""
    return samplers.delta(results, f"{role}/{compared_calls(preset)}", text, {"": SAMPLERS["curve"]})


def claims(results: PaperResults, preset: Preset) -> Claims:
    """A claim for each number of calls and model."""
    found = {}
    for nfe, (role, caption) in product(by_calls(preset), preset.captions.items()):
        delta = pareto.delta(results, preset, role, FINAL_STEP, nfe, SAMPLERS[FAMILY])
        found[f"{nfe} calls on {caption}"] = [below(f"{caption}, {nfe} calls, interleaved", delta)]
    return found
