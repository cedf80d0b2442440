"""The calls that samplers claim to share are the same, and no more calls than that could be shared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from test_params import BASE, NATIVE, Tied

from limpet import CRS, LimpetError, Mend, Native, Sampler, State, samplers
from limpet.diffusion.rng import CounterRNG
from limpet.generation import Inputs, context_of, rollout
from limpet.models import Denoiser
from limpet.models.exact import Mixture
from limpet.samplers import Context, Param, StepInfo, param, params
from limpet.samplers.crs import OPEN, Memory
from thinned import thinned

GENERATOR = torch.Generator().manual_seed(21)
SMALL = Mixture(torch.rand(4, generator=GENERATOR) + 0.01, (torch.rand(4, 4, 5, generator=GENERATOR) + 0.01) ** 4, 3)
TIED = Tied()
TIED.length = 12
DETAILED = (Native, CRS, Mend)  # they state for each parameter from which call on it takes effect
OTHERS = [kind for kind in samplers.available().values() if kind not in DETAILED]
# A source takes no refresh above 1.
PARAMETERS = [(kind, name) for kind in DETAILED for name in params(kind) if name != "refresh"]
every_parameter = pytest.mark.parametrize(
    ("kind", "name"), thinned(PARAMETERS), ids=lambda one: getattr(one, "__name__", one)
)


def values_of(one: Param) -> st.SearchStrategy[Any]:
    """Values that a parameter takes and that make a difference on a small model."""
    if one.name == "nfe":
        return st.integers(int(one.low or 2), 7)
    if one.choices:
        return st.sampled_from([choice for choice in one.choices if choice != "recorded"])  # which needs a replay
    if one.kind is str or one.name == "refresh":
        return st.just(one.default)
    if one.kind is bool:
        values: st.SearchStrategy[Any] = st.booleans()
    elif one.kind is int:
        values = st.integers(int(one.low or 0), int((one.low or 0) + 5))
    else:
        least = one.low if one.above is None else one.above + 0.2
        values = st.just(0.75) | st.floats(least or 0.0, min(2.0, one.high or 2.0))
    return st.none() | values if one.optional else values


def construct(constructor: Callable[..., Sampler], **values: Any) -> Sampler:
    """A sampler, unless its parameters are incompatible."""
    try:
        return constructor(**values)
    except LimpetError:
        reject()


def samplers_of(kind: type[Sampler]) -> st.SearchStrategy[Sampler]:
    """Samplers with about half of their parameters at the default."""
    values = {
        name: values_of(one) if name == "nfe" else st.just(one.default) | values_of(one)
        for name, one in params(kind).items()
    }
    return st.builds(construct, st.just(kind), **values)


def common_parameters(one: Sampler, kind: type[Sampler]) -> dict[str, Any]:
    """The parameters of a sampler that another class accepts too."""
    known = params(kind)
    return {name: value for name, value in vars(one).items() if name in known and known[name].accepts(value)}


def shared(one: Sampler, other: Sampler, model: Denoiser = SMALL) -> int:
    """After how many calls the states of two samplers are still equal. Memories are compared between samplers of one
    class; of two classes, neither may have changed."""
    fixed = torch.full((3, model.length), -1)
    fixed[:, : 2 * (one.needs_fixed or other.needs_fixed)] = 1
    inputs = Inputs(fixed, CounterRNG(8200, torch.arange(3)))
    trajectories = []
    for sampler in (one, other):
        start = sampler.init(context_of(model, inputs))
        trajectories.append([start, *(step.state for step in rollout(model, sampler, inputs, start))])
    first = trajectories[0][0].memory + trajectories[1][0].memory
    equal = 0
    for mine, theirs in zip(*trajectories, strict=False):
        memories = (mine.memory, theirs.memory)
        if type(one) is not type(other):
            memories = (mine.memory + theirs.memory, first)
        if not torch.equal(mine.tokens, theirs.tokens) or not all(map(torch.equal, *memories)):
            break
        equal += 1
    return equal - 1


def check(one: Sampler, other: Sampler) -> None:
    """The claim is symmetric, at most nfe, and true on both models."""
    claimed = one.shared_calls(other)
    assert claimed == other.shared_calls(one)
    assert 0 <= claimed <= one.nfe
    assert claimed == 0 or all(shared(one, other, model) >= min(claimed, other.nfe) for model in (SMALL, TIED))


@every_parameter
@settings(max_examples=6)
@given(data=st.data())
def test_samplers_that_differ_in_one_parameter(kind: type[Sampler], name: str, data: st.DataObject) -> None:
    one = data.draw(samplers_of(kind))
    other = one.replace(**{name: data.draw(values_of(params(kind)[name]))})
    check(one, other)
    assert (one.shared_calls(other) == one.nfe) == (one == other)


@pytest.mark.parametrize("kind", thinned(OTHERS, 2), ids=lambda kind: kind.__name__)
@settings(max_examples=20)
@given(data=st.data())
def test_the_other_samplers(kind: type[Sampler], data: st.DataObject) -> None:
    """With one parameter changed, and against native, CRS and Mend with the same parameters."""
    one = data.draw(samplers_of(kind))
    name = data.draw(st.sampled_from(list(params(kind))))
    check(one, construct(one.replace, **{name: data.draw(values_of(params(kind)[name]))}))
    near = data.draw(st.sampled_from(DETAILED))
    check(one, near(**common_parameters(one, near)))


@settings(max_examples=40)
@given(data=st.data())
def test_samplers_of_any_two_classes(data: st.DataObject) -> None:
    kinds = st.sampled_from(list(samplers.available().values()))
    one, other = (data.draw(kinds.flatmap(samplers_of)) for _ in range(2))
    if data.draw(st.booleans()):
        other = construct(other.replace, **common_parameters(one, type(other)))
    check(one, other)


def test_what_is_shared() -> None:
    """Samplers of one family share their warmup, also with native; two final steps share all calls but one."""
    assert BASE.warmup_calls == 2
    changes = ({"horizon": 1}, {"budget": 0.1}, {"values": "second"}, {"final_step": "sample"})
    for other in (*(BASE.replace(**change) for change in changes), NATIVE, NATIVE.replace(late_top_p=0.9)):
        assert BASE.shared_calls(other) == 2
    assert NATIVE.shared_calls(NATIVE.replace(final_step="sample")) == 7
    assert NATIVE.shared_calls(NATIVE.replace(late_top_p=0.9)) == 2
    assert NATIVE.shared_calls(NATIVE) == 8
    for change in ({"top_p": 0.9}, {"nfe": 9}, {"temperature": 0.8}):
        assert BASE.shared_calls(NATIVE.replace(**change)) == NATIVE.shared_calls(NATIVE.replace(**change)) == 0
    assert BASE.shared_calls(BASE.replace(warmup=0.5)) == BASE.shared_calls(BASE.replace(refresh=4)) == 0


WRONG = {"spacing": 0, "values": "second"}  # commits many tokens that later predictions contradict
DIFFERENT: dict[str, tuple[Any, Any, dict[str, Any]]] = {  # two values, and what makes them differ soon
    "nfe": (8, 6, {}),
    "warmup": (0.33, 0.5, {}),
    "grid": ("two-piece", "uniform", {}),
    "interleave": (False, True, {}),
    "temperature": (1.0, 0.5, {}),
    "top_p": (1.0, 0.5, {}),
    "late_top_p": (None, 0.5, {}),
    "boundary": ("released", "paper", {"top_p": 0.75}),
    "top_k": (None, 1, {}),
    "min_p": (0.0, 0.9, {}),
    "final_step": ("argmax", "sample", {}),
    "horizon": (None, 1, {}),
    "budget": (0.5, 0.01, {}),
    "spacing": (4, 0, {}),
    "count": (None, 1, {}),
    "values": ("argmax", "second", {}),
    "value_top_p": (0.3, 1.0, {"values": "nucleus"}),
    "write": ("input", "output", {}),
    "revise": (20, 0, WRONG),
    "revise_spacing": (0, 20, {**WRONG, "revise": 20}),
    "revise_every": (1, 3, {**WRONG, "revise": 20}),
    "own_turn": (False, True, {**WRONG, "interleave": True}),
}


@every_parameter
def test_no_more_calls_could_be_shared(kind: type[Sampler], name: str) -> None:
    """A call or two later the states differ."""
    value, other_value, common = DIFFERENT[name]
    one = kind(**{"nfe": 8, **common, name: value})
    other = one.replace(**{name: other_value})
    claimed = one.shared_calls(other)
    assert claimed == {"start": 0, "warmup": 2, "final step": 7}[params(kind)[name].since]
    assert claimed <= min(shared(one, other, model) for model in (SMALL, TIED)) <= claimed + 2


@dataclass(frozen=True)
class Shifted(CRS):
    """CRS with a parameter that changes the first state."""

    shift: int = param(0, "Added to every token of the first state.", low=0, high=9)

    def init(self, ctx: Context) -> State:
        state = super().init(ctx)
        return state._replace(tokens=(state.tokens + self.shift) % ctx.model.vocab_size)


@dataclass(frozen=True)
class Eager(CRS):
    """CRS whose spacing takes effect from the first call on."""

    def step(self, ctx: Context, state: State) -> tuple[State, StepInfo]:
        state, info = super().step(ctx, state)
        return state._replace(tokens=(state.tokens + self.spacing) % ctx.model.vocab_size), info


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Shifted(nfe=5), Shifted(nfe=5, shift=1)),
        (Shifted(nfe=5, shift=1), CRS(nfe=5)),
        (Shifted(nfe=5, shift=1), Native(nfe=5)),
        (Eager(nfe=5), Eager(nfe=5, spacing=3)),
        (Eager(nfe=5), CRS(nfe=5)),
        (Eager(nfe=5), Native(nfe=5)),
        (Eager(nfe=5), Shifted(nfe=5)),
    ],
    ids=repr,
)
def test_a_subclass_claims_nothing_by_default(one: Sampler, other: Sampler) -> None:
    assert shared(one, other) < 1 + (type(one) is Eager)  # they differ at once
    assert one.shared_calls(other) == other.shared_calls(one) == 0
    assert one.shared_calls(one) == one.nfe


def test_the_memory_of_crs_during_warmup_is_its_first_one() -> None:
    inputs = Inputs(torch.full((2, SMALL.length), -1), CounterRNG(8200, torch.arange(2)))
    *_, step = rollout(SMALL, BASE, inputs, stop=BASE.warmup_calls)
    assert isinstance(step.state.memory, Memory)
    assert (step.state.memory.committed_at == OPEN).all()
    assert not step.state.memory.committed_values.any()
