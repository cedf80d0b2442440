"""Shards in a folder beside `limpet.sample` in one process, on the same threads, in turns: what is kept of its rate.

    python benchmarks/bulk.py --threads 2 --workers 2 --out benchmarks/results/bulk.json
    python benchmarks/bulk.py --model ./my.py:factory --n 1024 --per-shard 256 --out bulk-gpu.json

It needs torch, the package's own source beside it and whatever the model needs; nothing is downloaded. `ratio` is the
median over repeats of the rate of bulk sampling, rows written, over that of `limpet.sample`, whose samples stay in
memory. `work` is the same of processor seconds, which a busy machine disturbs less. `processes` is the rate of
--workers processes that share the threads, from when each has made a shard: they have begun by then."""

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
from limpet.experiments import Shelf, Store, bulk
from limpet.experiments.executors import Place, local
from limpet.experiments.executors.processes import processes
from limpet.experiments.resources import provenance
from limpet.models.duo import PRECISIONS
from limpet.samplers import parse


def rate(order: bulk.Order, place: Place, shelf: Shelf, threads: int, skip: int) -> tuple[float, list[list[int]]]:
    """Samples a second from the skip-th shard on, and all of them."""
    told: list[tuple[float, int]] = []
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        bulk.make(
            order, Store(folder), place, shelf, threads=threads,
            tell=lambda pace: told.append((time.perf_counter(), pace.done)),
        )  # fmt: skip
        (start, before), (end, done) = (begun, 0) if skip == 0 else told[skip], told[-1]
        lines = [line for path in sorted(Path(folder).glob("*.jsonl")) for line in path.read_text("utf-8").split("\n")]
        return (done - before) / (end - start), [json.loads(line)["tokens"] for line in lines if line]


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """One process and bulk sampling in turns, so that what else the machine does meets both alike."""
    torch.set_num_threads(options.threads)
    _, sampler = parse(options.arm, nfe=options.nfe)
    shelf = Shelf(options.device, options.precision)
    model = shelf.model(options.model)
    order = bulk.Order(options.model, sampler, options.n, per_shard=options.per_shard)
    limpet.sample(model, sampler, n=min(options.n, options.per_shard))  # the first is slower
    here, there, scattered, work, same = [], [], [], [], True
    for _ in range(options.repeats):
        begun, spent = time.perf_counter(), time.process_time()
        tokens = limpet.sample(model, sampler, n=options.n).tokens.tolist()
        here.append(options.n / (time.perf_counter() - begun))
        between = time.process_time()
        found, rows = rate(order, local(shelf=shelf), shelf, options.threads, 0)
        there.append(found)
        work.append((between - spent) / (time.process_time() - between))
        same &= rows == tokens
        if options.workers:
            each = max(1, options.threads // options.workers)
            devices = [options.device] * options.workers
            found, rows = rate(order, processes(devices), shelf, each, options.workers)
            scattered.append(found)
        torch.set_num_threads(options.threads)

    def median(rates: list[float]) -> float:
        return statistics.median(one / alone for one, alone in zip(rates, here, strict=True))

    return {
        "command": " ".join(["python", *sys.argv]),
        "machine": {**provenance(model), "processor": platform.processor() or platform.machine()},
        **{name: getattr(options, name) for name in ("model", "arm", "nfe", "n", "per_shard", "threads", "workers")},
        "length": model.length,
        "rates": {"sample": here, "bulk": there, "processes": scattered},
        "ratio": median(there),
        "work": statistics.median(work),
        "processes": median(scattered) if scattered else None,
        "same_rows": same,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--arm", default="crs")
    parser.add_argument("--nfe", type=int, default=16)
    parser.add_argument("--n", type=int, default=256)
    parser.add_argument("--per-shard", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--device", default=None)
    parser.add_argument("--precision", choices=tuple(PRECISIONS), default="float32")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.n < 2 * given.workers * given.per_shard:
        parser.error("give two shards or more for each worker: the first of each is not counted")
    document = json.dumps(measured(given), indent=1) + "\n"
    if given.out is not None:
        given.out.write_text(document)
    print(document, end="")
