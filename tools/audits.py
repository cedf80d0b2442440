"""The tables of docs/audits.md: figures of the committed reports, with the paper's beside.

`python tools/reports.py` puts them there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from blocks import places
from limpet.evaluation.statistics import Estimate
from limpet.experiments import Results, report, units
from limpet.experiments.contents import Entry, Table
from limpet.experiments.render import markdown
from limpet.paper import studies
from limpet.paper.studies import final_step, singleton, storage, values
from limpet.paper.studies.audits import FILE, one, with_error
from limpet.paper.studies.published import PRINTED

SIZE = studies.preset("mini-gpu")
BASE, DISTILLED = (SIZE.captions[role] for role in ("base", "distilled"))
CHAIN, WORDS = "exact:chain", "exact:words"
CHECKPOINT = "Duo-distilled"  # the paper's, in every table that has a row of its figures
MINUS = "\N{MINUS SIGN}"
NOISE = (0.1, 0.2, 0.4, 0.67, 0.9)  # of the times of `risk`
COUNTED = ("restored, where it changed", "restored")  # whose events are those that changed, and all
BELIEFS = ("restored", "revisable", "restored, where it changed", "revisable, where it changed")


def committed(folder: Path) -> dict[str, Results]:
    """The reports that the page has tables of, by name."""
    wanted = [study for study in studies.whole(SIZE) if study.name in TABLES]
    return {study.name: report.read(study, folder / units.name(study)) for study in wanted}


def blocks(every: Mapping[str, Results]) -> dict[str, str]:
    """What the page has between its marks, by name."""
    return {name: markdown(make(every[name])) for name, make in TABLES.items()}


# What the tables are made of


def table(name: str, caption: str, head: Sequence[str], *groups: Sequence[Sequence[str]], names: int = 1) -> Table:
    rows = (tuple(tuple(map(Entry, row)) for row in group) for group in groups)
    return Table(name, caption, tuple(head), tuple(rows), names)


def made(results: Results) -> str:
    """How much it is of, in which precision and where."""
    provenance, told = results.provenance, settings(results)
    (nfe,) = {cell.sampler.nfe for cell in results.study.samples} or {told["nfe"]}
    (count,) = provenance["samples in a shard"] or [told["paths"]]
    what = "texts" if "times" in told else f"paths of {nfe} calls"
    return f"{len(provenance['shards'])} shards of {count} {what}, in {places(provenance['made on'])}."


def settings(results: Results) -> dict[str, Any]:
    """Of the probes, which all have the same; none where there are only samples."""
    return dict(*results.provenance["settings"])


def paper(name: str, quantity: str, at: Any = None) -> str:
    """What the paper prints of an audit's quantity, without a word on where."""
    told = FILE.content[name]["paper"][quantity]
    return str(told if at is None else told[str(at)]).partition(" over t")[0]


def gap(estimate: Estimate) -> str:
    """A difference, with its sign."""
    text = with_error(estimate).replace("-", MINUS)
    return text if text.startswith(MINUS) else f"+{text}"


def seen(results: Results, quantities: Sequence[str], model: str | None = None, **at: Any) -> list[str]:
    return [with_error(one(results, quantity, model, **at)) for quantity in quantities]


def short(number: float) -> str:
    return f"{number:g}".removeprefix("0")


# The tables


def singletons(results: Results) -> Table:
    def rows(p: float) -> Iterator[list[str]]:
        for model in (BASE, DISTILLED):
            yield ["" if model == DISTILLED else short(p), model, *seen(results, singleton.QUANTITIES, model, p=p)]
        yield ["", CHECKPOINT, *(paper("singleton", quantity, p) for quantity in singleton.QUANTITIES)]

    told = settings(results)
    head = ("top-p", "", "singleton", f"last {told['last']} steps", *singleton.QUANTITIES[2:])
    caption = f"Percent; {made(results)}"
    return table("singleton", caption, head, *(list(rows(p)) for p in told["masses"]), names=2)


def endpoints(results: Results) -> Table:
    def row(role: str, p: float) -> list[str]:
        cells = [f"{role}/{p}/{end}" for end in ("sample", "argmax")]
        here = [f"{with_error(results(cell, 'ppl'))} ({results(cell, 'entropy').mean:.2f})" for cell in cells]
        there = [f"{PRINTED[cell]['ppl']} ({PRINTED[cell]['entropy']})" for cell in cells]
        return [SIZE.captions[role], short(p), *here, gap(results.contrast(*reversed(cells))), *there]

    head = ("", "top-p", "sample", "argmax", "argmax less ancestral, nats", "paper: ancestral", "paper: argmax")
    caption = f"GenPPL (entropy), one path read out twice; {made(results)}"
    return table("final_step", caption, head, [row(*key) for key in final_step.ROWS], names=2)


def selections(results: Results) -> Table:
    def row(t: float) -> list[str]:
        errors = [with_error(one(results, "self error", model, t=t)) for model in (BASE, DISTILLED)]
        same = [with_error(one(results, "argmax agreement", model, t=t)) for model in (BASE, DISTILLED)]
        gain = gap(one(results, "self accuracy, difference", t=t))
        return [short(t), *errors, gain, with_error(one(results, "Jaccard", t=t)), *same]

    head = (
        "t", f"error of what {BASE} selects", f"of what {DISTILLED} selects", f"gain of {DISTILLED}", "Jaccard",
        f"same argmax where {BASE} selects", f"where {DISTILLED} does",
    )  # fmt: skip
    there = ("self error", "self error", "self accuracy, difference", "Jaccard", "argmax agreement", "argmax agreement")
    (labels,) = {row.events for row in results.of("self error")}
    caption = f"Percent, but for the Jaccard index; {labels:,} committed labels at each time: {made(results)}"
    rows = [row(t) for t in settings(results)["times"]]
    return table("selection", caption, head, [*rows, ["paper", *(paper("selection", what) for what in there)]])


def temperatures(results: Results) -> Table:
    quantities = ("residual", "top-rank change", "rank inversion", "optimum at a bound")
    controls = ("control, top-rank change", "control, rank inversion")

    def row(model: str) -> list[str]:
        pairs, among = (results.of(quantity, model)[0].events for quantity in ("residual", controls[0]))
        control = " and ".join(seen(results, controls, model))
        return [model, *seen(results, quantities, model), f"{control} of {among}", f"{pairs}"]

    head = ("", "residual", "another argmax", "rank inversion", "fitted at a bound", "control", "pairs")
    there = [paper("temperature", quantity) for quantity in quantities]
    control = " and ".join(paper("temperature", quantity) for quantity in controls)
    caption = f"Percent; {made(results)}"
    return table("temperature", caption, head, [row(BASE), row(DISTILLED), [CHECKPOINT, *there, control, ""]])


def other_values(results: Results) -> Table:
    arms = list({**values.ARMS, **values.REFRESHED})
    here = [with_error(results(arm, "ppl")) for arm in arms]
    apart = ["", *(gap(results.contrast(arm, "argmax")) for arm in arms[1:])]
    entropy = [with_error(results(arm, "entropy")) for arm in arms]
    there = [PRINTED.get(arm, {}).get("ppl", "") for arm in arms]
    rows = {DISTILLED: here, "NLL, less argmax": apart, "entropy": entropy, CHECKPOINT: there}
    head = ("", *values.ARMS, "half as often", "in turn")
    return table("values", f"GenPPL; {made(results)}", head, [[name, *row] for name, row in rows.items()])


def later(results: Results) -> Table:
    def rows(model: str) -> Iterator[list[str]]:
        for offset in settings(results)["offsets"]:
            found = seen(results, ("overwritten", *BELIEFS), model, offset=offset)
            changed, every = (results.of(quantity, model, offset=offset)[0].events for quantity in COUNTED)
            yield ["" if offset > 1 else model, f"{offset}", *found, f"{changed} of {every}"]

    def theirs(offset: int) -> list[str]:
        figures = (paper("hidden", quantity, offset) for quantity in (*BELIEFS, "changed"))
        return ["" if offset > 1 else CHECKPOINT, f"{offset}", "", *figures]

    head = (
        "", "calls", "overwritten", "restored", "revisable", "restored, changed only", "revisable, changed only",
        "changed",
    )  # fmt: skip
    caption = f"Percent; {made(results)}"
    groups = list(rows(BASE)), list(rows(DISTILLED)), list(map(theirs, settings(results)["offsets"]))
    return table("hidden", caption, head, *groups, names=2)


def stored(results: Results) -> Table:
    def row(p: float) -> list[str]:
        cells = [f"{p}/{arm}" for arm in ("CRS", "final-only", "revisable", "mend")]
        here = [with_error(results(cell, "ppl")) for cell in cells]
        return [short(p), *here, gap(results.contrast(cells[0], cells[1])), gap(results.contrast(cells[3], cells[0]))]

    head = ("late top-p", "CRS", "final-only", "revisable", "Mend", "CRS less final-only, nats", "Mend less CRS, nats")
    caption = f"GenPPL of {DISTILLED}; {made(results)}"
    return table("storage", caption, head, [row(p) for p in storage.MASSES])


def risks(results: Results) -> Table:
    def row(t: float) -> Iterator[str]:
        yield short(t)
        for model in (BASE, DISTILLED, CHAIN, WORDS):
            error, committed = seen(results, ("error", "committed error"), model, t=t)
            bayes = one(results, "deficit", model, t=t).mean
            yield f"{error} ({bayes:.1f})" if model in (CHAIN, WORDS) else error
            if model != WORDS:  # whose does not move
                yield committed

    head = (
        "t", f"{BASE}, all", "committed", f"{DISTILLED}, all", "committed", f"{CHAIN}, all (Bayes risk)", "committed",
        f"{WORDS}, all (Bayes risk)",
    )  # fmt: skip
    return table("risk", f"Percent; {made(results)}", head, [list(row(t)) for t in NOISE])


TABLES = {
    "singleton": singletons, "final_step": endpoints, "selection": selections, "temperature": temperatures,
    "values": other_values, "hidden": later, "storage": stored, "risk": risks,
}  # fmt: skip
