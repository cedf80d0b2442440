"""The dense distributions against the paper's equations, the schedules and grids against their stated values."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import literal
from limpet.diffusion import process, truncation

SIZES = [2, 3, 50]
GRIDS = [8, 16, 32, 64]


def distributions_of(size: int, seed: int = 0) -> Tensor:
    """(K, V): random distributions from flat to sharp, the uniform one, point masses, and some after top-p."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.tensor([0.5, 2.0, 8.0], dtype=torch.float64)[:, None]
    random = (scales * torch.randn(3, size, dtype=torch.float64, generator=generator)).softmax(-1)
    points = torch.eye(size, dtype=torch.float64)[[0, size - 1]]
    return torch.cat(
        [
            random,
            torch.full((1, size), 1 / size, dtype=torch.float64),
            points,
            truncation.restrict(random, 0.8, "released"),
            truncation.restrict(random, 0.6, "paper"),
        ]
    )


def signal_pairs() -> list[tuple[float, float]]:
    """(signal_t, signal_s): every step of both grids of every N, from every node to the clean end, from pure noise."""
    pairs = set()
    for nfe in GRIDS:
        for times in (process.two_piece_grid(nfe, 0.33), process.uniform_grid(nfe)):
            signals = process.LOG_LINEAR.signal(times).tolist()
            pairs |= set(itertools.pairwise(signals)) | {(signal, 1.0) for signal in signals}
    return sorted(pairs | {(0.0, 0.001), (0.0, 1.0)})


@pytest.mark.parametrize("size", SIZES)
def test_the_reverse_distribution_is_the_bridge_under_the_posterior(size: int) -> None:
    distributions = distributions_of(size)
    tokens = torch.tensor(sorted({0, 1, size // 2, size - 1}))
    pairs = torch.tensor(signal_pairs(), dtype=torch.float64)
    probs, z, pair = (
        index.flatten()
        for index in torch.meshgrid(
            torch.arange(len(distributions)), torch.arange(len(tokens)), torch.arange(len(pairs)), indexing="ij"
        )
    )
    probs, z, signal_t, signal_s = distributions[probs], tokens[z], pairs[pair, 0], pairs[pair, 1]

    expected = literal.reverse(probs.T.numpy(), z.numpy(), 1 - signal_t.numpy(), 1 - signal_s.numpy())

    found = process.reverse_probs(probs, z, signal_t, signal_s)
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found.numpy(), np.stack(expected, -1), rtol=0, atol=1e-12)
    np.testing.assert_allclose(found.sum(-1).numpy(), 1, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_posterior_and_bridge_are_the_equations(size: int) -> None:
    distributions = distributions_of(size, seed=1)
    for signal_t, signal_s in [(0.001, 0.2), (0.3, 0.31), (0.5, 0.9), (0.99, 0.99999), (0.99999, 1.0)]:
        for z in {0, size - 1}:
            at = torch.full((len(distributions),), z)
            np.testing.assert_allclose(
                process.posterior(distributions, at, signal_t).numpy().T,
                np.stack(literal.converted(distributions.T.numpy(), z, 1 - signal_t)),
                atol=1e-12,
            )
            for x in {0, 1, size - 1}:
                expected = [literal.bridge(y, x, z, 1 - signal_t, 1 - signal_s, size) for y in range(size)]
                probs = process.bridge(torch.tensor(x), torch.tensor(z), signal_t, signal_s, size)
                np.testing.assert_allclose(probs.numpy(), expected, atol=1e-12)
                assert probs.sum().item() == pytest.approx(1, abs=1e-12)


@given(size=st.integers(2, 12), signal_t=st.floats(0, 0.999), step=st.floats(0.001, 1), seed=st.integers(0, 99))
def test_the_channel_composes(size: int, signal_t: float, step: float, seed: int) -> None:
    """q(t|0) = sum over y of q(t|s) q(s|0), with q(t|s) the same channel at the ratio of the signals."""
    signal_s = signal_t + step * (1 - signal_t)
    x = torch.arange(size)
    to_s = process.forward_probs(x, signal_s, size)
    from_s = process.forward_probs(x, signal_t / signal_s, size)
    to_t = process.forward_probs(x, signal_t, size)
    assert torch.allclose(to_s @ from_s, to_t, atol=1e-14, rtol=0)
    literal_from_s = [
        [literal.forward_between(z, y, 1 - signal_t, 1 - signal_s, size) for z in range(size)] for y in range(size)
    ]
    np.testing.assert_allclose(from_s.numpy(), literal_from_s, atol=1e-12)


def test_the_forward_distribution_is_equation_1() -> None:
    probs = process.forward_probs(torch.tensor([[0, 2], [1, 1]]), torch.tensor([0.25, 1.0]), 4)
    assert probs.tolist() == [
        [[0.4375, 0.1875, 0.1875, 0.1875], [0.1875, 0.1875, 0.4375, 0.1875]],
        [[0.0, 1.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]],
    ]


@given(size=st.integers(2, 20), signal=st.floats(0, 0.99999), seed=st.integers(0, 999))
def test_leave_one_out_inverts_the_posterior(size: int, signal: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    probs = (3 * torch.randn(4, size, dtype=torch.float64, generator=generator)).softmax(-1)
    z = torch.randint(size, (4,), generator=generator)
    there = process.posterior(probs, z, signal)
    torch.testing.assert_close(process.leave_one_out(there, z, signal), probs, rtol=1e-10, atol=1e-15)
    torch.testing.assert_close(
        process.posterior(process.leave_one_out(probs, z, signal), z, signal), probs, rtol=1e-10, atol=1e-15
    )
    logits = process.leave_one_out_logits(there.log() + 1.5, z, signal)
    torch.testing.assert_close(logits.softmax(-1), probs, rtol=1e-10, atol=1e-15)


def test_leave_one_out_logits_keeps_its_input_and_impossible_tokens() -> None:
    logits = torch.tensor([[0.0, -math.inf, 1.0]], dtype=torch.float64)
    before = logits.clone()
    moved = process.leave_one_out_logits(logits, torch.tensor([2]), 0.5)
    assert torch.equal(logits, before)
    assert moved[0, 0] == 0
    assert moved[0, 1] == -math.inf
    assert moved[0, 2].item() == pytest.approx(1 - math.log(4))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("signal", [0.0, 0.001, 0.33, 0.9, 0.99999])
def test_restriction_commutes_with_conversion(size: int, signal: float) -> None:
    """C(T_A h) = (C h)(. | A), for nuclei of h and for arbitrary sets."""
    generator = torch.Generator().manual_seed(size)
    probs = distributions_of(size)[:4]
    sets = [truncation.nucleus(probs, p, b) for p in (0.3, 0.8) for b in ("released", "paper")]
    arbitrary = torch.rand(len(probs), size, generator=generator) < 0.5
    arbitrary[:, 0] = True
    for kept in [*sets, arbitrary]:
        for z in {0, size - 1}:
            at = torch.full((len(probs),), z)
            one = probs * kept
            one = process.posterior(one / one.sum(-1, keepdim=True), at, signal)
            other = process.posterior(probs, at, signal) * kept
            torch.testing.assert_close(one, other / other.sum(-1, keepdim=True), rtol=1e-12, atol=1e-14)


def test_the_log_linear_schedule() -> None:
    schedule = process.SCHEDULES["log-linear"]
    t = torch.tensor([0.0, 1e-5, 0.5, 1.0], dtype=torch.float64)
    assert schedule.signal(t).tolist() == pytest.approx([1, 1 - 0.999e-5, 0.5005, 0.001], abs=1e-15)
    assert schedule.sigma(1.0).item() == pytest.approx(6.9078, abs=5e-5)
    assert schedule.sigma(1e-5).item() == pytest.approx(1.0e-5, rel=2e-3)
    assert process.LOG_LINEAR is schedule
    assert schedule.signal(0.5).dtype == torch.float64


def test_the_cosine_schedule() -> None:
    schedule = process.SCHEDULES["cosine"]
    for t in (0.0, 1e-5, 0.3, 1.0):
        assert schedule.signal(t).item() == pytest.approx(1 - math.cos(math.pi / 2 * (1 - 0.999 * t)), abs=1e-15)
    assert schedule.signal(0.0).item() == pytest.approx(1)
    assert 0 < schedule.signal(1.0).item() < 2e-6


@pytest.mark.parametrize("name", sorted(process.SCHEDULES))
def test_slopes_are_derivatives_and_signals_fall(name: str) -> None:
    schedule = process.SCHEDULES[name]
    assert schedule.name == name
    t = torch.linspace(1e-3, 1 - 1e-3, 97, dtype=torch.float64)
    step = 1e-5
    difference = (schedule.signal(t + step) - schedule.signal(t - step)) / (2 * step)
    torch.testing.assert_close(schedule.slope(t), difference, rtol=1e-6, atol=1e-9)
    assert (schedule.signal(t).diff() < 0).all()
    torch.testing.assert_close(schedule.sigma(t), -schedule.signal(t).log())


def as_tensor(times: tuple[float, ...]) -> Tensor:
    return torch.tensor(times, dtype=torch.float64)


@pytest.mark.parametrize(
    ("nfe", "warmup", "steps"),
    [(8, 0.33, 2), (16, 0.33, 5), (32, 0.33, 10), (64, 0.33, 21), (64, 0.016, 1), (64, 0.17, 11), (64, 0.5, 32)],
)
def test_the_two_piece_grid_splits_at_one_minus_the_warmup(nfe: int, warmup: float, steps: int) -> None:
    assert process.warmup_steps(nfe, warmup) == steps
    grid = as_tensor(process.two_piece_grid(nfe, warmup))
    assert grid.shape == (nfe,)
    assert grid[0] == 1
    assert grid[-1].item() == pytest.approx(process.EPS, abs=1e-15)
    assert process.EPS == 1e-5
    assert grid[steps].item() == pytest.approx(1 - warmup, abs=1e-5)
    early, late = grid[: steps + 1].diff(), grid[steps:].diff()
    torch.testing.assert_close(early, early[:1].expand_as(early), rtol=1e-9, atol=0)
    torch.testing.assert_close(late, late[:1].expand_as(late), rtol=1e-9, atol=0)
    assert (grid.diff() < 0).all()


def test_the_uniform_grid_ignores_the_warmup() -> None:
    grid = as_tensor(process.uniform_grid(64))
    nodes = [grid[steps].item() for steps in (1, 11, 21, 32)]
    assert nodes == pytest.approx([0.98413, 0.8254, 0.66667, 0.49207], abs=2e-5)
    torch.testing.assert_close(grid.diff(), grid.diff()[:1].expand(63), rtol=1e-9, atol=0)


def test_the_quadratic_grid_is_the_square_of_an_even_one() -> None:
    grid = as_tensor(process.quadratic_grid(9))
    torch.testing.assert_close(grid.sqrt().diff(), grid.sqrt().diff()[:1].expand(8), rtol=1e-9, atol=0)
    assert grid[4].item() == pytest.approx((1 + 1e-5**0.5) ** 2 / 4, abs=1e-12)


@pytest.mark.parametrize(("nfe", "warmup"), [(8, 0.0), (8, 0.05), (8, 1.0), (8, 0.95), (2, 0.33), (2, 0.9)])
def test_with_no_step_on_one_side_the_grid_is_uniform(nfe: int, warmup: float) -> None:
    assert process.two_piece_grid(nfe, warmup) == process.uniform_grid(nfe)


@given(nfe=st.integers(2, 200), warmup=st.floats(0, 1))
def test_every_grid_falls_from_one_to_eps(nfe: int, warmup: float) -> None:
    for grid in (as_tensor(grid(nfe, warmup)) for grid in process.GRIDS.values()):
        assert grid.shape == (nfe,)
        assert grid[0] == 1
        assert grid[-1].item() == pytest.approx(process.EPS, abs=1e-14)
        assert (grid.diff() < 0).all()
