"""Workers as actors of a Ray cluster: models stay resident, and a group whose actor died is handed out again.

The store must be a path that every node reaches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from limpet.errors import LimpetError, extra
from limpet.experiments.executors import ATTEMPTS, Group, Place
from limpet.experiments.worker import Event, Job, Worker


class Actor(Worker):
    """A worker behind Ray; it tells a group's events together."""

    def worked(self, group: Group) -> list[Event]:
        return list(self.work(group))


def on_ray(address: str | None = None, workers: int | None = None, device: str | None = None) -> Place:
    """`address` of a running cluster ("auto", "ray://..."); None starts one here. A worker takes one GPU, or one CPU
    where the cluster has none; `workers` is as many as fit unless told."""

    def place(job: Job, groups: Sequence[Group]) -> Iterator[Event]:
        ray = extra("ray", "ray")
        ours = not ray.is_initialized()
        if ours:
            try:
                ray.init(address=address, num_cpus=None if address else workers, log_to_driver=False, logging_level=40)
            except (ConnectionError, ValueError, RuntimeError) as error:
                what = f"no Ray cluster answers at {address}" if address else "Ray could not be started on this machine"
                raise LimpetError(f"{what} ({error}): check --address, or run --on processes") from error
        try:
            yield from _hand_out(ray, job, groups, workers, device)
        finally:
            if ours:
                ray.shutdown()

    return place


def _hand_out(ray: Any, job: Job, groups: Sequence[Group], workers: int | None, device: str | None) -> Iterator[Event]:
    total = ray.cluster_resources()
    gpus = int(total.get("GPU", 0)) if device in (None, "cuda") else 0
    count = min(workers or gpus or int(total.get("CPU", 1)), len(groups))
    kind = ray.remote(num_gpus=1 if gpus else 0, num_cpus=0 if gpus else 1, max_restarts=-1)(Actor)
    idle = deque(kind.remote(job, device) for _ in range(count))
    waiting, deaths = deque(range(len(groups))), [0] * len(groups)
    flying: dict[Any, tuple[Any, int]] = {}
    reviving: dict[
        Any, Any
    ] = {}  # actors that died, until Ray has started them again: where a node is gone, perhaps never
    while waiting or flying:
        while waiting and idle:
            actor, at = idle.popleft(), waiting.popleft()
            flying[actor.worked.remote(list(groups[at]))] = actor, at
        if not (flying or reviving):
            yield from (Event(unit, "no worker is left") for at in waiting for unit in groups[at])
            return
        finished, _ = ray.wait([*flying, *reviving], num_returns=1)
        for future in finished:
            revived = reviving.pop(future, None)
            actor, at = (revived, -1) if revived is not None else flying.pop(future)
            try:
                told = ray.get(future)
            except ray.exceptions.RayActorError as error:
                if revived is None or isinstance(error, ray.exceptions.ActorUnavailableError):
                    reviving[actor.__ray_ready__.remote()] = actor
                if revived is not None:
                    continue
                deaths[at] += 1
                if deaths[at] < ATTEMPTS:
                    waiting.append(at)
                else:
                    why = f"its worker died {ATTEMPTS} times ({type(error).__name__})"
                    yield from (Event(unit, why) for unit in groups[at])
            else:
                idle.append(actor)
                if revived is None:
                    yield from told
