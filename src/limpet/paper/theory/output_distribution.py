"""The exact output distribution of a sampler on a tiny source: its own calls, each draw replaced by its whole distribution, and each
choice of positions at random by all of them.

A backend that draws nothing keeps the distribution of every next token; the sampler does all the rest (what is visible,
committed and stored). Rows of its state carry mass, and rows that no later call can tell apart are one row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import combinations, permutations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from limpet.diffusion import transitions, truncation
from limpet.diffusion.backends import Backend, Head, Outcome, Whole, dense, reported
from limpet.diffusion.rng import CounterRNG
from limpet.diffusion.selection import select
from limpet.errors import LimpetError
from limpet.models import Denoiser
from limpet.paper.theory.problems import decode, encode, product, sequences
from limpet.samplers import CRS, DDIM, Gibbs, Mend, Native, Psi, Sampler
from limpet.samplers.context import Context, State, open_context
from limpet.samplers.crs import OPEN, Memory

CODES = 2**24  # the most rows there could be
CHUNK = 2**22  # successors held at once
DRAWN = -1  # stands for a token that has its distribution
KNOWN = (Native, Psi, DDIM, CRS, Mend)  # all that they remember is below: nothing, or labels


def output_distribution(source: Denoiser, sampler: Sampler) -> Tensor:
    """(V**L,) float64: the probability of each output, in the order of its base-V code, position 0 leading."""
    predictor = sampler.inner if type(sampler) is Gibbs else sampler
    if type(predictor) not in KNOWN:
        raise LimpetError(
            f"the exact output distribution knows what native and CRS remember, not what {predictor.name} does"
        )
    if isinstance(predictor, CRS) and predictor.values == "nucleus":
        raise LimpetError("values='nucleus' draws its labels; the exact output distribution takes deterministic ones")
    vocab_size, length = source.vocab_size, source.length
    base = vocab_size * (1 + vocab_size * _ages(predictor))  # a position is a token, free or with a label of some age
    if base**length > CODES:
        raise LimpetError(
            f"the exact output distribution of this sampler on {length} tokens of {vocab_size} symbols may need"
            f" {base}^{length} rows; it takes at most {CODES}: use a smaller source or a shorter horizon"
        )
    tokens = sequences(vocab_size, length)
    mass = torch.full((len(tokens),), 1 / len(tokens), dtype=torch.float64)
    state = None
    for call in range(sampler.nfe):
        ctx, distributions = _open(source, len(mass))
        state = predictor.begin(ctx)._replace(tokens=tokens) if state is None else state
        mixture, state = _moves(sampler, call, ctx, state, distributions)
        last = call == sampler.nfe - 1
        tags, size = (torch.zeros_like(ctx.fixed), vocab_size) if last else (_tags(predictor, state, vocab_size), base)
        total = torch.stack([_spread(probs, mass * chance, tags, size) for probs, chance in mixture]).sum(0)
        if not last:
            code = total.nonzero()[:, 0]
            state, mass = _state(predictor, state.call, decode(code, base, length), vocab_size), total[code]
    return total


def corrected_distribution(source: Denoiser, sampler: Gibbs, call: int, probs: Tensor) -> Tensor:
    """(V**L,): the distribution of the state after one correction, if `distribution` (V**L,) was that of the state before; no labels."""
    due, correction = sampler.due(call)
    if correction is None or isinstance(sampler.inner, CRS):
        raise LimpetError(f"call {call} of {sampler.caption} is no correction of a state without labels")
    ctx, distributions = _open(source, len(probs))
    mixture, state = _moves(sampler, call, ctx, State(due, sequences(source.vocab_size, source.length)), distributions)
    none = torch.zeros_like(state.tokens)
    return torch.stack([_spread(each, probs * chance, none, source.vocab_size) for each, chance in mixture]).sum(0)


def _open(source: Denoiser, rows: int) -> tuple[Context, list[Tensor]]:
    """A path on which nothing is drawn, and where its backend puts the distributions of the next tokens."""
    distributions: list[Tensor] = []
    free = torch.full((rows, source.length), -1)
    return open_context(
        source, CounterRNG(0, torch.arange(rows)), free, Backend(Whole, partial(_keep, distributions), select)
    ), distributions


Mixture = list[tuple[Tensor, Tensor]]  # (B, L, V) distributions of independent tokens, and (B,) the chance of these


def _moves(
    sampler: Sampler, call: int, ctx: Context, state: State, distributions: list[Tensor]
) -> tuple[Mixture, State]:
    """One call: the ways in which the next tokens are drawn, and the next state, its tokens aside. States are as a
    predictor counts its calls."""
    size = ctx.model.vocab_size
    if not isinstance(sampler, Gibbs):
        state, _ = sampler.step(ctx, state)
        state = state._replace(tokens=state.tokens.where(~_unseen(sampler, state), 0))
        drawn = (state.tokens == DRAWN)[..., None]
        certain = torch.ones(len(drawn), dtype=torch.float64)
        return [(torch.where(drawn, distributions.pop(), _points(state.tokens, size)), certain)], state
    due, correction = sampler.due(call)
    if correction is None:
        return _moves(sampler.inner, due, ctx, state, distributions)
    _, free, _ = sampler.look(ctx, state)
    _, info = sampler.correct(ctx, state, correction)
    probs, still = distributions.pop(), _points(state.tokens, size)
    weights = sampler.preference(ctx, state, info.outcome).exp() if sampler.choose == "margin" else free.double()
    weights = weights.masked_fill(~free, 0.0)
    return [(torch.where((free & where)[..., None], probs, still), chance)
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


def _keep(distributions: list[Tensor], head: Head, features: Tensor, plan: Whole) -> Outcome:
    """A backend that puts the distribution of the next tokens into `distributions`. Where a sampler does not ask for a next token, the
    position keeps its own. Where labels may change, it tells what they would gain."""
    transition = plan.transition
    probs = dense.probs_of(head, features, plan)  # (B, L, V)
    largest, top = probs.max(-1)
    distributions.append(
        transitions.probs(truncation.cut(probs, transition.support), transition.tokens, transition.coins)
    )
    tokens = torch.where(transition.revise, DRAWN, transition.tokens)
    return reported(transition, tokens, top, 1 - largest, dense.gain_of(probs, transition.against))


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
    labels, committed_at = state.memory
    committed, age = committed_at < OPEN, (state.call - committed_at).clamp(max=_ages(sampler))
    copied = sampler.write != "input" or sampler.final_step == "keep"
    matters = committed & ((age <= (sampler.horizon or math.inf)) | copied)
    return torch.where(committed, 1 + vocab_size * (age - 1), 0) + torch.where(matters, labels, 0)


def _state(sampler: Sampler, call: int, digit: Tensor, vocab_size: int) -> State:
    """The rows whose positions have these tags and tokens."""
    tag, tokens = digit // vocab_size, digit % vocab_size
    if not isinstance(sampler, CRS):
        return State(call, tokens)
    committed, age, labels = tag > 0, (tag - 1) // vocab_size + 1, (tag - 1) % vocab_size
    return State(call, tokens, Memory(torch.where(committed, labels, 0), torch.where(committed, call - age, OPEN)))


def _spread(probs: Tensor, mass: Tensor, tags: Tensor, base: int) -> Tensor:
    """(base**L,): the mass of each code of tags and tokens, when rows with these tags draw their tokens."""
    size, length = probs.shape[2], probs.shape[1]
    here = encode(tags * size, base)
    there = encode(sequences(size, length), base)
    total = mass.new_zeros(base**length)
    few = max(1, CHUNK // size**length)  # rows at a time, so that their joints fit
    for rows in map(slice, range(0, len(probs), few), range(few, len(probs) + few, few)):
        total.index_add_(0, (here[rows, None] + there).flatten(), (mass[rows, None] * product(probs[rows])).flatten())
    return total
