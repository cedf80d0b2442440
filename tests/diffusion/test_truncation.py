"""Top-p against a full sort, with ties, point masses and nuclei of every size; the bounds; top-k and min-p."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import literal
from limpet.diffusion import truncation

BOUNDARIES = ["released", "paper"]


def by_full_sort(weights: Tensor, p: float, boundary: str) -> list[list[bool]]:
    return [literal.nucleus(row, p, boundary) for row in weights.double().tolist()]


@pytest.mark.parametrize(("boundary", "size"), [("paper", 2), ("released", 3)])
def test_an_exact_tie_with_p(boundary: truncation.Boundary, size: int) -> None:
    probs = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64)
    kept = truncation.nucleus(probs, 0.75, boundary)
    assert kept.tolist() == [[True] * size + [False] * (4 - size)]
    restricted = truncation.restrict(probs, 0.75, boundary)
    assert restricted.dtype == torch.float64
    mass = probs[0, :size].sum().item()
    assert restricted[0].tolist() == [*(probs[0, :size] / mass).tolist(), *[0.0] * (4 - size)]


@pytest.mark.parametrize("boundary", BOUNDARIES)
@given(
    weights=st.lists(st.lists(st.integers(0, 6), min_size=7, max_size=7).filter(any), min_size=1, max_size=5),
    eighths=st.integers(1, 8),
    single=st.booleans(),
)
def test_the_nucleus_is_the_full_sort_with_many_ties(
    boundary: truncation.Boundary, weights: list[list[int]], eighths: int, single: bool
) -> None:
    """With whole weights every sum is exact, so ties are exact too."""
    dtype = torch.float32 if single else torch.float64
    table = torch.tensor(weights, dtype=dtype)
    assert truncation.nucleus(table, eighths / 8, boundary).tolist() == by_full_sort(table, eighths / 8, boundary)


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_nucleus_of_every_small_distribution(boundary: truncation.Boundary, dtype: torch.dtype) -> None:
    """All distributions of one to four tokens with weights from 0 to 3, at every tenth and eighth, with all ties."""
    for size in (1, 2, 3, 4):
        distributions = torch.tensor(
            [probs for probs in itertools.product(range(4), repeat=size) if any(probs)], dtype=dtype
        )
        for p in {i / 8 for i in range(1, 9)} | {i / 10 for i in range(1, 10)}:
            assert truncation.nucleus(distributions, p, boundary).tolist() == by_full_sort(distributions, p, boundary)


@pytest.mark.parametrize("boundary", BOUNDARIES)
@given(size=st.integers(1, 60), p=st.floats(0.01, 0.999), sharpness=st.floats(0, 12), seed=st.integers(0, 10**6))
def test_probabilities_after_truncation_are_within_their_bounds(
    boundary: truncation.Boundary, size: int, p: float, sharpness: float, seed: int
) -> None:
    """Without ties among the weights, the bounds also tell which tokens are kept."""
    generator = torch.Generator().manual_seed(seed)
    weights = (sharpness * torch.randn(2, size, generator=generator)).softmax(-1)
    weights = (weights * 64).ceil() if p * 3 % 1 < 0.3 else weights
    every = weights.repeat_interleave(size, 0)  # each distribution once for each of its tokens
    token = torch.arange(size).repeat(2)[:, None]
    support = truncation.Support(p, boundary)
    least, most = truncation.truncated_prob_bounds(
        every, every.gather(-1, token)[:, 0], every.sum(-1, dtype=torch.float64), support
    )
    cut = every.double() * truncation.kept(every, support)
    probs = (cut / cut.sum(-1, keepdim=True)).gather(-1, token)[:, 0]
    assert (least <= probs).all()
    assert (probs <= most).all()
    if len(set(weights.flatten().tolist())) == weights.numel():
        assert ((most == 0) == (probs == 0)).all()
        assert ((least > 0) == (probs > 0)).all()


@pytest.mark.parametrize("boundary", BOUNDARIES)
@given(size=st.integers(1, 150), p=st.floats(0.01, 0.999), sharpness=st.floats(0, 12), seed=st.integers(0, 10**6))
def test_the_nucleus_is_the_full_sort_of_random_distributions(
    boundary: truncation.Boundary, size: int, p: float, sharpness: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = (sharpness * torch.randn(3, size, dtype=torch.float64, generator=generator)).softmax(-1)
    if p * 3 % 1 < 0.3:  # quantised, as bfloat16 distributions are: ties at every rank
        weights = (weights * 64).ceil()
    assert truncation.nucleus(weights, p, boundary).tolist() == by_full_sort(weights, p, boundary)


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nuclei_of_every_size_in_one_call(boundary: truncation.Boundary, dtype: torch.dtype) -> None:
    """V = 5000: nuclei of 1, of about 50, of just 64 and 65, of thousands and of all, in one call."""
    generator = torch.Generator().manual_seed(0)
    size = 5000
    rows = torch.zeros(8, size, dtype=torch.float64)
    rows[0, 4321] = 1  # a point mass
    rows[1, torch.randperm(size, generator=generator)[:50]] = 1
    rows[2, torch.randperm(size, generator=generator)[:64]] = 1
    rows[3, torch.randperm(size, generator=generator)[:65]] = 1
    rows[4] = 1  # all tied: ids decide
    rows[5] = torch.randint(1, 4, (size,), generator=generator)
    rows[6] = torch.rand(size, dtype=torch.float64, generator=generator)
    rows[7] = torch.arange(size) % 513 == 0
    rows = rows.to(dtype)
    for p in (0.25, 0.5, 0.984375, 1.0):
        assert truncation.nucleus(rows, p, boundary).tolist() == by_full_sort(rows, p, boundary)


def test_a_point_mass_and_p_of_one() -> None:
    for boundary in BOUNDARIES:
        for p in (1e-9, 0.5, 0.999):
            assert truncation.nucleus(torch.tensor([[0.0, 0.0, 1.0, 0.0]]), p, boundary).tolist() == [[0, 0, 1, 0]]
    probs = torch.tensor([[[0.7, 0.3, 0.0]]])
    assert torch.equal(truncation.restrict(probs, 1.0), probs.double())


@given(size=st.integers(1, 90), p=st.floats(0.01, 0.999), seed=st.integers(0, 10**6))
def test_a_restricted_distribution_is_normalised_on_its_likeliest_tokens(size: int, p: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    probs = (3 * torch.randn(2, 3, size, dtype=torch.float64, generator=generator)).softmax(-1)
    for boundary in ("released", "paper"):
        restricted = truncation.restrict(probs, p, boundary)
        torch.testing.assert_close(restricted.sum(-1), torch.ones(2, 3, dtype=torch.float64))
        kept = restricted > 0
        mass = (probs * kept).sum(-1)
        assert (mass >= p * (1 - 1e-12)).all()
        assert (torch.where(kept, probs, 2).amin(-1) >= torch.where(kept, 0, probs).amax(-1)).all()
        torch.testing.assert_close(restricted * mass[..., None], probs * kept)
        assert torch.equal(restricted.argmax(-1), probs.argmax(-1))


def test_what_supports_keep() -> None:
    """By hand: ties go to lower ids, a token at the min-p limit is kept, and the smallest of several sets decides."""
    weights = torch.tensor([[0.125, 0.25, 0.125, 0.25, 0.0625, 0.125, 0.0625, 0.0]], dtype=torch.float64)

    def kept(**support: float) -> list[int]:
        return truncation.kept(weights, truncation.Support(**support))[0].nonzero()[:, 0].tolist()  # type: ignore[arg-type]

    assert kept(top_k=1) == [1]
    assert kept(top_k=3) == [0, 1, 3]
    assert kept(top_k=100) == kept() == list(range(8))
    assert kept(min_p=0.5) == [0, 1, 2, 3, 5]
    assert kept(min_p=1.0) == [1, 3]
    assert kept(min_p=0.5, top_k=4) == kept(top_k=4, top_p=0.9) == [0, 1, 2, 3]
    assert kept(top_p=0.3, top_k=4) == kept(top_p=0.3)
