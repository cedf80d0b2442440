"""The playground under attack: work that hangs, clients that dawdle, links and names from elsewhere, and signals."""

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
import torch

import limpet
from limpet import CRS, Native, samplers
from limpet.diffusion.selection import select
from limpet.errors import LimpetError
from limpet.server import connections, workers
from limpet.server.handlers import Stock
from limpet.server.http import application
from limpet.server.scheduler import Limits

sys.path.append(str(Path(__file__).parents[2] / "tools"))
import served
from pictures import serving

EVENTS = {"Accept": "text/event-stream"}
FEW = {"arm": {"sampler": "native", "nfe": 3}}
HUGE = 2**31 - 1


@contextmanager
def server(hire=None, host="127.0.0.1", names=(), **limits):
    app = application(hire or workers.process(served.moody), Limits(**limits), host, names)
    with serving(app) as address, httpx.Client(base_url=address, timeout=30) as client:
        client.queue = app.state.queue
        yield client


@pytest.fixture(scope="module")
def words():
    return limpet.load("exact:words")


# Parameters

WHOLE = [
    (name, param.name) for name, kind in samplers.available().items() for param in samplers.params(kind).values()
    if param.kind is int and param.name != "nfe"
]  # fmt: skip


def test_more_than_a_path_has_is_all_of_it():
    """Every whole number of every sampler: as large as can be, it is brought down, and means the same."""
    assert ("crs", "spacing") in WHOLE
    model = limpet.load("exact:chain")
    for name, param in WHOLE:
        kind = samplers.find(name)
        changes = (
            {"corrections": {"corrections": 4}}.get(param, {param: HUGE}) if name.startswith("gidd") else {param: HUGE}
        )
        large = kind(nfe=6, **changes)
        small = large.fitted(model.length, model.vocab_size)
        assert getattr(small, param) <= max(model.length + 6, model.vocab_size)
        if kind.needs_given:
            continue
        one, other = (limpet.sample(model, sampler, 2, 3) for sampler in (large, small))
        assert torch.equal(one.tokens, other.tokens), (name, param)


def test_what_fits_is_left_alone():
    sampler = CRS(nfe=6, spacing=3, horizon=2, count=4, top_k=7)
    assert sampler.fitted(10, 12) is sampler
    assert CRS(nfe=6, spacing=99, top_k=99).fitted(10, 12) == CRS(nfe=6, spacing=16, top_k=12)


@pytest.mark.parametrize("spacing", [160, 10**8])
def test_a_huge_spacing_selects_one_position_at_once(spacing):
    deficit = torch.rand(2, 160, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    begun = time.monotonic()
    chosen = select(deficit, torch.ones(2, 160, dtype=torch.bool), 160, 160.0, spacing)
    assert time.monotonic() - begun < 2
    assert chosen.sum(-1).tolist() == [1, 1]
    assert torch.equal(chosen.int().argmax(-1), deficit.argmin(-1))


def test_one_request_with_huge_knobs_is_soon_done(words):
    """The request that held a worker for a quarter of an hour."""
    with server(workers.here(Stock({"exact:words": words}))) as client:
        begun = time.monotonic()
        arm = {"sampler": "crs", "nfe": 8, "spacing": 10**8, "count": HUGE, "horizon": HUGE}
        (row,) = client.post("/api/sample", json={"arm": arm, "score": False}).json()["samples"]
        assert time.monotonic() - begun < 5
        assert row["sampler"] | {"spacing": 168, "count": 168, "horizon": 168} == row["sampler"]
        inner = {"sampler": "gibbs", "nfe": 8, "predictor": "crs,spacing=100000000"}
        assert client.post("/api/sample", json={"arm": inner, "score": False}).status_code == 200
        assert time.monotonic() - begun < 5


# Work in a process that can be ended


@pytest.fixture(scope="module")
def moody():
    with server(seconds=2) as client:
        yield client


def ask(client, mood="", **more):
    return client.post("/api/sample", json={**FEW, "prompt": mood, **more})


def test_a_process_answers_as_the_library_does(moody):
    model = limpet.load("exact:verses")
    row = ask(moody, seed=5).json()["samples"][0]
    assert row["text"] == limpet.sample(model, Native(nfe=3), 1, 5).texts[0]
    assert ask(moody, "Z").status_code == 422  # no letter of its own
    told = moody.post("/api/sample", json=FEW, headers=EVENTS).text
    assert [line for line in told.splitlines() if line.startswith("event")] == [
        "event: begin", *["event: frame"] * 4, "event: end"
    ]  # fmt: skip


def test_a_call_that_never_ends_is_ended(moody):
    """The time limit holds inside a step; the next request is served by another process."""
    begun = time.monotonic()
    answer = ask(moody, "h")
    assert answer.status_code == 422
    assert "longer than the 2 s" in answer.json()["error"]
    assert time.monotonic() - begun < 5
    assert ask(moody).status_code == 200


def test_a_worker_that_breaks_or_dies_harms_one_request_alone(moody):
    for mood in ("b", "d"):
        answer = ask(moody, mood)
        assert answer.status_code == 500
        assert "wire" not in answer.text
        assert ask(moody).status_code == 200


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="this system does not tell what a process holds")
def test_a_worker_that_has_grown_is_replaced(moody, monkeypatch):
    (hand,) = moody.queue.hands
    assert ask(moody).status_code == 200
    first = hand.pid
    assert ask(moody).status_code == 200
    assert hand.pid == first
    monkeypatch.setattr(workers, "GROWN", -(1 << 40))
    assert ask(moody).status_code == 200
    assert hand.pid != first
    monkeypatch.undo()
    assert ask(moody).status_code == 200


def test_a_client_that_leaves_a_hanging_call_frees_the_worker(moody):
    with pytest.raises(httpx.ReadTimeout):
        moody.post("/api/sample", json={**FEW, "prompt": "h"}, timeout=0.5)
    begun = time.monotonic()
    while moody.queue.inside and time.monotonic() < begun + 5:
        time.sleep(0.02)
    assert not moody.queue.inside
    assert time.monotonic() - begun < 1.9  # within the grace, before its own time was over


def test_readiness_knows_a_stuck_worker_and_one_that_starts(monkeypatch):
    monkeypatch.setattr("limpet.server.scheduler.SILENCE", 0.3)
    with server(seconds=1.5) as client:
        assert client.get("/ready").json() == {"status": "ready"}
        with httpx.Client(base_url=client.base_url, timeout=30) as other:
            thread = threading.Thread(target=ask, args=(other, "h"))
            thread.start()
            seen = []
            while thread.is_alive():
                answer = client.get("/ready")
                assert (answer.status_code == 200) == (answer.json()["status"] == "ready")
                seen.append(answer.json()["status"])
                time.sleep(0.05)
            thread.join()
        assert "stuck" in seen
        assert client.get("/ready").json() == {"status": "starting"}  # the process that takes its place
        assert client.get("/health").status_code == 200
        assert ask(client).status_code == 200
        assert client.get("/ready").json() == {"status": "ready"}


def test_a_stock_that_cannot_be_opened_is_a_sentence():
    with pytest.raises(LimpetError, match="no such model"):
        application(workers.process(served.unloadable))
    with pytest.raises(LimpetError, match="log says what"):
        application(workers.process(served.strange))


# Clients


def test_a_client_has_its_share_of_the_places_and_they_are_served_in_turn():
    """Two may wait or run for one address; another address is served although they are there."""
    with server(client=2, queue=8, seconds=20) as client, httpx.Client(base_url=client.base_url, timeout=30) as many:
        slow = {"arm": {"sampler": "native", "nfe": 12}, "prompt": "s"}
        order = []

        def send(name, headers):
            order.append((name, many.post("/api/sample", json=slow, headers=headers).status_code))

        # uvicorn takes a client's address from a proxy on this machine.
        crowd = [threading.Thread(target=send, args=("a", {"X-Forwarded-For": "10.0.0.1"})) for _ in range(2)]
        for thread in crowd:
            thread.start()
            time.sleep(0.2)
        refused = many.post("/api/sample", json=slow, headers={"X-Forwarded-For": "10.0.0.1"})
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        good = threading.Thread(target=send, args=("b", {"X-Forwarded-For": "10.0.0.2"}))
        good.start()
        for thread in (*crowd, good):
            thread.join()
        assert order == [("a", 200), ("b", 200), ("a", 200)]


@contextmanager
def raw(client):
    with socket.create_connection((client.base_url.host, client.base_url.port)) as opened:
        opened.settimeout(10)
        yield opened


def ended(opened, seconds):
    """Whether the server hangs up within some seconds."""
    opened.settimeout(seconds)
    try:
        while opened.recv(65536):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


@pytest.fixture
def here(words, monkeypatch):
    monkeypatch.setattr(connections, "HEAD", 0.5)
    monkeypatch.setattr(connections, "UNREAD", 0.5)
    with server(workers.here(Stock({"exact:words": words}))) as client:
        yield client


@pytest.mark.parametrize("head", [b"", b"GET / HTTP/1.1\r\nHost: local"])
def test_a_head_that_does_not_come_is_not_waited_for(here, head):
    with raw(here) as opened:
        opened.sendall(head)
        assert ended(opened, 3)


def test_a_head_that_drips_is_not_waited_for(here):
    with raw(here) as opened:
        begun = time.monotonic()
        try:
            for byte in b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100:
                opened.sendall(bytes([byte]))
                time.sleep(0.05)
        except ConnectionError:
            pass
        assert time.monotonic() - begun < 3


def test_a_second_head_on_a_connection_has_its_time_too(here):
    with raw(here) as opened:
        opened.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /health HTTP")
        assert ended(opened, 3)


def test_an_answer_that_nobody_reads_is_dropped(here):
    """Many pages asked for on one connection, and none of them read."""
    with raw(here) as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        begun = time.monotonic()
        with suppress(ConnectionError, TimeoutError):
            while time.monotonic() < begun + 9:
                opened.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
        assert time.monotonic() - begun < 8
        begun = time.monotonic()
        while connections.Connection._each and time.monotonic() < begun + 3:
            time.sleep(0.05)
        assert not connections.Connection._each
    assert here.get("/health").status_code == 200


def test_an_address_has_so_many_connections(here, monkeypatch):
    monkeypatch.setattr(connections, "EACH", 4)
    monkeypatch.setattr(connections, "HEAD", 5)
    opened = [socket.create_connection((here.base_url.host, here.base_url.port)) for _ in range(6)]
    assert [ended(one, 0.3) for one in opened].count(True) == 2
    for one in opened:
        one.close()
    time.sleep(0.2)
    assert here.get("/health").status_code == 200


def test_a_client_that_goes_in_the_middle_of_its_body_makes_no_noise(here, caplog):
    with raw(here) as opened:
        opened.sendall(b"POST /api/sample HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                       b"Content-Length: 100\r\n\r\n{")  # fmt: skip
    time.sleep(0.3)
    assert here.get("/health").status_code == 200
    assert not caplog.records


# Names and pages from elsewhere

LOCAL = ["localhost", "LOCALHOST:80", "127.0.0.1", "127.0.0.1:8787", "[::1]", "[::1]:8787"]
STRANGE = ["evil.example", "evil.example:8787", "localhost.evil.example", "", "localhost@evil.example", "[::2]:8787"]


@pytest.mark.parametrize(
    ("host", "names", "good", "bad"),
    [
        ("127.0.0.1", (), LOCAL, [*STRANGE, "10.0.0.1"]),
        ("0.0.0.0", (), [*LOCAL, "10.0.0.1:8787", socket.gethostname()], STRANGE[:5]),
        ("0.0.0.0", ("play.example",), ["play.example", "PLAY.example:443"], STRANGE[:5]),
        ("10.0.0.1", (), ["10.0.0.1", "10.0.0.1:80"], [*STRANGE, "localhost", "10.0.0.2"]),
    ],
)
def test_a_server_answers_to_its_own_names(host, names, good, bad):
    named = connections.Named(None, host, names, None)
    assert [name for name in good if not named.has(name)] == []
    assert [name for name in bad if named.has(name)] == []


def test_a_foreign_name_is_a_sentence(here):
    for path in ("/", "/health", "/api/models"):
        answer = here.get(path, headers={"Host": "evil.example"})
        assert answer.status_code == 400
        assert "another name" in answer.json()["error"]


def test_the_policy_for_scripts_stands_in_the_header_too(here):
    home = here.get("/")
    policy = home.headers["content-security-policy"]
    assert "script-src 'sha256-" in policy
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    for path in ("/health", "/nothing", "/api/models"):
        assert here.get(path).headers["content-security-policy"].startswith("default-src 'none'")


# The end


@pytest.fixture
def started():
    """Starts `limpet serve` as a process of its own, and gives its address; none outlives the test."""
    begun = []

    def start(*arguments):
        command = [sys.executable, "-m", "limpet.cli.main", "serve", "--port", "0", "--judge", "none", *arguments]
        wide = {**os.environ, "COLUMNS": "500"}
        begun.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=wide))
        line = begun[-1].stderr.readline()
        assert "http://" in line, line
        return begun[-1], line.split()[-1]

    yield start
    for made in begun:
        made.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything_quietly_and_whoever_waits_is_told(number, started, tmp_path):
    """With one request in a call that never ends, one stream and one plain request behind it."""
    factory = tmp_path / "slow.py"
    factory.write_text("import sys\nsys.path.append(" + repr(str(Path(__file__).parent)) + ")\n"
                       "from served import Moody\n\n\ndef make(folder=None, *, device=None, precision=None):\n"
                       "    return Moody()\n")  # fmt: skip
    made, address = started("--models", f"{factory}:make")
    told = {}

    def send(name, headers, prompt):
        try:
            answer = httpx.post(f"{address}api/sample", json={**FEW, "prompt": prompt}, headers=headers, timeout=30)
            told[name] = answer.status_code, answer.text
        except httpx.HTTPError as error:
            told[name] = None, repr(error)

    clients = []
    for client in (("runs", {}, "h"), ("stream", EVENTS, ""), ("plain", {}, "")):
        clients.append(threading.Thread(target=send, args=client))
        clients[-1].start()
        time.sleep(0.5)
    children = [int(pid) for pid in Path(f"/proc/{made.pid}/task/{made.pid}/children").read_text().split()]
    begun = time.monotonic()
    made.send_signal(number)
    assert made.wait(10) == 0
    assert time.monotonic() - begun < 5
    for client in clients:
        client.join()
    assert told["runs"][0] == told["plain"][0] == 503
    assert "stopping" in json.loads(told["plain"][1])["error"]
    assert told["stream"][0] == 200
    assert "event: error" in told["stream"][1]
    assert made.stderr.read() == ""
    assert children
    time.sleep(0.2)
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists() and "Z" not in _state(pid)]


def _state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


# Who goes first


@contextmanager
def from_address(address, base_url):
    transport = httpx.HTTPTransport(local_address=address)
    with httpx.Client(base_url=base_url, timeout=30, transport=transport) as made:
        yield made


@pytest.fixture(scope="module")
def two():
    """Clients of one server, from addresses of their own."""
    with server(seconds=4) as one, from_address("127.0.0.2", one.base_url) as other:
        yield one, other


LONG = {"arm": {"sampler": "native", "nfe": 15}, "prompt": "s"}  # a second and a half


@contextmanager
def under_way(client, asked):
    """Another client's request, begun; gives what there is of its answer."""
    told = []

    def send():
        with client.stream("POST", "/api/sample", json=asked, headers=EVENTS) as answer:
            for line in answer.iter_lines():
                told.append(line)

    thread = threading.Thread(target=send)
    thread.start()
    while not told:
        time.sleep(0.01)
    yield told
    thread.join()


def ended_well(told):
    return any("event: end" in line for line in told)


def alone(client):
    """All that is told of the long request when nothing is in its way."""
    with under_way(client, LONG) as told:
        pass
    assert ended_well(told)
    return told


def test_a_smaller_request_of_another_client_goes_before_a_larger(two):
    """Between two of its calls, and neither answer is another for it."""
    one, other = two
    small = ask(other).json()
    with under_way(one, LONG) as told:
        assert ask(other).json() == small
        assert not ended_well(told)
    assert told == alone(one)


def test_a_client_does_not_go_before_itself(two):
    with under_way(two[0], LONG) as told, from_address("127.0.0.1", two[0].base_url) as same:
        assert ask(same).status_code == 200
        assert ended_well(told)


def test_what_is_not_smaller_waits(two):
    with under_way(two[0], LONG) as told:
        assert two[1].post("/api/sample", json={**LONG, "prompt": "a"}).status_code == 200
        assert ended_well(told)


def test_who_was_served_much_more_does_not_go_first(two, monkeypatch):
    monkeypatch.setattr("limpet.server.scheduler.SHARE", 0.0)
    assert ask(two[1]).status_code == 200
    with under_way(two[0], LONG) as told:
        assert ask(two[1]).status_code == 200
        assert ended_well(told)


@pytest.mark.parametrize(("mood", "status"), [("d", 500), ("h", 422)])
def test_what_ends_the_process_between_two_calls_harms_itself_alone(two, mood, status):
    """The larger request begins again in another process and tells nothing twice; its clock stood still meanwhile."""
    with under_way(two[0], LONG) as told:
        assert ask(two[1], mood).status_code == status
        assert not ended_well(told)
    assert told == alone(two[0])


def test_a_full_queue_has_room_for_whoever_has_less_in_it():
    with server(queue=3, client=4) as one, from_address("127.0.0.2", one.base_url) as other:
        told = []
        greedy = [threading.Thread(target=lambda: told.append(ask(one, "s").status_code)) for _ in range(4)]
        for thread in greedy:
            thread.start()
        while len(one.queue.inside) < 4:
            time.sleep(0.01)
        assert ask(one).status_code == 429
        assert ask(other).status_code == 200
        for thread in greedy:
            thread.join()
        assert sorted(told) == [200, 200, 200, 429]


def test_one_connection_too_many_is_in_nobodys_way(here, monkeypatch):
    """It costs the address that has most of them the one that dawdled longest."""
    monkeypatch.setattr(connections, "CONNECTIONS", 6)
    monkeypatch.setattr(connections, "HEAD", 5)
    assert here.get("/health").status_code == 200  # an old connection, and alone at its address
    port = here.base_url.port
    opened = [
        socket.create_connection(("127.0.0.1", port), source_address=("127.0.1.1", 0)) for _ in range(8)
    ]  # fmt: skip
    assert here.get("/health").status_code == 200
    assert [ended(one, 0.3) for one in opened] == [True] * 3 + [False] * 5
    for one in opened:
        one.close()


# All at once


def memory(pid):
    """Bytes that a process holds, and those that it started."""
    held = 0
    for one in (str(pid), *Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        with suppress(OSError):  # it has just ended
            held += int(Path(f"/proc/{one}/statm").read_text().split()[1]) * 4096
    return held


@pytest.mark.skipif(sys.platform != "linux", reason="clients need addresses of their own on this machine")
@pytest.mark.parametrize(
    ("clients", "rounds", "seconds"), [(60, 2, 2), pytest.param(300, 4, 30, marks=pytest.mark.long)]
)
def test_a_crowd_of_hostile_clients_is_in_nobodys_way(started, clients, rounds, seconds):
    """A good client gets its answer within twice the time that it takes alone, memory stays, and a signal in the middle
    of it all ends everything. Alone and in the crowd are measured in turns, so that a noisy machine is noisy for both;
    the crowd runs at the lowest priority, so that what it takes itself is what the server and the client leave."""
    made, address = started("--models", "exact:verses")
    crowd = [sys.executable, str(Path(__file__).parent / "crowd.py"), str(httpx.URL(address).port), str(clients)]
    alone, beside, held = [], [], []
    with from_address("127.0.0.2", address) as client:

        def asking(seconds):
            ends, took = time.monotonic() + seconds, []
            while time.monotonic() < ends:
                begun = time.monotonic()
                answer = client.post("/api/sample", json={"arm": {"sampler": "native", "nfe": 40}})
                assert answer.status_code == 200, answer.text
                took.append(time.monotonic() - begun)
                held.append(memory(made.pid))
            return took

        asking(1)
        idle = held[-1]
        for last in range(rounds - 1, -1, -1):
            alone += asking(seconds / 3)
            attack = subprocess.Popen(crowd, stdout=subprocess.PIPE, text=True)
            try:
                assert attack.stdout.readline() == "here\n"
                beside += asking(seconds)
                begun = time.monotonic()
                if not last:
                    made.send_signal(signal.SIGTERM)
                    assert made.wait(10) == 0
                    assert time.monotonic() - begun < 5
            finally:
                attack.kill()
                attack.wait()
    usual, crowded, more = *map(statistics.median, (alone, beside)), max(held) - idle
    print(f"alone {usual:.3f} s, in the crowd {crowded:.3f} s, {more / 2**20:+.0f} MiB")
    assert made.stderr.read() == ""
    assert more < 256 * 2**20
    assert crowded < 2 * usual
