"""Every field of a policy takes effect, and every bad value gets a sentence that names it and says what it takes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import limpet
from limpet import LimpetError, Policy, process
from limpet.denoisers import Denoiser
from limpet.denoisers.sources import source
from limpet.sampler import NEVER, Info, State, generate
from limpet.samples import prepare
from limpet.streams import Stream

WORDS = source("exact:words")
BASE = Policy(nfe=8)


class Tied(Denoiser):
    """The law (1/2, 1/4, 1/8, 1/8) everywhere: top-p meets it exactly at .75."""

    vocab_size, length, name, digest = 4, 64, "tied", "tied"

    def body(self, tokens: Tensor, t: float | Tensor) -> Tensor:
        return torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64).log().expand(*tokens.shape, -1)

    def head(self, features: Tensor) -> Tensor:
        return features


def run(policy: Policy, model: Denoiser = WORDS) -> tuple[list[State], list[Info]]:
    prepared = prepare(model, policy, Stream(8200, torch.arange(4)), torch.full((4, model.length), -1))
    states, infos = zip(*generate(prepared), strict=True)
    return list(states), list(infos)


def output(policy: Policy, model: Denoiser = WORDS) -> Tensor:
    return run(policy, model)[0][-1].tokens


def chosen(policy: Policy) -> list[Tensor]:
    return [info.chosen for info in run(policy)[1]]


# -- each field -------------------------------------------------------------------------------------------------------


def nfe() -> None:
    for calls in (2, 5, 9):
        times = []

        class Counting(Tied):
            def body(self, tokens: Tensor, t: float | Tensor) -> Tensor:
                times.append(t)  # noqa: B023
                return super().body(tokens, t)

        out = limpet.sample(Counting(), Policy(nfe=calls), n=3, batch_size=3)
        assert out.nfe == len(times) == calls


def warmup() -> None:
    for fraction, first in ((0.0, 0), (0.33, 2), (0.5, 4), (0.8, 6)):
        steps = [r for r, picked in enumerate(chosen(BASE.but(warmup=fraction))) if picked.any()]
        assert steps == list(range(first, 7))
    assert not any(picked.any() for picked in chosen(BASE.but(warmup=1.0)))
    assert run(BASE.but(warmup=0.5))[1][4].t == pytest.approx(0.5, abs=1e-5)  # and it places the split of the grid


def horizon() -> None:
    for steps in (0, 1, 3, None):
        _, infos = run(BASE.but(horizon=steps))
        ever = torch.stack([info.chosen for info in infos]).any()
        assert ever == (steps != 0)
        seen = torch.stack([info.visible for info in infos]).sum(0)
        first = infos[2].chosen  # selected at step 2: five calls follow
        assert (seen[first] == min(5, 5 if steps is None else steps)).all()


def budget() -> None:
    counts = []
    for fraction in (0.0, 0.02, 0.1, 10.0):
        _, infos = run(BASE.but(budget=fraction))
        for info in infos[:-1]:
            spent = torch.where(info.chosen, info.deficit, 0).sum(-1)
            assert (spent <= fraction * WORDS.length / 5 + 1e-12).all()
        counts.append(sum(int(info.chosen.sum()) for info in infos))
    assert counts[0] == 0
    assert counts == sorted(set(counts))


def spacing() -> None:
    for radius in (0, 1, 4):
        gaps = [
            picked[b].nonzero()[:, 0].diff()
            for picked in chosen(BASE.but(spacing=radius, count=160, budget=9.0))
            for b in range(4)
        ]
        assert torch.cat(gaps).min() == radius + 1


def count() -> None:
    assert max(int(picked.sum(-1).max()) for picked in chosen(BASE.but(spacing=0, budget=9.0))) == 32  # 160 over 5
    for most in (0, 1, 7):
        per_step = torch.stack([picked.sum(-1) for picked in chosen(BASE.but(count=most, budget=9.0))])
        assert (per_step[2:7] == most).all()
        assert (per_step[:2] == 0).all()


def top_p() -> None:
    native = BASE.but(horizon=0)
    tokens = [output(native.but(top_p=p)) for p in (1.0, 0.9, 0.5)]
    assert not torch.equal(tokens[0], tokens[1])
    assert not torch.equal(tokens[1], tokens[2])
    # So little mass that only the argmax is left: whatever an endless draw from the law gives is token 0.
    drawn = output(Policy(nfe=2, horizon=0, top_p=1e-6, endpoint="ancestral"), Tied())
    assert (drawn == 0).double().mean() > 0.95
    assert (output(Policy(nfe=2, horizon=0, endpoint="ancestral"), Tied()) == 0).double().mean() < 0.7


def late_top_p() -> None:
    native = BASE.but(horizon=0)
    early, both, late = native.but(top_p=0.6, late_top_p=1.0), native.but(top_p=0.6), native.but(late_top_p=0.6)
    states = {
        name: run(policy)[0] for name, policy in (("early", early), ("both", both), ("late", late), ("no", native))
    }
    assert torch.equal(states["early"][1].tokens, states["both"][1].tokens)  # warmup is two steps
    assert torch.equal(states["late"][1].tokens, states["no"][1].tokens)
    assert not torch.equal(states["early"][1].tokens, states["no"][1].tokens)
    for one, other in (("early", "both"), ("late", "no"), ("late", "both")):
        assert not torch.equal(states[one][-1].tokens, states[other][-1].tokens)


def endpoint() -> None:
    """The argmax ignores the state; a draw at the last time hardly ever leaves it."""
    assert (output(BASE.but(horizon=0), Tied()) == 0).all()
    states, _ = run(BASE.but(horizon=0, endpoint="ancestral"), Tied())
    assert torch.equal(states[-1].tokens, states[-2].tokens)
    assert (states[-1].tokens != 0).any()


def grid() -> None:
    assert [info.t for info in run(BASE)[1]] == process.two_piece_grid(8, 0.33).tolist()
    assert [info.t for info in run(BASE.but(grid="uniform"))[1]] == process.uniform_grid(8).tolist()
    assert not torch.equal(output(BASE), output(BASE.but(grid="uniform")))


def boundary() -> None:
    """Where the mass meets p exactly, `released` draws the third token and `paper` never does."""
    policy = Policy(nfe=2, horizon=0, top_p=0.75, endpoint="ancestral")
    paper, released = (output(policy.but(boundary=name), Tied()) for name in ("paper", "released"))
    assert ((released == 2) & (paper != 2)).any()
    assert not ((paper == 3) & (released != 3)).any()
    start = run(policy.but(boundary="paper"), Tied())[0]
    drawn = start[0].tokens != start[1].tokens  # the last draw of a nucleus of two
    assert not (start[1].tokens[drawn] >= 2).any()


def values() -> None:
    outputs = [output(BASE.but(values=name)) for name in ("argmax", "second", "nucleus", "refreshed")]
    for i, one in enumerate(outputs):
        for other in outputs[:i]:
            assert not torch.equal(one, other)
    with pytest.raises(LimpetError, match="values='recorded' needs replay="):
        limpet.sample(WORDS, BASE.but(values="recorded"), n=1)


def value_top_p() -> None:
    """The wider the nucleus, the lower a label may rank: with .6 it is always the second, with 1 any."""
    ranks = {}
    for p in (0.6, 0.8, 1.0):
        states, _ = run(
            Policy(nfe=3, warmup=0.0, spacing=0, count=64, budget=9.0, values="nucleus", value_top_p=p), Tied()
        )
        ranks[p] = set(states[-1].labels[states[-1].selected_at != NEVER].tolist())
    assert ranks == {0.6: {1}, 0.8: {1, 2}, 1.0: {1, 2, 3}}


def write() -> None:
    for where, seen, copied in (("input", True, False), ("output", False, True), ("both", True, True)):
        states, infos = run(BASE.but(write=where, values="second"))
        assert any(info.visible.any() for info in infos) == seen
        selected = states[-1].selected_at != NEVER
        assert torch.equal(states[-1].tokens[selected], states[-1].labels[selected]) == copied


EFFECTS: dict[str, Callable[[], None]] = {
    check.__name__: check
    for check in (
        nfe, warmup, horizon, budget, spacing, count, top_p, late_top_p, endpoint, grid, boundary, values, value_top_p,
        write,
    )
}  # fmt: skip


@pytest.mark.parametrize("field", [field.name for field in fields(Policy)])
def test_every_field_takes_effect(field: str) -> None:
    EFFECTS[field]()


# -- bad values -------------------------------------------------------------------------------------------------------

BAD: list[tuple[str, Any, str]] = [
    ("nfe", 1, "at least 2"),
    ("nfe", 0, "at least 2"),
    ("nfe", -8, "at least 2"),
    ("nfe", 8.0, "whole number"),
    ("nfe", "8", "whole number"),
    ("nfe", True, "whole number"),
    ("nfe", None, "whole number"),
    ("warmup", -0.1, "between 0 and 1"),
    ("warmup", 1.1, "between 0 and 1"),
    ("warmup", math.nan, "between 0 and 1"),
    ("warmup", "0.33", "between 0 and 1"),
    ("warmup", True, "between 0 and 1"),
    ("horizon", -1, "None (for ever), 0 (off)"),
    ("horizon", 2.5, "None (for ever), 0 (off)"),
    ("horizon", True, "None (for ever), 0 (off)"),
    ("horizon", "forever", "None (for ever), 0 (off)"),
    ("horizon", math.inf, "None (for ever), 0 (off)"),
    ("budget", -0.5, "0 or more"),
    ("budget", math.nan, "0 or more"),
    ("budget", "512", "0 or more"),
    ("budget", None, "0 or more"),
    ("spacing", -1, "0 or more"),
    ("spacing", 4.0, "whole number"),
    ("count", -1, "0 or more"),
    ("count", 2.0, "whole number"),
    ("count", True, "whole number"),
    *((name, value, "above 0 and at most 1") for name in ("top_p", "late_top_p", "value_top_p") for value in
      (0, 0.0, 1.2, -0.1, math.nan, math.inf, "0.9", True)),
    ("top_p", None, "above 0 and at most 1"),
    ("value_top_p", None, "above 0 and at most 1"),
    ("endpoint", "greedy", "argmax, ancestral"),
    ("endpoint", None, "argmax, ancestral"),
    ("grid", "two_piece", "two-piece, uniform"),
    ("boundary", "strict", "released, paper"),
    ("values", "third", "argmax, second, nucleus, refreshed, recorded"),
    ("write", True, "input, output, both"),
    ("write", ["input"], "input, output, both"),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value", "takes"), BAD)
@pytest.mark.parametrize(
    "make", [lambda **v: Policy(**v), Policy.from_dict, lambda **v: Policy().but(**v)], ids=["new", "from_dict", "but"]
)
def test_a_bad_value_is_one_sentence(make: Callable, field: str, value: Any, takes: str) -> None:
    with pytest.raises(LimpetError) as caught:
        make({field: value}) if make == Policy.from_dict else make(**{field: value})
    sentence = str(caught.value)
    assert f"policy field {field} is {value!r}; it takes " in sentence
    assert takes in sentence
    assert "\n" not in sentence


def test_every_field_has_a_bad_value() -> None:
    assert {name for name, _, _ in BAD} == {field.name for field in fields(Policy)}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("horizn", "did you mean horizon?"),
        ("topp", "did you mean top_p?"),
        ("temperature", "it takes nfe, warmup"),
        (3, "it takes"),
    ],
)
def test_an_unknown_field_is_one_sentence(name: Any, hint: str) -> None:
    with pytest.raises(LimpetError) as caught:
        Policy.from_dict({"nfe": 8, name: 1})
    assert f"no field {name!r}" in str(caught.value)
    assert hint in str(caught.value)


@given(
    nfe=st.integers(2, 2000),
    warmup=st.floats(0, 1),
    horizon=st.none() | st.integers(0, 99),
    budget=st.floats(0, 9),
    top_p=st.floats(0.01, 1),
    late_top_p=st.none() | st.floats(0.01, 1),
    endpoint=st.sampled_from(["argmax", "ancestral"]),
    write=st.sampled_from(["input", "output", "both"]),
)
def test_to_dict_and_back(**values: Any) -> None:
    policy = Policy(**values)
    as_dict = policy.to_dict()
    assert list(as_dict) == [field.name for field in fields(Policy)]
    assert Policy.from_dict(as_dict) == policy
    assert Policy.from_dict(json.loads(json.dumps(as_dict))) == policy
    assert Policy.from_dict(values) == policy
    assert hash(Policy.from_dict(values)) == hash(policy)


def test_the_defaults_are_the_papers() -> None:
    assert Policy().to_dict() == {
        "nfe": 64, "warmup": 0.33, "horizon": None, "budget": 0.5, "spacing": 4, "count": None, "top_p": 1.0,
        "late_top_p": None, "endpoint": "argmax", "grid": "two-piece", "boundary": "released", "values": "argmax",
        "value_top_p": 0.9, "write": "input",
    }  # fmt: skip


def test_a_policy_does_not_change() -> None:
    policy = Policy()
    with pytest.raises(FrozenInstanceError):
        policy.nfe = 8  # type: ignore[misc]
    assert policy.but(nfe=8).nfe == 8
    assert policy.but(nfe=8).but(nfe=64) == policy
    assert policy.nfe == 64


def test_whole_numbers_do_for_fractions() -> None:
    assert Policy(warmup=0, budget=1, top_p=1) == Policy(warmup=0.0, budget=1.0, top_p=1.0)
