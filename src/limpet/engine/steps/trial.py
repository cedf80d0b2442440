"""A backend on trial: one step on logits that are given, and whether what it draws has the law that it should."""

from __future__ import annotations

import torch
from torch import Tensor

from limpet.engine import process, support
from limpet.engine.steps import Backend, Head, Input, Outcome, Transition
from limpet.engine.streams import Stream
from limpet.engine.support import Boundary


def input_of(transition: Transition, vocab_size: int, stream: Stream, convert: bool = False) -> Input:
    """What a model was shown that saw the state itself."""
    alarm = torch.full((2,), -1, device=transition.tokens.device)
    return Input(transition.tokens, transition.signal_t, vocab_size, convert, stream, alarm, "a model on trial")


def step(
    backend: Backend, logits: Tensor, transition: Transition, input: Input, head: Head = lambda rows: rows
) -> Outcome:
    """One step, where the features (B, L, ...) are logits or what a head makes logits of."""
    return backend.advance(head, logits, backend.plan(transition, input))


def fit(
    backend: Backend, law: Tensor, top_p: float = 1.0, boundary: Boundary = "released", seed: int = 0,
    device: str | torch.device = "cpu", shape: tuple[int, int] = (200, 1000),
) -> float:  # fmt: skip
    """The p-value of many draws of one reverse step from token 1, against the dense law."""
    signal_t, signal_s = 0.4, 0.7
    every = torch.ones(shape, dtype=torch.bool, device=device)
    asked = Transition(0, every.long(), every, ~every, signal_t, signal_s, top_p=top_p, boundary=boundary)
    shown = input_of(asked, len(law), Stream(seed, torch.arange(shape[0], device=device)))
    drawn = step(backend, law.log().float().to(device).expand(*shape, -1), asked, shown).tokens
    exact = process.reverse_law(support.restrict(law, top_p, boundary), torch.tensor(1), signal_t, signal_s)
    return chi_square(torch.bincount(drawn.flatten().cpu(), minlength=len(law)), exact)


def chi_square(counts: Tensor, law: Tensor) -> float:
    """The p-value of Pearson's test; 0 where something impossible came."""
    possible = law > 0
    if counts[~possible].any():
        return 0.0
    expected = law[possible] * counts.sum()
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    freedom = torch.tensor(float(possible.sum() - 1), dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2)) if freedom else 1.0
