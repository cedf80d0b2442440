"""The queue of requests: limits, a fair order, time, and refused clients that come again. A fake clock, no server."""

import asyncio
import heapq
import statistics
import threading

import pytest

from limpet.errors import LimpetError
from limpet.server.scheduler import KEPT_SECONDS, ClientLeft, Limits, Queue, Refusal, WorkerDied
from served import GUARD, Clock, wait_for


class StepWorker:
    """Ends the current job at every permit, one second later by the fake clock."""

    models, is_ready = {}, True

    def __init__(self, clock):
        self.clock, self.started, self.permits = clock, [], threading.Semaphore(0)
        self.prepare_errors, self.run_errors = [], []

    def prepare(self, check):
        if self.prepare_errors:
            raise self.prepare_errors.pop()

    def run(self, kind, request, report, check):
        self.started.append(request)
        if self.run_errors:
            raise self.run_errors.pop()
        assert self.permits.acquire(timeout=GUARD)
        self.clock.time += 1
        report("", None)
        return request

    def close(self):
        self.permits.release(100)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def in_loop(test):
    """Run a test as a coroutine."""
    return lambda clock: asyncio.run(test(clock))


async def finish(queue, worker):
    """Let the current job end, and wait until its place is free."""
    before = len(queue.jobs)
    worker.permits.release()
    await until(lambda: len(queue.jobs) < before)


async def until(condition):
    async with asyncio.timeout(GUARD):
        while not condition():
            await asyncio.sleep(0.001)


def queue_of(clock, **limits):
    worker = StepWorker(clock)
    return Queue(Limits(**limits), [worker]), worker


def refusal(queue, client):
    with pytest.raises(Refusal) as found:
        queue.submit("samples", client, client)
    assert int(found.value.headers["Retry-After"]) >= 1
    assert "come again" in str(found.value)
    return found.value.status


@in_loop
async def test_the_client_that_was_served_least_comes_next(clock):
    queue, worker = queue_of(clock)
    for request, client in (("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b")):
        queue.submit("samples", request, client)
        wait_for(lambda: worker.started, "the first job")
    for _ in range(4):
        await finish(queue, worker)
    assert worker.started == ["a1", "b1", "a2", "a3"]


@in_loop
async def test_a_client_has_a_share_of_the_places(clock):
    queue, _ = queue_of(clock, client=2)
    for _ in range(2):
        queue.submit("samples", "a", "a")
    assert refusal(queue, "a") == 429
    job = queue.submit("samples", "b", "b")
    assert job.events.get_nowait() == ("queued", {"ahead": 2})
    queue.close()


@in_loop
async def test_a_refused_client_that_waits_comes_before_a_later_one(clock):
    queue, worker = queue_of(clock, queue=1)
    for client in ("a", "b"):
        queue.submit("samples", client, client)
    assert refusal(queue, "early") == refusal(queue, "second") == 503
    await finish(queue, worker)
    assert refusal(queue, "late") == refusal(queue, "second") == 503
    queue.submit("samples", "early", "early")
    for client in ("second", "late"):
        await finish(queue, worker)
        queue.submit("samples", client, client)
    for _ in range(2):
        await finish(queue, worker)
    assert worker.started == ["a", "b", "early", "second", "late"]


@in_loop
async def test_a_place_is_not_kept_for_ever(clock):
    queue, worker = queue_of(clock, queue=0)
    queue.submit("samples", "a", "a")
    assert refusal(queue, "gone") == 503
    await finish(queue, worker)
    assert refusal(queue, "late") == 503
    clock.time += 10 + KEPT_SECONDS
    queue.submit("samples", "late", "late")
    await finish(queue, worker)


@in_loop
async def test_one_hundred_polite_clients_are_all_served_in_time(clock):
    """Each comes again when it was told to. Nobody waits much longer than the median."""
    queue, worker = queue_of(clock)
    start, due, jobs, waits = clock.time, [(clock.time, i) for i in range(100)], {}, {}
    while len(waits) < 100:
        while due and due[0][0] <= clock.time:
            _, i = heapq.heappop(due)
            try:
                jobs[i] = queue.submit("samples", i, f"10.0.0.{i}")
            except Refusal as error:
                heapq.heappush(due, (clock.time + int(error.headers["Retry-After"]), i))
        if queue.jobs:
            await finish(queue, worker)
        else:
            clock.time += 1
        waits |= {i: clock.time - start for i, job in jobs.items() if job.future.done() and i not in waits}
    assert max(waits.values()) <= 4 * statistics.median(waits.values())


@in_loop
async def test_a_job_has_its_time(clock):
    queue, worker = queue_of(clock, seconds=0.5)
    job = queue.submit("samples", "a", "a")
    await finish(queue, worker)
    with pytest.raises(LimpetError, match=r"longer than the limit of 0\.5 s: ask for fewer calls"):
        job.future.result(0)


@pytest.mark.parametrize("when", ["prepare_errors", "run_errors"])
@pytest.mark.parametrize(
    ("deaths", "succeeds"), [([WorkerDied(False)], True), ([WorkerDied(True)], False), ([WorkerDied(False)] * 2, False)]
)
def test_a_job_whose_worker_died_idle_is_sent_once_more(clock, when, deaths, succeeds):
    async def test():
        queue, worker = queue_of(clock)
        setattr(worker, when, [*deaths])
        worker.permits.release()
        job = queue.submit("samples", "a", "a")
        if succeeds:
            assert await asyncio.wrap_future(job.future) == "a"
        else:
            with pytest.raises(Refusal) as found:
                await asyncio.wrap_future(job.future)
            assert found.value.status == 500

    asyncio.run(test())


@in_loop
async def test_a_client_that_leaves_frees_its_place(clock):
    queue, worker = queue_of(clock, queue=1)
    job = queue.submit("samples", "a", "a")
    wait_for(lambda: worker.started, "the first job")
    waiting = queue.submit("samples", "b", "b")
    waiting.stop()
    await until(lambda: len(queue.jobs) == 1)
    job.stop()
    await finish(queue, worker)
    for one in (job, waiting):
        with pytest.raises(ClientLeft):
            one.future.result(0)
    assert worker.started == ["a"]


@in_loop
async def test_readiness_has_its_reason(clock):
    queue, worker = queue_of(clock, queue=1)
    assert queue.status == "ready"
    worker.is_ready = False
    assert queue.status == "starting"
    worker.is_ready = True
    queue.submit("samples", "a", "a")
    wait_for(lambda: worker.started, "the first job")
    assert queue.status == "ready"
    clock.time += 11
    assert queue.status == "stuck"
    job = queue.submit("samples", "b", "b")
    assert queue.status == "full"
    queue.close()
    assert queue.status == "stopping"
    with pytest.raises(Refusal, match="stopping"):
        job.future.result(GUARD)
    assert refusal(queue, "c") == 503


def test_limits_are_checked():
    for wrong in ({"queue": -1}, {"calls": 0}, {"calls": 1}, {"seconds": float("nan")}):
        with pytest.raises(LimpetError, match="the limit on"):
            Limits(**wrong)
