"""The playground's server: routes, what a request may weigh, and how answers travel; the work is in jobs.py."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import limpet
from limpet.denoisers import Denoiser
from limpet.errors import LimpetError, extra
from limpet.judges import Judge
from limpet.policy import Policy
from limpet.view import openapi, page
from limpet.view.desk import Desk, Job, Left, Refusal
from limpet.view.jobs import MOST_SEED, Bench, Limits, parse

if TYPE_CHECKING:
    from starlette.applications import Starlette

LOG = logging.getLogger(__name__)
BROKEN = "something went wrong on this side; the server's log says what"
PATIENCE = 10.0  # seconds for a request's body to arrive, and between signs of life on a stream
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
    models: Mapping[str, Denoiser], judge: Judge | None = None, limits: Limits | None = None, host: str = LOOPBACK[0]
) -> Starlette:
    """The server as an ASGI application; the first model is the default one."""
    extra("starlette", "serve")
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    limits = limits or Limits()
    bench = Bench(models, judge, limits)
    desk = Desk(limits.workers, limits.queue, limits.seconds)
    about = {
        "models": bench.about(), "limits": asdict(limits) | {"seed": MOST_SEED}, "policy": Policy().to_dict(),
        "version": limpet.__version__,
    }  # fmt: skip
    html = page.playground(about)
    described = openapi.description(limits, list(models), limpet.__version__)

    def answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
        return JSONResponse(value, status, {**HEADERS, **(headers or {})})

    class Events(StreamingResponse):
        """Server-sent events of one job; whichever way the answer ends, the job ends with it."""

        def __init__(self, job: Job, first: str) -> None:
            self.job = job
            headers = {**HEADERS, "X-Accel-Buffering": "no"}
            super().__init__(_events(job, first), media_type=openapi.EVENTS, headers=headers)

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            try:
                await super().__call__(scope, receive, send)
            finally:
                self.job.leave()

    async def read(request: Request) -> bytes:
        """The body, if it is JSON by its name, small, and soon here."""
        # A page of another site can send JSON only with this server's leave, which it never gets.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Refusal(415, "the request must have the content type application/json")
        body = bytearray()
        try:
            async with asyncio.timeout(PATIENCE):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > limits.body:
                        raise Refusal(413, f"the request is larger than {limits.body} bytes: shorten it")
        except TimeoutError as error:
            raise Refusal(408, f"the request did not arrive within {PATIENCE:g} s") from error
        return bytes(body)

    async def finished(request: Request, job: Job) -> Any:
        """The job's result; if the client leaves first, the job stops."""
        done, leaving = asyncio.wrap_future(job.future), asyncio.ensure_future(_left(request.receive))
        try:
            await asyncio.wait({done, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                raise Left
            return done.result()
        finally:
            leaving.cancel()
            job.leave()
            if not done.done():
                done.cancel()

    def taker(kind: str) -> Callable[[Request], Awaitable[Response]]:
        async def take(request: Request) -> Response:
            try:
                return await made(request)
            except (LimpetError, HTTPException, Left):
                raise
            except Exception:
                LOG.exception("a request to %s broke", request.url.path)
                return answer({"error": BROKEN}, 500)

        async def made(request: Request) -> Response:
            ask = parse(await read(request), kind, limits, models, next(iter(models)))
            wanted = request.headers.get("accept", "")
            if openapi.EVENTS in wanted:
                job = desk.submit(lambda tell: bench.path(ask, tell))
                return Events(job, await _first(job))
            if kind == "sample" and openapi.FILE in wanted:
                (path,) = await finished(request, desk.submit(lambda tell: bench.path(ask, tell)))
                name = f'attachment; filename="limpet-{ask.seed}.limpet"'
                return Response(path.to_bytes(), 200, {**HEADERS, "Content-Disposition": name}, openapi.FILE)
            rows = await finished(request, desk.submit(lambda tell: bench.rows(ask, tell)))
            if kind == "sample":
                return answer({"samples": next(iter(rows.values()))})
            return answer({"arms": {name: of_arm[0] for name, of_arm in rows.items()}})

        return take

    async def home(request: Request) -> Response:
        return HTMLResponse(html, headers=HEADERS)

    async def tell_models(request: Request) -> Response:
        return answer({"models": about["models"]})

    async def describe(request: Request) -> Response:
        return answer(described)

    async def health(request: Request) -> Response:
        return answer({"status": "ok"})

    async def ready(request: Request) -> Response:
        return answer({"status": "full"}, 503) if desk.full else answer({"status": "ready"})

    async def refused(request: Request, error: Exception) -> Response:
        headers, status = (error.headers, error.status) if isinstance(error, Refusal) else ({}, 422)
        return answer({"error": str(error)}, status, headers)

    async def not_served(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return answer(
            {"error": f"{error.detail}: {request.method} is not served here"},
            error.status_code,
            dict(error.headers or {}),
        )

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        desk.close()

    # A page elsewhere must not reach a local server by giving it a name of its own.
    hosts = [*LOOPBACK, "[::1]", "testserver"] if host in LOOPBACK else ["*"]
    app = Starlette(
        routes=[
            Route("/", home),
            Route("/health", health),
            Route("/ready", ready),
            Route("/api/models", tell_models),
            Route("/api/openapi.json", describe),
            Route("/api/sample", taker("sample"), methods=["POST"]),
            Route("/api/compare", taker("compare"), methods=["POST"]),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)],
        exception_handlers={LimpetError: refused, HTTPException: not_served, Left: gone},
        lifespan=lifespan,
    )
    app.state.desk = desk
    return app


@contextmanager
def serving(app: Starlette, host: str = LOOPBACK[0], port: int = 0) -> Iterator[str]:
    """The application on a thread of its own, at a free port unless told: for tests and pictures. Gives its address."""
    uvicorn: Any = extra("uvicorn", "serve")
    server = uvicorn.Server(uvicorn.Config(app, host=host, port=port, **SETTINGS))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise LimpetError(f"{host} port {port} cannot be used: choose another")
        time.sleep(0.01)
    try:
        yield f"http://{host}:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


async def _left(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _first(job: Job) -> str:
    """The first event: that the job waits, or that it begins; one that cannot begin is refused with a status."""
    if job.ahead:
        return event("queued", {"ahead": job.ahead})
    told = await job.events.get()
    if told is None:
        job.future.result()
        raise Left
    return event(*told)


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
    if job.future.cancelled():
        return
    error = job.future.exception()
    if isinstance(error, LimpetError):
        yield event("error", {"error": str(error)})
    elif error is not None and not isinstance(error, Left):
        LOG.error("a stream broke", exc_info=error)
        yield event("error", {"error": BROKEN})


def event(kind: str, data: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps(data, ensure_ascii=True, allow_nan=False)}\n\n"
