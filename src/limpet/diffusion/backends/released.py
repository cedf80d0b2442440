"""The released sampler's step, for benchmarks: the whole reverse distribution, dense, in float64, drawn by an exponential race.

It draws from the distribution that the other backends draw from, with its own randomness (torch's generator), and at the
released precision: the log-probabilities is rounded to the head's precision before float64 begins."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from limpet.diffusion import process
from limpet.diffusion.backends import Backend, Head, Outcome, Transition, Whole, reported
from limpet.diffusion.selection import select

TINY = 1e-10  # keeps the race's logarithms finite


def advance(head: Head, features: Tensor, plan: Whole) -> Outcome:
    transition, input = plan.transition, plan.input
    logits = head(features)  # (B, L, V), as every tensor below
    if input.convert:
        signal = input.signal[:, None] if isinstance(input.signal, Tensor) else input.signal
        logits = process.leave_one_out_logits(logits, input.tokens, signal)
    if transition.temperature != 1:
        logits = logits / transition.temperature
    log_probs = logits.log_softmax(-1).to(torch.float64)
    largest, top = log_probs.max(-1) if transition.inspect.any() else (torch.zeros_like(transition.tokens),) * 2
    deficit = torch.where(transition.inspect, 1 - largest.to(torch.float64).exp(), math.inf)
    if transition.support.top_p < 1:
        log_probs = _nucleus(log_probs, transition.support.top_p)
    weights = _reverse_probs(log_probs.exp(), transition, input.vocab_size)
    race = TINY - (torch.rand_like(weights) + TINY).log()
    drawn = (weights / race).argmax(-1)
    return reported(transition, torch.where(transition.revise, drawn, transition.tokens), top, deficit, None)


def _nucleus(log_probs: Tensor, p: float) -> Tensor:
    """Sort, cumulate, drop what comes after the mass has passed p, renormalise."""
    ranked, order = log_probs.sort(-1, descending=True)
    dropped = ranked.softmax(-1).cumsum(-1) > p
    dropped = F.pad(dropped[..., :-1], (1, 0), value=False)  # the token that passes p is kept
    dropped = torch.zeros_like(dropped).scatter(-1, order, dropped)
    probs = log_probs.masked_fill_(dropped, -math.inf).exp()
    return (probs / probs.sum(-1, keepdim=True)).log()


def _reverse_probs(probs: Tensor, transition: Transition, vocab_size: int) -> Tensor:
    """process.reverse_probs, written with tensors over the vocabulary throughout."""
    signal, draw, move, *_ = transition.coins
    noise = 1 - signal
    point = F.one_hot(transition.tokens, vocab_size).float()
    at_z = probs.gather(-1, transition.tokens[..., None])
    joint = signal * vocab_size * probs * point + noise * (1 - move) * point
    joint = joint + noise * draw * probs + noise * (move - draw) / vocab_size
    return joint / (signal * vocab_size * at_z + noise)


BACKEND = Backend(Whole, advance, select)
