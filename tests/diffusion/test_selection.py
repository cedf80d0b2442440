"""The selector against a plain greedy scan, its invariants, and the counts that the paper reports."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from limpet.diffusion.selection import select, spaced


def plain_scan(deficit: list[float], eligible: list[bool], count: float, budget: float, spacing: int) -> list[bool]:
    """Take positions in increasing deficit, ties by position; accept each that keeps every constraint (appendix A)."""
    accepted: list[int] = []
    total = 0.0
    for i in sorted(range(len(deficit)), key=lambda i: (deficit[i], i)):
        if (
            eligible[i]
            and len(accepted) < count
            and total + deficit[i] <= budget
            and all(abs(i - j) > spacing for j in accepted)
        ):
            accepted.append(i)
            total += deficit[i]
    return [i in accepted for i in range(len(deficit))]


def by_scan(deficit: Tensor, eligible: Tensor, count: Tensor, budget: Tensor, spacing: int) -> Tensor:
    rows = zip(deficit.tolist(), eligible.tolist(), count.tolist(), budget.tolist(), strict=True)
    return torch.tensor([plain_scan(*row, spacing) for row in rows])


def test_ten_thousand_scans() -> None:
    """50 shapes of 200 samples: deficits in sixteenths (ties, exact sums) or continuous, a limit for each sample."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.rand(*shape, dtype=torch.float64, generator=generator)

    for case in range(50):
        length, spacing, batch = 1 + case % 25, case * 7 % 9, 200
        deficit = random(batch, length)
        deficit[: batch // 2] = (deficit[: batch // 2] * 16).floor() / 16
        deficit[:10] = 0.25  # all tied
        eligible = random(batch, length) < random(batch, 1) * 1.5
        count = (random(batch) * 1.3 * length).floor().long()
        budget = random(batch) * length / 4
        budget[: batch // 2] = (budget[: batch // 2] * 16).floor() / 16
        budget[::9] = math.inf
        committed = select(deficit, eligible, count, budget, spacing)
        assert committed.dtype == torch.bool
        assert torch.equal(committed, by_scan(deficit, eligible, count, budget, spacing))


@pytest.mark.parametrize("spacing", [0, 1, 4, 40])
def test_orders_that_take_the_most_rounds(spacing: int) -> None:
    """Rising, falling, constant and alternating deficits, where each choice depends on the one before."""
    n = 33
    rising = torch.arange(n, dtype=torch.float64) / 64
    deficit = torch.stack(
        [rising, rising.flip(0), torch.full_like(rising, 0.5), rising % 0.03125, (rising - 0.25).abs()]
    )
    eligible = torch.ones_like(deficit, dtype=torch.bool)
    for count, budget in [(n, math.inf), (5, math.inf), (n, 1.5), (3, 0.25), (0, math.inf), (n, 0.0)]:
        limits = torch.full((5,), count), torch.full((5,), budget, dtype=torch.float64)
        assert torch.equal(
            select(deficit, eligible, count, budget, spacing), by_scan(deficit, eligible, *limits, spacing)
        )


def test_limits_for_all_samples_or_for_each() -> None:
    generator = torch.Generator().manual_seed(1)
    deficit = torch.rand(4, 30, generator=generator)
    eligible = torch.ones(4, 30, dtype=torch.bool)
    count, budget = torch.tensor([0, 1, 4, 30]), torch.tensor([1.0, 1.0, 0.2, 0.5], dtype=torch.float64)
    each = select(deficit, eligible, count, budget, 2)
    for i in range(4):
        one = select(deficit[i : i + 1], eligible[i : i + 1], int(count[i]), float(budget[i]), 2)
        assert torch.equal(each[i : i + 1], one)
    assert each.sum(-1).tolist()[:2] == [0, 1]


def test_limits_that_are_met_exactly() -> None:
    deficit = torch.tensor([[0.25, 0.5, 0.25, 0.5, 0.25]])
    eligible = torch.ones(1, 5, dtype=torch.bool)
    assert select(deficit, eligible, 5, 0.75, 1).tolist() == [[True, False, True, False, True]]
    assert select(deficit, eligible, 5, 0.74, 1).tolist() == [[True, False, True, False, False]]
    assert select(deficit, eligible, 5, 9.0, 2).tolist() == [[True, False, False, False, True]]
    assert select(deficit, eligible, 5, 9.0, 3).tolist() == [[True, False, False, False, True]]
    assert select(deficit, eligible, 5, 9.0, 4).tolist() == [[True, False, False, False, False]]


def test_eligible_positions_only_and_unchanged_arguments() -> None:
    deficit = torch.tensor([[0.5, math.inf, 0.1]])
    eligible = torch.zeros(1, 3, dtype=torch.bool)
    assert not select(deficit, eligible, 3, 1.0, 1).any()
    assert not eligible.any()
    eligible = torch.tensor([[True, False, False]])
    assert select(deficit, eligible, 3, 1.0, 1).tolist() == [[True, False, False]]
    assert deficit.tolist() == torch.tensor([[0.5, math.inf, 0.1]]).tolist()


@given(
    length=st.integers(1, 60),
    spacing=st.integers(0, 8),
    count=st.integers(0, 60),
    budget=st.floats(0, 10),
    levels=st.sampled_from([2, 5, 2**20]),
    seed=st.integers(0, 10**6),
)
def test_invariants(length: int, spacing: int, count: int, budget: float, levels: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    deficit = torch.randint(levels, (3, length), generator=generator).double() / levels
    eligible = torch.rand(3, length, generator=generator) < 0.7
    committed = select(deficit, eligible, count, budget, spacing)
    assert not (committed & ~eligible).any()
    assert (committed.sum(-1) <= count).all()
    assert ((deficit * committed).sum(-1) <= budget + 1e-9).all()
    for row in range(3):
        places = committed[row].nonzero()[:, 0]
        assert (places.diff() > spacing).all()
    # Without limits no position could be added. Limits keep the first positions of that set in deficit order.
    whole = select(deficit, eligible, length, math.inf, spacing)
    assert torch.equal(whole, spaced(deficit, eligible, spacing))
    reach = torch.nn.functional.max_pool1d(whole.double(), 2 * spacing + 1, 1, spacing).bool()
    assert not (eligible & ~reach).any()
    assert not (committed & ~whole).any()
    left_out = torch.where(whole & ~committed, deficit, math.inf).amin(-1)
    assert (torch.where(committed, deficit, 0).amax(-1) <= left_out).all()


@pytest.mark.parametrize("budget", [math.inf, 102.4])
def test_random_deficits_at_8_calls_select_about_796_of_1024(budget: float) -> None:
    """Five steps with new random deficits, count 205, spacing 4, no position twice: the paper reports 795 to 800."""
    generator = torch.Generator().manual_seed(0)
    eligible = torch.ones(64, 1024, dtype=torch.bool)
    for _ in range(5):
        deficit = torch.rand(64, 1024, dtype=torch.float64, generator=generator)
        eligible &= ~select(deficit, eligible, 205, budget, 4)
    assert 790 <= (~eligible).sum(-1).double().mean() <= 800
