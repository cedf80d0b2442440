"""The step of the released sampler, for benchmarks: the dense reverse distribution, sampled by an exponential race.

It draws from the same distribution as the other backends, but with torch's own generator and at the released precision:
the log-probabilities are rounded to the head's precision before the conversion to float64."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from limpet.diffusion import process
from limpet.diffusion.backends import Backend, DensePlan, Head, Outcome, Transition, inspected_outcome
from limpet.diffusion.selection import select

TINY = 1e-10  # keeps the logarithms of the race finite


def advance(head: Head, features: Tensor, plan: DensePlan) -> Outcome:
    """The outcome of a transition, given the features (B, L, D)."""
    transition, network_call = plan.transition, plan.network_call
    logits = head(features)  # (B, L, V), like all tensors below
    if network_call.convert:
        signal = network_call.signal
        signal = signal[:, None] if isinstance(signal, Tensor) else signal
        logits = process.leave_one_out_logits(logits, network_call.tokens, signal)
    if transition.temperature != 1:
        logits = logits / transition.temperature
    log_probs = logits.log_softmax(-1).to(torch.float64)
    largest, top = log_probs.max(-1) if transition.inspect.any() else (torch.zeros_like(transition.tokens),) * 2
    deficit = torch.where(transition.inspect, 1 - largest.to(torch.float64).exp(), math.inf)
    if transition.support.top_p < 1:
        log_probs = _nucleus(log_probs, transition.support.top_p)
    weights = _reverse_probs(log_probs.exp(), transition, network_call.vocab_size)
    race = TINY - (torch.rand_like(weights) + TINY).log()
    drawn = (weights / race).argmax(-1)
    tokens = torch.where(transition.revise, drawn, transition.tokens)
    return inspected_outcome(transition, tokens, top, deficit, None)


def _nucleus(log_probs: Tensor, p: float) -> Tensor:
    """Top-p by a sort, normalised again."""
    ranked, order = log_probs.sort(-1, descending=True)
    dropped = ranked.softmax(-1).cumsum(-1) > p
    dropped = F.pad(dropped[..., :-1], (1, 0), value=False)  # keeps the token at which the mass exceeds p
    dropped = torch.zeros_like(dropped).scatter(-1, order, dropped)
    probs = log_probs.masked_fill_(dropped, -math.inf).exp()
    return (probs / probs.sum(-1, keepdim=True)).log()


def _reverse_probs(probs: Tensor, transition: Transition, vocab_size: int) -> Tensor:
    """`process.reverse_probs`, with tensors over the whole vocabulary throughout."""
    signal, draw, move, *_ = transition.coins
    noise = 1 - signal
    one_hot = F.one_hot(transition.tokens, vocab_size).float()
    at_z = probs.gather(-1, transition.tokens[..., None])
    joint = signal * vocab_size * probs * one_hot + noise * (1 - move) * one_hot
    joint = joint + noise * draw * probs + noise * (move - draw) / vocab_size
    return joint / (signal * vocab_size * at_z + noise)


BACKEND = Backend(DensePlan, advance, select)
