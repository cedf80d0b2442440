"""The samplers against Algorithm 1 in plain Python, against exact output distributions, and against its own promises."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from limpet.samplers.context import Context, State, StepInfo, generate, open_context
from torch import Tensor

import limpet
import literal
import plain
from backends import Posterior
from limpet import CRS, Mend, Native, Sampler
from limpet.diffusion import process, truncation
from limpet.diffusion.backends import dense, sparse
from limpet.diffusion.rng import CounterRNG
from limpet.generation import begin
from limpet.models import Denoiser, Needed
from limpet.models.exact import Markov, Mixture
from limpet.models.exact_sources import source
from limpet.paper.theory.output_distribution import output_distribution
from limpet.samplers.crs import NEVER, Memory

SEED = 8200


def generic(kind: str) -> Denoiser:
    """A source with random parameters: no two distributions tie by accident, so every order is decided by more than rounding."""
    generator = torch.Generator().manual_seed(21)

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64) + 0.01

    if kind == "markov":
        return Markov(rand(7), rand(7, 7) ** 4, 20)
    return Mixture(rand(6), rand(6, 5, 7) ** 6, phrases=4)


class Forgetful(Denoiser):
    """A source whose features are nan wherever a step did not say that it would read them."""

    def __init__(self, inner: Denoiser) -> None:
        self.inner, self.vocab_size, self.length = inner, inner.vocab_size, inner.length
        self.name, self.digest = "forgetful", "forgetful"
        self.forgotten = 0

    def body(self, tokens: Tensor, t: float | Tensor) -> Tensor:
        raise AssertionError("the sampler says what it needs")

    def body_at(self, tokens: Tensor, t: float | Tensor, needed: Needed) -> Tensor:
        features, index = self.inner.body(tokens, t).flatten(0, 1), needed()
        kept = torch.full_like(features, math.nan)
        every = torch.arange(len(features)) if index is None else index
        kept[every] = features[every]
        self.forgotten += len(features) - len(every)
        return kept.view(*tokens.shape, -1)

    def head(self, features: Tensor) -> Tensor:
        return features


MODELS = {"mixture": generic("mixture"), "markov": generic("markov"), "posterior": Posterior(generic("mixture"))}
WORDS = source("exact:words")


def walk(
    model: Denoiser, sampler: Sampler, n: int = 3, fixed: Tensor | None = None, replay: Memory | None = None, **how
) -> tuple[Context, list[State], list[StepInfo]]:
    """Every state, the start included, and every info of a batch."""
    given = torch.full((n, model.length), -1) if fixed is None else fixed
    ctx = open_context(model, CounterRNG(SEED, torch.arange(n)), given, **how)
    start = begin(sampler, ctx, replay)
    states, infos = zip(*generate(sampler, ctx, start), strict=True)
    return ctx, [start, *states], list(infos)


def selection(memory: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The call that committed each position, NEVER where none did, and the labels; nothing for the native sampler."""
    return (memory[1].clamp(max=NEVER), memory[0]) if memory else ()


def equal(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(selection(one), selection(other), strict=True))


def as_tensor(entries: dict[int, int], length: int, empty: int) -> list[int]:
    return [entries.get(i, empty) for i in range(length)]


# -- Algorithm 1 in plain Python --------------------------------------------------------------------------------------

BASE, NATIVE, MEND = CRS(nfe=8), Native(nfe=8), Mend(nfe=8, budget=5.0)
VARIED = [
    BASE,
    NATIVE,
    NATIVE.replace(temperature=0.8, final_step="sample"),
    NATIVE.replace(temperature=1.3, top_p=0.8, late_top_p=0.9),
    *(BASE.replace(temperature=t) for t in (0.5, 1.3)),
    BASE.replace(temperature=0.8, top_p=0.9, final_step="sample", values="nucleus"),
    BASE.replace(temperature=0.8, values="second"),
    BASE.replace(nfe=2),
    BASE.replace(nfe=3, warmup=0.0),
    BASE.replace(warmup=0.0),
    BASE.replace(warmup=1.0),
    BASE.replace(warmup=0.6),
    *(BASE.replace(horizon=h) for h in (1, 2, 3)),
    *(BASE.replace(budget=b) for b in (0.0, 0.05, 5.0)),
    *(BASE.replace(spacing=s) for s in (0, 1, 30)),
    *(BASE.replace(count=c) for c in (0, 1, 2, 20)),
    *(BASE.replace(top_p=p) for p in (0.9, 0.3)),
    BASE.replace(top_p=0.9, boundary="paper"),
    BASE.replace(late_top_p=0.5),
    BASE.replace(top_p=0.6, late_top_p=1.0),
    BASE.replace(grid="uniform"),
    BASE.replace(final_step="sample"),
    BASE.replace(final_step="sample", top_p=0.7, horizon=2),
    *(BASE.replace(values=v) for v in ("second", "nucleus", "refreshed", "refreshed-half", "refreshed-in-turn")),
    BASE.replace(values="nucleus", value_top_p=0.5, spacing=0),
    BASE.replace(values="refreshed", horizon=2, spacing=0),
    BASE.replace(values="refreshed-in-turn", horizon=3, spacing=1, write="both"),
    *(BASE.replace(write=w) for w in ("output", "both")),
    BASE.replace(write="both", final_step="sample", horizon=1),
    BASE.replace(write="output", values="second"),
    NATIVE.replace(top_k=2, final_step="sample"),
    NATIVE.replace(min_p=0.4, top_p=0.9, final_step="sample"),
    BASE.replace(top_k=3, min_p=0.1, late_top_p=0.8),
    *(BASE.replace(final_step="keep", horizon=h, top_p=0.8) for h in (None, 1, 3)),
    BASE.replace(final_step="keep", write="output"),
    MEND,
    *(MEND.replace(mend=m, spacing=0) for m in (0, 1, 20)),
    *(MEND.replace(apart=a, mend=20, spacing=0) for a in (0, 1, 9)),
    *(MEND.replace(turns=t, mend=3, spacing=0) for t in (2, 3)),
    *(MEND.replace(final_step=e, mend=3, spacing=0) for e in ("argmax", "sample")),
    MEND.replace(mend=4, horizon=2, spacing=0, write="both"),
    MEND.replace(mend=4, values="second", spacing=0),
    MEND.replace(mend=4, temperature=0.8, top_k=3),
]


def agree(model: Denoiser, sampler: Sampler, n: int, fixed: dict[int, int], backend=sparse.BACKEND) -> None:
    out = limpet.sample(model, sampler, n=n, seed=SEED, fixed=fixed, backend=backend)
    for i in range(n):
        one = plain.run(model, sampler.to_dict(), SEED, i, fixed)
        assert out.tokens[i].tolist() == one.tokens
        assert out.committed[i] == len(one.committed_at)
        for committed_at, labels in [selection(out.memory)] if out.memory else []:
            assert committed_at[i].tolist() == as_tensor(one.committed_at, model.length, NEVER)
            assert (labels[i] * (committed_at[i] != NEVER)).tolist() == as_tensor(one.labels, model.length, 0)


def short(sampler: Sampler) -> str:
    """What sets a sampler apart, as a test's name."""
    return sampler.caption if sampler.nfe == 8 else f"{sampler.caption} nfe={sampler.nfe}"


@pytest.mark.parametrize("sampler", VARIED, ids=short)
def test_a_step_reads_only_what_it_asked_for(sampler: Sampler) -> None:
    forgetful = Forgetful(MODELS["mixture"])
    one, other = (limpet.sample(model, sampler, n=3, seed=SEED) for model in (MODELS["mixture"], forgetful))
    assert torch.equal(one.tokens, other.tokens)
    assert equal(one.memory, other.memory)
    assert forgetful.forgotten > 0 or sampler.nfe == 2


@pytest.mark.parametrize("sampler", VARIED, ids=short)
@pytest.mark.parametrize("model", MODELS)
def test_the_sampler_is_algorithm_1(model: str, sampler: Sampler) -> None:
    agree(MODELS[model], sampler, 2, {})


STEPS = {
    "nfe": st.integers(2, 7),
    "warmup": st.floats(0, 1),
    "temperature": st.just(1.0) | st.floats(0.4, 2),
    "top_p": st.floats(0.1, 1) | st.just(1.0),
    "late_top_p": st.none() | st.floats(0.1, 1),
    "final_step": st.sampled_from(["argmax", "sample"]),
    "grid": st.sampled_from(["two-piece", "uniform", "quadratic"]),
    "interleave": st.booleans(),
    "boundary": st.sampled_from(["released", "paper"]),
    "top_k": st.none() | st.integers(1, 5),
    "min_p": st.just(0.0) | st.floats(0, 1),
}
LABELS = {
    **STEPS,
    "horizon": st.none() | st.integers(1, 4),
    "budget": st.floats(0, 2),
    "spacing": st.integers(0, 6),
    "count": st.none() | st.integers(0, 8),
    "values": st.sampled_from(["argmax", "second", "nucleus", "refreshed", "refreshed-half", "refreshed-in-turn"]),
    "value_top_p": st.floats(0.1, 1),
    "write": st.sampled_from(["input", "output", "both"]),
    "final_step": st.sampled_from(["argmax", "sample", "keep"]),
}
MENDS = {"mend": st.none() | st.integers(0, 8), "apart": st.integers(0, 6), "turns": st.none() | st.integers(1, 3)}
SAMPLERS = st.builds(Native, **STEPS) | st.builds(CRS, **LABELS) | st.builds(Mend, **LABELS, **MENDS)
FIXED = st.dictionaries(st.integers(0, 19), st.integers(0, 6), max_size=8)


@settings(max_examples=80)
@given(sampler=SAMPLERS, fixed=FIXED, model=st.sampled_from(sorted(MODELS)), backend=st.sampled_from([sparse, dense]))
def test_any_sampler_with_anything_fixed_is_algorithm_1(
    sampler: Sampler, fixed: dict[int, int], model: str, backend
) -> None:
    agree(MODELS[model], sampler, 1, fixed, backend.BACKEND)


@pytest.mark.parametrize("values", ["recorded", "argmax", "second"])
def test_a_replay_under_another_sampler_is_algorithm_1(values: str) -> None:
    model, n = MODELS["mixture"], 2
    taken = limpet.sample(model, BASE, n=n, seed=SEED).memory
    sampler = BASE.replace(values=values, top_p=0.8, budget=0.0)
    out = limpet.sample(model, sampler, n=n, seed=SEED, replay=taken)
    for i in range(n):
        when = {p: r for p, r in enumerate(taken.committed_at[i].tolist()) if r < NEVER}
        what = {p: taken.labels[i, p].item() for p in when}
        one = plain.run(model, sampler.to_dict(), SEED, i, replay=when, recorded=what)
        assert out.tokens[i].tolist() == one.tokens
        assert one.committed_at == when
        assert values != "recorded" or one.labels == what


def test_a_model_that_predicts_a_posterior_gives_the_same_samples() -> None:
    """The conversion is exact: through either kind of model the path is one path."""
    for sampler in (
        BASE,
        NATIVE,
        BASE.replace(horizon=2, final_step="sample", top_p=0.9),
        NATIVE.replace(temperature=0.8, top_p=0.9),
        BASE.replace(temperature=1.3),
    ):
        one, other = (limpet.sample(MODELS[name], sampler, n=20, seed=SEED) for name in ("mixture", "posterior"))
        assert torch.equal(one.tokens, other.tokens)
        assert equal(one.memory, other.memory)


@pytest.mark.parametrize("name", ["mixture", "markov"])
def test_native_knows_of_no_labels(name: str) -> None:
    """Against a loop that knows of no labels at all; and where CRS selects nothing, no parameter of the labels matters."""
    model, n, nfe = MODELS[name], 5, 8
    times = plain.grid(nfe, 0.33, "two-piece")
    out = limpet.sample(model, Native(nfe=nfe), n=n, seed=SEED)
    for sample in range(n):

        def uniforms(call: int, position: int, purpose: int, sample: int = sample) -> tuple[float, float]:
            return literal.uniforms(SEED, sample, call, position, purpose)

        state = [int(uniforms(0, i, plain.START)[0] * model.vocab_size) for i in range(model.length)]
        for r in range(nfe - 1):
            distributions = plain.probs_of(model, state, times[r])
            signals = 1 - 0.999 * times[r], 1 - 0.999 * times[r + 1]
            state = [
                plain.move(distributions[i], z, *signals, uniforms(r, i, plain.COINS), uniforms(r, i, plain.TOKENS))
                for i, z in enumerate(state)
            ]
        assert out.tokens[sample].tolist() == [
            plain.ranked(probs)[0] for probs in plain.probs_of(model, state, times[-1])
        ]
    assert out.memory == ()
    assert not out.committed.any()
    for ignored in ({"budget": 2.0}, {"spacing": 0}, {"horizon": 2}, {"values": "second"}, {"write": "both"}):
        other = limpet.sample(model, CRS(nfe=nfe, count=0, **ignored), n=n, seed=SEED)
        assert torch.equal(out.tokens, other.tokens)
        assert not other.committed.any()


# -- bit identity -----------------------------------------------------------------------------------------------------

ARMS = {
    "native": Native(nfe=8),
    "top-p": Native(nfe=8, top_p=0.9),
    "crs": CRS(nfe=8),
    "horizon 2, ancestral, nucleus labels": CRS(nfe=8, horizon=2, final_step="sample", values="nucleus"),
    "cool": CRS(nfe=8, temperature=0.8),
}


@pytest.mark.parametrize(
    ("name", "arm"),
    [
        *itertools.product(["exact:words", "exact:chain", "exact:verses"], ["native", "crs"]),
        ("exact:words", "top-p"),
        ("exact:words", "horizon 2, ancestral, nucleus labels"),
        ("exact:words", "cool"),
    ],
)
def test_a_sample_is_the_same_in_any_company(name: str, arm: str) -> None:
    """Batch size 1, 2, 7 and 14, alone by `first=`, and with a prefix of its own among other prefixes."""
    model = source(name)
    together = limpet.sample(model, ARMS[arm], n=14, seed=SEED, batch_size=14)
    for batch_size in (1, 2, 7):
        apart = limpet.sample(model, ARMS[arm], n=14, seed=SEED, batch_size=batch_size)
        assert torch.equal(apart.tokens, together.tokens)
        assert equal(apart.memory, together.memory)
    for first, n in ((13, 1), (5, 3)):
        some = limpet.sample(model, ARMS[arm], n=n, seed=SEED, first=first)
        assert torch.equal(some.tokens, together.tokens[first : first + n])
    prefixes = torch.arange(14 * 3).view(14, 3) % model.vocab_size
    prefixed = limpet.sample(model, ARMS[arm], n=14, seed=SEED, prefix=prefixes)
    alone = limpet.sample(model, ARMS[arm], n=1, seed=SEED, prefix=prefixes[9:10], first=9)
    assert torch.equal(alone.tokens[0], prefixed.tokens[9])


def test_arms_that_run_beside_each_other_do_not_meet() -> None:
    """All arms on one path, one call each in turn, give what they give alone; and other seeds differ."""
    ctx = open_context(WORDS, CounterRNG(SEED, torch.arange(3)), torch.full((3, WORDS.length), -1))
    walks = [generate(sampler, ctx) for sampler in ARMS.values()]
    last = [row[-1] for row in zip(*itertools.zip_longest(*walks), strict=True)]
    for (state, _), sampler in zip(last, ARMS.values(), strict=True):
        alone = limpet.sample(WORDS, sampler, n=3, seed=SEED)
        assert torch.equal(state.tokens, alone.tokens)
        assert not torch.equal(limpet.sample(WORDS, sampler, n=3, seed=SEED + 1).tokens, alone.tokens)


def test_samples_of_one_seed_differ() -> None:
    tokens = limpet.sample(WORDS, ARMS["native"], n=50, seed=SEED).tokens
    assert len(tokens.unique(dim=0)) == 50


def test_arms_share_their_randomness() -> None:
    """Same start, and the same states for as long as what the denoiser sees is the same."""
    _, native, _ = walk(WORDS, ARMS["native"])
    _, crs, _ = walk(WORDS, ARMS["crs"])
    early = ARMS["crs"].warmup_calls
    for r in range(early + 2):
        assert torch.equal(native[r].tokens, crs[r].tokens)
    assert not torch.equal(native[early + 2].tokens, crs[early + 2].tokens)


# -- labels: when they are seen, what they touch ----------------------------------------------------------------------


@pytest.mark.parametrize("horizon", [1, 2, 3, 5, 100, None])
@pytest.mark.parametrize("trace", [False, True])
def test_a_label_is_in_the_next_h_inputs_and_in_no_other(horizon: int | None, trace: bool) -> None:
    sampler = CRS(nfe=12, horizon=horizon)
    _, states, infos = walk(WORDS, sampler, trace=trace)
    assert len(infos) == 12
    committed_at = torch.full_like(states[0].tokens, 10**6)
    labels = torch.zeros_like(states[0].tokens)
    reach = math.inf if horizon is None else horizon
    for r, (state, info) in enumerate(zip(states, infos, strict=False)):
        visible = (committed_at + 1 <= r) & (r <= committed_at + reach)
        assert torch.equal(info.marks["visible"], visible)
        assert torch.equal(info.marks["committed"], committed_at < r)
        assert torch.equal(info.input, torch.where(visible, labels, state.tokens))
        assert info.call == r
        assert info.t == sampler.times[r]
        chosen = info.marks["chosen"]
        assert not (chosen & (committed_at < 10**6)).any()  # none is committed twice, expired or not
        top = WORDS.body(info.input, info.t).argmax(-1)
        labels = torch.where(chosen, top, labels)
        committed_at = torch.where(chosen, r, committed_at)
        assert chosen.any() == (sampler.warmup_calls <= r < 11)
        after = states[r + 1]
        assert after.call == r + 1
        assert torch.equal(after.memory.committed_at < NEVER, committed_at < 10**6)
        assert torch.equal(after.memory.labels * (committed_at < 10**6), labels)


def test_new_labels_do_not_touch_their_own_step() -> None:
    """Two paths that part at the labels of call r have one state after r; their inputs then differ at those labels."""
    sampler = CRS(nfe=10)
    _, _, infos = walk(WORDS, sampler)
    taken = limpet.sample(WORDS, sampler, n=3, seed=SEED).memory
    for r in range(sampler.warmup_calls, 9):
        arms = [
            walk(
                WORDS,
                sampler,
                trace=True,
                replay=taken._replace(committed_at=taken.committed_at.masked_fill(late, NEVER)),
            )
            for late in (taken.committed_at >= r, taken.committed_at > r)
        ]
        (_, without, infos_without), (_, with_, infos_with) = arms
        for call in range(r + 2):
            assert torch.equal(without[call].tokens, with_[call].tokens)
        assert torch.equal(infos_without[r].input, infos_with[r].input)
        chosen = infos[r].marks["chosen"]
        assert torch.equal(infos_with[r].marks["chosen"], chosen)
        expected = torch.where(chosen, taken.labels, infos_without[r + 1].input)
        assert torch.equal(infos_with[r + 1].input, expected)
    assert not torch.equal(without[-1].tokens, with_[-1].tokens)


def test_the_transition_starts_from_the_state_not_from_the_input() -> None:
    """Under a label the state keeps moving by its own bridge: each step again, from the state and the input's distribution."""
    ctx, states, infos = walk(MODELS["mixture"], CRS(nfe=8, final_step="sample"))
    signals = [ctx.signal(info.t) for info in infos] + [1.0]
    assert signals[:-1] == pytest.approx([1 - 0.999 * info.t for info in infos], abs=1e-15)
    under = 0
    for r, info in enumerate(infos):
        distributions = [plain.probs_of(MODELS["mixture"], row, info.t) for row in info.input.tolist()]
        for b, i in itertools.product(range(3), range(20)):
            pairs = [literal.uniforms(SEED, b, r, i, purpose) for purpose in (plain.COINS, plain.TOKENS)]
            z = states[r].tokens[b, i].item()
            assert states[r + 1].tokens[b, i] == plain.move(distributions[b][i], z, *signals[r : r + 2], *pairs)
            under += bool(info.marks["visible"][b, i]) and z != info.input[b, i].item()
    assert under > 50  # there were labels over other tokens


@pytest.mark.parametrize("values", ["argmax", "second", "nucleus", "refreshed"])
def test_what_a_label_holds(values: str) -> None:
    """Each value again, from the distribution that the call saw."""
    _, states, infos = walk(WORDS, CRS(nfe=10, values=values, spacing=1, value_top_p=0.8), n=4)
    kinds = set()
    for r, info in enumerate(infos[:-1]):
        before, after = states[r].memory.labels, states[r + 1].memory.labels
        chosen, visible = info.marks["chosen"], info.marks["visible"]
        probs = WORDS.body(info.input, info.t).exp()
        ranked = probs.sort(dim=-1, descending=True, stable=True).indices
        if values == "refreshed":
            written = chosen | visible
            assert torch.equal(after[written], ranked[written][:, 0])
            kinds.add(bool((after != before)[visible].any()))
        else:
            written = chosen
            if values == "nucleus":
                nucleus = truncation.nucleus(probs.flatten(0, 1), 0.8, "released").view(probs.shape)
                alone = (nucleus.sum(-1) == 1) & written
                assert torch.equal(after[alone], ranked[alone][:, 1])
                inside = nucleus.gather(-1, after[..., None])[..., 0]
                assert (inside | alone)[written].all()
                assert (after != ranked[..., 0])[written].all()
                several = written & ~alone
                kinds |= {("alone", bool(alone.any())), ("lower", bool((after != ranked[..., 1])[several].any()))}
            else:
                assert torch.equal(after[written], ranked[written][:, 0 if values == "argmax" else 1])
        assert torch.equal(after[~written], before[~written])
    assert True in kinds or values != "refreshed"
    assert {("alone", True), ("lower", True)} <= kinds or values != "nucleus"


def test_nucleus_labels_have_the_law_of_the_nucleus_without_the_argmax() -> None:
    """20,000 labels of one distribution, chi-square, error 1e-5."""
    probs = [0.1, 0.4, 0.05, 0.2, 0.25]
    model = Constant(probs, 20)
    sampler = CRS(nfe=2, warmup=0.0, spacing=0, count=20, budget=1.0, values="nucleus", value_top_p=0.9)
    memory = limpet.sample(model, sampler, n=1000, seed=1).memory
    assert (memory.committed_at == 0).all()
    counts = memory.labels.flatten().bincount(minlength=5).numpy()
    assert literal.chi_square(counts, np.array([0.1, 0, 0, 0.2, 0.25]) / 0.55) > 1e-5


def test_what_is_written_where() -> None:
    """`output`: the native path, with the labels copied at the end. `both`: CRS, with the labels copied at the end."""
    native, crs = (limpet.sample(WORDS, ARMS[arm], n=5, seed=SEED) for arm in ("native", "crs"))
    output = limpet.sample(WORDS, CRS(nfe=8, write="output"), n=5, seed=SEED)
    both = limpet.sample(WORDS, CRS(nfe=8, write="both"), n=5, seed=SEED)
    for copied, base in ((output, native), (both, crs)):
        committed = copied.memory.committed_at < NEVER
        assert torch.equal(copied.tokens, torch.where(committed, copied.memory.labels, base.tokens))
    assert equal(both.memory, crs.memory)
    assert not torch.equal(both.tokens, crs.tokens)
    _, _, infos = walk(WORDS, CRS(nfe=8, write="output"))
    assert not any(info.marks["visible"].any() for info in infos)
    assert any(info.marks["chosen"].any() for info in infos)
    # The paper's control: the labels that CRS stored, on the path that never sees them.
    final_only = limpet.sample(WORDS, CRS(nfe=8, write="output", values="recorded"), n=5, seed=SEED, replay=crs.memory)
    committed = crs.memory.committed_at < NEVER
    assert torch.equal(final_only.tokens, torch.where(committed, crs.memory.labels, native.tokens))


@pytest.mark.parametrize("arm", [name for name, sampler in ARMS.items() if isinstance(sampler, CRS)])
def test_a_replay_reproduces(arm: str) -> None:
    out = limpet.sample(WORDS, ARMS[arm], n=5, seed=SEED)
    again = limpet.sample(WORDS, ARMS[arm], n=5, seed=SEED, replay=out.memory, batch_size=2)
    recorded = limpet.sample(WORDS, ARMS[arm].replace(values="recorded"), n=5, seed=SEED, replay=out.memory)
    for other in (again, recorded):
        assert torch.equal(other.tokens, out.tokens)
        assert equal(other.memory, out.memory)
        assert torch.equal(other.committed, out.committed)


def test_a_replay_of_nothing_is_native() -> None:
    """Where a path committed nothing, neither does its replay, whatever it could have committed."""
    nothing = limpet.sample(WORDS, CRS(nfe=8, count=0), n=5, seed=SEED)
    again = limpet.sample(WORDS, CRS(nfe=8), n=5, seed=SEED, replay=nothing.memory)
    native = limpet.sample(WORDS, Native(nfe=8), n=5, seed=SEED)
    assert torch.equal(again.tokens, native.tokens)
    assert not again.committed.any()


@pytest.mark.parametrize(
    "sampler",
    [
        *ARMS.values(),
        CRS(nfe=8, top_p=0.8),
        CRS(nfe=8, horizon=1),
        CRS(nfe=8, write="both"),
        CRS(nfe=8, write="output"),
        CRS(nfe=8, values="refreshed"),
        CRS(nfe=8, final_step="sample"),
    ],
    ids=short,
)
def test_a_trace_changes_no_token(sampler: Sampler) -> None:
    """A traced path looks at every distribution and draws every state; what it selects and returns is the same."""
    _, states, infos = walk(WORDS, sampler)
    _, traced, traced_infos = walk(WORDS, sampler, trace=True)
    assert torch.equal(states[-1].tokens, traced[-1].tokens)
    assert equal(states[-1].memory, traced[-1].memory)
    for plain_info, info in zip(infos, traced_infos, strict=True):
        assert torch.equal(plain_info.input, info.input)
        assert plain_info.marks.keys() == info.marks.keys()
        assert all(torch.equal(mask, info.marks[name]) for name, mask in plain_info.marks.items())
        assert torch.isfinite(info.outcome.deficit).all()
        probs = (WORDS.body(info.input, info.t) / sampler.temperature).softmax(-1)
        torch.testing.assert_close(info.outcome.deficit, 1 - probs.amax(-1), rtol=1e-9, atol=1e-12)


def test_a_fork_goes_on_as_its_own_path() -> None:
    """From native's state at the end of warmup, native, late top-p and CRS go on as if they had started alone; each
    with the memory that it begins with."""
    ctx, states, _ = walk(WORDS, NATIVE)
    for sampler in (NATIVE, NATIVE.replace(late_top_p=0.9), BASE):
        assert sampler.shared(NATIVE) >= NATIVE.warmup_calls
        start = states[NATIVE.warmup_calls]._replace(memory=sampler.begin(ctx).memory)
        *_, (forked, _) = generate(sampler, ctx, start)
        _, alone, _ = walk(WORDS, sampler)
        assert torch.equal(forked.tokens, alone[-1].tokens)
        assert equal(forked.memory, alone[-1].memory)


# -- fixed positions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampler",
    [
        *ARMS.values(),
        CRS(nfe=8, write="both", values="second"),
        CRS(nfe=8, write="output", values="nucleus"),
        CRS(nfe=8, values="refreshed", spacing=0, horizon=3),
        CRS(nfe=8, values="refreshed-in-turn", write="both"),
        CRS(nfe=8, top_p=0.5, final_step="sample", write="both"),
    ],
    ids=short,
)
@pytest.mark.parametrize("trace", [False, True])
def test_fixed_tokens_hold_everywhere(sampler: Sampler, trace: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (3, WORDS.length)
    fixed = torch.where(torch.rand(shape, generator=generator) < 0.3, torch.randint(27, shape, generator=generator), -1)
    held = fixed >= 0
    ctx, states, infos = walk(WORDS, sampler, fixed=fixed, trace=trace)
    for state in states:
        assert torch.equal(state.tokens[held], fixed[held])
        assert not state.memory or (state.memory.committed_at[held] >= NEVER).all()
    for info in infos:
        assert torch.equal(info.input[held], fixed[held])
        assert not any(mask[held].any() for mask in info.marks.values())
    # Count and budget are shares of what is generated.
    generated = (~held).sum(-1)
    assert torch.equal(ctx.generated, generated)
    if isinstance(sampler, CRS):
        most, allowance = sampler.limits(ctx)
        assert torch.equal(most, -(-generated // 5))
        torch.testing.assert_close(allowance, generated / 10, check_dtype=False)


@pytest.mark.parametrize("values", ["argmax", "recorded"])
def test_a_replay_cannot_select_a_fixed_position(values: str) -> None:
    out = limpet.sample(WORDS, ARMS["crs"], n=2, seed=SEED)
    fixed = torch.full((2, WORDS.length), -1)
    fixed[:, :40] = 3
    sampler = ARMS["crs"].replace(write="both", values=values)
    again = limpet.sample(WORDS, sampler, n=2, seed=SEED, fixed=fixed, replay=out.memory)
    assert (again.tokens[:, :40] == 3).all()
    assert (again.memory.committed_at[:, :40] == NEVER).all()
    assert torch.equal(again.memory.committed_at[:, 40:], out.memory.committed_at[:, 40:].clamp(max=NEVER))
    _, _, infos = walk(WORDS, sampler, n=2, fixed=fixed, replay=out.memory)
    for info in infos:
        assert (info.input[:, :40] == 3).all()
        assert not any(mask[:, :40].any() for mask in info.marks.values())


def test_everything_fixed() -> None:
    tokens = WORDS.draw(2, 0)
    for sampler in ARMS.values():
        assert torch.equal(limpet.sample(WORDS, sampler, n=2, fixed=tokens).tokens, tokens)


def test_given_context_is_used() -> None:
    """The first four letters of each word given, the fifth is a space: the source knows."""
    fixed = WORDS.draw(3, 1)
    fixed[:, 4::5] = -1
    out = limpet.sample(WORDS, ARMS["native"], n=3, fixed=fixed)
    assert (out.tokens[:, 4::5] == 0).all()


# -- exact output distributions ------------------------------------------------------------------------------------------------


class Constant(Denoiser):
    """One distribution everywhere, whatever it sees."""

    def __init__(self, probs: list[float], length: int) -> None:
        self.vocab_size, self.length, self.name, self.digest = len(probs), length, "constant", "constant"
        self.log_probs = torch.tensor(probs, dtype=torch.float64).log()

    def body(self, tokens: Tensor, t: float | Tensor) -> Tensor:
        return self.log_probs.expand(*tokens.shape, -1)

    def head(self, features: Tensor) -> Tensor:
        return features


def three_symbols() -> Markov:
    generator = torch.Generator().manual_seed(3)
    return Markov(torch.rand(3, generator=generator).double(), torch.rand(3, 3, generator=generator).double(), 5)


CHAIN = three_symbols()
EVERY = torch.tensor(list(itertools.product(range(3), repeat=5)))
TRUTH = CHAIN.log_prob(EVERY).exp().numpy()


def native_output_law(sampler: Native) -> np.ndarray:
    """The distribution over all 243 states, call by call: each state's row is a product of five reverse distributions."""
    times = plain.grid(sampler.nfe, sampler.warmup, sampler.grid)
    signals = [1 - 0.999 * t for t in times]
    mass = np.full(len(EVERY), 1 / len(EVERY))
    warmup = round(sampler.warmup * (sampler.nfe - 1))
    for r, signal in enumerate(signals):
        distributions = CHAIN.probs(EVERY, torch.full((len(EVERY),), signal, dtype=torch.float64)) ** (
            1 / sampler.temperature
        )
        distributions /= distributions.sum(-1, keepdim=True)
        if r == sampler.nfe - 1 and sampler.final_step == "argmax":
            step = np.eye(3)[distributions.argmax(-1).numpy()]
        else:
            p = sampler.top_p if r < warmup or sampler.late_top_p is None else sampler.late_top_p
            signal_s = signals[r + 1] if r < sampler.nfe - 1 else 1.0
            step = process.reverse_probs(
                truncation.restrict(distributions, p, sampler.boundary), EVERY, signal, signal_s
            ).numpy()
        mass = np.einsum("x,xa,xb,xc,xd,xe->abcde", mass, *step.transpose(1, 0, 2)).reshape(-1)
    return mass


def distance(probs: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(probs - other).sum() / 2)


def frequencies(sampler: Sampler, n: int, seed: int = SEED) -> np.ndarray:
    tokens = limpet.sample(CHAIN, sampler, n=n, seed=seed, batch_size=20_000).tokens
    return (tokens * 3 ** torch.arange(5).flip(0)).sum(-1).bincount(minlength=243).numpy()


ANCESTRAL = Native(final_step="sample")


@pytest.mark.parametrize("grid", ["two-piece", "uniform"])
def test_the_native_output_law_goes_to_the_truth(grid: str) -> None:
    """Total variation about .04, .009, .0025 at 16, 64, 256 calls: it falls fourfold as the steps are cut in four."""
    apart = [distance(native_output_law(ANCESTRAL.replace(nfe=nfe, grid=grid)), TRUTH) for nfe in (4, 16, 64, 256)]
    assert apart[1:] == pytest.approx([0.04, 0.009, 0.0025], rel=0.25)
    assert all(3 < coarse / fine < 6 for coarse, fine in itertools.pairwise(apart))


@pytest.mark.parametrize(
    ("sampler", "n"),
    [
        (ANCESTRAL.replace(nfe=8), 200_000),
        (ANCESTRAL.replace(nfe=5, final_step="argmax"), 60_000),
        (ANCESTRAL.replace(nfe=5, top_p=0.8, boundary="paper"), 60_000),
        (ANCESTRAL.replace(nfe=5, late_top_p=0.6, grid="uniform"), 60_000),
        (ANCESTRAL.replace(nfe=5, temperature=0.8), 60_000),
        (ANCESTRAL.replace(nfe=5, temperature=1.3, top_p=0.8), 60_000),
    ],
    ids=["sample", "argmax", "top-p", "late top-p", "cool", "hot with top-p"],
)
def test_native_frequencies_have_the_exact_output_law(sampler: Native, n: int) -> None:
    """Chi-square over the 243 outputs, overall error 1e-5; and `output_distribution` is that distribution."""
    probs = native_output_law(sampler)
    assert probs.sum() == pytest.approx(1, abs=1e-12)
    np.testing.assert_allclose(output_distribution(CHAIN, sampler).numpy(), probs, rtol=0, atol=1e-12)
    counts = frequencies(sampler, n)
    assert literal.chi_square(counts, probs) > 1e-5 / 6
    if sampler.temperature != 1:
        assert literal.chi_square(counts, native_output_law(sampler.replace(temperature=1.0))) < 1e-9


@pytest.mark.parametrize(
    "sampler",
    [
        CRS(nfe=5, spacing=1),
        CRS(nfe=5, spacing=0, count=2, horizon=1, final_step="sample", top_p=0.9),
        CRS(nfe=5, spacing=1, write="both", values="second"),
    ],
    ids=["crs", "horizon 1", "second-ranked in the output"],
)
def test_frequencies_with_labels_have_the_exact_output_law(sampler: CRS) -> None:
    """60,000 samples each, chi-square over the 243 outputs, overall error 1e-5; the native distribution is refused."""
    probs = output_distribution(CHAIN, sampler).numpy()
    assert probs.sum() == pytest.approx(1, abs=1e-12)
    counts = frequencies(sampler, 60_000)
    assert literal.chi_square(counts, probs) > 1e-5 / 3
    native = sampler.opening()
    assert native == Native(nfe=5, final_step=sampler.final_step, top_p=sampler.top_p)
    assert literal.chi_square(counts, output_distribution(CHAIN, native).numpy() + 1e-12) < 1e-9


@pytest.mark.long
def test_256_calls_sample_the_truth() -> None:
    """200,000 samples are within 0.02 of the true distribution in total variation, their own scatter included."""
    counts = frequencies(ANCESTRAL.replace(nfe=256), 200_000)
    assert distance(counts / counts.sum(), TRUTH) < 0.02
    assert literal.chi_square(counts, native_output_law(ANCESTRAL.replace(nfe=256))) > 1e-5


# -- what it costs and what it brings ---------------------------------------------------------------------------------


def long_words() -> Mixture:
    """The words without their spaces, 256 to a sequence: a confidence that rises along the path as a model's does."""
    return Mixture(WORDS.weights, WORDS.distributions[:, :4], phrases=256)


@pytest.mark.parametrize(("sampler", "most"), [(Native(), 0.17), (CRS(), 0.43)])
def test_lazy_runs_the_head_on_few_rows(sampler: Sampler, most: float) -> None:
    """Length 1024, 64 calls: the share of head rows, counted, of native and of CRS."""
    model = long_words()
    assert model.length == 1024
    rows = 0
    head = model.head

    def counting(features: Tensor) -> Tensor:
        nonlocal rows
        rows += features.shape[:-1].numel()
        return head(features)

    model.head = counting
    out = limpet.sample(model, sampler, n=2, seed=SEED)
    assert out.head_rows == rows / (64 * 2 * 1024)
    assert 0.1 < out.head_rows <= most
    if isinstance(sampler, CRS):
        assert out.committed.double().mean() > 900  # as CRS on a real model, which selects 960 to 990


class Noise(Denoiser):
    """Two tokens and a random deficit at every position of every call."""

    def __init__(self, length: int) -> None:
        self.vocab_size, self.length, self.name, self.digest = 2, length, "noise", "noise"
        self.generator = torch.Generator().manual_seed(0)

    def body(self, tokens: Tensor, t: float | Tensor) -> Tensor:
        deficit = torch.rand(tokens.shape, generator=self.generator, dtype=torch.float64) / 2
        return torch.stack([1 - deficit, deficit], -1).log()

    def head(self, features: Tensor) -> Tensor:
        return features


def test_random_deficits_at_8_calls_select_790_to_800() -> None:
    """Through the sampler itself, with its caps, its spacing and no reselection: the paper's 795.5 to 799.9 of 1024."""
    out = limpet.sample(Noise(1024), CRS(nfe=8), n=48, seed=SEED)
    assert 790 <= out.committed.double().mean() <= 800


def test_crs_lowers_true_nll_on_the_words() -> None:
    """8 calls, 128 samples with common randomness: below native and below top-p .9 by more than 5 standard errors."""
    nll = {
        arm: -WORDS.log_prob(limpet.sample(WORDS, ARMS[arm], n=128, seed=SEED).tokens) / WORDS.length
        for arm in ("native", "top-p", "crs")
    }
    for arm in ("native", "top-p"):
        gain = nll[arm] - nll["crs"]
        assert gain.mean() > 5 * gain.std() / 128**0.5
        assert nll["crs"].mean() < nll[arm].mean()
