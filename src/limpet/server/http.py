"""The playground's server: routes, what a request may weigh, and how answers travel. Hands do the work."""

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
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import limpet
from limpet import samplers
from limpet.errors import LimpetError
from limpet.samplers import CRS, Native, Sampler
from limpet.server import schema
from limpet.server.connections import LOOPBACK, Named
from limpet.server.playground import playground
from limpet.server.scheduler import BROKEN, Job, Left, Limits, Queue, Refusal
from limpet.server.workers import Hire

PATIENCE = 10.0  # seconds for a request's body to arrive, and between signs of life on a stream
CALLS = 16  # of the arms that the page starts with
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}


def application(
    hire: Hire,
    limits: Limits | None = None,
    host: str = LOOPBACK[0],
    names: tuple[str, ...] = (),
    arms: Mapping[str, Sampler] | None = None,
    offered: Mapping[str, type[Sampler]] | None = None,
) -> Starlette:
    """The server as an ASGI application. `hire` gives a worker, with the models that it holds, the first of them the
    default one; `names` are others than its host's that it is asked for by; `arms` are those that the page starts with,
    and `offered` the samplers that a request may name: all that have a name here unless told."""
    limits = limits or Limits()
    calls = min(CALLS, limits.calls)
    arms = arms or {"native": Native(nfe=calls), "CRS": CRS(nfe=calls)}
    hands = [hire() for _ in range(limits.workers)]
    offer = schema.Offer(hands[0].facts, offered or samplers.available(), arms, limits)
    shapes, queue, about = schema.shapes(offer), Queue(limits, hands), schema.about(offer, limpet.__version__)

    async def take(kind: str, request: Request) -> Response:
        asked = schema.read(await _body(request, limits.body), shapes[kind], offer)
        wanted = request.headers.get("accept", "")
        events, file = schema.EVENTS in wanted, kind == "sample" and schema.FILE in wanted
        client = request.client.host if request.client else ""
        job = queue.submit("events" if events else "file" if file else "rows", asked, client)
        if events:
            first = await job.events.get()
            if first is None:  # it cannot begin, and is refused with a status
                raise job.future.exception() or Left
            return Events(job, event(*first))
        made: Any = await _finished(request, job)
        if file:
            name = f'attachment; filename="limpet-{asked.seed}.limpet"'
            return Response(made, 200, {**HEADERS, "Content-Disposition": name}, schema.FILE)
        if kind == "sample":
            return answer({"samples": next(iter(made.values()))})
        return answer({"arms": {name: rows[0] for name, rows in made.items()}})

    async def ready(request: Request) -> Response:
        return answer({"status": queue.status}, 200 if queue.status == "ready" else 503)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        queue.close()

    home, policy = playground(about)
    unchanging = {
        "/": HTMLResponse(home, headers={**HEADERS, "Content-Security-Policy": f"{policy}; frame-ancestors 'none'"}),
        "/health": answer({"status": "ok"}),
        "/api/models": answer({"models": about["models"]}),
        "/api/openapi.json": answer(schema.description(shapes, limpet.__version__)),
    }
    refuse = answer(
        {"error": "this server goes by another name: ask for it by the address that it was started with"}, 400
    )
    app = Starlette(
        routes=[
            *(Route(path, made, methods=["GET"]) for path, made in unchanging.items()),
            Route("/ready", ready),
            *(Route(f"/api/{kind}", partial(take, kind), methods=["POST"]) for kind in shapes),
        ],
        middleware=[Middleware(Named, host=host, names=names, refuse=refuse)],
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
    except ClientDisconnect as error:
        raise Left from error
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
        super().__init__(_events(job, first), 200, {**HEADERS, "X-Accel-Buffering": "no"}, schema.EVENTS)

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
