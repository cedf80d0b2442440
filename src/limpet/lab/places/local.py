"""One worker in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from limpet.lab.places import Group, Place
from limpet.lab.shelf import Shelf
from limpet.lab.worker import Event, Job, Worker


def local(device: str | None = None, shelf: Shelf | None = None) -> Place:
    def place(job: Job, groups: Sequence[Group]) -> Iterator[Event]:
        worker = Worker(job, device, shelf)
        for group in groups:
            yield from worker.work(group)

    return place
