"""Fill the table of results in the README from the committed report of the study `interleave`.

python tools/readme.py"""

from __future__ import annotations

from pathlib import Path

from blocks import put
from limpet.experiments import Entry, Results, Table, format_estimate, format_signed, report
from limpet.experiments.render import markdown
from limpet.paper import studies
from limpet.paper.studies import interleave

ROOT = Path(__file__).parents[1]
SIZE = studies.preset("mini-gpu")
RELEASED = "native top_p=.9"  # the released sampler, at the preset's most calls
DIVERSE = ("native grid=quadratic interleave=true top_p=.85",
           "mend grid=quadratic interleave=true budget=.06 warmup=.2 late_top_p=.85")  # fmt: skip
SHARP = ("native grid=quadratic interleave=true top_p=.6",
         "mend grid=quadratic interleave=true warmup=.2 spacing=1 late_top_p=.6")  # fmt: skip
HEAD = (
    "sampler",
    "NLL (nats/token, lower is better)",
    "entropy (nats, higher is more diverse)",
    "rep-4 (lower is less repetitive)",
    "self-BLEU (lower is more diverse)",
)


def committed() -> Results:
    """The results of the committed report."""
    study = studies.study("interleave", SIZE)
    return report.read_report(study, ROOT / "docs/reports/mini" / study.full_name)


def results_table(results: Results) -> str:
    """Five samplers on `mini`: the released one, and the best baseline and both ends of the dial."""
    calls = interleave.compared_calls(SIZE)

    def row(name: str, text: str, nfe: int) -> tuple[Entry, ...]:
        digits = {"nll": 3, "entropy": 3, "rep-4": 4, "self-bleu": 3}
        values = (format_estimate(results(f"base/{nfe}/{text}", measure), n) for measure, n in digits.items())
        return (Entry(f"{name}: `{text}`, {nfe} calls"), *map(Entry, values))

    rows = (
        row("released", RELEASED, SIZE.max_nfe),
        row("best baseline, diverse", DIVERSE[0], calls),
        row("`--sharpness 0`", DIVERSE[1], calls),
        row("best baseline, sharp", SHARP[0], calls),
        row("`--sharpness 1`", SHARP[1], calls),
    )
    table = markdown(Table("results", "", HEAD, (rows,))).strip().replace("\\`", "`")
    deltas = " and ".join(
        f"{format_signed(interleave.mend_against_top_p(results, SIZE, role, SHARP[1]), 3)} on `{caption}`"
        for role, caption in reversed(SIZE.captions.items())
    )
    size = f"{len(SIZE.seeds)} seeds x {SIZE.n} samples of 256 tokens"
    return f"""Samples of `mini`, scored by `mini-judge`: {size}, mean ± standard error over seeds.
The best baseline is top-p with interleaved steps. At equal entropy, delta NLL at sharpness 1 against its curve is
{deltas} ([all samplers, both models](docs/frontier.md)).

{table}
"""


if __name__ == "__main__":
    put(ROOT / "README.md", "results", results_table(committed()))
