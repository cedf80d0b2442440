"""What `limpet sample` does with a folder: shards that are made, or read against their seals."""

from __future__ import annotations

import time
from dataclasses import asdict

from limpet.cli.common import On, Where, err, progress, show
from limpet.cli.study import clock, placed, summed_up
from limpet.experiments import Shelf, Store, bulk
from limpet.experiments.bulk import Order

QUIET = 30.0  # seconds between remarks on a long run, where nobody watches a bar


def make(
    order: Order,
    folder: str,
    where: Where,
    on: On,
    workers: int | None,
    address: str | None,
    threads: int | None,
    json: bool,
) -> int:
    """Make the shards that are missing; where there is no terminal for a bar, say now and then how far it is."""
    shelf, store = Shelf(where.device if on == "local" else "cpu", where.resolved, where.which), Store(folder)
    place, threads = placed(on, workers, address, where.device, threads, shelf)
    begun = spoken = time.monotonic()
    with progress(f"{order.model} into {folder}") as update:

        def tell(now: bulk.Pace) -> None:
            nonlocal spoken
            if now.event is not None and now.event.error is not None:
                err.print(f"{now.event.unit.name} failed: {now.event.error}", style="red", markup=False)
            left = "" if now.left is None else f" · {clock(now.left)} left"
            detail = f"samples · {now.rate:,.1f}/s{left}"
            update(completed=now.done, total=now.total, detail=detail)
            if not err.is_terminal and time.monotonic() - spoken > QUIET:
                spoken = time.monotonic()
                err.print(f"{now.done:,} of {now.total:,} {detail}", markup=False)

        try:
            summary = bulk.make(order, store, place, shelf, threads=threads, tell=tell)
        except KeyboardInterrupt:
            err.print("stopped: every finished shard is kept, and the same command goes on from there", markup=False)
            raise
    summed_up(store.path, "shards", summary, begun, ": run the same command again")
    show(json, asdict(summary), ())
    return int(bool(summary.failed))


def verify(path: str, json: bool) -> int:
    """Whether every shard that was asked for is there and whole."""
    samples, shards, wrong = 0, 0, dict[str, str]()
    with progress(f"reading {path}") as update:
        for shard in bulk.verify(Store(path)):
            shards += 1
            update(completed=shards, detail="shards")
            if shard.wrong:
                wrong[shard.name] = shard.wrong
            else:
                samples += shard.samples
    lines = [f"{name}: {what}" for name, what in wrong.items()]
    lines.append(f"{path}: {samples:,} samples in {shards - len(wrong)} of {shards} shards are as they were written")
    lines += ["the command that made them makes the others again"] if wrong else []
    show(json, {"path": path, "samples": samples, "shards": shards, "wrong": wrong}, lines)
    return int(bool(wrong))


__all__ = ["Order", "make", "verify"]
