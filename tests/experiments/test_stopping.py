"""Stopping early, the experiment: a final step along the path is each sample's own; and what was found."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import limpet
from limpet.diffusion.rng import CounterRNG
from limpet.samplers.context import open_context

ROOT = Path(__file__).parents[2]
STOPPING = runpy.run_path(str(ROOT / "benchmarks/stopping.py"))
ARMS = [limpet.Mend(nfe=12), limpet.CRS(nfe=12), limpet.CRS(nfe=12, final_step="keep", late_top_p=0.9)]


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
    path = open_context(model, CounterRNG(1, torch.arange(3)), torch.full((3, model.length), -1))
    state = sampler.begin(path)
    while state.call < 7:
        state, _ = sampler.step(path, state)
    end, info = STOPPING["ending"](sampler, 7).step(path, state)
    assert info.t == sampler.times[7]
    (probs,) = (said for _, said in path.distributions(path.call(info.input, info.t)[0], path.free.nonzero()))
    assert torch.equal(end.tokens.flatten(), probs.argmax(-1))


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
    for about in found["arms"].values():
        for row in (*about["rules"].values(), *about["all at one call"].values()):
            assert not (row["calls"] <= 0.8 * found["nfe"] and STOPPING["equal"](row))
    assert f"<!-- stopping -->\n{STOPPING['table'](found)}\n<!-- end -->" in said


def test_the_table_reads_each_arm_before_a_fifth_of_the_calls_is_left() -> None:
    def row(calls: float, nll: float, entropy: float) -> dict[str, Any]:
        return {
            "calls": calls,
            "NLL less the last call's": [nll, 0.1],
            "entropy less the last call's": [entropy, 0.01],
        }

    along = {"6": row(6, 1, 0), "8": row(8, 0.3, 0.02), "9": row(9, 0.2, 0.03), "10": row(10, 0, 0)}
    found = {
        "nfe": 10,
        "samples": 4,
        "arms": {"mend": {"rules": {"r": row(8.5, 0.2, -0.02)}, "all at one call": along}},
    }
    head, _, line = STOPPING["table"](found).splitlines()
    assert "4 samples, 10 calls | NLL at 8 less at 10" in head
    assert line == "| mend | +0.300 ± 0.100 | +0.020 ± 0.010 | 8.5 |"
    assert [STOPPING["equal"](row(0, *means)) for means in ((0.2, -0.02), (0.21, 0), (0, 0.021))] == [
        True,
        False,
        False,
    ]
