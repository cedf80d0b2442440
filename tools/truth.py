"""Write the tables and sentences of docs/truth.md from the committed report of the study `truth`.

python tools/truth.py

The report comes from `limpet paper study run truth --preset mini-cpu --precision bfloat16` and tools/reports.py."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from blocks import machines, put
from limpet.evaluation.checkers.hashes import HashSet
from limpet.evaluation.checkers.molecules import FOLDER, TRAINING, MoleculeChecker
from limpet.evaluation.statistics import Estimate
from limpet.experiments import Entry, Results, Table, format_estimate, report
from limpet.experiments.render import markdown
from limpet.models.prompt_layouts import SUDOKU
from limpet.paper import studies
from limpet.paper.studies import truth

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/truth.md"
SIZE = studies.preset("mini-cpu")
REPORT = ROOT / "docs/reports/mini" / studies.study("truth", SIZE).full_name
PUBLISHED = ROOT / "docs/reports/published-truth.toml"
COLUMNS = 4  # of numbers in a table
FEW_AND_MANY = (16, 64)  # calls
SAMPLERS = {"native": "native", "Mend": "mend"}  # of the cards
WANTED_VUN = 0.8  # of molecules, where native sampling has 64 calls


def committed() -> Results:
    """The results of the committed report."""
    return report.read_report(studies.study("truth", SIZE), REPORT)


def listed(names: Sequence[str]) -> str:
    """Names as in "a, b and c"."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def shown_calls(world: str) -> tuple[int, ...]:
    """The numbers of calls in the tables of the page: the largest."""
    return SIZE.truth[world].nfes[-COLUMNS:]


# In short


def in_short(results: Results) -> str:
    """Where Mend and CRS beat the best baseline, with few calls and with many."""

    def where(family: str, nfe: int) -> str:
        found: dict[str, list[str]] = {}
        for world, size in SIZE.truth.items():
            if nfe in size.nfes:
                outcome = truth.against_baseline(results, f"{world}/{nfe}", truth.COMPARED[family][0]).outcome
                found.setdefault(outcome, []).append(truth.WORLDS[world].short)
        words = {"holds": "right more often on", "fails": "right less often on", "open": "undecided on"}
        return f"{family} is {listed([f'{words[one]} {listed(found[one])}' for one in words if one in found])}"

    sentences = [
        f"Against the best baseline with {nfe} calls, {where('Mend', nfe)}; {where('CRS', nfe)}."
        for nfe in FEW_AND_MANY
    ]
    return "\n".join(sentences)


def costs(results: Results, family: str) -> list[str]:
    """The measures in which a sampler is worse than native sampling at equal calls, by world."""
    (text,) = truth.COMPARED[family]
    lines = []
    for world in SIZE.truth:
        for name in truth.WORLDS[world].others:
            calls = [
                nfe
                for nfe in SIZE.truth[world].nfes
                if truth.against_native(results, f"{world}/{nfe}", text, name).outcome == "fails"
            ]
            if calls:
                numbers = [truth.against_native(results, f"{world}/{nfe}", text, name) for nfe in calls]
                sign = -1 if name in truth.LOWER else 1
                values = [sign * one.estimate.mean for one in numbers]
                span = f"{min(values):+.3f}" + (f" to {max(values):+.3f}" if len(values) > 1 else "")
                where = truth.WORLDS[world].short
                lines.append(f"`{name}` on {where} {span} at {listed(list(map(str, calls)))} calls")
    return lines


def costs_list(results: Results) -> str:
    """The same for every sampler that is compared, as a list."""
    lines = []
    for family in truth.COMPARED:
        found = costs(results, family)
        lines.append(f"- {family}: {'; '.join(found) if found else 'nothing'}.")
    return "\n".join(lines)


# Tables


def world_table(results: Results, world: str) -> str:
    """Native sampling, the best baseline, CRS and Mend by number of calls, with verdicts; then what the baseline is."""
    *rows, chosen = truth.verdict_rows(results, SIZE, world, shown_calls(world))
    place = truth.WORLDS[world]
    head = (f"share {place.quality}", *(f"{nfe} calls" for nfe in shown_calls(world)))
    table = Table(world, "", head, (tuple((row[0], *row[2:]) for row in rows),))
    calls = zip(shown_calls(world), chosen[2:], strict=True)
    best = "; ".join(f"`{entry.text}` at {nfe} calls" for nfe, entry in calls)
    size = f"{len(results.study.seeds)} seeds x {SIZE.truth[world].n} samples"
    return f"{markdown(table).strip()}\n\n{size[0].upper()}{size[1:]}. The best baseline is {best}."


def calls_table(results: Results) -> str:
    """The fewest calls at which the mean quality is that of native sampling with the most calls."""

    def entry(world: str, text: str) -> Entry:
        found = truth.calls_needed(results, SIZE, world, text)
        return Entry(f"more than {SIZE.truth[world].nfes[-1]}" if found is None else str(found))

    rows = tuple(
        (Entry(truth.WORLDS[world].short), *(entry(world, text) for (text,) in truth.COMPARED.values()))
        for world in SIZE.truth
    )
    return markdown(Table("calls", "", ("calls needed (lower is better)", *truth.COMPARED), (rows,)))


def rivals_table(results: Results) -> str:
    """Every other sampler at the numbers of calls at which it was run, in each world, and which of them is better."""
    parts = []
    every = sorted({nfe for size in SIZE.truth.values() for nfe in size.rival_nfes})
    for nfe, is_sudoku in product(every, (False, True)):
        worlds = [
            world
            for world, size in SIZE.truth.items()
            if nfe in size.rival_nfes and (truth.WORLDS[world].model in SUDOKU) == is_sudoku
        ]
        rows, better = [(Entry("best baseline"), *(best_entry(results, world, nfe) for world in worlds))], []
        for text in (text for texts in truth.RIVALS.values() for text in texts):
            entries = []
            for world in worlds:
                at = f"{world}/{nfe}"
                outcome = truth.against_baseline(results, at, text).outcome
                value = format_estimate(truth.quality(results, at, text), 3)
                entries.append(Entry(f"{value}, {truth.WORDS[outcome]}"))
                better += [f"`{text}` on {truth.WORLDS[world].short}"] * (outcome == "holds")
            rows.append((Entry(text), *entries))
        head = (f"{nfe} calls", *(f"{truth.WORLDS[world].short} {truth.WORLDS[world].quality}" for world in worlds))
        words = f"Better than the best baseline here, with {nfe} calls: {listed(better) if better else 'none'}."
        parts.append(f"{markdown(Table('rivals', '', head, (tuple(rows),))).strip()}\n\n{words}")
    return "\n\n".join(parts) or "Not run yet."


def best_entry(results: Results, world: str, nfe: int) -> Entry:
    """The quality of the best baseline."""
    at = f"{world}/{nfe}"
    found = truth.best_baseline(results, at).values(results, at, truth.WORLDS[world].quality)
    return Entry(format_estimate(found, 3))


def clues_table(results: Results) -> str:
    """The share of solved puzzles by number of clues, and where it reaches 90%."""
    rows, words = [], []
    for world, size in SIZE.truth.items():
        place, counts = truth.WORLDS[world].short, truth.clue_counts(SIZE, world)
        solved = [results(truth.clue_cell(SIZE, world, clues), "solved") for clues in counts]
        rows += [
            (Entry(place), Entry(str(clues)), Entry(format_estimate(one, 3)))
            for clues, one in zip(counts, solved, strict=True)
        ]
        if counts:
            first = next((clues for clues, one in zip(counts, solved, strict=True) if one.mean >= 0.9), None)
            reached = f"from {first} clues on" if first else f"at none of these, up to {counts[-1]}"
            words.append(f"Native sampling with {max(size.nfes)} calls solves 90% of the {place} {reached}.")
    table = Table("clues", "", ("puzzles", "clues", "solved by native sampling"), (tuple(rows),))
    return f"{markdown(table).strip()}\n\n{' '.join(words)}"


# Targets


def card_figures(name: str) -> dict[str, Any]:
    """The measured figures behind a model's card."""
    found: dict[str, Any] = json.loads((ROOT / f"recipes/logs/{name}.json").read_text(encoding="utf-8"))
    return found


def card_value(name: str, task: str, sampler: str, measure: str, nfe: int = 64) -> Estimate:
    """A measure of a model's card."""
    rows = card_figures(name)["rows"]
    (row,) = (one for one in rows if (one["task"], one["sampler"], one["nfe"]) == (task, sampler, nfe))
    return Estimate.from_dict(row["measures"][measure])


TARGETS = (  # what, model, task of its card, measure, least
    ("molecules valid", "molecules", "molecules", "valid", 0.95),
    ("molecules V.U.N.", "molecules", "molecules", "v.u.n.", WANTED_VUN),
    ("6x6 puzzles with 14 clues solved", "sudoku-6x6", "puzzles with 14 clues", "solved", 0.9),
    ("6x6 boards without clues valid", "sudoku-6x6", "boards without clues", "valid", 0.8),
    ("9x9 puzzles with 32 clues solved", "sudoku", "puzzles with 32 clues", "solved", 0.9),
    ("9x9 boards without clues valid", "sudoku", "boards without clues", "valid", 0.8),
)


def targets_table() -> str:
    """What was wanted of native sampling with 64 calls, and what the models reach, as their cards measure it."""
    rows = []
    for name, model, task, measure, least in TARGETS:
        native, mend = (card_value(model, task, sampler, measure) for sampler in SAMPLERS.values())
        texts = (f"{least:.0%}", format_estimate(native, 3), format_estimate(mend, 3))
        rows.append((Entry(name), *map(Entry, texts), Entry("yes" if native.mean >= least else "no")))
    head = ("64 calls", "wanted of native", "native", "Mend", "reached by native")
    cards = {model: card_figures(model) for _, model, *_ in TARGETS}
    sizes = [f"{len(found['seeds'])} seeds x {found['rows'][0]['n']} for {name}" for name, found in cards.items()]
    words = f"Measured for the models' cards: {listed(sizes)}."
    return f"{markdown(Table('targets', '', head, (tuple(rows),))).strip()}\n\n{words}"


def known_molecules() -> str:
    """Why V.U.N. cannot be high: the least probability of training molecules under the model."""
    held_out, length = card_figures("molecules")["held_out"]["test"], 24
    count = len(HashSet.load(FOLDER / TRAINING))
    nats = length * held_out["nats"]
    known = truth.known_mass(count, nats)
    needed = (math.log(count) - math.log(1 - WANTED_VUN)) / length
    others = sum(MoleculeChecker().held_out["atoms"].values())
    return (
        f"{count / (count + others):.0%} of the corpus is training data. On held-out molecules the model's bound is "
        f"{held_out['nats']:.4f} nats per token, so {nats:.2f} nats for the {length} tokens of a molecule. By Jensen's "
        f"inequality the mean probability of a molecule of the corpus is at least exp(-{nats:.2f}). The training data "
        f"has {count:,} different molecules. If they are no less likely than held-out ones, the model gives them at "
        f"least {count:,} x exp(-{nats:.2f}) = {known:.2f} of its probability. "
        f"At most {1 - known:.2f} is left for new molecules, so no faithful sampler can have a V.U.N. above "
        f"{1 - known:.2f}. A V.U.N. of {WANTED_VUN:.0%} needs a bound of {needed:.3f} nats or more: a worse model."
    )


def published_table() -> str:
    """Published figures beside those of the models' cards."""
    stored = tomllib.loads(PUBLISHED.read_text(encoding="utf-8"))["figures"]
    rows = [tuple(Entry(one[key]) for key in ("what", "system", "size", "figure", "source")) for one in stored]
    for name, model, task, measure, _ in (TARGETS[0], *TARGETS[2:]):
        size = f"{card_figures(model)['parameters'] / 1e6:.1f}M"
        for family, sampler in SAMPLERS.items():
            figure = f"{card_value(model, task, sampler, measure).mean:.1%} at 64 calls"
            rows.append(tuple(map(Entry, (name, f"limpet's {model}, {family}", size, figure, "its card"))))
    return markdown(Table("published", "", ("what", "system", "parameters", "figure", "source"), (tuple(rows),), 5))


def measured(results: Results) -> str:
    """What was run, and where."""
    parts = []
    for world, size in SIZE.truth.items():
        rivals = f" (every other sampler at {listed(list(map(str, size.rival_nfes)))})" if size.rival_nfes else ""
        parts.append(f"{truth.WORLDS[world].short} at {listed(list(map(str, size.nfes)))} calls{rivals}")
    seeds = ", ".join(map(str, results.study.seeds))
    return f"Seeds {seeds}; {'; '.join(parts)}; in {machines(results.provenance['computed on'])}."


def blocks() -> dict[str, str]:
    """The generated blocks of the page."""
    results = committed()
    return {
        "in short": in_short(results),
        "measured": measured(results),
        **{world: world_table(results, world) if world in SIZE.truth else "Not run yet." for world in truth.WORLDS},
        "costs": costs_list(results),
        "calls": calls_table(results),
        "rivals": rivals_table(results),
        "targets": targets_table(),
        "known": known_molecules(),
        "clues": clues_table(results),
        "published": published_table(),
    }


if __name__ == "__main__":
    for name, text in blocks().items():
        put(PAGE, name, text.strip())
