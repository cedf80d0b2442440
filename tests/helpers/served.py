"""What servers of tests hold in processes of their own: a model that hangs, breaks or dies when a prompt says so."""

import os
import time
from functools import partial

import torch

from limpet.errors import LimpetError
from limpet.models.exact import Source
from limpet.models.exact_sources import Letters, source
from limpet.server.handlers import Stock


class Verses(Source):
    """exact:verses under another name, and with another distribution, if it is given one."""

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


class Moody(Verses):
    """Itself, unless the first letter of a sample is one of these."""

    def __init__(self):
        super().__init__("moody")
        self.moods = {self.tokenizer.encode(letter)[0]: mood for letter, mood in MOODS.items()}

    def probs(self, tokens, signal):
        self.moods.get(int(tokens[0, 0]), lambda: None)()
        return super().probs(tokens, signal)


def wire():
    raise RuntimeError("a wire came loose")


# h hangs in one call, b breaks, d dies, s is slow
MOODS = {"h": partial(time.sleep, 600), "b": wire, "d": partial(os._exit, 9), "s": partial(time.sleep, 0.1)}


def moody():
    return Stock({"moody": Moody()})


def unloadable():
    raise LimpetError("there is no such model")


def strange():
    raise RuntimeError("a wire came loose")
