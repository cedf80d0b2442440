"""Steps in turn: where they are nearer to the data distribution, where they are not, and what the page says of both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from limpet.paper.theory import closed_loop_interleave as interleave
from limpet.paper.theory.closed_loop_exact import swept
from limpet.paper.theory.output_distribution import output_distribution
from limpet.paper.theory.problems import chain, truth

PAGE = " ".join((Path(__file__).parents[2] / "docs/theory.md").read_text().partition("## Steps in turn")[2].split())


@pytest.fixture(scope="module")
def shares() -> dict[tuple[str, str], list[float]]:
    """The distance in turn over that all at once, by source and grid, of every number of calls."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in interleave.sides():
        if row.relation == "~":
            name, *_, grid, _ = row.source.split(", ")
            found.setdefault((name, grid), []).append(row.left / row.right)
    return found


@pytest.mark.parametrize("name", interleave.SOURCES)
def test_the_page_says_how_much_nearer(shares: dict[tuple[str, str], list[float]], name: str) -> None:
    both = [shares[name, grid] for grid in interleave.GRIDS]
    assert all(len(of) == len(interleave.CALLS) for of in both)
    for of in both:
        assert f"{min(of):.0%} to {max(of):.0%}" in PAGE
    assert all((max(of) < 1) == (name != "pairs two places apart") for of in both)


def test_sixteen_in_turn_do_what_forty_eight_do() -> None:
    source = chain(4)
    turns, before, after = (
        swept(source, [interleave.native(nfe, "uniform", interleaved)])["tv"][0]
        for nfe, interleaved in ((16, True), (47, False), (48, False))
    )
    assert after < turns < before
    assert "16 interleaved calls do what 48 do" in PAGE


def test_in_two_calls_pairs_of_neighbours_are_drawn_exactly() -> None:
    """Of two tokens the first is drawn as if it stood alone, and the second given the first: with two calls that is the
    data distribution, up to what noise at t = 1 still tells; all at once they are independent."""
    source = chain(2)
    data = truth(source)
    probs, apart = (
        output_distribution(source, interleave.native(2, "uniform", interleaved)) for interleaved in (True, False)
    )
    torch.testing.assert_close(probs, data, rtol=0, atol=2e-3)
    pairs = data.view(3, 3)
    torch.testing.assert_close(apart.view(3, 3), pairs.sum(1)[:, None] * pairs.sum(0), rtol=0, atol=2e-2)
