"""The exact output law of a policy on a tiny source: the sampler's own steps, each draw replaced by its whole law.

A backend that draws nothing reports the law of every next token; the sampler does all the rest (what is visible,
selected and stored). Rows of its state carry mass, and rows that no later step can tell apart are one row."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from limpet import process, sampler, support
from limpet.denoisers import Denoiser
from limpet.errors import LimpetError
from limpet.policy import Policy
from limpet.sampler import NEVER, Run, State
from limpet.samples import prepare
from limpet.steps import Head, Outcome, Transition
from limpet.streams import Stream
from limpet.theory.laws import decode, encode, product, sequences

CODES = 2**24  # the most rows there could be
CHUNK = 2**22  # successors held at once


def output_law(source: Denoiser, policy: Policy) -> Tensor:
    """(V**L,) float64: the probability of each output, in the order of its base-V code, position 0 leading."""
    if policy.values == "nucleus":
        raise LimpetError("values='nucleus' draws its labels; the exact output law takes deterministic ones")
    base = _base(source, policy)
    if base**source.length > CODES:
        raise LimpetError(
            f"the exact output law of this policy on {source.length} tokens of {source.vocab_size} symbols may need"
            f" {base}^{source.length} rows; it takes at most {CODES}: use a smaller source or a shorter horizon"
        )
    laws: list[Tensor] = []
    tokens = sequences(source.vocab_size, source.length)
    state = State(0, tokens, torch.zeros_like(tokens), torch.full_like(tokens, NEVER))
    mass = torch.full((len(tokens),), 1 / len(tokens), dtype=torch.float64)
    while state.step < policy.nfe - 1:
        run = _run(source, policy, state, laws)
        state, _ = sampler.step(run, state)
        state, mass = _spread(run, base, state, mass, laws.pop())
    run = _run(source, policy, state, laws)
    final, _ = sampler.readout(run, state)
    copied = (state.selected_at != NEVER) & (policy.write != "input")
    drawn = ~copied & (policy.endpoint == "ancestral")
    law = torch.where(drawn[..., None], laws.pop(), one_hot(final.tokens, source.vocab_size).double())
    return torch.stack([mass[rows] @ product(law[rows]) for rows in _chunks(law)]).sum(0)


def _ages(policy: Policy) -> int:
    """How many ages of a label are told apart: all beyond the horizon are one, and so are all if none expires."""
    if policy.horizon is None or policy.horizon >= policy.nfe:
        return 1
    return policy.horizon + 1 if policy.horizon else 0


def _base(source: Denoiser, policy: Policy) -> int:
    """How many things a position can be: a token, and free or with a label of some age."""
    return source.vocab_size * (1 + source.vocab_size * _ages(policy))


def _run(source: Denoiser, policy: Policy, state: State, laws: list[Tensor]) -> Run:
    """The policy resolved for these rows, as `limpet.sample` resolves it; nothing is ever drawn from the stream."""
    stream, fixed = Stream(0, torch.arange(len(state.tokens))), torch.full_like(state.tokens, -1)
    return prepare(source, policy, stream, fixed, advance=partial(_keep, laws))


def _keep(laws: list[Tensor], head: Head, features: Tensor, transition: Transition) -> Outcome:
    """A backend that puts the law of the next tokens into `laws` and leaves the tokens as they are."""
    law = head(features).double().softmax(-1)  # (B, L, V)
    z = transition.tokens
    if transition.convert:
        law = process.leave_one_out(law, transition.seen, transition.signal_t)
    largest, top = law.max(-1)
    restricted = support.restrict(law, transition.top_p, transition.boundary)
    moved = process.reverse_law(restricted, z, transition.signal_t, transition.signal_s)
    laws.append(torch.where(transition.revise[..., None], moved, one_hot(z, law.shape[-1]).double()))
    deficit = torch.where(transition.inspect, 1 - largest, math.inf)
    return Outcome(z, top.masked_fill(~transition.inspect, 0), deficit)


def _spread(run: Run, base: int, state: State, mass: Tensor, law: Tensor) -> tuple[State, Tensor]:
    """Every row to all its successors, and those that agree in all that still matters summed into one.

    What matters at a position: its token, unless a label hides it for ever; and whether it is free or how old its
    label is and, while the label can still be seen or copied to the output, what it says."""
    vocab_size, length = run.denoiser.vocab_size, law.shape[1]
    selected = state.selected_at != NEVER
    hidden = selected & run.covered
    law = torch.where(hidden[..., None], one_hot(torch.zeros_like(state.tokens), vocab_size).double(), law)
    age = (state.step - state.selected_at).clamp(max=_ages(run.policy))
    matters = selected & ((age <= run.horizon) | (run.policy.write != "input"))
    tag = torch.where(selected, 1 + vocab_size * (age - 1), 0) + torch.where(matters, state.labels, 0)

    here = encode(tag * vocab_size, base)
    there = encode(sequences(vocab_size, length), base)
    total = mass.new_zeros(base**length)
    for rows in _chunks(law):
        total.index_add_(0, (here[rows, None] + there).flatten(), (mass[rows, None] * product(law[rows])).flatten())
    code = total.nonzero()[:, 0]
    digit = decode(code, base, length)
    tag, tokens = digit // vocab_size, digit % vocab_size
    selected, age, labels = tag > 0, (tag - 1) // vocab_size + 1, (tag - 1) % vocab_size
    merged = State(
        step=state.step,
        tokens=tokens,
        labels=torch.where(selected, labels, 0),
        selected_at=torch.where(selected, state.step - age, NEVER),
    )
    return merged, total[code]


def _chunks(law: Tensor) -> list[slice]:
    """Rows of (B, L, V) laws, so many at a time that their joints fit."""
    size = max(1, CHUNK // law.shape[2] ** law.shape[1])
    return [slice(start, start + size) for start in range(0, len(law), size)]
