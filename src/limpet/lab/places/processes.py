"""N workers in processes of this machine, one for each device, each behind a pipe."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from limpet.lab.places import ATTEMPTS, Group, Place, lost
from limpet.lab.worker import Event, Job, Worker

DONE = None  # what a worker sends after the last event of a group


@dataclass
class _Hand:
    """One process, its pipe, and the group it is at."""

    device: str | None
    process: BaseProcess
    pipe: Connection
    group: int | None = None


def processes(devices: Sequence[str | None]) -> Place:
    """A worker for each of `devices`; None is the default device."""

    def place(job: Job, groups: Sequence[Group]) -> Iterator[Event]:
        waiting = deque(range(len(groups)))
        deaths = [0] * len(groups)
        made: set[str] = set()  # what a dead worker had already told is not told again
        hands = [_hire(job, device) for device in devices[: len(groups)]]
        try:
            while waiting or any(hand.group is not None for hand in hands):
                for hand in hands:
                    if hand.group is None and waiting:
                        hand.group = waiting.popleft()
                        _send(hand, groups[hand.group])
                ready = wait([hand.pipe for hand in hands if hand.group is not None])
                for hand in [hand for hand in hands if hand.pipe in ready]:
                    at = hand.group
                    assert at is not None
                    try:
                        event: Event | None = hand.pipe.recv()
                    except (EOFError, ConnectionError):
                        hand.process.join()
                        deaths[at] += 1
                        if deaths[at] < ATTEMPTS:
                            waiting.append(at)
                        else:
                            why = f"its worker died {ATTEMPTS} times (exit code {hand.process.exitcode})"
                            yield from lost([unit for unit in groups[at] if unit.key not in made], why)
                        hands[hands.index(hand)] = _hire(job, hand.device)
                        continue
                    if event is DONE:
                        hand.group = None
                    else:
                        made.add(event.key)
                        yield event
        finally:
            for hand in hands:
                hand.process.terminate()
                hand.process.join()

    return place


def _hire(job: Job, device: str | None) -> _Hand:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, job, device), daemon=True)
    process.start()
    there.close()  # only the worker holds its end, so that its death is heard
    return _Hand(device, process, here)


def _send(hand: _Hand, group: Group) -> None:
    try:
        hand.pipe.send(group)
    except (BrokenPipeError, ConnectionError):
        return  # it died while idle: reading its pipe will say so


def _serve(pipe: Connection, job: Job, device: str | None) -> None:
    worker = Worker(job, device)
    while True:
        try:
            group: Group = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            for event in worker.work(group):
                pipe.send(event)
            pipe.send(DONE)
        except (KeyboardInterrupt, BrokenPipeError):
            return
