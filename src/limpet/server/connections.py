"""Limits on connections: their number, their time and unread answers; the host and the client that a request names."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from limpet.errors import LimpetError
from limpet.server.scheduler import Queue

HEAD_SECONDS = 10.0  # for the head of a request to arrive
UNREAD_SECONDS = 10.0  # that a client may leave an answer unread
CONNECTIONS = 256  # in all; above it, the address with the most connections loses one
CONNECTIONS_EACH = 128  # from one address that is not a trusted proxy
LINGER_SECONDS = 1.0  # for a refused client to ask, and then to read its refusal
SHUTDOWN_SECONDS = 1.5  # for clients to read their last answer when the server stops
LOOPBACK = ("127.0.0.1", "localhost", "::1")
SETTINGS: dict[str, Any] = {  # of uvicorn; requests of strangers must not fill the log
    "log_level": "error", "timeout_graceful_shutdown": 3, "timeout_keep_alive": 10, "server_header": False,
    "access_log": False, "ws": "none",
}  # fmt: skip
HOST = re.compile(r"(?:\[(?P<ipv6>[0-9a-f:.]+)\]|(?P<name>[\w.-]+))(?::\d{0,5})?", re.ASCII)
FULL_BODY = b'{"error": "the server has too many connections: come again in a second"}'
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(FULL_BODY), FULL_BODY)
)

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Connection(H11Protocol):
    """uvicorn's connection with a time limit for heads and unread answers, and a place among a limited number."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._is_refused = self._is_answered = False
        self.address = self.client[0] if self.client else ""
        self._is_proxy = is_trusted(self.address, self.config.app.state.proxies)  # type: ignore[union-attr]
        self._expect_head()
        self._limit_connections()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel(self._head_timer, self._write_timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._is_refused:
            super().data_received(data)
        elif not self._is_answered:
            self._send_refusal()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_busy:  # else the client had already sent another request
            self._expect_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel(self._write_timer)

    @property
    def _is_busy(self) -> bool:
        """Whether a request is being read or answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_head(self) -> None:
        self._waits_since = self.loop.time()
        self._cancel(self._head_timer)
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _give_up(self) -> None:
        if not self._is_busy:
            self.transport.abort()

    def _limit_connections(self) -> None:
        """Refuse one connection where there are now too many: of this address, or in all.

        In all, the address with the most connections loses the one that has been idle for longest. A connection whose
        request is being answered is never closed, nor is a trusted proxy's: where there are only those, the new one is
        refused."""
        there: list[Connection] = [one for one in self.connections if not one.transport.is_closing()]  # type: ignore
        served = [one for one in there if not one._is_refused]
        refused = [one for one in there if one._is_refused]
        per_address = Counter(one.address for one in served)
        if not self._is_proxy and per_address[self.address] > CONNECTIONS_EACH:
            self._refuse()
        elif len(served) > CONNECTIONS:
            idle = [one for one in served if not one._is_busy and not one._is_proxy]
            min(idle, key=lambda one: (-per_address[one.address], one._waits_since), default=self)._refuse()
        if len(refused) > CONNECTIONS:
            min(refused, key=lambda one: one._waits_since).transport.abort()

    def _refuse(self) -> None:
        """Answer 503 as soon as the client has sent something, and close."""
        if self.cycle is not None:  # idle after an answer: a client expects that such a connection may be closed
            self.transport.close()
            return
        self._is_refused = True
        self._cancel(self._head_timer)
        self._head_timer = self.loop.call_later(LINGER_SECONDS, self._send_refusal)

    def _send_refusal(self) -> None:
        self._is_answered = True
        self.transport.write(FULL)
        self.transport.write_eof()
        self._cancel(self._head_timer)
        # Until the client closes, what it sends is read and dropped: closing before that would reset the connection.
        self._head_timer = self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def _cancel(self, *timers: asyncio.TimerHandle | None) -> None:
        for timer in filter(None, timers):
            timer.cancel()


class Server(uvicorn.Server):
    """uvicorn's server. When it stops, it finishes the API's requests that run, and answers 503 to all others.

    settings: of uvicorn, in place of those here."""

    def __init__(self, app: Any, **settings: Any) -> None:
        proxies = list(map(str, app.state.proxies))
        config = uvicorn.Config(
            app, http=Connection, proxy_headers=bool(proxies), forwarded_allow_ips=proxies, **{**SETTINGS, **settings}
        )  # fmt: skip
        super().__init__(config)
        logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of every client that left
        self._queue: Queue = app.state.queue

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._queue.drain(lambda: self.force_exit)
        asyncio.get_running_loop().call_later(SHUTDOWN_SECONDS, self._abort_connections)
        await super().shutdown(sockets)

    def _abort_connections(self) -> None:
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()


class RequestFilter:
    """ASGI middleware that passes only requests for a name of this server.

    Otherwise a page on another site could reach a local server by a name of its own (DNS rebinding). A server that
    listens on every address answers to any IP address, since nobody can point one elsewhere, to this machine's name and
    to the names that its owner gave it."""

    def __init__(self, app: ASGIApp, host: str, names: tuple[str, ...], error: Callable[[str], ASGIApp]) -> None:
        self.app, self.error = app, error
        ip = _ip(host)
        self.any_address = ip is not None and ip.is_unspecified
        self.names = {name.lower() for name in (*names, host)}
        if host in LOOPBACK or self.any_address:
            self.names |= {*LOOPBACK}
        if self.any_address:
            self.names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            if {b"transfer-encoding", b"content-length"} <= headers.keys():
                app = self.error("the request has both Transfer-Encoding and Content-Length: send one of them")
            elif not self.is_own(headers.get(b"host", b"").decode("latin-1")):
                app = self.error("this server has another name: use the address that it was started with")
        await app(scope, receive, send)

    def is_own(self, host: str) -> bool:
        """Whether a Host header, which is a name and perhaps a port, names this server."""
        found = HOST.fullmatch(host.lower())
        name: str = (found["name"] or found["ipv6"]) if found else ""
        return name in self.names or (self.any_address and _ip(name) is not None)


def parse_proxies(addresses: Iterable[str]) -> tuple[Network, ...]:
    """The trusted proxies from their addresses or networks, such as 10.0.0.1 or 10.0.0.0/8."""
    try:
        return tuple(ipaddress.ip_network(address) for address in addresses)
    except ValueError as error:
        raise LimpetError(f"{error}: a proxy is an IP address or a network, such as 10.0.0.0/8") from error


def is_trusted(address: str, proxies: tuple[Network, ...]) -> bool:
    ip = _ip(address)
    return ip is not None and any(ip in network for network in proxies)


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
