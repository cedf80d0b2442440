"""The exact output law of a sampler on a tiny source: its own calls, each draw replaced by its whole law.

A backend that draws nothing keeps the law of every next token; the sampler does all the rest (what is visible,
selected and stored). Rows of its state carry mass, and rows that no later call can tell apart are one row."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from limpet.denoisers import Denoiser
from limpet.engine import process, support
from limpet.engine.path import State, open_path
from limpet.engine.selector import select
from limpet.engine.steps import Backend, Head, Outcome, Whole, dense
from limpet.engine.streams import Stream
from limpet.errors import LimpetError
from limpet.samplers import CRS, Native
from limpet.samplers.crs import OPEN, Memory
from limpet.theory.laws import decode, encode, product, sequences

CODES = 2**24  # the most rows there could be
CHUNK = 2**22  # successors held at once
DRAWN = -1  # stands for a token that has its law


def output_law(source: Denoiser, sampler: Native) -> Tensor:
    """(V**L,) float64: the probability of each output, in the order of its base-V code, position 0 leading."""
    if type(sampler) not in (Native, CRS):
        raise LimpetError(f"the exact output law knows what native and CRS remember, not what {sampler.name} does")
    if isinstance(sampler, CRS) and sampler.values == "nucleus":
        raise LimpetError("values='nucleus' draws its labels; the exact output law takes deterministic ones")
    vocab_size, length = source.vocab_size, source.length
    base = vocab_size * (1 + vocab_size * _ages(sampler))  # a position is a token, and free or with a label of some age
    if base**length > CODES:
        raise LimpetError(
            f"the exact output law of this sampler on {length} tokens of {vocab_size} symbols may need"
            f" {base}^{length} rows; it takes at most {CODES}: use a smaller source or a shorter horizon"
        )
    laws: list[Tensor] = []
    backend = Backend(Whole, partial(_keep, laws), select)
    tokens = sequences(vocab_size, length)
    mass = torch.full((len(tokens),), 1 / len(tokens), dtype=torch.float64)
    state = None
    while True:
        free = torch.full((len(mass), length), -1)
        path = open_path(source, Stream(0, torch.arange(len(mass))), free, backend)
        state = sampler.begin(path)._replace(tokens=tokens) if state is None else state
        state, _ = sampler.step(path, state)
        drawn = (state.tokens == DRAWN)[..., None]
        law = torch.where(drawn, laws.pop(), one_hot(state.tokens.clamp(min=0), vocab_size).double())
        if state.call == sampler.nfe:
            return _spread(law, mass, torch.zeros_like(free), vocab_size)
        total = _spread(law, mass, _tags(sampler, state, vocab_size), base)
        code = total.nonzero()[:, 0]
        state, mass = _state(sampler, state.call, decode(code, base, length), vocab_size), total[code]


def _keep(laws: list[Tensor], head: Head, features: Tensor, plan: Whole) -> Outcome:
    """A backend that puts the law of the next tokens into `laws`. Where a sampler does not ask for a next token, it
    does not look at the position's own again: any will do."""
    transition = plan.transition
    law = dense.law_of(head, features, plan)  # (B, L, V)
    largest, top = law.max(-1)
    restricted = support.restrict(law, transition.top_p, transition.boundary)
    laws.append(process.reverse_law(restricted, transition.tokens, transition.signal_t, transition.signal_s))
    deficit = torch.where(transition.inspect, 1 - largest, math.inf)
    return Outcome(torch.where(transition.revise, DRAWN, 0), top.masked_fill(~transition.inspect, 0), deficit)


def _ages(sampler: Native) -> int:
    """How many ages of a label are told apart: all beyond the horizon are one, and so are all if none expires."""
    if not isinstance(sampler, CRS):
        return 0
    return 1 if sampler.horizon is None or sampler.horizon >= sampler.nfe else sampler.horizon + 1


def _tags(sampler: Native, state: State, vocab_size: int) -> Tensor:
    """(B, L): what matters at a position besides its token. 0 where it is free; else how old its label is and, while
    the label can still be seen or copied to the output, what it says."""
    if not isinstance(sampler, CRS):
        return torch.zeros_like(state.tokens)
    labels, selected_at = state.memory
    selected, age = selected_at < OPEN, (state.call - selected_at).clamp(max=_ages(sampler))
    matters = selected & ((age <= (sampler.horizon or math.inf)) | (sampler.write != "input"))
    return torch.where(selected, 1 + vocab_size * (age - 1), 0) + torch.where(matters, labels, 0)


def _state(sampler: Native, call: int, digit: Tensor, vocab_size: int) -> State:
    """The rows whose positions have these tags and tokens."""
    tag, tokens = digit // vocab_size, digit % vocab_size
    if not isinstance(sampler, CRS):
        return State(call, tokens)
    selected, age, labels = tag > 0, (tag - 1) // vocab_size + 1, (tag - 1) % vocab_size
    return State(call, tokens, Memory(torch.where(selected, labels, 0), torch.where(selected, call - age, OPEN)))


def _spread(law: Tensor, mass: Tensor, tags: Tensor, base: int) -> Tensor:
    """(base**L,): the mass of each code of tags and tokens, when rows with these tags draw their tokens."""
    size, length = law.shape[2], law.shape[1]
    here = encode(tags * size, base)
    there = encode(sequences(size, length), base)
    total = mass.new_zeros(base**length)
    few = max(1, CHUNK // size**length)  # rows at a time, so that their joints fit
    for rows in map(slice, range(0, len(law), few), range(few, len(law) + few, few)):
        total.index_add_(0, (here[rows, None] + there).flatten(), (mass[rows, None] * product(law[rows])).flatten())
    return total
