"""Workers: a process that holds the models and can be killed and replaced at any time, or the server's own process."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import resource
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from limpet.errors import LimpetError
from limpet.server import handlers
from limpet.server.completions import completions
from limpet.server.handlers import Report, Resources
from limpet.server.scheduler import BROKEN, ClientLeft, Refusal, WorkerDied

LOG = logging.getLogger(__name__)

POLL_SECONDS = 0.05  # between checks of whether the work is still wanted
GRACE_SECONDS = 1.0  # for a network call to end when its result is not wanted any more
ONEDNN_CACHE = "16"  # kernels that oneDNN keeps, one per number of rows; its default of 1024 takes too much memory
MEMORY_GROWTH = 192 << 20  # bytes beyond its start at which a process is replaced: a user's model may leak

HANDLERS: dict[str, Callable[[Resources, Any, Report], Any]] = {
    "samples": handlers.samples,
    "file": handlers.trajectory_file,
    "events": handlers.trajectory_events,
    "completions": completions,  # of several requests together
}
LOADING = 0  # the number of a process's first work; those of requests follow
STOP = None  # the kind of message that ends the work with its number
Check = Callable[[], None]  # raises when work must stop
Message = tuple[str, Any]  # from the process: begun, event, done, refused, failed or stopped; and its content


class LocalWorker:
    """A worker in the server's process, for trusted requests: work stops between network calls only."""

    is_ready = True  # whether it can begin at once

    def __init__(self, resources: Resources) -> None:
        self.resources, self.models = resources, resources.facts()

    def prepare(self, check: Check) -> None:
        """Wait until it can begin; `check` is called meanwhile."""

    def run(self, kind: str, request: Any, report: Report, check: Check) -> Any:
        """The result of a request. `report` is called after every network call, `check` also during a call."""
        return HANDLERS[kind](self.resources, request, report)

    def close(self) -> None:
        """Stop for ever, whatever it does."""


class WorkerProcess:
    """A worker in a process of its own, which calls `load`; `load` must be picklable. Methods as in `LocalWorker`."""

    def __init__(self, load: Callable[[], Resources]) -> None:
        self._load, self._is_closed, self._lock = load, False, threading.Lock()
        self._pipe: Connection
        self._process: BaseProcess
        self._numbers = itertools.count(LOADING + 1)
        self.models: dict[str, dict[str, Any]] = {}
        self._start()
        self.prepare(lambda: None)

    def _start(self) -> None:
        """Start a process; `prepare` waits for it."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._load), daemon=True)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the server ends its workers at Ctrl-C
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()  # now only the process holds its end, so its death ends the connection
        self._is_loaded = False

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def is_ready(self) -> bool:
        with suppress(OSError, ValueError):  # while it is replaced
            return self._is_loaded or self._pipe.poll()
        return False

    def prepare(self, check: Check) -> None:
        if not self._is_loaded:
            self.models = self._result(LOADING, lambda kind, data: None, check)
            self._is_loaded, self._memory_at_start = True, self._memory()

    def run(self, kind: str, request: Any, report: Report, check: Check) -> Any:
        number = next(self._numbers)
        try:
            with suppress(ConnectionError):  # noticed in `_result`, like any death of the process
                self._pipe.send((number, kind, request))
            return self._result(number, report, check)
        finally:
            if self._is_loaded and self._memory() - self._memory_at_start > MEMORY_GROWTH:
                self._replace()

    def _result(self, number: int, report: Report, check: Check) -> Any:
        """What the work with this number comes to. Afterwards there is a process that can take the next request."""
        has_begun, message = False, None
        try:
            while message is None or message[0] in ("begun", "event"):
                message = self._receive(number, POLL_SECONDS)
                if message is None:
                    check()
                elif message[0] == "begun":
                    has_begun = True
                elif message[0] == "event":
                    report(*message[1])
        except (EOFError, ConnectionError) as error:  # killed, for example for want of memory
            if not self._is_closed:
                LOG.error("a worker process died")
            self._replace()
            raise WorkerDied(has_begun) from error
        except (LimpetError, ClientLeft):
            if not self._has_stopped(number):
                self._replace()
            raise
        kind, content = message
        if kind == "refused":
            raise LimpetError(content)
        if kind == "failed":
            LOG.error("a worker failed\n%s", content)
            raise Refusal(500, BROKEN)
        return content

    def _receive(self, number: int, seconds: float) -> Message | None:
        """The next message about this work, if it comes in time; those about earlier work are dropped."""
        ends = time.monotonic() + seconds
        while self._pipe.poll(max(0.0, ends - time.monotonic())):
            of, kind, content = self._pipe.recv()
            if of == number:
                return kind, content
        return None

    def _has_stopped(self, number: int) -> bool:
        """Ask the process to end this work; whether it has, within the grace."""
        ends = time.monotonic() + GRACE_SECONDS
        with suppress(EOFError, ConnectionError):
            self._pipe.send((number, STOP, None))
            while (message := self._receive(number, ends - time.monotonic())) is not None:
                if message[0] == "stopped":
                    return True
        return False

    def _memory(self) -> int:
        """Bytes that the process holds; 0 where the system does not tell."""
        try:
            return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * resource.getpagesize()
        except OSError:
            return 0

    def _replace(self) -> None:
        with self._lock:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            if not self._is_closed:
                self._start()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._process.kill()


RequestWorker = LocalWorker | WorkerProcess
WorkerFactory = Callable[[], RequestWorker]


def in_this_process(resources: Resources) -> WorkerFactory:
    return lambda: LocalWorker(resources)


def in_processes(load: Callable[[], Resources]) -> WorkerFactory:
    return lambda: WorkerProcess(load)


def _serve(pipe: Connection, load: Callable[[], Resources]) -> None:
    """In the process: load the resources, then do what comes through the pipe until it closes."""
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", ONEDNN_CACHE)  # read when the first kernel is made
    loaded: list[Resources] = []

    def load_resources() -> dict[str, dict[str, Any]]:
        loaded.append(load())
        return loaded[0].facts()

    def attempt(number: int, work: Callable[[], Any]) -> None:
        try:
            message = "done", work()
        except ClientLeft:
            message = "stopped", None
        except LimpetError as error:
            message = "refused", str(error)
        except Exception:
            message = "failed", traceback.format_exc()
        pipe.send((number, *message))

    def answer(number: int, kind: str, request: Any) -> None:
        def report(*event: Any) -> None:
            while pipe.poll():
                if pipe.recv()[:2] == (number, STOP):
                    raise ClientLeft
            pipe.send((number, "event", event))

        pipe.send((number, "begun", None))
        attempt(number, lambda: HANDLERS[kind](loaded[0], request, report))

    with suppress(EOFError, ConnectionError):  # the server is gone
        attempt(LOADING, load_resources)
        while loaded:
            number, kind, request = pipe.recv()
            if kind is STOP:  # of work that has just ended by itself
                pipe.send((number, "stopped", None))
            else:
                answer(number, kind, request)
