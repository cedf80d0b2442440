"""Who is served and who waits: a few workers, a short queue, a time limit, and no work for a client that has left."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from limpet.errors import LimpetError

Tell = Callable[[str, Any], None]  # (kind of event, its data); called after every step, it raises when work must stop
Work = Callable[[Tell], Any]


class Refusal(LimpetError):
    """A request that is turned down: the sentence, and the HTTP status it comes with."""

    def __init__(self, status: int, sentence: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(sentence)
        self.status, self.headers = status, headers or {}


class Left(Exception):
    """The client is gone, so its work stops where it is."""


class Job:
    """One client's work: events while it runs, a result at the end."""

    def __init__(self, ahead: int, seconds: float) -> None:
        self.ahead, self.seconds = ahead, seconds  # jobs before it when it came; how long it may run
        self.events: asyncio.Queue[tuple[str, Any] | None] = asyncio.Queue()
        self.future: Future[Any]
        self._left = threading.Event()
        self._loop = asyncio.get_running_loop()

    def leave(self) -> None:
        """Stop: at once if it still waits, after the current step if it runs; a finished job does not mind."""
        self._left.set()
        self.future.cancel()

    def run(self, work: Work) -> Any:
        """In a worker's thread."""
        ends = time.monotonic() + self.seconds

        def tell(kind: str, data: Any) -> None:
            if self._left.is_set():
                raise Left
            if time.monotonic() > ends:
                raise Refusal(
                    422, f"this takes longer than the {self.seconds:g} s that a request has here: ask for fewer calls, "
                    "samples or arms, or a shorter length",
                )  # fmt: skip
            if kind:
                self._loop.call_soon_threadsafe(self.events.put_nowait, (kind, data))

        return work(tell)


class Desk:
    """At most `workers` jobs run and `queue` wait; one more is refused, and told when to come again."""

    def __init__(self, workers: int, queue: int, seconds: float) -> None:
        self.workers, self.places, self.seconds = workers, workers + queue, seconds
        self.inside: set[Job] = set()
        self._pool = ThreadPoolExecutor(workers, "limpet")
        self._took: deque[float] = deque([1.0], maxlen=16)  # seconds, of the last jobs

    @property
    def full(self) -> bool:
        return len(self.inside) >= self.places

    def submit(self, work: Work) -> Job:
        """Called in the event loop; a job's place is free again as soon as its work has ended."""
        if self.full:
            mean = sum(self._took) / len(self._took)
            wait = max(1, math.ceil(mean * len(self.inside) / self.workers))
            raise Refusal(
                429, f"{len(self.inside)} requests are here already: come again in {wait} s", {"Retry-After": str(wait)}
            )
        job = Job(max(0, len(self.inside) + 1 - self.workers), self.seconds)
        self.inside.add(job)
        loop = asyncio.get_running_loop()

        def timed() -> Any:
            begun = time.monotonic()
            try:
                return job.run(work)
            finally:
                self._took.append(time.monotonic() - begun)

        def ended(future: Future[Any]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._free, job)

        job.future = self._pool.submit(timed)
        job.future.add_done_callback(ended)
        return job

    def _free(self, job: Job) -> None:
        self.inside.discard(job)
        job.events.put_nowait(None)

    def close(self) -> None:
        for job in list(self.inside):
            job.leave()
        self._pool.shutdown(wait=True, cancel_futures=True)
