"""The queue of requests: a few workers, a bounded number of places, limits, and a fair order between clients."""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from time import monotonic as now
from typing import TYPE_CHECKING, Any

from limpet.errors import LimpetError

if TYPE_CHECKING:
    from limpet.server.handlers import Request
    from limpet.server.workers import RequestWorker

LOG = logging.getLogger(__name__)
BROKEN = "the server failed to answer this request; its log says why"
STOPPING = "the server is stopping: come again when it is back"
START_SECONDS = 60.0  # for a worker process to start
STUCK_SECONDS = 10.0  # without a finished network call, after which a worker counts as stuck
DECAY_SECONDS = 60.0  # after which the time that a client was served counts a third
LONGEST_WAIT = 10  # seconds that a refused client is told to wait, at most
KEPT_SECONDS = 5.0  # for a refused client to come again, after the time that it was told


@dataclass(frozen=True)
class Limits:
    """What one request, and all of them together, may take."""

    length: int = 1024  # Tokens in a sample.
    calls: int = 256  # Network calls for a sample.
    samples: int = 16  # Samples in a request.
    samplers: int = 4  # Samplers in a comparison.
    fixed: int = 64  # Fixed texts in a request.
    body: int = 65536  # Bytes in a request.
    queue: int = 16  # Requests that wait.
    client: int = 8  # Requests of one client that wait or run.
    workers: int = 1  # Requests that run at once, each in a process that holds all models.
    seconds: float = 120.0  # How long a request may run.

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not math.isfinite(value) or value < 0 or (value == 0 and name != "queue"):
                raise LimpetError(f"the limit on {name} is {value}; it takes a number above 0")
        if self.calls < 2:
            raise LimpetError("the limit on calls is 1; a sample takes at least 2, a step and a final step")


class Refusal(LimpetError):
    """A request that is refused with an HTTP status of its own; any other LimpetError is a 422."""

    def __init__(self, status: int, sentence: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(sentence)
        self.status, self.headers = status, headers or {}


class WorkerDied(Refusal):
    """The worker's process ended by itself; `had_begun` says whether it had taken the request up."""

    def __init__(self, had_begun: bool) -> None:
        super().__init__(500, BROKEN)
        self.had_begun = had_begun


class ClientLeft(Exception):
    """The client is gone, so its work stops."""


class RequestJob:
    """One request: its events while it runs, and its result."""

    def __init__(self, kind: str, request: Request, client: str, seconds: float) -> None:
        self.kind, self.request, self.client = kind, request, client
        self.seconds = seconds  # that it may run
        self.events: asyncio.Queue[tuple[str, Any] | None] = asyncio.Queue()  # (kind, data); None ends it
        self.future: Future[Any] = Future()
        self.began = self.last_call = math.inf  # when it began, and when its last network call ended
        self.loop = asyncio.get_running_loop()
        self._deadline, self._is_taken = math.inf, False
        self._stop_reason: LimpetError | ClientLeft | None = None
        self._lock = threading.Lock()

    def stop(self, reason: LimpetError | ClientLeft | None = None) -> None:
        """End the job: at once if it still waits, soon if it runs. It does nothing to a finished job."""
        self._stop_reason = self._stop_reason or reason or ClientLeft()
        if self._take():
            self.future.set_exception(self._stop_reason)

    def _take(self) -> bool:
        """Whether nobody has begun or ended the job yet: a client may leave just as a worker takes up its job."""
        with self._lock:
            first, self._is_taken = not self._is_taken, True
        return first and self.future.set_running_or_notify_cancel()

    def run(self, worker: RequestWorker) -> None:
        """Do the work and set the future. Runs in a thread of the queue."""
        if not self._take():
            return
        try:
            self.future.set_result(self._work(worker))
        except (LimpetError, ClientLeft) as error:
            self.future.set_exception(self._stop_reason or error)  # a killed worker reports only that it died
        except Exception:
            LOG.exception("a request failed")
            self.future.set_exception(Refusal(500, BROKEN))

    def _work(self, worker: RequestWorker) -> Any:
        """The worker's result. A worker that died before it took the job up, while it was idle, gets it once more."""
        for may_repeat in (True, False):
            self._deadline = now() + max(START_SECONDS, self.seconds)
            try:
                worker.prepare(self.check)
                self.began = self.last_call = now()
                self._deadline = self.began + self.seconds
                return worker.run(self.kind, self.request, self.report, self.check)
            except WorkerDied as died:
                if died.had_begun or not may_repeat or self._stop_reason:
                    raise

    @property
    def duration(self) -> float:
        """Seconds that it has run."""
        return max(0.0, now() - self.began)

    def check(self) -> None:
        """Raise if the work must stop."""
        if self._stop_reason is not None:
            raise self._stop_reason
        if now() > self._deadline:
            raise LimpetError(
                f"this takes longer than the limit of {self.seconds:g} s: ask for fewer calls, samples or samplers, or "
                "a shorter length"
            )

    def report(self, kind: str, data: Any) -> None:
        """Called after every network call; an event with a kind goes to the client."""
        self.last_call = now()
        self.check()
        if kind:
            self.loop.call_soon_threadsafe(self.events.put_nowait, (kind, data))


class Queue:
    """At most `limits.workers` jobs run and `limits.queue` wait; one more is refused and told when to come again.

    Next is the client that was served least lately. Places that become free are kept for the clients that were
    refused, in the order in which they came, until they had time to come again."""

    def __init__(self, limits: Limits, workers: list[RequestWorker]) -> None:
        self.limits, self.workers = limits, workers
        self.jobs: set[RequestJob] = set()  # that wait or run
        self._waiting: list[RequestJob] = []
        self._running: set[RequestJob] = set()
        self._lock = threading.Lock()  # of the three above
        self._refused: dict[str, float] = {}  # clients in the order of their refusal -> until when each is waited for
        self._served: dict[str, float] = {}  # seconds of each client; they decay
        self._decayed_at = now()
        self._idle: queue.SimpleQueue[RequestWorker] = queue.SimpleQueue()
        for worker in workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(len(workers), "limpet")
        self._durations: deque[float] = deque(maxlen=16)  # seconds of the last jobs
        self._is_closed = False

    @property
    def status(self) -> str:
        """`ready` if a request would be accepted now and begun in its turn; else why not."""
        if self._is_closed:
            return "stopping"
        if len(self.jobs) >= self.limits.workers + self.limits.queue:
            return "full"
        if not any(worker.is_ready for worker in self.workers):
            return "starting"
        with self._lock:
            stuck = [job for job in self._running if now() - job.last_call > STUCK_SECONDS]
        return "stuck" if len(stuck) == len(self.workers) else "ready"

    def submit(self, kind: str, request: Request, client: str) -> RequestJob:
        """Add a request, or raise a Refusal. Called in the event loop."""
        if self._is_closed:
            raise Refusal(503, STOPPING, {"Retry-After": "10"})
        self._check_place(client)
        job = RequestJob(kind, request, client, self.limits.seconds)
        ahead = len(self.jobs) + 1 - self.limits.workers
        if ahead > 0:
            job.events.put_nowait(("queued", {"ahead": ahead}))
        with self._lock:
            self.jobs.add(job)
            self._waiting.append(job)

        def free_place() -> None:
            with self._lock:
                self.jobs.discard(job)
            job.events.put_nowait(None)

        job.future.add_done_callback(lambda _: job.loop.is_closed() or job.loop.call_soon_threadsafe(free_place))
        self._threads.submit(self._run_next)
        return job

    def _check_place(self, client: str) -> None:
        """Raise unless there is a place for this client beside those that are kept for clients refused before it."""
        own = sum(job.client == client for job in self.jobs)
        mean = sum(self._durations) / len(self._durations) if self._durations else 1.0
        if own >= self.limits.client:
            wait = self._seconds(mean)
            raise Refusal(429, f"{own} of your requests are here: come again in {wait} s", {"Retry-After": str(wait)})
        self._refused = {name: until for name, until in self._refused.items() if until > now()}
        before = list(self._refused).index(client) if client in self._refused else len(self._refused)
        missing = len(self.jobs) + before + 1 - self.limits.workers - self.limits.queue
        if missing <= 0:
            self._refused.pop(client, None)
            return
        wait = self._seconds(mean * missing / self.limits.workers)
        self._refused[client] = now() + wait + KEPT_SECONDS
        raise Refusal(503, f"the server is full: come again in {wait} s", {"Retry-After": str(wait)})

    def _seconds(self, estimate: float) -> int:
        return min(LONGEST_WAIT, max(1, math.ceil(estimate)))

    def _run_next(self) -> None:
        """Run one of the jobs that wait, if there is one. Runs in a thread."""
        worker = self._idle.get()
        try:
            if (job := self._next()) is not None:
                job.run(worker)
                self._account(job)
        finally:
            self._idle.put(worker)

    def _next(self) -> RequestJob | None:
        with self._lock:
            self._waiting = [job for job in self._waiting if not job.future.done()]
            if not self._waiting:
                return None
            job = min(self._waiting, key=lambda job: self._served.get(job.client, 0.0))  # of equals, the first
            self._waiting.remove(job)
            self._running.add(job)
            return job

    def _account(self, job: RequestJob) -> None:
        """Add the time that a job took to its client's."""
        with self._lock:
            self._running.discard(job)
            decay, self._decayed_at = math.exp((self._decayed_at - now()) / DECAY_SECONDS), now()
            self._served = {client: decay * seconds for client, seconds in self._served.items() if seconds > 1e-3}
            self._served[job.client] = self._served.get(job.client, 0.0) + job.duration
        if job.duration:
            self._durations.append(job.duration)

    def close(self) -> None:
        """Refuse every job that waits or runs, and end the workers."""
        self._is_closed = True
        for job in list(self.jobs):
            job.stop(Refusal(503, STOPPING, {"Retry-After": "10"}))
        for worker in self.workers:
            worker.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
