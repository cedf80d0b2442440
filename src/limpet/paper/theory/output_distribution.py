"""The exact output distribution of a sampler on a tiny source.

The sampler makes its own calls, with a backend that draws nothing: it keeps the distribution of every next token. Each
random choice of positions is replaced by all choices and their probabilities. The rows of a batch carry probability
mass, and rows that no later call can distinguish are merged."""

import math
from collections.abc import Iterator
from functools import partial
from itertools import combinations, permutations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from limpet.diffusion import transitions, truncation
from limpet.diffusion.backends import Backend, DensePlan, Head, Outcome, dense
from limpet.diffusion.rng import CounterRNG
from limpet.diffusion.selection import select
from limpet.errors import LimpetError
from limpet.generation import Inputs, context_of, rollout
from limpet.models import Denoiser
from limpet.paper.theory.problems import decode, encode, product, sequences
from limpet.samplers import CRS, DDIM, Gibbs, Mend, Native, Psi, Sampler, State
from limpet.samplers.crs import OPEN, Memory

MAX_ROWS = 2**24
CHUNK = 2**22  # successors in memory at once
DRAWN = -1  # marks a token that is drawn from its distribution
KNOWN = (Native, Psi, DDIM, CRS, Mend)  # they remember nothing, or committed tokens

Branches = list[tuple[Tensor, Tensor]]  # (B, L, V) distributions of independent tokens, and (B,) their probability


def output_distribution(source: Denoiser, sampler: Sampler) -> Tensor:
    """The probability of each output, (V**L,) float64, in the order of its base-V code, position 0 leading."""
    predictor = sampler.inner if type(sampler) is Gibbs else sampler
    vocab_size, length, base = source.vocab_size, source.length, _symbols(source, predictor)
    tokens = sequences(vocab_size, length)
    mass = torch.full((len(tokens),), 1 / len(tokens), dtype=torch.float64)
    state = sampler.init(context_of(source, _inputs(tokens, [])))._replace(tokens=tokens)
    for call in range(sampler.nfe):
        branches, state = _advance(source, sampler, call, state)
        if call < sampler.nfe - 1:
            total = _spread(branches, mass, _tags(predictor, state, vocab_size), base)
            code = total.nonzero()[:, 0]
            state, mass = _state(predictor, state.call, decode(code, base, length), vocab_size), total[code]
    return _spread(branches, mass, torch.zeros_like(state.tokens), vocab_size)


def corrected_distribution(source: Denoiser, sampler: Gibbs, call: int, probs: Tensor) -> Tensor:
    """The distribution (V**L,) of the state after one correction, from that of the state before it.

    The predictor must not commit tokens."""
    own_call, correction = sampler.scheduled(call)
    if correction is None or isinstance(sampler.inner, CRS):
        raise LimpetError(f"call {call} of {sampler.caption} is not a correction of a state without committed tokens")
    branches, state = _advance(source, sampler, call, State(own_call, sequences(source.vocab_size, source.length)))
    return _spread(branches, probs, torch.zeros_like(state.tokens), source.vocab_size)


def _symbols(source: Denoiser, predictor: Sampler) -> int:
    """How many states one position can have: a token, and no committed token or one of some age.

    Raise where the exact distribution is not known, or has too many states."""
    if type(predictor) not in KNOWN:
        names = ", ".join(kind.__name__ for kind in KNOWN)
        raise LimpetError(f"the exact output distribution takes {names} and Gibbs, not {predictor.name}")
    if isinstance(predictor, CRS) and predictor.values == "nucleus":
        raise LimpetError("the exact output distribution takes no random committed tokens: values='nucleus' is one")
    base, length = source.vocab_size * (1 + source.vocab_size * _ages(predictor)), source.length
    if base**length > MAX_ROWS:
        raise LimpetError(
            f"the exact output distribution of this sampler on {length} tokens of {source.vocab_size} symbols may need"
            f" {base}^{length} rows; it takes at most {MAX_ROWS}: use a smaller source or a shorter horizon"
        )
    return base


def _inputs(tokens: Tensor, recorded: list[Tensor]) -> Inputs:
    """Inputs whose backend draws nothing, and appends the distributions of the next tokens to `recorded`."""
    backend = Backend(DensePlan, partial(_record, recorded), select)
    return Inputs(torch.full_like(tokens, -1), CounterRNG(0, torch.arange(len(tokens))), backend=backend)


def _record(recorded: list[Tensor], head: Head, features: Tensor, plan: DensePlan) -> Outcome:
    """The backend's step: a position that is not revised keeps its token, the others are marked as drawn."""
    transition = plan.transition
    probs = dense.probs_of(head, features, plan)  # (B, L, V)
    largest, top = probs.max(-1)
    truncated = truncation.truncate(probs, transition.support)
    recorded.append(transitions.probs(truncated, transition.tokens, transition.coins))
    tokens = torch.where(transition.revise, DRAWN, transition.tokens)
    return Outcome(tokens, top, 1 - largest, dense.gain_of(probs, transition.against))


def _advance(source: Denoiser, sampler: Sampler, call: int, state: State) -> tuple[Branches, State]:
    """One call: how the next tokens are drawn, and the next state but for them. States count the predictor's calls."""
    recorded: list[Tensor] = []
    (step,) = rollout(source, sampler, _inputs(state.tokens, recorded), state._replace(call=call), call + 1)
    (probs,) = recorded
    own_call, correction = sampler.scheduled(call) if isinstance(sampler, Gibbs) else (call, None)
    if isinstance(sampler, Gibbs) and correction is not None:
        free, unchanged = ~step.visible, one_hot(state.tokens, source.vocab_size).double()
        weights = free.double()
        if sampler.choose == "margin":
            weights = sampler.preference(step.context, state, step.outcome).exp().masked_fill(~free, 0.0)
        choices = _choices(weights, sampler.positions)
        return [(torch.where((free & where)[..., None], probs, unchanged), chance) for where, chance in choices], state
    predictor = sampler.inner if isinstance(sampler, Gibbs) else sampler
    after, is_drawn = step.state._replace(call=own_call + 1), step.tokens == DRAWN
    tokens = step.tokens.masked_fill(is_drawn | _unused(predictor, after), 0)
    probs = torch.where(is_drawn[..., None], probs, one_hot(tokens, source.vocab_size).double())
    return [(probs, torch.ones(len(tokens), dtype=torch.float64))], after._replace(tokens=tokens)


def _choices(weights: Tensor, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(L,) bool, each set of `count` positions, and (B,) its probability: positions are drawn one after the other, by
    weight (B, L), without replacement. Where no weight is left, each position is as likely."""
    length = weights.shape[1]
    count = min(count, length)
    for places in combinations(range(length), count):
        chance = torch.zeros_like(weights[:, 0])
        for order in permutations(places):
            in_order, left = torch.ones_like(chance), weights.clone()
            for i, place in enumerate(order):
                total = left.sum(-1)
                in_order = in_order * torch.where(total > 0, left[:, place] / total, 1 / (length - i))
                left[:, place] = 0
            chance = chance + in_order
        yield torch.zeros(length, dtype=torch.bool).index_fill(0, torch.tensor(places), True), chance


def _unused(sampler: Sampler, state: State) -> Tensor:
    """(B, L) bool: where neither a later call nor the output depends on the token, so that rows can be merged."""
    nowhere = torch.zeros_like(state.tokens, dtype=torch.bool)
    if not isinstance(sampler, CRS) or state.call == sampler.nfe or sampler.horizon is not None:
        return nowhere
    # A token that is always visible covers its position, unless the final step returns what lies below it.
    return nowhere if sampler.write == "output" or sampler.final_step == "sample" else state.memory[1] < OPEN


def _ages(sampler: Sampler) -> int:
    """How many ages of a committed token matter: one for all beyond the horizon, and one if there is no horizon."""
    if not isinstance(sampler, CRS):
        return 0
    return 1 if sampler.horizon is None or sampler.horizon >= sampler.nfe else sampler.horizon + 1


def _tags(sampler: Sampler, state: State, vocab_size: int) -> Tensor:
    """(B, L): what matters at a position besides its token. 0 where nothing is committed; else the age of the committed
    token and, while it can be visible or kept in the output, its value."""
    if not isinstance(sampler, CRS):
        return torch.zeros_like(state.tokens)
    values, committed_at = state.memory
    committed, age = committed_at < OPEN, (state.call - committed_at).clamp(max=_ages(sampler))
    kept = sampler.write != "input" or sampler.final_step == "keep"
    matters = committed & ((age <= (sampler.horizon or math.inf)) | kept)
    return torch.where(committed, 1 + vocab_size * (age - 1), 0) + torch.where(matters, values, 0)


def _state(sampler: Sampler, call: int, digits: Tensor, vocab_size: int) -> State:
    """The state of rows whose positions have these tags and tokens."""
    tags, tokens = digits // vocab_size, digits % vocab_size
    if not isinstance(sampler, CRS):
        return State(call, tokens)
    committed, age, values = tags > 0, (tags - 1) // vocab_size + 1, (tags - 1) % vocab_size
    return State(call, tokens, Memory(torch.where(committed, values, 0), torch.where(committed, call - age, OPEN)))


def _spread(branches: Branches, mass: Tensor, tags: Tensor, base: int) -> Tensor:
    """(base**L,): the mass of each code of tags and tokens after rows with these tags draw their tokens."""
    length, size = branches[0][0].shape[1:]
    here, there = encode(tags * size, base), encode(sequences(size, length), base)
    totals, few = [], max(1, CHUNK // size**length)  # rows at a time
    for probs, chance in branches:
        total = mass.new_zeros(base**length)
        for rows in torch.split(torch.arange(len(mass)), few):
            joint = (mass * chance)[rows, None] * product(probs[rows])
            total.index_add_(0, (here[rows, None] + there).flatten(), joint.flatten())
        totals.append(total)
    return torch.stack(totals).sum(0)
