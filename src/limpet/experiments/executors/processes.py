"""An executor with workers in processes of this machine, each behind a pipe."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from limpet.experiments.executors import ATTEMPTS, Executor, Group
from limpet.experiments.worker import UnitEvent, Worker, WorkerConfig

END = None  # what a worker sends after the last event of a group


def processes(devices: Sequence[str | None]) -> Executor:
    """One worker for each of `devices`; None is the default device."""

    def execute(config: WorkerConfig, groups: Sequence[Group]) -> Iterator[UnitEvent]:
        waiting, deaths = deque(range(len(groups))), [0] * len(groups)
        reported: set[str] = set()  # units that a dead worker had finished
        workers = dict(_start_worker(config, device) for device in devices[: len(groups)])
        busy: dict[Connection, int] = {}  # which group each worker computes
        try:
            while waiting or busy:
                for pipe in workers:
                    if pipe not in busy and waiting:
                        busy[pipe] = waiting.popleft()
                        with suppress(ConnectionError):  # it died while idle: reading its pipe will show it
                            pipe.send(groups[busy[pipe]])
                ready = wait(list(busy))
                for pipe in [pipe for pipe in busy if pipe in ready]:
                    try:
                        event: UnitEvent | None = pipe.recv()
                    except (EOFError, ConnectionError):
                        number, (process, device) = busy.pop(pipe), workers.pop(pipe)
                        process.join()
                        deaths[number] += 1
                        if deaths[number] < ATTEMPTS:
                            waiting.append(number)
                        else:
                            reason = f"its worker died {ATTEMPTS} times (exit code {process.exitcode})"
                            lost = (unit for unit in groups[number] if unit.key not in reported)
                            yield from (UnitEvent(unit, reason) for unit in lost)
                        workers |= [_start_worker(config, device)]
                        continue
                    if event is END:
                        del busy[pipe]
                    elif not event.busy:
                        reported.add(event.unit.key)
                        yield event
                    elif busy[pipe] not in waiting:  # another runner is computing the group: try it again later
                        waiting.append(busy[pipe])
        finally:
            for process, _ in workers.values():
                process.terminate()
                process.join()

    return execute


def _start_worker(config: WorkerConfig, device: str | None) -> tuple[Connection, tuple[BaseProcess, str | None]]:
    """The pipe to a new worker process; the process and its device."""
    context = multiprocessing.get_context("spawn")
    own_end, worker_end = context.Pipe()
    process = context.Process(target=_serve, args=(worker_end, config, device), daemon=True)
    # NumPy's number of threads is set when it is loaded. Without a limit each worker takes every core.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    process.start()
    worker_end.close()  # only the worker holds its end, so that its death closes the pipe
    return own_end, (process, device)


def _serve(pipe: Connection, config: WorkerConfig, device: str | None) -> None:
    worker = Worker(config, device)
    with suppress(EOFError, KeyboardInterrupt, BrokenPipeError):  # the run is over
        while True:
            for event in worker.work(pipe.recv()):
                pipe.send(event)
            pipe.send(END)
