"""N workers in processes of this machine, one for each device, each behind a pipe."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from limpet.experiments.executors import ATTEMPTS, Group, Place
from limpet.experiments.worker import Event, Job, Worker

DONE = None  # what a worker sends after the last event of a group


def processes(devices: Sequence[str | None]) -> Place:
    """A worker for each of `devices`; None is the default device."""

    def place(job: Job, groups: Sequence[Group]) -> Iterator[Event]:
        waiting, deaths = deque(range(len(groups))), [0] * len(groups)
        made: set[str] = set()  # what a dead worker had already told is not told again
        hands = dict(_hire(job, device) for device in devices[: len(groups)])
        busy: dict[Connection, int] = {}  # with which group
        try:
            while waiting or busy:
                for pipe in hands:
                    if pipe not in busy and waiting:
                        busy[pipe] = waiting.popleft()
                        with suppress(ConnectionError):  # it died while idle: reading its pipe will say so
                            pipe.send(groups[busy[pipe]])
                ready = wait(list(busy))
                for pipe in [pipe for pipe in busy if pipe in ready]:
                    try:
                        event: Event | None = pipe.recv()
                    except (EOFError, ConnectionError):
                        at, (process, device) = busy.pop(pipe), hands.pop(pipe)
                        process.join()
                        deaths[at] += 1
                        if deaths[at] < ATTEMPTS:
                            waiting.append(at)
                        else:
                            why = f"its worker died {ATTEMPTS} times (exit code {process.exitcode})"
                            yield from (Event(unit, why) for unit in groups[at] if unit.key not in made)
                        hands |= [_hire(job, device)]
                        continue
                    if event is DONE:
                        del busy[pipe]
                    else:
                        made.add(event.unit.key)
                        yield event
        finally:
            for process, _ in hands.values():
                process.terminate()
                process.join()

    return place


def _hire(job: Job, device: str | None) -> tuple[Connection, tuple[BaseProcess, str | None]]:
    """A process by the pipe that leads to it, and its device."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, job, device), daemon=True)
    # NumPy's threads are set as it is loaded: left alone, each worker takes every core, and all of them stand still.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    process.start()
    there.close()  # only the worker holds its end, so that its death is heard
    return here, (process, device)


def _serve(pipe: Connection, job: Job, device: str | None) -> None:
    worker = Worker(job, device)
    with suppress(EOFError, KeyboardInterrupt, BrokenPipeError):  # whoever asked is gone
        while True:
            for event in worker.work(pipe.recv()):
                pipe.send(event)
            pipe.send(DONE)
