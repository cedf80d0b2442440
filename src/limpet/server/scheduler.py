"""The queue of requests: a few workers, limits, a fair order between clients, and batches of requests that fit."""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from time import monotonic as now
from typing import TYPE_CHECKING, Any

from limpet.errors import LimpetError
from limpet.server.metrics import Metrics

if TYPE_CHECKING:
    from limpet.server.workers import RequestWorker

LOG = logging.getLogger(__name__)
BROKEN = "the server failed to answer this request; its log says why"
STOPPING = "the server is stopping: come again when it is back"
START_SECONDS = 60.0  # for a worker process to start
STUCK_SECONDS = 10.0  # without a finished network call, after which a worker counts as stuck
DECAY_SECONDS = 60.0  # after which the time that a client was served counts a third
LONGEST_WAIT = 10  # seconds that a refused client is told to wait, at most
DRAIN_SECONDS = 0.02  # between checks of whether the last request has ended when the server stops
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
    api: int = 256  # API requests that wait or run, of all clients together.
    batch: int = 64  # Samples of API requests that are drawn together.
    wait: float = 0.005  # Seconds that an API request waits for others to share its batch.
    grace: float = 30.0  # Seconds that API requests which run may still take when the server stops.

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not math.isfinite(value) or value < 0 or (value == 0 and name not in ("queue", "wait", "grace")):
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

    def __init__(
        self, kind: str, request: Any, client: str, seconds: float, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self.kind, self.request, self.client = kind, request, client
        self.key: Hashable = getattr(request, "key", None)  # jobs with the same key can run in one batch
        self.submitted = now()
        self.seconds = seconds  # that it may run
        self.events: asyncio.Queue[tuple[str, Any] | None] = asyncio.Queue()  # (kind, data); None ends it
        self.future: Future[Any] = Future()
        self.began = self.last_call = math.inf  # when it began, and when its last network call ended
        self.loop = loop or asyncio.get_running_loop()
        self._deadline, self._is_taken = math.inf, False
        self.stop_reason: LimpetError | ClientLeft | None = None
        self._lock = threading.Lock()

    def stop(self, reason: LimpetError | ClientLeft | None = None) -> None:
        """End the job: at once if it still waits, soon if it runs. It does nothing to a finished job."""
        self.stop_reason = self.stop_reason or reason or ClientLeft()
        if self.take():
            self.future.set_exception(self.stop_reason)

    def take(self) -> bool:
        """Whether nobody has begun or ended the job yet: a client may leave just as a worker takes up its job."""
        with self._lock:
            first, self._is_taken = not self._is_taken, True
        return first and self.future.set_running_or_notify_cancel()

    def run(self, worker: RequestWorker) -> None:
        """Do the work and set the future. Runs in a thread of the queue."""
        if not self.take():
            return
        try:
            self.future.set_result(self._work(worker))
        except (LimpetError, ClientLeft) as error:
            self.future.set_exception(self.stop_reason or error)  # a killed worker reports only that it died
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
                if died.had_begun or not may_repeat or self.stop_reason:
                    raise

    @property
    def duration(self) -> float:
        """Seconds that it has run."""
        return max(0.0, now() - self.began)

    def check(self) -> None:
        """Raise if the work must stop."""
        if self.stop_reason is not None:
            raise self.stop_reason
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


class Batch(RequestJob):
    """Jobs that a worker does together. Each has its own events, its own result and its own end.

    It may take as long as its jobs would one after the other, and each network call as long as one job. If it fails,
    its jobs run one by one, so that a request can end no other."""

    def __init__(self, jobs: list[RequestJob], metrics: Metrics) -> None:
        first, requests = jobs[0], [job.request for job in jobs]
        super().__init__(first.kind, requests, first.client, first.seconds * len(jobs), first.loop)
        self.jobs, self.metrics = jobs, metrics

    def run(self, worker: RequestWorker) -> None:
        """Do the work. The jobs have been taken."""
        reason: Exception = Refusal(500, BROKEN)
        try:
            self._work(worker)
        except (LimpetError, ClientLeft) as error:
            reason = error
        except Exception:
            LOG.exception("a batch failed")
        self.metrics.add("limpet_batch_requests", len(self.jobs))
        self.metrics.add("limpet_batch_seconds", self.duration)
        for job in (job for job in self.jobs if not job.future.done()):
            if job.stop_reason or len(self.jobs) == 1:
                job.future.set_exception(job.stop_reason or reason)
            else:
                Batch([job], self.metrics).run(worker)

    def check(self) -> None:
        """End the jobs that must stop; raise if none is left, or if this takes too long."""
        for job in self.jobs:
            if job.stop_reason and not job.future.done():
                job.future.set_exception(job.stop_reason)
        if all(job.future.done() for job in self.jobs):
            raise ClientLeft
        super().check()
        if now() - self.last_call > self.jobs[0].seconds:
            raise LimpetError(f"a network call takes longer than the limit of {self.jobs[0].seconds:g} s")

    def report(self, kind: str, data: Any) -> None:
        """Called after every network call, and with an event for one of the jobs."""
        self.last_call = now()
        if not kind:
            self.metrics.add("limpet_network_calls_total")
            self.check()
            return
        number, content = data
        job = self.jobs[number]
        if job.future.done():
            return
        if kind == "done":
            job.future.set_result(content)
        elif kind == "refused":
            job.future.set_exception(LimpetError(content))
        else:
            self.loop.call_soon_threadsafe(job.events.put_nowait, (kind, content))


class Queue:
    """At most `limits.workers` jobs run and `limits.queue` wait; one more is refused and told when to come again.

    Next is the client that was served least lately. Places that become free are kept for the clients that were
    refused, in the order in which they came, until they had time to come again.

    Jobs with a key are of the API. They have places of their own, and those that fit together run in one batch."""

    def __init__(self, limits: Limits, workers: list[RequestWorker]) -> None:
        self.limits, self.workers, self.metrics = limits, workers, Metrics()
        self.jobs: set[RequestJob] = set()  # that wait or run
        self._waiting: list[RequestJob] = []
        self._running: set[RequestJob] = set()
        self._lock = threading.Condition()  # of the three above; notified when a job arrives
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
        batched = self._batched()
        if batched >= self.limits.api or len(self.jobs) - batched >= self.limits.workers + self.limits.queue:
            return "full"
        if not any(worker.is_ready for worker in self.workers):
            return "starting"
        with self._lock:
            stuck = [job for job in self._running if now() - job.last_call > STUCK_SECONDS]
        return "stuck" if len(stuck) == len(self.workers) else "ready"

    def _batched(self) -> int:
        """How many jobs of the API are here."""
        return sum(job.key is not None for job in self.jobs)

    def submit(self, kind: str, request: Any, client: str) -> RequestJob:
        """Add a request, or raise a Refusal. Called in the event loop."""
        if self._is_closed:
            raise Refusal(503, STOPPING, {"Retry-After": "10"})
        job = RequestJob(kind, request, client, self.limits.seconds)
        if job.key is None:
            self._check_place(client)
        elif self._batched() >= self.limits.api:
            raise Refusal(503, f"{self.limits.api} requests are here: come again in 1 s", {"Retry-After": "1"})
        ahead = len(self.jobs) + 1 - self.limits.workers
        if ahead > 0 and job.key is None:
            job.events.put_nowait(("queued", {"ahead": ahead}))
        with self._lock:
            self.jobs.add(job)
            self._waiting.append(job)
            self._lock.notify_all()

        def free_place() -> None:
            with self._lock:
                self.jobs.discard(job)
            job.events.put_nowait(None)

        job.future.add_done_callback(lambda _: job.loop.is_closed() or job.loop.call_soon_threadsafe(free_place))
        self._threads.submit(self._run_next)
        return job

    def _check_place(self, client: str) -> None:
        """Raise unless there is a place for this client beside those that are kept for clients refused before it."""
        places = [job for job in self.jobs if job.key is None]
        own = sum(job.client == client for job in places)
        mean = sum(self._durations) / len(self._durations) if self._durations else 1.0
        if own >= self.limits.client:
            wait = self._seconds(mean)
            raise Refusal(429, f"{own} of your requests are here: come again in {wait} s", {"Retry-After": str(wait)})
        self._refused = {name: until for name, until in self._refused.items() if until > now()}
        before = list(self._refused).index(client) if client in self._refused else len(self._refused)
        missing = len(places) + before + 1 - self.limits.workers - self.limits.queue
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
            if job.key is not None:
                jobs = [one for one in [job, *self._fitting(job)] if one.take()]
                if not jobs:
                    return None
                job = Batch(jobs, self.metrics)
            self._running.add(job)
            return job

    def _fitting(self, first: RequestJob) -> list[RequestJob]:
        """Take further jobs for a batch from those that wait; wait for them a little while. Called with the lock."""
        found: list[RequestJob] = []

        def collect() -> bool:
            """Whether nothing more fits."""
            rows = first.request.rows + sum(job.request.rows for job in found)
            for job in [job for job in self._waiting if job.key == first.key]:
                if rows + job.request.rows <= self.limits.batch:
                    rows += job.request.rows
                    found.append(job)
                    self._waiting.remove(job)
            return rows >= self.limits.batch or self._is_closed

        self._lock.wait_for(collect, max(0.0, first.submitted + self.limits.wait - now()))
        return found

    def _account(self, job: RequestJob) -> None:
        """Add the time that a job took to its client's."""
        with self._lock:
            self._running.discard(job)
            decay, self._decayed_at = math.exp((self._decayed_at - now()) / DECAY_SECONDS), now()
            self._served = {client: decay * seconds for client, seconds in self._served.items() if seconds > 1e-3}
            members = job.jobs if isinstance(job, Batch) else [job]
            for one in members:
                self._served[one.client] = self._served.get(one.client, 0.0) + job.duration / len(members)
        if job.duration:
            self._durations.append(job.duration)

    async def drain(self, is_forced: Callable[[], bool]) -> None:
        """Refuse new jobs and those that wait, and close when the API's running ones have ended, or after the grace."""
        self._is_closed = True
        with self._lock:
            waiting, ends = [*self._waiting], now() + self.limits.grace
            self._lock.notify_all()
        for job in waiting:
            job.stop(Refusal(503, STOPPING, {"Retry-After": "10"}))
        for job in [job for job in self.jobs if job.key is None]:
            job.stop(Refusal(503, STOPPING, {"Retry-After": "10"}))
        while self._batched() and now() < ends and not is_forced():
            await asyncio.sleep(DRAIN_SECONDS)
        self.close()

    def close(self) -> None:
        """Refuse every job that waits or runs, and end the workers."""
        self._is_closed = True
        for job in list(self.jobs):
            job.stop(Refusal(503, STOPPING, {"Retry-After": "10"}))
        for worker in self.workers:
            worker.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
