"""Processes forked from one that has torch loaded: they start in a tenth of the seconds of a new interpreter.

That one process is a fork server, in which no test has run. A new interpreter remains what `test_startup` looks at."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, NamedTuple

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "tyro", "rich.console", "limpet.conformance", "limpet.evaluation"])
NAMES, MODES = ("stdin", "stdout", "stderr"), "rww"


class Stream(NamedTuple):
    """A descriptor on its way to another process."""

    number: int

    def __reduce__(self) -> Any:
        return _detached, (DupFd(self.number),)


def _detached(sent: Any) -> Stream:
    return Stream(sent.detach())


def start(
    arguments: list[str], streams: list[int | None], cwd: Any = None, env: Mapping[str, str] | None = None,
    most: int | None = None,
) -> BaseProcess:  # fmt: skip
    """Run a `limpet` command in a process.

    streams: the descriptors of its three standard streams; None is a closed one. most: bytes of any file that it may
    write."""
    passed = [None if one is None else Stream(one) for one in streams]
    where = os.fspath(cwd or Path.cwd())
    process = CONTEXT.Process(target=_run, args=(arguments, passed, where, dict(env or os.environ), most))
    process.start()
    return process


def run(
    *arguments: Any, stdin: int | None = None, stdout: Any = subprocess.PIPE, closed: str = "", encoding: str = "utf-8",
    **how: Any,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """As `subprocess.run` for a `limpet` command. closed: the numbers of the standard streams that are closed."""
    found, ends = ["", "", ""], []

    def read(number: int, end: int) -> None:
        with open(end, encoding=encoding) as file:
            found[number] = file.read()

    with open(os.devnull) as nothing:
        streams: list[int | None] = [nothing.fileno() if stdin is None else stdin, None, None]
        readers = []
        for number, to in ((1, stdout), (2, subprocess.PIPE)):
            if to == subprocess.PIPE:
                end, streams[number] = os.pipe()
                ends.append(streams[number])
                readers.append(threading.Thread(target=read, args=(number, end)))
            else:
                streams[number] = to.fileno()
        process = start(
            [*map(str, arguments)], [None if str(n) in closed else one for n, one in enumerate(streams)], **how
        )
    for end in ends:
        os.close(end)
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    process.join()
    return subprocess.CompletedProcess(arguments, process.exitcode, found[1], found[2])


def _run(arguments: list[str], streams: list[Stream | None], cwd: str, env: dict[str, str], most: int | None) -> None:
    """What a new interpreter does: it opens its standard streams, runs the command and flushes them."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    encoding, errors = env.get("PYTHONIOENCODING", "utf-8"), {"stdin": "strict", "stderr": "backslashreplace"}
    for number, (name, mode, stream) in enumerate(zip(NAMES, MODES, streams, strict=True)):
        if stream is None:
            os.close(number)
            setattr(sys, name, None)
            continue
        os.dup2(stream.number, number)
        os.close(stream.number)
        opened = open(number, mode, encoding=encoding, errors=errors.get(name, "strict"), closefd=False)  # noqa: SIM115
        setattr(sys, name, opened)
    if most is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    from limpet.cli.main import main

    sys.exit(main(arguments))
