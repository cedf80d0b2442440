"""How one reverse step is drawn: what every backend is given, what it returns, and the two coins they share.

The reverse law is a mixture of three routes: stay at z, draw from the law h, draw uniformly. Two coins choose.
Coin one does not look at the law: it says draw, uniform or stay with weights

    signal_s - signal_t,  (1 - signal_t / signal_s) (1 - signal_s),  signal_t / signal_s - signal_t,

over 1 - signal_t. Coin two matters only where coin one moved: the move is kept with probability
(1 - signal_t) / (1 - signal_t + signal_t V h(z)), else the token stays. Multiplied out, the routes have the weights
of `process.reverse_law`. Where coin one says stay, neither the law nor the output head is needed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from limpet import process
from limpet.fast import has_triton
from limpet.selector import Selector, select
from limpet.streams import Purpose, Stream
from limpet.support import Boundary

STAY, DRAW, UNIFORM = 0, 1, 2


@dataclass(frozen=True)
class Transition:
    """One reverse step from t to s for a batch: everything a backend needs besides the features."""

    tokens: Tensor  # (B, L) the state z, which the transition starts from
    seen: Tensor  # (B, L) the input that the features were computed from
    revise: Tensor  # (B, L) bool: draw the next token here; elsewhere it stays
    inspect: Tensor  # (B, L) bool: report the argmax and the deficit here
    vocab_size: int
    signal_t: float
    signal_s: float
    top_p: float
    boundary: Boundary
    convert: bool  # the model predicts a posterior: take the evidence of `seen` out of it first
    stream: Stream
    step: int

    def given(self) -> dict[str, Any]:
        """These fields, for a plan that adds its own."""
        return {field.name: getattr(self, field.name) for field in fields(Transition)}

    def needed(self) -> Tensor | None:
        """The flat positions whose features will be read, where a plan has found them."""
        return None


class Outcome(NamedTuple):
    """What a backend returns; `top` and `deficit` hold where the transition asked to inspect, 0 and inf elsewhere."""

    tokens: Tensor  # (B, L) the state at s
    top: Tensor  # (B, L) argmax of the law, lowest id at a tie
    deficit: Tensor  # (B, L) 1 - max law, from the law before top-p


Head = Callable[[Tensor], Tensor]
Backend = Callable[[Head, Tensor, Transition], Outcome]
Planner = Callable[[Transition], Transition]


def logits_at(head: Head, features: Tensor, transition: Transition, sample: Tensor, position: Tensor) -> Tensor:
    """(R, V): the log law, up to a constant, of some rows, in float32 or better, leave-one-out whatever the model."""
    return log_law(head(features[sample, position]), transition, sample, position)


def log_law(logits: Tensor, transition: Transition, sample: Tensor, position: Tensor) -> Tensor:
    """`logits_at`, from what the head said of these rows."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if transition.convert:
        logits = process.leave_one_out_logits(logits, transition.seen[sample, position], transition.signal_t)
    return logits


def positions(transition: Transition) -> Tensor:
    return torch.arange(transition.tokens.shape[1], device=transition.tokens.device)


def coin_one(u: Tensor, signal_t: float, signal_s: float) -> Tensor:
    """STAY, DRAW or UNIFORM, before the law is known."""
    draw = (signal_s - signal_t) / (1 - signal_t)
    uniform = (1 - signal_t / signal_s) * (1 - signal_s) / (1 - signal_t)
    route = torch.full_like(u, STAY, dtype=torch.int8)
    route[u < draw + uniform] = UNIFORM
    route[u < draw] = DRAW
    return route


def coin_two(u: Tensor, law_at_z: Tensor, signal_t: float, vocab_size: int) -> Tensor:
    """Whether the move that coin one chose is kept."""
    return u * (1 - signal_t + signal_t * vocab_size * law_at_z) < 1 - signal_t


def routes(transition: Transition) -> tuple[Tensor, Tensor]:
    """Coin one at every position, STAY where nothing is to be revised, and the uniform for coin two."""
    first, second = transition.stream.uniforms(transition.step, positions(transition), Purpose.COINS)
    route = coin_one(first, transition.signal_t, transition.signal_s)
    return route.masked_fill(~transition.revise, STAY), second


def inverse_cdf(weights: Tensor, u: Tensor) -> Tensor:
    """(R, V) weights and (R,) uniforms -> (R,) tokens: the first whose cumulated weight passes u of the total.

    Sums are float64, so the tail of a float32 law keeps its mass, and a weight of zero is never drawn."""
    cumulated = weights.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(cumulated, (u * cumulated[:, -1])[:, None], right=True)[:, 0]


def backends(device: torch.device | str) -> dict[str, Backend]:
    """The backends that run on a device, the fastest last."""
    from limpet.steps import dense, lazy

    found: dict[str, Backend] = {"dense": dense.advance, "lazy": lazy.advance}
    fused = _fused(device)
    return found | ({"fused": fused.advance} if fused else {})


def fastest(device: torch.device | str) -> tuple[Planner, Backend]:
    """How a step is planned before the body has run, and how it is drawn afterwards."""
    from limpet.steps import lazy

    chosen = _fused(device) or lazy
    return chosen.plan, chosen.advance


def unplanned(transition: Transition) -> Transition:
    """Nothing is done before the body has run."""
    return transition


def selector(device: torch.device | str) -> Selector:
    fused = _fused(device)
    return fused.select if fused else select


def _fused(device: torch.device | str) -> ModuleType | None:
    """The Triton backend, where there is a GPU and Triton."""
    return importlib.import_module("limpet.steps.fused") if has_triton(device) else None
