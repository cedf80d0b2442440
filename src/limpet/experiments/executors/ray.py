"""An executor with workers as actors of a Ray cluster. The store must be a path that every node reaches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from limpet.errors import LimpetError, import_extra
from limpet.experiments.executors import ATTEMPTS, Executor, Group
from limpet.experiments.worker import UnitEvent, Worker, WorkerConfig


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
