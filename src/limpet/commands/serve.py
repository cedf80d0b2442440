"""`limpet serve`: the playground in a browser, and its JSON API."""

from __future__ import annotations

import socket
from typing import Annotated, Any

import tyro

from limpet.commands import DEFAULT_MODEL, Precision, err, precision_on
from limpet.denoisers.catalog import load
from limpet.denoisers.exact import Source
from limpet.denoisers.files import builtin_names
from limpet.denoisers.sources import SOURCES
from limpet.errors import LimpetError, extra
from limpet.judges import has_builtin, load_judge
from limpet.policy import Policy
from limpet.samples import sample
from limpet.view.jobs import Limits
from limpet.view.server import LOOPBACK, SETTINGS, application

LIMITS = Limits()


def run(
    models: tuple[str, ...] = (),
    host: str = LOOPBACK[0],
    port: int = 8787,
    judge: str = "auto",
    device: str | None = None,
    precision: Precision = "auto",
    limits: Annotated[Limits, tyro.conf.arg(name="limit")] = LIMITS,
) -> None:
    """Serve the playground: choose a model and samplers, and watch the steps. It stops with Ctrl-C.

    $ limpet serve
    $ limpet serve --port 9000 --models mini s-sahoo/duo-distilled
    $ limpet serve --host 0.0.0.0 --limit.seconds 30 --limit.queue 4

    Args:
        models: what can be chosen, the first by default; all that is built in unless told
        host: who can reach it; 127.0.0.1 is this machine alone
        port: where it listens; 0 takes any that is free
        judge: what scores the texts: mini-judge, a folder, a causal language model on the hub, or none; auto is
            mini-judge where it is
        device: cpu, cuda, ...; a GPU where there is one
        precision: what the networks run in; auto is bfloat16 where the device has it
        limits: what requests may take
    """
    uvicorn: Any = extra("uvicorn", "serve")
    names = models or tuple(dict.fromkeys([DEFAULT_MODEL, *builtin_names(), *SOURCES]))
    kind = precision_on(device, precision)
    loaded = {name: load(name, device=device, precision=kind) for name in names}
    wanted = judge if judge != "auto" else "mini-judge" if has_builtin() else "none"
    needs = any(not isinstance(model, Source) for model in loaded.values())
    scorer = load_judge(wanted, device) if needs and wanted != "none" else None
    sample(loaded[names[0]], Policy(nfe=2), n=1)  # the first call of a network is its slowest
    app = application(loaded, scorer, limits, host)
    listener = listen(host, port)
    shown = f"[{host}]" if ":" in host else host
    err.print(f"limpet serves {', '.join(names)} on http://{shown}:{listener.getsockname()[1]}/", markup=False)
    uvicorn.Server(uvicorn.Config(app, **SETTINGS)).run([listener])


def listen(host: str, port: int) -> socket.socket:
    """A socket at the address, or a sentence that says why there is none."""
    listener: socket.socket | None = None
    try:
        if not 0 <= port < 2**16:
            raise OverflowError("a port is a number from 0 to 65535")
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(512)
    except (OSError, OverflowError) as error:
        if listener is not None:
            listener.close()
        raise LimpetError(f"{host} port {port} cannot be used ({error}): choose another with --host, --port") from error
    return listener
