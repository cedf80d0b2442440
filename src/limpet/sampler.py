"""The paper's Algorithm 1: `begin`, `step`, `readout`, and `generate`, which yields every step of a path."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from limpet.denoisers import Denoiser
from limpet.labels import Choice, Rule
from limpet.policy import Policy
from limpet.selector import Selector
from limpet.steps import Backend, Planner, Transition
from limpet.streams import Purpose, Stream, uniform_token

NEVER = 2**31 - 1  # stands for the step that selects a position, where none has


class State(NamedTuple):
    """What a path carries from step to step."""

    step: int
    tokens: Tensor  # (B, L) the mutable noisy state x_t; after the readout, the output
    labels: Tensor  # (B, L) the stored label, where there is one
    selected_at: Tensor  # (B, L) the step that selected the position, or NEVER


class Info(NamedTuple):
    """What one step saw and did: for viewers and audits, never read by the sampler."""

    step: int
    t: float
    input: Tensor  # (B, L) what the denoiser saw: the state with the visible labels written over it
    visible: Tensor  # (B, L) bool
    chosen: Tensor  # (B, L) bool: newly selected, first visible in the next step
    top: Tensor  # (B, L) argmax of the law, 0 where it was not inspected
    deficit: Tensor  # (B, L) 1 - max law, inf where it was not inspected


@dataclass(frozen=True)
class Run:
    """Everything that stays fixed along a path: a policy resolved for one model and one batch (see samples.prepare)."""

    denoiser: Denoiser
    policy: Policy
    stream: Stream
    times: list[float]  # N nodes; the last is the readout's
    signals: list[float]  # the signal at each node
    top_p: list[float]  # for the draw at each node
    warmup: int  # W: the first step that may select
    horizon: float  # H
    count: Tensor  # (B,) K, the most positions selected in one step
    budget: Tensor  # (B,) E, the most deficit selected in one step
    fixed: Tensor  # (B, L) given tokens, -1 where the position is free
    free: Tensor  # (B, L) bool
    replay: Tensor | None  # (B, L) selected_at of a recorded run, in place of the selector
    label: Rule  # what a label holds
    select: Selector  # which positions are selected
    plan: Planner  # what can be done for a reverse step before the body has run
    advance: Backend  # how a reverse step is drawn
    trace: bool  # look at every law and draw every state, also where the sampler itself does not need them

    @property
    def written(self) -> bool:
        """Whether labels are written into the denoiser's input."""
        return self.policy.write != "output"

    @property
    def covered(self) -> bool:
        """Whether a label hides its position's state for ever, so that the state need not be drawn any more."""
        return self.horizon == math.inf and self.written and self.policy.endpoint == "argmax" and not self.trace


def begin(run: Run) -> State:
    """The uniform state at t = 1, fixed tokens in place, nothing selected."""
    positions = torch.arange(run.fixed.shape[1], device=run.fixed.device)
    u, _ = run.stream.uniforms(0, positions, Purpose.START)
    tokens = torch.where(run.free, uniform_token(u, run.denoiser.vocab_size), run.fixed)
    return State(0, tokens, torch.zeros_like(tokens), torch.full_like(tokens, NEVER))


def look(run: Run, state: State) -> tuple[Tensor, Tensor]:
    """Which labels are visible, and the input with them written over the state."""
    visible = state.selected_at < (state.step if run.written else 0)  # selected at e: seen by steps e + 1 .. e + H
    if run.horizon < math.inf:
        visible &= state.selected_at >= state.step - run.horizon
    return visible, torch.where(visible, state.labels, state.tokens)


def step(run: Run, state: State) -> tuple[State, Info]:
    """One reverse step: look, draw the next state, then select positions and store their labels."""
    r = state.step
    visible, seen = look(run, state)

    unselected = run.free & (state.selected_at == NEVER)
    selecting = run.replay is None and r >= run.warmup and run.horizon > 0
    eligible = unselected & (selecting if run.replay is None else run.replay == r)
    inspect = eligible | visible if run.policy.values == "refreshed" else eligible
    revise = unselected if run.covered else run.free
    # The transition starts from the state, not from the input, and the labels chosen below do not touch it.
    transition = _transition(run, state, seen, revise, inspect, run.signals[r + 1])
    features = run.denoiser.body_at(seen, run.times[r], transition.needed)
    outcome = run.advance(run.denoiser.head, features, transition)

    chosen = eligible  # none, or those of the recorded run
    if selecting:
        chosen = run.select(outcome.deficit, eligible, run.count, run.budget, run.policy.spacing)
    labels = run.label(Choice(run.denoiser.head, features, transition, outcome, chosen, visible, state.labels))
    selected_at = torch.where(chosen, r, state.selected_at)

    info = Info(r, run.times[r], seen, visible, chosen, outcome.top, outcome.deficit)
    return State(r + 1, outcome.tokens, labels, selected_at), info


def readout(run: Run, state: State) -> tuple[State, Info]:
    """The last call: the argmax of the law everywhere, or one more draw; fixed tokens as they were given."""
    visible, seen = look(run, state)
    nothing = torch.zeros_like(run.free)
    # The argmax is inspected, or the transition to signal 1 draws from the posterior C_{t,z} h.
    revise, inspect = (nothing, run.free) if run.policy.endpoint == "argmax" else (run.free, nothing)
    transition = _transition(run, state, seen, revise, inspect, signal_s=1.0)
    features = run.denoiser.body_at(seen, run.times[-1], transition.needed)
    outcome = run.advance(run.denoiser.head, features, transition)
    read = torch.where(run.free, outcome.top, run.fixed)
    tokens = read if run.policy.endpoint == "argmax" else outcome.tokens
    if run.policy.write != "input":
        tokens = torch.where(state.selected_at == NEVER, tokens, state.labels)
    info = Info(state.step, run.times[-1], seen, visible, nothing, outcome.top, outcome.deficit)
    return state._replace(step=state.step + 1, tokens=tokens), info


def generate(run: Run, state: State | None = None) -> Iterator[tuple[State, Info]]:
    """Every step of a path, the readout last; from the start, or on from a state of another run (a fork)."""
    state = begin(run) if state is None else state
    while state.step < run.policy.nfe - 1:
        state, info = step(run, state)
        yield state, info
    yield readout(run, state)


def _transition(run: Run, state: State, seen: Tensor, revise: Tensor, inspect: Tensor, signal_s: float) -> Transition:
    """What a backend is told; it may plan ahead, so this comes before the body runs."""
    transition = Transition(
        tokens=state.tokens,
        seen=seen,
        revise=revise,
        inspect=run.free if run.trace else inspect,
        vocab_size=run.denoiser.vocab_size,
        signal_t=run.signals[state.step],
        signal_s=signal_s,
        top_p=run.top_p[state.step],
        boundary=run.policy.boundary,
        convert=run.denoiser.predicts == "posterior",
        stream=run.stream,
        step=state.step,
    )
    return run.plan(transition)
