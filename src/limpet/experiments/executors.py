"""Executors: where groups of units are computed. In this process, in processes of this machine, or on a Ray cluster.

An executor takes a worker's configuration and groups, and yields an event for every unit. Computing a unit twice does
no harm, so an executor hands a group out again when its worker dies, and gives it up after ATTEMPTS deaths. The store
of a Ray cluster must be a path that every node reaches."""

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from limpet.errors import LimpetError, import_extra
from limpet.experiments.model_cache import ModelCache
from limpet.experiments.units import Unit
from limpet.experiments.worker import UnitEvent, Worker, WorkerConfig

ATTEMPTS = 3
END = None  # what a worker sends after the last event of a group

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


# Processes of this machine


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


# A Ray cluster


class RayWorker(Worker):
    """A worker as a Ray actor: it returns a group's events together."""

    def work_all(self, group: Group) -> list[UnitEvent]:
        return list(self.work(group))


def on_ray(address: str | None = None, workers: int | None = None, device: str | None = None) -> Executor:
    """Workers on a Ray cluster, one for each GPU, or for each CPU core where the cluster has no GPU.

    address: of a running cluster ("auto", "ray://..."); default: start one here. workers: how many; default: as many
    as fit."""

    def execute(config: WorkerConfig, groups: Sequence[Group]) -> Iterator[UnitEvent]:
        ray = import_extra("ray", "ray")
        is_ours = not ray.is_initialized()
        if is_ours:
            try:
                ray.init(address=address, num_cpus=None if address else workers, log_to_driver=False, logging_level=40)
            except (ConnectionError, ValueError, RuntimeError) as error:
                what = f"no Ray cluster answers at {address}" if address else "Ray could not be started on this machine"
                raise LimpetError(f"{what} ({error}): check --address, or run --on processes") from error
        try:
            yield from _distribute(ray, config, groups, workers, device)
        finally:
            if is_ours:
                ray.shutdown()

    return execute


def _distribute(
    ray: Any, config: WorkerConfig, groups: Sequence[Group], workers: int | None, device: str | None
) -> Iterator[UnitEvent]:
    total = ray.cluster_resources()
    gpus = int(total.get("GPU", 0)) if device in (None, "cuda") else 0
    count = min(workers or gpus or int(total.get("CPU", 1)), len(groups))
    kind = ray.remote(num_gpus=1 if gpus else 0, num_cpus=0 if gpus else 1, max_restarts=-1)(RayWorker)
    idle = deque(kind.remote(config, device) for _ in range(count))
    waiting, deaths = deque(range(len(groups))), [0] * len(groups)
    running: dict[Any, tuple[Any, int]] = {}
    restarting: dict[Any, Any] = {}  # dead actors until Ray has started them again, which may be never
    while waiting or running:
        while waiting and idle:
            actor, number = idle.popleft(), waiting.popleft()
            running[actor.work_all.remote(list(groups[number]))] = actor, number
        if not (running or restarting):
            yield from (UnitEvent(unit, "no worker is left") for number in waiting for unit in groups[number])
            return
        finished, _ = ray.wait([*running, *restarting], num_returns=1)
        for future in finished:
            restarted = restarting.pop(future, None)
            actor, number = (restarted, -1) if restarted is not None else running.pop(future)
            try:
                events = ray.get(future)
            except ray.exceptions.RayActorError as error:
                if restarted is None or isinstance(error, ray.exceptions.ActorUnavailableError):
                    restarting[actor.__ray_ready__.remote()] = actor
                if restarted is not None:
                    continue
                deaths[number] += 1
                if deaths[number] < ATTEMPTS:
                    waiting.append(number)
                else:
                    reason = f"its worker died {ATTEMPTS} times ({type(error).__name__})"
                    yield from (UnitEvent(unit, reason) for unit in groups[number])
                continue
            idle.append(actor)
            if restarted is None and any(event.busy for event in events):  # another runner is computing the group
                waiting.append(number)
            elif restarted is None:
                yield from events
