"""Executors: where groups of units are computed. In this process, in processes of this machine, or on a Ray cluster.

An executor takes a worker's configuration and groups, and yields an event for every unit. Computing a unit twice does
no harm, so an executor hands a group out again when its worker dies, and gives it up after ATTEMPTS deaths."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from limpet.experiments.model_cache import ModelCache
from limpet.experiments.units import Unit
from limpet.experiments.worker import UnitEvent, Worker, WorkerConfig

ATTEMPTS = 3

Group = Sequence[Unit]
Executor = Callable[[WorkerConfig, Sequence[Group]], Iterator[UnitEvent]]


def local(device: str | None = None, models: ModelCache | None = None) -> Executor:
    """One worker in this process. models: models that are loaded already."""

    def execute(config: WorkerConfig, groups: Sequence[Group]) -> Iterator[UnitEvent]:
        worker, waiting = Worker(config, device, models), deque(groups)
        while waiting:
            group = waiting.popleft()
            for event in worker.work(group):
                if event.busy:  # another runner is computing the group
                    waiting.append(group)
                    break
                yield event

    return execute
