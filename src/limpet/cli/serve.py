"""`limpet serve`: the playground in a browser, and its JSON API."""

from __future__ import annotations

import gc
import signal
from functools import partial
from typing import Annotated

import tyro

from limpet import samplers
from limpet.cli.common import (
    DEFAULT_LOADING,
    DEFAULT_MODEL,
    Loading,
    LoadOptions,
    RunOptions,
    SamplerTexts,
    Sharpness,
    err,
)
from limpet.errors import LimpetError, import_extra
from limpet.generation import sample
from limpet.models.exact import Source
from limpet.models.exact_sources import SOURCES
from limpet.models.model_files import builtin_names
from limpet.samplers import Sampler, named_samplers
from limpet.samplers.recommended import check_not_both
from limpet.server.handlers import Resources
from limpet.server.scheduler import Limits

LIMITS = Limits()


def run(
    models: tuple[str, ...] = (),
    sampler: SamplerTexts = (),
    sharpness: Sharpness = None,
    host: str = "127.0.0.1",
    port: int = 8787,
    names: tuple[str, ...] = (),
    proxy: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    judge: str = "auto",
    loading: Loading = DEFAULT_LOADING,
    limits: Annotated[Limits, tyro.conf.arg(name="limit")] = LIMITS,
) -> None:
    """Serve the playground: choose a model and samplers, and watch every network call. Ctrl-C stops it.

    $ limpet serve
    $ limpet serve --sharpness .5
    $ limpet serve --sampler native --sampler "crs budget=.25"
    $ limpet serve --port 9000 --models mini s-sahoo/duo-distilled
    $ limpet serve --host 0.0.0.0 --limit.seconds 30 --limit.queue 4
    $ limpet serve --names play.example.org --proxy 127.0.0.1

    Args:
        models: the models that can be chosen, the default one first; default: all that are built in
        host: the address to listen on; 127.0.0.1 can be reached from this machine alone
        port: the port to listen on; 0 takes any free one
        names: further host names that the server answers to, such as a proxy's; it refuses all others
        proxy: the address of a trusted proxy, or a network such as 10.0.0.0/8; its X-Forwarded-For names the client
        judge: what scores the texts: mini-judge, a folder, a causal language model on the hub, or none; auto is
            mini-judge where it is installed
        limits: what requests may take
    """
    for module in ("pydantic", "starlette", "uvicorn"):
        import_extra(module, "serve")
    from limpet.server import workers
    from limpet.server.connections import Server
    from limpet.server.http import CALLS, application, first_samplers, listen

    check_not_both(sampler, sharpness)
    calls = min(CALLS, limits.calls)
    first = named_samplers(sampler, calls) if sampler else first_samplers(calls, sharpness)
    listener = listen(host, port)
    known = models or tuple(dict.fromkeys([DEFAULT_MODEL, *builtin_names(), *SOURCES]))
    worker = workers.in_processes(partial(load_resources, known, judge, loading))
    app = application(worker, limits, host, names, first, available_with(first), proxy)
    shown = f"[{host}]" if ":" in host else host
    err.print(f"limpet serves {', '.join(known)} on http://{shown}:{listener.getsockname()[1]}/", markup=False)
    # uvicorn stops at either signal, and then raises it again for the handler that was there before.
    before = {one: signal.signal(one, lambda *_: None) for one in (signal.SIGINT, signal.SIGTERM)}
    gc.freeze()  # what is loaded now stays: the garbage collector need not look through it
    Server(app).run([listener])
    for one, handler in before.items():
        signal.signal(one, handler)


def load_resources(models: tuple[str, ...], judge: str, loading: LoadOptions) -> Resources:
    """The models and the judge of a worker. A short sample comes first, since a network's first call is its slowest."""
    loaded = {name: loading.load(name) for name in models}
    needs_judge = any(not isinstance(model, Source) for model in loaded.values())
    scorer = RunOptions(loading.device).judge(judge) if needs_judge else None
    sample(loaded[models[0]], "native nfe=2", n=1)
    return Resources(loaded, scorer)


def available_with(first: dict[str, Sampler]) -> dict[str, type[Sampler]]:
    """The samplers that requests may name: all that have a name, and those of the page's start by their class names."""
    available = samplers.available()
    for sampler in first.values():
        kind = type(sampler)
        if kind not in available.values():
            if kind.__name__ in available:
                raise LimpetError(f"two samplers are called {kind.__name__}: give one of the classes another name")
            available[kind.__name__] = kind
    return available
