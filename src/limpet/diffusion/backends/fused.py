"""The two-coin step on a GPU: the needed rows are planned before the body runs, and one kernel reads their logits.

`plan` marks and packs the rows that need a distribution while nothing else is known, and sends their number to the host;
it arrives while the body computes, so the device never waits for the host. `advance` is `lazy.advance`, on the same
uniforms; `select` is `selector.select`. Triton's interpreter runs all three on a CPU."""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from limpet.diffusion.backends import Backend, Head, NetworkCall, Outcome, Transition, kernels, nonfinite_logits, sparse

CHUNK = 3 * 2**26  # logits held at once, rows x vocabulary: 3/8 GiB in bfloat16, and still work for many launches
# Logits that a program reads at a time, its warps, and registers a thread: the two passes that every row takes need
# few, and many programs side by side hide the latency of memory.
BLOCK, WARPS, REGISTERS = 2048, 8, 64


class Packed(NamedTuple):
    """A transition whose needed rows are known."""

    transition: Transition
    input: NetworkCall
    places: Tensor  # (B L,) int32: flat positions that need a distribution, packed to the front
    told: Tensor  # (3,) int64 on the host, once `ready`: how many, and the nonfinite_at of the calls before
    ready: torch.cuda.Event | None
    outcome: Outcome  # what the positions that need no distribution return; the others are written over it

    def needed(self) -> Tensor:
        """The positions that need a distribution; waits until their number has come."""
        if self.ready is not None:
            self.ready.synchronize()
        rows, call, place = self.told.tolist()
        if call >= 0:
            raise nonfinite_logits(self.input, call, place)
        return self.places[:rows]


def plan(transition: Transition, input: NetworkCall) -> Packed | sparse.Tossed:
    """Toss coin one everywhere and pack the positions where it asks for the distribution or the distribution is inspected."""
    if transition.support.top_k is not None or transition.support.min_p > 0:
        return sparse.plan(transition, input)  # the kernel cuts by top-p alone
    tokens, device = transition.tokens.contiguous(), transition.tokens.device
    needed = torch.empty(tokens.numel(), dtype=torch.int32, device=device)
    index = torch.empty(tokens.numel(), dtype=torch.int32, device=device)
    told = torch.empty(3, dtype=torch.int64, device=device)
    deficit = torch.empty_like(tokens, dtype=torch.float64)
    gain = None if transition.against is None else torch.empty_like(deficit)
    outcome = Outcome(torch.empty_like(tokens), torch.empty_like(tokens), deficit, gain)
    grid = (triton.cdiv(tokens.numel(), 1024),)
    kernels.plan[grid](
        tokens, _bytes(transition.revise), _bytes(transition.inspect), input.rng.samples, needed, *outcome,
        _signed(input.rng.seed), transition.call, _bits(transition.coins.fresh), _bits(transition.coins.noise),
        input.vocab_size, tokens.shape[1], tokens.numel(),
        NOISY=transition.coins.noisy, GAIN=gain is not None, BLOCK=1024,
    )  # fmt: skip
    place = needed.cumsum(0, dtype=torch.int32)
    kernels.pack[grid](needed, place, index, input.nonfinite_at, told, tokens.numel(), BLOCK=1024)
    ready = None
    if device.type == "cuda":
        on_host = torch.empty(3, dtype=torch.int64, pin_memory=True)
        on_host.copy_(told, non_blocking=True)
        told, ready = on_host, torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
    return Packed(transition, input, index, told, ready, outcome)


def advance(head: Head, features: Tensor, plan: Packed | sparse.Tossed) -> Outcome:
    """`lazy.advance`. The head runs over the needed rows in even chunks of at most CHUNK logits."""
    if isinstance(plan, sparse.Tossed):
        return sparse.advance(head, features, plan)
    transition, input, against = plan.transition, plan.input, plan.transition.against
    flat = features.flatten(0, 1)
    (signal, draw, uniform, fresh, _), vocab = transition.coins, input.vocab_size
    numbers = (
        draw, uniform, fresh, 1 - signal, signal * vocab, transition.support.top_p, 1 / transition.temperature,
    )  # fmt: skip
    arguments = (
        transition.tokens.contiguous(), input.tokens.contiguous(), _shifts(input) if input.convert else None,
        None if against is None else against.contiguous(),
        _bytes(transition.revise), _bytes(transition.inspect), input.rng.samples, *plan.outcome, input.nonfinite_at,
        _signed(input.rng.seed), transition.call, *map(_bits, numbers), transition.tokens.shape[1],
    )  # fmt: skip
    needed = plan.needed()
    chunks = -(-len(needed) * vocab // CHUNK)
    for index in needed.tensor_split(chunks) if chunks else ():
        logits = head(flat.index_select(0, index))
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        kernels.rows[(len(index),)](
            logits, logits.stride(0), index, *arguments, VOCAB=vocab, WIDTH=_width(logits),
            NUCLEUS=transition.support.top_p < 1, PAPER=transition.support.boundary == "paper",
            READ=int(input.convert) + 2 * (transition.temperature != 1), GAIN=against is not None,
            FRESH=fresh > uniform,
            BLOCK=min(BLOCK, triton.next_power_of_2(vocab)), num_warps=WARPS, maxnreg=REGISTERS,
            enable_fp_fusion=transition.temperature == 1,  # tempered logits are rounded before they are read
        )  # fmt: skip
        del logits  # before the next are made
    return plan.outcome


def _shifts(input: NetworkCall) -> Tensor:
    """(B,) float64: what the evidence of a token itself has added to its logit, in each sample."""
    if isinstance(input.signal, Tensor):
        return (input.vocab_size * input.signal / (1 - input.signal)).log1p().contiguous()
    shift = math.log1p(input.vocab_size * input.signal / (1 - input.signal))
    return torch.full_like(input.rng.samples, shift, dtype=torch.float64)


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


BACKEND = Backend(plan, advance, select)
