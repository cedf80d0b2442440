"""`limpet serve`: the playground in a browser, and its JSON API."""

from __future__ import annotations

import gc
import signal
from functools import partial
from typing import Annotated

import tyro

from limpet import samplers
from limpet.cli.common import DEFAULT_MODEL, HERE, Arms, Runs, Somewhere, Where, arms, err
from limpet.errors import LimpetError, extra
from limpet.generation import sample
from limpet.models.exact import Source
from limpet.models.exact_sources import SOURCES
from limpet.models.model_files import builtin_names
from limpet.samplers import Sampler
from limpet.server.handlers import Stock
from limpet.server.scheduler import Limits

LIMITS = Limits()


def run(
    models: tuple[str, ...] = (),
    arm: Arms = (),
    host: str = "127.0.0.1",
    port: int = 8787,
    names: tuple[str, ...] = (),
    judge: str = "auto",
    where: Somewhere = HERE,
    limits: Annotated[Limits, tyro.conf.arg(name="limit")] = LIMITS,
) -> None:
    """Serve the playground: choose a model and samplers, and watch the calls. The page starts with the arms. It stops
    with Ctrl-C.

    $ limpet serve
    $ limpet serve --arm native --arm "crs budget=.25" --arm ./mine.py:Mine
    $ limpet serve --port 9000 --models mini s-sahoo/duo-distilled
    $ limpet serve --host 0.0.0.0 --limit.seconds 30 --limit.queue 4

    Args:
        models: what can be chosen, the first by default; all that is built in unless told
        host: who can reach it; 127.0.0.1 is this machine alone
        port: where it listens; 0 takes any that is free
        names: other names that it is asked for by, such as a proxy's; all else but the host's own is refused
        judge: what scores the texts: mini-judge, a folder, a causal language model on the hub, or none; auto is
            mini-judge where it is
        limits: what requests may take
    """
    for module in ("pydantic", "starlette", "uvicorn"):
        extra(module, "serve")
    from limpet.server import workers
    from limpet.server.connections import Server
    from limpet.server.http import CALLS, application, listen

    first = arms(arm, min(CALLS, limits.calls))
    offered = on_offer(first)
    listener = listen(host, port)
    known = models or tuple(dict.fromkeys([DEFAULT_MODEL, *builtin_names(), *SOURCES]))
    app = application(workers.process(partial(stock, known, judge, where)), limits, host, names, first, offered)
    shown = f"[{host}]" if ":" in host else host
    err.print(f"limpet serves {', '.join(known)} on http://{shown}:{listener.getsockname()[1]}/", markup=False)
    # uvicorn stops at either, and then raises it again, for whoever handled it before.
    before = {one: signal.signal(one, lambda *_: None) for one in (signal.SIGINT, signal.SIGTERM)}
    gc.freeze()  # what is loaded stays: it need not be looked through again, neither at work nor at the end
    Server(app).run([listener])
    for one, handler in before.items():
        signal.signal(one, handler)


def stock(models: tuple[str, ...], judge: str, where: Where) -> Stock:
    """What a worker holds, ready to work: the first call of a network is its slowest."""
    loaded = {name: where.load(name) for name in models}
    judged = any(not isinstance(model, Source) for model in loaded.values())
    scorer = Runs(where.device).judge(judge) if judged else None
    sample(loaded[models[0]], samplers.parse("native nfe=2")[1], n=1)
    return Stock(loaded, scorer)


def on_offer(first: dict[str, Sampler]) -> dict[str, type[Sampler]]:
    """The samplers that requests may name: all that have a name, and those of the first arms under their own."""
    offered = samplers.available()
    for sampler in first.values():
        kind = type(sampler)
        if kind not in offered.values():
            if kind.__name__ in offered:
                raise LimpetError(f"two samplers are called {kind.__name__} here: give one of them another name")
            offered[kind.__name__] = kind
    return offered
