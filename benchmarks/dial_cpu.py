"""Processor time of the dial beside native sampling, alternately in one run, as ratios of medians.

python benchmarks/dial_cpu.py"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
from measuring import ResultFile

import limpet

NFE, N, RUNS = 16, 4, 3
NATIVE = {"native": limpet.Native(nfe=NFE), "native top_p=.9": limpet.Native(nfe=NFE, top_p=0.9)}
DIAL = {f"sharpness={s:g}": limpet.recommended(NFE, s) for s in (0.0, 0.25, 1.0)}


def ratios(name: str) -> dict[str, Any]:
    """Time of each sampler over that of each native one, and rows of the head per free position and call."""
    model = limpet.load(name, precision="bfloat16")
    limpet.sample(model, "native nfe=2", n=N)
    taken: dict[str, list[float]] = {one: [] for one in (*NATIVE, *DIAL)}
    rows = {}
    for run in range(RUNS):
        for one, sampler in {**NATIVE, **DIAL}.items():
            begun = time.process_time()
            rows[one] = limpet.sample(model, sampler, n=N, seed=run).head_rows
            taken[one].append(time.process_time() - begun)
    medians = {one: statistics.median(times) for one, times in taken.items()}
    against = {base: {one: round(medians[one] / medians[base], 3) for one in DIAL} for base in NATIVE}
    return {"nfe": NFE, "n": N, "runs": RUNS, "ratio to": against, "head rows": rows}


if __name__ == "__main__":
    torch.set_num_threads(1)
    ResultFile(Path("benchmarks/results/dial-cpu.json")).measure("mini", ratios, "mini")
