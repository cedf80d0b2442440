"""The GPU backend: the needed rows are planned before the backbone runs, and one kernel processes their logits.

`plan` packs the rows that need a distribution and copies their number to the host. The number arrives while the
backbone runs, so the device never waits for the host. `advance` computes what `sparse.advance` computes, from the same
uniforms; `select` computes `selection.select`. Triton's interpreter runs all three on a CPU."""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from limpet.diffusion.backends import (
    Backend,
    Head,
    NetworkCall,
    Outcome,
    Transition,
    kernels,
    nonfinite_logits,
    sparse,
)

CHUNK = 3 * 2**26  # logits held at once, rows x vocabulary: 3/8 GiB in bfloat16
# Logits that a program loads at a time, its warps, and registers per thread. The two passes over every row need few
# registers, and many concurrent programs hide the latency of memory.
BLOCK, WARPS, REGISTERS = 2048, 8, 64


class PackedPlan(NamedTuple):
    """A transition whose needed rows are packed."""

    transition: Transition
    network_call: NetworkCall
    places: Tensor  # (B L,) int32: the flat positions that need a distribution, packed to the front
    message: Tensor  # (3,) int64 on the host once `ready`: the number of needed rows, and `nonfinite_at` so far
    ready: torch.cuda.Event | None
    outcome: Outcome  # filled in for the positions that need no distribution; `advance` writes the others

    def needed(self) -> Tensor:
        """The flat positions that need a distribution. Waits until their number has arrived on the host."""
        if self.ready is not None:
            self.ready.synchronize()
        rows, call, place = self.message.tolist()
        if call >= 0:
            raise nonfinite_logits(self.network_call, call, place)
        return self.places[:rows]


def plan(transition: Transition, network_call: NetworkCall) -> PackedPlan | sparse.SparsePlan:
    """Chooses the routes and packs the positions that need a distribution."""
    if transition.support.top_k is not None or transition.support.min_p > 0:
        return sparse.plan(transition, network_call)  # the kernel truncates by top-p only
    tokens, device = transition.tokens.contiguous(), transition.tokens.device
    needed = torch.empty(tokens.numel(), dtype=torch.int32, device=device)
    index = torch.empty(tokens.numel(), dtype=torch.int32, device=device)
    message = torch.empty(3, dtype=torch.int64, device=device)
    deficit = torch.empty_like(tokens, dtype=torch.float64)
    gain = None if transition.against is None else torch.empty_like(deficit)
    outcome = Outcome(torch.empty_like(tokens), torch.empty_like(tokens), deficit, gain)
    grid = (triton.cdiv(tokens.numel(), 1024),)
    kernels.plan[grid](
        tokens, _bytes(transition.revise), _bytes(transition.inspect), network_call.rng.samples, needed, *outcome,
        *_seeds(network_call), transition.call, _bits(transition.coins.fresh), _bits(transition.coins.noise),
        network_call.vocab_size, tokens.shape[1], tokens.numel(),
        NOISY=transition.coins.has_noise, GAIN=gain is not None, SEEDS=isinstance(network_call.rng.seed, Tensor),
        BLOCK=1024,
    )  # fmt: skip
    count = needed.cumsum(0, dtype=torch.int32)
    kernels.pack[grid](needed, count, index, network_call.nonfinite_at, message, tokens.numel(), BLOCK=1024)
    ready = None
    if device.type == "cuda":
        on_host = torch.empty(3, dtype=torch.int64, pin_memory=True)
        on_host.copy_(message, non_blocking=True)
        message, ready = on_host, torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
    return PackedPlan(transition, network_call, index, message, ready, outcome)


def advance(head: Head, features: Tensor, plan: PackedPlan | sparse.SparsePlan) -> Outcome:
    """The outcome of a transition. The head runs over the needed rows in even chunks of at most CHUNK logits."""
    if isinstance(plan, sparse.SparsePlan):
        return sparse.advance(head, features, plan)
    transition, network_call, against = plan.transition, plan.network_call, plan.transition.against
    flat = features.flatten(0, 1)
    (signal, draw, uniform, fresh, _), vocab = transition.coins, network_call.vocab_size
    numbers = (
        draw, uniform, fresh, 1 - signal, signal * vocab, transition.support.top_p, 1 / transition.temperature,
    )  # fmt: skip
    arguments = (
        transition.tokens.contiguous(), network_call.tokens.contiguous(),
        _shifts(network_call) if network_call.convert else None, None if against is None else against.contiguous(),
        _bytes(transition.revise), _bytes(transition.inspect), network_call.rng.samples, *plan.outcome,
        network_call.nonfinite_at, *_seeds(network_call), transition.call, *map(_bits, numbers),
        transition.tokens.shape[1],
    )  # fmt: skip
    needed = plan.needed()
    chunks = -(-len(needed) * vocab // CHUNK)
    for index in needed.tensor_split(chunks) if chunks else ():
        logits = head(flat.index_select(0, index))
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        kernels.rows[(len(index),)](
            logits, logits.stride(0), index, *arguments, VOCAB=vocab, WIDTH=_width(logits),
            NUCLEUS=transition.support.top_p < 1, PAPER=transition.support.boundary == "paper",
            READ=int(network_call.convert) + 2 * (transition.temperature != 1), GAIN=against is not None,
            FRESH=fresh > uniform, SEEDS=isinstance(network_call.rng.seed, Tensor),
            BLOCK=min(BLOCK, triton.next_power_of_2(vocab)), num_warps=WARPS, maxnreg=REGISTERS,
            enable_fp_fusion=transition.temperature == 1,  # the product with 1 / temperature must be rounded
        )  # fmt: skip
        del logits  # frees the memory before the next chunk
    return plan.outcome


def _shifts(network_call: NetworkCall) -> Tensor:
    """(B,) float64: how much the evidence of a token raises its logit in a posterior, for each sample."""
    signal = network_call.signal
    if isinstance(signal, Tensor):
        return (network_call.vocab_size * signal / (1 - signal)).log1p().contiguous()
    shift = math.log1p(network_call.vocab_size * signal / (1 - signal))
    return torch.full_like(network_call.rng.samples, shift, dtype=torch.float64)


def select(deficit: Tensor, eligible: Tensor, count: int | Tensor, budget: float | Tensor, spacing: int) -> Tensor:
    """Computes `selection.select` by a greedy scan, one program for each sample."""
    samples, length = deficit.shape
    chosen = torch.empty(deficit.shape, dtype=torch.uint8, device=deficit.device)
    kernels.select[(samples,)](
        deficit.double().contiguous(), _bytes(eligible), _per_sample(count, deficit, torch.int64),
        _per_sample(budget, deficit, torch.float64), chosen, length, spacing,
        BLOCK=triton.next_power_of_2(length), num_warps=4,
    )  # fmt: skip
    return chosen.view(torch.bool)


def _width(logits: Tensor) -> int:
    """How far a row may be read. Where rows are padded this is an aligned end, which allows wide loads."""
    rows, vocab = logits.shape
    width = triton.cdiv(vocab, 16) * 16
    end = logits.storage_offset() + (rows - 1) * logits.stride(0) + width
    padded = width <= logits.stride(0) and end * logits.element_size() <= logits.untyped_storage().nbytes()
    return width if padded else vocab


def _per_sample(limit: float | Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """(B,) a limit for each sample."""
    if isinstance(limit, Tensor):
        return limit.to(like.device, dtype).expand(len(like)).contiguous()
    return torch.full((len(like),), limit, dtype=dtype, device=like.device)


def _bytes(mask: Tensor) -> Tensor:
    """A boolean mask as bytes, which kernels can load."""
    return mask.contiguous().view(torch.uint8)


def _seeds(network_call: NetworkCall) -> tuple[Tensor | None, int]:
    """The seed of each sample, where they differ, and the 64 bits of their common one as a signed integer."""
    seed = network_call.rng.seed
    return (seed.contiguous(), 0) if isinstance(seed, Tensor) else (None, (seed + 2**63) % 2**64 - 2**63)


def _bits(number: float) -> int:
    """The bits of a float64 as an integer: float arguments of kernels are float32."""
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


BACKEND = Backend(plan, advance, select)
