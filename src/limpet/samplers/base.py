"""The interface of a sampler: `Sampler`, the `State` it returns, the `StepInfo` of a call, the `Context` of a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from limpet import registry
from limpet.diffusion import backends
from limpet.diffusion.backends import Backend, NetworkCall, Outcome, Transition
from limpet.diffusion.process import EPS
from limpet.diffusion.rng import CounterRNG, Purpose, uniform_token
from limpet.diffusion.transitions import nested
from limpet.errors import LimpetError
from limpet.models import Cache, Denoiser, ModelInput, Rows, all_rows, check_model
from limpet.samplers.builtin import BUILTIN, GROUP
from limpet.samplers.params import check_names, params

BISECTIONS = 52  # halvings of an interval of times: as many as a float64 has digits


class Kept(NamedTuple):
    """What a trajectory with `refresh` keeps of its calls so far, so that the next need not compute every position."""

    calls: int  # made with it
    tokens: Tensor  # (B, L) the tokens that the keys and values were computed from
    layers: tuple[Tensor, ...]  # keys and values, see `Cache`
    values: Tensor | None  # (B, L, D) the features that each position last had, for a trace


class Features(NamedTuple):
    """What the backbone returned for an input, valid at the positions that the call's transitions need."""

    values: Tensor  # (B, L, D)
    call: NetworkCall
    temperature: float = 1.0  # at which the sampler reads the predictions
    is_read_next: bool = False  # whether the next call reads this prediction (self-conditioned models)
    kept: Kept | None = None  # for the next call of a sampler with `refresh`


class State(NamedTuple):
    """What a trajectory carries from call to call."""

    call: int  # how many calls have been made
    tokens: Tensor  # (B, L) the noisy tokens x_t; after the last call, the output
    memory: tuple[Tensor, ...] = ()  # (B, L) each: the sampler's own
    previous: Features | None = None  # of the last call, for a self-conditioned model
    kept: Kept | None = None  # of the calls so far, for a sampler with `refresh`; without it the next computes all

    def next(self, tokens: Tensor, features: Features, memory: tuple[Tensor, ...] = ()) -> State:
        """The state after a call that returned these features."""
        return State(self.call + 1, tokens, memory, features if features.is_read_next else None, features.kept)

    def __repr__(self) -> str:
        names = getattr(self.memory, "_fields", range(len(self.memory)))
        return f"<State after call {self.call}: tokens {tuple(self.tokens.shape)}, memory {[*names]}>"


class StepInfo(NamedTuple):
    """What one call read and did, for viewers and audits; no sampler reads it."""

    call: int
    t: float
    model_input: Tensor  # (B, L) the tokens that the network was given
    outcome: Outcome
    masks: Mapping[str, Tensor]  # (B, L) bool by name, for viewers to draw

    def __repr__(self) -> str:
        shape = tuple(self.model_input.shape)
        return f"<StepInfo of call {self.call} at t {self.t:.4g}: model input {shape}, masks {[*self.masks]}>"


class Blend(NamedTuple):
    """A second call with the same free tokens, for guidance: log p + weight (log p - log p of the second), up to a
    constant. Where the second gives no mass, p is left alone."""

    values: Tensor  # (B, L, D) its features
    weight: float


@dataclass(frozen=True)
class Context:
    """What stays the same while a batch is sampled: model, random numbers, fixed tokens, backend."""

    model: Denoiser
    rng: CounterRNG
    fixed: Tensor  # (B, L) fixed tokens, -1 where the position is free
    backend: Backend
    trace: bool = False  # inspect every prediction and draw every state, also where the sampler needs neither
    refresh: int = 1  # of the sampler

    def __post_init__(self) -> None:
        check_model(self.model)
        if self.refresh > 1 and not self.model.cache_bytes:
            raise LimpetError(
                f"{self.model.name} computes every position at every call, and the sampler has refresh {self.refresh}: "
                "leave refresh out"
            )

    def __repr__(self) -> str:
        return f"<Context of {len(self.fixed)} x {self.fixed.shape[1]} tokens: {self.model!r}>"

    @cached_property
    def free(self) -> Tensor:
        """(B, L) bool: positions that are not fixed."""
        return self.fixed < 0

    @property
    def draws_all(self) -> bool:
        """Whether every state is drawn, also one that the sampler never reads. With `refresh` a trace may not: it
        would compute other positions, and so draw another sample."""
        return self.trace and self.refresh == 1

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
        """(2,) where an asynchronous backend writes the call and flat position of non-finite logits; -1 for none."""
        return torch.full((2,), -1, dtype=torch.long, device=self.fixed.device)

    def signal(self, t: float) -> float:
        """The signal level at a time."""
        return self.model.schedule.level(t)

    def time(self, signal: Tensor) -> Tensor:
        """(B,) signal levels -> (B,) the time of each, from EPS to 1, by bisection: the signal falls with time."""
        low, high = torch.full_like(signal, EPS), torch.ones_like(signal)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            is_later = self.model.schedule.signal(middle) > signal
            low, high = torch.where(is_later, middle, low), torch.where(is_later, high, middle)
        return high

    def noise(self) -> Tensor:
        """(B, L) the initial state: uniform tokens, with the fixed tokens written in."""
        u, _ = self.rng.uniforms(0, backends.positions(self.fixed), Purpose.START)
        return torch.where(self.free, uniform_token(u, self.model.vocab_size), self.fixed)

    def call(
        self,
        state: State,
        model_input: Tensor,
        t: float | Tensor,
        *transitions: Transition,
        blend: Blend | None = None,
        clean: Tensor | None = None,
        temperature: float = 1.0,
    ) -> tuple[Any, ...]:
        """One network call -> its `Features`, then an `Outcome` for each transition.

        Transitions are planned before the backbone runs, so that it computes only what one of them needs. Without a
        transition it computes every position, for a sampler that reads the predictions with `log_probs`; such a
        sampler may give each sample its own time.

        state: the state before the call. model_input: (B, L) the tokens that the network is given. t: one time, or
        (B,). blend: a second call for guidance. clean: (B, L) bool, the positions of `model_input` that hold no noise
        (default: the fixed ones). temperature: the one at which the sampler reads the predictions, for
        self-conditioned models."""
        if isinstance(t, Tensor) and transitions:
            raise LimpetError(
                "a transition has the coins of one time: give all samples the same time, or read the predictions"
            )
        time = float(t[0]) if isinstance(t, Tensor) else t
        model, call = self.model, self.network_call(model_input, t, clean)
        wanted = len(transitions)
        cache = None if self.refresh == 1 else self._cache(state.kept, transitions, call)
        if self.trace:
            transitions = transitions or (self._inspection(call, time),)
            transitions = tuple(replace(transition, inspect=self.free) for transition in transitions)
        plans = [self.backend.plan(transition, call) for transition in transitions]
        inputs = ModelInput(
            model_input,
            t,
            (lambda: cache.compute) if self.trace and cache is not None else self._rows(plans),
            self._clean(clean),
            self._previous(state.previous) if model.self_conditioned else None,
            cache,
        )
        values = model.backbone(inputs)
        if not isinstance(values, Tensor) or values.dim() != 3 or values.shape[:2] != model_input.shape:
            raise LimpetError(
                f"{model.name} made features of {_kind(values)} at t = {time:g} from tokens "
                f"of shape {tuple(model_input.shape)}; its backbone must return (batch, length, width)"
            )
        kept = None if cache is None else self._keep(cache, state.kept, model_input, values)
        values = values if kept is None or kept.values is None else kept.values
        features = Features(values, call, temperature, model.self_conditioned, kept)
        head = self._head
        if blend is not None:
            head, values = partial(self._blended_head, blend.weight), torch.cat([values, blend.values], -1)
        return features, *[self.backend.advance(head, values, plan) for plan in plans][:wanted]

    def log_probs(
        self,
        features: Features,
        rows: Tensor,
        temperature: float = 1.0,
        call: int | None = None,
        predicted: bool = False,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The log-probabilities at some positions, up to a constant: the one place where logits are read.

        features: of a call. rows: (R, 2) samples and positions that the call computed. call: its number, to name it
        in the error for non-finite logits (default: no check). predicted: as the model predicts them; by default
        leave-one-out. Yields some of the rows and their (r, V), in pieces that bound memory."""
        spec = features.call._replace(convert=features.call.convert and not predicted)
        for some, log_probs in backends.row_log_probs(self._head, features.values, rows, spec, temperature):
            if call is not None and not (finite := log_probs.amax(-1).isfinite()).all():
                row, place = some[(~finite).nonzero()[0, 0]].tolist()
                raise backends.nonfinite_logits(spec, call, row * spec.tokens.shape[1] + place)
            yield some, log_probs

    def check_finite(self) -> None:
        """Raise if an asynchronous step produced non-finite logits."""
        call, place = self.nonfinite_at.tolist()
        if call >= 0:
            raise backends.nonfinite_logits(self.network_call(self.fixed, 1.0), call, place)

    def network_call(self, model_input: Tensor, t: float | Tensor, clean: Tensor | None = None) -> NetworkCall:
        """What backends need to read the logits of a call: for a posterior, the signal level of its evidence."""
        model, convert = self.model, self.model.predicts == "posterior"
        signal = model.schedule.signal(t) if isinstance(t, Tensor) else self.signal(t)
        if convert:
            signal = model.evidence_signal(signal, (~self.free if clean is None else clean).double().mean(-1))
        return NetworkCall(model_input, signal, model.vocab_size, convert, self.rng, self.nonfinite_at, model.name)

    def _cache(self, kept: Kept | None, transitions: tuple[Transition, ...], call: NetworkCall) -> Cache:
        """What a call of a sampler with `refresh` computes: every position in the first and in every `refresh`-th;
        else those whose token differs from the one that their keys and values were computed from, and those whose
        prediction a transition needs."""
        if kept is None:
            check_memory(self.model, self.fixed)
        if kept is None or kept.calls % self.refresh == 0:
            return Cache(None, (), [])
        needed = _union([self.backend.plan(transition, call).needed() for transition in transitions])
        if needed is None:
            return Cache(None, (), [])
        computed = (call.tokens != kept.tokens).flatten().index_fill(0, needed.long(), True)
        return Cache(computed.nonzero()[:, 0], kept.layers, [])

    def _keep(self, cache: Cache, before: Kept | None, model_input: Tensor, values: Tensor) -> Kept:
        """What the next call reads of one with features (B, L, D)."""
        if not cache.after:
            raise LimpetError(
                f"{self.model.name} has cache_bytes and kept nothing of a call: append to inputs.cache.after"
            )
        here, old = cache.compute, None if before is None else before.values
        if here is not None and old is not None:
            values = old.flatten(0, 1).index_copy(0, here, values.flatten(0, 1)[here]).view_as(values)
        calls = 1 if before is None else before.calls + 1
        return Kept(calls, model_input, tuple(cache.after), values if self.trace else None)

    def _rows(self, plans: list[Any]) -> Rows:
        """Which positions any of the plans needs; a self-conditioned model needs all, if only for the next call."""
        if self.model.self_conditioned:
            return all_rows
        return lambda: _union([plan.needed() for plan in plans])

    def _clean(self, clean: Tensor | None) -> Tensor | None:
        """The clean tokens that the model wants to know of."""
        if self.model.clean_tokens == "ignored":
            return None
        if clean is None or self.model.clean_tokens == "fixed":
            return ~self.free if clean is None else clean & ~self.free
        return clean

    def _previous(self, features: Features | None) -> Tensor | None:
        """(B, L, E) what a self-conditioned model reads of the previous call, computed in pieces that bound memory."""
        if features is None:
            return None
        every = torch.ones_like(self.fixed).nonzero()
        pieces = backends.head_in_pieces(self._head, features.values, every, self.model.vocab_size)
        parts = [self.model.self_condition(logits / features.temperature) for _, logits in pieces]
        return torch.cat(parts).view(*self.fixed.shape, -1)

    def _inspection(self, call: NetworkCall, t: float) -> Transition:
        """A transition that changes nothing, so that predictions are inspected."""
        return Transition(0, call.tokens, self.no_positions, self.free, nested(self.signal(t), 0.0))

    def _head(self, features: Tensor) -> Tensor:
        logits = self.model.head(features)
        size = self.model.vocab_size
        if not isinstance(logits, Tensor) or logits.shape != (*features.shape[:-1], size) or logits.is_complex():
            raise LimpetError(
                f"{self.model.name} made logits of {_kind(logits)} from features of shape {tuple(features.shape)}; "
                f"its head must return {size}, one real number for each token"
            )
        return logits

    def _blended_head(self, weight: float, features: Tensor) -> Tensor:
        """The head on the features of two calls, side by side. Both calls read the same token at a position, so the
        leave-one-out conversion of the blend takes off what it would take off each."""
        own, other = (self._head(part.contiguous()) for part in features.chunk(2, -1))
        blended = torch.empty(own.shape, dtype=torch.promote_types(own.dtype, torch.float32), device=own.device)
        few = max(1, backends.PIECE[own.device.type] // own.shape[-1])
        parts = (torch.split(part.flatten(0, -2), few) for part in (own, other, blended))
        for mine, theirs, both in zip(*parts, strict=True):
            mine, theirs = mine.to(both.dtype), theirs.to(both.dtype)
            both.copy_(torch.where(theirs > -torch.inf, (1 + weight) * mine - weight * theirs, mine))
        return blended


def check_memory(model: Denoiser, tokens: Tensor) -> None:
    """Raise unless the memory that a cache takes for a batch (B, L) is free: twice, as a call makes a new one."""
    device, needed = tokens.device, 2 * model.cache_bytes * tokens.numel()
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
        free = next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), needed)
    if needed > free:
        raise LimpetError(
            f"the cache of {model.name} takes {needed / 2**30:.1f} GiB for {tokens.shape[0]} samples of "
            f"{tokens.shape[1]} tokens, and {free / 2**30:.1f} GiB are free on {device}: use a smaller batch, or leave "
            "refresh out"
        )


def _kind(value: Any) -> str:
    """What a model returned in place of features or logits: its shape, or its type where that is wrong."""
    if not isinstance(value, Tensor):
        return f"type {type(value).__name__}"
    return f"{'complex numbers in ' if value.is_complex() else ''}shape {tuple(value.shape)}"


def _union(needed: list[Tensor | None]) -> Tensor | None:
    """The positions that any of several plans needs; None for all."""
    if len(needed) == 1:
        return needed[0]
    if not needed or any(index is None for index in needed):
        return None
    every: Tensor = torch.unique(torch.cat([index for index in needed if index is not None]))
    return every


class Sampler(ABC):
    """A way to sample a trajectory. A subclass is a frozen dataclass; its fields are its parameters."""

    nfe: int
    refresh = 1  # a sampler without the parameter (see `refresh_param`) computes every position at every call
    needs_fixed: ClassVar[bool] = False  # whether it does nothing unless some tokens are fixed

    def init(self, ctx: Context) -> State:
        """The first state: uniform tokens at t = 1, fixed tokens in place, an empty memory."""
        return State(0, ctx.noise())

    @abstractmethod
    def step(self, ctx: Context, state: State) -> tuple[State, StepInfo]:
        """One network call: the state after it, and what it read and did. The last of `nfe` returns the output."""

    def model_input(self, state: State) -> Tensor:
        """(B, L) the tokens that the next call gives the network. A sampler that changes them says so here."""
        return state.tokens

    def replay(self, ctx: Context, recorded: tuple[Any, ...]) -> State:
        """The first state of a trajectory that repeats the choices of a finished one with this final memory."""
        raise LimpetError(f"{self.name} cannot replay: leave replay out")

    def finished(self, state: State) -> Tensor:
        """(B,) bool: samples that no later call changes. By default none."""
        return torch.zeros(len(state.tokens), dtype=torch.bool, device=state.tokens.device)

    def shared_calls(self, other: Sampler) -> int:
        """How many first calls another sampler makes in the same way. By default 0, which is always safe."""
        return 0

    def __post_init__(self) -> None:
        for name, param in params(type(self)).items():
            if not param.accepts(value := getattr(self, name)):
                raise LimpetError(f"{self.name} has {name} {value!r}; it takes {param.takes}")

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls.__repr__ = Sampler.__repr__  # type: ignore[method-assign]  # dataclass does not replace one that is there

    def __repr__(self) -> str:
        """The class, its calls, and the parameters that differ from their defaults."""
        changed = (f"{name}={getattr(self, name)!r}" for name in self._changed)
        return f"{type(self).__name__}({', '.join([f'nfe={self.nfe}', *changed])})"

    @property
    def _changed(self) -> list[str]:
        """The parameters other than nfe that differ from their defaults."""
        listed = params(type(self)).items()
        return [name for name, param in listed if name != "nfe" and getattr(self, name) != param.default]

    @property
    def name(self) -> str:
        """Its name on a command line and in study files."""
        return registry.name_of(type(self), GROUP, BUILTIN)

    @property
    def caption(self) -> str:
        """Its name and the parameters other than nfe that differ from their defaults."""
        values = {name: getattr(self, name) for name in self._changed}
        changed = [f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
                   for name, value in values.items()]  # fmt: skip
        return " ".join([self.name.rpartition("/")[2], *changed])

    def to_dict(self) -> dict[str, Any]:
        """Its name, as `sampler`, and every parameter; `from_dict` reads it. A refresh of 1 is left out, as in what was
        written when there was none."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}  # type: ignore[arg-type]
        return {
            "sampler": self.name,
            **{name: value for name, value in values.items() if (name, value) != ("refresh", 1)},
        }

    def replace(self, **changes: Any) -> Self:
        """The same sampler with some parameters changed."""
        check_names(type(self), changes, self.name)
        return replace(self, **changes)  # type: ignore[type-var]

    def clamped(self, length: int, vocab_size: int) -> Self:
        """The same sampler with whole numbers lowered to the most that can matter: a trajectory has only so many
        positions and calls, a vocabulary so many tokens."""
        most = {"path": length + self.nfe, "vocabulary": vocab_size}
        limits = {name: most.get(param.counts) for name, param in params(type(self)).items()}
        changes = {
            name: limit
            for name, limit in limits.items()
            if limit and type(value := getattr(self, name)) is int and value > limit
        }
        return self.replace(**changes) if changes else self
