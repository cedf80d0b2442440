"""Digests of the tokens that earlier versions of limpet drew: every parameter, on built-in models, bit for bit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import limpet
from limpet.models import Denoiser
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


def of_crs(model: Denoiser, case: dict) -> dict:
    """What a case of the first version stores."""
    common = arguments(case)
    replay = limpet.sample(model, sampler(case["replay"]["policy"]), **common).memory if "replay" in case else None
    out = limpet.sample(model, sampler(case["policy"]), replay=replay, **common)
    none = torch.full_like(out.tokens, NEVER), torch.full_like(out.tokens, NEVER)
    values, committed_at = out.memory or none
    assert torch.equal(out.committed, (committed_at < NEVER).sum(-1))
    committed = {
        "committed_at": digest(torch.where(committed_at >= NEVER, -1, committed_at)),
        "committed_values": digest(torch.where(committed_at >= NEVER, 0, values)),
    }
    return {"tokens": digest(out.tokens), "nfe": out.nfe, "head_rows": out.head_rows, **committed}


def of_any(model: Denoiser, case: dict) -> dict:
    """What a case of version 0.2 stores."""
    out = limpet.sample(model, parse(case["sampler"])[1], **arguments(case))
    memory = digests(out.memory)
    return {"tokens": digest(out.tokens), "nfe": out.nfe, "head_rows": out.head_rows, "memory": memory}


def selected(found: Callable, some: bool) -> list[dict]:
    """All cases of one kind. some: of networks only every eighth, or the first of each sampler."""
    cases = CRS_CASES if found is of_crs else SAMPLER_CASES
    networks = [case for case in cases if not case["model"].startswith("exact:")]
    first = {case["sampler"].split()[0]: case for case in reversed(networks) if "sampler" in case}
    kept = list(first.values()) or networks[::8]
    return [case for case in cases if case not in networks or not some or case in kept]


@pytest.mark.parametrize("found", [of_crs, of_any])
@pytest.mark.parametrize("some", [True, pytest.param(False, marks=pytest.mark.more)], ids=["some", "all"])
def test_the_same_tokens_are_drawn(models: dict[str, Denoiser], found: Callable, some: bool) -> None:
    """With a network a case takes a third of a second, so most of these wait for `make test-more`."""
    wrong = []
    for case in selected(found, some):
        stored = {**case, "head_rows": pytest.approx(case["head_rows"], abs=1e-11)}
        wrong += [case] if {**case, **found(models[case["model"]], case)} != stored else []
    assert wrong == []


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
