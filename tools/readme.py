"""Fill the table of results in the README from the committed report of the study `interleave`.

    python tools/readme.py"""

from __future__ import annotations

from pathlib import Path

from blocks import put
from limpet.experiments import Entry, Results, Table, format_estimate, format_signed, report
from limpet.experiments.render import markdown
from limpet.paper import studies
from limpet.paper.studies import interleave, samplers

ROOT = Path(__file__).parents[1]
SIZE = studies.preset("mini-gpu")
RELEASED = "native top_p=.9"  # the released sampler, at the preset's most calls
DIVERSE = ("native grid=quadratic interleave=true top_p=.85",
           "mend grid=quadratic interleave=true budget=.06 warmup=.2 late_top_p=.85")  # fmt: skip
SHARP = ("native grid=quadratic interleave=true top_p=.6", "mend grid=quadratic interleave=true")
HEAD = (
    "sampler",
    "NLL (nats/token, lower is better)",
    "entropy (nats, higher is more diverse)",
    "rep-4 (lower is less repetitive)",
    "delta NLL at equal entropy (lower is better)",
)


def committed() -> Results:
    """The results of the committed report."""
    study = studies.study("interleave", SIZE)
    return report.read_report(study, ROOT / "docs/reports/mini" / study.full_name)


def results_table(results: Results) -> str:
    """Five samplers on `mini`: the released one, and the best baseline and Mend at two levels of diversity."""
    calls = interleave.compared_calls(SIZE)

    def row(name: str, text: str, nfe: int) -> tuple[Entry, ...]:
        cell = f"base/{nfe}/{text}"
        nll, entropy, rep = (results(cell, measure) for measure in ("nll", "entropy", "rep-4"))
        delta = ""
        if text.startswith("mend"):
            against = samplers.delta(results, f"base/{nfe}", text, {"": interleave.SAMPLERS["curve"]})
            delta = format_signed(against, 3)
        cells = (format_estimate(nll, 3), format_estimate(entropy, 3), format_estimate(rep, 4), delta)
        return (Entry(f"{name}: `{text}`, {nfe} calls"), *map(Entry, cells))

    rows = [
        row("released sampler", RELEASED, SIZE.max_nfe),
        row("best baseline, diverse", DIVERSE[0], calls),
        row("Mend, diverse", DIVERSE[1], calls),
        row("baseline, sharp", SHARP[0], calls),
        row("Mend, sharp", SHARP[1], calls),
    ]
    table = markdown(Table("results", "", HEAD, (tuple(rows),))).strip()
    shape = f"{len(SIZE.seeds)} seeds x {SIZE.n} samples of 256 tokens"
    return (
        f"`mini`, judged by `mini-judge`, {shape}, mean ± standard error over seeds. Delta NLL is against\n"
        f"the curve of interleaved top-p, the best baseline, at the sampler's own entropy\n"
        f"([all samplers and both models](docs/frontier.md)).\n\n{table}\n"
    )


if __name__ == "__main__":
    put(ROOT / "README.md", "results", results_table(committed()))
