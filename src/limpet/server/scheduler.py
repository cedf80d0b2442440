"""Who is served and who waits: a few workers, a short queue, limits, and no work for a client that has left."""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from limpet.errors import LimpetError

if TYPE_CHECKING:
    from limpet.server.handlers import Request
    from limpet.server.workers import Hand

LOG = logging.getLogger(__name__)
BROKEN = "something went wrong on this side; the server's log says what"
STOPPING = "the server is stopping: come again when it is back"
START = 60.0  # seconds for a worker that takes the place of another
SILENCE = 10.0  # seconds without a call done, after which a worker counts as stuck
MEMORY = 60.0  # seconds after which time that a client was served counts a third
SHARE = 4.0  # times what another client was served that one's smaller requests may take before the other's larger


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
            raise LimpetError("the limit on calls is 1; a sample takes at least 2, a step and a final step")


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
        self.begun = math.inf
        self._stop: LimpetError | Left | None = None
        self._ends, self._taken, self._lock = math.inf, False, threading.Lock()
        self._give_way: Callable[[], None] = lambda: None
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

    def run(self, hand: Hand, give_way: Callable[[], None]) -> None:
        """In a thread of the server's; `give_way` does, between two calls, what should be done first."""
        if not self._first():
            return
        self._give_way = give_way
        try:
            self._ends = time.monotonic() + max(START, self.seconds)
            hand.prepare(self.go_on)
            self.begun = self.heard = time.monotonic()
            self._ends = self.begun + self.seconds
            self.future.set_result(hand.work(self.kind, self.request, self.tell, self.go_on))
        except (LimpetError, Left) as error:
            self.future.set_exception(self._stop or error)  # a hand that was ended only knows that it was
        except Exception:
            LOG.exception("a request broke")
            self.future.set_exception(Refusal(500, BROKEN))

    @property
    def ran(self) -> float:
        """Seconds of work."""
        return max(0.0, time.monotonic() - self.begun)

    def go_on(self) -> None:
        """Raise when work must stop."""
        self._give_way()
        if self._stop is not None:
            raise self._stop
        if time.monotonic() > self._ends:
            raise LimpetError(
                f"this takes longer than the {self.seconds:g} s that a request has here: ask for fewer calls, samples "
                "or arms, or a shorter length"
            )

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Its clock stands still."""
        stopped, heard, self.heard = time.monotonic(), self.heard, math.inf
        yield
        lost = time.monotonic() - stopped
        self.heard, self.begun, self._ends = heard + lost, self.begun + lost, self._ends + lost

    def tell(self, kind: str, data: Any) -> None:
        self.heard = time.monotonic()
        self.go_on()
        if kind:
            self.loop.call_soon_threadsafe(self.events.put_nowait, (kind, data))


class Queue:
    """At most `workers` jobs run and `queue` wait; one more is refused, and told when to come again. Whoever was served
    least lately comes next. A job gives way to a smaller one of another client: so nobody waits much longer for others
    than for their own work, since what is not smaller is done as soon."""

    def __init__(self, limits: Limits, hands: list[Hand]) -> None:
        self.limits, self.hands = limits, hands
        self.inside: set[Job] = set()
        self._waiting: list[Job] = []
        self._running: set[Job] = set()
        self._lock = threading.Lock()  # of the three above
        self._served: dict[str, float] = {}  # seconds of each client, the longer ago the fewer
        self._counted = time.monotonic()  # when they were last counted
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
        if own >= self.limits.client or (inside >= workers + self.limits.queue and not self._made_room(own)):
            raise self._full(own)
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

    def _full(self, own: int) -> Refusal:
        """What a client is told that has so many jobs inside."""
        inside, mean = len(self.inside), sum(self._took) / len(self._took)
        wait = max(1, math.ceil(mean * inside / self.limits.workers))
        who = f"{own} of yours" if own < inside else f"{inside}"
        return Refusal(429, f"{who} requests are here already: come again in {wait} s", {"Retry-After": str(wait)})

    def _made_room(self, own: int) -> bool:
        """Whether a client with so many jobs inside can have a place of another that has more, even without it."""
        many = Counter(job.client for job in self.inside)
        with self._lock:
            waiting = [job for job in self._waiting if many[job.client] > own + 1 and not job.future.done()]
        if not waiting:
            return False
        job = max(reversed(waiting), key=lambda job: many[job.client])
        job.leave(self._full(many[job.client]))
        return True

    def _serve(self) -> None:
        """In a thread: one of the jobs that wait, if there is one whose client has not left."""
        hand = self._idle.get()
        try:
            if (job := self._next()) is not None:
                self._run(job, hand)
        finally:
            self._idle.put(hand)

    def _run(self, job: Job, hand: Hand) -> None:
        def give_way() -> None:
            while (other := self._next(job)) is not None:
                with job.interrupted():
                    self._run(other, hand)
                    hand.prepare(lambda: None)  # where that has cost it its process

        job.run(hand, give_way)
        with self._lock:
            self._running.discard(job)
            now = time.monotonic()
            kept = math.exp((self._counted - now) / MEMORY)
            self._counted = now
            self._served = {client: kept * seconds for client, seconds in self._served.items() if seconds > 1e-3}
            self._served[job.client] = self._served.get(job.client, 0.0) + job.ran
        if job.ran:
            self._took.append(job.ran)

    def _next(self, than: Job | None = None) -> Job | None:
        """The job to do now, if one waits; in the middle of another, if it is smaller and its client's turn."""
        if than is not None and not self._waiting:  # asked at every call
            return None
        with self._lock:
            self._waiting = [job for job in self._waiting if not job.future.done()]
            turns = self._waiting
            if than is not None:
                most = SHARE * (self._served.get(than.client, 0.0) + than.ran)
                turns = [job for job in turns if job.client != than.client and job.request.size < than.request.size
                         and self._served.get(job.client, 0.0) <= most]  # fmt: skip
            if not turns:
                return None
            job = min(turns, key=lambda job: self._served.get(job.client, 0.0))  # of equals, the one that came first
            self._waiting.remove(job)
            self._running.add(job)
            return job

    def close(self) -> None:
        """Tell everyone inside, and end every hand, whatever it does."""
        self._closed = True
        for job in list(self.inside):
            job.leave(Refusal(503, STOPPING, {"Retry-After": "10"}))
        for hand in self.hands:
            hand.end()
        self._pool.shutdown(wait=False, cancel_futures=True)
