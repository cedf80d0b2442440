"""Fill the results of the README from the committed reports of `truth` and `interleave`, and the numbers of the dial.

python tools/readme.py"""

from __future__ import annotations

from pathlib import Path
from textwrap import fill

import dial
import truth as truth_page
from blocks import put
from limpet.experiments import Entry, Results, Table, format_estimate, format_signed, report
from limpet.experiments.render import markdown
from limpet.paper import studies
from limpet.paper.studies import interleave, truth

ROOT = Path(__file__).parents[1]
SIZE = studies.preset("mini-gpu")  # of the study of text
RELEASED = "native top_p=.9"  # the released sampler, at the preset's most calls
FEW, MANY = 16, 64  # calls
WORLDS = ("molecules", "boards", "puzzles", "grammar")  # of the table; the page has all
WIDTH = 120


def committed() -> tuple[Results, Results]:
    """The results of the committed reports: of `truth`, and of `interleave`."""
    study = studies.study("interleave", SIZE)
    return truth_page.committed(), report.read_report(study, ROOT / "docs/reports/mini" / study.full_name)


def truth_table(results: Results) -> str:
    """The share of right samples in each world: the released sampler, the best baseline, CRS and Mend."""

    def row(name: str, nfe: int, text: str | None) -> tuple[Entry, ...]:
        if text is None:
            values = (truth_page.best_entry(results, world, nfe) for world in WORLDS)
        else:
            values = (Entry(format_estimate(truth.quality(results, f"{world}/{nfe}", text), 3)) for world in WORLDS)
        return (Entry(f"{name}, {nfe} calls"), *values)

    rows = (
        row("native", MANY, truth.NATIVE),
        row("native", FEW, truth.NATIVE),
        row("best baseline", FEW, None),
        *(row(f"{family}", FEW, text) for family, (text,) in truth.COMPARED.items() if family in ("CRS", "Mend")),
    )
    head = ("sampler", *(f"{truth.WORLDS[world].short} {truth.WORLDS[world].quality}" for world in WORLDS))
    return markdown(Table("results", "", head, (rows,))).strip()


def results_block(of_truth: Results, of_text: Results) -> str:
    """What the README says of results."""
    size = truth_page.SIZE.truth
    counts = ", ".join(f"{size[world].n} {truth.WORLDS[world].short}" for world in WORLDS)
    parameters = [
        f"`{model}` has {truth_page.card_figures(model)['parameters'] / 1e6:.1f} million parameters"
        for model in dict.fromkeys(truth.WORLDS[world].model for world in WORLDS[:-1])
    ]
    calls = interleave.compared_calls(SIZE)
    cells = dial.measured()
    nll, entropy = (format_estimate(of_text(f"base/{SIZE.max_nfe}/{RELEASED}", name), 3) for name in ("nll", "entropy"))
    first = cells[f"mini/{calls}/sharpness=0"]
    diverse, diverse_entropy = (format_estimate(dial.estimate(first, name), 3) for name in ("nll", "entropy"))

    def delta(role: str, model: str) -> str:
        """The dial at sharpness 1 against interleaved top-p, at the dial's entropy."""
        own = dial.point(cells, f"{model}/{calls}/sharpness=1")
        curve = [dial.reported(of_text, f"{role}/{calls}/{text}") for text in interleave.SAMPLERS["curve"]]
        assert own is not None
        return format_signed(dial.delta(own, [[one for one in curve if one is not None]]), 3)

    deltas = " and ".join(f"{delta(role, model)} on `{model}`" for role, model in reversed(SIZE.captions.items()))
    checked = (
        "Share of right samples (higher is better), as checkers decide it: RDKit, the rules of sudoku, a grammar. Mean "
        f"± standard error over {len(of_truth.study.seeds)} seeds of {counts}. {truth_page.listed(parameters)}; the "
        "predictions of the brackets are exact. The best baseline is top-p or native "
        "sampling, over final steps and interleaving ([every sampler, verdicts and costs](docs/truth.md))."
    )
    text = (
        f"On text (`mini`, 15.7 million parameters), `--sharpness 0` with {calls} calls has an NLL of {diverse} "
        f"nats/token (lower is better) at an entropy of {diverse_entropy} nats. The released sampler with "
        f"{SIZE.max_nfe} calls has {nll} at {entropy}. At `--sharpness 1` and equal entropy, delta NLL against top-p "
        f"with interleaved steps is {deltas} (lower is better). These are {len(SIZE.seeds)} seeds x {first['n']} "
        f"samples of the dial and {SIZE.n} of the others under `mini-judge`, a small model too ([all samplers, both "
        "models](docs/frontier.md))."
    )
    return f"{fill(checked, WIDTH)}\n\n{truth_table(of_truth)}\n\n{fill(text, WIDTH)}\n"


if __name__ == "__main__":
    put(ROOT / "README.md", "results", results_block(*committed()))
