"""Every parameter of native, CRS and Mend takes effect, is checked and is documented."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import limpet
from limpet import CRS, LimpetError, Mend, Native, Sampler, samplers
from limpet.diffusion import process
from limpet.diffusion.rng import CounterRNG
from limpet.generation import Inputs, Step, rollout
from limpet.models import Denoiser, ModelInput
from limpet.models.exact_sources import source
from limpet.samplers import params
from limpet.samplers.crs import NEVER

WORDS = source("exact:words")
BASE, NATIVE = CRS(nfe=8), Native(nfe=8, final_step="argmax")
REVISING = Mend(nfe=8, warmup=0.1, spacing=0)


class Tied(Denoiser):
    """The distribution (1/2, 1/4, 1/8, 1/8) everywhere, so that top-p meets .75 exactly."""

    vocab_size, length, name, digest = 4, 64, "tied", "tied"

    def backbone(self, inputs: ModelInput) -> Tensor:
        probs = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64)
        return probs.log().expand(*inputs.tokens.shape, -1)

    def head(self, features: Tensor) -> Tensor:
        return features


def steps_of(sampler: Sampler, model: Denoiser = WORDS) -> list[Step]:
    return list(rollout(model, sampler, Inputs(torch.full((4, model.length), -1), CounterRNG(8200, torch.arange(4)))))


def output(sampler: Sampler, model: Denoiser = WORDS) -> Tensor:
    return steps_of(sampler, model)[-1].tokens


def mask_of(name: str, sampler: Sampler) -> list[Tensor]:
    return [step.masks[name] for step in steps_of(sampler)]


def gaps(masks: list[Tensor]) -> Tensor:
    """The distances between neighbouring positions of every mask and sample."""
    return torch.cat([row.nonzero()[:, 0].diff() for mask in masks for row in mask])


# The effect of each parameter


def nfe() -> None:
    for calls in (2, 5, 9):
        for sampler in (Native(nfe=calls), CRS(nfe=calls)):
            assert [step.t for step in steps_of(sampler, Tied())] == list(sampler.times)
            assert limpet.sample(Tied(), sampler, n=3, batch_size=3).nfe == calls == len(sampler.times)


def refresh() -> None:
    """What it does with a network is in tests/generation/test_refresh.py."""
    assert output(BASE.replace(refresh=1)).equal(output(BASE))
    with pytest.raises(LimpetError, match="exact:words computes every position at every call"):
        output(BASE.replace(refresh=2))


def warmup() -> None:
    for fraction, first in ((0.0, 0), (0.33, 2), (0.5, 4), (0.8, 6)):
        sampler = BASE.replace(warmup=fraction)
        assert [r for r, chosen in enumerate(mask_of("chosen", sampler)) if chosen.any()] == list(range(first, 7))
        assert sampler.warmup_calls == first
    assert not any(chosen.any() for chosen in mask_of("chosen", BASE.replace(warmup=1.0)))
    assert steps_of(BASE.replace(warmup=0.5))[4].t == pytest.approx(0.5, abs=1e-5)  # the split of the grid


def horizon() -> None:
    for calls, expected in ((1, 1), (3, 3), (None, 5)):
        steps = steps_of(BASE.replace(horizon=calls))
        visible = torch.stack([step.visible for step in steps]).sum(0)
        first = steps[2].masks["chosen"]  # committed at call 2, before five more calls
        assert first.any()
        assert (visible[first] == expected).all()


def budget() -> None:
    counts = []
    for fraction in (0.0, 0.02, 0.1, 10.0):
        steps = steps_of(BASE.replace(budget=fraction))[:-1]
        for step in steps:
            spent = torch.where(step.masks["chosen"], step.deficit, 0).sum(-1)
            assert (spent <= fraction * WORDS.length / 5 + 1e-12).all()
        counts.append(sum(int(step.masks["chosen"].sum()) for step in steps))
    assert counts[0] == 0
    assert counts == sorted(set(counts))


def spacing() -> None:
    for radius in (0, 1, 4):
        assert gaps(mask_of("chosen", BASE.replace(spacing=radius, count=160, budget=9.0))).min() == radius + 1


def count() -> None:
    default = mask_of("chosen", BASE.replace(spacing=0, budget=9.0))
    assert max(int(chosen.sum(-1).max()) for chosen in default) == 32  # 160 positions over 5 steps
    for most in (0, 1, 7):
        per_call = torch.stack([chosen.sum(-1) for chosen in mask_of("chosen", BASE.replace(count=most, budget=9.0))])
        assert (per_call[2:7] == most).all()
        assert (per_call[:2] == 0).all()


def temperature() -> None:
    """The lower it is, the more often a draw is the most likely token. The deficits of CRS depend on it too."""
    shares = [(output(Native(nfe=2, temperature=t), Tied()) == 0).double().mean() for t in (5.0, 1.0, 0.5, 0.05)]
    assert shares == sorted(set(shares))
    deficits = [steps_of(BASE.replace(temperature=t))[3].deficit for t in (2.0, 1.0, 0.5)]
    means = [float(deficit[deficit < math.inf].mean()) for deficit in deficits]
    assert means == sorted(set(means), reverse=True)


def top_p() -> None:
    """A nucleus of the argmax alone draws token 0; a draw from the distribution often does not."""
    tokens = [output(NATIVE.replace(top_p=p)) for p in (1.0, 0.9, 0.5)]
    assert not torch.equal(tokens[0], tokens[1])
    assert not torch.equal(tokens[1], tokens[2])
    assert (output(Native(nfe=2, top_p=1e-6), Tied()) == 0).double().mean() > 0.95
    assert (output(Native(nfe=2), Tied()) == 0).double().mean() < 0.7


def late_top_p() -> None:
    """The warmup has two calls."""
    changes = {
        "early": {"top_p": 0.6, "late_top_p": 1.0},
        "both": {"top_p": 0.6},
        "late": {"late_top_p": 0.6},
        "no": {},
    }
    tokens = {name: [step.tokens for step in steps_of(NATIVE.replace(**own))] for name, own in changes.items()}
    assert torch.equal(tokens["early"][0], tokens["both"][0])
    assert torch.equal(tokens["late"][0], tokens["no"][0])
    assert not torch.equal(tokens["early"][0], tokens["no"][0])
    for one, other in (("early", "both"), ("late", "no"), ("late", "both")):
        assert not torch.equal(tokens[one][-1], tokens[other][-1])


def top_k() -> None:
    """On (1/2, 1/4, 1/8, 1/8), the first k tokens are those of a nucleus with their mass."""
    for k, mass in ((1, 0.4), (2, 0.6), (3, 0.8), (4, 1.0)):
        assert torch.equal(output(Native(nfe=4, top_k=k), Tied()), output(Native(nfe=4, top_p=mass), Tied()))
    assert not torch.equal(output(NATIVE), output(NATIVE.replace(top_k=2)))


def min_p() -> None:
    """A token exactly at the limit is kept."""
    for fraction, k in ((1.0, 1), (0.6, 1), (0.5, 2), (0.3, 2), (0.25, 4), (0.0, 4)):
        assert torch.equal(output(Native(nfe=4, min_p=fraction), Tied()), output(Native(nfe=4, top_k=k), Tied()))
    assert not torch.equal(output(NATIVE), output(NATIVE.replace(min_p=0.5)))


def final_step() -> None:
    """The argmax ignores the state; a draw at the last time rarely changes it; committed tokens can be kept."""
    assert (output(NATIVE, Tied()) == 0).all()
    *_, before, last = steps_of(NATIVE.replace(final_step="sample"), Tied())
    assert torch.equal(last.tokens, before.tokens)
    assert (last.tokens != 0).any()
    for kind in (CRS, Mend):
        drawn, kept = (steps_of(kind(nfe=8, final_step=end, values="second"))[-1] for end in ("sample", "keep"))
        is_committed = kept.state.memory.committed_at < NEVER
        assert torch.equal(kept.tokens[is_committed], kept.state.memory.committed_values[is_committed])
        assert torch.equal(kept.tokens[~is_committed], drawn.tokens[~is_committed])
        assert not torch.equal(kept.tokens, drawn.tokens)


def grid() -> None:
    for name, function in process.GRIDS.items():
        assert [step.t for step in steps_of(BASE.replace(grid=name))] == list(function(8, 0.33))
    assert not torch.equal(output(BASE), output(BASE.replace(grid="uniform")))


def interleave() -> None:
    """A position changes in every other call, and its neighbours in the calls between."""
    for sampler in (Native(nfe=8, interleave=True), CRS(nfe=8, interleave=True, final_step="sample")):
        steps = steps_of(sampler)
        for before, after in pairwise(steps):
            moved = (before.tokens != after.tokens).nonzero()[:, 1]
            assert not ((moved - after.call) % 2).any()
            assert after.call == 7 or len(moved)  # the last call may change nothing
        assert not torch.equal(steps[-1].tokens, output(sampler.replace(interleave=False)))


def boundary() -> None:
    """Where the mass meets p exactly, `released` draws the third token and `paper` never does."""
    sampler = Native(nfe=2, top_p=0.75)
    paper, released = (output(sampler.replace(boundary=name), Tied()) for name in ("paper", "released"))
    assert ((released == 2) & (paper != 2)).any()
    assert not ((paper == 3) & (released != 3)).any()


def values() -> None:
    outputs = [output(BASE.replace(values=name)) for name in params(CRS)["values"].choices if name != "recorded"]
    assert all(not torch.equal(one, other) for i, one in enumerate(outputs) for other in outputs[:i])
    with pytest.raises(LimpetError, match="values 'recorded', which a replay alone can fill: give replay="):
        limpet.sample(WORDS, BASE.replace(values="recorded"), n=1)


def value_top_p() -> None:
    """A wider nucleus allows lower ranks: .6 only the second, 1 any."""
    ranks = {}
    sampler = CRS(nfe=3, warmup=0.0, spacing=0, count=64, budget=9.0, values="nucleus")
    for p in (0.6, 0.8, 1.0):
        tokens, committed_at = steps_of(sampler.replace(value_top_p=p), Tied())[-1].state.memory
        ranks[p] = set(tokens[committed_at < NEVER].tolist())
    assert ranks == {0.6: {1}, 0.8: {1, 2}, 1.0: {1, 2, 3}}


def write() -> None:
    for where, is_visible, is_in_output in (("input", True, False), ("output", False, True), ("both", True, True)):
        steps = steps_of(BASE.replace(write=where, values="second"))
        assert any(step.visible.any() for step in steps) == is_visible
        tokens, committed_at = steps[-1].state.memory
        is_committed = committed_at < NEVER
        assert torch.equal(steps[-1].tokens[is_committed], tokens[is_committed]) == is_in_output


def revise() -> None:
    for most in (1, 3):
        masks = mask_of("revised", REVISING.replace(revise=most, revise_spacing=0))
        assert max(int(mask.sum(-1).max()) for mask in masks) == most
    assert max(int(mask.sum(-1).max()) for mask in mask_of("revised", REVISING)) == 5  # 160 over 32
    assert all("revised" not in step.masks for step in steps_of(REVISING.replace(revise=0)))


def revise_spacing() -> None:
    for radius in (0, 2, 9):
        assert gaps(mask_of("revised", REVISING.replace(revise=160, revise_spacing=radius))).min() > radius
    near, far = (output(REVISING.replace(revise=160, revise_spacing=radius)) for radius in (0, 9))
    assert not torch.equal(near, far)


def revise_every() -> None:
    """With at most 32 calls, each call inspects every committed token by default."""
    for every in (1, 2, 5):
        masks = mask_of("revised", REVISING.replace(revise=160, revise_spacing=0, revise_every=every))
        assert {(int(i) + call) % every for call, mask in enumerate(masks) for i in mask.nonzero()[:, 1]} == {0}
    assert torch.equal(output(REVISING), output(REVISING.replace(revise_every=1)))
    assert not torch.equal(output(REVISING), output(REVISING.replace(revise_every=5)))


def own_turn() -> None:
    """Positions are committed in the calls in which they step."""
    for has_turns in (False, True):
        masks = mask_of("chosen", REVISING.replace(interleave=True, own_turn=has_turns))[:-1]
        offsets = {(int(i) - call) % 2 for call, mask in enumerate(masks) for i in mask.nonzero()[:, 1]}
        assert offsets == ({0} if has_turns else {0, 1})


@pytest.mark.parametrize("name", sorted({name for kind in (Native, CRS, Mend) for name in params(kind)}))
def test_every_parameter_takes_effect(name: str) -> None:
    effect: Callable[[], None] = globals()[name]
    effect()


# Values that are refused

FRACTIONS = (-0.1, 1.1, math.nan, math.inf, "0.33", True)
POSITIVE_FRACTIONS = (0, 0.0, 1.2, -0.1, math.nan, math.inf, "0.9", True)
BAD: dict[str, tuple[str, tuple[Any, ...]]] = {  # parameter -> what it takes, and values that it refuses
    "nfe": ("a whole number from 2", (1, 0, -8, 8.0, "8", True, None, 2**31)),
    "refresh": ("a whole number from 1", (0, -1, 2.0, True, None)),
    "warmup": ("a number from 0 to 1", (*FRACTIONS, None)),
    "horizon": ("None or a whole number from 1", (0, -1, 2.5, True, "ever", math.inf, 2**40)),
    "interleave": ("true or false", (0, 1, 2, "true", None)),
    "budget": ("a number from 0", (-0.5, math.nan, math.inf, "512", None, True)),
    "spacing": ("a whole number from 0", (-1, 4.0, None, 2**31)),
    "count": ("None or a whole number from 0", (-1, 2.0, True, "many")),
    "temperature": ("a number above 0 to 1e+06", (0, 0.0, -1.0, math.nan, math.inf, "1", True, None)),
    "top_p": ("a number above 0 to 1", (*POSITIVE_FRACTIONS, None)),
    "late_top_p": ("None or a number above 0 to 1", POSITIVE_FRACTIONS),
    "value_top_p": ("a number above 0 to 1", (*POSITIVE_FRACTIONS, None)),
    "top_k": ("None or a whole number from 1", (0, -1, 2.0, True, "all")),
    "min_p": ("a number from 0 to 1", (*FRACTIONS, None)),
    "final_step": ("one of argmax, sample, keep", ("greedy", None)),
    "grid": ("one of two-piece, uniform, quadratic", ("two_piece",)),
    "boundary": ("one of released, paper", ("strict",)),
    "values": (
        "one of argmax, second, nucleus, refreshed, refreshed-half, refreshed-interleaved, recorded",
        ("third",),
    ),
    "write": ("one of input, output, both", (True, ["input"])),
}


@pytest.mark.parametrize("name", params(CRS))
def test_a_bad_value_is_one_sentence(name: str) -> None:
    takes, values = BAD[name]
    for value in values:
        for construct in (
            lambda values: CRS(**values),
            lambda values: samplers.from_dict({"sampler": "crs", **values}),
            lambda values: CRS().replace(**values),
        ):
            with pytest.raises(LimpetError) as caught:
                construct({name: value})
            assert str(caught.value) == f"crs has {name} {value!r}; it takes {takes}"


def test_native_has_no_committed_tokens_to_keep() -> None:
    with pytest.raises(LimpetError, match=r"native has final_step 'keep'; it takes one of argmax, sample$"):
        Native(final_step="keep")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", samplers.available().values(), ids=samplers.available())
def test_every_parameter_has_a_help_text_and_takes_its_default(kind: type[Sampler]) -> None:
    for name, one in params(kind).items():
        assert one.name == name
        assert one.accepts(one.default)
        assert one.help.endswith(".")
        assert one.takes
        assert one.since in ("start", "warmup", "final step")


def test_a_field_of_another_type_is_one_sentence() -> None:
    @dataclass(frozen=True)
    class Odd(Native):
        weights: tuple[float, ...] = ()

    match = r"Odd has a field weights of type tuple.*; a parameter is an int, float, str, bool"
    with pytest.raises(LimpetError, match=match):
        Odd()


def test_the_defaults_are_the_papers() -> None:
    native = {
        "nfe": 64,
        "warmup": 0.33,
        "grid": "two-piece",
        "interleave": False,
        "temperature": 1.0,
        "top_p": 1.0,
        "late_top_p": None,
        "boundary": "released",
        "top_k": None,
        "min_p": 0.0,
        "final_step": "sample",
    }
    crs = {
        "final_step": "argmax",
        "horizon": None,
        "budget": 0.5,
        "spacing": 4,
        "count": None,
        "values": "argmax",
        "value_top_p": 0.9,
        "write": "input",
    }
    assert Native().to_dict() == {"sampler": "native"} | native
    assert CRS().to_dict() == {"sampler": "crs"} | native | crs


def test_a_sampler_is_immutable_and_takes_whole_numbers_for_fractions() -> None:
    sampler = CRS()
    with pytest.raises(FrozenInstanceError):
        sampler.nfe = 8  # type: ignore[misc]
    assert sampler.replace(nfe=8).nfe == 8
    assert sampler.replace(nfe=8).replace(nfe=64) == sampler
    assert CRS(warmup=0, budget=1, top_p=1) == CRS(warmup=0.0, budget=1.0, top_p=1.0)
