"""Ancestral or argmax at the last call, on the same paths (section 5.1, appendix D.2; table 4)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

from limpet.evaluation.statistics import Estimate
from limpet.experiments.claims import Finding, within
from limpet.experiments.contents import Entry, Table
from limpet.experiments.study import Cell
from limpet.paper.studies.presets import Preset
from limpet.paper.studies.published import Beside, Claims, printed

ROWS = tuple(product(("base", "distilled"), (1.0, 0.9)))  # role and top-p
ENDS = ("sample", "argmax")
NEAR = 0.05  # nats; studies.toml says why


def cells(preset: Preset) -> Iterator[Cell]:
    """On samples of their own, independent of the NFE sweep's, as the table's caption says."""
    for (role, p), end in product(ROWS, ENDS):
        sampler = preset.native.replace(nfe=preset.audit_nfe, top_p=p, final_step=end)
        yield Cell(f"{role}/{p}/{end}", preset.roles[role], sampler, preset.audit_n, first=preset.apart)


def tables(results: Beside, preset: Preset) -> Iterator[Table]:
    def both(ppl: str, entropy: str) -> str:
        return f"{ppl} ({entropy})"

    def row(role: str, p: float) -> Iterator[Entry]:
        yield Entry(preset.captions[role])
        yield Entry(f"p={p}")
        for end in ("reported", *ENDS):  # the first by others, and not run here
            cell, measures = f"{role}/{p}/{end}", ("ppl", "entropy")
            here = both(*(f"{results(cell, measure).mean:.2f}" for measure in measures)) if end in ENDS else ""
            yield Entry(here, both(*(results.paper(cell, measure) for measure in measures)))

    yield results.table("final_step", [[row(*key) for key in ROWS]])


def claims(results: Beside, preset: Preset) -> Claims:
    """Whether an ancestral last call gives what was reported by others, of the model that they report on."""

    def gap(p: float) -> Finding:
        cell, name = f"base/{p}/sample", f"NLL, ancestral less reported, {preset.captions['base']}, p={p:g}"
        reported = math.log(float(results.paper(f"base/{p}/reported", "ppl")))
        estimate = Estimate(results.values(cell, "nll") - reported)
        if preset.captions["base"] != "Duo":
            estimate = results.missing("others report on Duo alone")
        return within(name, estimate, NEAR, printed("nll", cell, f"base/{p}/reported"))

    return {"recovered": [gap(1.0), gap(0.9)]}
