"""Measure which metrics texts without a model fool, and fill the table of docs/metrics.md.

    python tools/controls.py --run    # measure on this machine, then fill the table
    python tools/controls.py          # fill the table from the committed numbers

The numbers are those of `limpet.compare("mini", ..., controls=True)` (benchmarks/results/controls.json)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import limpet
from blocks import put
from limpet.evaluation.controls import COPIES, NGRAMS, SHIFTS

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs/metrics.md", ROOT / "benchmarks/results/controls.json"
SAMPLERS = ("native", "native top_p=.9", "mend")
NFE, LENGTH, N, SEEDS = 16, 128, 16, (8400, 8401, 8402, 8403)
METRICS = ("rep-4", "dist-4", "self-bleu", "novelty-8", "mauve")
RISES = {"perplexity": -1, "rep-4": -1, "dist-4": 1, "self-bleu": -1, "novelty-8": 1, "mauve": 1}  # 1: higher is better
NAMES = {"perplexity": "GenPPL, lower is better", "entropy": "entropy, nats"} | {
    name: f"`{name}`, {'higher' if RISES[name] > 0 else 'lower'} is better" for name in METRICS
}


def measure() -> None:
    """Compare the samplers and the controls on `mini`, and store every number."""
    model = limpet.load("mini", precision="bfloat16")
    judge = limpet.load_judge("mini-judge", precision="bfloat16")
    result = limpet.compare(
        model, SAMPLERS, nfe=NFE, n=N, seeds=SEEDS, length=LENGTH, judge=judge, metrics=METRICS, controls=True
    )
    print(result)
    RESULTS.write_text(json.dumps(result.to_dict(), indent=1) + "\n", encoding="utf-8")


def mean(measures: dict[str, Any], name: str) -> float:
    return float(measures[name]["mean"])


def table(found: dict[str, Any]) -> str:
    """One row a metric: the samplers' range, and each control with how many samplers the metric ranks it above."""
    own = [one["measures"] for one in found["samplers"]]
    controls = [found["controls"][name] for name in (NGRAMS, SHIFTS, COPIES)]
    others = [one["measures"] | ({"mauve": one["mauve"]} if "mauve" in one else {}) for one in controls]
    lines = [
        "| metric | samplers, worst to best | frequent n-grams | one passage, shifted | copied text |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, caption in NAMES.items():
        sign, digits = RISES.get(name, 1), 1 if name == "perplexity" else 3
        values = sorted((mean(one, name) for one in own), key=lambda value: sign * value)
        cells = [f"{values[0]:.{digits}f} to {values[-1]:.{digits}f}"]
        for one in others:
            value = mean(one, name)
            above = sum(sign * value > sign * other for other in values)
            verdict = f" (above {above} of {len(values)})" if above and name in RISES else ""
            cells.append(f"{value:.{digits}f}{verdict}")
        lines.append(f"| {caption} | {' | '.join(cells)} |")
    samples = len(found["seeds"]) * found["samples_per_seed"]
    about = (
        f"`{found['model']}` in {found['precision']}, {found['samplers'][0]['nfe']} calls, {samples} samples of "
        f"{found['length']} tokens; samplers: {', '.join('`' + one['name'] + '`' for one in found['samplers'])}; "
        f"judge: {found['judge']['name']} in {found['judge']['precision']}."
    )
    return "\n".join([*lines, "", about])


if __name__ == "__main__":
    if "--run" in sys.argv[1:]:
        measure()
    put(PAGE, "controls", table(json.loads(RESULTS.read_text(encoding="utf-8"))))
