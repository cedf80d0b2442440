"""Connections: time limits by a fake clock, their number, host names, proxies, and heads that contradict themselves."""

import asyncio
import heapq
import itertools
import socket
import statistics
import threading
import time
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from limpet.errors import LimpetError
from limpet.server import connections
from limpet.server.connections import Connection, RequestFilter, parse_proxies
from limpet.server.handlers import Resources
from limpet.server.workers import in_this_process
from served import GUARD, Counting, running, wait_for

POST = b"POST /api/sample HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
FEW = {"sampler": {"sampler": "native", "nfe": 2}, "score": False}
HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


class FakeLoop:
    """An event loop whose time a test moves; tasks run at once, to their end."""

    def __init__(self):
        self.now, self.timers, self.numbers = 0.0, [], itertools.count()

    def time(self):
        return self.now

    def call_later(self, delay, callback):
        timer = SimpleNamespace(is_cancelled=False)
        timer.cancel = lambda: setattr(timer, "is_cancelled", True)
        heapq.heappush(self.timers, (self.now + delay, next(self.numbers), timer, callback))
        return timer

    def create_task(self, coroutine, **_):
        with pytest.raises(StopIteration):
            coroutine.send(None)
        return Mock()

    def advance(self, seconds):
        ends = self.now + seconds
        while self.timers and self.timers[0][0] <= ends:
            self.now, _, timer, callback = heapq.heappop(self.timers)
            if not timer.is_cancelled:
                callback()
        self.now = ends


class FakeTransport:
    def __init__(self, address):
        self.address, self.written, self.has_ended = address, b"", False
        self.is_aborted = self.is_closed = False

    def get_extra_info(self, name):
        return {"peername": (self.address, 1), "sockname": ("127.0.0.1", 2)}.get(name)

    def write(self, data):
        self.written += data

    def write_eof(self):
        self.has_ended = True

    def abort(self):
        self.is_aborted = True

    def close(self):
        self.is_closed = True

    def is_closing(self):
        return self.is_aborted or self.is_closed

    def pause_reading(self):
        pass

    resume_reading = pause_reading


async def hello(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


class FakeServer:
    def __init__(self, proxies=()):
        hello.state = SimpleNamespace(proxies=parse_proxies(proxies))
        self.loop, self.state = FakeLoop(), ServerState()
        self.config = uvicorn.Config(hello, http=Connection, lifespan="off", **connections.SETTINGS)

    def connect(self, address="10.0.0.1"):
        connection, transport = Connection(self.config, self.state, {}, _loop=self.loop), FakeTransport(address)
        connection.connection_made(transport)
        return connection, transport


@pytest.fixture
def fake():
    return FakeServer()


@pytest.mark.parametrize("head", [b"", HEAD, "drip", "second"])
def test_a_head_has_its_time(fake, head):
    """However it arrives, and also the second one of a connection."""
    connection, transport = fake.connect()
    if head == "second":
        fake.loop.advance(9)
        connection.data_received(HEAD + b"\r\n" + HEAD)
        assert transport.written.startswith(b"HTTP/1.1 200")
    elif head and head != "drip":
        connection.data_received(head)
    for _ in range(9):
        fake.loop.advance(1)
        if head == "drip":
            connection.data_received(b"G")
    assert not transport.is_aborted
    fake.loop.advance(1)
    assert transport.is_aborted


def test_an_answer_that_nobody_reads_is_dropped(fake):
    connection, transport = fake.connect()
    connection.data_received(HEAD + b"\r\n")
    connection.pause_writing()
    fake.loop.advance(5)
    connection.resume_writing()
    connection.data_received(HEAD + b"\r\n")
    connection.pause_writing()
    connection.cycle.response_complete = False  # more is to be written
    fake.loop.advance(9)
    assert not transport.is_aborted
    fake.loop.advance(1)
    assert transport.is_aborted


def test_one_connection_too_many_of_an_address_is_refused_with_a_status(fake, monkeypatch):
    """It is told so when it has asked, and what it still sends is read, so that nothing is reset."""
    monkeypatch.setattr(connections, "CONNECTIONS_EACH", 2)
    served = [fake.connect()[1] for _ in range(2)]
    connection, refused = fake.connect()
    assert refused.written == b""
    for part in (HEAD, b"\r\n"):
        connection.data_received(part)
    assert refused.written.startswith(b"HTTP/1.1 503 ")
    assert refused.written.count(b"Retry-After: 1\r\n") == 1
    body = refused.written.partition(b"\r\n\r\n")[2]
    assert b"Content-Length: %d\r\n" % len(body) in refused.written
    assert refused.has_ended
    assert not refused.is_aborted
    fake.loop.advance(connections.LINGER_SECONDS)
    assert refused.is_aborted
    assert not any(transport.is_aborted for transport in served)
    assert not fake.connect("10.0.0.2")[1].is_aborted


def test_a_silent_connection_that_is_refused_ends_soon(fake, monkeypatch):
    monkeypatch.setattr(connections, "CONNECTIONS_EACH", 0)
    _, transport = fake.connect()
    fake.loop.advance(2 * connections.LINGER_SECONDS)
    assert transport.written.startswith(b"HTTP/1.1 503 ")
    assert transport.is_aborted


def test_a_full_server_takes_from_the_address_with_most_connections(fake, monkeypatch):
    """Of those it loses the one that has been idle for longest; an answer under way and a proxy lose none."""
    monkeypatch.setattr(connections, "CONNECTIONS", 5)
    alone = fake.connect("10.0.0.9")
    greedy = []
    for _ in range(4):
        fake.loop.advance(0.1)
        greedy.append(fake.connect("10.0.0.1"))
    greedy[0][0].data_received(HEAD + b"\r\n")
    greedy[0][0].cycle.response_complete = False
    new = fake.connect("10.0.0.2")
    lost = [connection._is_refused for connection, _ in (alone, *greedy, new)]
    assert lost == [False, False, True, False, False, False]


def test_a_proxy_has_as_many_connections_as_there_are(monkeypatch):
    monkeypatch.setattr(connections, "CONNECTIONS_EACH", 1)
    monkeypatch.setattr(connections, "CONNECTIONS", 3)
    fake = FakeServer(proxies=("127.0.0.1",))
    there = [fake.connect("127.0.0.1")[0] for _ in range(4)]
    assert [connection._is_refused for connection in there] == [False, False, False, True]


# Names

LOCAL = ["localhost", "LOCALHOST:80", "127.0.0.1", "127.0.0.1:8787", "[::1]", "[::1]:8787"]
FOREIGN = [
    "evil.example", "evil.example:8787", "localhost.evil.example", "", "localhost@evil.example", "[::2]:8787x",
    "[localhost]evil.com", "[localhost]", "127.0.0.1:evil@x", "127.0.0.1:80:80", " localhost",
]  # fmt: skip


@pytest.mark.parametrize(
    ("host", "names", "own", "foreign"),
    [
        ("127.0.0.1", (), LOCAL, [*FOREIGN, "10.0.0.1", "[::2]"]),
        ("0.0.0.0", (), [*LOCAL, "10.0.0.1:8787", "[::2]:80", socket.gethostname()], FOREIGN),
        ("0.0.0.0", ("play.example",), ["play.example", "PLAY.example:443"], FOREIGN),
        ("10.0.0.1", (), ["10.0.0.1", "10.0.0.1:80"], [*FOREIGN, "localhost", "10.0.0.2"]),
    ],
)
def test_a_server_answers_to_its_own_names(host, names, own, foreign):
    checked = RequestFilter(None, host, names, None)
    assert [name for name in own if not checked.is_own(name)] == []
    assert [name for name in foreign if checked.is_own(name)] == []


def test_a_proxy_is_an_address():
    with pytest.raises(LimpetError, match="a proxy is an IP address or a network"):
        parse_proxies(["proxy.example"])


# On the network


@contextmanager
def raw(client):
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=GUARD) as opened:
        yield opened


@pytest.fixture(scope="module")
def client():
    with running(in_this_process(Resources({"counting": Counting()})), proxies=("127.0.0.1",), client=2) as client:
        yield client


def test_a_foreign_host_is_refused_with_a_sentence(client):
    for path in ("/", "/health", "/api/models"):
        answer = client.get(path, headers={"Host": "[localhost]evil.com"})
        assert answer.status_code == 400
        assert "another name" in answer.json()["error"]


def test_two_lengths_of_one_body_close_the_connection(client):
    """A proxy in front may have read the other length, and so another request after it."""
    with raw(client) as opened:
        opened.sendall(POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HEAD + b"\r\n")
        answer = opened.makefile("rb").read()  # ends when the server closes
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1


def test_two_content_types_are_refused(client):
    for kinds in (["application/json", "text/plain"], ["text/plain", "application/json"], ["application/json"] * 2):
        headers = [("Content-Type", kind) for kind in kinds]
        assert client.post("/api/sample", content=b"{}", headers=headers).status_code == 415


def test_a_client_that_goes_in_the_middle_of_its_body_makes_no_noise(client, caplog):
    with raw(client) as opened:
        opened.sendall(POST + b"Content-Length: 100\r\n\r\n{")
    assert client.get("/health").status_code == 200
    assert not caplog.records


def waits_behind_a_proxy(client, haste, calls):
    """Seconds until each of 100 clients has its sample.

    Each has a connection of its own and comes again when it is told to. No connection is reset."""

    async def polite(i):
        headers = {"X-Forwarded-For": f"9.9.9.9, 10.0.0.{i}"}
        body = {"sampler": {"sampler": "native", "nfe": calls}, "score": False, "seed": i}
        began = time.monotonic()
        async with httpx.AsyncClient(base_url=client.base_url, timeout=GUARD, headers=headers) as one:
            while (answer := await one.post("/api/sample", json=body)).status_code == 503:
                await asyncio.sleep(int(answer.headers["Retry-After"]) / haste)
            assert answer.json()["samples"][0]["seed"] == i
            return time.monotonic() - began

    async def crowd():
        async with asyncio.timeout(GUARD):
            return await asyncio.gather(*(polite(i) for i in range(100)))

    waits = asyncio.run(crowd())
    wait_for(lambda: not client.queue.jobs, "the end of the last request")
    return waits


def test_one_hundred_polite_clients_behind_one_proxy_are_all_served(client):
    assert len(waits_behind_a_proxy(client, haste=20, calls=2)) == 100


@pytest.mark.long
def test_no_polite_client_behind_a_proxy_waits_four_times_as_long_as_the_median(client):
    waits = waits_behind_a_proxy(client, haste=1, calls=60)
    longest, median = max(waits), statistics.median(waits)
    print(f"the longest wait {longest:.1f} s, the median {median:.1f} s, ratio {longest / median:.2f}")
    assert longest <= 4 * median


def test_a_client_that_is_no_trusted_proxy_is_counted_by_its_own_address():
    """Whatever it writes into X-Forwarded-For."""
    gate = threading.Event()
    worker = in_this_process(Resources({"counting": Counting(lambda: gate.wait(GUARD))}))
    with running(worker, client=1) as client:
        send = partial(httpx.post, f"{client.base_url}/api/sample", json=FEW, timeout=GUARD)
        thread = threading.Thread(target=send, kwargs={"headers": {"X-Forwarded-For": "10.0.0.1"}})
        thread.start()
        wait_for(lambda: client.queue.jobs, "the first request")
        assert send(headers={"X-Forwarded-For": "10.0.0.2"}).status_code == 429
        gate.set()
        thread.join()
