"""What tests of the server share: models that count, wait, break, hang or die, a fake clock, and a running server."""

import os
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch

from limpet.errors import LimpetError
from limpet.models.exact import Source
from limpet.models.exact_sources import Letters, source
from limpet.server.handlers import Resources
from limpet.server.http import application
from limpet.server.scheduler import Limits

sys.path.append(str(Path(__file__).parents[2] / "tools"))
from pictures import serving

GUARD = 600  # seconds after which a test that waits for an event has failed, on any machine


def wait_for(condition, what):
    """Wait until a condition holds."""
    ends = time.monotonic() + GUARD
    while not condition():
        assert time.monotonic() < ends, f"{what} did not happen"
        time.sleep(0.002)


class Clock:
    """A clock that a test sets; it stands in for `limpet.server.scheduler.now`."""

    def __init__(self, monkeypatch):
        self.time = time.monotonic()
        monkeypatch.setattr("limpet.server.scheduler.now", lambda: self.time)


@contextmanager
def running(worker, host="127.0.0.1", names=(), proxies=(), samplers=None, available=None, options=None, **limits):
    """A client of a server with these workers; `client.queue` is the server's queue. options: of `application`."""
    app = application(worker, Limits(**limits), host, names, samplers, available, proxies, **(options or {}))
    with serving(app) as address, httpx.Client(base_url=address, timeout=GUARD) as client:
        client.queue = app.state.queue
        yield client


class Verses(Source):
    """exact:verses under another name."""

    def __init__(self, name):
        self.inner = source("exact:verses")
        super().__init__(name, self.inner.vocab_size, self.inner.length, (torch.zeros(1),))
        self.tokenizer = Letters()

    def probs(self, tokens, signal):
        return self.inner.probs(tokens, signal)

    def log_prob(self, tokens):
        return self.inner.log_prob(tokens)

    def conditional(self, tokens):
        return self.inner.conditional(tokens)

    def draw(self, n, seed):
        return self.inner.draw(n, seed)


class Counting(Verses):
    """Counts its network calls, and does `on_call` in each."""

    def __init__(self, on_call=lambda: None):
        super().__init__("counting")
        self.calls, self.on_call = 0, on_call

    def probs(self, tokens, signal):
        self.calls += 1
        self.on_call()
        return super().probs(tokens, signal)


class Moody(Verses):
    """Hangs, fails or kills its process in a network call whose sample begins with h, b or d."""

    def __init__(self):
        super().__init__("moody")
        self.moods = {self.tokenizer.encode(letter)[0]: mood for letter, mood in MOODS.items()}

    def probs(self, tokens, signal):
        for token in tokens[:, 0].tolist():
            self.moods.get(token, lambda: None)()
        return super().probs(tokens, signal)


def hang():
    if mark := os.environ.get("LIMPET_TEST_HANGS"):
        Path(mark).touch()
    threading.Event().wait()


def fail():
    raise RuntimeError("a secret detail")


MOODS = {"h": hang, "b": fail, "d": lambda: os._exit(9)}


def moody():
    return Resources({"moody": Moody()})


def refused():
    raise LimpetError("there is no such model")


@contextmanager
def from_address(address, base_url):
    """A client with an address of its own on this machine."""
    if sys.platform != "linux":
        pytest.skip("clients need addresses of their own on this machine")
    transport = httpx.HTTPTransport(local_address=address)
    with httpx.Client(base_url=base_url, timeout=GUARD, transport=transport) as client:
        yield client
