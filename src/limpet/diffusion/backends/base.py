"""How one step is drawn: what every backend is given, what it returns, and what they share.

A position's next token comes by one of five routes, which two coins choose (coins.py). Where coin one says noise or
stay, and nobody inspects the position, neither the distribution nor the output head is needed."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from limpet.diffusion import process
from limpet.diffusion.rng import CounterRNG, Purpose, uniform_token
from limpet.diffusion.selection import Selector
from limpet.diffusion.transitions import NOISE, STAY, Coins, coin_one
from limpet.diffusion.truncation import EVERY, Support
from limpet.errors import LimpetError

CHUNK = {"cpu": 2**23, "cuda": 2**26}  # logits that the head makes at once: rows x vocabulary
# Of those, what is worked on at once, in float64 and several times over: on a CPU more would leave its caches, and be
# asked anew of the system.
PIECE = {"cpu": 2**20, "cuda": 2**25}


@dataclass(frozen=True)
class Transition:
    """What a sampler asks of one call: where the state moves and by which coins, and where the distribution is looked at."""

    call: int  # which call of the path: it names the uniforms
    tokens: Tensor  # (B, L) the state z, which the transition starts from
    revise: Tensor  # (B, L) bool: draw the next token here; elsewhere it stays
    inspect: Tensor  # (B, L) bool: report the argmax and the deficit here
    coins: Coins
    temperature: float = 1.0  # of the distribution, before anything else is done with it
    support: Support = EVERY  # what it is then cut to, for draws
    against: Tensor | None = None  # (B, L) tokens that the distribution is held against where it is inspected


class NetworkCall(NamedTuple):
    """What one network call was given, and how its logits are to be read: the same for all transitions."""

    tokens: Tensor  # (B, L) x-tilde: the state with the visible labels written over it
    signal: (
        float | Tensor
    )  # whose evidence of `tokens` the denoiser's distributions hold: of all samples, or (B,) of each
    vocab_size: int
    convert: bool  # it predicts a posterior: take the evidence of `tokens` out of it first
    rng: CounterRNG
    nonfinite_at: Tensor  # (2,) int64: the call and the flat position where a distribution turned out to be none, or -1
    name: str  # of the denoiser, for errors


class Plan(Protocol):
    """A transition as a backend has prepared it, before the body runs."""

    def needed(self) -> Tensor | None:
        """The flat positions whose features will be read, ascending; None for all."""


class Outcome(NamedTuple):
    """What a backend returns; `top`, `deficit` and `gain` hold where the transition asked to inspect, and are 0, inf
    and -inf elsewhere. They are of the distribution before its support is cut."""

    tokens: Tensor  # (B, L) the next state
    top: Tensor  # (B, L) argmax of the distribution, lowest id at a tie
    deficit: Tensor  # (B, L) 1 - max distribution
    gain: Tensor | None  # (B, L) ln of the distribution at the best other token over that at `against`; None without it


Head = Callable[[Tensor], Tensor]  # (..., D) features -> (..., V) logits


class Backend(NamedTuple):
    """One way to draw a step: what can be done before the body has run, what is done after it, and the selector."""

    plan: Callable[[Transition, NetworkCall], Any]  # -> a Plan of its own
    advance: Callable[[Head, Tensor, Any], Outcome]
    select: Selector


class Whole(NamedTuple):
    """The plan of a backend that reads every position."""

    transition: Transition
    input: NetworkCall

    def needed(self) -> None:
        return None


def log_probs(logits: Tensor, seen: Tensor, input: NetworkCall, temperature: float) -> Tensor:
    """(R, V) of what the head said of rows that saw the tokens `seen` (R,) -> their log-probabilities, up to a constant, in
    float32 or better: leave-one-out whatever the model predicts, at a temperature."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if input.convert:
        logits = process.leave_one_out_logits(logits, seen, input.signal)
    return logits if temperature == 1 else logits * (1 / temperature)


def of_rows(input: NetworkCall, sample: Tensor) -> NetworkCall:
    """The input, where each of some rows is read with the signal of its own sample."""
    return input._replace(signal=input.signal[sample]) if isinstance(input.signal, Tensor) else input


def nonfinite_logits(input: NetworkCall, call: int, place: int) -> LimpetError:
    """The error for a distribution that is none, at a flat position of the batch."""
    row, position = divmod(place, input.tokens.shape[1])
    return LimpetError(
        f"{input.name} gave logits that make no distribution (nan, +inf, or all -inf) in call {call} at position {position} of "
        f"sample {int(input.rng.samples[row])}: check its weights and its precision, or run `limpet check` on it"
    )


def pieces(head: Head, features: Tensor, needed: Tensor, vocab_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The needed rows, a few at a time, and what the head says of them. The head takes many at once: it reads all its
    weights for every call."""
    many, few = (max(1, most[needed.device.type] // vocab_size) for most in (CHUNK, PIECE))
    for rows in torch.split(needed, many):
        said = head(features[tuple(rows.unbind(-1))])
        yield from zip(torch.split(rows, few), torch.split(said, few), strict=True)


def positions(tokens: Tensor) -> Tensor:
    return torch.arange(tokens.shape[1], device=tokens.device)


def routes(transition: Transition, rng: CounterRNG) -> tuple[Tensor, Tensor]:
    """Coin one at every position, STAY where nothing is to be revised, and the uniform for coin two."""
    first, second = rng.uniforms(transition.call, positions(transition.tokens), Purpose.COINS)
    return coin_one(first, transition.coins).masked_fill(~transition.revise, STAY), second


def noised(transition: Transition, input: NetworkCall, route: Tensor) -> Tensor:
    """(B, L) the tokens, with any one where the route says noise."""
    if not transition.coins.noisy:
        return transition.tokens.clone()
    _, u = input.rng.uniforms(transition.call, positions(route), Purpose.TOKENS)
    return torch.where(route == NOISE, uniform_token(u, input.vocab_size), transition.tokens)


def reported(transition: Transition, tokens: Tensor, top: Tensor, deficit: Tensor, gain: Tensor | None) -> Outcome:
    """An outcome that tells of inspected positions alone."""
    hidden = ~transition.inspect
    gain = None if gain is None else gain.masked_fill(hidden, -math.inf)
    return Outcome(tokens, top.masked_fill(hidden, 0), deficit.masked_fill(hidden, math.inf), gain)


def inverse_cdf(weights: Tensor, u: Tensor) -> Tensor:
    """(R, V) weights and (R,) uniforms -> (R,) tokens: the first whose cumulated weight passes u of the total.

    Sums are float64, so the tail of a float32 distribution keeps its mass, and a weight of zero is never drawn."""
    cumulated = weights.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(cumulated, (u * cumulated[:, -1])[:, None], right=True)[:, 0]


def has_triton(device: torch.device | str) -> bool:
    """Whether Triton's kernels can run there."""
    return torch.device(device).type == "cuda" and importlib.util.find_spec("triton") is not None


def backends(device: torch.device | str) -> dict[str, Backend]:
    """The backends that run on a device, the fastest last."""
    from limpet.diffusion.backends import dense, sparse

    modules: list[ModuleType] = [dense, sparse]
    if has_triton(device):
        modules.append(importlib.import_module("limpet.diffusion.backends.fused"))
    return {module.__name__.rpartition(".")[2]: module.BACKEND for module in modules}


def fastest(device: torch.device | str) -> Backend:
    return list(backends(device).values())[-1]
