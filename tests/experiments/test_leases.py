"""Leases: several runners on one store compute no unit twice, and the leases of dead runners are taken over."""

import multiprocessing
import subprocess
import sys
import uuid
from collections import Counter

import pytest

from limpet.experiments import leases
from limpet.experiments.leases import Leases
from limpet.experiments.store import Store, process_space

KEY, OTHER = "a" * 40, "b" * 40
FORK = multiprocessing.get_context("fork")


@pytest.fixture(params=["folder", "memory"])
def store(request, tmp_path):
    return Store(tmp_path if request.param == "folder" else f"memory://{uuid.uuid4().hex}")


@pytest.fixture
def clock(monkeypatch):
    """The monotonic clock of leases, in seconds, which a test sets."""
    now = [0.0]
    monkeypatch.setattr(leases.time, "monotonic", lambda: now[0])
    return now


def dead_runner():
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    return f"{process_space()}-{child.pid}"


def test_only_one_worker_has_a_lease_until_it_gives_it_up(store):
    first, second = Leases(store), Leases(store)
    assert first.acquire([KEY])
    assert not second.acquire([KEY])
    assert not second.acquire([OTHER, KEY])
    assert first.acquire([OTHER])  # the second worker gave back what it had of the two
    first.release([KEY, OTHER])
    assert second.acquire([OTHER, KEY])
    second.release([OTHER, KEY])
    assert store.content(f"leases/{KEY}") is store.content(f"leases/{OTHER}") is None


def test_the_lease_of_a_dead_process_is_taken_over_at_once(store):
    store.create(f"leases/{KEY}", f"{dead_runner()} worker 0".encode())
    assert Leases(store).acquire([KEY])


def test_a_lease_that_does_not_change_is_taken_over_after_its_expiry(store, clock):
    """The owner is on another machine, where nobody here can tell whether it lives."""
    store.create(f"leases/{KEY}", b"elsewhere-1 worker 0")
    waiting = Leases(store)
    assert not waiting.acquire([KEY])
    clock[0] = leases.EXPIRY - 1
    store.overwrite(f"leases/{KEY}", b"elsewhere-1 worker 1")  # it was renewed
    assert not waiting.acquire([KEY])
    clock[0] += leases.EXPIRY - 1
    assert not waiting.acquire([KEY])
    clock[0] += 2
    assert waiting.acquire([KEY])


def test_a_worker_whose_lease_was_taken_over_leaves_it_alone(store, clock):
    slow, other = Leases(store), Leases(store)
    assert slow.acquire([KEY])
    assert not other.acquire([KEY])
    clock[0] = leases.EXPIRY + 1
    assert other.acquire([KEY])
    slow.release([KEY])
    assert not Leases(store).acquire([KEY])


def test_leases_are_renewed_while_they_are_held(store, monkeypatch):
    renewed = multiprocessing.Event()
    monkeypatch.setattr(leases, "RENEWAL", 0.001)
    overwrite = Store.overwrite
    monkeypatch.setattr(Store, "overwrite", lambda *arguments: (overwrite(*arguments), renewed.set()))
    holder = Leases(store)
    assert holder.acquire([KEY])
    before = store.content(f"leases/{KEY}")
    assert renewed.wait(600)
    assert store.content(f"leases/{KEY}") != before
    holder.release([KEY])
    assert store.content(f"leases/{KEY}") is None


def compete(path, barrier, results, keys):
    """Work through all units as a runner does; report those that this one computed."""
    store = Store(path)
    own, left, computed = Leases(store), list(keys), []
    barrier.wait()
    while left:
        key = left.pop(0)
        if not own.acquire([key]):
            left.append(key)
            continue
        if not store.exists(f"done/{key}"):
            computed.append(key)
            store.overwrite(f"done/{key}", b"x")
        own.release([key])
    results.put(computed)


def test_eight_runners_compute_each_unit_once_though_dead_ones_left_leases(tmp_path):
    keys = [f"{i:040x}" for i in range(100)]
    store, dead = Store(tmp_path), dead_runner()
    for key in keys[::2]:
        store.create(f"leases/{key}", f"{dead} worker 0".encode())
    barrier, results = FORK.Barrier(8), FORK.SimpleQueue()
    runners = [FORK.Process(target=compete, args=(tmp_path, barrier, results, keys)) for _ in range(8)]
    for runner in runners:
        runner.start()
    computed = Counter(key for _ in runners for key in results.get())
    for runner in runners:
        runner.join()
    assert computed.keys() == set(keys)
    assert computed.total() <= 1.02 * len(keys)
