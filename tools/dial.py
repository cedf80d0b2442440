"""Fill the tables about the dial in docs/frontier.md from committed numbers.

    python tools/dial.py

They are those of benchmarks/dial.py (benchmarks/results/dial.json), and of the studies `interleave` and `samplers` on
the same seeds, which measured most of its rivals."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import frontier
from blocks import put
from limpet.evaluation import statistics
from limpet.evaluation.statistics import Estimate, Floats
from limpet.experiments import Entry, Results, Table, below, format_estimate, format_signed
from limpet.experiments.dial import SHARPNESS
from limpet.experiments.render import markdown
from limpet.experiments.tuning import distance
from limpet.paper.studies import interleave, pareto, samplers

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "benchmarks/results/dial.json"
SEARCHED = ROOT / "benchmarks/results/dial-search.json"
COST = ROOT / "benchmarks/results/dial-cpu.json"
RIVALS: dict[str, list[str]] = samplers.FILE["dial"]
ROLES = {caption: role for role, caption in frontier.SIZE.captions.items()}  # of the built-in text models
JUDGED = ("mini", "mini-distilled", "exact:words")  # by NLL; the other models have a checker
CHECKED = {"sudoku": "valid", "molecules": "valid", "exact:grammar": "grammatical"}
CALLS = (8, 16, 32, 64)
NEAR = 0.01  # nats: a curve that ends so near the own entropy is read at its end, rather than not at all
WORDS = {"holds": "below", "fails": "above", "open": "open"}


class Point(NamedTuple):
    """Values of one sampler under every seed."""

    entropy: Floats
    nll: Floats


def measured() -> dict[str, dict[str, Any]]:
    """The results of the benchmark, by model, calls and sampler."""
    found: dict[str, dict[str, Any]] = json.loads(MEASURED.read_text(encoding="utf-8"))
    return found


def point(cells: Mapping[str, Any], name: str) -> Point | None:
    """A sampler of the benchmark; None where it was not measured."""
    return Point(*(estimate(cells[name], measure).values for measure in Point._fields)) if name in cells else None


def estimate(cell: Mapping[str, Any], measure: str) -> Estimate:
    """A measure of a sampler of the benchmark."""
    return Estimate(np.array(cell["values"][measure], dtype=np.float64))


def reported(results: Results, cell: str) -> Point | None:
    """A sampler of a committed report."""
    if cell not in results.cells:
        return None
    return Point(*(results.values(cell, measure) for measure in ("entropy", "nll")))


def rival_curves(cells: Mapping[str, Any], model: str, nfe: int, reports: Mapping[str, Results]) -> list[list[Point]]:
    """The curves of every rival that was measured for a model and a number of calls."""
    found = [[point(cells, f"{model}/{nfe}/{text}") for text in texts] for texts in RIVALS.values()]
    if role := ROLES.get(model):
        field, interleaved = reports["samplers"], reports["interleave"]
        found += [[reported(field, f"{role}/{nfe}/{text}") for text in texts] for texts in samplers.FAMILIES.values()]
        found.append([reported(interleaved, f"{role}/{nfe}/{text}") for text in interleave.SAMPLERS["curve"]])
    return [known for curve in found if (known := [one for one in curve if one is not None])]


def delta(own: Point, curves: Sequence[Sequence[Point]]) -> Estimate:
    """NLL minus that of the lowest rival's curve at the own entropy; the error is a jackknife over seeds."""

    def over(seeds: NDArray[np.int64]) -> float:
        nodes = [[(one.entropy[seeds].mean(), one.nll[seeds].mean()) for one in curve] for curve in curves]
        parts = [part for curve in nodes if len(curve) > 1 for part in statistics.branches(*zip(*curve, strict=True))]
        entropy, nll = float(own.entropy[seeds].mean()), float(own.nll[seeds].mean())
        ends = [ys[xs.argmax()] for xs, ys in parts if 0 < entropy - xs.max() <= NEAR]
        ends += [ys[xs.argmin()] for xs, ys in parts if 0 < xs.min() - entropy <= NEAR]
        found = [distance(parts, entropy, nll), *(nll - y for y in ends)]
        return float(np.nanmax(found)) if not np.isnan(found).all() else np.nan

    return statistics.jackknife(over, len(own.nll))


def judged_table(cells: Mapping[str, Any], reports: Mapping[str, Results]) -> str:
    """Delta NLL of the dial against the best rival at the dial's entropy."""

    def entry(model: str, nfe: int, sharpness: float) -> Entry:
        own = point(cells, f"{model}/{nfe}/sharpness={sharpness:g}")
        curves = rival_curves(cells, model, nfe, reports)
        has_interleaved = any(f"{model}/{nfe}/{text}" in cells for text in RIVALS["top-p, interleaved"])
        if own is None or not (has_interleaved or (model in ROLES and nfe == interleave.compared_calls(frontier.SIZE))):
            return Entry("not measured")
        found = delta(own, curves)
        word = "no rival is as sharp" if np.isnan(found.mean) else WORDS[below("", found).outcome]
        value = "" if np.isnan(found.mean) else f"{frontier.short(found)} "
        return Entry(f"{value}at {own.entropy.mean():.2f}, {word}")

    rows = tuple(
        (Entry(f"{model}, {nfe} calls"), *(entry(model, nfe, one) for one in SHARPNESS))
        for model in JUDGED
        for nfe in CALLS
    )
    return markdown(Table("dial", "", ("sharpness", *(f"{one:g}" for one in SHARPNESS)), (rows,))).lstrip()


def checked_table(cells: Mapping[str, Any]) -> str:
    """The share of right samples of the dial beside the best rival's, which was chosen by the same samples."""

    def row(model: str, nfe: int) -> tuple[Entry, ...]:
        shares = {
            name.removeprefix(f"{model}/{nfe}/"): np.array(one["values"][CHECKED[model]])
            for name, one in cells.items()
            if name.startswith(f"{model}/{nfe}/")
        }
        rivals = {name: values for name, values in shares.items() if not name.startswith("sharpness")}
        if not rivals:
            return (Entry(f"{model}, {nfe} calls"), *(Entry("not measured") for _ in range(1 + len(SHARPNESS))))
        best = max(rivals, key=lambda name: rivals[name].mean())

        def entry(sharpness: float) -> Entry:
            own = shares.get(f"sharpness={sharpness:g}")
            if own is None:
                return Entry("not measured")
            word = {"below": "fewer", "above": "more", "open": "open"}[
                WORDS[below("", Estimate(own - rivals[best])).outcome]
            ]
            return Entry(f"{own.mean():.3f}, {word}")

        return (Entry(f"{model}, {nfe} calls"), Entry(f"{rivals[best].mean():.3f}, {best}"), *map(entry, SHARPNESS))

    rows = tuple(row(model, nfe) for model in CHECKED for nfe in CALLS)
    return markdown(Table("checked", "", ("share of right samples", "best rival", *(f"{one:g}" for one in SHARPNESS)),
                          (rows,))).lstrip()  # fmt: skip


def released_table(cells: Mapping[str, Any], reports: Mapping[str, Results]) -> str:
    """The dial at sharpness 0 and 16 calls beside the released sampler at 64 calls, on both text models."""
    size, field = frontier.SIZE, reports["samplers"]
    calls = interleave.compared_calls(size)

    def row(model: str, role: str) -> tuple[Entry, ...]:
        own = point(cells, f"{model}/{calls}/sharpness=0")
        curve = [reported(field, f"{role}/{size.max_nfe}/{text}") for text in samplers.CURVES[frontier.SAMPLED]]
        assert own is not None
        found = delta(own, [[one for one in curve if one is not None]])
        return (
            Entry(model),
            Entry(f"{own.nll.mean():.3f} at {own.entropy.mean():.3f}"),
            Entry(format_signed(found, 3)),
        )

    head = (
        "model",
        f"{calls} calls at sharpness 0: NLL at entropy",
        f"delta NLL against top-p at {size.max_nfe} calls, at this entropy",
    )
    rows = tuple(row(model, role) for model, role in reversed(ROLES.items()))
    return markdown(Table("released", "", head, (rows,))).lstrip()


def tried_table() -> str:
    """NLL at entropy of every change of Mend that was tried, at both ends of the dial."""
    found: dict[str, dict[str, Any]] = json.loads(SEARCHED.read_text(encoding="utf-8"))
    model, nfe = next(iter(found)).split("/")[:2]
    start = f"{model}/{nfe}/grid=quadratic interleave=true "
    ends = ("budget=.06 late_top_p=.85", "budget=1 late_top_p=.6")

    def entry(own: str, end: str) -> Entry:
        one = found.get(f"{start}{own} {end}")
        return Entry(f"{one['nll']:.3f} at {one['entropy']:.3f}" if one else "")

    changed = dict.fromkeys(name.removeprefix(start).removesuffix(f" {ends[0]}") for name in found
                            if name.startswith(start) and name.endswith(ends[0]))  # fmt: skip
    rows = tuple((Entry(own), *(entry(own, end) for end in ends)) for own in changed)
    schedules = [name for name in found if name.startswith(start) and "end_top_p" in name]
    rows += tuple(
        (Entry(name.removeprefix(start)), Entry(f"{found[name]['nll']:.3f} at {found[name]['entropy']:.3f}"), Entry(""))
        for name in schedules
    )
    head = (f"{model}, {nfe} calls", *(f"sharpness {s}: {end}" for s, end in zip((0, 1), ends, strict=True)))
    return markdown(Table("tried", "", head, (rows,))).lstrip()


def turns_table() -> str:
    """The changes that were tried against contradicted commitments, by model, calls and end of the dial."""
    found: dict[str, dict[str, Any]] = json.loads(SEARCHED.read_text(encoding="utf-8"))
    tried = {"all inspected": "", "own_turn=true": " own_turn=true",
             "and revise_turn=true": " own_turn=true revise_turn=true", "follow=10": " follow=10"}  # fmt: skip
    ends = ("budget=.06 late_top_p=.85", "budget=1 late_top_p=.6")

    def entry(place: str, own: str, end: str) -> Entry:
        one = found.get(f"{place}/grid=quadratic interleave=true warmup=.2{own} {end}")
        if one is None:
            return Entry("")
        check = next((name for name in CHECKED.values() if name in one), None)
        return Entry(f"{one[check]:.3f} {check}" if check else f"{one['nll']:.3f} at {one['entropy']:.3f}")

    places = [f"{model}/{nfe}" for model in ("exact:words", "exact:grammar", "sudoku") for nfe in (8, 16)]
    rows = {
        f"{place.replace('/', ', ')} calls, sharpness {sharpness}": [entry(place, own, end) for own in tried.values()]
        for place in places
        for sharpness, end in enumerate(ends)
    }
    listed = tuple((Entry(name), *entries) for name, entries in rows.items() if all(one.text for one in entries[:3]))
    return markdown(Table("turns", "", ("model", *tried), (listed,))).lstrip()


def cost() -> str:
    """What the dial costs beside native sampling."""
    found = json.loads(COST.read_text(encoding="utf-8"))["mini"]
    lines = [
        f"| `{base}` | {' | '.join(f'{ratio:.2f}' for ratio in ratios.values())} |"
        for base, ratios in found["ratio to"].items()
    ]
    names, rows = found["ratio to"]["native"], found["head rows"]
    return (
        f"Processor time at {found['nfe']} calls on `mini`, as a ratio in one run. The dial computes "
        f"{rows['sharpness=0']:.0%} of the head's rows,\nnative sampling {rows['native']:.0%}.\n\n"
        f"| against | {' | '.join(names)} |\n| --- |{' ---: |' * len(names)}\n" + "\n".join(lines) + "\n"
    )


def newcomer_table(cells: Mapping[str, Any], results: Results) -> str:
    """One row a sampler: NLL, entropy and repetition on `mini`."""
    size, calls = frontier.SIZE, interleave.compared_calls(frontier.SIZE)
    released, curve = pareto.RELEASED["sample"], interleave.SAMPLERS["curve"]
    rows: dict[str, Callable[[str], Estimate]] = {
        f"released: `{released}`, {size.max_nfe} calls": partial(results, f"base/{size.max_nfe}/{released}"),
        "best baseline, diverse: top-p .85, interleaved": partial(results, f"base/{calls}/{curve[0]}"),
        "`--sharpness 0`": partial(estimate, cells[f"mini/{calls}/sharpness=0"]),
        "best baseline, sharp: top-p .6, interleaved": partial(results, f"base/{calls}/{curve[3]}"),
        "`--sharpness 1`": partial(estimate, cells[f"mini/{calls}/sharpness=1"]),
    }
    digits = {"nll": 3, "entropy": 3, "rep-4": 4}
    head = ("sampler", "NLL (nats/token, lower is better)", "entropy (nats, higher is more diverse)",
            "rep-4 (lower is less repetitive)")  # fmt: skip
    values = tuple(
        (Entry(name), *(Entry(format_estimate(measured_by(measure), n)) for measure, n in digits.items()))
        for name, measured_by in rows.items()
    )
    return markdown(Table("newcomer", "", head, (values,))).lstrip().replace("\\`", "`")


def blocks() -> dict[tuple[Path, str], str]:
    """The generated blocks: (page, name) -> text."""
    cells, reports = measured(), {name: frontier.committed(name) for name in ("interleave", "samplers")}
    return {
        (frontier.PAGE, "dial"): judged_table(cells, reports),
        (frontier.PAGE, "dial-checked"): checked_table(cells),
        (frontier.PAGE, "dial-released"): released_table(cells, reports),
        (frontier.PAGE, "dial-tried"): tried_table(),
        (frontier.PAGE, "dial-turns"): turns_table(),
        (frontier.PAGE, "dial-cost"): cost(),
        (ROOT / "docs/samplers.md", "newcomer"): newcomer_table(cells, reports["interleave"]),
    }


if __name__ == "__main__":
    for (page, name), text in blocks().items():
        put(page, name, text)
