"""`limpet serve`: the playground in a browser, and an OpenAI-compatible API."""

import gc
import logging
import os
import signal
from functools import partial
from typing import Annotated, Literal

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
    api: bool = False,
    api_key: str | None = None,
    playground: bool = False,
    access_log: bool = False,
    log_level: Literal["debug", "info", "warning", "error"] = "error",
    loading: Loading = DEFAULT_LOADING,
    limits: Annotated[Limits, tyro.conf.arg(name="limit")] = LIMITS,
) -> None:
    """Serve the playground, where every network call can be watched, or an OpenAI-compatible API. Ctrl-C stops it.

    What requests may take is set by --limit.NAME NUMBER: length 1024 tokens and calls 256 of a sample; samples 16,
    samplers 4, fixed 64 texts and body 65536 bytes of a request; queue 16 requests that wait, client 8 of one client,
    workers 1, seconds 120 that a request may run. For the API: api 256 requests in all, batch 64 samples, wait 0.005
    seconds for others to share a batch, grace 30 seconds when the server stops.

    $ limpet serve
    $ limpet serve --sharpness .5
    $ limpet serve --sampler native --sampler "crs budget=.25"
    $ limpet serve --port 9000 --models mini s-sahoo/duo-distilled
    $ limpet serve --host 0.0.0.0 --limit.seconds 30 --limit.queue 4
    $ limpet serve --names play.example.org --proxy 127.0.0.1
    $ limpet serve --api --models mini --limit.batch 32

    Args:
        models: the models that can be chosen, the default one first; default: all that are built in
        host: the address to listen on; 127.0.0.1 can be reached from this machine alone
        port: the port to listen on; 0 takes any free one
        names: further host names that the server answers to, such as a proxy's
        proxy: the address of a trusted proxy, or a network such as 10.0.0.0/8; its X-Forwarded-For names the client
        judge: what scores the playground's texts, by name, or none; auto is mini-judge for models with its tokens
        api: serve the OpenAI-compatible API under /v1, and /metrics
        api_key: what requests to the API must bear (default: the environment's LIMPET_API_KEY, or none)
        playground: serve the page beside the API, too; it has no key
        access_log: print a line for every request
        log_level: the least important messages printed
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
    page = playground or not api
    worker = workers.in_processes(partial(load_resources, known, judge if page else "none", loading))
    api_key = api_key or os.environ.get("LIMPET_API_KEY") or None
    offered = available_with(first)
    app = application(worker, limits, host, names, first, offered, proxy, page=page, api=api, api_key=api_key)
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    shown = f"[{host}]" if ":" in host else host
    err.print(f"limpet serves {', '.join(known)} on http://{shown}:{listener.getsockname()[1]}/", markup=False)
    # uvicorn stops at either signal, and then raises it again for the handler that was there before.
    before = {one: signal.signal(one, lambda *_: None) for one in (signal.SIGINT, signal.SIGTERM)}
    gc.freeze()  # what is loaded now stays: the garbage collector need not look through it
    Server(app, log_level="info" if access_log else log_level, access_log=access_log).run([listener])
    for one, handler in before.items():
        signal.signal(one, handler)


def load_resources(models: tuple[str, ...], judge: str, loading: LoadOptions) -> Resources:
    """The models and the judge of a worker. A short sample comes first, since a network's first call is its slowest."""
    loaded = {name: loading.load(name) for name in models}
    needs_judge = any(not isinstance(model, Source) for model in loaded.values())
    scorer = RunOptions(loading.device).judge(judge) if needs_judge else None
    sample(loaded[models[0]], "native nfe=2", n=1)
    return Resources(loaded, scorer, any_text=judge != "auto")


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
