"""Who is served and who waits: a few workers, a short queue, limits, and no work for a client that has left."""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections import Counter, deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from limpet.errors import LimpetError

if TYPE_CHECKING:
    from limpet.view.answers import Request
    from limpet.view.hands import Hand

LOG = logging.getLogger(__name__)
BROKEN = "something went wrong on this side; the server's log says what"
STOPPING = "the server is stopping: come again when it is back"
START = 60.0  # seconds for a worker that takes the place of another
SILENCE = 10.0  # seconds without a call done, after which a worker counts as stuck


@dataclass(frozen=True)
class Limits:
    """What one request, and all of them together, may take."""

    length: int = 1024  # Tokens in a sample.
    calls: int = 256  # Network calls for a sample.
    samples: int = 16  # Samples in a request.
    arms: int = 4  # Arms in a comparison.
    fixed: int = 64  # Places where words are fixed.
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
            raise LimpetError("the limit on calls is 1; a sample takes at least 2, a step and a readout")


class Refusal(LimpetError):
    """A request that is turned down with an HTTP status of its own; any other LimpetError is a 422."""

    def __init__(self, status: int, sentence: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(sentence)
        self.status, self.headers = status, headers or {}


class Left(Exception):
    """The client is gone, so its work stops where it is."""


class Job:
    """One client's work: events while it runs, a result at the end."""

    def __init__(self, kind: str, request: Request, client: str, seconds: float) -> None:
        self.kind, self.request, self.client = kind, request, client
        self.seconds = seconds  # that it may run
        self.events: asyncio.Queue[tuple[str, Any] | None] = asyncio.Queue()
        self.future: Future[Any] = Future()
        self.heard = math.inf  # when its last call ended
        self._stop: LimpetError | Left | None = None
        self._ends, self._taken, self._lock = math.inf, False, threading.Lock()
        self.loop = asyncio.get_running_loop()

    def leave(self, why: LimpetError | Left | None = None) -> None:
        """Stop: at once if it still waits, soon if it runs; a finished job does not mind."""
        self._stop = self._stop or why or Left()
        if self._first():
            self.future.set_exception(self._stop)

    def _first(self) -> bool:
        """Whether this is the first to begin or to end it: a client may leave just as a worker takes its job up."""
        with self._lock:
            first, self._taken = not self._taken, True
        return first and self.future.set_running_or_notify_cancel()

    def run(self, hand: Hand, took: deque[float]) -> None:
        """In a thread of the server's."""
        if not self._first():
            return
        try:
            self._ends = time.monotonic() + max(START, self.seconds)
            hand.prepare(self.go_on)
            begun = self.heard = time.monotonic()
            self._ends = begun + self.seconds
            self.future.set_result(hand.work(self.kind, self.request, self.tell, self.go_on))
        except (LimpetError, Left) as error:
            self.future.set_exception(self._stop or error)  # a hand that was ended only knows that it was
        except Exception:
            LOG.exception("a request broke")
            self.future.set_exception(Refusal(500, BROKEN))
        if self.heard < math.inf:
            took.append(time.monotonic() - begun)

    def go_on(self) -> None:
        """Raise when work must stop."""
        if self._stop is not None:
            raise self._stop
        if time.monotonic() > self._ends:
            raise LimpetError(
                f"this takes longer than the {self.seconds:g} s that a request has here: ask for fewer calls, samples "
                "or arms, or a shorter length"
            )

    def tell(self, kind: str, data: Any) -> None:
        self.heard = time.monotonic()
        self.go_on()
        if kind:
            self.loop.call_soon_threadsafe(self.events.put_nowait, (kind, data))


class Queue:
    """At most `workers` jobs run and `queue` wait; one more is refused, and told when to come again. Clients are served
    in turn: whoever had the fewest jobs served lately comes next."""

    def __init__(self, limits: Limits, hands: list[Hand]) -> None:
        self.limits, self.hands = limits, hands
        self.inside: set[Job] = set()
        self._waiting: list[Job] = []
        self._running: set[Job] = set()
        self._lock = threading.Lock()  # of the three above
        self._lately: deque[str] = deque(maxlen=64)  # clients whose jobs were begun
        self._idle: queue.SimpleQueue[Hand] = queue.SimpleQueue()
        for hand in hands:
            self._idle.put(hand)
        self._pool = ThreadPoolExecutor(len(hands), "limpet")
        self._took: deque[float] = deque([1.0], maxlen=16)  # seconds, of the last jobs
        self._closed = False

    @property
    def status(self) -> str:
        """Whether a request would be begun, now or when those before it are done; if not, why not."""
        if self._closed:
            return "stopping"
        if len(self.inside) >= self.limits.workers + self.limits.queue:
            return "full"
        if not any(hand.ready for hand in self.hands):
            return "starting"
        with self._lock:
            silent = [job for job in self._running if time.monotonic() - job.heard > SILENCE]
        return "stuck" if len(silent) == len(self.hands) else "ready"

    def submit(self, kind: str, request: Request, client: str) -> Job:
        """Called in the event loop; a job's place is free again as soon as its work has ended."""
        inside, workers = len(self.inside), self.limits.workers
        own = sum(job.client == client for job in self.inside)
        if self._closed:
            raise Refusal(503, STOPPING, {"Retry-After": "10"})
        if own >= self.limits.client or inside >= workers + self.limits.queue:
            mean = sum(self._took) / len(self._took)
            wait, who = max(1, math.ceil(mean * inside / workers)), f"{own} of yours" if own < inside else f"{inside}"
            told = f"{who} requests are here already: come again in {wait} s"
            raise Refusal(429, told, {"Retry-After": str(wait)})
        job = Job(kind, request, client, self.limits.seconds)
        with self._lock:
            self.inside.add(job)
            self._waiting.append(job)
        if inside >= workers:
            job.events.put_nowait(("queued", {"ahead": inside + 1 - workers}))

        def free() -> None:
            with self._lock:
                self.inside.discard(job)
            job.events.put_nowait(None)

        job.future.add_done_callback(lambda _: job.loop.is_closed() or job.loop.call_soon_threadsafe(free))
        self._pool.submit(self._serve)
        return job

    def _serve(self) -> None:
        """In a thread: one of the jobs that wait, if there is one whose client has not left."""
        hand = self._idle.get()
        try:
            with self._lock:
                self._waiting = [job for job in self._waiting if not job.future.done()]
                if not self._waiting:
                    return
                often = Counter(self._lately)
                job = min(self._waiting, key=lambda job: often[job.client])  # of equals, the one that came first
                self._waiting.remove(job)
                self._running.add(job)
                self._lately.append(job.client)
            job.run(hand, self._took)
            with self._lock:
                self._running.discard(job)
        finally:
            self._idle.put(hand)

    def close(self) -> None:
        """Tell everyone inside, and end every hand, whatever it does."""
        self._closed = True
        for job in list(self.inside):
            job.leave(Refusal(503, STOPPING, {"Retry-After": "10"}))
        for hand in self.hands:
            hand.end()
        self._pool.shutdown(wait=False, cancel_futures=True)
