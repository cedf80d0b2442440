"""Stopping early, the experiment: a readout along the path is each sample's own; and what was found."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch

import limpet
from limpet.engine.path import open_path
from limpet.engine.streams import Stream

ROOT = Path(__file__).parents[1]
STOPPING = runpy.run_path(str(ROOT / "benchmarks/stopping.py"))
ARMS = [limpet.Mend(nfe=12), limpet.CRS(nfe=12), limpet.CRS(nfe=12, endpoint="copied", late_top_p=0.9)]


@pytest.mark.parametrize("sampler", ARMS, ids=lambda sampler: sampler.caption)
def test_readouts_along_the_path(sampler: limpet.CRS) -> None:
    """The last is the sampler's own output, and none depends on who else is in the batch."""
    model = limpet.load("exact:words")
    along = STOPPING["walk"](model, sampler, 1, torch.arange(4), 2)
    assert sorted(along.read) == [5, 7, 9, 11]
    assert torch.equal(along.read[11], limpet.sample(model, sampler, n=4, seed=1).tokens)
    alone = STOPPING["walk"](model, sampler, 1, torch.arange(2, 3), 2)
    assert all(torch.equal(tokens[0], along.read[call][2]) for call, tokens in alone.read.items())
    assert not torch.equal(along.read[5], along.read[11])


def test_a_readout_has_the_law_of_the_calls_own_time() -> None:
    """The argmax of what the denoiser says of what that call sees, at the time of that call."""
    model, sampler = limpet.load("exact:words"), limpet.CRS(nfe=12)
    path = open_path(model, Stream(1, torch.arange(3)), torch.full((3, model.length), -1))
    state = sampler.begin(path)
    while state.call < 7:
        state, _ = sampler.step(path, state)
    end, info = STOPPING["ending"](sampler, 7).step(path, state)
    assert info.t == sampler.times[7]
    (law,) = (said for _, said in path.laws(path.call(info.input, info.t)[0], path.free.nonzero()))
    assert torch.equal(end.tokens.flatten(), law.argmax(-1))


def test_a_sample_stops_at_the_first_call_that_may() -> None:
    read = dict.fromkeys((3, 5, 7), torch.zeros(3, 1))
    doubt, changed = torch.ones(3, 8), torch.zeros(3, 8)
    doubt[0, 2:] = doubt[1, 4:] = doubt[2, 2:] = 0.1
    changed[2, 2] = 1  # a label that still changes is no settled path
    along = STOPPING["Along"](read, doubt, changed)
    assert STOPPING["stops"](along, 0.1).tolist() == [3, 5, 5]
    assert STOPPING["stops"](along, 0.05).tolist() == [7, 7, 7]


def test_what_the_page_says_was_found() -> None:
    """No rule saves a fifth of the calls with NLL and entropy equal within two errors."""
    said = (ROOT / "docs/speed.md").read_text(encoding="utf-8")
    found = json.loads((ROOT / "benchmarks/results/stopping.json").read_text(encoding="utf-8"))
    assert found["nfe"] == 64
    for arm, about in found["arms"].items():
        for row in (*about["rules"].values(), *about["all at one call"].values()):
            differences = row["NLL less the last call's"], row["entropy less the last call's"]
            equal = all(abs(mean) <= 2 * error for mean, error in differences)
            assert not (row["calls"] <= 0.8 * found["nfe"] and equal)
        early = about["all at one call"]["52"]["NLL less the last call's"]
        assert f"| {arm} | {early[0]:+.3f} ± {early[1]:.3f} |" in said
