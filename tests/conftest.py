"""What every test shares: one torch thread (two workers run side by side), examples that are the same every time, no
hub, and somewhere to put things that do not belong to the package."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from socket import socket
from typing import Any

import pytest
import torch
from hypothesis import settings

import forked

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined, which any test may be the first to do
torch.set_num_threads(1)  # while tests are collected, too
os.environ["LIMPET_HOME"] = os.devnull  # no dial of this machine's user
settings.register_profile("limpet", deadline=None, derandomize=True)
settings.load_profile("limpet")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    seed = terminalreporter.config.getoption("randomly_seed", None)
    if seed is not None:  # the plugin is there and was not switched off
        terminalreporter.write_line(f"in random order; --randomly-seed={seed} repeats it, -p no:randomly sorts")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Whatever the tests of another file have set."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="session")
def quick_processes() -> Iterator[None]:
    """Workers come from the fork server, too. A command that runs in a process of its own spawns its workers."""
    real = multiprocessing.get_context
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            multiprocessing, "get_context", lambda method=None: forked.CONTEXT if method == "spawn" else real(method)
        )
        yield


@pytest.fixture
def offline(monkeypatch, tmp_path_factory) -> None:
    """Nothing reaches for the hub or sees this machine's cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path_factory.mktemp("hub")))


@pytest.fixture
def here(tmp_path, monkeypatch) -> Iterator[Path]:
    """A folder of one's own to work in; modules that come from it, or from beside it, are forgotten afterwards."""
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("LIMPET_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    before = set(sys.modules)
    yield tmp_path / "work"
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def unserved(monkeypatch) -> list[Any]:
    """The applications that `limpet serve` would have served, each at any port that is free: it ends at once."""
    import uvicorn

    from limpet.server import http

    apps: list[Any] = []

    def run(self: uvicorn.Server, sockets: list[socket]) -> None:
        apps.append(self.config.app)
        for one in sockets:
            one.close()

    monkeypatch.setattr(uvicorn.Server, "run", run)
    listen = http.listen
    monkeypatch.setattr(http, "listen", lambda host, port: listen(host, 0))
    return apps


@pytest.fixture
def package(here, monkeypatch) -> Callable[..., None]:
    """Install a package with entry points and modules: what pip leaves behind, here and for processes from here."""

    def install(points: str, **modules: str) -> None:
        site = here.parent / "site"
        about = site / "theirs-0.1.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 0.1\n")
        (about / "entry_points.txt").write_text(points)
        for name, text in modules.items():
            (site / f"{name}.py").parent.mkdir(exist_ok=True)
            (site / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(site)
        monkeypatch.setenv("PYTHONPATH", str(site))

    return install
