"""Stopping early: the final steps that the benchmark computes, and what it found."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import limpet
from limpet.diffusion.rng import CounterRNG
from limpet.generation import Inputs, rollout

ROOT = Path(__file__).parents[2]
STOPPING = runpy.run_path(str(ROOT / "benchmarks/stopping.py"))
SAMPLERS = [limpet.Mend(nfe=12), limpet.CRS(nfe=12), limpet.CRS(nfe=12, final_step="keep", late_top_p=0.9)]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: sampler.caption)
def test_final_steps_before_the_last_call(sampler: limpet.CRS) -> None:
    """The last is the sampler's own output, and none depends on the other samples of the batch."""
    model = limpet.load("exact:words")
    ends = STOPPING["sample_with_ends"](model, sampler, 1, torch.arange(4), 2)
    assert sorted(ends.tokens) == [5, 7, 9, 11]
    assert torch.equal(ends.tokens[11], limpet.sample(model, sampler, n=4, seed=1).tokens)
    alone = STOPPING["sample_with_ends"](model, sampler, 1, torch.arange(2, 3), 2)
    assert all(torch.equal(tokens[0], ends.tokens[call][2]) for call, tokens in alone.tokens.items())
    assert not torch.equal(ends.tokens[5], ends.tokens[11])


def test_a_final_step_reads_the_prediction_at_the_time_of_its_call() -> None:
    """Its tokens are the argmax of the predictions from that call's input at that call's time."""
    model, sampler = limpet.load("exact:words"), limpet.CRS(nfe=12)
    inputs = Inputs(torch.full((3, model.length), -1), CounterRNG(1, torch.arange(3)))
    *_, before = rollout(model, sampler, inputs, stop=7)
    *_, end = rollout(model, STOPPING["ending"](sampler, 7), inputs, start=before.state)
    assert end.t == sampler.times[7]
    ctx = end.context
    features, *_ = ctx.call(before.state, end.model_input, end.t)
    (log_probs,) = (part for _, part in ctx.log_probs(features, ctx.free.nonzero()))
    assert torch.equal(end.tokens.flatten(), log_probs.argmax(-1))


def test_a_sample_stops_at_the_first_call_that_may() -> None:
    tokens = dict.fromkeys((3, 5, 7), torch.zeros(3, 1))
    doubt, changed = torch.ones(3, 8), torch.zeros(3, 8)
    doubt[0, 2:] = doubt[1, 4:] = doubt[2, 2:] = 0.1
    changed[2, 2] = 1  # a committed token still changes
    ends = STOPPING["EarlyEnds"](tokens, doubt, changed)
    assert STOPPING["stops"](ends, 0.1).tolist() == [3, 5, 5]
    assert STOPPING["stops"](ends, 0.05).tolist() == [7, 7, 7]


def test_the_page_has_what_was_found() -> None:
    """No rule saves a fifth of the calls with NLL and entropy equal within two errors."""
    page = (ROOT / "docs/speed.md").read_text(encoding="utf-8")
    found = json.loads((ROOT / "benchmarks/results/stopping.json").read_text(encoding="utf-8"))
    assert found["nfe"] == 64
    for about in found["samplers"].values():
        for row in (*about["rules"].values(), *about["all at one call"].values()):
            assert not (row["calls"] <= 0.8 * found["nfe"] and STOPPING["equal"](row))
    assert f"<!-- stopping -->\n{STOPPING['table'](found)}\n<!-- end -->" in page


def test_the_table_has_each_sampler_before_a_fifth_of_the_calls_is_left() -> None:
    def row(calls: float, nll: float, entropy: float) -> dict[str, Any]:
        return {"calls": calls, "delta NLL": [nll, 0.1], "delta entropy": [entropy, 0.01]}

    along = {"6": row(6, 1, 0), "8": row(8, 0.3, 0.02), "9": row(9, 0.2, 0.03), "10": row(10, 0, 0)}
    found = {
        "nfe": 10,
        "samples": 4,
        "samplers": {"mend": {"rules": {"r": row(8.5, 0.2, -0.02)}, "all at one call": along}},
    }
    head, _, line = STOPPING["table"](found).splitlines()
    assert "4 samples, 10 calls | NLL at 8 minus at 10" in head
    assert line == "| mend | +0.300 ± 0.100 | +0.020 ± 0.010 | 8.5 |"
    assert [STOPPING["equal"](row(0, *means)) for means in ((0.2, -0.02), (0.21, 0), (0, 0.021))] == [
        True,
        False,
        False,
    ]
