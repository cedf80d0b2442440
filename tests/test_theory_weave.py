"""Steps in turn: where they are nearer to the data law, where they are not, and what the page says of both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from limpet.theory import closed_loop_weave as weave
from limpet.theory.closed_loop_exact import swept
from limpet.theory.laws import chain, truth
from limpet.theory.output_law import output_law

PAGE = " ".join((Path(__file__).parents[1] / "docs/theory.md").read_text().partition("## Steps in turn")[2].split())


@pytest.fixture(scope="module")
def shares() -> dict[tuple[str, str], list[float]]:
    """The distance in turn over that all at once, by source and grid, of every number of calls."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in weave.sides():
        if row.relation == "~":
            name, *_, grid, _ = row.source.split(", ")
            found.setdefault((name, grid), []).append(row.left / row.right)
    return found


@pytest.mark.parametrize("name", weave.SOURCES)
def test_the_page_says_how_much_nearer(shares: dict[tuple[str, str], list[float]], name: str) -> None:
    both = [shares[name, grid] for grid in weave.GRIDS]
    assert all(len(of) == len(weave.CALLS) for of in both)
    for of in both:
        assert f"{min(of):.0%} to {max(of):.0%}" in PAGE
    assert all((max(of) < 1) == (name != "pairs two places apart") for of in both)


def test_sixteen_in_turn_do_what_forty_eight_do() -> None:
    source = chain(4)
    turns, before, after = (
        swept(source, [weave.native(nfe, "uniform", woven)])["tv"][0]
        for nfe, woven in ((16, True), (47, False), (48, False))
    )
    assert after < turns < before
    assert "16 woven calls do what 48 do" in PAGE


def test_in_two_calls_pairs_of_neighbours_are_drawn_exactly() -> None:
    """Of two tokens the first is drawn as if it stood alone, and the second given the first: with two calls that is the
    data law, up to what noise at t = 1 still tells; all at once they are independent."""
    source = chain(2)
    data = truth(source)
    law, apart = (output_law(source, weave.native(2, "uniform", woven)) for woven in (True, False))
    torch.testing.assert_close(law, data, rtol=0, atol=2e-3)
    pairs = data.view(3, 3)
    torch.testing.assert_close(apart.view(3, 3), pairs.sum(1)[:, None] * pairs.sum(0), rtol=0, atol=2e-2)
