"""The exact output law of a sampler on a tiny source: its own calls, each draw replaced by its whole law, and each
choice of positions at random by all of them.

A backend that draws nothing keeps the law of every next token; the sampler does all the rest (what is visible,
selected and stored). Rows of its state carry mass, and rows that no later call can tell apart are one row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import combinations, permutations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from limpet.denoisers import Denoiser
from limpet.engine import support
from limpet.engine.path import Path, State, open_path
from limpet.engine.selector import select
from limpet.engine.steps import Backend, Head, Outcome, Whole, coins, dense, reported
from limpet.engine.streams import Stream
from limpet.errors import LimpetError
from limpet.samplers import CRS, DDIM, Gibbs, Mend, Native, Psi, Sampler
from limpet.samplers.crs import OPEN, Memory
from limpet.theory.laws import decode, encode, product, sequences

CODES = 2**24  # the most rows there could be
CHUNK = 2**22  # successors held at once
DRAWN = -1  # stands for a token that has its law
KNOWN = (Native, Psi, DDIM, CRS, Mend)  # all that they remember is below: nothing, or labels


def output_law(source: Denoiser, sampler: Sampler) -> Tensor:
    """(V**L,) float64: the probability of each output, in the order of its base-V code, position 0 leading."""
    predictor = sampler.inner if type(sampler) is Gibbs else sampler
    if type(predictor) not in KNOWN:
        raise LimpetError(f"the exact output law knows what native and CRS remember, not what {predictor.name} does")
    if isinstance(predictor, CRS) and predictor.values == "nucleus":
        raise LimpetError("values='nucleus' draws its labels; the exact output law takes deterministic ones")
    vocab_size, length = source.vocab_size, source.length
    base = vocab_size * (1 + vocab_size * _ages(predictor))  # a position is a token, free or with a label of some age
    if base**length > CODES:
        raise LimpetError(
            f"the exact output law of this sampler on {length} tokens of {vocab_size} symbols may need"
            f" {base}^{length} rows; it takes at most {CODES}: use a smaller source or a shorter horizon"
        )
    tokens = sequences(vocab_size, length)
    mass = torch.full((len(tokens),), 1 / len(tokens), dtype=torch.float64)
    state = None
    for call in range(sampler.nfe):
        path, laws = _open(source, len(mass))
        state = predictor.begin(path)._replace(tokens=tokens) if state is None else state
        mixture, state = _moves(sampler, call, path, state, laws)
        last = call == sampler.nfe - 1
        tags, size = (torch.zeros_like(path.fixed), vocab_size) if last else (_tags(predictor, state, vocab_size), base)
        total = torch.stack([_spread(law, mass * chance, tags, size) for law, chance in mixture]).sum(0)
        if not last:
            code = total.nonzero()[:, 0]
            state, mass = _state(predictor, state.call, decode(code, base, length), vocab_size), total[code]
    return total


def corrected_law(source: Denoiser, sampler: Gibbs, call: int, law: Tensor) -> Tensor:
    """(V**L,): the law of the state after one correction, if `law` (V**L,) was that of the state before; no labels."""
    due, correction = sampler.due(call)
    if correction is None or isinstance(sampler.inner, CRS):
        raise LimpetError(f"call {call} of {sampler.caption} is no correction of a state without labels")
    path, laws = _open(source, len(law))
    mixture, state = _moves(sampler, call, path, State(due, sequences(source.vocab_size, source.length)), laws)
    none = torch.zeros_like(state.tokens)
    return torch.stack([_spread(each, law * chance, none, source.vocab_size) for each, chance in mixture]).sum(0)


def _open(source: Denoiser, rows: int) -> tuple[Path, list[Tensor]]:
    """A path on which nothing is drawn, and where its backend puts the laws of the next tokens."""
    laws: list[Tensor] = []
    free = torch.full((rows, source.length), -1)
    return open_path(source, Stream(0, torch.arange(rows)), free, Backend(Whole, partial(_keep, laws), select)), laws


Mixture = list[tuple[Tensor, Tensor]]  # (B, L, V) laws of independent tokens, and (B,) the chance of these


def _moves(sampler: Sampler, call: int, path: Path, state: State, laws: list[Tensor]) -> tuple[Mixture, State]:
    """One call: the ways in which the next tokens are drawn, and the next state, its tokens aside. States are as a
    predictor counts its calls."""
    size = path.denoiser.vocab_size
    if not isinstance(sampler, Gibbs):
        state, _ = sampler.step(path, state)
        state = state._replace(tokens=state.tokens.where(~_unseen(sampler, state), 0))
        drawn = (state.tokens == DRAWN)[..., None]
        certain = torch.ones(len(drawn), dtype=torch.float64)
        return [(torch.where(drawn, laws.pop(), _points(state.tokens, size)), certain)], state
    due, correction = sampler.due(call)
    if correction is None:
        return _moves(sampler.inner, due, path, state, laws)
    _, free, _ = sampler.look(path, state)
    _, info = sampler.correct(path, state, correction)
    law, still = laws.pop(), _points(state.tokens, size)
    weights = sampler.preference(path, state, info.outcome).exp() if sampler.choose == "margin" else free.double()
    weights = weights.masked_fill(~free, 0.0)
    return [(torch.where((free & where)[..., None], law, still), chance)
            for where, chance in _places(weights, sampler.positions)], state  # fmt: skip


def _unseen(sampler: Sampler, state: State) -> Tensor:
    """(B, L) bool: where no later call looks at the token itself, so that any will do, but for the output's."""
    if not isinstance(sampler, CRS) or not sampler.hides or state.call == sampler.nfe:
        return torch.zeros_like(state.tokens, dtype=torch.bool)
    return (state.memory[1] < OPEN) & (state.tokens != DRAWN)


def _points(tokens: Tensor, vocab_size: int) -> Tensor:
    return one_hot(tokens.clamp(min=0), vocab_size).double()


def _places(weights: Tensor, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(L,) bool, each set of so many positions, and (B,) how likely it is to have the `count` largest of Gumbel's
    perturbations of ln weights (B, L): one is drawn by weight, then another of those that are left, and so on. Where
    no weight is left any will do."""
    length = weights.shape[1]
    count = min(count, length)
    for places in combinations(range(length), count):
        chance = torch.zeros_like(weights[:, 0])
        for order in permutations(places):
            each, left = torch.ones_like(chance), weights.clone()
            for i, place in enumerate(order):
                total = left.sum(-1)
                each = each * torch.where(total > 0, left[:, place] / total, 1 / (length - i))
                left[:, place] = 0
            chance = chance + each
        yield torch.zeros(length, dtype=torch.bool).index_fill(0, torch.tensor(places), True), chance


def _keep(laws: list[Tensor], head: Head, features: Tensor, plan: Whole) -> Outcome:
    """A backend that puts the law of the next tokens into `laws`. Where a sampler does not ask for a next token, the
    position keeps its own. Where labels may change, it tells what they would gain."""
    transition = plan.transition
    law = dense.law_of(head, features, plan)  # (B, L, V)
    largest, top = law.max(-1)
    laws.append(coins.law(support.cut(law, transition.support), transition.tokens, transition.coins))
    tokens = torch.where(transition.revise, DRAWN, transition.tokens)
    return reported(transition, tokens, top, 1 - largest, dense.gain_of(law, transition.against))


def _ages(sampler: Sampler) -> int:
    """How many ages of a label are told apart: all beyond the horizon are one, and so are all if none expires."""
    if not isinstance(sampler, CRS):
        return 0
    return 1 if sampler.horizon is None or sampler.horizon >= sampler.nfe else sampler.horizon + 1


def _tags(sampler: Sampler, state: State, vocab_size: int) -> Tensor:
    """(B, L): what matters at a position besides its token. 0 where it is free; else how old its label is and, while
    the label can still be seen or copied to the output, what it says now: a label that is mended keeps its age."""
    if not isinstance(sampler, CRS):
        return torch.zeros_like(state.tokens)
    labels, selected_at = state.memory
    selected, age = selected_at < OPEN, (state.call - selected_at).clamp(max=_ages(sampler))
    copied = sampler.write != "input" or sampler.endpoint == "copied"
    matters = selected & ((age <= (sampler.horizon or math.inf)) | copied)
    return torch.where(selected, 1 + vocab_size * (age - 1), 0) + torch.where(matters, labels, 0)


def _state(sampler: Sampler, call: int, digit: Tensor, vocab_size: int) -> State:
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
