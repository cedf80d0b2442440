"""Token digests from before the samplers were opened: every parameter on every built-in model, bit for bit."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import limpet
from limpet.samplers import CRS, Native, Sampler, params
from limpet.samplers.crs import NEVER

CASES = json.loads(Path(__file__).with_name("golden.json").read_text())


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.to(torch.int64).contiguous().numpy().tobytes()).hexdigest()[:32]


def sampler(policy: dict) -> Sampler:
    """What a policy of the time is called now: its horizon of 0 was the native sampler."""
    if policy.get("horizon") != 0:
        return CRS(**policy)
    return Native(**{name: value for name, value in policy.items() if name in params(Native)})


@pytest.fixture(scope="module")
def models():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield {name: limpet.load(name, device="cpu") for name in sorted({case["model"] for case in CASES})}
    torch.set_num_threads(threads)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_tokens_are_what_they_were(models, number):
    case = CASES[number]
    common = {name: case.get(name) for name in ("n", "seed", "length", "prefix")} | {"first": case.get("first", 0)}
    common["fixed"] = {int(at): token for at, token in case["fixed"].items()} if "fixed" in case else None
    model = models[case["model"]]
    replay = limpet.sample(model, sampler(case["replay"]["policy"]), **common).memory if "replay" in case else None
    out = limpet.sample(model, sampler(case["policy"]), replay=replay, **common)
    assert digest(out.tokens) == case["tokens"]
    assert out.nfe == case["nfe"]
    assert out.head_rows == pytest.approx(case["head_rows"], abs=1e-11)
    none = torch.full_like(out.tokens, NEVER), torch.full_like(out.tokens, NEVER)
    labels, committed_at = out.memory or none
    assert digest(torch.where(committed_at >= NEVER, -1, committed_at)) == case["committed_at"]
    assert digest(torch.where(committed_at >= NEVER, 0, labels)) == case["labels"]
    assert torch.equal(out.committed, (committed_at < NEVER).sum(-1))


def test_the_cases_cover_every_knob_of_the_time():
    seen = {name for case in CASES for name in case["policy"]}
    assert seen == set(params(CRS)) - {"temperature", "top_k", "min_p", "interleave"}  # younger than the file
    assert len({json.dumps(case["policy"], sort_keys=True) for case in CASES}) >= 60
