"""The context of a batch: errors for wrong models, with call and position, and several transitions in a call."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import limpet
from backends import BACKENDS, DEVICE
from limpet import CRS, LimpetError, Native, Sampler, State
from limpet.diffusion.backends import Backend, Outcome, Transition
from limpet.diffusion.rng import CounterRNG
from limpet.diffusion.transitions import ancestral, nested
from limpet.diffusion.truncation import Support
from limpet.generation import Inputs, context_of, rollout
from limpet.models import Denoiser, ModelInput, WrappedDenoiser
from limpet.models.exact import Mixture
from limpet.models.exact_sources import source
from limpet.samplers import Context, StepInfo
from thinned import by_backend

VOCAB, LENGTH = 7, 8
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # Triton's interpreter, from nan
every_backend = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
SAMPLERS: list[Sampler] = [CRS(nfe=5), CRS(nfe=5, temperature=0.8, top_p=0.9), CRS(nfe=5, final_step="sample")]


class Logits(Denoiser):
    """Logits that depend on the tokens, spoiled in one call at one position of one sample."""

    vocab_size, length, name, digest, device = VOCAB, LENGTH, "spoiled", "spoiled", torch.device(DEVICE)

    def __init__(
        self, call: int = -1, row: int = 0, position: int = 0, spoil: Any = None, convert: bool = False
    ) -> None:
        self.call, self.row, self.position, self.spoil, self.calls = call, row, position, spoil, 0
        self.predicts = "posterior" if convert else "leave-one-out"
        self.table = 2 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3)).to(DEVICE)

    def backbone(self, inputs: ModelInput) -> Tensor:
        features = self.table[inputs.tokens.roll(1, 1)] + self.table[inputs.tokens.roll(-1, 1)].flip(-1)
        if self.calls == self.call:
            features[self.row, self.position] = self.spoil(features[self.row, self.position])
        self.calls += 1
        return features

    def head(self, features: Tensor) -> Tensor:
        return features


def one_logit(value: float) -> Any:
    return lambda row: row.index_fill(0, torch.tensor([2], device=row.device), value)


def all_logits(value: float) -> Any:
    return lambda row: torch.full_like(row, value)


NON_FINITE = {
    "nan": one_logit(math.nan),
    "+inf": one_logit(math.inf),
    "all -inf": all_logits(-math.inf),
    "all nan": all_logits(math.nan),
}


def inputs_of(model: Denoiser, backend: Backend | None = None, first: int = 0, trace: bool = False) -> Inputs:
    """Two samples without fixed tokens."""
    rng = CounterRNG(8200, torch.arange(first, first + 2, device=DEVICE))
    return Inputs(torch.full((2, model.length), -1, device=DEVICE), rng, backend=backend, trace=trace)


# Non-finite logits


@by_backend("spoil call", [("nan", 2), ("nan", 0), ("nan", 4), *((spoil, 2) for spoil in [*NON_FINITE][1:])])
def test_non_finite_logits_are_located(backend: Backend, spoil: str, call: int) -> None:
    """By call, sample and position. A backend that does not wait for the device reports them one call later, or at the
    end."""
    model = Logits(call, row=1, position=7, spoil=NON_FINITE[spoil])
    with pytest.raises(LimpetError) as caught:
        list(rollout(model, CRS(nfe=5), inputs_of(model, backend, first=40, trace=True)))
    assert str(caught.value).startswith(
        "spoiled returned non-finite logits (nan, +inf, or all -inf) "
        f"in call {call} at position 7 of sample 41: check its weights"
    )
    assert "\n" not in str(caught.value)
    is_late = backend is BACKENDS.get("fused") and call < 4
    assert model.calls in ((call + 1, call + 2) if is_late else (call + 1,))


@by_backend("sampler convert", itertools.product(SAMPLERS, [True, False]))
def test_all_logits_that_are_read_are_checked(backend: Backend, sampler: Sampler, convert: bool) -> None:
    """CRS inspects every position in the first call after warmup."""
    model = Logits(sampler.warmup_calls, row=0, position=3, spoil=NON_FINITE["nan"], convert=convert)
    with pytest.raises(LimpetError, match=rf"in call {sampler.warmup_calls} at position 3 of sample 6"):
        limpet.sample(model, sampler, n=2, first=6, backend=backend)


@every_backend
def test_the_location_is_that_of_all_batches(backend: Backend) -> None:
    model = Logits(5 + 1, row=1, position=2, spoil=NON_FINITE["all -inf"])  # the second batch's second call
    with pytest.raises(LimpetError, match="in call 1 at position 2 of sample 3"):
        limpet.sample(model, CRS(nfe=5, warmup=0.0), n=6, batch_size=2, backend=backend)


@by_backend("temperature", [(0.5,), (1.0,)])
def test_impossible_tokens_are_no_error(backend: Backend, temperature: float) -> None:
    """Some logits of -inf, even all but one, are valid, and those tokens are never drawn."""

    class Impossible(Logits):
        def head(self, features: Tensor) -> Tensor:
            rows = features.index_fill(-1, torch.tensor([0, 3], device=features.device), -math.inf)
            return rows.where(torch.arange(VOCAB, device=rows.device) == 5, -math.inf) if self.calls == 2 else rows

    for sampler in (Native(nfe=5, temperature=temperature), CRS(nfe=5, temperature=temperature, top_p=0.9)):
        out = limpet.sample(Impossible(), sampler, n=2, backend=backend)
        assert not ((out.tokens == 0) | (out.tokens == 3)).any()


def test_logits_that_are_not_read_are_not_checked() -> None:
    """A native step keeps many tokens, and there the head is not called."""
    sampler, backend = Native(nfe=12, final_step="argmax"), BACKENDS["sparse"]
    *_, clean = rollout(Logits(), sampler, inputs_of(Logits(), backend))
    unread = 0
    for position in range(LENGTH):
        spoiled = Logits(3, row=0, position=position, spoil=NON_FINITE["nan"])
        try:
            *_, step = rollout(spoiled, sampler, inputs_of(spoiled, backend))
        except LimpetError:
            continue
        unread += 1
        assert torch.equal(step.tokens, clean.tokens)
    assert 0 < unread < LENGTH


@pytest.mark.skipif("fused" not in BACKENDS, reason="needs Triton")
def test_an_asynchronous_backend_reports_the_last_call_at_the_end() -> None:
    model = Logits(4, row=1, position=6, spoil=NON_FINITE["+inf"])
    sampler, ctx = CRS(nfe=5), context_of(model, inputs_of(model, BACKENDS["fused"]))
    state = sampler.init(ctx)
    for _ in range(5):
        state, _ = sampler.step(ctx, state)
    with pytest.raises(LimpetError, match="in call 4 at position 6 of sample 1"):
        ctx.check_finite()
    finite = context_of(Logits(), inputs_of(Logits(), BACKENDS["fused"]))
    finite.check_finite()
    assert finite.nonfinite_at.tolist() == [-1, -1]


# Models that break the interface


@every_backend
@pytest.mark.parametrize("width", [VOCAB - 1, VOCAB + 1])
def test_a_head_of_the_wrong_width_is_one_sentence(backend: Backend, width: int) -> None:
    class Wide(Logits):
        def head(self, features: Tensor) -> Tensor:
            return torch.nn.functional.pad(features, (0, width - VOCAB))

    with pytest.raises(LimpetError, match=rf"{width}\) from features of shape .*; its head must return {VOCAB}, one"):
        limpet.sample(Wide(), CRS(nfe=3), n=2, backend=backend)


@every_backend
@pytest.mark.parametrize("shape", [(2, LENGTH), (2, LENGTH - 1, VOCAB), (1, LENGTH, VOCAB), (2, LENGTH, 1, VOCAB)])
def test_a_backbone_of_the_wrong_shape_is_one_sentence(backend: Backend, shape: tuple[int, ...]) -> None:
    class Odd(Logits):
        def backbone(self, inputs: ModelInput) -> Tensor:
            features = super().backbone(inputs)
            return torch.zeros(shape, device=features.device) if self.calls == 2 else features

    with pytest.raises(LimpetError) as caught:
        limpet.sample(Odd(), CRS(nfe=3), n=2, backend=backend)
    assert str(caught.value) == (
        f"spoiled made features of shape {shape} at t = {CRS(nfe=3).times[1]:g} from tokens of shape (2, {LENGTH}); "
        "its backbone must return (batch, length, width)"
    )


RETURNED = {
    "None": (lambda values: None, "type NoneType"),
    "a list": (lambda values: values.tolist(), "type list"),
    "a tuple": (lambda values: (values,), "type tuple"),
    "an array": (lambda values: values.cpu().numpy(), "type ndarray"),
    "complex numbers": (lambda values: values.to(torch.complex64), "complex numbers in shape"),
}


@every_backend
@pytest.mark.parametrize("part", ["backbone", "head"])
@pytest.mark.parametrize("kind", RETURNED)
def test_what_is_no_tensor_of_real_numbers_is_one_sentence(backend: Backend, part: str, kind: str) -> None:
    """They raised AttributeError or RuntimeError from within. A head may still take complex features."""
    spoil, match = RETURNED[kind]

    class Odd(Logits):
        def backbone(self, inputs: ModelInput) -> Any:
            return spoil(super().backbone(inputs)) if part == "backbone" else super().backbone(inputs)

        def head(self, features: Tensor) -> Any:
            return spoil(features) if part == "head" else features

    for sampler in (Native(nfe=2), CRS(nfe=2)):
        with pytest.raises(LimpetError, match=f"spoiled made (features|logits) of {match}"):
            limpet.sample(Odd(), sampler, n=2, backend=backend)


# Several transitions in one call


class Recording(WrappedDenoiser):
    """A model that records which rows were needed, and is NaN at all others."""

    def __init__(self, inner: Denoiser) -> None:
        super().__init__(inner)
        self.needed: list[Tensor | None] = []

    def backbone(self, inputs: ModelInput) -> Tensor:
        self.needed.append(inputs.rows())
        features = super().backbone(inputs).flatten(0, 1)
        if self.needed[-1] is not None:
            unneeded = torch.ones(len(features), dtype=torch.bool, device=features.device)
            features = features.masked_fill(unneeded.index_fill(0, self.needed[-1].long(), False)[:, None], math.nan)
        return features.view(*inputs.tokens.shape, -1)


def several(ctx: Context, tokens: Tensor) -> list[Transition]:
    """From different states, over different spans of time, with different supports, one that needs nothing."""
    generator = torch.Generator().manual_seed(5)
    some, others = (torch.rand(2, *tokens.shape, generator=generator) < 0.3).to(tokens.device)
    return [
        Transition(1, tokens, some, ctx.no_positions, ancestral(0.2, 0.5)),
        Transition(1, tokens.roll(1, 1), others, some & others, ancestral(0.2, 0.9), support=Support(0.8)),
        Transition(2, tokens, some, others, ancestral(0.3, 1.0), 0.8, Support(0.9, "paper")),
        Transition(3, tokens, ctx.no_positions, ctx.no_positions, ancestral(0.2, 0.5)),
        Transition(4, tokens, some, others, nested(0.3, 0.2, 0.1, 0.3, 0.3), against=tokens.roll(1, 1)),
    ]


def equal(one: Outcome, other: Outcome) -> bool:
    return all(a is b is None or torch.equal(a, b) for a, b in zip(one, other, strict=True))


@by_backend("convert", [(True,), (False,)])
def test_transitions_in_one_call_equal_each_alone(backend: Backend, convert: bool) -> None:
    """The backbone runs once, where any of them needs it; everywhere if one needs every position."""
    model = Recording(Logits(convert=convert))
    ctx = context_of(model, inputs_of(model, backend))
    state = State(0, ctx.noise())
    for which in ((0, 1), (1, 2), (3, 0), (4, 1), (0, 1, 2, 3, 4)):
        transitions = [several(ctx, state.tokens)[i] for i in which]
        alone = [ctx.call(state, state.tokens, 0.6, transition)[1] for transition in transitions]
        separate, model.needed = model.needed, []
        features, *outcomes = ctx.call(state, state.tokens, 0.6, *transitions)
        (together,), model.needed = model.needed, []
        if backend is BACKENDS["dense"]:
            assert together is None
        else:
            union = sorted(set().union(*(needed.tolist() for needed in separate)))
            assert together.tolist() == union
            assert 0 < len(union) < state.tokens.numel()
        assert all(map(equal, alone, outcomes))
        assert features.values.shape[:2] == state.tokens.shape
    everywhere = Transition(1, state.tokens, ctx.no_positions, ctx.free, ancestral(0.2, 0.5))
    ctx.call(state, state.tokens, 0.6, several(ctx, state.tokens)[0], everywhere)
    assert model.needed[0] is None or len(model.needed[0]) == state.tokens.numel()


@every_backend
@pytest.mark.skipif(DEVICE != "cpu", reason="exact sources are on the CPU")
def test_log_probs_are_those_that_a_transition_reads(backend: Backend) -> None:
    """At chosen rows, leave-one-out, at a temperature."""
    exact = Mixture(torch.ones(3), torch.rand(3, 4, VOCAB, generator=torch.Generator().manual_seed(2)) + 0.01, 3)
    ctx = context_of(exact, inputs_of(exact, backend))
    state = State(0, ctx.noise())
    inspection = Transition(0, state.tokens, ctx.no_positions, ctx.free, ancestral(0.4, 0.6))
    features, outcome = ctx.call(state, state.tokens, 0.6, inspection)
    rows = ctx.free.nonzero()[::2]
    found = list(ctx.log_probs(features, rows, temperature=0.5))
    assert torch.equal(torch.cat([some for some, _ in found]), rows)
    probs = exact.probs(state.tokens, exact.schedule.signal(0.6).expand(2))
    for some, log_probs in found:
        here = tuple(some.unbind(-1))
        squared = probs[here] ** 2 / (probs[here] ** 2).sum(-1, keepdim=True)
        torch.testing.assert_close(log_probs.softmax(-1).double(), squared, rtol=1e-6, atol=1e-9)
        assert torch.equal(log_probs.argmax(-1), outcome.top[here])


def test_a_sampler_of_two_transitions_makes_one_call() -> None:
    """It samples two states with one network, each by its own distribution, and keeps the second in its memory."""

    class Pair(Native):
        def init(self, ctx: Context) -> State:
            return State(0, ctx.noise(), (ctx.noise(),))

        def step(self, ctx: Context, state: State) -> Any:
            first = self.transition(ctx, state, ctx.free, ctx.no_positions)
            second = self.transition(ctx, state._replace(tokens=state.memory[0]), ctx.free, ctx.no_positions)
            t = self.times[state.call]
            features, mine, theirs = ctx.call(state, state.tokens, t, first, second)
            info = StepInfo(state.call, t, state.tokens, mine, {})
            return state.next(self.read(ctx, state, mine), features, (self.read(ctx, state, theirs),)), info

    model = source("exact:words")
    out, alone = limpet.sample(model, Pair(nfe=6), n=3), limpet.sample(model, Native(nfe=6), n=3)
    assert out.nfe == 6
    assert torch.equal(out.tokens, alone.tokens)
    assert torch.equal(out.memory[0], alone.tokens)
    assert out.head_rows == 2 * alone.head_rows
