"""Who is served and who waits: a few workers, a short queue, limits, and no work for a client that has left."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from limpet.errors import LimpetError

LOG = logging.getLogger(__name__)
BROKEN = "something went wrong on this side; the server's log says what"

Tell = Callable[[str, Any], None]  # (kind of event, its data); called after every call, it raises when work must stop
Work = Callable[[Tell], Any]


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
    workers: int = 1  # Requests that run at once.
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

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds  # that it may run
        self.events: asyncio.Queue[tuple[str, Any] | None] = asyncio.Queue()
        self.future: Future[Any]
        self._left, self._begun = threading.Event(), math.inf
        self.loop = asyncio.get_running_loop()

    def leave(self) -> None:
        """Stop: at once if it still waits, after the current call if it runs; a finished job does not mind."""
        self._left.set()
        self.future.cancel()

    def run(self, work: Work, took: deque[float]) -> Any:
        """In a worker's thread."""
        self._begun = time.monotonic()
        try:
            return work(self.tell)
        except (LimpetError, Left):
            raise
        except Exception as error:
            LOG.exception("a request broke")
            raise Refusal(500, BROKEN) from error
        finally:
            took.append(time.monotonic() - self._begun)

    def tell(self, kind: str, data: Any) -> None:
        if self._left.is_set():
            raise Left
        if time.monotonic() - self._begun > self.seconds:
            raise LimpetError(
                f"this takes longer than the {self.seconds:g} s that a request has here: ask for fewer calls, samples "
                "or arms, or a shorter length"
            )
        if kind:
            self.loop.call_soon_threadsafe(self.events.put_nowait, (kind, data))


class Queue:
    """At most `workers` jobs run and `queue` wait; one more is refused, and told when to come again."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.inside: set[Job] = set()
        self._pool = ThreadPoolExecutor(limits.workers, "limpet")
        self._took: deque[float] = deque([1.0], maxlen=16)  # seconds, of the last jobs

    @property
    def full(self) -> bool:
        return len(self.inside) >= self.limits.workers + self.limits.queue

    def submit(self, work: Work) -> Job:
        """Called in the event loop; a job's place is free again as soon as its work has ended."""
        inside, workers = len(self.inside), self.limits.workers
        if self.full:
            wait = max(1, math.ceil(sum(self._took) / len(self._took) * inside / workers))
            raise Refusal(
                429, f"{inside} requests are here already: come again in {wait} s", {"Retry-After": str(wait)}
            )
        job = Job(self.limits.seconds)
        self.inside.add(job)
        if inside >= workers:
            job.events.put_nowait(("queued", {"ahead": inside + 1 - workers}))

        def free() -> None:
            self.inside.discard(job)
            job.events.put_nowait(None)

        job.future = self._pool.submit(job.run, work, self._took)
        job.future.add_done_callback(lambda _: job.loop.is_closed() or job.loop.call_soon_threadsafe(free))
        return job

    def close(self) -> None:
        for job in list(self.inside):
            job.leave()
        self._pool.shutdown(wait=True, cancel_futures=True)
