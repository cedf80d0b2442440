"""Top-p against a full sort, with ties, point masses, and laws of every width."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import literal
from limpet.engine import support

BOUNDARIES = ["released", "paper"]


def by_full_sort(weights: Tensor, p: float, boundary: str) -> list[list[bool]]:
    return [literal.nucleus(row, p, boundary) for row in weights.double().tolist()]


@pytest.mark.parametrize(("boundary", "size"), [("paper", 2), ("released", 3)])
def test_an_exact_tie_with_p(boundary: support.Boundary, size: int) -> None:
    law = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64)
    kept = support.nucleus(law, 0.75, boundary)
    assert kept.tolist() == [[True] * size + [False] * (4 - size)]
    restricted = support.restrict(law, 0.75, boundary)
    assert restricted.dtype == torch.float64
    mass = law[0, :size].sum().item()
    assert restricted[0].tolist() == [*(law[0, :size] / mass).tolist(), *[0.0] * (4 - size)]


@pytest.mark.parametrize("boundary", BOUNDARIES)
@given(
    weights=st.lists(st.lists(st.integers(0, 6), min_size=7, max_size=7).filter(any), min_size=1, max_size=5),
    eighths=st.integers(1, 8),
    single=st.booleans(),
)
def test_the_nucleus_is_the_full_sort_with_many_ties(
    boundary: support.Boundary, weights: list[list[int]], eighths: int, single: bool
) -> None:
    """Whole weights: every sum is exact, so every tie in rank or with p is one."""
    dtype = torch.float32 if single else torch.float64
    table = torch.tensor(weights, dtype=dtype)
    assert support.nucleus(table, eighths / 8, boundary).tolist() == by_full_sort(table, eighths / 8, boundary)


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_nucleus_of_every_small_law(boundary: support.Boundary, dtype: torch.dtype) -> None:
    """All laws of one to four tokens with weights of 0 to 3, at every tenth and eighth: all ties that there are."""
    for size in (1, 2, 3, 4):
        laws = torch.tensor([law for law in itertools.product(range(4), repeat=size) if any(law)], dtype=dtype)
        for p in {i / 8 for i in range(1, 9)} | {i / 10 for i in range(1, 10)}:
            assert support.nucleus(laws, p, boundary).tolist() == by_full_sort(laws, p, boundary)


@pytest.mark.parametrize("boundary", BOUNDARIES)
@given(size=st.integers(1, 60), p=st.floats(0.01, 0.999), sharpness=st.floats(0, 12), seed=st.integers(0, 10**6))
def test_the_cut_law_lies_within_its_bounds_at_every_token(
    boundary: support.Boundary, size: int, p: float, sharpness: float, seed: int
) -> None:
    """And where no token of the law ties with another, or with p, the bounds tell the kept from the cut."""
    generator = torch.Generator().manual_seed(seed)
    weights = (sharpness * torch.randn(2, size, generator=generator)).softmax(-1)
    weights = (weights * 64).ceil() if p * 3 % 1 < 0.3 else weights
    every = weights.repeat_interleave(size, 0)  # each law once for each of its tokens
    token = torch.arange(size).repeat(2)[:, None]
    asked = support.Support(p, boundary)
    least, most = support.bounds(every, every.gather(-1, token)[:, 0], every.sum(-1, dtype=torch.float64), asked)
    cut = every.double() * support.kept(every, asked)
    law = (cut / cut.sum(-1, keepdim=True)).gather(-1, token)[:, 0]
    assert (least <= law).all()
    assert (law <= most).all()
    if len(set(weights.flatten().tolist())) == weights.numel():
        assert ((most == 0) == (law == 0)).all()
        assert ((least > 0) == (law > 0)).all()


@pytest.mark.parametrize("boundary", BOUNDARIES)
@given(size=st.integers(1, 150), p=st.floats(0.01, 0.999), sharpness=st.floats(0, 12), seed=st.integers(0, 10**6))
def test_the_nucleus_is_the_full_sort_on_random_laws(
    boundary: support.Boundary, size: int, p: float, sharpness: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = (sharpness * torch.randn(3, size, dtype=torch.float64, generator=generator)).softmax(-1)
    if p * 3 % 1 < 0.3:  # quantised, as bfloat16 laws are: ties at every rank
        weights = (weights * 64).ceil()
    assert support.nucleus(weights, p, boundary).tolist() == by_full_sort(weights, p, boundary)


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nuclei_of_every_size_in_one_call(boundary: support.Boundary, dtype: torch.dtype) -> None:
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
        assert support.nucleus(rows, p, boundary).tolist() == by_full_sort(rows, p, boundary)


def test_a_point_mass_keeps_its_point() -> None:
    law = torch.tensor([[0.0, 0.0, 1.0, 0.0]])
    for boundary in ("released", "paper"):
        for p in (1e-9, 0.5, 0.999):
            assert support.nucleus(law, p, boundary).tolist() == [[False, False, True, False]]


def test_p_of_one_is_the_identity() -> None:
    law = torch.tensor([[[0.7, 0.3, 0.0]]])
    assert torch.equal(support.restrict(law, 1.0), law.double())


@given(size=st.integers(1, 90), p=st.floats(0.01, 0.999), seed=st.integers(0, 10**6))
def test_a_restricted_law_is_a_law_on_its_heaviest_tokens(size: int, p: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    law = (3 * torch.randn(2, 3, size, dtype=torch.float64, generator=generator)).softmax(-1)
    for boundary in ("released", "paper"):
        restricted = support.restrict(law, p, boundary)
        torch.testing.assert_close(restricted.sum(-1), torch.ones(2, 3, dtype=torch.float64))
        kept = restricted > 0
        mass = (law * kept).sum(-1)
        assert (mass >= p * (1 - 1e-12)).all()
        assert (torch.where(kept, law, 2).amin(-1) >= torch.where(kept, 0, law).amax(-1)).all()
        torch.testing.assert_close(restricted * mass[..., None], law * kept)
        assert torch.equal(restricted.argmax(-1), law.argmax(-1))
