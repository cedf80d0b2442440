"""Who does the work: a process that holds the models, can be ended at any moment, and is then replaced; or this one."""

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
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from limpet.errors import LimpetError
from limpet.server.handlers import WORKS, Request, Stock, Tell
from limpet.server.scheduler import BROKEN, Left, Refusal

LOG = logging.getLogger(__name__)

TICK = 0.05  # seconds between looks at whether the work is still wanted
GRACE = 1.0  # seconds for a call under way to end by itself when it is not
KERNELS = "16"  # that oneDNN keeps of those that it makes for a number of rows; else it is 1024
GROWN = (
    192 << 20
)  # bytes beyond its start at which a process is replaced: a model of somebody else's may keep what it had

STOP = None  # the kind of work that is sent when what has its number is not wanted any more
OPENING = 0  # the number of a process's first work, which nobody asks for
GoOn = Callable[[], None]  # raises when work must stop
News = tuple[str, Any]  # what a process says of a work: told, done, refused, broke or idle; and what


class Hand(Protocol):
    """One worker: it does one thing at a time, and between two calls of one thing perhaps another."""

    facts: dict[str, dict[str, Any]]  # of each model, what the page and the checks of a request must know

    @property
    def ready(self) -> bool:
        """Whether it can begin at once."""
        ...

    def prepare(self, go_on: GoOn) -> None:
        """Wait until it can begin."""
        ...

    def work(self, kind: str, request: Request, tell: Tell, go_on: GoOn) -> Any:
        """What was asked for; `go_on` is called all the while, also inside a call, `tell` after every call. Either may
        come back here with other work, which is then done first."""
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
        self._numbers, self._inside = itertools.count(OPENING + 1), 0  # of works ever, and under way
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
        self._kept: defaultdict[int, deque[News]] = defaultdict(deque)  # for others than who listened

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
        with self._mended(OPENING):
            while not self._awake:
                if (news := self._next(OPENING)) is None:
                    go_on()
                else:
                    self.facts = _made(*news)
                    self._awake, self._begun_with = True, self._memory()

    def work(self, kind: str, request: Request, tell: Tell, go_on: GoOn) -> Any:
        told, self._inside = 0, self._inside + 1
        try:
            while True:  # once, unless what was done in the middle of it has cost the process
                self.prepare(go_on)
                process, number, heard = self._process, next(self._numbers), 0
                with self._mended(number):
                    self._pipe.send((number, kind, request))
                    while process is self._process:
                        news = self._next(number)
                        if news is None:
                            go_on()
                        elif news[0] != "told":
                            return _made(*news)
                        elif (heard := heard + 1) > told:  # the same was told the first time
                            told = heard
                            tell(*news[1])
        finally:
            self._inside -= 1
            if not self._inside and self._awake and self._memory() - self._begun_with > GROWN:
                self._replace()

    @contextmanager
    def _mended(self, number: int) -> Iterator[None]:
        """Whatever happens inside, there is a process afterwards that can take the next work."""
        try:
            yield
        except (EOFError, ConnectionError) as error:  # out of memory, say
            if not self._ended:
                LOG.error("a worker died")
            self._replace()
            raise Refusal(500, BROKEN) from error
        except (LimpetError, Left):
            if self._awake and not self._stopped(number):
                self._replace()
            raise

    def _next(self, number: int, seconds: float = TICK) -> News | None:
        """What the process says next of this work, if it does so soon."""
        ends = time.monotonic() + seconds
        while not self._kept[number]:
            if not self._pipe.poll(max(0.0, ends - time.monotonic())):
                return None
            whose, said, what = self._pipe.recv()
            self._kept[whose].append((said, what))
        return self._kept[number].popleft()

    def _stopped(self, number: int) -> bool:
        """Whether the process has ended this work, or does so soon when it is told to."""
        ends = time.monotonic() + GRACE
        with suppress(EOFError, ConnectionError):
            self._pipe.send((number, STOP, None))
            while (news := self._next(number, ends - time.monotonic())) is not None:
                if news[0] == "idle":
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


def _made(said: str, what: Any) -> Any:
    """What a work has come to."""
    match said:
        case "refused":
            raise LimpetError(what)
        case "broke":
            LOG.error("a worker broke\n%s", what)
            raise Refusal(500, BROKEN)
    return what


def _serve(pipe: Connection, open: Callable[[], Stock]) -> None:
    """In the process: open the stock, then do what comes through the pipe, until it closes."""
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", KERNELS)  # read when the first kernel is made
    stock: list[Stock] = []

    def attempt(number: int, work: Callable[[], Any]) -> None:
        try:
            news = "done", work()
        except Left:
            news = "idle", None
        except LimpetError as error:
            news = "refused", str(error)
        except Exception:
            news = "broke", traceback.format_exc()
        pipe.send((number, *news))

    def take(number: int, kind: str | None, request: Request) -> None:
        def tell(*what: Any) -> None:
            while pipe.poll():
                asked = pipe.recv()
                if asked[:2] == (number, STOP):
                    raise Left
                take(*asked)  # first, since it is less
            pipe.send((number, "told", what))

        if kind is STOP:  # of what has ended by itself
            pipe.send((number, "idle", None))
        else:
            attempt(number, lambda: WORKS[kind](stock[0], request, tell))

    with suppress(EOFError, ConnectionError):  # whoever asked is gone
        attempt(OPENING, lambda: stock.append(open()) or stock[0].facts())  # type: ignore[func-returns-value]
        while stock:
            take(*pipe.recv())
