"""The rate of bulk sampling relative to `limpet.sample`, alternately, in one process and on the same threads.

    python benchmarks/bulk.py --threads 2 --workers 2 --out benchmarks/results/bulk.json
    python benchmarks/bulk.py --model ./my.py:factory --n 1024 --part-size 256 --out bulk-gpu.json

It needs torch, the package's own source beside it and what the model needs; nothing is downloaded. `ratio` is the
median over repeats of the rate of bulk sampling, with files written, over that of `limpet.sample`, whose samples stay
in memory. `work` is the same ratio of processor seconds, which other work on the machine disturbs less. `processes` is
the rate of --workers processes that share the threads, measured after each has finished its first part."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import limpet
from limpet.experiments import Executor, ModelCache, RunProgress, Store, local, processes, provenance
from limpet.experiments.bulk import BulkRequest, generate
from limpet.models.networks import PRECISIONS
from limpet.samplers import parse


def rate(
    request: BulkRequest, executor: Executor, models: ModelCache, threads: int, skip: int
) -> tuple[float, list[list[int]]]:
    """Samples per second after the first `skip` parts, and the tokens of all samples."""
    times: list[tuple[float, int]] = []

    def on_progress(progress: RunProgress) -> None:
        times.append((time.perf_counter(), progress.done))

    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        generate(request, Store(folder), executor, models, threads=threads, on_progress=on_progress)
        (start, before), (end, done) = times[skip] if skip else (begun, 0), times[-1]
        lines = [line for path in sorted(Path(folder).glob("*.jsonl")) for line in path.read_text("utf-8").split("\n")]
        return (done - before) / (end - start), [json.loads(line)["tokens"] for line in lines if line]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One process and bulk sampling alternately, so that other work on the machine slows both."""
    torch.set_num_threads(options.threads)
    _, sampler = parse(options.sampler, nfe=options.nfe)
    models = ModelCache(options.device, options.precision)
    model = models.model(options.model)
    request = BulkRequest(options.model, sampler, options.n, part_size=options.part_size)
    limpet.sample(model, sampler, n=min(options.n, options.part_size))  # the first is slower
    rates: dict[str, list[float]] = {"sample": [], "bulk": [], "processes": []}
    work, same = [], True
    for _ in range(options.repeats):
        begun, spent = time.perf_counter(), time.process_time()
        tokens = limpet.sample(model, sampler, n=options.n).tokens.tolist()
        rates["sample"].append(options.n / (time.perf_counter() - begun))
        between = time.process_time()
        found, rows = rate(request, local(models=models), models, options.threads, 0)
        rates["bulk"].append(found)
        work.append((between - spent) / (time.process_time() - between))
        same &= rows == tokens
        if options.workers:
            threads = max(1, options.threads // options.workers)
            executor = processes([options.device] * options.workers)
            rates["processes"].append(rate(request, executor, models, threads, options.workers)[0])
        torch.set_num_threads(options.threads)

    def median(name: str) -> float:
        return statistics.median(one / alone for one, alone in zip(rates[name], rates["sample"], strict=True))

    names = ("model", "sampler", "nfe", "n", "part_size", "threads", "workers")
    return {
        "command": " ".join(["python", *sys.argv]),
        "machine": {**provenance(model), "processor": platform.processor() or platform.machine()},
        **{name: getattr(options, name) for name in names},
        "length": model.length,
        "rates": rates,
        "ratio": median("bulk"),
        "work": statistics.median(work),
        "processes": median("processes") if options.workers else None,
        "same_rows": same,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--sampler", default="crs")
    parser.add_argument("--nfe", type=int, default=16)
    parser.add_argument("--n", type=int, default=256)
    parser.add_argument("--part-size", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--device", default=None)
    parser.add_argument("--precision", choices=tuple(PRECISIONS), default="float32")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.n < 2 * options.workers * options.part_size:
        parser.error("give two parts or more for each worker: the first of each is not counted")
    document = json.dumps(measure(options), indent=1) + "\n"
    if options.out is not None:
        options.out.write_text(document)
    print(document, end="")
