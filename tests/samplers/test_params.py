"""Every parameter of a sampler takes effect, is checked, named and written out; and samplers say truly what they share."""

from __future__ import annotations

import hashlib
import json
import math
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, fields
from itertools import pairwise
from pathlib import Path as File
from typing import Any

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from limpet.samplers.context import Path, State, StepInfo, generate, open_context
from torch import Tensor

import limpet
from limpet import CRS, LimpetError, Mend, Native, Sampler, registry, samplers
from limpet.diffusion import process
from limpet.diffusion.rng import CounterRNG
from limpet.models import Denoiser
from limpet.models.exact import Mixture
from limpet.models.exact_sources import source
from limpet.samplers import Param, param, params
from limpet.samplers.crs import NEVER, OPEN, Memory

WORDS = source("exact:words")
BASE, NATIVE = CRS(nfe=8), Native(nfe=8)


class Tied(Denoiser):
    """The distribution (1/2, 1/4, 1/8, 1/8) everywhere: top-p meets it exactly at .75."""

    vocab_size, length, name, digest = 4, 64, "tied", "tied"

    def body(self, tokens: Tensor, t: float | Tensor) -> Tensor:
        return torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64).log().expand(*tokens.shape, -1)

    def head(self, features: Tensor) -> Tensor:
        return features


def path_of(model: Denoiser, n: int = 4, given: bool = False) -> Path:
    fixed = torch.full((n, model.length), -1)
    fixed[:, : 2 * given] = 1
    return open_context(model, CounterRNG(8200, torch.arange(n)), fixed)


def run(sampler: Sampler, model: Denoiser = WORDS) -> tuple[list[State], list[StepInfo]]:
    states, infos = zip(*generate(sampler, path_of(model)), strict=True)
    return list(states), list(infos)


def output(sampler: Sampler, model: Denoiser = WORDS) -> Tensor:
    return run(sampler, model)[0][-1].tokens


def chosen(sampler: Sampler) -> list[Tensor]:
    return [info.marks["chosen"] for info in run(sampler)[1]]


# -- each parameter --------------------------------------------------------------------------------------------------------


def nfe() -> None:
    for calls in (2, 5, 9):
        times = []

        class Counting(Tied):
            def body(self, tokens: Tensor, t: float | Tensor) -> Tensor:
                times.append(t)  # noqa: B023
                return super().body(tokens, t)

        for sampler in (Native(nfe=calls), CRS(nfe=calls)):
            times.clear()
            out = limpet.sample(Counting(), sampler, n=3, batch_size=3)
            assert out.nfe == len(times) == calls
            assert times == list(sampler.times)


def warmup() -> None:
    for fraction, first in ((0.0, 0), (0.33, 2), (0.5, 4), (0.8, 6)):
        calls = [r for r, picked in enumerate(chosen(BASE.replace(warmup=fraction))) if picked.any()]
        assert calls == list(range(first, 7))
        assert BASE.replace(warmup=fraction).warmup_calls == first
    assert not any(picked.any() for picked in chosen(BASE.replace(warmup=1.0)))
    assert run(BASE.replace(warmup=0.5))[1][4].t == pytest.approx(0.5, abs=1e-5)  # and it places the split of the grid


def horizon() -> None:
    for calls in (1, 3, None):
        _, infos = run(BASE.replace(horizon=calls))
        seen = torch.stack([info.marks["visible"] for info in infos]).sum(0)
        first = infos[2].marks["chosen"]  # committed at call 2: five calls follow
        assert first.any()
        assert (seen[first] == min(5, 5 if calls is None else calls)).all()


def budget() -> None:
    counts = []
    for fraction in (0.0, 0.02, 0.1, 10.0):
        _, infos = run(BASE.replace(budget=fraction))
        for info in infos[:-1]:
            spent = torch.where(info.marks["chosen"], info.outcome.deficit, 0).sum(-1)
            assert (spent <= fraction * WORDS.length / 5 + 1e-12).all()
        counts.append(sum(int(info.marks["chosen"].sum()) for info in infos))
    assert counts[0] == 0
    assert counts == sorted(set(counts))


def spacing() -> None:
    for radius in (0, 1, 4):
        gaps = [
            picked[b].nonzero()[:, 0].diff()
            for picked in chosen(BASE.replace(spacing=radius, count=160, budget=9.0))
            for b in range(4)
        ]
        assert torch.cat(gaps).min() == radius + 1


def count() -> None:
    assert max(int(picked.sum(-1).max()) for picked in chosen(BASE.replace(spacing=0, budget=9.0))) == 32  # 160 over 5
    for most in (0, 1, 7):
        per_call = torch.stack([picked.sum(-1) for picked in chosen(BASE.replace(count=most, budget=9.0))])
        assert (per_call[2:7] == most).all()
        assert (per_call[:2] == 0).all()


def top_p() -> None:
    tokens = [output(NATIVE.replace(top_p=p)) for p in (1.0, 0.9, 0.5)]
    assert not torch.equal(tokens[0], tokens[1])
    assert not torch.equal(tokens[1], tokens[2])
    # So little mass that only the argmax is left: whatever an endless draw from the distribution gives is token 0.
    drawn = output(Native(nfe=2, top_p=1e-6, final_step="sample"), Tied())
    assert (drawn == 0).double().mean() > 0.95
    assert (output(Native(nfe=2, final_step="sample"), Tied()) == 0).double().mean() < 0.7


def late_top_p() -> None:
    early, both, late = (
        NATIVE.replace(top_p=0.6, late_top_p=1.0),
        NATIVE.replace(top_p=0.6),
        NATIVE.replace(late_top_p=0.6),
    )
    states = {
        name: run(sampler)[0]
        for name, sampler in (("warmup_calls", early), ("both", both), ("late", late), ("no", NATIVE))
    }
    assert torch.equal(states["warmup_calls"][1].tokens, states["both"][1].tokens)  # warmup is two calls
    assert torch.equal(states["late"][1].tokens, states["no"][1].tokens)
    assert not torch.equal(states["warmup_calls"][1].tokens, states["no"][1].tokens)
    for one, other in (("warmup_calls", "both"), ("late", "no"), ("late", "both")):
        assert not torch.equal(states[one][-1].tokens, states[other][-1].tokens)


def top_k() -> None:
    """Of the distribution (1/2, 1/4, 1/8, 1/8) only the first k are drawn: from one on, as with a nucleus of so much mass."""
    for k, mass in ((1, 0.4), (2, 0.6), (3, 0.8), (4, 1.0)):
        one, same = (Native(nfe=4, final_step="sample").replace(**own) for own in ({"top_k": k}, {"top_p": mass}))
        assert torch.equal(output(one, Tied()), output(same, Tied()))
    assert not torch.equal(output(NATIVE), output(NATIVE.replace(top_k=2)))


def min_p() -> None:
    """Tokens less likely than the fraction are not drawn; those just as likely are."""
    for fraction, k in ((1.0, 1), (0.6, 1), (0.5, 2), (0.3, 2), (0.25, 4), (0.0, 4)):
        one, same = (Native(nfe=4, final_step="sample").replace(**own) for own in ({"min_p": fraction}, {"top_k": k}))
        assert torch.equal(output(one, Tied()), output(same, Tied()))
    assert not torch.equal(output(NATIVE), output(NATIVE.replace(min_p=0.5)))


def final_step() -> None:
    """The argmax ignores the state; a draw at the last time hardly ever leaves it; labels are copied where told."""
    assert (output(NATIVE, Tied()) == 0).all()
    states, _ = run(NATIVE.replace(final_step="sample"), Tied())
    assert torch.equal(states[-1].tokens, states[-2].tokens)
    assert (states[-1].tokens != 0).any()
    for kind in (CRS, Mend):
        drawn, copied = (run(kind(nfe=8, final_step=end, values="second"))[0][-1] for end in ("sample", "keep"))
        committed = copied.memory.committed_at < NEVER
        assert torch.equal(copied.tokens[committed], copied.memory.labels[committed])
        assert torch.equal(copied.tokens[~committed], drawn.tokens[~committed])
        assert not torch.equal(copied.tokens, drawn.tokens)


def grid() -> None:
    assert [info.t for info in run(BASE)[1]] == list(process.two_piece_grid(8, 0.33))
    assert [info.t for info in run(BASE.replace(grid="uniform"))[1]] == list(process.uniform_grid(8))
    assert [info.t for info in run(BASE.replace(grid="quadratic"))[1]] == list(process.quadratic_grid(8))
    assert not torch.equal(output(BASE), output(BASE.replace(grid="uniform")))


def interleave() -> None:
    """A position changes in every other call, and its neighbours in those between."""
    for sampler in (
        Native(nfe=8, interleave=True, final_step="sample"),
        CRS(nfe=8, interleave=True, final_step="sample"),
    ):
        states, _ = run(sampler)
        for call, (before, after) in enumerate(pairwise(states), 1):
            moved = (before.tokens != after.tokens).nonzero()[:, 1]
            assert {(int(i) - call) % 2 for i in moved} <= {0}
            assert call == 7 or len(moved)  # what the last call changes may be nothing
        assert not torch.equal(states[-1].tokens, output(sampler.replace(interleave=False)))


def boundary() -> None:
    """Where the mass meets p exactly, `released` draws the third token and `paper` never does."""
    sampler = Native(nfe=2, top_p=0.75, final_step="sample")
    paper, released = (output(sampler.replace(boundary=name), Tied()) for name in ("paper", "released"))
    assert ((released == 2) & (paper != 2)).any()
    assert not ((paper == 3) & (released != 3)).any()
    start = run(sampler.replace(boundary="paper"), Tied())[0]
    drawn = start[0].tokens != start[1].tokens  # the last draw of a nucleus of two
    assert not (start[1].tokens[drawn] >= 2).any()


def values() -> None:
    outputs = [output(BASE.replace(values=name)) for name in params(CRS)["values"].choices if name != "recorded"]
    for i, one in enumerate(outputs):
        for other in outputs[:i]:
            assert not torch.equal(one, other)
    with pytest.raises(LimpetError, match="values 'recorded', which a replay alone can fill: give replay="):
        limpet.sample(WORDS, BASE.replace(values="recorded"), n=1)


def value_top_p() -> None:
    """The wider the nucleus, the lower a label may rank: with .6 it is always the second, with 1 any."""
    ranks = {}
    for p in (0.6, 0.8, 1.0):
        states, _ = run(
            CRS(nfe=3, warmup=0.0, spacing=0, count=64, budget=9.0, values="nucleus", value_top_p=p), Tied()
        )
        labels, committed_at = states[-1].memory
        ranks[p] = set(labels[committed_at < NEVER].tolist())
    assert ranks == {0.6: {1}, 0.8: {1, 2}, 1.0: {1, 2, 3}}


def write() -> None:
    for where, seen, copied in (("input", True, False), ("output", False, True), ("both", True, True)):
        states, infos = run(BASE.replace(write=where, values="second"))
        assert any(info.marks["visible"].any() for info in infos) == seen
        labels, committed_at = states[-1].memory
        committed = committed_at < NEVER
        assert torch.equal(states[-1].tokens[committed], labels[committed]) == copied


def temperature() -> None:
    """The cooler, the oftener a draw is the likeliest token; CRS reads its deficits at the temperature too."""
    shares = [
        float((output(Native(nfe=2, temperature=t, final_step="sample"), Tied()) == 0).double().mean())
        for t in (5.0, 1.0, 0.5, 0.05)
    ]
    assert shares == sorted(set(shares))
    deficits = [run(BASE.replace(temperature=t))[1][3].outcome.deficit for t in (2.0, 1.0, 0.5)]
    means = [float(deficit[deficit < math.inf].mean()) for deficit in deficits]
    assert means == sorted(set(means), reverse=True)


MENDING = Mend(nfe=8, warmup=0.1, spacing=0)


def mended(sampler: Sampler) -> list[Tensor]:
    return [info.marks["mended"] for info in run(sampler)[1]]


def mend() -> None:
    for most in (1, 3):
        assert max(int(each.sum(-1).max()) for each in mended(MENDING.replace(mend=most, apart=0))) == most
    assert max(int(each.sum(-1).max()) for each in mended(MENDING)) == 5  # 160 over 32
    assert all("mended" not in info.marks for info in run(MENDING.replace(mend=0))[1])


def apart() -> None:
    for radius in (0, 2, 9):
        gaps = [
            each[b].nonzero()[:, 0].diff() for each in mended(MENDING.replace(mend=160, apart=radius)) for b in range(4)
        ]
        assert torch.cat(gaps).min() > radius
    assert not torch.equal(output(MENDING.replace(mend=160, apart=0)), output(MENDING.replace(mend=160, apart=9)))


def turns() -> None:
    for every in (1, 2, 5):
        found = mended(MENDING.replace(mend=160, apart=0, turns=every))
        rest = {(int(i) + call) % every for call, each in enumerate(found) for i in each.nonzero()[:, 1]}
        assert rest == {0}
    assert torch.equal(output(MENDING), output(MENDING.replace(turns=1)))  # of 32 calls or fewer, each looks at all
    assert not torch.equal(output(MENDING), output(MENDING.replace(turns=5)))


EFFECTS: dict[str, Callable[[], None]] = {
    check.__name__: check
    for check in (
        nfe, warmup, horizon, budget, spacing, count, temperature, top_p, late_top_p, final_step, grid, boundary, values,
        value_top_p, write, top_k, min_p, mend, apart, turns, interleave,
    )
}  # fmt: skip


@pytest.mark.parametrize("name", sorted({name for kind in (Native, CRS, Mend) for name in params(kind)}))
def test_every_knob_takes_effect(name: str) -> None:
    EFFECTS[name]()


# -- bad values -------------------------------------------------------------------------------------------------------

BAD: list[tuple[str, Any, str]] = [
    ("nfe", 1, "a whole number from 2"),
    ("nfe", 0, "a whole number from 2"),
    ("nfe", -8, "a whole number from 2"),
    ("nfe", 8.0, "a whole number from 2"),
    ("nfe", "8", "a whole number from 2"),
    ("nfe", True, "a whole number from 2"),
    ("nfe", None, "a whole number from 2"),
    ("nfe", 2**31, "a whole number from 2"),
    *(("warmup", value, "a number from 0 to 1") for value in (-0.1, 1.1, math.nan, "0.33", True, None)),
    *(("horizon", value, "None or a whole number from 1") for value in (0, -1, 2.5, True, "ever", math.inf, 2**40)),
    *(("interleave", value, "true or false") for value in (0, 1, 2, "true", None)),
    *(("budget", value, "a number from 0") for value in (-0.5, math.nan, "512", None, True)),
    *(("spacing", value, "a whole number from 0") for value in (-1, 4.0, None, 2**31)),
    *(("count", value, "None or a whole number from 0") for value in (-1, 2.0, True, "many")),
    *(("temperature", value, "a number above 0 to 1e+06") for value in
      (0, 0.0, -1.0, math.nan, math.inf, "1", True, None)),
    *((name, value, f"{none}a number above 0 to 1")
      for name, none in (("top_p", ""), ("late_top_p", "None or "), ("value_top_p", ""))
      for value in (0, 0.0, 1.2, -0.1, math.nan, math.inf, "0.9", True)),
    ("top_p", None, "a number above 0 to 1"),
    ("value_top_p", None, "a number above 0 to 1"),
    *(("top_k", value, "None or a whole number from 1") for value in (0, -1, 2.0, True, "all")),
    *(("min_p", value, "a number from 0 to 1") for value in (-0.1, 1.1, math.nan, "0", True, None)),
    ("final_step", "greedy", "one of argmax, ancestral, copied"),
    ("final_step", None, "one of argmax, ancestral, copied"),
    ("grid", "two_piece", "one of two-piece, uniform, quadratic"),
    ("boundary", "strict", "one of released, paper"),
    ("values", "third", "one of argmax, second, nucleus, refreshed, refreshed-half, refreshed-in-turn, recorded"),
    ("write", True, "one of input, output, both"),
    ("write", ["input"], "one of input, output, both"),
]  # fmt: skip
MAKERS: dict[str, Callable[[dict[str, Any]], Sampler]] = {
    "new": lambda values: CRS(**values),
    "from_dict": lambda values: samplers.from_dict({"sampler": "crs", **values}),
    "but": lambda values: CRS().replace(**values),
}


@pytest.mark.parametrize(("name", "value", "takes"), BAD)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_a_bad_value_is_one_sentence(make: Callable, name: str, value: Any, takes: str) -> None:
    with pytest.raises(LimpetError) as caught:
        make({name: value})
    assert str(caught.value) == f"crs has {name} {value!r}; it takes {takes}"


def test_labels_are_copied_by_those_who_have_some() -> None:
    with pytest.raises(LimpetError, match=r"native has final_step 'keep'; it takes one of argmax, ancestral$"):
        Native(final_step="keep")  # type: ignore[arg-type]


def test_every_knob_has_a_bad_value() -> None:
    assert {name for name, _, _ in BAD} == set(params(CRS)) >= set(params(Native))


@pytest.mark.parametrize("kind", samplers.available().values(), ids=samplers.available())
def test_every_knob_of_every_sampler_has_words_and_takes_its_default(kind: type[Sampler]) -> None:
    for name, one in params(kind).items():
        assert one.name == name
        assert one.accepts(one.default)
        assert one.words.endswith(".")
        assert one.takes
        assert one.since in ("start", "warmup", "final step")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("horizn", "did you mean horizon?"),
        ("topp", "did you mean top_p?"),
        ("momentum", "it takes nfe, warmup"),
        (3, "it takes"),
    ],
)
def test_an_unknown_knob_is_one_sentence(name: Any, hint: str) -> None:
    with pytest.raises(LimpetError) as caught:
        samplers.from_dict({"sampler": "crs", "nfe": 8, name: 1})
    assert f"crs has no parameter {name!r}" in str(caught.value)
    assert hint in str(caught.value)
    with pytest.raises(LimpetError, match="native has no parameter 'horizon'"):
        Native().replace(horizon=3)


def test_a_field_that_is_no_knob_is_one_sentence() -> None:
    @dataclass(frozen=True)
    class Odd(Native):
        weights: tuple[float, ...] = ()

    with pytest.raises(
        LimpetError, match=r"Odd has a field weights of type tuple.*; a parameter is an int, float, str, bool"
    ):
        Odd()


# -- written out and read again ---------------------------------------------------------------------------------------

STEPS = {
    "nfe": st.integers(2, 2000),
    "warmup": st.floats(0, 1),
    "temperature": st.floats(0.01, 9),
    "top_p": st.floats(0.01, 1),
    "late_top_p": st.none() | st.floats(0.01, 1),
    "top_k": st.none() | st.integers(1, 99),
    "min_p": st.floats(0, 1),
    "final_step": st.sampled_from(["argmax", "sample"]),
}
LABELS = {
    "horizon": st.none() | st.integers(1, 99),
    "budget": st.floats(0, 9),
    "write": st.sampled_from(["input", "output", "both"]),
}


@given(
    kind=st.sampled_from([Native, CRS, Mend]), steps=st.fixed_dictionaries(STEPS), labels=st.fixed_dictionaries(LABELS)
)
def test_to_dict_and_back(kind: type[Sampler], steps: dict[str, Any], labels: dict[str, Any]) -> None:
    values = steps | (labels if kind is not Native else {})
    sampler = kind(**values)
    written = sampler.to_dict()
    assert list(written) == ["sampler", *(field.name for field in fields(kind))]
    assert written["sampler"] == sampler.name == kind.__name__.lower()
    for again in (
        samplers.from_dict(written),
        samplers.from_dict(json.loads(json.dumps(written))),
        samplers.from_dict({"sampler": sampler.name, **values}),
        pickle.loads(pickle.dumps(sampler)),
        sampler.replace(),
    ):
        assert type(again) is kind
        assert again == sampler
        assert hash(again) == hash(sampler)


def test_the_defaults_are_the_papers() -> None:
    steps = {
        "nfe": 64, "warmup": 0.33, "grid": "two-piece", "temperature": 1.0, "top_p": 1.0, "late_top_p": None,
        "boundary": "released", "top_k": None, "min_p": 0.0, "final_step": "argmax", "interleave": False,
    }  # fmt: skip
    labels = {
        "horizon": None, "budget": 0.5, "spacing": 4, "count": None, "values": "argmax", "value_top_p": 0.9,
        "write": "input",
    }  # fmt: skip
    assert Native().to_dict() == {"sampler": "native"} | steps
    assert CRS().to_dict() == {"sampler": "crs"} | steps | labels


def test_a_sampler_does_not_change() -> None:
    sampler = CRS()
    with pytest.raises(FrozenInstanceError):
        sampler.nfe = 8  # type: ignore[misc]
    assert sampler.replace(nfe=8).nfe == 8
    assert sampler.replace(nfe=8).replace(nfe=64) == sampler
    assert sampler.nfe == 64


def test_whole_numbers_do_for_fractions() -> None:
    assert CRS(warmup=0, budget=1, top_p=1) == CRS(warmup=0.0, budget=1.0, top_p=1.0)


# -- by name ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "sampler"),
    [
        ("native", "native", Native()),
        ("crs budget=.25 horizon=none", "crs budget=0.25", CRS(budget=0.25)),
        ("crs horizon=3 late-top-p=.9", "crs late_top_p=0.9 horizon=3", CRS(horizon=3, late_top_p=0.9)),
        ("small: crs nfe=8", "small", CRS(nfe=8)),
        ("top-p .9: native top_p=0.9 nfe=16", "top-p .9", Native(top_p=0.9, nfe=16)),
        ("crs values=second write=both", "crs values=second write=both", CRS(values="second", write="both")),
        ("  crs   count=2 ", "crs count=2", CRS(count=2)),
    ],
)
def test_an_arm_is_read_from_text(text: str, name: str, sampler: Sampler) -> None:
    assert samplers.parse(text) == (name, sampler)


def test_common_knobs_are_for_those_who_have_them_and_do_not_say_otherwise() -> None:
    common = {"nfe": 16, "horizon": 2, "budget": None}
    assert samplers.parse("native", **common)[1] == Native(nfe=16)
    assert samplers.parse("crs nfe=8", **common)[1] == CRS(nfe=8, horizon=2)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("psy", "there is no sampler 'psy'; there are native, crs"),
        ("", "there is no sampler ''"),
        ("crs 16", "arm 'crs 16' has '16'; after the sampler it takes parameters such as nfe=16"),
        ("crs buget=.25", "crs has no parameter 'buget'; did you mean budget?"),
        ("native horizon=2", "native has no parameter 'horizon'"),
        ("crs nfe=many", "crs has nfe 'many'; it takes a whole number from 2"),
        ("crs nfe=none", "crs has nfe 'none'; it takes a whole number from 2"),
        ("crs horizon=0", "crs has horizon 0; it takes None or a whole number from 1"),
        ("crs write=nowhere", "crs has write 'nowhere'; it takes one of input, output, both"),
        ("./nowhere.py:Mine", "./nowhere.py cannot be read"),
    ],
)
def test_an_arm_that_is_none_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(LimpetError) as caught:
        samplers.parse(text)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_dict_that_is_no_sampler_is_one_sentence() -> None:
    with pytest.raises(LimpetError, match="written with its name, as sampler; this has nfe, warmup"):
        samplers.from_dict({"nfe": 8, "warmup": 0.5})
    with pytest.raises(LimpetError, match="this has nothing"):
        samplers.from_dict({})
    with pytest.raises(LimpetError, match="there is no sampler 'policy'"):
        samplers.from_dict({"sampler": "policy"})


MINE = """
from dataclasses import dataclass
import limpet

@dataclass(frozen=True)
class Mine(limpet.Native):
    \"\"\"Native, and more.\"\"\"

    loud: bool = limpet.parameter(False, "Says more.")
    pitch: str = limpet.parameter("low", "How it says it.")

def helper():
    pass
"""


@pytest.fixture
def mine(tmp_path: File) -> File:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return file


def test_a_sampler_in_a_file(mine: File) -> None:
    name, sampler = samplers.parse(f"{mine}:Mine nfe=4 loud=true pitch=high")
    assert (sampler.nfe, sampler.loud, sampler.pitch) == (4, True, "high")
    assert sampler.name == f"{mine}:Mine"
    assert name == "mine.py:Mine loud=True pitch=high"
    for again in (samplers.from_dict(sampler.to_dict()), pickle.loads(pickle.dumps(sampler)), sampler.replace()):
        assert again == sampler
    out = limpet.sample(WORDS, sampler, n=2)
    assert torch.equal(out.tokens, limpet.sample(WORDS, Native(nfe=4), n=2).tokens)
    assert next(out.rows())["sampler"] == sampler.to_dict()
    with pytest.raises(LimpetError, match=r"mine\.py:Mine has loud 'perhaps'; it takes true or false"):
        samplers.parse(f"{mine}:Mine loud=perhaps")
    with pytest.raises(LimpetError, match="has no 'Yours': name what stands in it"):
        samplers.find(f"{mine}:Yours")
    with pytest.raises(LimpetError, match=r"mine\.py:helper is no sampler: it takes a frozen dataclass"):
        samplers.find(f"{mine}:helper")


def test_a_file_that_does_not_run_is_one_sentence(tmp_path: File) -> None:
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    with pytest.raises(LimpetError, match=r"broken\.py cannot be run \(ModuleNotFoundError: "):
        samplers.find(f"{tmp_path}/broken.py:Mine")


def test_a_file_is_told_apart_by_what_it_says(mine: File) -> None:
    """The digest is of the file: another content is another sampler, which is run anew. Ours need none."""
    first = samplers.find(f"{mine}:Mine")
    assert registry.code_digest(first) == hashlib.sha256(mine.read_bytes()).hexdigest()
    assert samplers.find(f"{mine}:Mine") is first
    mine.write_text(MINE.replace("False", "True"))
    second = samplers.find(f"{mine}:Mine")
    assert (first().loud, second().loud) == (False, True)
    assert registry.code_digest(second) == hashlib.sha256(mine.read_bytes()).hexdigest()
    assert registry.code_digest(CRS) is registry.code_digest(Native) is None


# -- what samplers share ----------------------------------------------------------------------------------------------


def small() -> Mixture:
    generator = torch.Generator().manual_seed(21)
    return Mixture(torch.rand(4, generator=generator) + 0.01, (torch.rand(4, 4, 5, generator=generator) + 0.01) ** 4, 3)


SMALL, TIED = small(), Tied()
TIED.length = 12


def values_of(one: Param) -> st.SearchStrategy[Any]:
    """Anything that a parameter takes, within what makes a difference on a small model."""
    if one.name == "nfe":
        return st.integers(int(one.low or 2), 7)
    if one.choices:
        return st.sampled_from([choice for choice in one.choices if choice != "recorded"])  # which needs a replay
    if one.kind is str:
        return st.just(one.default)
    if one.kind is bool:
        values: st.SearchStrategy[Any] = st.booleans()
    elif one.kind is int:
        values = st.integers(int(one.low or 0), int((one.low or 0) + 5))
    else:
        least = one.low if one.above is None else one.above + 0.2
        values = st.just(0.75) | st.floats(least or 0.0, min(2.0, one.high or 2.0))
    return st.none() | values if one.optional else values


def made(make: Callable[..., Sampler], **values: Any) -> Sampler:
    """A sampler, unless its parameters do not go together."""
    try:
        return make(**values)
    except LimpetError:
        reject()


def common_knobs(one: Sampler, kind: type[Sampler]) -> dict[str, Any]:
    """What a sampler says that one of another kind could say too."""
    there = params(kind)
    return {name: value for name, value in vars(one).items() if name in there and there[name].accepts(value)}


def anything(kind: type[Sampler]) -> st.SearchStrategy[Sampler]:
    """A sampler, every second of whose parameters is as it comes."""
    values = {name: values_of(one) if name == "nfe" else st.just(one.default) | values_of(one)
              for name, one in params(kind).items()}  # fmt: skip
    return st.builds(made, st.just(kind), **values)


def same(one: Sampler, other: Sampler, model: Denoiser = SMALL) -> int:
    """For how many first calls two samplers, alone on one path each, have bit-equal states; a sampler's memory counts
    where both have one of a kind, and where not it must be as it began."""
    walks = []
    for sampler in (one, other):
        path = path_of(model, 3, one.needs_given or other.needs_given)
        walks.append([sampler.begin(path), *(state for state, _ in generate(sampler, path))])
    alike = 0
    for mine, theirs in zip(*walks, strict=False):
        memories = (mine.memory, theirs.memory)
        if type(one) is not type(other):
            memories = (mine.memory + theirs.memory, walks[0][0].memory + walks[1][0].memory)
        if not torch.equal(mine.tokens, theirs.tokens) or not all(map(torch.equal, *memories)):
            break
        alike += 1
    return alike - 1


TELLING = (Native, CRS, Mend)  # which tell of each parameter when it takes effect
OTHERS = [kind for kind in samplers.available().values() if kind not in TELLING]
PARAMS = [(kind, name) for kind in TELLING for name in params(kind)]


@pytest.mark.parametrize(
    ("kind", "name"), PARAMS, ids=lambda value: value if isinstance(value, str) else value.__name__
)
@settings(max_examples=16)
@given(data=st.data())
def test_samplers_that_differ_in_one_knob_share_what_they_say(
    kind: type[Sampler], name: str, data: st.DataObject
) -> None:
    one = data.draw(anything(kind))
    other = one.replace(**{name: data.draw(values_of(params(kind)[name]))})
    shared = one.shared(other)
    assert shared == other.shared(one)
    assert shared == 0 or all(same(one, other, model) >= min(shared, other.nfe) for model in (SMALL, TIED))
    assert (shared == one.nfe) == (one == other)
    assert shared <= one.nfe


@pytest.mark.parametrize("kind", OTHERS, ids=lambda kind: kind.__name__)
@settings(max_examples=24)
@given(data=st.data())
def test_what_the_others_say_they_share_they_do(kind: type[Sampler], data: st.DataObject) -> None:
    """With themselves, one parameter changed, and with the samplers that tell when theirs take effect."""
    one = data.draw(anything(kind))
    name = data.draw(st.sampled_from(list(params(kind))))
    changed = made(one.but, **{name: data.draw(values_of(params(kind)[name]))})
    near = data.draw(st.sampled_from(TELLING))
    for other in (changed, near(**common_knobs(one, near))):
        shared = one.shared(other)
        assert shared == other.shared(one)
        assert 0 <= shared <= one.nfe
        assert shared == 0 or same(one, other) >= min(shared, other.nfe)


@settings(max_examples=40)
@given(data=st.data())
def test_samplers_of_any_two_kinds_share_what_they_say(data: st.DataObject) -> None:
    """Any two that agree in the steps of the native sampler, and any two at all."""
    kinds = st.sampled_from(list(samplers.available().values()))
    one, other = (data.draw(kinds.flatmap(anything)) for _ in range(2))
    if data.draw(st.booleans()):
        other = made(other.but, **common_knobs(one, type(other)))
    shared = one.shared(other)
    assert shared == other.shared(one)
    assert shared == 0 or all(same(one, other, model) >= min(shared, other.nfe) for model in (SMALL, TIED))


def test_what_is_shared_is_worth_sharing() -> None:
    """Not only safe: a family of CRS arms shares its warmup, also with its baseline; two final steps all calls but one."""
    assert BASE.warmup_calls == 2
    for other in (BASE.replace(horizon=1), BASE.replace(budget=0.1), BASE.replace(values="second"), BASE.replace(final_step="sample"),
                  NATIVE, NATIVE.replace(late_top_p=0.9)):  # fmt: skip
        assert BASE.shared(other) == 2
    assert NATIVE.shared(NATIVE.replace(final_step="sample")) == 7
    assert NATIVE.shared(NATIVE.replace(late_top_p=0.9)) == 2
    assert NATIVE.shared(NATIVE) == 8
    for other in (
        NATIVE.replace(top_p=0.9),
        NATIVE.replace(nfe=9),
        NATIVE.replace(temperature=0.8),
        BASE.replace(warmup=0.5),
    ):
        assert BASE.shared(other) == NATIVE.shared(other) == 0


WRONG = {"spacing": 0, "values": "second"}  # many labels that the distribution contradicts at once
APART: dict[str, tuple[Any, Any, dict[str, Any]]] = {  # two values of each parameter, and what else it takes to part them
    "nfe": (8, 6, {}), "warmup": (0.33, 0.5, {}), "grid": ("two-piece", "uniform", {}), "temperature": (1.0, 0.5, {}),
    "top_p": (1.0, 0.5, {}), "late_top_p": (None, 0.5, {}), "boundary": ("released", "paper", {"top_p": 0.75}),
    "final_step": ("argmax", "sample", {}), "horizon": (None, 1, {}), "budget": (0.5, 0.01, {}),
    "spacing": (4, 0, {}), "count": (None, 1, {}), "values": ("argmax", "second", {}),
    "value_top_p": (0.3, 1.0, {"values": "nucleus"}), "write": ("input", "output", {}), "top_k": (None, 1, {}),
    "min_p": (0.0, 0.9, {}), "mend": (20, 0, WRONG), "apart": (0, 20, {**WRONG, "mend": 20}),
    "turns": (1, 3, {**WRONG, "mend": 20}), "interleave": (False, True, {}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name"), PARAMS, ids=lambda value: value if isinstance(value, str) else value.__name__
)
def test_samplers_part_where_they_say(kind: type[Sampler], name: str) -> None:
    """What is shared is no less than could be: a call or two later the states differ."""
    value, other, common = APART[name]
    one = kind(**{"nfe": 8, **common, name: value})
    shared = one.shared(one.replace(**{name: other}))
    assert shared == {"start": 0, "warmup": 2, "final step": 7}[params(kind)[name].since]
    assert shared <= min(same(one, one.replace(**{name: other}), model) for model in (SMALL, TIED)) <= shared + 2


@dataclass(frozen=True)
class Knobbed(CRS):
    """CRS with a parameter more, which nobody else has heard of."""

    shift: int = param(0, "Added to every token that it begins with.", low=0, high=9)

    def begin(self, path: Path) -> State:
        state = super().begin(path)
        return state._replace(tokens=(state.tokens + self.shift) % path.model.vocab_size)


@dataclass(frozen=True)
class Eager(CRS):
    """CRS that uses what it has from the first call on."""

    def step(self, path: Path, state: State) -> tuple[State, StepInfo]:
        state, info = super().step(path, state)
        return state._replace(tokens=(state.tokens + self.spacing) % path.model.vocab_size), info


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Knobbed(nfe=5), Knobbed(nfe=5, shift=1)),
        (Knobbed(nfe=5, shift=1), CRS(nfe=5)),
        (Knobbed(nfe=5, shift=1), Native(nfe=5)),
        (Eager(nfe=5), Eager(nfe=5, spacing=3)),
        (Eager(nfe=5), CRS(nfe=5)),
        (Eager(nfe=5), Native(nfe=5)),
        (Eager(nfe=5), Knobbed(nfe=5)),
    ],
    ids=repr,
)
def test_a_subclass_shares_nothing_before_it_could_differ(one: Sampler, other: Sampler) -> None:
    assert same(one, other) < 1 + (type(one) is Eager)  # they part at once
    assert one.shared(other) == other.shared(one) == 0
    assert one.shared(one) == one.nfe


def test_what_memory_is_shared() -> None:
    """Until its first selection CRS remembers what it began with."""
    path = path_of(SMALL, 2)
    state = BASE.begin(path)
    for _ in range(BASE.warmup_calls):
        state, _ = BASE.step(path, state)
    assert isinstance(state.memory, Memory)
    assert (state.memory.committed_at == OPEN).all()
    assert not state.memory.labels.any()
