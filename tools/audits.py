"""The tables of docs/audits.md, from the committed reports. `python tools/reports.py` writes them there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from blocks import machines
from limpet.evaluation.statistics import Estimate
from limpet.experiments import Entry, Results, Study, Table, format_signed, report
from limpet.experiments.render import markdown
from limpet.paper import studies
from limpet.paper.studies import final_step, revision, singleton, storage, values
from limpet.paper.studies.audits import estimate_of, paper_text, with_error
from limpet.paper.studies.published import PRINTED

SIZE = studies.preset("mini-gpu")
BASE, DISTILLED = (SIZE.captions[role] for role in ("base", "distilled"))
CHAIN, WORDS = "exact:chain", "exact:words"
CHECKPOINT = "Duo-distilled"  # the paper's, in every table that has a row of its values
MINUS = "\N{MINUS SIGN}"
RISK_TIMES = (0.1, 0.2, 0.4, 0.67, 0.9)  # those of the audit's times that are shown
MODELS = ("mini", "mini-distilled")
EXACT = ("words-8", "words-64", "chain-8", "chain-64")  # reports of `values` on exact sources
REVISIONS = {"mini/revision-mini": MODELS, "revision/exact-16": ("exact:words", "exact:chain")}
VIEWS = ("restored", "revisable", "restored, where it changed", "revisable, where it changed")


def committed(reports: Path) -> dict[str, Results]:
    """The reports that the page has tables of: by study, and by folder where a study has several."""
    found = {}
    for study in studies.all_studies(SIZE):
        if study.name in TABLES:
            found[study.name] = report.read_report(study, reports / "mini" / study.full_name)
    for folder in (reports / "values" / name for name in (*MODELS, *EXACT)):
        found[f"values/{folder.name}"] = report.read_report(values_study(folder), folder)
    for name in REVISIONS:
        found[name] = report.read_report(audit_study("revision", reports / name), reports / name)
    return found


def values_study(folder: Path) -> Study:
    """The study `values` with the model and size of a written report."""
    numbers = report.load_numbers(folder)
    (model,), (options,) = numbers["provenance"]["models"], numbers["provenance"]["settings"]
    captions, size = {"base": model, "distilled": model}, studies.preset(numbers["preset"])
    return studies.study(
        "values", replace(size, n=options["n"], nfe=options["nfe"], distilled=model, captions=captions)
    )


def audit_study(name: str, folder: Path) -> Study:
    """An audit with the models of a written report."""
    numbers = report.load_numbers(folder)
    size = studies.audit_presets(name)[numbers["preset"]]
    return studies.study(name, replace(size, models=tuple(numbers["provenance"]["models"])))


def blocks(results: Mapping[str, Results]) -> dict[str, str]:
    """The generated blocks of the page, by name."""
    tables = {name: build(results[name]) for name, build in TABLES.items()}
    tables |= {name: build(results) for name, build in TABLES_OF_SEVERAL.items()}
    return {name: markdown(one) for name, one in tables.items()}


# Parts of tables


def table(name: str, caption: str, head: Sequence[str], *groups: Sequence[Sequence[str]], names: int = 1) -> Table:
    """A table of texts."""
    rows = (tuple(tuple(map(Entry, row)) for row in group) for group in groups)
    return Table(name, caption, tuple(head), tuple(rows), names)


def size_of(results: Results) -> str:
    """How many seeds, trajectories or texts, and calls; in which precision and where."""
    provenance, options = results.provenance, settings(results)
    (nfe,) = {cell.sampler.nfe for cell in results.study.sample_cells} or {options["nfe"]}
    (count,) = provenance["samples per seed"] or [options["n"]]
    what = "texts" if "times" in options else f"trajectories of {nfe} calls"
    return f"{len(provenance['seeds'])} seeds x {count} {what}, in {machines(provenance['computed on'])}."


def settings(results: Results) -> dict[str, Any]:
    """The settings of the probes, which all have the same; none for samples alone."""
    return dict(*results.provenance["settings"])


def paper(name: str, quantity: str, *at: Any) -> str:
    """What the paper prints of a quantity of an audit, without words on where."""
    return paper_text(name, quantity, *at).partition(" over t")[0]


def signed(estimate: Estimate) -> str:
    """A difference with its sign and error."""
    text = with_error(estimate).replace("-", MINUS)
    return text if text.startswith(MINUS) else f"+{text}"


def texts_of(results: Results, quantities: Sequence[str], model: str | None = None, **at: Any) -> list[str]:
    """Some quantities of a model at a place, with their errors."""
    return [with_error(estimate_of(results, quantity, model, **at)) for quantity in quantities]


def events(results: Results, quantity: str, model: str, **at: Any) -> int:
    """The number of events of a quantity."""
    return results.find(quantity, model, **at)[0].events or 0


def short(number: float) -> str:
    """A number without its leading 0."""
    return f"{number:g}".removeprefix("0")


# The tables


def singleton_table(results: Results) -> Table:
    options, groups = settings(results), []
    for p in options["top_ps"]:
        rows = [[model, *texts_of(results, singleton.QUANTITIES, model, p=p)] for model in (BASE, DISTILLED)]
        rows.append([CHECKPOINT, *(paper("singleton", quantity, p) for quantity in singleton.QUANTITIES)])
        groups.append([[short(p) if i == 0 else "", *row] for i, row in enumerate(rows)])
    head = ("top-p", "", "singleton", f"last {options['last']} steps", *singleton.QUANTITIES[2:])
    return table("singleton", f"Percent; {size_of(results)}", head, *groups, names=2)


def final_step_table(results: Results) -> Table:
    def row(role: str, p: float) -> list[str]:
        cells = [f"{role}/{p}/{final}" for final in final_step.FINAL_STEPS]
        here = [f"{with_error(results(cell, 'ppl'))} ({results(cell, 'entropy').mean:.2f})" for cell in cells]
        there = [f"{PRINTED[cell]['ppl']} ({PRINTED[cell]['entropy']})" for cell in cells]
        return [SIZE.captions[role], short(p), *here, signed(results.contrast(*reversed(cells))), *there]

    head = ("", "top-p", "sample", "argmax", "NLL, argmax minus sample", "paper: sample", "paper: argmax")
    caption = f"GenPPL, lower is better (entropy, nats), of the same trajectories; {size_of(results)}"
    return table("final-step", caption, head, [row(*key) for key in final_step.ROWS], names=2)


def selection_table(results: Results) -> Table:
    def row(t: float) -> list[str]:
        by_model = [texts_of(results, ("self error", "argmax agreement"), model, t=t) for model in (BASE, DISTILLED)]
        errors, agreement = zip(*by_model, strict=True)
        gain = signed(estimate_of(results, "self accuracy, difference", t=t))
        return [short(t), *errors, gain, *texts_of(results, ["Jaccard"], t=t), *agreement]

    head = (
        "t", f"error at positions of {BASE}", f"of {DISTILLED}", f"gain of {DISTILLED}", "Jaccard",
        f"same argmax at positions of {BASE}", f"of {DISTILLED}",
    )  # fmt: skip
    there = ("self error", "self error", "self accuracy, difference", "Jaccard", "argmax agreement", "argmax agreement")
    (count,) = {row.events for row in results.find("self error")}
    caption = f"Percent, except the Jaccard index; {count:,} committed tokens at each time: {size_of(results)}"
    rows = [row(t) for t in settings(results)["times"]]
    return table("selection", caption, head, [*rows, ["paper", *(paper("selection", name) for name in there)]])


def temperature_table(results: Results) -> Table:
    quantities = ("residual", "top-rank change", "rank inversion", "optimum at a bound")
    controls = ("control, top-rank change", "control, rank inversion")

    def row(model: str) -> list[str]:
        pairs, among = (events(results, quantity, model) for quantity in ("residual", controls[0]))
        control = f"{' and '.join(texts_of(results, controls, model))} of {among}"
        return [model, *texts_of(results, quantities, model), control, f"{pairs}"]

    head = ("", "residual", "another argmax", "rank inversion", "fitted at a bound", "control", "pairs")
    there, control = ([paper("temperature", name) for name in names] for names in (quantities, controls))
    rows = [row(BASE), row(DISTILLED), [CHECKPOINT, *there, " and ".join(control), ""]]
    return table("temperature", f"Percent; {size_of(results)}", head, rows)


VALUES = {"argmax": "argmax", "second": "second-ranked", "nucleus": "top-p=0.9 alternative", "refreshed": "refreshed"}


def values_table(results: Results) -> Table:
    cells = list({**VALUES, **values.REFRESHED})
    ppl, entropy = ([with_error(results(cell, name)) for cell in cells] for name in ("ppl", "entropy"))
    delta = ["", *(signed(results.contrast(cell, "argmax")) for cell in cells[1:])]
    there = [PRINTED.get(cell, {}).get("ppl", "") for cell in cells]
    rows = {DISTILLED: ppl, "delta NLL against argmax": delta, "entropy": entropy, CHECKPOINT: there}
    head = ("", *VALUES, "half as often", "interleaved")
    caption = f"GenPPL, lower is better; {size_of(results)}"
    return table("values", caption, head, [[name, *row] for name, row in rows.items()])


def hidden_table(results: Results) -> Table:
    offsets, groups = settings(results)["offsets"], []
    for model in (BASE, DISTILLED, CHECKPOINT):
        rows = []
        for offset in offsets:
            if model == CHECKPOINT:
                row = ["", *(paper("hidden", quantity, offset) for quantity in (*VIEWS, "changed"))]
            else:
                changed, total = (events(results, VIEWS[i], model, offset=offset) for i in (2, 0))
                found = texts_of(results, ("overwritten", *VIEWS), model, offset=offset)
                row = [*found, f"{changed} of {total}"]
            rows.append([model if offset == offsets[0] else "", f"{offset}", *row])
        groups.append(rows)
    views = ("overwritten", "restored", "revisable", "restored, changed only", "revisable, changed only")
    caption = f"Percent; {size_of(results)}"
    return table("hidden", caption, ("", "calls", *views, "changed"), *groups, names=2)


def storage_table(results: Results) -> Table:
    def row(p: float) -> list[str]:
        crs, final_only, revisable, mend = (f"{p}/{name}" for name in ("CRS", "final-only", "revisable", "mend"))
        ppl = [with_error(results(cell, "ppl")) for cell in (crs, final_only, revisable, mend)]
        return [short(p), *ppl, signed(results.contrast(crs, final_only)), signed(results.contrast(mend, crs))]

    differences = "NLL, CRS minus final-only", "NLL, Mend minus CRS"
    head = ("late top-p", "CRS", "final-only", "revisable", "Mend", *differences)
    caption = f"GenPPL of {DISTILLED}, lower is better; {size_of(results)}"
    return table("storage", caption, head, [row(p) for p in storage.TOP_PS])


def risk_table(results: Results) -> Table:
    def row(t: float) -> list[str]:
        found = [short(t)]
        for model in (BASE, DISTILLED, CHAIN, WORDS):
            error, committed = texts_of(results, ("error", "committed error"), model, t=t)
            bayes = f" ({estimate_of(results, 'deficit', model, t=t).mean:.1f})" if model in (CHAIN, WORDS) else ""
            found += [f"{error}{bayes}", committed]
        return found[:-1]  # the committed error of exact:words is the same at all times

    models = (f"{BASE}, all", f"{DISTILLED}, all", f"{CHAIN}, all (Bayes risk)", f"{WORDS}, all (Bayes risk)")
    head = ("t", *(column for model in models for column in (model, "committed")))[:-1]
    return table("risk", f"Percent wrong; {size_of(results)}", head, [row(t) for t in RISK_TIMES])


def refreshed_table(results: Mapping[str, Results]) -> Table:
    rows = []
    for model in MODELS:
        found = results[f"values/{model}"]
        deltas = (signed(found.contrast(v, "argmax")) for v in values.REFRESHED)
        rows.append([model, "delta NLL against argmax", *deltas])
        for quantity in values.CHANGES:
            rows.append(["", f"{quantity}, %", *(texts_of(found, [quantity], values=v)[0] for v in values.REFRESHED)])
    return table("refreshed", "", ("", "", *REFRESHED), rows, names=2)


def refreshed_exact_table(results: Mapping[str, Results]) -> Table:
    rows = []
    for name in EXACT:
        source, nfe = name.split("-")
        found = results[f"values/{name}"]
        cells = [
            f"{format_signed(found.contrast(v, 'argmax'), 4)}, "
            f"{estimate_of(found, values.CHANGES[1], values=v).mean:.0f}%".replace("-", MINUS)
            for v in values.REFRESHED
        ]
        rows.append([Entry(f"exact:{source}"), Entry(nfe, link=f"reports/values/{name}/report.md"), *map(Entry, cells)])
    return Table("refreshed-exact", "", ("", "calls", *REFRESHED), (tuple(map(tuple, rows)),), 2)


def revision_table(quantities: Mapping[str, str], results: Mapping[str, Results]) -> Table:
    groups = []
    for folder, models in REVISIONS.items():
        for model in models:
            rows: list[list[str]] = []
            for name in revision.SAMPLERS:
                found = texts_of(results[folder], list(quantities), model, values=name)
                rows.append(["" if rows else model, name, *found])
            groups.append(rows)
    return table("revision", "", ("", "tokens", *quantities.values()), *groups, names=2)


REFRESHED = ("refreshed", "half as often", "interleaved")
FORWARD = {  # quantities of `revision` along forward trajectories, with their columns
    "wrong when stored": "wrong when stored",
    "wrong at the end": "wrong at the end",
    "corrected in a call": "corrected in a call",
    "still wrong in a call": "still wrong",
    "spoiled in a call": "spoiled",
    "corrected overall": "corrected overall",
    "still wrong overall": "still wrong",
    "spoiled overall": "spoiled",
}
SAMPLED = dict(zip(revision.SAMPLED, ("contradicted", "again", "at the final step"), strict=True))
TABLES_OF_SEVERAL: dict[str, Callable[[Mapping[str, Results]], Table]] = {
    "refreshed": refreshed_table,
    "refreshed-exact": refreshed_exact_table,
    "revision": partial(revision_table, FORWARD),
    "revision-sampled": partial(revision_table, SAMPLED),
}
TABLES: dict[str, Callable[[Results], Table]] = {
    "singleton": singleton_table,
    "final-step": final_step_table,
    "selection": selection_table,
    "temperature": temperature_table,
    "values": values_table,
    "hidden": hidden_table,
    "storage": storage_table,
    "risk": risk_table,
}
