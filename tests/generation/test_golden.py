"""Digests of the tokens that earlier versions of limpet drew: every parameter, on built-in models, bit for bit."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import limpet
from limpet.samplers import CRS, Native, Sampler, params, parse
from limpet.samplers.crs import NEVER

HERE = Path(__file__).parent
CRS_CASES = json.loads((HERE / "golden.json").read_text())  # the first version: CRS and native alone
SAMPLER_CASES = json.loads((HERE / "golden_samplers.json").read_text())  # version 0.2: every built-in sampler


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.to(torch.int64).contiguous().numpy().tobytes()).hexdigest()[:32]


def digests(memory: tuple[Tensor, ...]) -> list[str]:
    return [digest((part * 2**40).round() if part.is_floating_point() else part) for part in memory]


def sampler(policy: dict) -> Sampler:
    """The sampler of a case of the first version, where horizon 0 was native and the default final step was argmax."""
    policy = {"final_step": "argmax", **policy}
    if policy.get("horizon") != 0:
        return CRS(**policy)
    return Native(**{name: value for name, value in policy.items() if name in params(Native)})


@pytest.fixture(scope="module")
def models():
    names = {case["model"] for case in [*CRS_CASES, *SAMPLER_CASES]}
    return {name: limpet.load(name, device="cpu") for name in sorted(names)}


def arguments(case: dict) -> dict:
    common = {name: case.get(name) for name in ("n", "seed", "length", "prompt")} | {"first": case.get("first", 0)}
    common["fixed"] = {int(at): token for at, token in case["fixed"].items()} if "fixed" in case else None
    return common


@pytest.mark.parametrize("number", range(len(CRS_CASES)))
def test_crs_draws_the_same_tokens(models, number):
    case = CRS_CASES[number]
    common, model = arguments(case), models[case["model"]]
    replay = limpet.sample(model, sampler(case["replay"]["policy"]), **common).memory if "replay" in case else None
    out = limpet.sample(model, sampler(case["policy"]), replay=replay, **common)
    assert digest(out.tokens) == case["tokens"]
    assert out.nfe == case["nfe"]
    assert out.head_rows == pytest.approx(case["head_rows"], abs=1e-11)
    none = torch.full_like(out.tokens, NEVER), torch.full_like(out.tokens, NEVER)
    values, committed_at = out.memory or none
    assert digest(torch.where(committed_at >= NEVER, -1, committed_at)) == case["committed_at"]
    assert digest(torch.where(committed_at >= NEVER, 0, values)) == case["committed_values"]
    assert torch.equal(out.committed, (committed_at < NEVER).sum(-1))


@pytest.mark.parametrize("number", range(len(SAMPLER_CASES)))
def test_every_sampler_draws_the_same_tokens(models, number):
    case = SAMPLER_CASES[number]
    out = limpet.sample(models[case["model"]], parse(case["sampler"])[1], **arguments(case))
    assert digest(out.tokens) == case["tokens"]
    assert digests(out.memory) == case["memory"]
    assert out.nfe == case["nfe"]
    assert out.head_rows == pytest.approx(case["head_rows"], abs=1e-11)


def test_the_cases_cover_every_parameter():
    covered = {name for case in CRS_CASES for name in case["policy"]}
    assert covered == set(params(CRS)) - {
        "temperature",
        "top_k",
        "min_p",
        "interleave",
        "refresh",
    }  # SAMPLER_CASES has these, but not refresh
    assert len({json.dumps(case["policy"], sort_keys=True) for case in CRS_CASES}) >= 60
