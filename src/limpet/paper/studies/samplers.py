"""Every published sampler against the best top-p curve, by number of calls: quality at equal entropy.

The cost of a sampler is its number of calls, so samplers are compared at equal calls. Any sampler can be made sharper,
so each is compared with top-p at the sampler's own entropy, with whichever final step serves top-p best there."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from limpet.evaluation import Estimate, Floats, hull, interpolate, lowest
from limpet.experiments import (
    Cell,
    Entry,
    Finding,
    Panel,
    Point,
    Probe,
    Results,
    ScatterPlot,
    Table,
    below,
    format_signed,
)
from limpet.models.model_files import BUILTIN_FOLDER
from limpet.paper.studies.controls import control_table, controls
from limpet.paper.studies.presets import Preset, read_toml
from limpet.paper.studies.published import METRIC_CAPTIONS, Claims, PaperResults
from limpet.samplers import parse

FILE = read_toml("samplers.toml")
CURVES: dict[str, list[str]] = FILE["samplers"]["curves"]  # of top-p, one for each final step
RIVALS: dict[str, list[str]] = FILE["samplers"]["rivals"]
FAMILIES = {**CURVES, **RIVALS}
PLOTTED: list[str] = FILE["samplers"]["plotted"]
CRS_FAMILIES = [name for name in RIVALS if name.startswith("CRS,")]
PROMPTED = (*CURVES, *(name for name in CRS_FAMILIES if name != "CRS, sample"), "Mend")  # also continue prompts
STUDY = {"reference_text": str(BUILTIN_FOLDER / "heldout.txt.xz"), "texts_per_cell": 2, "digits": 6}
MEASURES = ("ppl", "entropy", "rep-4", "self-bleu")
DELTAS = {"nll": "Delta NLL", "rep-4": "Delta Rep-4", "self-bleu": "Delta Self-BLEU"}  # at equal entropy
X, Y = "unigram entropy, nats", "NLL, nats/token (lower is better)"


def cells(preset: Preset) -> Iterator[Cell | Probe]:
    """Cells ROLE/NFE/SAMPLER, ROLE/prompt NFE/SAMPLER for those that also continue prompts, and controls."""
    parsed = {text: parse(text)[1] for texts in FAMILIES.values() for text in texts}
    for role, nfe in product(preset.captions, preset.nfes):
        model = preset.roles[role]
        for family, texts in FAMILIES.items():
            for text in texts:
                sampler = parsed[text].replace(nfe=nfe)
                yield Cell(f"{role}/{nfe}/{text}", model, sampler, preset.fine_n)
                at = f"{role}/prompt {nfe}"
                if family in PROMPTED and at in prompted_places(preset):
                    n, length = preset.prompted_n, preset.prompted_length
                    yield Cell(f"{at}/{text}", model, sampler, n, length, preset.prompts)
    judge = preset.judges[0].name if preset.judges else None
    yield from (controls(preset.roles[role], preset.fine_n, judge=judge) for role in preset.captions)


def places(preset: Preset) -> dict[str, str]:
    """Model and number of calls of each comparison, with a caption."""
    return {
        f"{role}/{nfe}": f"{caption}, {nfe} calls" for role, caption in preset.captions.items() for nfe in preset.nfes
    }


def prompted_places(preset: Preset) -> dict[str, str]:
    """The same for continuations of prompts, with few calls and with many."""
    captions = list(preset.captions.items())[: None if preset.judges else 1]  # an exact source has one length only
    return {
        f"{role}/prompt {nfe}": f"{caption}, {nfe} calls after a prompt"
        for role, caption in captions
        for nfe in (preset.nfes[1], preset.nfes[-1])
    }


def families_at(place: str) -> dict[str, list[str]]:
    """The families that are compared at a place."""
    return {family: texts for family, texts in FAMILIES.items() if "prompt" not in place or family in PROMPTED}


def delta(
    results: Results, at: str, sampler: str, curves: Mapping[str, Sequence[str]] = CURVES, measure: str = "nll"
) -> Estimate:
    """A sampler minus the best of some curves at the sampler's own entropy, seed by seed.

    The best curve is the one with the lowest NLL there. Curves are not extrapolated, and not read where they fold."""

    def along(nodes: Sequence[str], name: str) -> Floats:  # (seeds, nodes)
        return np.stack([results.values(f"{at}/{node}", name) for node in nodes], 1)

    read = [(along(nodes, "entropy"), along(nodes, "nll"), along(nodes, measure)) for nodes in curves.values()]
    entropies, own = results.values(f"{at}/{sampler}", "entropy"), results.values(f"{at}/{sampler}", measure)
    values, reasons = [], []
    for seed, entropy in enumerate(entropies):
        best, _, reason = lowest([(xs[seed], nlls[seed]) for xs, nlls, _ in read], entropy)
        xs, _, ys = read[best]
        values.append(np.nan if reason else own[seed] - interpolate(xs[seed], ys[seed], entropy)[0])
        reasons.append(reason)
    return Estimate(np.array(values), tuple(reasons))


def delta_to_mixtures(results: Results, at: str, sampler: str, others: Sequence[str]) -> Estimate:
    """A sampler's NLL minus the lowest that mixing samples of other samplers reaches at its entropy, seed by seed.

    For a sampler with several parameters, whose settings do not lie on one curve."""
    xs, ys = (np.stack([results.values(f"{at}/{one}", name) for one in others], 1) for name in ("entropy", "nll"))
    own = zip(*(results.values(f"{at}/{sampler}", name) for name in ("entropy", "nll")), strict=True)
    found = [(nll, *interpolate(*hull(x, y), entropy)) for x, y, (entropy, nll) in zip(xs, ys, own, strict=True)]
    return Estimate(np.array([nll - best for nll, best, _ in found]), tuple(reason for *_, reason in found))


def verdicts(results: PaperResults, preset: Preset) -> Table:
    """Whether the first sampler of each family lies below the best top-p curve, by number of calls."""
    words = {"holds": "below", "fails": "above", "open": "open"}

    def entry(at: str, where: str, sampler: str) -> Entry:
        found = below(where, delta(results, at, sampler))
        if math.isnan(found.estimate.mean):
            return Entry(f"no curve at {results(f'{at}/{sampler}', 'entropy').mean:.2f}, open")
        return Entry(f"{format_signed(found.estimate, 3)}, {words[found.outcome]}")

    rows = [
        (Entry(family), Entry(texts[0]), *(entry(at, where, texts[0]) for at, where in places(preset).items()))
        for family, texts in RIVALS.items()
    ]
    return results.table("verdicts", [rows], *places(preset).values())


def tables(results: PaperResults, preset: Preset) -> Iterator[Table]:
    """Every sampler at each place: its measures, and its deltas to the best top-p curve at equal entropy."""
    yield verdicts(results, preset)
    for at, where in {**places(preset), **prompted_places(preset)}.items():
        families = families_at(at)
        has_mauve = any("mauve" in results.cells[f"{at}/{text}"] for texts in families.values() for text in texts)
        measures = (*MEASURES, "mauve") if has_mauve else MEASURES

        def row(family: str, text: str, at: str = at, measures: Sequence[str] = measures) -> Iterator[Entry]:
            yield from (Entry(family), Entry(text))
            cell = f"{at}/{text}"
            for measure in measures:
                yield from results.entries(cell, (measure,)) if measure in results.cells[cell] else (Entry(""),)
            for measure in DELTAS:
                yield Entry(format_signed(delta(results, at, text, measure=measure), 3))

        groups = [[row(family, text) for text in texts] for family, texts in families.items()]
        columns = (*(METRIC_CAPTIONS[measure] for measure in measures), *DELTAS.values())
        yield results.table(f"samplers/{at}", groups, *columns, place=f"{where[0].upper()}{where[1:]}")
    yield from control_table(results)


def panels(results: PaperResults, preset: Preset) -> Iterator[Panel]:
    """The families that matter most, legible in print: one legend, and errors in the tables only."""
    for i, (at, where) in enumerate(places(preset).items()):
        lines = []
        for family in PLOTTED:
            line = results.series(family, [f"{at}/{text}" for text in FAMILIES[family]], "entropy", "nll")
            lines.append(replace(line, y_error=(), joined=family in CURVES))
        yield Panel(where, X, Y, lines, legend=i == 0)


def scatters(results: PaperResults, preset: Preset) -> Iterator[ScatterPlot]:
    """Every sampler at every place, with its texts."""

    def point(at: str, family: str, text: str) -> Point:
        cell = f"{at}/{text}"
        x, y = results(cell, "entropy"), results(cell, "nll")
        return Point(text, family, x, y, cell, tuple(results.texts.get(cell, ())))

    by_place = {
        where: [point(at, family, text) for family, texts in families_at(at).items() for text in texts]
        for at, where in {**places(preset), **prompted_places(preset)}.items()
    }
    yield ScatterPlot(
        "samplers", results.study_texts["shows"], X, f"{Y} ({results.judges[0]})", by_place, tuple(CURVES)
    )


def claims(results: PaperResults, preset: Preset) -> Claims:
    """The first sampler of each family against the best top-p curve; Mend also against all CRS samplers."""

    def below_curve(sampler: str, where: Mapping[str, str], bound: float = 0.0) -> list[Finding]:
        return [below(caption, delta(results, at, sampler), bound) for at, caption in where.items()]

    def below_crs(where: Mapping[str, str]) -> list[Finding]:
        found = []
        for at, caption in where.items():
            others = [text for family in CRS_FAMILIES for text in families_at(at).get(family, ())]
            found.append(below(caption, delta_to_mixtures(results, at, "mend", others)))
        return found

    here, after = places(preset), prompted_places(preset)
    return {
        **{family: below_curve(texts[0], here) for family, texts in RIVALS.items()},
        "Mend by .15": below_curve("mend", here, -0.15),
        "Mend against CRS": below_crs(here),
        "Mend after prompts": below_curve("mend", after),
        "Mend against CRS after prompts": below_crs(after),
    }
