"""Backends, which compute one reverse step: their interface and the functions that they share.

`dense` is the reference, `sparse` is the fastest on CPUs, `fused` on GPUs, `released` follows the released code. The
next token of a position comes by one of five routes, which two coins choose (see `transitions`). A position whose route
is noise or stay, and which is not inspected, needs neither the predicted distribution nor the output head."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from limpet.diffusion import process
from limpet.diffusion.rng import CounterRNG, Purpose, uniform_token
from limpet.diffusion.selection import Selector
from limpet.diffusion.transitions import NOISE, STAY, Coins, coin_one
from limpet.diffusion.truncation import ALL_TOKENS, Support
from limpet.errors import LimpetError

# Limits by device type, in logits (rows x vocabulary). Every device except the CPU has the limit of a GPU.
CHUNK = defaultdict(lambda: 2**26, cpu=2**23)  # what one call of the head may return: each call reads all its weights
# What is processed at once, in float64 and with several copies. On a CPU, more would not fit the caches.
PIECE = defaultdict(lambda: 2**25, cpu=2**20)


@dataclass(frozen=True)
class Transition:
    """What a sampler asks of one network call: which positions move, by which coins, and which are inspected."""

    call: int  # the number of the network call, which determines the uniforms
    tokens: Tensor  # (B, L) the state z from which the transition starts
    revise: Tensor  # (B, L) bool: draw the next token here; elsewhere it stays
    inspect: Tensor  # (B, L) bool: report the argmax and the deficit here
    coins: Coins
    temperature: float = 1.0  # of the distribution, applied first
    support: Support = ALL_TOKENS  # the tokens that may be drawn
    against: Tensor | None = None  # (B, L) tokens with which the distribution is compared where it is inspected


class NetworkCall(NamedTuple):
    """One call of the network, and how its logits are converted. All transitions of the call share it."""

    tokens: Tensor  # (B, L) the model input: the state with the visible committed tokens written over it
    signal: float | Tensor  # the level whose evidence of `tokens` a posterior contains: one, or (B,)
    vocab_size: int
    convert: bool  # the model predicts a posterior, from which the evidence of `tokens` is removed
    rng: CounterRNG
    nonfinite_at: Tensor  # (2,) int64: the call and the flat position of a non-finite prediction, or -1
    name: str  # of the model, for errors


class Outcome(NamedTuple):
    """The result of a transition. `top`, `deficit` and `gain` describe the distribution before truncation at the
    inspected positions; elsewhere they are 0, infinity and -infinity."""

    tokens: Tensor  # (B, L) the next state
    top: Tensor  # (B, L) the argmax, the lowest id of ties
    deficit: Tensor  # (B, L) 1 - the largest probability
    gain: Tensor | None  # (B, L) ln of the best other token's probability over that of `against`; None without it


Head = Callable[[Tensor], Tensor]  # (..., D) features -> (..., V) logits


class Backend(NamedTuple):
    """One implementation of a step: `plan` prepares a transition before the backbone runs, `advance` computes it.

    A plan has a method `needed()`: the flat positions whose features will be read, ascending, or None for all."""

    plan: Callable[[Transition, NetworkCall], Any]
    advance: Callable[[Head, Tensor, Any], Outcome]  # takes the head, the features (B, L, D) and the plan
    select: Selector


class DensePlan(NamedTuple):
    """The plan of a backend that reads every position."""

    transition: Transition
    network_call: NetworkCall

    def needed(self) -> None:
        return None


def log_probs(logits: Tensor, rows: Tensor, network_call: NetworkCall, temperature: float = 1.0) -> Tensor:
    """Converts logits (R, V) to leave-one-out log-probabilities, up to a constant, in float32 or better.

    rows: (R, 2) the sample and the position of each row, from which the conversion of a posterior takes the token and
    the signal."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if network_call.convert:
        sample, position = rows.unbind(-1)
        signal = network_call.signal
        signal = signal[sample] if isinstance(signal, Tensor) else signal
        logits = process.leave_one_out_logits(logits, network_call.tokens[sample, position], signal)
    return logits if temperature == 1 else logits * (1 / temperature)


def head_in_pieces(head: Head, features: Tensor, rows: Tensor, vocab_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Runs the head over rows (R, 2) of the features (B, L, D), in chunks that bound memory.

    Yields some of the rows and their logits (r, V), at most PIECE logits at a time."""
    chunk, piece = (max(1, limits[rows.device.type] // vocab_size) for limits in (CHUNK, PIECE))
    for many in torch.split(rows, chunk):
        logits = head(features[tuple(many.unbind(-1))])
        yield from zip(torch.split(many, piece), torch.split(logits, piece), strict=True)


def row_log_probs(
    head: Head, features: Tensor, rows: Tensor, network_call: NetworkCall, temperature: float = 1.0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields some of the rows (R, 2) and their log-probabilities (r, V), see `log_probs` and `head_in_pieces`."""
    for some, logits in head_in_pieces(head, features, rows, network_call.vocab_size):
        yield some, log_probs(logits, some, network_call, temperature)


def nonfinite_logits(network_call: NetworkCall, call: int, place: int) -> LimpetError:
    """The error for non-finite logits in a call, at a flat position of the batch."""
    row, position = divmod(place, network_call.tokens.shape[1])
    sample = int(network_call.rng.samples[row])
    return LimpetError(
        f"{network_call.name} returned non-finite logits (nan, +inf, or all -inf) in call {call} at position "
        f"{position} of sample {sample}: check its weights and its precision, or run `limpet check` on it"
    )


def positions(tokens: Tensor) -> Tensor:
    """(L,) the positions of tokens (B, L)."""
    return torch.arange(tokens.shape[1], device=tokens.device)


def routes(transition: Transition, rng: CounterRNG) -> tuple[Tensor, Tensor]:
    """(B, L) each: the route by coin one, STAY where the token is not revised; and the uniform for coin two."""
    first, second = rng.uniforms(transition.call, positions(transition.tokens), Purpose.COINS)
    return coin_one(first, transition.coins).masked_fill(~transition.revise, STAY), second


def with_noise(transition: Transition, network_call: NetworkCall, route: Tensor) -> Tensor:
    """(B, L) the tokens of the state, replaced by uniform tokens where the route is noise."""
    if not transition.coins.has_noise:
        return transition.tokens.clone()
    _, u = network_call.rng.uniforms(transition.call, positions(route), Purpose.TOKENS)
    return torch.where(route == NOISE, uniform_token(u, network_call.vocab_size), transition.tokens)


def inspected_outcome(
    transition: Transition, tokens: Tensor, top: Tensor, deficit: Tensor, gain: Tensor | None
) -> Outcome:
    """An outcome with values at the inspected positions only."""
    hidden = ~transition.inspect
    gain = None if gain is None else gain.masked_fill(hidden, -math.inf)
    return Outcome(tokens, top.masked_fill(hidden, 0), deficit.masked_fill(hidden, math.inf), gain)


def inverse_cdf(weights: Tensor, u: Tensor) -> Tensor:
    """(R,) tokens from weights (R, V) and uniforms (R,): the first whose cumulative weight exceeds u times the total.

    Sums are float64, so the tail of a float32 distribution keeps its mass. A weight of zero is never drawn."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(cumulative, (u * cumulative[:, -1])[:, None], right=True)[:, 0]


def has_triton(device: torch.device | str) -> bool:
    """Whether Triton kernels can run on a device."""
    return torch.device(device).type == "cuda" and importlib.util.find_spec("triton") is not None


def backends(device: torch.device | str) -> dict[str, Backend]:
    """The backends that run on a device, the fastest last."""
    from limpet.diffusion.backends import dense, sparse

    if torch.device(device).type == "mps":
        raise LimpetError("sampling needs float64, which mps devices lack: use the device cpu")
    modules: list[ModuleType] = [dense, sparse]
    if has_triton(device):
        modules.append(importlib.import_module("limpet.diffusion.backends.fused"))
    return {module.__name__.rpartition(".")[2]: module.BACKEND for module in modules}


def fastest(device: torch.device | str) -> Backend:
    """The fastest backend that runs on a device."""
    return list(backends(device).values())[-1]
