"""docs/truth.md and the README say what the committed study `truth` found."""

from __future__ import annotations

import pytest

import truth as tool
from examples import ROOT
from limpet.experiments import Results
from limpet.paper.studies import truth

PAGE = tool.PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def results() -> Results:
    return tool.committed()


def test_the_generated_blocks_are_those_of_the_committed_report():
    for name, text in tool.blocks().items():
        assert f"<!-- {name} -->\n{text.strip()}\n<!-- end -->" in PAGE, name


def test_the_limits_of_the_readme_are_findings(results):
    limits = " ".join((ROOT / "README.md").read_text().partition("## Limits")[2].partition("\n## ")[0].split())
    assert "fewer of them novel" in limits
    assert truth.against_native(results, "molecules/16", "mend", "novel").outcome == "fails"
    assert "CRS keeps fewer clues" in limits
    assert truth.against_native(results, "puzzles/16", "crs", "clues kept").outcome == "fails"
    assert "with `final_step=keep` it draws fewer valid boards" in limits
    assert truth.against_native(results, "boards/16", "crs final_step=keep", "valid").outcome == "fails"
    outcomes = {
        (world, nfe): [truth.against_baseline(results, f"{world}/{nfe}", text).outcome for text in ("crs", "mend")]
        for world in tool.SIZE.truth
        for nfe in (16, 64)
    }
    assert "neither CRS nor Mend beats the best baseline, mostly interleaved top-p, with 64 calls" in limits
    assert not any("holds" in outcomes[world, 64] for world in tool.SIZE.truth)
    assert "With 16 calls Mend does on sudoku boards alone, and on brackets both are worse than it" in limits
    assert outcomes["grammar", 16] == ["fails", "fails"]
    assert [world for world in tool.SIZE.truth if outcomes[world, 16][1] == "holds"] == ["boards"]
