"""The OpenAI-compatible server as a Ray Serve application, with one replica for each GPU or pair of cores."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from limpet.errors import LimpetError, import_extra
from limpet.generation import sample
from limpet.models.loading import load

if TYPE_CHECKING:
    from limpet.server.handlers import Resources
    from limpet.server.scheduler import Limits

CORES = 2  # of a replica without a GPU
ANY_ADDRESS = "0.0.0.0"  # Ray's proxy decides where it listens
NAMES = ("models", "replicas", "names", "device")  # what `serve run limpet.integrations.ray_serve:app` takes


def deployment(
    models: Sequence[str] = ("mini",),
    replicas: int | None = None,
    *,
    names: Sequence[str] = (),
    device: str | None = None,
    limits: Limits | None = None,
    api_key: str | None = None,
    options: dict[str, Any] | None = None,
) -> Any:
    """The application that `ray.serve.run` takes.

    models: names of models, the default one first. replicas: how many (default: one for each GPU of the cluster, or for
    each pair of its cores). names: host names that the server answers to, besides IP addresses and each node's own
    name. device: where networks run (default: a GPU if there is one). limits: of each replica. api_key: what requests
    must bear (default: LIMPET_API_KEY here). options: of `ray.serve.deployment`, such as `autoscaling_config`."""
    ray, serve = import_extra("ray", "ray-serve"), import_extra("ray.serve", "ray-serve")
    from limpet.server.http import application
    from limpet.server.scheduler import Limits
    from limpet.server.workers import in_processes

    if not ray.is_initialized():
        ray.init()
    total, limits = ray.cluster_resources(), limits or Limits()
    gpus = int(total.get("GPU", 0)) if device in (None, "cuda") else 0
    needs = {"num_gpus": 1} if gpus else {"num_cpus": CORES}
    count = replicas or gpus or max(1, int(total.get("CPU", 1)) // CORES)
    key = api_key or os.environ.get("LIMPET_API_KEY") or None
    worker = in_processes(partial(load_resources, tuple(models), device))
    arguments = {"limits": limits, "host": ANY_ADDRESS, "names": tuple(names), "page": False, "api": True}

    def build() -> Any:  # in every replica
        return application(worker, **arguments, api_key=key)  # type: ignore[arg-type]

    settings = {
        "name": "limpet", "num_replicas": count, "ray_actor_options": needs, "max_ongoing_requests": limits.api,
        "graceful_shutdown_timeout_s": limits.grace, **(options or {}),
    }  # fmt: skip
    if "autoscaling_config" in settings:
        del settings["num_replicas"]
    return serve.deployment(**settings)(serve.ingress(build)()).bind()


def load_resources(models: tuple[str, ...], device: str | None) -> Resources:
    """The models of a worker. A short sample comes first, since a network's first call is its slowest."""
    loaded = {name: load(name, device=device) for name in models}
    sample(loaded[models[0]], "native nfe=2", n=1)
    from limpet.server.handlers import Resources

    return Resources(loaded)


def app(args: dict[str, str]) -> Any:
    """What `serve run limpet.integrations.ray_serve:app models=mini,sudoku replicas=2` runs."""
    if unknown := args.keys() - {*NAMES}:
        raise LimpetError(f"there is no option {sorted(unknown)[0]!r}: give {', '.join(NAMES)}, as in models=mini")
    several = {name: args[name].split(",") for name in ("models", "names") if name in args}
    replicas = int(args["replicas"]) if "replicas" in args else None
    return deployment(**several, replicas=replicas, device=args.get("device"))  # type: ignore[arg-type]
