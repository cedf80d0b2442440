"""A path: what it refuses of a model, with the call and the place, and several transitions in one call."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import limpet
from backends import BACKENDS, DEVICE
from limpet import CRS, LimpetError, Native, Sampler
from limpet.diffusion.backends import Backend, Outcome, Transition
from limpet.diffusion.rng import CounterRNG
from limpet.diffusion.transitions import ancestral, nested
from limpet.diffusion.truncation import Support
from limpet.models import Denoiser, Needed
from limpet.models.exact import Mixture
from limpet.models.exact_sources import source
from limpet.samplers.context import Context, State, generate, open_context

VOCAB, LENGTH = 7, 8
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # Triton's interpreter, of nan
every_backend = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
SAMPLERS: list[Sampler] = [CRS(nfe=5), CRS(nfe=5, temperature=0.8, top_p=0.9), CRS(nfe=5, final_step="sample")]


class Logits(Denoiser):
    """Logits that depend on the tokens, one of them spoiled in one call, for one sample, at one position."""

    vocab_size, length, name, digest = VOCAB, LENGTH, "spoiled", "spoiled"

    def __init__(
        self, call: int = -1, row: int = 0, position: int = 0, spoil: Any = None, convert: bool = False
    ) -> None:
        self.call, self.row, self.position, self.spoil, self.calls = call, row, position, spoil, 0
        self.predicts = "posterior" if convert else "leave-one-out"
        self.table = 2 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3)).to(DEVICE)

    @property
    def device(self) -> torch.device:
        return torch.device(DEVICE)

    def body(self, tokens: Tensor, t: float | Tensor) -> Tensor:
        features = self.table[tokens.roll(1, 1)] + self.table[tokens.roll(-1, 1)].flip(-1)
        if self.calls == self.call:
            features[self.row, self.position] = self.spoil(features[self.row, self.position])
        self.calls += 1
        return features

    def head(self, features: Tensor) -> Tensor:
        return features


def one(value: float, at: int = 2) -> Any:
    """A row of logits with this value in one place."""
    return lambda row: row.index_fill(0, torch.tensor([at], device=row.device), value)


NONE = {"nan": one(math.nan), "+inf": one(math.inf), "all -inf": lambda row: torch.full_like(row, -math.inf),
        "all nan": lambda row: torch.full_like(row, math.nan)}  # fmt: skip


def path_of(
    model: Denoiser, backend: Backend | None = None, n: int = 2, first: int = 0, trace: bool = False
) -> Context:
    rng = CounterRNG(8200, torch.arange(first, first + n, device=DEVICE))
    return open_context(model, rng, torch.full((n, model.length), -1, device=DEVICE), backend, trace)


# -- distributions that are none -----------------------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize(("spoil", "call"), [("nan", 0), ("nan", 4), *((spoil, 2) for spoil in NONE)])
def test_a_law_that_is_none_is_named(backend: Backend, spoil: str, call: int) -> None:
    """The call, the sample and the position; whoever does not wait for the device says it one call late, or at the
    end."""
    model = Logits(call, row=1, position=7, spoil=NONE[spoil])
    ctx = path_of(model, backend, first=40, trace=True)
    with pytest.raises(LimpetError) as caught:
        list(generate(CRS(nfe=5), ctx))
    assert str(caught.value).startswith(
        f"spoiled gave logits that make no distribution (nan, +inf, or all -inf) in call {call} at position 7 of sample 41: "
    )
    assert "\n" not in str(caught.value)
    late = backend is BACKENDS.get("fused") and call < 4
    assert model.calls in ((call + 1, call + 2) if late else (call + 1,))


@every_backend
@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: sampler.caption)
@pytest.mark.parametrize("convert", [False, True])
def test_whatever_is_read_is_checked(backend: Backend, sampler: Sampler, convert: bool) -> None:
    """In the first call after warmup CRS looks everywhere, so nothing hides there; `sample` is no exception."""
    model = Logits(sampler.warmup_calls, row=0, position=3, spoil=NONE["nan"], convert=convert)
    with pytest.raises(LimpetError, match=rf"in call {sampler.warmup_calls} at position 3 of sample 6"):
        limpet.sample(model, sampler, n=2, first=6, backend=backend)


@every_backend
def test_one_bad_law_among_many_batches_is_found(backend: Backend) -> None:
    """The position is of the batch that it was in, the sample of the whole."""
    model = Logits(5 + 1, row=1, position=2, spoil=NONE["all -inf"])  # the second batch's second call
    with pytest.raises(LimpetError, match="in call 1 at position 2 of sample 3"):
        limpet.sample(model, CRS(nfe=5, warmup=0.0), n=6, batch_size=2, backend=backend)


@every_backend
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_impossible_tokens_are_no_error(backend: Backend, temperature: float) -> None:
    """Some logits of -inf, all but one of them even, are a distribution like others, and they are never drawn."""

    class Sparse(Logits):
        def head(self, features: Tensor) -> Tensor:
            rows = features.index_fill(-1, torch.tensor([0, 3], device=features.device), -math.inf)
            return rows.where(torch.arange(VOCAB, device=rows.device) == 5, -math.inf) if self.calls == 2 else rows

    for sampler in (Native(nfe=5, temperature=temperature), CRS(nfe=5, temperature=temperature, top_p=0.9)):
        out = limpet.sample(Sparse(), sampler, n=2, backend=backend)
        assert not ((out.tokens == 0) | (out.tokens == 3)).any()


def test_what_is_not_read_is_not_checked() -> None:
    """A native step stays put at many positions, and there nobody asks the head: what it would say cannot matter."""
    sampler, backend = Native(nfe=12), BACKENDS["lazy"]
    *_, (clean, _) = generate(sampler, path_of(Logits(), backend))
    unread = 0
    for position in range(LENGTH):
        spoiled = Logits(3, row=0, position=position, spoil=NONE["nan"])
        try:
            *_, (state, _) = generate(sampler, path_of(spoiled, backend))
        except LimpetError:
            continue
        unread += 1
        assert torch.equal(state.tokens, clean.tokens)
    assert 0 < unread < LENGTH


def test_a_path_that_was_sound_says_nothing() -> None:
    for backend in BACKENDS.values():
        ctx = path_of(Logits(), backend)
        list(generate(CRS(nfe=4), ctx))
        ctx.check_finite()
        assert ctx.nonfinite_at.tolist() == [-1, -1]


def test_a_walk_by_hand_can_ask_at_the_end() -> None:
    """Calls one by one, with a backend that does not wait: the last bad distribution is told by `sound`."""
    backend = BACKENDS.get("fused")
    if backend is None:
        pytest.skip("needs Triton")
    model = Logits(4, row=1, position=6, spoil=NONE["+inf"])
    sampler, ctx = CRS(nfe=5), path_of(model, backend)
    state = sampler.begin(ctx)
    for _ in range(5):
        state, _ = sampler.step(ctx, state)
    with pytest.raises(LimpetError, match="in call 4 at position 6 of sample 1"):
        ctx.check_finite()


# -- models that are none ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        ({"name": None}, "the model Broken has name None; it takes a text"),
        ({"name": ""}, "the model Broken has name ''; it takes a text"),
        ({"digest": None}, "the model Broken has digest None; it takes a text that changes with its output"),
        ({"vocab_size": None}, "the model Broken has vocab_size None; it takes a whole number from 2"),
        ({"vocab_size": 1}, "the model Broken has vocab_size 1; it takes a whole number from 2"),
        ({"vocab_size": 7.0}, "the model Broken has vocab_size 7.0; it takes a whole number from 2"),
        ({"predicts": "noise"}, 'the model Broken has predicts \'noise\'; it takes "leave-one-out" or "posterior"'),
    ],
)
def test_a_model_says_what_it_is(facts: dict[str, Any], sentence: str) -> None:
    Broken = type("Broken", (Logits,), {})
    model = Broken()
    for name, value in facts.items():
        setattr(model, name, value)
    with pytest.raises(LimpetError) as caught:
        limpet.sample(model, Native(nfe=3), n=1)
    assert str(caught.value) == sentence


@pytest.mark.parametrize("fact", ["name", "digest", "vocab_size", "length"])
def test_a_model_that_does_not_say_is_one_sentence(fact: str) -> None:
    """Not an AttributeError from somewhere within."""

    class Silent(Denoiser):
        def body(self, tokens: Tensor, t: float | Tensor) -> Tensor:
            return torch.zeros(*tokens.shape, VOCAB)

        def head(self, features: Tensor) -> Tensor:
            return features

    model = Silent()
    for name in {"name", "digest", "vocab_size", "length"} - {fact}:
        setattr(model, name, getattr(Logits, name))
    with pytest.raises(LimpetError, match=f"the model Silent has {fact} None; it takes"):
        limpet.sample(model, Native(nfe=3), n=1)


@every_backend
@pytest.mark.parametrize("width", [VOCAB - 1, VOCAB + 1])
def test_a_head_of_the_wrong_width_is_one_sentence(backend: Backend, width: int) -> None:
    class Wide(Logits):
        def head(self, features: Tensor) -> Tensor:
            return torch.nn.functional.pad(features, (0, width - VOCAB))

    with pytest.raises(LimpetError) as caught:
        limpet.sample(Wide(), CRS(nfe=3), n=2, backend=backend)
    assert "spoiled made logits of shape (" in str(caught.value)
    assert f"{width}) from features of shape" in str(caught.value)
    assert f"its head must give {VOCAB}, one for each token" in str(caught.value)


@every_backend
@pytest.mark.parametrize("shape", [(2, LENGTH), (2, LENGTH - 1, VOCAB), (1, LENGTH, VOCAB), (2, LENGTH, 1, VOCAB)])
def test_a_body_of_the_wrong_shape_is_one_sentence(backend: Backend, shape: tuple[int, ...]) -> None:
    class Odd(Logits):
        def body(self, tokens: Tensor, t: float | Tensor) -> Tensor:
            features = super().body(tokens, t)
            return torch.zeros(shape, device=tokens.device) if self.calls == 2 else features

    with pytest.raises(LimpetError) as caught:
        limpet.sample(Odd(), CRS(nfe=3), n=2, backend=backend)
    t = CRS(nfe=3).times[1]
    assert str(caught.value) == (
        f"spoiled made features of shape {shape} at t = {t:g} from tokens of shape (2, {LENGTH}); its "
        "body must give (batch, length, width)"
    )


# -- several transitions in one call ----------------------------------------------------------------------------------


class Watched(Denoiser):
    """A model that keeps what it was asked for, and is nan wherever nobody asked."""

    def __init__(self, inner: Denoiser) -> None:
        self.inner, self.vocab_size, self.length = inner, inner.vocab_size, inner.length
        self.name, self.digest = "watched", "watched"
        self.asked: list[Tensor | None] = []

    @property
    def device(self) -> torch.device:
        return self.inner.device

    def body(self, tokens: Tensor, t: float | Tensor) -> Tensor:
        raise AssertionError("a path says what it needs")

    def body_at(self, tokens: Tensor, t: float | Tensor, needed: Needed) -> Tensor:
        self.asked.append(needed())
        features = self.inner.body(tokens, t).flatten(0, 1)
        index = torch.arange(len(features), device=features.device) if self.asked[-1] is None else self.asked[-1].long()
        kept = torch.full_like(features, math.nan)
        kept[index] = features[index]
        return kept.view(*tokens.shape, -1)

    def head(self, features: Tensor) -> Tensor:
        return self.inner.head(features)


def several(ctx: Context, tokens: Tensor) -> list[Transition]:
    """From one state and from others, over other spans of time, with other supports and temperatures, and one that
    asks for nothing at all."""
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


@every_backend
@pytest.mark.parametrize("which", [(0, 1), (1, 2), (3, 0), (4, 1), (0, 1, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("convert", [False, True])
def test_transitions_in_one_call_are_as_each_alone(backend: Backend, which: tuple[int, ...], convert: bool) -> None:
    """The body runs once, where any of them needs it, and each outcome is the one that it would have had alone."""
    inner = Logits(convert=convert)
    watched = Watched(inner)
    watched.predicts = inner.predicts
    ctx = path_of(watched, backend)
    tokens = ctx.noise()
    transitions = [several(ctx, tokens)[i] for i in which]
    alone, needs = [], []
    for transition in transitions:
        _, outcome = ctx.call(tokens, 0.6, transition)
        alone.append(outcome)
        needs.append(watched.asked.pop())
    features, *outcomes = ctx.call(tokens, 0.6, *transitions)
    (asked,) = watched.asked
    if backend is BACKENDS["dense"]:
        assert asked is None
    else:
        union = sorted(set().union(*(need.tolist() for need in needs)))
        assert asked.tolist() == union
        assert 0 < len(union) < tokens.numel()
    assert all(equal(one, other) for one, other in zip(alone, outcomes, strict=True))
    assert features.values.shape[:2] == tokens.shape


def test_where_one_transition_needs_all_the_body_runs_everywhere() -> None:
    watched = Watched(Logits())
    ctx = path_of(watched, BACKENDS["lazy"])
    tokens = ctx.noise()
    some, *_ = several(ctx, tokens)
    look = Transition(1, tokens, ctx.no_positions, ctx.free, ancestral(0.2, 0.5))
    ctx.call(tokens, 0.6, some, look)
    assert watched.asked == [None]


@every_backend
def test_the_laws_of_a_call_are_those_that_it_drew_from(backend: Backend) -> None:
    """`ctx.distributions` at chosen rows: leave-one-out whatever the model predicts, at a temperature, in bounded pieces."""
    exact = Mixture(torch.ones(3), torch.rand(3, 4, VOCAB, generator=torch.Generator().manual_seed(2)) + 0.01, 3)
    ctx = path_of(exact, backend) if DEVICE == "cpu" else pytest.skip("an exact source is on the CPU")
    tokens = ctx.noise()
    features, outcome = ctx.call(tokens, 0.6, Transition(0, tokens, ctx.no_positions, ctx.free, ancestral(0.4, 0.6)))
    rows = ctx.free.nonzero()[::2]
    found = list(ctx.log_probs(features, rows, temperature=0.5))
    assert torch.equal(torch.cat([some for some, _ in found]), rows)
    probs = exact.probs(tokens, exact.schedule.signal(0.6).expand(len(tokens)))
    for some, logits in found:
        at = tuple(some.unbind(-1))
        squared = probs[at] ** 2 / (probs[at] ** 2).sum(-1, keepdim=True)
        torch.testing.assert_close(logits.softmax(-1).double(), squared, rtol=1e-6, atol=1e-9)
        assert torch.equal(logits.argmax(-1), outcome.top[at])


def test_a_sampler_of_two_transitions_counts_as_one_call() -> None:
    """A sampler in a few lines, with its own memory: it walks two states under one denoiser, each by its own distribution."""

    class Pair(Native):
        def begin(self, ctx: Context) -> State:
            return State(0, ctx.noise(), (ctx.noise(),))

        def step(self, ctx: Context, state: State) -> Any:
            here = self.transition(ctx, state, ctx.free, ctx.no_positions)
            there = self.transition(ctx, state._replace(tokens=state.memory[0]), ctx.free, ctx.no_positions)
            _, mine, theirs = ctx.call(state.tokens, self.times[state.call], here, there)
            info = limpet.StepInfo(state.call, self.times[state.call], state.tokens, mine, {})
            return State(state.call + 1, self.read(ctx, state, mine), (self.read(ctx, state, theirs),)), info

    model = source("exact:words")
    out = limpet.sample(model, Pair(nfe=6), n=3)
    alone = limpet.sample(model, Native(nfe=6), n=3)
    assert out.nfe == 6
    assert torch.equal(out.tokens, alone.tokens)
    assert torch.equal(out.memory[0], alone.tokens)
    assert out.head_rows == 2 * alone.head_rows
