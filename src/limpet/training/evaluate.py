"""Held-out likelihood: a Duo model's bound and a judge's NLL on packed rows, per token and in bits per byte of text."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from limpet.training import losses
from limpet.training.data import Stream

RowNats = Callable[[Tensor, torch.Generator], Tensor]  # (B, L) rows, noise -> (B,) nats


@dataclass(frozen=True)
class HeldOut:
    """Nats per predicted token, its standard error over draws of times and noise (0 where nothing is drawn)."""

    nats: float
    error: float
    bits_per_byte: float
    rows: int
    draws: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats)


def duo_row_nats(network: nn.Module, vocab_size: int) -> RowNats:
    """The bound of each row at one stratified time a row."""

    def nats(rows: Tensor, generator: torch.Generator) -> Tensor:
        z, signal = losses.noisy_batch(rows, vocab_size, generator)
        return losses.duo_nll(log_law(network, z, signal), z, rows, signal).double().sum(-1)

    return nats


def causal_row_nats(network: nn.Module) -> RowNats:
    """The NLL of each row but for its first token, which every row shares."""

    def nats(rows: Tensor, generator: torch.Generator) -> Tensor:
        return losses.causal_nll(network(rows), rows).double().sum(-1)

    return nats


def log_law(network: nn.Module, z: Tensor, signal: Tensor) -> Tensor:
    """What a Duo network says of noisy tokens at a signal (B,), in float32."""
    logits: Tensor = network(z, -signal.log().float())
    return logits.float().log_softmax(-1)


@torch.no_grad()
def held_out(
    nats: RowNats, stream: Stream, length: int, tokens: int, rows: int | None = None, draws: int = 1, batch: int = 256
) -> HeldOut:
    """The mean over rows spread evenly over a split (all of them, unless told how many).

    `tokens` is how many of a row the nats are for. A row's text is what stands between its end tokens."""
    total = stream.count(length)
    count = total if rows is None else min(rows, total)
    device = stream.ids.device
    which = (torch.arange(count, device=device) * total) // count
    means = []
    for draw in range(draws):
        generator = torch.Generator(device).manual_seed(draw)
        parts = [nats(stream.rows(part, length), generator) for part in torch.split(which, batch)]
        means.append(float(torch.cat(parts).mean()))
    mean = float(np.mean(means))
    error = float(np.std(means, ddof=1) / math.sqrt(draws)) if draws > 1 else 0.0
    bytes_per_row = stream.bytes * (length - 2) / len(stream.ids)
    return HeldOut(mean / tokens, error / tokens, mean / math.log(2) / bytes_per_row, count, draws)
