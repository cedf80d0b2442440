"""A sampled or an argmax final step on the same trajectories (section 5.1, appendix D.2; table 4)."""

import math
from collections.abc import Iterator
from itertools import product

from limpet.evaluation import Estimate
from limpet.experiments import Entry, Finding, Table, within
from limpet.paper.studies.presets import Preset
from limpet.paper.studies.published import Claims, PaperResults, published

ROWS = tuple(product(("base", "distilled"), (1.0, 0.9)))  # role and top-p
FINAL_STEPS = ("sample", "argmax")
NEAR = 0.05  # nats; studies.toml gives the reason


def tables(results: PaperResults, preset: Preset) -> Iterator[Table]:
    def both(ppl: str, entropy: str) -> str:
        return f"{ppl} ({entropy})"

    def row(role: str, p: float) -> Iterator[Entry]:
        yield Entry(preset.captions[role])
        yield Entry(f"p={p}")
        for column in ("reported", *FINAL_STEPS):  # the first is of others, and is not run here
            cell, measures = f"{role}/{p}/{column}", ("ppl", "entropy")
            is_run = column in FINAL_STEPS
            here = both(*(f"{results(cell, measure).mean:.2f}" for measure in measures)) if is_run else ""
            yield Entry(here, both(*(results.paper_text(cell, measure) for measure in measures)))

    yield results.table("final-step", [[row(*key) for key in ROWS]])


def claims(results: PaperResults, preset: Preset) -> Claims:
    """Whether a sampled final step gives what others report, for the model that they report on."""

    def gap(p: float) -> Finding:
        cell, name = f"base/{p}/sample", f"NLL, sample minus reported, {preset.captions['base']}, p={p:g}"
        reported = math.log(float(results.paper_text(f"base/{p}/reported", "ppl")))
        estimate = Estimate(results.values(cell, "nll") - reported)
        if preset.captions["base"] != "Duo":
            estimate = results.missing("others report on Duo only")
        return within(name, estimate, NEAR, published("nll", cell, f"base/{p}/reported"))

    return {"recovered": [gap(1.0), gap(0.9)]}
