"""What the page says of the dial is what the committed numbers say."""

from __future__ import annotations

import re

import pytest

import dial
import frontier
import limpet

PAGE = frontier.PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def blocks():
    return dial.blocks()


def rows(block: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()[2:]]


def test_the_generated_blocks_are_those_of_the_committed_results(blocks):
    for (page, name), text in blocks.items():
        assert f"<!-- {name} -->\n{text}<!-- end -->" in page.read_text(encoding="utf-8"), (page, name)


def test_the_measured_samplers_are_those_that_the_dial_chooses():
    for name, cell in dial.measured().items():
        if (found := re.fullmatch(r".*/(\d+)/sharpness=(.*)", name)) is not None:
            assert cell["sampler"] == limpet.recommended(int(found[1]), float(found[2])).caption


def test_sixteen_calls_are_level_with_the_released_64_within_two_errors(blocks):
    """At the dial's entropy, on both models."""
    for _, _, *deltas in rows(blocks[frontier.PAGE, "dial-released"]):
        for mean, error in (map(float, one.split(" ± ")) for one in deltas):
            assert mean <= 2 * error


def test_no_rival_is_below_the_dial_but_where_the_page_says_so(blocks):
    assert "above" not in blocks[frontier.PAGE, "dial"]
    worse = {row[0] for row in rows(blocks[frontier.PAGE, "dial-checked"]) if ", fewer" in str(row)}
    assert worse == {"exact:grammar, 8 calls", "sudoku, 16 calls"}
    page = " ".join(PAGE.split())
    assert "On `exact:grammar` at 8 calls the dial is worse than top-p with interleaved steps" in page
    assert "On `sudoku` at 16 calls the dial has fewer valid boards" in page
