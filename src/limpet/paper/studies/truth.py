"""Samplers where the answer is known: molecules, sudoku boards and puzzles, and a grammar with an exact denoiser.

Checkers decide, so no judge is needed. CRS and Mend are compared with the best baseline at equal calls. It is chosen
anew for each seed, by the quality on the other seeds: no seed reports on a choice that it made."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from limpet.evaluation import Estimate, paired
from limpet.experiments import (
    Cell,
    Entry,
    Finding,
    Panel,
    Point,
    Probe,
    Prompts,
    Results,
    ScatterPlot,
    Table,
    above,
    format_estimate,
    format_signed,
)
from limpet.models.prompt_layouts import SUDOKU
from limpet.paper.studies.controls import control_table, controls
from limpet.paper.studies.presets import Preset, WorldSize
from limpet.paper.studies.published import Claims, PaperResults, ticks
from limpet.paper.studies.samplers import FILE
from limpet.samplers import Sampler, parse

BASELINES: dict[str, list[str]] = FILE["truth"]["baselines"]
COMPARED: dict[str, list[str]] = FILE["truth"]["compared"]
RIVALS: dict[str, list[str]] = FILE["truth"]["rivals"]
FAMILIES = {**BASELINES, **COMPARED, **RIVALS}
NATIVE = "native"
STUDY = {"texts_per_cell": 2, "digits": 6, "metrics": (), "judges": ()}
WORDS = {"holds": "better", "fails": "worse", "open": "open"}
DISTANCE = "distance"  # a measure of ours: the mean of a checker's distances


@dataclass(frozen=True)
class World:
    """A model with a checker, and what is measured of its samples."""

    model: str
    caption: str
    short: str
    quality: str  # the measure that decides
    others: tuple[str, ...]  # what quality may cost; the first is the x axis of the interactive figure
    clues: int = 0  # of the puzzles that are prompts


WORLDS = {
    "molecules": World(
        "molecules", "molecules", "molecules", "valid", (DISTANCE, "v.u.n.", "unique", "novel", "scaffolds")
    ),
    "boards": World("sudoku", "sudoku boards without clues", "boards", "valid", ("wrong units", "distinct")),
    "puzzles": World("sudoku", "sudoku puzzles with 32 clues", "puzzles", "solved", ("clues kept", "wrong units"), 32),
    "boards-6x6": World(
        "sudoku-6x6", "6x6 sudoku boards without clues", "6x6 boards", "valid", ("wrong units", "distinct")
    ),
    "puzzles-6x6": World(
        "sudoku-6x6", "6x6 sudoku puzzles with 14 clues", "6x6 puzzles", "solved", ("clues kept", "wrong units"), 14
    ),
    "grammar": World("exact:grammar", "balanced brackets", "brackets", "grammatical", (DISTANCE, "distinct")),
}
LOWER = (DISTANCE, "wrong units")  # measures of which less is better


@cache
def _sampler(text: str) -> Sampler:
    return parse(text)[1]


def samplers_at(size: WorldSize, nfe: int) -> list[str]:
    """The samplers of a world at a number of calls."""
    families = FAMILIES if nfe in size.rival_nfes else {**BASELINES, **COMPARED}
    return [text for texts in families.values() for text in texts]


def cells(preset: Preset) -> Iterator[Cell | Probe]:
    """Cells WORLD/NFE/SAMPLER, WORLD COUNT/NFE/native for other numbers of clues, at the most calls, and controls of
    the grammar."""
    for name, size in preset.truth.items():
        world = WORLDS[name]
        for nfe in size.nfes:
            for text in samplers_at(size, nfe):
                sampler = _sampler(text).replace(nfe=nfe)
                yield Cell(f"{name}/{nfe}/{text}", world.model, sampler, size.n, prompts=_prompts(world, world.clues))
        native = _sampler(NATIVE).replace(nfe=max(size.nfes))
        for clues in size.clue_counts:
            cell = clue_cell(preset, name, clues)
            yield Cell(cell, world.model, native, size.n, prompts=_prompts(world, clues))
    if (brackets := preset.truth.get("grammar")) is not None:
        yield controls(WORLDS["grammar"].model, brackets.n, metrics=("entropy",))


def _prompts(world: World, clues: int) -> Prompts | None:
    return Prompts(f"{world.model} {clues}", len(SUDOKU[world.model].empty), 1) if clues else None


# Estimates


def measure(results: Results, cell: str, name: str) -> Estimate:
    """A measure of a cell; `DISTANCE` is the mean of the checker's distances."""
    if name != DISTANCE:
        return results(cell, name)
    parts = [results.values(cell, one) for one in results.cells[cell] if one.endswith(f" {DISTANCE}")]
    return Estimate(np.mean(parts, axis=0))


def quality(results: Results, at: str, text: str) -> Estimate:
    """The measure that decides in a world. at: WORLD/NFE."""
    return measure(results, f"{at}/{text}", WORLDS[at.partition("/")[0]].quality)


class Baseline(NamedTuple):
    """The best baseline at a place: its values, each of a choice made on the other seeds, and what was chosen."""

    texts: tuple[str, ...]  # one a seed

    @property
    def text(self) -> str:
        """What most seeds chose."""
        return Counter(self.texts).most_common(1)[0][0]

    def values(self, results: Results, at: str, name: str) -> Estimate:
        """A measure of the chosen baselines, seed by seed."""
        chosen = [measure(results, f"{at}/{text}", name).values[seed] for seed, text in enumerate(self.texts)]
        return Estimate(np.array(chosen))


def best_baseline(results: Results, at: str) -> Baseline:
    """For each seed the baseline with the highest mean quality on the other seeds; the first of equals."""
    texts = [text for texts in BASELINES.values() for text in texts]
    values = np.stack([quality(results, at, text).values for text in texts])  # (baselines, seeds)
    others = values.sum(1, keepdims=True) - values
    return Baseline(tuple(texts[i] for i in others.argmax(0)))


def against_baseline(results: Results, at: str, text: str, name: str | None = None) -> Finding:
    """A sampler minus the best baseline, in quality or in another measure, as a finding that it is better."""
    wanted = name or WORLDS[at.partition("/")[0]].quality
    found, base = measure(results, f"{at}/{text}", wanted), best_baseline(results, at).values(results, at, wanted)
    delta = paired(base.values, found.values) if wanted in LOWER else paired(found.values, base.values)
    return above(at, delta)


def against_native(results: Results, at: str, text: str, name: str) -> Finding:
    """A sampler minus native sampling at equal calls in a measure, as a finding that it is better."""
    found, base = (measure(results, f"{at}/{one}", name) for one in (text, NATIVE))
    return above(at, paired(base.values, found.values) if name in LOWER else paired(found.values, base.values))


def calls_needed(results: Results, preset: Preset, world: str, text: str) -> int | None:
    """The fewest calls at which the mean quality reaches that of native sampling with the most calls."""
    nfes = preset.truth[world].nfes
    target = quality(results, f"{world}/{max(nfes)}", NATIVE).mean
    reached = (nfe for nfe in nfes if quality(results, f"{world}/{nfe}", text).mean >= target)
    return min(reached, default=None)


def known_mass(molecules: int, nats: float) -> float:
    """The least probability that a model gives to a set of strings whose mean negative log-likelihood is `nats`.

    By Jensen's inequality the mean probability of a string is at least exp of its mean log-probability."""
    return molecules * math.exp(-nats)


# The report


def tables(results: PaperResults, preset: Preset) -> Iterator[Table]:
    """For each world: the verdicts, every sampler at each number of calls, and what quality costs."""
    for name, size in preset.truth.items():
        world = WORLDS[name]
        columns = [f"{nfe} calls" for nfe in size.nfes]
        yield results.table(f"truth/{name}", [verdict_rows(results, preset, name)], *columns, world=world.caption)
        yield results.table(f"costs/{name}", [cost_rows(results, preset, name)], *columns, world=world.caption)
        for nfe in size.nfes:
            at, names = f"{name}/{nfe}", (world.quality, *world.others)
            rows = [
                (Entry(family), Entry(text), *(_value(results, f"{at}/{text}", one) for one in names))
                for family, texts in FAMILIES.items()
                for text in texts
                if f"{at}/{text}" in results.cells
            ]
            yield results.table(f"samplers/{at}", [rows], *names, place=f"{world.caption}, {nfe} calls")
        if counts := clue_counts(preset, name):
            row = (Entry(NATIVE), *(_value(results, clue_cell(preset, name, clues), "solved") for clues in counts))
            columns = [f"{clues} clues" for clues in counts]
            yield results.table(f"clues/{name}", [[row]], *columns, world=world.caption.partition(" with ")[0])
    yield from control_table(results)


def clue_counts(preset: Preset, world: str) -> list[int]:
    """All numbers of clues of a world's puzzles, if there are others than its own."""
    others = preset.truth[world].clue_counts
    return sorted({WORLDS[world].clues, *others}) if others else []


def clue_cell(preset: Preset, world: str, clues: int) -> str:
    """The cell of native sampling on a world's puzzles with so many clues, with the most calls."""
    name = world if clues == WORLDS[world].clues else f"{world} {clues}"
    return f"{name}/{max(preset.truth[world].nfes)}/{NATIVE}"


def _value(results: Results, cell: str, name: str) -> Entry:
    return Entry(format_estimate(measure(results, cell, name), 3))


def verdict_rows(
    results: Results, preset: Preset, world: str, nfes: Sequence[int] | None = None
) -> Iterator[tuple[Entry, ...]]:
    """Native sampling, the best baseline, and CRS and Mend with the verdict on the difference from that baseline."""
    places = [f"{world}/{nfe}" for nfe in nfes or preset.truth[world].nfes]
    yield Entry("native"), Entry(NATIVE), *(Entry(format_estimate(quality(results, at, NATIVE), 3)) for at in places)
    best = [best_baseline(results, at) for at in places]
    values = [one.values(results, at, WORLDS[world].quality) for one, at in zip(best, places, strict=True)]
    yield Entry("best baseline"), Entry("its choice, below"), *(Entry(format_estimate(one, 3)) for one in values)
    for family, (text,) in COMPARED.items():
        entries = []
        for at in places:
            verdict = WORDS[against_baseline(results, at, text).outcome]
            entries.append(Entry(f"{format_estimate(quality(results, at, text), 3)}, {verdict}"))
        yield Entry(family), Entry(text), *entries
    yield Entry("chosen"), Entry(""), *(Entry(one.text) for one in best)


def cost_rows(results: Results, preset: Preset, world: str) -> Iterator[tuple[Entry, ...]]:
    """Each other measure of CRS and Mend minus that of native sampling at equal calls, with the verdict."""
    for family, (text,) in COMPARED.items():
        for name in WORLDS[world].others:
            entries = []
            for nfe in preset.truth[world].nfes:
                found = against_native(results, f"{world}/{nfe}", text, name)
                signed = Estimate(-found.estimate.values) if name in LOWER else found.estimate
                entries.append(Entry(f"{format_signed(signed, 3)}, {WORDS[found.outcome]}"))
            yield Entry(family), Entry(name), *entries


def panels(results: PaperResults, preset: Preset) -> Iterator[Panel]:
    """Quality by number of calls, one panel a world."""
    for i, (name, size) in enumerate(preset.truth.items()):
        world, nfes = WORLDS[name], size.nfes
        lines = [
            results.series(family, [f"{name}/{nfe}/{text}" for nfe in nfes], nfes, world.quality)
            for family, text in {"native": NATIVE, **{family: text for family, (text,) in COMPARED.items()}}.items()
        ]
        yield Panel(
            world.caption, "network calls", f"share {world.quality}", lines, ticks(nfes), log_x=True, legend=i == 0
        )


def scatters(results: PaperResults, preset: Preset) -> Iterator[ScatterPlot]:
    """Every sampler in every world at each number of calls, with its samples."""

    def point(at: str, family: str, text: str, world: World) -> Point:
        cell = f"{at}/{text}"
        x, y = (measure(results, cell, name) for name in (world.others[0], world.quality))
        return Point(text, family, x, y, cell, tuple(results.texts.get(cell, ())))

    plots: dict[str, list[Point]] = {}
    for name, size in preset.truth.items():
        world = WORLDS[name]
        for nfe in size.nfes:
            at = f"{name}/{nfe}"
            plots[f"{world.caption}, {nfe} calls: {world.quality} over {world.others[0]}"] = [
                point(at, family, text, world)
                for family, texts in FAMILIES.items()
                for text in texts
                if f"{at}/{text}" in results.cells
            ]
    x, y = "the second measure of the title", "the first measure of the title (a share, higher is better)"
    yield ScatterPlot("truth", results.study_texts["shows"], x, y, plots)


def claims(results: PaperResults, preset: Preset) -> Claims:
    """CRS and Mend against the best baseline in every world."""
    return {
        f"{family} on {WORLDS[world].caption}": [against_baseline(results, f"{world}/{nfe}", text) for nfe in size.nfes]
        for world, size in preset.truth.items()
        for family, (text,) in COMPARED.items()
    }
