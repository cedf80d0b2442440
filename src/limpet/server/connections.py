"""What a connection may do to the server: it brings its request's head in time, reads what it is sent, and is one of
few from its address; a host is asked for by a name that it has."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections import Counter
from typing import Any, ClassVar

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from limpet.server.scheduler import Queue

HEAD = 10.0  # seconds for the head of a request to arrive
UNREAD = 10.0  # seconds that what was sent may lie unread
CONNECTIONS = 256  # at once; one more takes the place of another
EACH = 64  # of them, from one address
GOODBYE = 1.5  # seconds to take the last words of a server that stops
LOOPBACK = ("127.0.0.1", "localhost", "::1")
SETTINGS: dict[str, Any] = {  # uvicorn's; what a stranger sends makes no line in the log
    "log_level": "error", "timeout_graceful_shutdown": 3, "timeout_keep_alive": 10, "server_header": False,
    "access_log": False, "ws": "none",
}  # fmt: skip


class Connection(H11Protocol):
    """uvicorn's, with an end to patience."""

    _each: ClassVar[Counter[str]] = Counter()  # connections by address

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._late: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._address = self.client[0] if self.client else ""
        self._each[self._address] += 1
        if self._each[self._address] > EACH:
            transport.abort()
        self._expect()
        if len(self.connections) > CONNECTIONS:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._each[self._address] -= 1
        if not self._each[self._address]:
            del self._each[self._address]
        self._cancel(self._late, self._unread)
        super().connection_lost(exc)

    def _make_room(self) -> None:
        """Of too many connections, the address that has most of them loses one: the one that has dawdled longest, and
        only then one whose request is being answered."""
        here = [one for one in self.connections if isinstance(one, Connection) and not one.transport.is_closing()]
        if len(here) > CONNECTIONS:
            most = Counter(one._address for one in here)
            min(here, key=lambda one: (-most[one._address], one._busy, one._since)).transport.abort()

    @property
    def _busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expect(self) -> None:
        """The head of a request is due."""
        self._since = self.loop.time()
        self._cancel(self._late)
        self._late = self.loop.call_later(HEAD, self._give_up)

    def _give_up(self) -> None:
        if not self._busy:
            self.transport.abort()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._busy:  # else another request was waiting behind
            self._expect()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(UNREAD, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel(self._unread)

    def _cancel(self, *timers: asyncio.TimerHandle | None) -> None:
        for timer in timers:
            if timer is not None:
                timer.cancel()


class Server(uvicorn.Server):
    """uvicorn's, which stops at once: whoever waits is told, and nobody is waited for long."""

    def __init__(self, app: Any) -> None:
        super().__init__(uvicorn.Config(app, http=Connection, **SETTINGS))
        logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of clients that left
        self._queue: Queue = app.state.queue

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._queue.close()
        asyncio.get_running_loop().call_later(GOODBYE, self._hang_up)
        await super().shutdown(sockets)

    def _hang_up(self) -> None:
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()


class Named:
    """Only requests for a name that the server has: a page elsewhere must not reach a local server by giving it a name
    of its own. A server that listens on every address is asked for by number, by this machine's name, or by one that
    its owner told it: numbers are nobody's to give."""

    def __init__(self, app: ASGIApp, host: str, names: tuple[str, ...], refuse: ASGIApp) -> None:
        self.app, self.refuse = app, refuse
        self.everywhere = _number(host) is not None and _number(host).is_unspecified  # type: ignore[union-attr]
        self.names = {name.lower() for name in (*names, host)}
        if host in LOOPBACK or self.everywhere:
            self.names |= {*LOOPBACK}
        if self.everywhere:
            self.names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        good = scope["type"] != "http" or self.has(dict(scope["headers"]).get(b"host", b"").decode("latin-1"))
        await (self.app if good else self.refuse)(scope, receive, send)

    def has(self, host: str) -> bool:
        """Whether a Host header, a name and maybe a port, is ours."""
        name = host.lower().strip()
        name = name[1:].partition("]")[0] if name.startswith("[") else name.rpartition(":")[0] or name
        return name in self.names or (self.everywhere and _number(name) is not None)


def _number(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
