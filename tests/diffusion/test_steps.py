"""Every step backend against the exact distribution: a million draws a case, the tail, the same tokens from the same uniforms.

Statistical tests use fixed seeds; with CASES cases and every backend, the chance that a right backend fails anywhere
is ERROR. The fused backend has the same draws as the lazy one, which tests/test_fused.py shows."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

import literal
import plain
from backends import Case, case_of, same, step
from limpet.diffusion import backends as engine_steps
from limpet.diffusion import process, transitions, truncation
from limpet.diffusion.backends import Backend, dense, inverse_cdf, sparse, testing
from limpet.diffusion.rng import CounterRNG, Purpose

BACKENDS = {"dense": dense.BACKEND, "lazy": sparse.BACKEND}
ERROR = 1e-4

OTHERS = {name: backend for name, backend in BACKENDS.items() if name != "dense"}

every_backend = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
every_other_backend = pytest.mark.parametrize("backend", OTHERS.values(), ids=OTHERS.keys())


# name: (distribution, signal_t, signal_s, top_p, boundary)
UNEVEN = [0.35, 0.05, 0.2, 0.1, 0.02, 0.18, 0.07, 0.03]
TIED = [0.125, 0.25, 0.125, 0.25, 0.0625, 0.125, 0.0625, 0.0]
SHARP = [1e-4, 0.9, 1e-2, 2e-3, 0.0, 0.0829, 4e-3, 1e-3]
CASES = {
    "two tokens": ([0.3, 0.7], 0.4, 0.6, 1.0, "released"),
    "uneven": (UNEVEN, 0.4, 0.6, 1.0, "released"),
    "uneven, first step": (UNEVEN, 0.001, 0.08, 1.0, "released"),
    "uneven, small late step": (UNEVEN, 0.9, 0.91, 1.0, "released"),
    "uneven, ancestral end": (UNEVEN, 0.7, 1.0, 1.0, "released"),
    "uneven, ancestral end at eps": (UNEVEN, 0.99999001, 1.0, 1.0, "released"),
    "point mass": ([0.0, 0.0, 1.0, 0.0, 0.0], 0.3, 0.5, 1.0, "released"),
    "point mass, ancestral end": ([0.0, 0.0, 1.0, 0.0, 0.0], 0.3, 1.0, 1.0, "released"),
    "sharp with an impossible token": (SHARP, 0.2, 0.7, 1.0, "released"),
    "ties": (TIED, 0.3, 0.5, 1.0, "released"),
    "ties and top-p, released": (TIED, 0.3, 0.5, 0.5, "released"),
    "ties and top-p, paper": (TIED, 0.3, 0.5, 0.5, "paper"),
    "top-p to a point": (SHARP, 0.2, 0.7, 0.5, "released"),
    "top-p and the ancestral end": (UNEVEN, 0.5, 1.0, 0.75, "paper"),
}
TEMPERED = [(0.5, 1.0, False), (0.8, 0.75, False), (1.3, 1.0, False), (0.8, 0.75, True), (1.3, 0.6, True)]
LIMIT = ERROR / (len(BACKENDS) * (len(CASES) + 3 + len(TEMPERED)))  # three for the models that predict a posterior
SIDE = 1000  # SIDE x SIDE draws a case


def expected_laws(probs: list[float], signal_t: float, signal_s: float, top_p: float, boundary: str) -> np.ndarray:
    """(V, V): for each z the reverse distribution, from the paper's equations alone."""
    if top_p < 1:
        probs = literal.restricted(probs, literal.nucleus(probs, top_p, boundary))
    return np.array([literal.reverse(probs, z, 1 - signal_t, 1 - signal_s) for z in range(len(probs))])


def counts_by_token(before: Tensor, after: Tensor, size: int) -> np.ndarray:
    return (before.flatten() * size + after.flatten()).bincount(minlength=size * size).view(size, size).numpy()


@every_backend
@pytest.mark.parametrize("name", CASES)
def test_a_million_draws(backend: Backend, name: str) -> None:
    """Every z in turn, each with its own reverse distribution: z on and off the support, likely and unlikely."""
    probs, signal_t, signal_s, top_p, boundary = CASES[name]
    size = len(probs)
    tokens = (torch.arange(SIDE * SIDE) % size).view(SIDE, SIDE)
    features = torch.tensor(probs, dtype=torch.float64).log().expand(SIDE, SIDE, size)
    case = case_of(tokens, size, seed=len(name), signal_t=signal_t, signal_s=signal_s, top_p=top_p, boundary=boundary)
    outcome = step(backend, features, case)
    assert (outcome.top == max(range(size), key=probs.__getitem__)).all()  # the lowest id at a tie
    torch.testing.assert_close(
        outcome.deficit, torch.full_like(outcome.deficit, 1 - max(probs)), rtol=1e-12, atol=1e-15
    )
    expected = expected_laws(probs, signal_t, signal_s, top_p, boundary)
    assert literal.chi_square(counts_by_token(tokens, outcome.tokens, size), expected) > LIMIT


@every_backend
def test_each_sample_may_hold_evidence_of_another_signal(backend: Backend) -> None:
    """All samples at once, each with its own, are as each alone; the transition keeps its signal."""
    generator = torch.Generator().manual_seed(4)
    tokens, seen = (torch.randint(9, (4, 12), generator=generator) for _ in range(2))
    features = 3 * torch.randn(4, 12, 9, generator=generator)
    signals = torch.tensor([0.1, 0.5, 0.9, 0.99], dtype=torch.float64)
    case = case_of(tokens, 9, seen=seen, convert=True, signal_t=0.3)
    together = step(backend, features, case.replace(convert=True, seen=seen, signal=signals))
    apart = [step(backend, features, case.replace(convert=True, seen=seen, signal=float(one))) for one in signals]
    for row, alone in enumerate(apart):
        assert torch.equal(together.tokens[row], alone.tokens[row])
        assert torch.equal(together.top[row], alone.top[row])
        assert torch.allclose(together.deficit[row], alone.deficit[row], atol=1e-6)
    assert len({str(one.deficit[0].tolist()) for one in apart}) == 4


@every_backend
@pytest.mark.parametrize(("signal_t", "signal_s", "top_p"), [(0.3, 0.6, 1.0), (0.6, 1.0, 1.0), (0.3, 0.6, 0.6)])
def test_a_million_draws_of_a_model_that_predicts_a_posterior(
    backend: Backend, signal_t: float, signal_s: float, top_p: float
) -> None:
    """The model saw one token, the transition starts from another: the evidence of the seen one is taken out."""
    size = 5
    posterior = torch.tensor([0.05, 0.4, 0.2, 0.35, 0.0], dtype=torch.float64)
    pair = torch.arange(SIDE * SIDE).view(SIDE, SIDE)
    tokens, seen = pair % size, pair // size % size
    features = posterior.log().expand(SIDE, SIDE, size)
    case = case_of(tokens, size, seed=77, seen=seen, convert=True, signal_t=signal_t, signal_s=signal_s, top_p=top_p)
    outcome = step(backend, features, case)
    limit = LIMIT / size
    for saw in range(size):
        divided = [float(p) / literal.forward(saw, x, 1 - signal_t, size) for x, p in enumerate(posterior)]
        probs = literal.restricted(divided, [True] * size)
        here = seen == saw
        assert (outcome.deficit[here] - (1 - max(probs))).abs().max() < 1e-12
        assert (outcome.top[here] == probs.index(max(probs))).all()
        expected = expected_laws(probs, signal_t, signal_s, top_p, "released")
        assert literal.chi_square(counts_by_token(tokens[here], outcome.tokens[here], size), expected) > limit


@every_backend
@pytest.mark.parametrize(("temperature", "top_p", "convert"), TEMPERED)
def test_a_million_draws_at_a_temperature(backend: Backend, temperature: float, top_p: float, convert: bool) -> None:
    """h to the power 1 / T, normalised, then top-p: of the leave-one-out distribution, whatever the model predicts."""
    size, signal_t, signal_s = len(UNEVEN), 0.3, 0.6
    pair = torch.arange(SIDE * SIDE).view(SIDE, SIDE)
    tokens, seen = pair % size, pair // size % size
    features = torch.tensor(UNEVEN, dtype=torch.float64).log().expand(SIDE, SIDE, size)
    case = case_of(
        tokens, size, seed=78, seen=seen, convert=convert, signal_t=signal_t, signal_s=signal_s, top_p=top_p,
        temperature=temperature,
    )  # fmt: skip
    outcome = step(backend, features, case)
    for saw in range(size):
        probs = UNEVEN
        if convert:
            divided = [p / literal.forward(saw, x, 1 - signal_t, size) for x, p in enumerate(probs)]
            probs = literal.restricted(divided, [True] * size)
        probs = plain.tempered(probs, temperature)
        here = seen == saw
        assert (outcome.deficit[here] - (1 - max(probs))).abs().max() < 1e-12
        assert (outcome.top[here] == probs.index(max(probs))).all()
        expected = expected_laws(probs, signal_t, signal_s, top_p, "released")
        counts = counts_by_token(tokens[here], outcome.tokens[here], size)
        assert literal.chi_square(counts, expected) > LIMIT / size
        cold = expected_laws(plain.tempered(probs, 0.6), signal_t, signal_s, top_p, "released")
        assert literal.chi_square(counts, np.maximum(cold, 1e-12)) < LIMIT / size


@pytest.mark.parametrize("temperature", [0.5, 0.8, 1.0, 1.3])
@pytest.mark.parametrize("convert", [False, True])
def test_the_law_of_a_step_at_a_temperature(temperature: float, convert: bool) -> None:
    """In closed form, nothing drawn: the distribution that a step reads, and with top-p its reverse distribution; both readings of a
    head's logits, dense and lazy, to rounding."""
    size, signal_t, signal_s = len(UNEVEN), 0.3, 0.6
    tokens, seen = torch.arange(size**2).view(size, size) % size, torch.arange(size**2).view(size, size) // size
    logits = torch.tensor(UNEVEN, dtype=torch.float64).log().expand(size, size, size) + 3
    case = case_of(tokens, size, seen=seen, convert=convert, signal_t=signal_t, temperature=temperature)
    probs = dense.probs_of(same, logits, engine_steps.Whole(*case))
    again = engine_steps.log_probs(logits.flatten(0, 1), seen.flatten(), case.input, temperature).softmax(-1)
    torch.testing.assert_close(again.view_as(probs), probs, rtol=1e-12, atol=1e-15)
    for z, saw in itertools.product(range(size), range(size)):
        exact = UNEVEN
        if convert:
            divided = [p / literal.forward(saw, x, 1 - signal_t, size) for x, p in enumerate(exact)]
            exact = literal.restricted(divided, [True] * size)
        exact = plain.tempered(exact, temperature)
        np.testing.assert_allclose(probs[saw, z], exact, rtol=1e-12)
        for p in (1.0, 0.75):
            found = process.reverse_probs(truncation.restrict(probs[saw, z], p), torch.tensor(z), signal_t, signal_s)
            kept = literal.restricted(exact, literal.nucleus(exact, p, "released")) if p < 1 else exact
            np.testing.assert_allclose(found, literal.reverse(kept, z, 1 - signal_t, 1 - signal_s), rtol=1e-11)


@every_backend
def test_a_temperature_of_1_is_no_temperature(backend: Backend) -> None:
    """Bit for bit; and next to 1 it is nearly none, so 1 is no special case of another distribution."""
    features, case = masked_case()
    for convert in (False, True):
        plainly = step(backend, features, case.replace(convert=convert))
        for one, other in zip(
            plainly, step(backend, features, case.replace(convert=convert, temperature=1)), strict=True
        ):
            assert torch.equal(one, other)
        nearly = step(backend, features, case.replace(convert=convert, temperature=1 + 1e-9))
        assert torch.equal(nearly.tokens, plainly.tokens)
        torch.testing.assert_close(nearly.deficit, plainly.deficit, rtol=1e-7, atol=1e-9)


def test_the_chi_square_rejects_a_nearby_wrong_law() -> None:
    """What the million draws can see: a conversion left out, a boundary mistaken, a weight off by five per cent."""
    probs, signal_t, signal_s, top_p, boundary = CASES["ties and top-p, released"]
    size = len(probs)
    tokens = (torch.arange(SIDE * SIDE) % size).view(SIDE, SIDE)
    features = torch.tensor(probs, dtype=torch.float64).log().expand(SIDE, SIDE, size)
    case = case_of(tokens, size, signal_t=signal_t, signal_s=signal_s, top_p=top_p)
    counts = counts_by_token(tokens, step(sparse.BACKEND, features, case).tokens, size)
    right = expected_laws(probs, signal_t, signal_s, top_p, boundary)
    assert literal.chi_square(counts, right) > LIMIT
    with pytest.raises(AssertionError, match="probability zero"):
        literal.chi_square(counts * 0 + 1, np.eye(size))
    kept = literal.restricted(probs, literal.nucleus(probs, top_p, boundary))
    unconverted = [
        [
            sum(literal.bridge(y, x, z, 1 - signal_t, 1 - signal_s, size) * kept[x] for x in range(size))
            for y in range(size)
        ]
        for z in range(size)
    ]
    nudged = right.copy()
    nudged[:, 0] *= 1.05
    nudged /= nudged.sum(-1, keepdims=True)
    for wrong in (
        np.array(unconverted),
        expected_laws(probs, signal_t, signal_s, top_p, "paper"),
        expected_laws(probs, signal_t, signal_s, 1.0, "released"),
        nudged,
    ):
        assert literal.chi_square(counts, wrong) < LIMIT


# -- the tail ---------------------------------------------------------------------------------------------------------


def tailed() -> Tensor:
    """64 float32 log weights: 20 tokens of 2e-6 before the heavy one, 20 after; the other 23 are impossible."""
    weights = torch.zeros(64, dtype=torch.float64)
    weights[1:21] = 2e-6
    weights[30] = 1
    weights[40:60] = 2e-6
    return weights.log().float()


@every_backend
def test_the_tail_of_a_float32_law_keeps_its_mass(backend: Backend) -> None:
    """A million draws of a tail of mass 8e-5, half of it after the heavy token, where a float32 sum would lose it.

    The count of each half is Poisson with mean 40, and both together are spread evenly: error 1e-5 a backend."""
    logits = tailed()
    probs = logits.double().softmax(-1)
    counts = torch.zeros(64, dtype=torch.long)
    for call in range(8):
        tokens = torch.zeros(125, 1000, dtype=torch.long)  # an impossible token: never kept, never drawn
        case = case_of(tokens, 64, seed=5, signal_t=0.001, signal_s=1.0, call=call, inspect=tokens > 0)
        counts += step(backend, logits.expand(125, 1000, 64), case).tokens.flatten().bincount(minlength=64)
    assert counts.sum() == 10**6
    assert (counts[probs == 0] == 0).all()
    before, after = int(counts[1:21].sum()), int(counts[40:60].sum())
    mean = 10**6 * probs[1:21].sum().item()
    low, high = stats.poisson.ppf([1e-5 / 6, 1 - 1e-5 / 6], mean)
    assert low <= before <= high
    assert low <= after <= high
    tail = counts[(probs > 0) & (probs < 0.5)].numpy()
    spread = ((tail - tail.mean()) ** 2 / tail.mean()).sum()  # 39 degrees of freedom, 2 expected a cell: a wide bound
    assert spread < stats.chi2.isf(1e-8, 39)


@dataclass(frozen=True)
class Prescribed:
    """A stream that says draw, and draws at the places it was given."""

    places: Tensor  # (B, L)

    def uniforms(
        self, step: int, positions: Tensor, purpose: Purpose, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        places = self.places[:, positions] if rows is None else self.places[rows, positions]
        return (places, places) if purpose == Purpose.TOKENS else (torch.zeros_like(places), torch.zeros_like(places))


@every_backend
def test_every_tail_token_of_a_float32_law_is_drawn_at_its_own_place(backend: Backend) -> None:
    """1900 tokens of 2.5e-8, each less than a float32 can add to 1, on both sides of the heavy one: at the middle of
    each one's interval of the float64 distribution, that one is drawn."""
    weights = torch.full((2000,), 2.5e-8)
    weights[700] = 1
    weights[1900:] = 0
    logits = weights.log()  # float32
    probs = logits.double().softmax(-1).numpy().astype(np.longdouble)
    cumulated = np.cumsum(probs)
    places = torch.from_numpy(((cumulated - probs / 2) / cumulated[-1]).astype(np.float64))[:1900].view(19, 100)
    no_positions = torch.zeros(19, 100, dtype=torch.bool)
    tokens = torch.full((19, 100), 1999)
    case = case_of(tokens, 2000, signal_t=0.001, signal_s=1.0, rng=Prescribed(places), inspect=no_positions)
    drawn = step(backend, logits.expand(19, 100, 2000), case).tokens
    assert torch.equal(drawn.flatten(), torch.arange(1900))


def test_an_inverse_cdf_finds_every_tail_token_at_its_own_place() -> None:
    """float32 weights of 1e-9 behind a heavy token: at the middle of each token's interval, exactly that token."""
    weights = torch.full((1, 2000), 1e-9, dtype=torch.float32)
    weights[0, 7] = 1
    weights[0, 1000:1500] = 0
    exact = np.concatenate([[0], np.cumsum(weights[0].numpy().astype(np.longdouble))])
    middles = ((exact[1:] + exact[:-1]) / 2 / exact[-1]).astype(np.float64)
    positive = (weights[0] > 0).nonzero()[:, 0]
    u = torch.from_numpy(middles)[positive]
    assert torch.equal(inverse_cdf(weights.expand(len(u), -1), u), positive)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_inverse_cdf_never_leaves_the_support(dtype: torch.dtype) -> None:
    """At u = 0, at the largest u below 1, and on every boundary: a token of positive weight."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(200, 33, generator=generator).to(dtype) * (torch.rand(200, 33, generator=generator) < 0.3)
    weights[:, 16] += (weights.sum(-1) == 0).to(dtype)
    cumulated = weights.double().cumsum(-1)
    edges = [torch.zeros(200, dtype=torch.float64), torch.full((200,), 1 - 2.0**-53, dtype=torch.float64)]
    edges += [(cumulated[:, k] / cumulated[:, -1]).clamp(max=1 - 2.0**-53) for k in range(33)]
    for u in edges:
        drawn = inverse_cdf(weights, u)
        assert (weights.gather(-1, drawn[:, None]) > 0).all()


# -- the same uniforms, the same tokens -------------------------------------------------------------------------------


def edge_distance(probs: np.ndarray, z: int, u: tuple[float, ...], case: Case) -> float:
    """How near a position's uniforms are to a place where rounding decides: a rank or mass of the nucleus, coin two, a
    step of the cumulated distribution."""
    distances = []
    transition = case.transition
    if transition.temperature != 1:
        probs = probs ** (1 / transition.temperature)
        probs /= probs.sum()
    if (top_p := transition.support.top_p) < 1:
        ranked = np.sort(probs)[::-1]
        mass = np.cumsum(ranked)
        size = int((mass <= top_p).sum()) + 1
        distances += [np.abs(mass - top_p).min(), (ranked[size - 1] - ranked[size]) / ranked[size - 1]]
        probs = probs * (probs >= ranked[size - 1])
        probs = probs / probs.sum()
    signal = transition.coins.signal
    moves = (1 - signal) / (1 - signal + signal * len(probs) * probs[z])
    distances += [abs(u[0] - moves), np.abs(np.cumsum(probs)[:-1] - u[1]).min()]
    return min(distances)


def random_distributions(rows: int) -> tuple[Tensor, Tensor]:
    """(rows, 1000, 50) float32 logits, and tokens of which half are the likeliest."""
    generator = torch.Generator().manual_seed(3)
    features = 3 * torch.randn(rows, 1000, 50, generator=generator)
    tokens = torch.randint(50, (rows, 1000), generator=generator)
    return features, torch.where(torch.rand(rows, 1000, generator=generator) < 0.5, features.argmax(-1), tokens)


def disagreements(one: Tensor, other: Tensor, features: Tensor, case: Case) -> list[float]:
    """How far from an edge each position is where two backends gave different tokens."""
    positions = torch.arange(features.shape[1])
    transitions, draws = (case.input.rng.uniforms(0, positions, p) for p in (Purpose.COINS, Purpose.TOKENS))
    return [
        edge_distance(
            features[b, i].double().softmax(-1).numpy(),
            int(case.transition.tokens[b, i]),
            (transitions[1][b, i].item(), draws[0][b, i].item()),
            case,
        )
        for b, i in (one != other).nonzero().tolist()
    ]


@every_other_backend
@pytest.mark.parametrize(
    ("signal_t", "signal_s", "top_p", "temperature"),
    [
        (0.1, 0.5, 1.0, 1.0),
        (0.6, 0.95, 1.0, 1.0),
        (0.6, 0.95, 0.9, 1.0),
        (0.9, 1.0, 0.9, 1.0),
        (0.6, 0.95, 1.0, 0.8),
        (0.6, 0.95, 0.9, 0.5),
        (0.1, 0.5, 0.9, 1.3),
    ],
)
def test_the_same_tokens_as_dense_but_on_rounding_edges(
    backend: Backend, signal_t: float, signal_s: float, top_p: float, temperature: float
) -> None:
    """200,000 random distributions in float32: every disagreement is within 1e-6 of an edge, and there are hardly any."""
    features, tokens = random_distributions(200)
    case = case_of(tokens, 50, signal_t=signal_t, signal_s=signal_s, top_p=top_p, temperature=temperature)
    reference = step(dense.BACKEND, features, case)
    outcome = step(backend, features, case)
    assert torch.equal(outcome.top, reference.top)
    torch.testing.assert_close(outcome.deficit, reference.deficit, rtol=0, atol=1e-6)
    assert (reference.tokens != tokens).double().mean() > 0.3  # the step does something
    edges = disagreements(outcome.tokens, reference.tokens, features, case)
    assert len(edges) < 20
    assert all(edge < 1e-6 for edge in edges)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_what_an_edge_is(top_p: float) -> None:
    """Logits a little off, by 1e-3, make the step disagree now and then, always within 3e-3 of an edge."""
    features, tokens = random_distributions(100)
    case = case_of(tokens, 50, top_p=top_p)
    noise = 1e-3 * torch.randn(features.shape, generator=torch.Generator().manual_seed(0))
    one, other = (step(sparse.BACKEND, logits, case).tokens for logits in (features, features + noise))
    edges = disagreements(one, other, features, case)
    assert len(edges) > 3
    assert max(edges) < 3e-3


@every_other_backend
def test_the_same_tokens_as_dense_from_float64_logits(backend: Backend) -> None:
    """In float64 an edge is too narrow to meet: no disagreement, also for a model that predicts a posterior."""
    generator = torch.Generator().manual_seed(4)
    size, shape = 50, (50, 1000)
    features = 3 * torch.randn(*shape, size, generator=generator, dtype=torch.float64)
    tokens, seen = torch.randint(size, (2, *shape), generator=generator)
    cases = ({}, {"top_p": 0.8}, {"convert": True}, {"convert": True, "top_p": 0.8, "boundary": "paper"})
    for changes, temperature in itertools.product(cases, (1.0, 0.5, 0.8, 1.3)):
        case = case_of(tokens, size, seen=seen, temperature=temperature, **changes)
        one, other = (step(each, features, case) for each in (dense.BACKEND, backend))
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.top, other.top)
        torch.testing.assert_close(one.deficit, other.deficit, rtol=1e-9, atol=1e-14)


# -- masks, rows, chunks ----------------------------------------------------------------------------------------------


def masked_case() -> tuple[Tensor, Case]:
    generator = torch.Generator().manual_seed(6)
    features = 2 * torch.randn(6, 80, 9, generator=generator, dtype=torch.float64)
    tokens = torch.randint(9, (6, 80), generator=generator)
    revise, inspect = torch.rand(2, 6, 80, generator=generator) < 0.5
    return features, case_of(tokens, 9, revise=revise, inspect=inspect, signal_t=0.2, signal_s=0.9, top_p=0.9)


@every_backend
def test_revise_and_inspect_are_kept_apart(backend: Backend) -> None:
    features, case = masked_case()
    revise, inspect = case.transition.revise, case.transition.inspect
    everywhere = torch.ones_like(revise)
    whole = step(backend, features, case.replace(revise=everywhere, inspect=everywhere))
    part = step(backend, features, case)
    assert torch.equal(part.tokens, torch.where(revise, whole.tokens, case.transition.tokens))
    assert (whole.tokens[~revise] != case.transition.tokens[~revise]).any()
    assert torch.equal(part.top, whole.top * inspect)
    assert torch.equal(part.deficit, torch.where(inspect, whole.deficit, math.inf))
    assert torch.isfinite(whole.deficit).all()


@every_backend
def test_deficits_come_from_the_law_before_top_p(backend: Backend) -> None:
    features, case = masked_case()
    probs = features.softmax(-1)
    for top_p in (1.0, 0.9, 0.2):
        outcome = step(backend, features, case.replace(top_p=top_p))
        direct = torch.where(case.transition.inspect, 1 - probs.amax(-1), math.inf)
        torch.testing.assert_close(outcome.deficit, direct, rtol=1e-12, atol=1e-15)


@every_backend
def test_a_step_changes_nothing_it_was_given(backend: Backend) -> None:
    features, case = masked_case()
    given = [features, case.transition.tokens, case.input.tokens, case.transition.revise, case.transition.inspect]
    before = [x.clone() for x in given]
    step(backend, features, case.replace(convert=True, temperature=0.8))
    assert all(torch.equal(a, b) for a, b in zip(before, given, strict=True))


@every_backend
def test_nothing_to_do(backend: Backend) -> None:
    features, case = masked_case()
    no_positions = torch.zeros_like(case.transition.revise)
    outcome = step(backend, features, case.replace(revise=no_positions, inspect=no_positions))
    assert torch.equal(outcome.tokens, case.transition.tokens)
    assert not outcome.top.any()
    assert (outcome.deficit == math.inf).all()


def test_lazy_runs_the_head_where_coin_one_moves_or_where_it_inspects() -> None:
    features, case = masked_case()
    rows: list[Tensor] = []

    def head(some: Tensor) -> Tensor:
        rows.append(some)
        return some

    step(sparse.BACKEND, features, case, head)
    first, _ = case.input.rng.uniforms(0, torch.arange(80), Purpose.COINS)
    s_t, s_s = 0.2, 0.9
    moves = first < (s_s - s_t + (1 - s_t / s_s) * (1 - s_s)) / (1 - s_t)
    needed = (moves & case.transition.revise) | case.transition.inspect
    assert torch.equal(torch.cat(rows), features[needed])
    assert 0 < needed.sum() < needed.numel()


@pytest.mark.parametrize("cut", [truncation.Support(0.9), truncation.Support(0.5, "paper"), truncation.Support(0.7, top_k=9),
                                 truncation.Support(min_p=0.1)], ids=str)  # fmt: skip
@pytest.mark.parametrize("sharpness", [0.5, 3.0])
def test_lazy_cuts_few_laws_and_draws_as_if_it_cut_all(
    cut: truncation.Support, sharpness: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bounds that tell nothing make it cut every distribution. Logits are rounded as bfloat16's are, so that weights tie."""
    generator = torch.Generator().manual_seed(1)
    logits = (sharpness * torch.randn(4, 64, 200, generator=generator)).bfloat16().float()
    tokens = torch.where(torch.rand(4, 64, generator=generator) < 0.5, logits.argmax(-1),
                         torch.randint(200, (4, 64), generator=generator))  # fmt: skip
    every = torch.ones_like(tokens, dtype=torch.bool)
    kept, rows = truncation.kept, []
    monkeypatch.setattr(truncation, "kept", lambda weights, cut: rows.append(len(weights)) or kept(weights, cut))

    def drawn(signals: tuple[float, float]) -> Tensor:
        asked = engine_steps.Transition(3, tokens, every, ~every, transitions.ancestral(*signals), support=cut)
        return testing.step(
            sparse.BACKEND, logits, asked, testing.input_of(asked, 200, CounterRNG(7, torch.arange(4)))
        ).tokens

    paths = ((0.02, 0.3), (0.4, 0.7), (0.9, 0.99), (0.9, 1.0))
    quick, few = [drawn(signals) for signals in paths], sum(rows)
    monkeypatch.setattr(truncation, "bounds", lambda weights, own, total, cut: (0 * total, 0 * total + math.inf))
    rows.clear()
    assert all(torch.equal(one, drawn(signals)) for one, signals in zip(quick, paths, strict=True))
    assert few <= sum(rows)
    if cut == truncation.Support(0.9):
        assert few < 0.75 * sum(rows)


def test_chunks_do_not_change_lazy(monkeypatch: pytest.MonkeyPatch) -> None:
    features, case = masked_case()
    whole = step(sparse.BACKEND, features, case)
    most = 0

    def head(some: Tensor) -> Tensor:
        nonlocal most
        most = max(most, len(some))
        return some

    monkeypatch.setitem(engine_steps.CHUNK, "cpu", 7 * 9 + 3)
    monkeypatch.setitem(engine_steps.PIECE, "cpu", 2 * 9 + 1)
    parts = step(sparse.BACKEND, features, case, head)
    assert most == 7
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


SPANS = [(0.001, 0.1), (0.5, 0.6), (0.99, 0.999), (0.7, 1.0)]
METHODS = {
    **{f"ancestral {t} {s}": transitions.ancestral(t, s) for t, s in SPANS},
    **{f"psi {t} {s} {kappa}": transitions.psi(t, s, kappa) for t, s in SPANS for kappa in (0.0, 0.6)},
    **{f"coupled {t} {s} {share}": transitions.coupled(t, s, share * (1 - s) / (1 - t))
       for t, s in SPANS for share in (0.0, 0.5, 1.0)},
    "redraw": transitions.redraw(0.7),
    "all five": transitions.nested(0.4, 0.3, 0.1, 0.25, 0.2),
}  # fmt: skip
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())


@every_method
def test_the_two_coins_multiply_out_to_their_law(method: transitions.Coins) -> None:
    """Coin one's shares from a fine grid of uniforms, coin two's odds in closed form: the mixture is the dense distribution."""
    n = 2**20
    route = transitions.coin_one((torch.arange(n, dtype=torch.float64) + 0.5) / n, method)
    stay, draw, uniform, fresh, noise = (route.bincount(minlength=5) / n).tolist()
    probs = torch.tensor(UNEVEN, dtype=torch.float64)
    for z in range(len(probs)):
        odds = (1 - method.signal) / (1 - method.signal + method.signal * len(probs) * probs[z])
        mixed = odds * (draw * probs + uniform / len(probs)) + fresh * probs + noise / len(probs)
        mixed[z] += (draw + uniform) * (1 - odds) + stay
        torch.testing.assert_close(
            mixed, transitions.probs(probs[None], torch.tensor([z]), method)[0], rtol=0, atol=5e-6
        )


@pytest.mark.parametrize(("signal_t", "signal_s"), SPANS)
def test_ancestral_coins_have_the_reverse_law(signal_t: float, signal_s: float) -> None:
    probs, z = torch.tensor(UNEVEN, dtype=torch.float64).expand(8, 8), torch.arange(8)
    exact = process.reverse_probs(probs, z, signal_t, signal_s)
    torch.testing.assert_close(
        transitions.probs(probs, z, transitions.ancestral(signal_t, signal_s)), exact, rtol=1e-12, atol=1e-15
    )


@pytest.mark.parametrize(("signal_t", "signal_s"), SPANS)
@given(kappa=st.floats(0, 1), share=st.floats(0, 1), seed=st.integers(0, 999))
@settings(max_examples=40, deadline=None)
def test_every_method_keeps_the_marginal(
    signal_t: float, signal_s: float, kappa: float, share: float, seed: int
) -> None:
    """A token at level t, drawn from the distribution it has there, is at level s after the step: Psi at any kappa, the
    coupling at any share of its largest, a redraw at its own level."""
    probs = torch.rand(1, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).pow(4)
    probs = probs / probs.sum()
    methods = [(transitions.psi(signal_t, signal_s, kappa), signal_s), (transitions.redraw(signal_t), signal_t),
               (transitions.coupled(signal_t, signal_s, share * (1 - signal_s) / (1 - signal_t)), signal_s)]  # fmt: skip
    here = signal_t * probs[0] + (1 - signal_t) / 7
    for method, level in methods:
        assert all(0 <= a <= b + 1e-12 <= 1 + 2e-12 for a, b in itertools.pairwise(method[1:]))
        there = here @ transitions.probs(probs.expand(7, 7), torch.arange(7), method)
        torch.testing.assert_close(there, level * probs[0] + (1 - level) / 7, rtol=1e-9, atol=1e-12)


def test_psi_without_forgetting_is_ancestral_to_the_bit() -> None:
    assert all(transitions.psi(t, s, 1.0) == transitions.ancestral(t, s) for t, s in SPANS)


@every_backend
@every_method
def test_draws_by_every_route(backend: Backend, method: transitions.Coins) -> None:
    probs = torch.tensor(UNEVEN, dtype=torch.float64)
    for cut in (truncation.EVERY, truncation.Support(0.75)):
        assert testing.fit(backend, probs, cut, method, seed=5) > ERROR / (4 * len(METHODS))


CUTS = [truncation.Support(top_k=3), truncation.Support(min_p=0.3), truncation.Support(0.8, "paper", 6, 0.1)]


@every_backend
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_draws_within_every_support(backend: Backend, cut: truncation.Support) -> None:
    for probs in (UNEVEN, TIED, SHARP):
        assert testing.fit(backend, torch.tensor(probs, dtype=torch.float64), cut, seed=6) > ERROR / 18


def test_what_supports_keep() -> None:
    """By hand: ties go to lower ids, a token passes min-p at equality, and the smallest of several decides."""
    weights = torch.tensor([TIED], dtype=torch.float64)

    def kept(**cut: float) -> list[int]:
        return truncation.kept(weights, truncation.Support(**cut))[0].nonzero()[:, 0].tolist()  # type: ignore[arg-type]

    assert kept(top_k=1) == [1]
    assert kept(top_k=3) == [0, 1, 3]
    assert kept(top_k=100) == kept() == list(range(8))
    assert kept(min_p=0.5) == [0, 1, 2, 3, 5]
    assert kept(min_p=1.0) == [1, 3]
    assert kept(min_p=0.5, top_k=4) == kept(top_k=4, top_p=0.9) == [0, 1, 2, 3]
    assert kept(top_p=0.3, top_k=4) == kept(top_p=0.3)


@every_backend
def test_the_gain_of_the_best_other_token(backend: Backend) -> None:
    """ln of the largest distribution elsewhere over that of the given token, below 0 at the argmax, -inf where nobody looks."""
    features, case = masked_case()
    against = case.transition.tokens.clone()
    against[:, ::3] = features.argmax(-1)[:, ::3]
    gain = step(backend, features, case.replace(against=against)).gain
    probs = features.double().softmax(-1)
    for place in itertools.product(*map(range, against.shape)):
        own = int(against[place])
        rival = max(float(h) for token, h in enumerate(probs[place]) if token != own)
        expected = math.log(rival / float(probs[place][own])) if case.transition.inspect[place] else -math.inf
        assert gain[place] == pytest.approx(expected, rel=1e-4, abs=1e-5)
