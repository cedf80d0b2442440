"""The playground's server: routes, what a request may weigh, and how answers travel; the work is in api.py."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import limpet
from limpet import samplers
from limpet.denoisers import Denoiser
from limpet.errors import LimpetError
from limpet.judges import Judge
from limpet.samplers import CRS, Native, Sampler
from limpet.view import api, page
from limpet.view.queue import BROKEN, Job, Left, Limits, Queue, Refusal

PATIENCE = 10.0  # seconds for a request's body to arrive, and between signs of life on a stream
CALLS = 16  # of the arms that the page starts with
SETTINGS: dict[str, Any] = {  # uvicorn's
    "log_level": "warning", "timeout_graceful_shutdown": 3, "timeout_keep_alive": 10, "limit_concurrency": 256,
    "server_header": False,
}  # fmt: skip
LOOPBACK = ("127.0.0.1", "localhost", "::1")
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
}


def application(
    models: Mapping[str, Denoiser],
    judge: Judge | None = None,
    limits: Limits | None = None,
    host: str = LOOPBACK[0],
    arms: Mapping[str, Sampler] | None = None,
    offered: Mapping[str, type[Sampler]] | None = None,
) -> Starlette:
    """The server as an ASGI application. The first model is the default one; `arms` are those that the page starts
    with, and `offered` the samplers that a request may name: all that have a name here unless told."""
    limits = limits or Limits()
    calls = min(CALLS, limits.calls)
    arms = arms or {"native": Native(nfe=calls), "CRS": CRS(nfe=calls)}
    offer = api.Offer(models, judge, offered or samplers.available(), arms, limits)
    shapes, queue, about = api.shapes(offer), Queue(limits), api.about(offer, limpet.__version__)

    async def take(kind: str, request: Request) -> Response:
        asked = api.read(await _body(request, limits.body), shapes[kind], offer)
        wanted = request.headers.get("accept", "")
        events, file = api.EVENTS in wanted, kind == "sample" and api.FILE in wanted
        work = api.paths if events or file else api.rows
        job = queue.submit(lambda tell: work(offer, asked, tell))
        if events:
            first = await job.events.get()
            if first is None:  # it cannot begin, and is refused with a status
                raise job.future.exception() or Left
            return Events(job, event(*first))
        made: Any = await _finished(request, job)
        if file:
            name = f'attachment; filename="limpet-{asked.seed}.limpet"'
            return Response(made[0].to_bytes(), 200, {**HEADERS, "Content-Disposition": name}, api.FILE)
        if kind == "sample":
            return answer({"samples": next(iter(made.values()))})
        return answer({"arms": {name: rows[0] for name, rows in made.items()}})

    async def ready(request: Request) -> Response:
        return answer({"status": "full"}, 503) if queue.full else answer({"status": "ready"})

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        queue.close()

    # A page elsewhere must not reach a local server by giving it a name of its own.
    hosts = [*LOOPBACK, "[::1]", "testserver"] if host in LOOPBACK else ["*"]
    unchanging = {
        "/": HTMLResponse(page.playground(about), headers=HEADERS),
        "/health": answer({"status": "ok"}),
        "/api/models": answer({"models": about["models"]}),
        "/api/openapi.json": answer(api.description(shapes, limpet.__version__)),
    }
    app = Starlette(
        routes=[
            *(Route(path, made, methods=["GET"]) for path, made in unchanging.items()),
            Route("/ready", ready),
            *(Route(f"/api/{kind}", partial(take, kind), methods=["POST"]) for kind in shapes),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)],
        exception_handlers=dict.fromkeys((LimpetError, HTTPException, Left, Exception), _failed),
        lifespan=lifespan,
    )
    app.state.queue = queue
    return app


def listen(host: str, port: int) -> socket.socket:
    """A socket at the address, or a sentence that says why there is none."""
    try:
        family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server((host, port), family=family, backlog=512)
    except (OSError, OverflowError) as error:
        raise LimpetError(f"{host} port {port} cannot be used ({error}): choose another with --host, --port") from error


# What comes in


async def _body(request: Request, most: int) -> bytes:
    """The body, if it is JSON by its name, small, and soon here."""
    # A page of another site can send JSON only with this server's leave, which it never gets.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refusal(415, "the request must have the content type application/json")
    body = bytearray()
    try:
        async with asyncio.timeout(PATIENCE):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise Refusal(413, f"the request is larger than {most} bytes: shorten it")
    except TimeoutError as error:
        raise Refusal(408, f"the request did not arrive within {PATIENCE:g} s") from error
    return bytes(body)


async def _left(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# What goes out


def answer(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse(value, status, {**HEADERS, **(headers or {})})


async def _failed(request: Request, error: Exception) -> Response:
    """A sentence with its status."""
    match error:
        case Left():
            return Response(status_code=499)  # nobody reads it
        case Refusal():
            return answer({"error": str(error)}, error.status, error.headers)
        case LimpetError():
            return answer({"error": str(error)}, 422)
        case HTTPException():
            sentence = f"{error.detail}: {request.method} is not served here"
            return answer({"error": sentence}, error.status_code, error.headers)
    return answer({"error": BROKEN}, 500)  # uvicorn logs the error itself


async def _finished(request: Request, job: Job) -> Any:
    """The job's result; if the client leaves first, the job stops."""
    done, leaving = asyncio.wrap_future(job.future), asyncio.ensure_future(_left(request.receive))
    try:
        await asyncio.wait({done, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise Left
        return done.result()
    finally:
        job.leave()
        leaving.cancel()
        done.cancel()


class Events(StreamingResponse):
    """Server-sent events of one job; whichever way the answer ends, the job ends with it."""

    def __init__(self, job: Job, first: str) -> None:
        self.job = job
        super().__init__(_events(job, first), 200, {**HEADERS, "X-Accel-Buffering": "no"}, api.EVENTS)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.job.leave()


async def _events(job: Job, first: str) -> AsyncIterator[str]:
    yield first
    while True:
        try:
            async with asyncio.timeout(PATIENCE):
                told = await job.events.get()
        except TimeoutError:
            yield ": still here\n\n"
            continue
        if told is None:
            break
        yield event(*told)
    error = None if job.future.cancelled() else job.future.exception()
    if isinstance(error, LimpetError):
        yield event("error", {"error": str(error)})


def event(kind: str, data: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps(data, ensure_ascii=True, allow_nan=False)}\n\n"
