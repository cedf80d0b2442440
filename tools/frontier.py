"""Fill the tables of docs/frontier.md and of the models' cards from committed numbers.

    python tools/frontier.py

The numbers are those of the studies `samplers`, `forms`, `interleave` and `pareto` (docs/reports/mini), and of `limpet
tune mini --nfe N --n 64 --precision bfloat16 --json` for each N (benchmarks/results/tune-mini.json). All of them but
those of `interleave` were computed on a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from blocks import put
from limpet.evaluation.statistics import Estimate
from limpet.experiments import Entry, Results, Table, format_signed, report
from limpet.experiments.render import markdown
from limpet.models.model_files import BUILTIN_FOLDER
from limpet.paper import studies
from limpet.paper.studies import forms, interleave, pareto, samplers
from limpet.samplers import parse

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/frontier.md"
SIZE = studies.preset("mini-gpu")
TUNED = ROOT / "benchmarks/results/tune-mini.json"
SAMPLERS = {  # of the study `samplers`: column -> the first sampler of its family
    "CRS, as in the paper": "crs",
    "CRS, committed tokens kept": "crs budget=1 spacing=2 final_step=keep",
    "Mend": "mend",
}
SAMPLED, FEW_COMMITTED = "top-p, sample", "mend budget=.25"


def committed(name: str) -> Results:
    """The results of a committed report."""
    study = studies.study(name, SIZE)
    return report.read_report(study, ROOT / "docs/reports/mini" / study.full_name)


def tuned() -> dict[int, str]:
    """The tuner's choice for `mini` by number of calls, as the study `forms` writes it."""
    found: dict[str, Any] = json.loads(TUNED.read_text(encoding="utf-8"))
    known = {forms.parse_form(text).replace(nfe=2): text for family in forms.FORMS.values() for text in family}
    return {int(nfe): known[parse(one["winner"])[1].replace(nfe=2)] for nfe, one in found.items()}


def short(estimate: Estimate) -> str:
    """An estimate with three digits and no leading zero."""
    return format_signed(estimate, 3).replace("0.", ".")


def span(values: Iterable[float], sign: str = "+") -> str:
    """The smallest and the largest of some values."""
    numbers = list(values)
    return f"{min(numbers):{sign}.3f} to {max(numbers):{sign}.3f}".replace("0.", ".")


def frontier(roles: Sequence[str], field: Results, tried: Results) -> str:
    """By model and number of calls: delta NLL against the best top-p curve at the entropy of each sampler."""
    best, captions = tuned(), SIZE.captions

    def row(role: str, nfe: int) -> tuple[Entry, ...]:
        at = f"{role}/{nfe}"
        listed = [(field, text) for text in SAMPLERS.values()] + [(tried, best[nfe])]
        values = [
            f"{short(samplers.delta(results, at, text))} at {results(f'{at}/{text}', 'entropy').mean:.2f}"
            for results, text in listed
        ]
        return tuple(map(Entry, (f"{captions[role]}, {nfe} calls", *values, best[nfe])))

    rows = tuple(tuple(row(role, nfe) for nfe in SIZE.nfes) for role in reversed(roles))
    return markdown(Table("frontier", "", ("model", *SAMPLERS, "Mend, tuned", "the tuned sampler"), rows))


def costs(field: Results) -> str:
    """What Mend costs in diversity, whether its delta NLL holds after a prompt, and MAUVE where it was computed."""
    places = samplers.places(SIZE)

    def delta(measure: str, text: str = "mend", where: Iterable[str] = places, **curves: Any) -> str:
        return span(samplers.delta(field, at, text, measure=measure, **curves).mean for at in where)

    measured = [at for at in places if "mauve" in field.cells[f"{at}/mend"]]
    curve = [text for text in samplers.CURVES[SAMPLED] if "mauve" in field.cells[f"{measured[0]}/{text}"]]
    count = sum("mauve" in field.cells[name] for name in field.cells if name.startswith(f"{measured[0]}/"))

    def mauve(text: str) -> str:
        return span((field(f"{at}/{text}", "mauve").mean for at in measured), "-")

    def beyond(text: str) -> str:
        return delta("mauve", text, measured, curves={SAMPLED: curve})

    at_entropy = f"At equal entropy, Mend's Rep-4 differs from top-p's by {delta('rep-4')} and its Self-BLEU by"
    prompted = delta("nll", where=samplers.prompted_places(SIZE))
    return f"""{at_entropy}
{delta("self-bleu")} (lower is more diverse). After a prompt, its delta NLL is {prompted}.

MAUVE against held-out text (higher is better), computed for {count} samplers at 16 and 64 calls, rises with entropy:

| sampler | MAUVE | against top-p with a sampled final step at equal entropy |
| --- | ---: | ---: |
| `native` | {mauve(curve[0])} | |
| `mend` | {mauve("mend")} | {beyond("mend")} |
| `{FEW_COMMITTED}`, which commits a quarter of the positions | {mauve(FEW_COMMITTED)} | {beyond(FEW_COMMITTED)} |
"""


def interleaved_table() -> str:
    """Delta NLL against the released sampler at its entropy, interleaved and not, by model and number of calls."""
    interleaved, plain = committed("interleave"), committed("pareto")
    calls = [SIZE.nfes[0], *interleave.by_calls(SIZE), *SIZE.nfes[2:]]
    kinds: list[tuple[str, Results, pareto.SamplersByCalls, str]] = [
        ("interleaved", interleaved, interleave.by_calls(SIZE), interleave.FAMILY),
        ("top-p, all positions at once", plain, pareto.by_calls(SIZE), SAMPLED),
        ("Mend, all positions at once", plain, pareto.by_calls(SIZE), "Mend"),
    ]

    def entry(role: str, nfe: int, results: Results, by_calls: pareto.SamplersByCalls, family: str) -> Entry:
        texts = by_calls.get(nfe, {}).get(family)
        if not texts:
            return Entry("")
        return Entry(format_signed(pareto.delta(results, SIZE, role, interleave.FINAL_STEP, nfe, texts), 3))

    rows = tuple(
        (Entry(f"{caption}, {name}"), *(entry(role, nfe, results, by_calls, family) for nfe in calls))
        for role, caption in reversed(SIZE.captions.items())
        for name, results, by_calls, family in kinds
    )
    return markdown(Table("interleave", "", ("mixtures", *(f"{nfe} calls" for nfe in calls)), (rows,))).lstrip()


def sharp_table() -> str:
    """Delta NLL of Mend against top-p, both interleaved, at Mend's entropy."""
    results, calls = committed("interleave"), interleave.compared_calls(SIZE)

    def entry(role: str, text: str) -> Entry:
        delta = interleave.mend_against_top_p(results, SIZE, role, text)
        return Entry(f"{short(delta)} at {results(f'{role}/{calls}/{text}', 'entropy').mean:.2f}")

    rows = tuple(
        (Entry(text), *(entry(role, text) for role in reversed(SIZE.captions))) for text in interleave.SAMPLERS["mend"]
    )
    return markdown(Table("sharp", "", (f"{calls} calls", *reversed(SIZE.captions.values())), (rows,))).lstrip()


def blocks() -> dict[tuple[Path, str], str]:
    """The generated blocks: (page, name) -> text."""
    field, tried = committed("samplers"), committed("forms")
    cards = {
        (BUILTIN_FOLDER / SIZE.roles[role] / "README.md", "frontier"): frontier([role], field, tried)
        for role in SIZE.captions
    }
    return {
        (PAGE, "frontier"): f"{frontier(list(SIZE.captions), field, tried)}\n{costs(field)}",
        (PAGE, "interleave"): interleaved_table(),
        (PAGE, "sharp"): sharp_table(),
        **cards,
    }


if __name__ == "__main__":
    for (page, name), text in blocks().items():
        put(page, name, text)
