"""Who does the work: a process that holds the models, can be ended at any moment, and is then replaced; or this one."""

from __future__ import annotations

import logging
import multiprocessing
import os
import resource
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from limpet.errors import LimpetError
from limpet.view.answers import WORKS, Request, Stock, Tell
from limpet.view.queue import BROKEN, Left, Refusal

LOG = logging.getLogger(__name__)

TICK = 0.05  # seconds between looks at whether the work is still wanted
GRACE = 1.0  # seconds for a call under way to end by itself when it is not
KERNELS = "16"  # that oneDNN keeps of those that it makes for every number of rows; else it is 1024
GROWN = 192 << 20  # bytes beyond its start at which a process is replaced: what oneDNN makes it never all gives back

STOP = None  # what is sent to a process whose work is not wanted any more
GoOn = Callable[[], None]  # raises when work must stop


class Hand(Protocol):
    """One worker: it does one thing at a time."""

    facts: dict[str, dict[str, Any]]  # of each model, what the page and the checks of a request must know

    @property
    def ready(self) -> bool:
        """Whether it can begin at once."""
        ...

    def prepare(self, go_on: GoOn) -> None:
        """Wait until it can begin."""
        ...

    def work(self, kind: str, request: Request, tell: Tell, go_on: GoOn) -> Any:
        """What was asked for; `go_on` is called all the while, also inside a call, `tell` after every call."""
        ...

    def end(self) -> None:
        """Stop for ever, whatever it does."""
        ...


Hire = Callable[[], Hand]


def here(stock: Stock) -> Hire:
    """A worker in this process, for whoever trusts its requests: work stops between calls only."""
    return lambda: _Here(stock)


def process(open: Callable[[], Stock]) -> Hire:
    """A worker in a process of its own, which opens the stock there; `open` must be picklable."""
    return lambda: _Process(open)


class _Here:
    ready = True

    def __init__(self, stock: Stock) -> None:
        self.stock, self.facts = stock, stock.facts()

    def prepare(self, go_on: GoOn) -> None:
        pass

    def work(self, kind: str, request: Request, tell: Tell, go_on: GoOn) -> Any:
        return WORKS[kind](self.stock, request, tell)

    def end(self) -> None:
        pass


class _Process:
    def __init__(self, open: Callable[[], Stock]) -> None:
        self._open, self._ended, self._lock = open, False, threading.Lock()
        self._pipe: Connection
        self._process: BaseProcess
        self._hire()
        self.facts: dict[str, dict[str, Any]] = {}
        self.prepare(lambda: None)

    def _hire(self) -> None:
        """Start a process; whether it is ready is found out when it is needed."""
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        made = context.Process(target=_serve, args=(there, self._open), daemon=True)
        before = signal.pthread_sigmask(
            signal.SIG_BLOCK, {signal.SIGINT}
        )  # Ctrl-C is for the server: it ends its hands
        try:
            made.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        there.close()  # only the worker holds its end, so that its death is heard
        self._pipe, self._process, self._awake = here, made, False

    def _memory(self) -> int:
        """Bytes that the process holds; 0 where that cannot be told."""
        try:
            return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * resource.getpagesize()
        except OSError:
            return 0

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def ready(self) -> bool:
        with suppress(OSError, ValueError):  # while it is replaced
            return self._awake or self._pipe.poll()
        return False

    def prepare(self, go_on: GoOn) -> None:
        with self._mended():
            if not self._awake:
                self.facts = self._answer(go_on)
                self._awake, self._begun_with = True, self._memory()

    def work(self, kind: str, request: Request, tell: Tell, go_on: GoOn) -> Any:
        with self._mended():
            self._pipe.send((kind, request))
            made = self._answer(go_on, tell)
        if self._memory() - self._begun_with > GROWN:
            self._replace()
        return made

    @contextmanager
    def _mended(self) -> Iterator[None]:
        """Whatever happens inside, there is a process afterwards that can take the next work."""
        try:
            yield
        except (EOFError, ConnectionError) as error:  # out of memory, say
            if not self._ended:
                LOG.error("a worker died")
            self._replace()
            raise Refusal(500, BROKEN) from error
        except (LimpetError, Left):
            if self._awake and not self._stopped():
                self._replace()
            raise

    def _answer(self, go_on: GoOn, tell: Tell | None = None) -> Any:
        """What the process says at the end of what it does."""
        while True:
            said, told = self._next(go_on)
            match said:
                case "told" if tell is not None:
                    tell(*told)
                case "done":
                    return told
                case "refused":
                    raise LimpetError(told)
                case "broke":
                    LOG.error("a worker broke\n%s", told)
                    raise Refusal(500, BROKEN)

    def _next(self, go_on: GoOn) -> tuple[str, Any]:
        """What the process says next."""
        while not self._pipe.poll(TICK):
            go_on()
        said: tuple[str, Any] = self._pipe.recv()
        return said

    def _stopped(self) -> bool:
        """Whether the process has ended its work, or does so soon when it is told to."""
        ends = time.monotonic() + GRACE
        with suppress(EOFError, ConnectionError):
            self._pipe.send(STOP)
            while self._pipe.poll(max(0.0, ends - time.monotonic())):
                if self._pipe.recv()[0] == "idle":
                    return True
        return False

    def _replace(self) -> None:
        with self._lock:
            self._kill()
            if not self._ended:
                self._hire()

    def _kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def end(self) -> None:
        with self._lock:
            self._ended = True
            self._process.kill()


def _serve(pipe: Connection, open: Callable[[], Stock]) -> None:
    """In the process: open the stock, then do what comes through the pipe, until it closes."""
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", KERNELS)  # read when the first kernel is made

    def tell(kind: str, data: Any) -> None:
        if pipe.poll():  # nothing but STOP can come now; the loop below reads it
            raise Left
        pipe.send(("told", (kind, data)))

    def attempt(work: Callable[[], Any]) -> None:
        try:
            pipe.send(("done", work()))
        except Left:
            pass
        except LimpetError as error:
            pipe.send(("refused", str(error)))
        except Exception:
            pipe.send(("broke", traceback.format_exc()))

    with suppress(EOFError, ConnectionError):  # whoever asked is gone
        stock: list[Stock] = []
        attempt(lambda: stock.append(open()) or stock[0].facts())  # type: ignore[func-returns-value]
        while stock:
            asked = pipe.recv()
            if asked is STOP:
                pipe.send(("idle", None))
                continue
            kind, request = asked
            attempt(lambda kind=kind, request=request: WORKS[kind](stock[0], request, tell))  # type: ignore[misc]
