"""The two-coin step on a GPU: the needed rows are planned before the body runs, and one kernel reads their logits.

`plan` marks and packs the rows that need a law while nothing else is known, and sends their number to the host;
it arrives while the body computes, so the device never waits for the host. `advance` is `lazy.advance`, on the same
uniforms; `select` is `selector.select`. Triton's interpreter runs all three on a CPU."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from limpet.steps import Head, Outcome, Transition, kernels

CHUNK = 2**28  # logits held at once: rows x vocabulary
# Logits that a program reads at a time, its warps, and registers a thread: the two passes that every row takes need
# few, and many programs side by side hide the latency of memory.
BLOCK, WARPS, REGISTERS = 2048, 8, 64


@dataclass(frozen=True)
class Planned(Transition):
    """A transition whose needed rows are known."""

    index: Tensor  # (B L,) int32: flat positions that need a law, packed to the front
    rows: Tensor  # (1,) int32 on the host: how many, once `ready`
    ready: torch.cuda.Event | None
    outcome: Outcome  # what the positions that need no law return; the others are written over it

    def needed(self) -> Tensor:
        """The positions that need a law; waits until their number has come."""
        if self.ready is not None:
            self.ready.synchronize()
        return self.index[: int(self.rows)]


def plan(transition: Transition) -> Planned:
    """Toss coin one everywhere and pack the positions where it moves or the law is inspected."""
    tokens, device = transition.tokens.contiguous(), transition.tokens.device
    needed = torch.empty(tokens.numel(), dtype=torch.int32, device=device)
    index = torch.empty(tokens.numel(), dtype=torch.int32, device=device)
    outcome = Outcome(torch.empty_like(tokens), torch.empty_like(tokens), torch.empty_like(tokens, dtype=torch.float64))
    grid = (triton.cdiv(tokens.numel(), 1024),)
    kernels.plan[grid](
        tokens, _bytes(transition.revise), _bytes(transition.inspect), transition.stream.samples, needed, *outcome,
        _signed(transition.stream.seed), transition.step, _bits(_moves(transition)[1]), tokens.shape[1], tokens.numel(),
        BLOCK=1024,
    )  # fmt: skip
    place = needed.cumsum(0, dtype=torch.int32)
    kernels.pack[grid](needed, place, index, tokens.numel(), BLOCK=1024)
    rows, ready = place[-1:], None
    if device.type == "cuda":
        rows = torch.empty(1, dtype=torch.int32, pin_memory=True)
        rows.copy_(place[-1:], non_blocking=True)
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
    return Planned(**transition.given(), index=index, rows=rows, ready=ready, outcome=outcome)


def advance(head: Head, features: Tensor, transition: Transition) -> Outcome:
    """`lazy.advance`. The head runs over the needed rows in even chunks of at most CHUNK logits."""
    planned = transition if isinstance(transition, Planned) else plan(transition)
    tokens, length = planned.tokens.contiguous(), planned.tokens.shape[1]
    flat = features.flatten(0, 1)
    draw, move = _moves(planned)
    signal, vocab = planned.signal_t, planned.vocab_size
    shift = math.log1p(vocab * signal / (1 - signal)) if planned.convert else 0.0
    arguments = (
        tokens, planned.seen.contiguous(), _bytes(planned.revise), _bytes(planned.inspect), planned.stream.samples,
        *planned.outcome, _signed(planned.stream.seed), planned.step,
        *map(_bits, (draw, move, 1 - signal, signal * vocab, planned.top_p, shift)), length,
    )  # fmt: skip
    needed = planned.needed()
    chunks = -(-len(needed) * vocab // CHUNK)
    for index in needed.tensor_split(chunks) if chunks else ():
        logits = head(flat.index_select(0, index))
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        kernels.rows[(len(index),)](
            logits, logits.stride(0), index, *arguments, VOCAB=vocab, WIDTH=_width(logits),
            NUCLEUS=planned.top_p < 1, PAPER=planned.boundary == "paper", CONVERT=planned.convert,
            BLOCK=min(BLOCK, triton.next_power_of_2(vocab)), num_warps=WARPS, maxnreg=REGISTERS,
        )  # fmt: skip
    return planned.outcome


def select(deficit: Tensor, eligible: Tensor, count: int | Tensor, budget: float | Tensor, spacing: int) -> Tensor:
    """`selector.select`, a greedy scan for each sample in one kernel."""
    samples, length = deficit.shape
    chosen = torch.empty(deficit.shape, dtype=torch.uint8, device=deficit.device)
    kernels.select[(samples,)](
        deficit.double().contiguous(), _bytes(eligible), _per_sample(count, deficit, torch.int64),
        _per_sample(budget, deficit, torch.float64), chosen, length, spacing,
        BLOCK=triton.next_power_of_2(length), num_warps=4,
    )  # fmt: skip
    return chosen.view(torch.bool)


def _moves(transition: Transition) -> tuple[float, float]:
    """Coin one draws from the law below the first number, and uniformly between it and the second."""
    signal_t, signal_s = transition.signal_t, transition.signal_s
    draw = (signal_s - signal_t) / (1 - signal_t)
    return draw, draw + (1 - signal_t / signal_s) * (1 - signal_s) / (1 - signal_t)


def _width(logits: Tensor) -> int:
    """How far a row may be read: where rows are padded, up to an aligned end, so that loads are wide."""
    rows, vocab = logits.shape
    width = triton.cdiv(vocab, 16) * 16
    end = logits.storage_offset() + (rows - 1) * logits.stride(0) + width
    padded = width <= logits.stride(0) and end * logits.element_size() <= logits.untyped_storage().nbytes()
    return width if padded else vocab


def _per_sample(limit: float | Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    if isinstance(limit, Tensor):
        return limit.to(like.device, dtype).expand(len(like)).contiguous()
    return torch.full((len(like),), limit, dtype=dtype, device=like.device)


def _bytes(mask: Tensor) -> Tensor:
    return mask.contiguous().view(torch.uint8)


def _signed(seed: int) -> int:
    """The low 64 bits as a signed integer."""
    return (seed + 2**63) % 2**64 - 2**63


def _bits(number: float) -> int:
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits
