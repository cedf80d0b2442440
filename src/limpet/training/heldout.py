"""Held-out likelihood: a Duo model's bound and a judge's NLL on packed rows, per token and in bits per byte of text."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from limpet.diffusion.process import LOG_LINEAR
from limpet.evaluation.judges import causal
from limpet.models import duo
from limpet.training import objectives
from limpet.training.data import Split

Network = duo.DuoNetwork | causal.CausalNetwork


@dataclass(frozen=True)
class HeldOut:
    """Nats per predicted token, its standard error over draws of times and noise (0 where nothing is drawn)."""

    nats: float
    error: float
    bits_per_byte: float
    rows: int
    draws: int


def log_probs(network: nn.Module, z: Tensor, signal: Tensor) -> Tensor:
    """What a Duo network says of noisy tokens at a signal (B,), in float32."""
    logits: Tensor = network(z, -signal.log().float())
    return logits.float().log_softmax(-1)


def shown(network: Network, rows: Tensor, noise: torch.Generator | None = None, prompt: int = 0) -> tuple[Tensor, ...]:
    """What the loss is computed from: clean rows and, for a Duo network, their noisy tokens at one stratified time per
    row, with the signal (B,) float64. The first `prompt` tokens stay clean."""
    if isinstance(network, causal.CausalNetwork):
        return (rows,)
    signal = LOG_LINEAR.signal(objectives.stratified_times(len(rows), noise, rows.device))
    return rows, objectives.add_noise(rows, signal, network.shape.vocab_size, noise, prompt), signal


def token_nats(network: Network, rows: Tensor, *noisy: Tensor, prompt: int = 0) -> Tensor:
    """A Duo network's bound on each token after the prompt, or a judge's NLL of each but the first: (B, tokens)."""
    if isinstance(network, causal.CausalNetwork):
        return objectives.causal_nll(network(rows), rows)[:, max(prompt - 1, 0) :]
    z, signal = noisy
    predicted = log_probs(network, z, signal)[:, prompt:]
    return objectives.duo_nll(predicted, z[:, prompt:], rows[:, prompt:], signal)


@torch.no_grad()
def held_out(network: Network, stream: Split, rows: int | None = None, draws: int = 1, batch: int = 256) -> HeldOut:
    """The mean over rows spread evenly over a split (default: all of them)."""
    length, device, prompt = network.shape.length, stream.ids.device, stream.prompt
    total = stream.count(length)
    count = total if rows is None else min(rows, total)
    which = (torch.arange(count, device=device) * total) // count
    means = []
    for draw in range(draws):
        noise = torch.Generator(device).manual_seed(draw)
        batches = (stream.rows(part, length) for part in torch.split(which, batch))
        nats = torch.cat(
            [token_nats(network, *shown(network, some, noise, prompt), prompt=prompt).double() for some in batches]
        )
        means.append(float(nats.sum(-1).mean()))
    mean, tokens = float(np.mean(means)), nats.shape[1]
    error = float(np.std(means, ddof=1) / math.sqrt(draws)) if draws > 1 else 0.0
    return HeldOut(mean / tokens, error / tokens, mean / math.log(2) / stream.bytes_in_row(length), count, draws)
