"""The dial beside every rival, on seeds that no choice has used: values of each seed, for docs/frontier.md.

    python benchmarks/dial.py --models exact:words exact:grammar --calls 8 16 32 64 --n 64
    python benchmarks/dial.py --models molecules sudoku --calls 8 16 32 64 --n 16 --rivals few
    python benchmarks/dial.py --models mini mini-distilled --calls 8 32 64 --n 16 --rivals curve --without-dial
    python benchmarks/dial.py --models mini mini-distilled --calls 8 16 32 64 --n 16 --rivals none

Cells that the file has are kept, so that a stopped run continues, except those of a dial whose rule has changed since.
Networks run in bfloat16."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from measuring import ResultFile

import limpet
from limpet.evaluation import source_judge
from limpet.evaluation.statistics import numbers
from limpet.experiments.dial import SHARPNESS
from limpet.generation import SEEDS
from limpet.paper.studies import samplers
from limpet.samplers import Sampler, parse

RIVALS: dict[str, list[str]] = samplers.FILE["dial"]  # by family
STEPS = "grid=quadratic interleave=true"
CURVE = [f"native {STEPS} top_p={p}" for p in (".85", ".8", ".7", ".6", ".5")]  # beside those of a committed report
FEW = [*(f"native {STEPS} top_p={p}" for p in (".85", ".7", ".55")), "native top_p=.9", "mend"]  # for a slow network


def compared(nfe: int, rivals: list[str], has_dial: bool = True) -> dict[str, Sampler]:
    """The dial at every sharpness, and rivals, by name."""
    dial = {f"sharpness={s:g}": limpet.recommended(nfe, s) for s in SHARPNESS if has_dial}
    return dial | {text: parse(text)[1].replace(nfe=nfe) for text in rivals}


def measure(model: limpet.Denoiser, sampler: Sampler, n: int) -> dict[str, Any]:
    """The values of each seed, and the time of a processor for one sample."""
    begun = time.process_time()
    judge = "mini-judge" if source_judge(model) is None and model.checker is None else None
    one = limpet.compare(model, {"": sampler}, n=n, judge=judge).samplers[0]
    seconds = (time.process_time() - begun) / (n * len(SEEDS))
    shown = {name: numbers(values.round(5)) for name, values in one.scores.values.items() if name != "perplexity"}
    return {"sampler": sampler.caption, "n": n, "seeds": SEEDS, "cpu_seconds": round(seconds, 4), "values": shown}


def cells(
    models: list[str], calls: list[int], n: int, rivals: list[str], has_dial: bool
) -> Iterator[tuple[str, str, int, Sampler]]:
    """Name, model, samples for each seed and sampler."""
    for nfe in calls:
        for name, sampler in compared(nfe, rivals, has_dial).items():
            for model in models:
                yield f"{model}/{nfe}/{name}", model, n, sampler


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", required=True)
    parser.add_argument("--calls", nargs="+", type=int, default=[4, 8, 16, 32, 64])
    parser.add_argument("--n", type=int, default=64, help="samples for each seed")
    parser.add_argument("--rivals", choices=("all", "few", "curve", "none"), default="all")
    parser.add_argument("--without-dial", action="store_true", help="rivals only")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/dial.json"))
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    loaded = {name: limpet.load(name, precision="float32" if name.startswith("exact:") else "bfloat16")
              for name in options.models}  # fmt: skip
    file = ResultFile(options.out)
    every = [text for family in RIVALS.values() for text in family]
    chosen = {"all": every, "few": FEW, "curve": CURVE, "none": []}[options.rivals]
    for name, model, n, sampler in cells(options.models, options.calls, options.n, chosen, not options.without_dial):
        if file.values.get(name, {}).get("sampler", sampler.caption) != sampler.caption:
            del file.values[name]
        file.measure(name, measure, loaded[model], sampler, n)
