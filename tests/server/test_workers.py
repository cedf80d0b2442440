"""Worker processes: work that hangs, breaks or dies, extreme parameters, signals, and a crowd of hostile clients."""

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import torch

import limpet
from limpet import CRS, Native, samplers
from limpet.errors import LimpetError
from limpet.server import workers
from limpet.server.handlers import Resources
from limpet.server.http import application
from served import GUARD, Clock, from_address, moody, refused, running, wait_for
from served import fail as broken

EVENTS = {"Accept": "text/event-stream"}
FEW = {"sampler": {"sampler": "native", "nfe": 3}}
HUGE = 2**31 - 1
HELPERS = Path(__file__).parents[1] / "helpers"


# Parameters

WHOLE = [
    (name, param.name) for name, kind in samplers.available().items() for param in samplers.params(kind).values()
    if param.kind is int and param.name not in ("nfe", "refresh")
]  # fmt: skip


def test_huge_whole_numbers_are_lowered_and_mean_the_same():
    """Every whole number of every sampler."""
    assert ("crs", "spacing") in WHOLE
    model = limpet.load("exact:chain")
    for name, param in WHOLE:
        kind = samplers.find(name)
        large = kind(nfe=6, **({"corrections": 4} if param == "corrections" else {param: HUGE}))
        small = large.clamped(model.length, model.vocab_size)
        assert getattr(small, param) <= max(model.length + 6, model.vocab_size)
        if kind.needs_fixed:
            continue
        one, other = (limpet.sample(model, sampler, 2, 3) for sampler in (large, small))
        assert torch.equal(one.tokens, other.tokens), (name, param)


def test_what_fits_is_left_alone():
    sampler = CRS(nfe=6, spacing=3, horizon=2, count=4, top_k=7)
    assert sampler.clamped(10, 12) is sampler
    assert CRS(nfe=6, spacing=99, top_k=99).clamped(10, 12) == CRS(nfe=6, spacing=16, top_k=12)


def test_a_request_with_huge_parameters_is_answered_with_what_was_used():
    with running(workers.in_this_process(Resources({"exact:words": limpet.load("exact:words")}))) as client:
        huge = {"sampler": "crs", "nfe": 8, "spacing": 10**8, "count": HUGE, "horizon": HUGE}
        (row,) = client.post("/api/sample", json={"sampler": huge, "score": False}).json()["samples"]
        assert row["sampler"] | {"spacing": 168, "count": 168, "horizon": 168} == row["sampler"]
        nested = {"sampler": "gibbs", "nfe": 8, "predictor": "crs,spacing=100000000"}
        assert client.post("/api/sample", json={"sampler": nested, "score": False}).status_code == 200


# Processes


@pytest.fixture(scope="module")
def client():
    with running(workers.in_processes(moody)) as client:
        yield client


def ask(client, letter="", **more):
    return client.post("/api/sample", json={**FEW, "prompt": letter, **more})


def test_a_process_answers_as_the_library_does(client):
    row = ask(client, seed=5).json()["samples"][0]
    assert row["text"] == limpet.sample(limpet.load("exact:verses"), Native(nfe=3), 1, 5).texts[0]
    assert ask(client, "Z").status_code == 422  # not in its alphabet
    stream = client.post("/api/sample", json=FEW, headers=EVENTS).text
    assert [line for line in stream.splitlines() if line.startswith("event")] == [
        "event: begin", *["event: frame"] * 4, "event: end"
    ]  # fmt: skip


def hanging(client):
    """A request in a network call that never ends, as a thread; its answer is in the list."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(httpx.post(
        f"{client.base_url}/api/sample", json={**FEW, "prompt": "h"}, timeout=GUARD)))  # fmt: skip
    thread.start()
    wait_for(lambda: any(job.began < float("inf") for job in client.queue.jobs), "the begin of the work")
    return thread, answers


def test_a_call_that_never_ends_is_ended(client, monkeypatch):
    """The time limit holds within a call; the server says that it is stuck, and starts another process."""
    clock = Clock(monkeypatch)
    thread, answers = hanging(client)
    clock.time += 100
    assert client.get("/ready").json() == {"status": "stuck"}
    clock.time += 100
    thread.join(GUARD)
    assert answers[0].status_code == 422
    assert "longer than the limit of 120 s" in answers[0].json()["error"]
    assert ask(client).status_code == 200
    assert client.get("/ready").json() == {"status": "ready"}


def test_a_client_that_leaves_a_hanging_call_frees_the_worker(client):
    body = json.dumps({**FEW, "prompt": "h"}).encode()
    head = (
        "POST /api/sample HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    with socket.create_connection((client.base_url.host, client.base_url.port)) as opened:
        opened.sendall((head % len(body)).encode() + body)
        wait_for(lambda: any(job.began < float("inf") for job in client.queue.jobs), "the begin of the work")
    wait_for(lambda: not client.queue.jobs, "the end of the work")
    assert ask(client).status_code == 200


def test_a_worker_that_fails_or_dies_harms_one_request_alone(client):
    for letter in ("b", "d"):
        answer = ask(client, letter)
        assert answer.status_code == 500
        assert "secret" not in answer.text
        assert ask(client).status_code == 200


@pytest.mark.parametrize("headers", [{}, EVENTS], ids=["json", "events"])
def test_a_worker_that_was_killed_while_idle_costs_no_request(client, headers):
    assert ask(client).status_code == 200
    (worker,) = client.queue.workers
    first = worker.pid
    os.kill(first, signal.SIGKILL)
    worker._process.join()
    answer = client.post("/api/sample", json=FEW, headers=headers)
    assert answer.status_code == 200
    assert "event: end" in answer.text or not headers
    assert worker.pid != first


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="this system does not say how much a process holds")
def test_a_worker_that_has_grown_is_replaced(client, monkeypatch):
    (worker,) = client.queue.workers
    assert ask(client).status_code == 200
    first = worker.pid
    assert ask(client).status_code == 200
    assert worker.pid == first
    monkeypatch.setattr(workers, "MEMORY_GROWTH", -(1 << 40))
    assert ask(client).status_code == 200
    wait_for(lambda: worker.pid != first, "the replacement")
    monkeypatch.undo()
    assert ask(client).status_code == 200


def test_resources_that_cannot_be_loaded_are_a_sentence():
    with pytest.raises(LimpetError, match="no such model"):
        application(workers.in_processes(refused))
    with pytest.raises(LimpetError, match="log says why"):
        application(workers.in_processes(broken))


# The command


@pytest.fixture
def started():
    """Starts `limpet serve` as a process of its own; gives the process and its address. None outlives the test."""
    processes = []

    def start(*arguments):
        command = [sys.executable, "-m", "limpet.cli.main", "serve", "--port", "0", "--judge", "none", *arguments]
        wide = {**os.environ, "COLUMNS": "500"}
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=wide))
        line = processes[-1].stderr.readline()
        assert "http://" in line, line
        return processes[-1], line.split()[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="the children of a process are read from /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything_quietly_and_answers_all(number, started, tmp_path, monkeypatch):
    """With one request in a call that never ends, one stream and one plain request behind it."""
    mark, factory = tmp_path / "hangs", tmp_path / "slow.py"
    monkeypatch.setenv("LIMPET_TEST_HANGS", str(mark))
    factory.write_text(f"import sys\nsys.path.append({str(HELPERS)!r})\nfrom served import Moody\n\n\n"
                       "def make(folder=None, *, device=None, precision=None):\n    return Moody()\n")  # fmt: skip
    process, address = started("--models", f"{factory}:make", "--limit.queue", "2")
    answers, streamed = {}, threading.Event()

    def send(name, headers, prompt):
        body = {**FEW, "prompt": prompt}
        with httpx.stream("POST", f"{address}api/sample", json=body, headers=headers, timeout=GUARD) as answer:
            lines = []
            for line in answer.iter_lines():
                lines.append(line)
                streamed.set()
            answers[name] = answer.status_code, "\n".join(lines)

    def start(*arguments):
        thread = threading.Thread(target=send, args=arguments)
        thread.start()
        return thread

    threads = [start("running", {}, "h")]
    wait_for(mark.exists, "the call that hangs")
    threads.append(start("stream", EVENTS, ""))
    assert streamed.wait(GUARD)
    threads.append(start("plain", {}, ""))
    wait_for(lambda: httpx.get(f"{address}ready").json() == {"status": "full"}, "the arrival of all requests")
    workers_of = children(process.pid)
    process.send_signal(number)
    assert process.wait(GUARD) == 0
    for thread in threads:
        thread.join()
    assert answers["running"][0] == answers["plain"][0] == 503
    assert "stopping" in json.loads(answers["plain"][1])["error"]
    assert answers["stream"][0] == 200
    assert "event: queued" in answers["stream"][1]
    assert "event: error" in answers["stream"][1]
    assert process.stderr.read() == ""
    assert workers_of
    wait_for(lambda: not any(map(is_running, workers_of)), "the end of the workers")


# Hostile clients


def memory(pid):
    """Bytes that a process and its children hold."""
    held = 0
    for one in (str(pid), *children(pid)):
        with suppress(OSError):  # it has just ended
            held += int(Path(f"/proc/{one}/statm").read_text().split()[1]) * 4096
    return held


def ask_politely(client):
    """Ask, and ask again when told to, until there is an answer; how long that took."""
    began = time.monotonic()
    while True:
        answer = client.post("/api/sample", json={"sampler": {"sampler": "native", "nfe": 40}})
        took = time.monotonic() - began
        if answer.status_code == 200:
            return took
        assert answer.status_code == 503, answer.text
        assert took < GUARD
        time.sleep(int(answer.headers["Retry-After"]))


@pytest.mark.skipif(sys.platform != "linux", reason="clients need addresses of their own on this machine")
@pytest.mark.parametrize(
    ("clients", "rounds", "requests"), [(60, 1, 5), pytest.param(300, 4, 20, marks=pytest.mark.long)]
)
def test_hostile_clients_are_in_nobodys_way(started, clients, rounds, requests):
    """A polite client is served, memory is bounded, and a signal in the middle of it all ends everything.

    The long test also bounds the ratio of its times in the crowd and alone, measured by turns, so that other work on
    the machine slows both."""
    server, address = started("--models", "exact:verses")
    command = [sys.executable, str(HELPERS / "crowd.py"), str(httpx.URL(address).port), str(clients)]
    alone, beside, held = [], [], []
    with from_address("127.0.0.2", address) as client:
        ask_politely(client)
        before = memory(server.pid)
        for last in range(rounds - 1, -1, -1):
            alone += [ask_politely(client) for _ in range(requests)]
            crowd = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            try:
                assert crowd.stdout.readline() == "here\n"
                for _ in range(requests):
                    beside.append(ask_politely(client))
                    held.append(memory(server.pid))
                if not last:
                    server.send_signal(signal.SIGTERM)
                    assert server.wait(GUARD) == 0
            finally:
                crowd.kill()
                crowd.wait()
                crowd.stdout.close()
    ratio, growth = statistics.median(beside) / statistics.median(alone), max(held) - before
    print(f"{ratio:.2f} times as long as alone, {growth / 2**20:+.0f} MiB")
    assert server.stderr.read() == ""
    assert growth < 256 * 2**20
    assert rounds == 1 or ratio < 2
