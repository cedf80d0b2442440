"""The HTTP application: its routes, the reading of requests, and the writing of answers; workers do the work."""

from __future__ import annotations

import asyncio
import json
import socket
import time
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
from starlette.types import ASGIApp, Receive, Scope, Send

from limpet import samplers as registered
from limpet.errors import LimpetError
from limpet.samplers import CRS, Native, Sampler, recommended
from limpet.samplers.recommended import SHARPNESS
from limpet.server import openai, schema
from limpet.server.connections import LOOPBACK, RequestFilter, parse_proxies
from limpet.server.metrics import Counted
from limpet.server.playground import playground
from limpet.server.scheduler import BROKEN, ClientLeft, Limits, Queue, Refusal, RequestJob
from limpet.server.workers import WorkerFactory

BODY_SECONDS = 10.0  # for the body of a request to arrive
ALIVE_SECONDS = 10.0  # after which a comment shows that a stream without events is alive
CALLS = 16  # of the samplers that the page starts with
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}


def first_samplers(calls: int, sharpness: float | None = None) -> dict[str, Sampler]:
    """The samplers that the page starts with by default: native, CRS, and the recommended one at a sharpness."""
    name = f"sharpness={SHARPNESS if sharpness is None else sharpness:g}"
    return {"native": Native(nfe=calls), "CRS": CRS(nfe=calls), name: recommended(calls, sharpness)}


def application(
    worker: WorkerFactory,
    limits: Limits | None = None,
    host: str = LOOPBACK[0],
    names: tuple[str, ...] = (),
    samplers: Mapping[str, Sampler] | None = None,
    available: Mapping[str, type[Sampler]] | None = None,
    proxies: tuple[str, ...] = (),
    *,
    page: bool = True,
    api: bool = False,
    api_key: str | None = None,
) -> Starlette:
    """The server as an ASGI application.

    worker: makes a worker, whose first model is the default one. host: the address that the server listens on.
    names: other names that it answers to. samplers: those that the page starts with (default: `first_samplers`).
    available: the samplers that a request may name (default: all that have a name here). proxies: addresses of
    trusted proxies. page: whether the playground is served. api: whether the OpenAI-compatible API is served.
    api_key: what its requests must bear."""
    limits = limits or Limits()
    calls = min(CALLS, limits.calls)
    samplers = samplers or first_samplers(calls)
    workers = [worker() for _ in range(limits.workers)]
    offer = schema.Offer(workers[0].models, available or registered.available(), samplers, limits)
    kinds, queue, page_data = schema.request_models(offer), Queue(limits, workers), schema.page_data(offer)

    async def answer_request(kind: str, http_request: Request) -> Response:
        request = schema.read(await _body(http_request, limits.body), kinds[kind], offer)
        accepted = http_request.headers.get("accept", "")
        events, file = schema.EVENTS in accepted, kind == "sample" and schema.FILE in accepted
        client = http_request.client.host if http_request.client else ""
        job = queue.submit("events" if events else "file" if file else "samples", request, client)
        if events:
            first = await job.events.get()
            if first is None:  # it cannot begin: answer with a status instead of a stream
                raise job.future.exception() or ClientLeft
            return EventStream(job, _events(job, _event(*first)))
        result: Any = await _result(http_request, job)
        if file:
            disposition = f'attachment; filename="limpet-{request.seed}.limpet"'
            return Response(result, 200, {**HEADERS, "Content-Disposition": disposition}, schema.FILE)
        if kind == "sample":
            return _answer({"samples": next(iter(result.values()))})
        return _answer({"samplers": {name: samples[0] for name, samples in result.items()}})

    async def complete(kind: str, http_request: Request) -> Response:
        openai.check_key(api_key, http_request.headers.get("authorization", ""))
        fields, request = openai.read(await _body(http_request, limits.body), kind, offer)
        job = queue.submit("completions", request, http_request.client.host if http_request.client else "")
        answers = openai.Answers(fields, request, offer.models[request.model]["digest"], queue.metrics)
        if not fields.get("stream"):
            return _answer(answers.whole(await _result(http_request, job)))
        first = await _unless_left(http_request, job, asyncio.ensure_future(job.events.get()))
        if first is None and (error := job.future.exception()) is not None:
            raise error  # it cannot begin: answer with a status instead of a stream
        return EventStream(job, answers.chunks(job, first))

    async def list_models(http_request: Request) -> Response:
        openai.check_key(api_key, http_request.headers.get("authorization", ""))
        listed = openai.models(offer.models, started)
        if (name := http_request.path_params.get("model")) is None:
            return _answer(listed)
        if name not in offer.models:
            raise openai.unknown_model(name, offer)
        return _answer(next(one for one in listed["data"] if one["id"] == name))

    async def show_metrics(http_request: Request) -> Response:
        openai.check_key(api_key, http_request.headers.get("authorization", ""))
        gauges = {"limpet_requests_waiting": len(queue.jobs), "limpet_ready": queue.status == "ready"}
        return Response(queue.metrics.text(gauges), 200, HEADERS, "text/plain; version=0.0.4; charset=utf-8")

    async def ready(http_request: Request) -> Response:
        return _answer({"status": queue.status}, 200 if queue.status == "ready" else 503)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        queue.close()

    started = int(time.time())
    routes = [Route("/health", _answer({"status": "ok"}), methods=["GET"]), Route("/ready", ready)]
    if page:
        home, policy = playground(page_data)
        headers = {**HEADERS, "Content-Security-Policy": f"{policy}; frame-ancestors 'none'"}
        fixed_answers = {
            "/": HTMLResponse(home, headers=headers),
            "/api/models": _answer({"models": page_data["models"]}),
            "/api/openapi.json": _answer(schema.openapi(kinds)),
        }
        routes += [Route(path, response, methods=["GET"]) for path, response in fixed_answers.items()]
        routes += [Route(f"/api/{kind}", partial(answer_request, kind), methods=["POST"]) for kind in kinds]
    if api:
        routes += [Route(path, list_models) for path in ("/v1/models", "/v1/models/{model:path}")]
        routes += [Route("/metrics", show_metrics)]
        routes += [Route("/v1/completions", partial(complete, "completion"), methods=["POST"])]
        routes += [Route("/v1/chat/completions", partial(complete, "chat"), methods=["POST"])]
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(Counted, metrics=queue.metrics, paths={route.path for route in routes}),
            Middleware(RequestFilter, host=host, names=names, error=_bad_request),
        ],
        exception_handlers=dict.fromkeys((LimpetError, HTTPException, ClientLeft, Exception), _error_answer),
        lifespan=lifespan,
    )
    app.state.queue, app.state.proxies = queue, parse_proxies(proxies)
    return app


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at the address; a LimpetError says why it cannot."""
    try:
        family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server((host, port), family=family, backlog=512)
    except (OSError, OverflowError) as error:
        raise LimpetError(f"{host} port {port} cannot be used ({error}): choose another with --host, --port") from error


# Requests


async def _body(request: Request, limit: int) -> bytes:
    """The body of a request, if it declares JSON, is small and arrives in time."""
    kinds = [value.partition(";")[0].strip().lower() for value in request.headers.getlist("content-type")]
    if kinds != ["application/json"]:  # a page of another site cannot send this type without this server's consent
        raise Refusal(415, "the request must have one content type, application/json")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise Refusal(413, f"the request is larger than {limit} bytes: shorten it")
    except ClientDisconnect as error:
        raise ClientLeft from error
    except TimeoutError as error:
        raise Refusal(408, f"the request did not arrive within {BODY_SECONDS:g} s") from error
    return bytes(body)


async def _wait_until_left(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# Answers


def _answer(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse(value, status, {**HEADERS, **(headers or {})})


def _error(path: str, error: LimpetError, status: int, headers: Mapping[str, str] | None = None) -> Response:
    """An error in the form of the API that was asked."""
    if path.startswith("/v1/") or path == "/metrics":
        status = 400 if status == 422 else status
        return _answer(openai.error_body(error, status), status, headers)
    return _answer({"error": str(error)}, status, headers)


def _bad_request(sentence: str) -> ASGIApp:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await _error(scope["path"], LimpetError(sentence), 400, {"Connection": "close"})(scope, receive, send)

    return answer


async def _error_answer(request: Request, error: Exception) -> Response:
    path = request.url.path
    match error:
        case ClientLeft():
            return Response(status_code=499)  # nobody reads it
        case Refusal():
            return _error(path, error, error.status, error.headers)
        case LimpetError():
            return _error(path, error, 422)
        case HTTPException():
            sentence = f"{error.detail}: {request.method} is not served here"
            return _error(path, LimpetError(sentence), error.status_code, error.headers)
    return _error(path, LimpetError(BROKEN), 500)  # uvicorn logs the error itself


async def _result(request: Request, job: RequestJob) -> Any:
    """The job's result; if the client leaves first, the job stops."""
    return await _unless_left(request, job, asyncio.wrap_future(job.future))


async def _unless_left(request: Request, job: RequestJob, awaited: asyncio.Future[Any]) -> Any:
    left = asyncio.ensure_future(_wait_until_left(request.receive))
    try:
        await asyncio.wait({awaited, left}, return_when=asyncio.FIRST_COMPLETED)
        if not awaited.done():
            raise ClientLeft
        return awaited.result()
    finally:
        if not awaited.done():
            job.stop()
        left.cancel()
        awaited.cancel()


class EventStream(StreamingResponse):
    """Server-sent events of one job, which ends with the answer."""

    def __init__(self, job: RequestJob, events: AsyncIterator[str]) -> None:
        self.job = job
        super().__init__(events, 200, {**HEADERS, "X-Accel-Buffering": "no"}, schema.EVENTS)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.job.stop()


async def _events(job: RequestJob, first: str) -> AsyncIterator[str]:
    yield first
    while True:
        try:
            async with asyncio.timeout(ALIVE_SECONDS):
                event = await job.events.get()
        except TimeoutError:
            yield ": still working\n\n"
            continue
        if event is None:
            break
        yield _event(*event)
    error = None if job.future.cancelled() else job.future.exception()
    if isinstance(error, LimpetError):
        yield _event("error", {"error": str(error)})


def _event(kind: str, data: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps(data, ensure_ascii=True, allow_nan=False)}\n\n"
