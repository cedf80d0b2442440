"""Where groups of units are worked: in this process, in processes of this machine, on a Ray cluster.

A place takes a job and groups and yields events as units are made. Units are idempotent, so a place may hand a group
out again whenever a worker dies; a group is given up after ATTEMPTS workers died over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from limpet.experiments.resources import Shelf
from limpet.experiments.units import Unit
from limpet.experiments.worker import Event, Job, Worker

ATTEMPTS = 3

Group = Sequence[Unit]
Place = Callable[[Job, Sequence[Group]], Iterator[Event]]


def local(device: str | None = None, shelf: Shelf | None = None) -> Place:
    """One worker in this process."""

    def place(job: Job, groups: Sequence[Group]) -> Iterator[Event]:
        worker = Worker(job, device, shelf)
        for group in groups:
            yield from worker.work(group)

    return place
