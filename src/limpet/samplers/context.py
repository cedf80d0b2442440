"""What a sampler walks: `State` is what it carries, `StepInfo` what a call saw and did, `Context` what never changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from limpet.diffusion import backends as steps
from limpet.diffusion.backends import Backend, Input, Outcome, Transition
from limpet.diffusion.process import EPS
from limpet.diffusion.rng import CounterRNG, Purpose, uniform_token
from limpet.diffusion.transitions import nested
from limpet.errors import LimpetError
from limpet.models import check_model

if TYPE_CHECKING:
    from limpet.models import Denoiser, Needed
    from limpet.samplers import Sampler

HALVINGS = 52  # of an interval of times: as many as a float64 has digits


class PreviousCall(NamedTuple):
    """What a call made: features at every position, and the temperature at which its distributions were read."""

    values: Tensor  # (B, L, D)
    temperature: float


class State(NamedTuple):
    """What a path carries from call to call."""

    call: int  # how many calls have been made
    tokens: Tensor  # (B, L) the mutable noisy state x_t; after the last call, the output
    memory: tuple[Tensor, ...] = ()  # (B, L) each: the sampler's own
    made: PreviousCall | None = None  # by the last call, for a model that the next one tells of it

    def __repr__(self) -> str:
        remembered = getattr(self.memory, "_fields", range(len(self.memory)))
        return f"<State after call {self.call}: tokens {tuple(self.tokens.shape)}, remembers {[*remembered]}>"


class StepInfo(NamedTuple):
    """What one call saw and did: for viewers and audits, never read by the sampler."""

    call: int
    t: float
    input: Tensor  # (B, L) what the denoiser saw
    outcome: Outcome
    marks: Mapping[str, Tensor]  # (B, L) bool by name, for viewers to draw

    def __repr__(self) -> str:
        return f"<Info of call {self.call} at t {self.t:.4g}: input {tuple(self.input.shape)}, marks {[*self.marks]}>"


class Features(NamedTuple):
    """What the body made of an input, at the positions that the call's transitions need."""

    values: Tensor  # (B, L, D)
    input: Input


class Blend(NamedTuple):
    """Another call, of the same free tokens, that a call's distributions are led away from: ln distribution + weight (ln distribution - ln other),
    up to a constant. Where the other has no mass, the distribution is left alone."""

    values: Tensor  # (B, L, D) its features
    weight: float


@dataclass(frozen=True)
class Context:
    """What no sampler changes along a batch of paths: denoiser, randomness, given tokens, how a step is drawn."""

    model: Denoiser
    rng: CounterRNG
    fixed: Tensor  # (B, L) given tokens, -1 where the position is free
    backend: Backend
    trace: bool = (
        False  # look at every distribution and draw every state, also where the sampler itself does not need them
    )
    last: list[PreviousCall | None] = field(
        default_factory=list
    )  # while a call is made (`stepped`): what the one before made

    def __post_init__(self) -> None:
        check_model(self.model)

    def __repr__(self) -> str:
        return f"<Path of {len(self.fixed)} x {self.fixed.shape[1]} tokens: {self.model!r}>"

    @cached_property
    def free(self) -> Tensor:
        """(B, L) bool."""
        return self.fixed < 0

    @cached_property
    def no_positions(self) -> Tensor:
        """(B, L) bool, false throughout."""
        return torch.zeros_like(self.free)

    @cached_property
    def generated(self) -> Tensor:
        """(B,) how many positions are free."""
        return self.free.sum(-1)

    @cached_property
    def nonfinite_at(self) -> Tensor:
        """(2,) where a backend that does not wait notes a distribution that is none: the call and the flat position."""
        return torch.full((2,), -1, dtype=torch.long, device=self.fixed.device)

    def signal(self, t: float) -> float:
        return self.model.schedule.level(t)

    def time(self, signal: Tensor) -> Tensor:
        """(B,) signals -> (B,): the time of each, from EPS to 1. Signals fall with time, so halving finds it."""
        low, high = torch.full_like(signal, EPS), torch.ones_like(signal)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            later = self.model.schedule.signal(middle) > signal
            low, high = torch.where(later, middle, low), torch.where(later, high, middle)
        return high

    def noise(self) -> Tensor:
        """(B, L): the uniform state at t = 1, given tokens in place."""
        u, _ = self.rng.uniforms(0, steps.positions(self.fixed), Purpose.START)
        return torch.where(self.free, uniform_token(u, self.model.vocab_size), self.fixed)

    def call(
        self,
        seen: Tensor,
        t: float | Tensor,
        *transitions: Transition,
        blend: Blend | None = None,
        clean: Tensor | None = None,
        temperature: float = 1.0,
    ) -> tuple[Any, ...]:
        """One call of the denoiser on `seen` (B, L) -> its `Features`, and an `Outcome` for each transition.

        Transitions are planned before the body runs, so that it runs only where one of them needs it; without any it
        runs everywhere, for a sampler that reads the distributions itself. Such a one may tell each sample its own time (B,).
        `clean` (B, L) bool is where `seen` holds no noise: unless said, the given tokens. `temperature` is the one at
        which the sampler reads the distributions, for models that are told of their last call."""
        if isinstance(t, Tensor) and transitions:
            raise LimpetError(
                "a transition has the coins of one time: tell all samples the same, or read the distributions"
            )
        told = float(t[0]) if isinstance(t, Tensor) else t
        model, input = self.model, self.shown(seen, t, clean)
        asked = len(transitions)
        if self.trace:
            transitions = transitions or (self._look(input, told),)  # whoever watches is told of this call too
            transitions = tuple(replace(transition, inspect=self.free) for transition in transitions)
        plans = [self.backend.plan(transition, input) for transition in transitions]
        values = self._body(seen, t, lambda: _union([plan.needed() for plan in plans]), clean)
        if values.shape[:2] != seen.shape or values.dim() != 3:
            raise LimpetError(
                f"{model.name} made features of shape {tuple(values.shape)} at t = {told:g} from tokens "
                f"of shape {tuple(seen.shape)}; its body must give (batch, length, width)"
            )
        if model.carries and self.last:
            self.last[:] = [PreviousCall(values, temperature)]
        head, read = self._head, values
        if blend is not None:
            head, read = partial(self._blended, blend.weight), torch.cat([values, blend.values], -1)
        return Features(values, input), *[self.backend.advance(head, read, plan) for plan in plans][:asked]

    def log_probs(
        self,
        features: Features,
        rows: Tensor,
        temperature: float = 1.0,
        call: int | None = None,
        predicted: bool = False,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The log-probabilities, up to a constant, at rows (R, 2) of samples and positions that the call needed: some rows and
        their (r, V), in pieces that bound memory. With the number of the call, a distribution that is none is an error. Distributions are
        leave-one-out, unless they are wanted as the model predicts them."""
        values, input = features
        input = input._replace(convert=input.convert and not predicted)
        for some, said in steps.pieces(self._head, values, rows, input.vocab_size):
            sample, position = some.unbind(-1)
            log_probs = steps.log_probs(said, input.tokens[sample, position], steps.of_rows(input, sample), temperature)
            if call is not None and not (sound := log_probs.amax(-1).isfinite()).all():
                row, place = some[(~sound).nonzero()[0, 0]].tolist()
                raise steps.nonfinite_logits(input, call, row * input.tokens.shape[1] + place)
            yield some, log_probs

    def check_finite(self) -> None:
        """Raise if a distribution was none in a call that nobody has waited for."""
        call, place = self.nonfinite_at.tolist()
        if call >= 0:
            raise steps.nonfinite_logits(self.shown(self.fixed, 1.0), call, place)

    def _body(self, seen: Tensor, t: float | Tensor, needed: Needed, clean: Tensor | None) -> Tensor:
        """The body, told which tokens are clean if it is a model that hears that, and of labels only if it wants to."""
        model = self.model
        if model.told_clean == "nothing":
            clean = None
        elif clean is None or model.told_clean == "given":
            clean = ~self.free if clean is None else clean & ~self.free
        if model.carries:  # all of it is needed, if only by the next call
            return model.body_carried(seen, t, clean, self._carried())
        return (
            model.body_at(seen, t, needed) if model.told_clean == "nothing" else model.body_told(seen, t, needed, clean)
        )

    def _carried(self) -> Tensor | None:
        """(B, L, E): what a model is told of its last call, made of its distributions in bounded pieces."""
        made = self.last[-1] if self.last else None
        if made is None:
            return None
        every = torch.ones_like(self.fixed).nonzero()
        said = steps.pieces(self._head, made.values, every, self.model.vocab_size)
        soft = torch.cat([self.model.carry(logits / made.temperature) for _, logits in said])
        return soft.view(*self.fixed.shape, -1)

    def shown(self, seen: Tensor, t: float | Tensor, clean: Tensor | None = None) -> Input:
        """What a call shows the denoiser, and how what it says is to be read: of a posterior, which signal's evidence
        is in it."""
        model, convert = self.model, self.model.predicts == "posterior"
        signal = model.schedule.signal(t) if isinstance(t, Tensor) else self.signal(t)
        if convert:
            signal = model.evidence(signal, (~self.free if clean is None else clean).double().mean(-1))
        return Input(seen, signal, model.vocab_size, convert, self.rng, self.nonfinite_at, model.name)

    def _look(self, input: Input, t: float) -> Transition:
        """A transition that goes nowhere."""
        return Transition(0, input.tokens, self.no_positions, self.free, nested(self.signal(t), 0.0))

    def _head(self, features: Tensor) -> Tensor:
        logits = self.model.head(features)
        if logits.shape != (*features.shape[:-1], self.model.vocab_size):
            raise LimpetError(
                f"{self.model.name} made logits of shape {tuple(logits.shape)} from features of shape "
                f"{tuple(features.shape)}; its head must give {self.model.vocab_size}, one for each token"
            )
        return logits

    def _blended(self, weight: float, features: Tensor) -> Tensor:
        """The head on the features of two calls, side by side. What a posterior's conversion takes off both logits of
        a token it takes off this one: they saw the same token there."""
        own, other = (self._head(part.contiguous()) for part in features.chunk(2, -1))
        blended = torch.empty(own.shape, dtype=torch.promote_types(own.dtype, torch.float32), device=own.device)
        few = max(1, steps.PIECE[own.device.type] // own.shape[-1])
        parts = (torch.split(part.flatten(0, -2), few) for part in (own, other, blended))
        for mine, theirs, both in zip(*parts, strict=True):
            mine, theirs = mine.to(both.dtype), theirs.to(both.dtype)
            both.copy_(torch.where(theirs > -torch.inf, (1 + weight) * mine - weight * theirs, mine))
        return blended


def open_context(
    model: Denoiser, rng: CounterRNG, fixed: Tensor, backend: Backend | None = None, trace: bool = False
) -> Context:
    """A path with the fastest backend of its device, unless told another."""
    return Context(model, rng, fixed, backend or steps.fastest(fixed.device), trace)


def generate(sampler: Sampler, ctx: Context, state: State | None = None) -> Iterator[tuple[State, StepInfo]]:
    """Every call of a path, the final step last; from the start, or on from a state of another path (a fork)."""
    state = sampler.begin(ctx) if state is None else state
    while state.call < sampler.nfe:
        due = state.call + 1
        state, info = stepped(sampler, ctx, state)
        if state.call != due:
            raise LimpetError(f"{sampler.name} says that {state.call} calls were made after call {due}: count them")
        yield state, info
    ctx.check_finite()


def stepped(sampler: Sampler, ctx: Context, state: State) -> tuple[State, StepInfo]:
    """One step of a sampler; the state takes along what its call made, so that another path may go on from it."""
    ctx.last[:] = [state.made]
    after, info = sampler.step(ctx, state)
    return after._replace(made=ctx.last.pop()), info


def _union(needed: list[Tensor | None]) -> Tensor | None:
    """The positions that any of several plans needs."""
    if len(needed) == 1:
        return needed[0]
    if not needed or any(index is None for index in needed):
        return None
    every: Tensor = torch.unique(torch.cat([index for index in needed if index is not None]))
    return every
