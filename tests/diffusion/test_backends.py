"""Every backend against the exact distribution: a million draws a case, the tail, the same tokens as the reference.

Statistical tests have fixed seeds. The chance that a correct backend fails any of them is ERROR. The fused backend
draws what the sparse one draws, which test_fused.py shows."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy import stats
from test_transitions import METHODS, UNEVEN
from torch import Tensor

import literal
import plain
from backends import Case, case_of, same, step
from limpet.diffusion import backends, truncation
from limpet.diffusion.backends import Backend, DensePlan, dense, inverse_cdf, sparse, testing
from limpet.diffusion.rng import Purpose
from limpet.diffusion.truncation import Support
from limpet.errors import LimpetError
from thinned import thinned

BACKENDS = {"dense": dense.BACKEND, "sparse": sparse.BACKEND}
every_backend = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())

ERROR = 1e-4
TIED = [0.125, 0.25, 0.125, 0.25, 0.0625, 0.125, 0.0625, 0.0]
SHARP = [1e-4, 0.9, 1e-2, 2e-3, 0.0, 0.0829, 4e-3, 1e-3]
CASES = {  # probs, signal_t, signal_s, top_p, boundary
    "two tokens": ([0.3, 0.7], 0.4, 0.6, 1.0, "released"),
    "first step": (UNEVEN, 0.001, 0.08, 1.0, "released"),
    "small late step": (UNEVEN, 0.9, 0.91, 1.0, "released"),
    "final step": (UNEVEN, 0.7, 1.0, 1.0, "released"),
    "final step at eps": (UNEVEN, 0.99999001, 1.0, 1.0, "released"),
    "point mass": ([0.0, 0.0, 1.0, 0.0, 0.0], 0.3, 0.5, 1.0, "released"),
    "point mass, final step": ([0.0, 0.0, 1.0, 0.0, 0.0], 0.3, 1.0, 1.0, "released"),
    "sharp with an impossible token": (SHARP, 0.2, 0.7, 1.0, "released"),
    "ties and top-p, released": (TIED, 0.3, 0.5, 0.5, "released"),
    "ties and top-p, paper": (TIED, 0.3, 0.5, 0.5, "paper"),
    "top-p to a point": (SHARP, 0.2, 0.7, 0.5, "released"),
    "top-p and the final step": (UNEVEN, 0.5, 1.0, 0.75, "paper"),
}
PREDICTED = [0.12, 0.4, 0.19, 0.29, 0.0]
CONVERTED = [  # signal_t, signal_s, top_p, temperature, whether the model predicts a posterior
    (0.3, 0.6, 1.0, 1.0, True),
    (0.6, 1.0, 1.0, 1.0, True),
    (0.3, 0.6, 0.9, 1.0, True),
    (0.3, 0.6, 1.0, 0.5, False),
    (0.3, 0.6, 0.9, 0.8, True),
    (0.3, 0.6, 0.9, 1.3, True),
]
LIMIT = ERROR / (len(BACKENDS) * (len(CASES) + len(CONVERTED)))
SIDE = 1000  # SIDE x SIDE draws a case


def expected_probs(probs: list[float], signal_t: float, signal_s: float, top_p: float, boundary: str) -> np.ndarray:
    """(V, V): for each z the reverse distribution, from the paper's equations."""
    if top_p < 1:
        probs = literal.restricted(probs, literal.nucleus(probs, top_p, boundary))
    return np.array([literal.reverse(probs, z, 1 - signal_t, 1 - signal_s) for z in range(len(probs))])


def converted(probs: list[float], token: int, signal: float) -> list[float]:
    """The leave-one-out distribution of a posterior, given the token in the model input."""
    divided = [p / literal.forward(token, x, 1 - signal, len(probs)) for x, p in enumerate(probs)]
    return literal.restricted(divided, [True] * len(probs))


def counts_by_token(before: Tensor, after: Tensor, size: int) -> np.ndarray:
    return (before.flatten() * size + after.flatten()).bincount(minlength=size * size).view(size, size).numpy()


def log_probs_everywhere(probs: list[float]) -> Tensor:
    return torch.tensor(probs, dtype=torch.float64).log().expand(SIDE, SIDE, len(probs))


@every_backend
@pytest.mark.parametrize("name", thinned(CASES))
def test_a_million_draws(backend: Backend, name: str) -> None:
    """Every token z, each with its own reverse distribution."""
    probs, signal_t, signal_s, top_p, boundary = CASES[name]
    size = len(probs)
    tokens = (torch.arange(SIDE * SIDE) % size).view(SIDE, SIDE)
    case = case_of(tokens, size, seed=len(name), signal_t=signal_t, signal_s=signal_s, top_p=top_p, boundary=boundary)
    outcome = step(backend, log_probs_everywhere(probs), case)
    assert (outcome.top == probs.index(max(probs))).all()  # the lowest id at a tie
    deficit = torch.full_like(outcome.deficit, 1 - max(probs))
    torch.testing.assert_close(outcome.deficit, deficit, rtol=1e-12, atol=1e-15)
    expected = expected_probs(probs, signal_t, signal_s, top_p, boundary)
    assert literal.chi_square(counts_by_token(tokens, outcome.tokens, size), expected) > LIMIT


@every_backend
@pytest.mark.parametrize(("signal_t", "signal_s", "top_p", "temperature", "convert"), thinned(CONVERTED))
def test_a_million_draws_of_a_converted_distribution(
    backend: Backend, signal_t: float, signal_s: float, top_p: float, temperature: float, convert: bool
) -> None:
    """Evidence of the model input is removed from a posterior, then comes the temperature, then top-p. The model input
    and the state have different tokens. Draws at another temperature would be noticed."""
    size = len(PREDICTED)
    pair = torch.arange(SIDE * SIDE).view(SIDE, SIDE)
    tokens, model_input = pair % size, pair // size % size
    case = case_of(
        tokens,
        size,
        seed=77,
        model_input=model_input,
        convert=convert,
        signal_t=signal_t,
        signal_s=signal_s,
        top_p=top_p,
        temperature=temperature,
    )
    outcome = step(backend, log_probs_everywhere(PREDICTED), case)
    for token in range(size):
        loo = converted(PREDICTED, token, signal_t) if convert else PREDICTED
        probs = plain.tempered(loo, temperature)
        here = model_input == token
        assert (outcome.deficit[here] - (1 - max(probs))).abs().max() < 1e-12
        assert (outcome.top[here] == probs.index(max(probs))).all()
        counts = counts_by_token(tokens[here], outcome.tokens[here], size)
        expected = expected_probs(probs, signal_t, signal_s, top_p, "released")
        assert literal.chi_square(counts, expected) > LIMIT / size
        cold = expected_probs(plain.tempered(loo, temperature - 0.2), signal_t, signal_s, top_p, "released")
        assert literal.chi_square(counts, np.maximum(cold, 1e-12)) < LIMIT / size


@pytest.mark.parametrize("temperature", [0.5, 0.8, 1.0, 1.3])
@pytest.mark.parametrize("convert", [False, True])
def test_the_converted_distribution_in_closed_form(temperature: float, convert: bool) -> None:
    """Nothing is drawn: the dense and the sparse conversion of logits against plain numbers."""
    size, signal_t = len(UNEVEN), 0.3
    pair = torch.arange(size**2).view(size, size)
    tokens, model_input = pair % size, pair // size
    logits = torch.tensor(UNEVEN, dtype=torch.float64).log().expand(size, size, size) + 3
    case = case_of(tokens, size, model_input=model_input, convert=convert, signal_t=signal_t, temperature=temperature)
    probs = dense.probs_of(same, logits, DensePlan(*case))
    rows = torch.ones_like(tokens).nonzero()
    again = backends.log_probs(logits.flatten(0, 1), rows, case.call, temperature).softmax(-1)
    torch.testing.assert_close(again.view_as(probs), probs, rtol=1e-12, atol=1e-15)
    for row, column in itertools.product(range(size), range(size)):
        exact = converted(UNEVEN, row, signal_t) if convert else UNEVEN
        np.testing.assert_allclose(probs[row, column], plain.tempered(exact, temperature), rtol=1e-12)


@every_backend
def test_a_temperature_of_1_is_no_temperature(backend: Backend) -> None:
    """Bit for bit; and a temperature next to 1 makes nearly no difference."""
    features, case = masked_case()
    for convert in (False, True):
        without = step(backend, features, case.replace(convert=convert))
        at_1 = step(backend, features, case.replace(convert=convert, temperature=1))
        assert all(torch.equal(one, other) for one, other in zip(without, at_1, strict=True))
        near_1 = step(backend, features, case.replace(convert=convert, temperature=1 + 1e-9))
        assert torch.equal(near_1.tokens, without.tokens)
        torch.testing.assert_close(near_1.deficit, without.deficit, rtol=1e-7, atol=1e-9)


@every_backend
def test_samples_may_have_different_signals_of_evidence(backend: Backend) -> None:
    """A batch with one signal for each sample equals each sample alone; the transition keeps its own signal."""
    generator = torch.Generator().manual_seed(4)
    tokens, model_input = (torch.randint(9, (4, 12), generator=generator) for _ in range(2))
    features = 3 * torch.randn(4, 12, 9, generator=generator)
    signals = torch.tensor([0.1, 0.5, 0.9, 0.99], dtype=torch.float64)
    case = case_of(tokens, 9, model_input=model_input, convert=True, signal_t=0.3)

    def with_signal(signal: float | Tensor) -> backends.Outcome:
        return step(backend, features, case.replace(convert=True, model_input=model_input, signal=signal))

    together, apart = with_signal(signals), [with_signal(float(signal)) for signal in signals]
    for row, alone in enumerate(apart):
        assert torch.equal(together.tokens[row], alone.tokens[row])
        assert torch.equal(together.top[row], alone.top[row])
        assert torch.allclose(together.deficit[row], alone.deficit[row], atol=1e-6)
    assert len({str(alone.deficit[0].tolist()) for alone in apart}) == 4


def test_the_chi_square_rejects_a_nearby_wrong_distribution() -> None:
    """What a million draws can show: a missing conversion, a wrong boundary, a probability that is 5% off."""
    probs, signal_t, signal_s, top_p, boundary = CASES["ties and top-p, released"]
    size = len(probs)
    tokens = (torch.arange(SIDE * SIDE) % size).view(SIDE, SIDE)
    case = case_of(tokens, size, signal_t=signal_t, signal_s=signal_s, top_p=top_p)
    counts = counts_by_token(tokens, step(sparse.BACKEND, log_probs_everywhere(probs), case).tokens, size)
    right = expected_probs(probs, signal_t, signal_s, top_p, boundary)
    assert literal.chi_square(counts, right) > LIMIT
    with pytest.raises(AssertionError, match="probability zero"):
        literal.chi_square(counts * 0 + 1, np.eye(size))
    kept = literal.restricted(probs, literal.nucleus(probs, top_p, boundary))
    noise_t, noise_s = 1 - signal_t, 1 - signal_s

    def unconverted(y: int, z: int) -> float:
        return sum(literal.bridge(y, x, z, noise_t, noise_s, size) * kept[x] for x in range(size))

    nudged = right * np.where(np.arange(size) == 0, 1.05, 1)
    for wrong in (
        np.array([[unconverted(y, z) for y in range(size)] for z in range(size)]),
        expected_probs(probs, signal_t, signal_s, top_p, "paper"),
        expected_probs(probs, signal_t, signal_s, 1.0, "released"),
        nudged / nudged.sum(-1, keepdims=True),
    ):
        assert literal.chi_square(counts, wrong) < LIMIT


@every_backend
@pytest.mark.parametrize("method", thinned(METHODS))
def test_draws_by_every_route(backend: Backend, method: str) -> None:
    probs = torch.tensor(UNEVEN, dtype=torch.float64)
    for support in (Support(), Support(0.75)):
        assert testing.p_value(backend, probs, support, METHODS[method], seed=5) > ERROR / (4 * len(METHODS))


@every_backend
@pytest.mark.parametrize("support", [Support(top_k=3), Support(min_p=0.3), Support(0.8, "paper", 6, 0.1)], ids=str)
def test_draws_within_every_support(backend: Backend, support: Support) -> None:
    for probs in (UNEVEN, TIED, SHARP):
        assert testing.p_value(backend, torch.tensor(probs, dtype=torch.float64), support, seed=6) > ERROR / 18


# The tail of a float32 distribution


@every_backend
def test_the_tail_keeps_its_mass(backend: Backend) -> None:
    """A million draws from a tail of mass 8e-5, half of it after the heavy token, where a float32 sum would lose it.

    The count of each half is Poisson with mean 40, and the tokens of both are equally likely: error 1e-5."""
    weights = torch.zeros(64, dtype=torch.float64)  # the other 23 tokens are impossible
    weights[1:21] = weights[40:60] = 2e-6
    weights[30] = 1
    logits = weights.log().float()
    probs = logits.double().softmax(-1)
    counts = torch.zeros(64, dtype=torch.long)
    for call in range(8):
        tokens = torch.zeros(125, 1000, dtype=torch.long)  # an impossible token: never kept, never drawn
        case = case_of(tokens, 64, seed=5, signal_t=0.001, signal_s=1.0, call=call, inspect=tokens > 0)
        counts += step(backend, logits.expand(125, 1000, 64), case).tokens.flatten().bincount(minlength=64)
    assert counts.sum() == 10**6
    assert (counts[probs == 0] == 0).all()
    mean = 10**6 * probs[1:21].sum().item()
    low, high = stats.poisson.ppf([1e-5 / 6, 1 - 1e-5 / 6], mean)
    for half in (counts[1:21], counts[40:60]):
        assert low <= half.sum() <= high
    tail = counts[(probs > 0) & (probs < 0.5)].numpy()
    spread = ((tail - tail.mean()) ** 2 / tail.mean()).sum()  # 39 degrees of freedom, 2 expected a cell: a wide bound
    assert spread < stats.chi2.isf(1e-8, 39)


@dataclass(frozen=True)
class GivenUniforms:
    """A random number generator whose coins choose a draw, with prescribed uniforms for the draws."""

    for_draw: Tensor  # (B, L)

    def uniforms(
        self, step: int, positions: Tensor, purpose: Purpose, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        u = self.for_draw[:, positions] if rows is None else self.for_draw[rows, positions]
        return (u, u) if purpose == Purpose.TOKENS else (torch.zeros_like(u), torch.zeros_like(u))


@every_backend
def test_every_tail_token_has_its_own_interval(backend: Backend) -> None:
    """1900 tokens of 2.5e-8, each less than a float32 can add to 1, on both sides of the heavy one. The uniform at the
    middle of each one's interval of the float64 distribution draws that one."""
    weights = torch.full((2000,), 2.5e-8)
    weights[700] = 1
    weights[1900:] = 0
    logits = weights.log()  # float32
    probs = logits.double().softmax(-1).numpy().astype(np.longdouble)
    cumulative = np.cumsum(probs)
    middles = torch.from_numpy(((cumulative - probs / 2) / cumulative[-1]).astype(np.float64))[:1900].view(19, 100)
    tokens, nowhere = torch.full((19, 100), 1999), torch.zeros(19, 100, dtype=torch.bool)
    case = case_of(tokens, 2000, signal_t=0.001, signal_s=1.0, rng=GivenUniforms(middles), inspect=nowhere)
    drawn = step(backend, logits.expand(19, 100, 2000), case).tokens
    assert torch.equal(drawn.flatten(), torch.arange(1900))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_inverse_cdf_never_leaves_the_support(dtype: torch.dtype) -> None:
    """At u = 0, at the largest u below 1, and on every boundary: a token of positive weight."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(200, 33, generator=generator).to(dtype) * (torch.rand(200, 33, generator=generator) < 0.3)
    weights[:, 16] += (weights.sum(-1) == 0).to(dtype)
    cumulative = weights.double().cumsum(-1)
    edges = [
        torch.zeros(200, dtype=torch.float64),
        torch.ones(200, dtype=torch.float64),
        *(cumulative / cumulative[:, -1:]).T,
    ]
    for u in edges:
        drawn = inverse_cdf(weights, u.clamp(max=1 - 2.0**-53))
        assert (weights.gather(-1, drawn[:, None]) > 0).all()


# The same uniforms give the same tokens


def edge_distance(probs: np.ndarray, z: int, u: tuple[float, ...], case: Case) -> float:
    """How near a position's uniforms are to a boundary where rounding decides: a rank or the mass of the nucleus, coin
    two, a step of the cumulative distribution."""
    transition, distances = case.transition, []
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
    agrees = (1 - signal) / (1 - signal + signal * len(probs) * probs[z])
    distances += [abs(u[0] - agrees), np.abs(np.cumsum(probs)[:-1] - u[1]).min()]
    return min(distances)


def random_logits(rows: int) -> tuple[Tensor, Tensor]:
    """(rows, 1000, 50) float32 logits, and tokens of which half are the likeliest."""
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(rows, 1000, 50, generator=generator)
    tokens = torch.randint(50, (rows, 1000), generator=generator)
    return logits, torch.where(torch.rand(rows, 1000, generator=generator) < 0.5, logits.argmax(-1), tokens)


def disagreements(one: Tensor, other: Tensor, logits: Tensor, case: Case) -> list[float]:
    """For each position where two backends drew different tokens, its distance from an edge."""
    positions = torch.arange(logits.shape[1])
    (_, coins), (draws, _) = (case.call.rng.uniforms(0, positions, p) for p in (Purpose.COINS, Purpose.TOKENS))
    found = []
    for here in map(tuple, (one != other).nonzero().tolist()):
        probs, z = logits[here].double().softmax(-1).numpy(), int(case.transition.tokens[here])
        found.append(edge_distance(probs, z, (coins[here].item(), draws[here].item()), case))
    return found


@pytest.mark.parametrize(
    ("signal_t", "signal_s", "top_p", "temperature"),
    thinned(
        [(0.1, 0.5, 1.0, 1.3), (0.6, 0.95, 0.9, 1.0), (0.9, 1.0, 0.9, 1.0), (0.6, 0.95, 0.9, 0.5), (0.1, 0.5, 1.0, 1.0)]
    ),
)
def test_the_same_tokens_as_dense_except_at_rounding_edges(
    signal_t: float, signal_s: float, top_p: float, temperature: float
) -> None:
    """200,000 random distributions in float32: there are few disagreements, each within 1e-6 of an edge."""
    logits, tokens = random_logits(200)
    case = case_of(tokens, 50, signal_t=signal_t, signal_s=signal_s, top_p=top_p, temperature=temperature)
    reference, outcome = (step(backend, logits, case) for backend in BACKENDS.values())
    assert torch.equal(outcome.top, reference.top)
    torch.testing.assert_close(outcome.deficit, reference.deficit, rtol=0, atol=1e-6)
    assert (reference.tokens != tokens).double().mean() > 0.3  # the step changes tokens
    edges = disagreements(outcome.tokens, reference.tokens, logits, case)
    assert len(edges) < 20
    assert all(edge < 1e-6 for edge in edges)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_disagreements_are_near_edges(top_p: float) -> None:
    """Logits that are off by about 1e-3 cause some disagreements, each within 3e-3 of an edge."""
    logits, tokens = random_logits(100)
    case = case_of(tokens, 50, top_p=top_p)
    noise = 1e-3 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
    one, other = (step(sparse.BACKEND, each, case).tokens for each in (logits, logits + noise))
    edges = disagreements(one, other, logits, case)
    assert len(edges) > 3
    assert max(edges) < 3e-3


def test_the_same_tokens_as_dense_from_float64_logits() -> None:
    """In float64 no uniform is near enough to an edge: no disagreement, also for a model that predicts a posterior."""
    generator = torch.Generator().manual_seed(4)
    size, shape = 50, (50, 1000)
    features = 3 * torch.randn(*shape, size, generator=generator, dtype=torch.float64)
    tokens, model_input = torch.randint(size, (2, *shape), generator=generator)
    cases = ({}, {"top_p": 0.8}, {"convert": True}, {"convert": True, "top_p": 0.8, "boundary": "paper"})
    for changes, temperature in itertools.product(cases, (1.0, 0.5, 1.3)):
        case = case_of(tokens, size, model_input=model_input, temperature=temperature, **changes)
        one, other = (step(each, features, case) for each in BACKENDS.values())
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.top, other.top)
        torch.testing.assert_close(one.deficit, other.deficit, rtol=1e-9, atol=1e-14)


# Masks, rows, pieces


def masked_case() -> tuple[Tensor, Case]:
    generator = torch.Generator().manual_seed(6)
    features = 2 * torch.randn(6, 80, 9, generator=generator, dtype=torch.float64)
    tokens = torch.randint(9, (6, 80), generator=generator)
    revise, inspect = torch.rand(2, 6, 80, generator=generator) < 0.5
    return features, case_of(tokens, 9, revise=revise, inspect=inspect, signal_t=0.2, signal_s=0.9, top_p=0.9)


@every_backend
def test_revise_and_inspect_are_independent(backend: Backend) -> None:
    """Neither mask changes the result at a position, and the arguments stay as they were."""
    features, case = masked_case()
    revise, inspect, tokens = case.transition.revise, case.transition.inspect, case.transition.tokens
    everywhere, nowhere = torch.ones_like(revise), torch.zeros_like(revise)
    arguments = [features, tokens, revise, inspect]
    before = [argument.clone() for argument in arguments]
    full = step(backend, features, case.replace(revise=everywhere, inspect=everywhere))
    part = step(backend, features, case)
    assert torch.equal(part.tokens, torch.where(revise, full.tokens, tokens))
    assert (full.tokens[~revise] != tokens[~revise]).any()
    assert torch.equal(part.top, full.top * inspect)
    assert torch.equal(part.deficit, torch.where(inspect, full.deficit, math.inf))
    assert torch.isfinite(full.deficit).all()
    nothing = step(backend, features, case.replace(revise=nowhere, inspect=nowhere))
    assert torch.equal(nothing.tokens, tokens)
    assert not nothing.top.any()
    assert (nothing.deficit == math.inf).all()
    step(backend, features, case.replace(convert=True, temperature=0.8))
    assert all(map(torch.equal, before, arguments))


@every_backend
def test_deficit_and_gain_ignore_the_support(backend: Backend) -> None:
    """The gain is ln of the best other probability over that of the given token, negative at the argmax."""
    features, case = masked_case()
    against = case.transition.tokens.clone()
    against[:, ::3] = features.argmax(-1)[:, ::3]
    probs, inspect = features.softmax(-1), case.transition.inspect
    for top_p in (1.0, 0.9, 0.2):
        outcome = step(backend, features, case.replace(top_p=top_p, against=against))
        exact = torch.where(inspect, 1 - probs.amax(-1), math.inf)
        torch.testing.assert_close(outcome.deficit, exact, rtol=1e-12, atol=1e-15)
        own = probs.gather(-1, against[..., None])[..., 0]
        best = probs.scatter(-1, against[..., None], 0).amax(-1)
        torch.testing.assert_close(outcome.gain, torch.where(inspect, (best / own).log(), -math.inf))


def test_sparse_runs_the_head_only_where_it_is_needed() -> None:
    features, case = masked_case()
    rows: list[Tensor] = []
    step(sparse.BACKEND, features, case, lambda some: rows.append(some) or some)
    first, _ = case.call.rng.uniforms(0, torch.arange(80), Purpose.COINS)
    signal_t, signal_s = 0.2, 0.9
    moves = first < (signal_s - signal_t + (1 - signal_t / signal_s) * (1 - signal_s)) / (1 - signal_t)
    needed = (moves & case.transition.revise) | case.transition.inspect
    assert torch.equal(torch.cat(rows), features[needed])
    assert 0 < needed.sum() < needed.numel()


@pytest.mark.parametrize(
    "support", [Support(0.9), Support(0.5, "paper"), Support(0.7, top_k=9), Support(min_p=0.1)], ids=str
)
@pytest.mark.parametrize("sharpness", [0.5, 3.0])
def test_sparse_truncates_few_rows_and_draws_as_if_it_truncated_all(
    support: Support, sharpness: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bounds from 0 to infinity make it truncate every row. Logits are rounded to bfloat16, so that weights tie."""
    generator = torch.Generator().manual_seed(1)
    logits = (sharpness * torch.randn(4, 64, 200, generator=generator)).bfloat16().float()
    likely = torch.rand(4, 64, generator=generator) < 0.5
    tokens = torch.where(likely, logits.argmax(-1), torch.randint(200, (4, 64), generator=generator))
    every = torch.ones_like(tokens, dtype=torch.bool)
    kept, rows = truncation.kept, []
    monkeypatch.setattr(
        truncation, "kept", lambda weights, support: rows.append(len(weights)) or kept(weights, support)
    )

    def drawn(signal_t: float, signal_s: float) -> Tensor:
        case = case_of(tokens, 200, seed=7, call=3, inspect=~every, signal_t=signal_t, signal_s=signal_s, against=None)
        return step(sparse.BACKEND, logits, case.replace(**support._asdict())).tokens

    spans = ((0.02, 0.3), (0.4, 0.7), (0.9, 0.99), (0.9, 1.0))
    quick, few = [drawn(*span) for span in spans], sum(rows)
    unknown = lambda weights, own, total, support: (0 * total, 0 * total + math.inf)  # noqa: E731
    monkeypatch.setattr(truncation, "truncated_prob_bounds", unknown)
    rows.clear()
    assert all(torch.equal(tokens, drawn(*span)) for tokens, span in zip(quick, spans, strict=True))
    assert few <= sum(rows)
    if support == Support(0.9):
        assert few < 0.75 * sum(rows)


@pytest.mark.parametrize("size", [1, 2, 14, 97, 4096, 50258])
def test_the_largest_logit_and_its_first_place(size: int) -> None:
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(9, size, generator=random)
    tied = logits.round()
    tied[:, ::2] = -math.inf
    for one in (logits, tied, torch.zeros(9, size), torch.full((9, size), -math.inf), logits[:0]):
        assert all(map(torch.equal, sparse.largest_of(one), one.max(-1)))


def test_pieces_do_not_change_sparse(monkeypatch: pytest.MonkeyPatch) -> None:
    features, case = masked_case()
    together = step(sparse.BACKEND, features, case)
    sizes: list[int] = []
    monkeypatch.setitem(backends.CHUNK, "cpu", 7 * 9 + 3)
    monkeypatch.setitem(backends.PIECE, "cpu", 2 * 9 + 1)
    parts = step(sparse.BACKEND, features, case, lambda some: sizes.append(len(some)) or some)
    assert max(sizes) == 7
    assert all(map(torch.equal, together, parts))


def test_every_kind_of_device_has_limits() -> None:
    """Kinds other than cpu and cuda have the limits of a GPU. Devices of kind meta need no hardware."""
    features, rows = torch.zeros(2, 3, 5, device="meta"), torch.zeros(6, 2, dtype=torch.long, device="meta")
    ((some, logits),) = backends.head_in_pieces(same, features, rows, 5)
    assert (some.shape, logits.shape) == ((6, 2), (6, 5))
    assert backends.fastest("xpu") is sparse.BACKEND
    with pytest.raises(LimpetError, match="needs float64, which mps devices lack"):
        backends.fastest("mps")
