"""The fused backend against the sparse one: by Triton's interpreter where there is no GPU, else on the GPU.

The kernels are the same either way. Equality is exact, because no uniform of these seeds is within rounding of an edge.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from backends import DEVICE, Case, case_of, same, step  # first: it decides who runs the kernels

pytest.importorskip("triton")

from limpet import CRS, registry
from limpet.diffusion import process, selection, transitions, truncation
from limpet.diffusion.backends import fastest, fused, released, sparse
from limpet.diffusion.rng import CounterRNG, Purpose
from limpet.generation import Inputs, rollout
from limpet.models import duo_triton
from limpet.models.duo import Duo, DuoShape
from thinned import thinned

trained_like = registry.from_file(f"{Path(__file__).parents[2] / 'tools/trained_like.py'}:trained_like")
SUPPORTS = {"full": {}, "top-p": {"top_p": 0.8}, "paper": {"top_p": 0.8, "boundary": "paper"}, "point": {"top_p": 0.05}}


def drawn_case(
    seed: int, shape: tuple[int, int, int], dtype: torch.dtype = torch.float32, tied: bool = False, **changes
) -> tuple[Tensor, Case]:
    """Random logits, some of them equal if `tied`, and a step that revises most positions and inspects some."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    batch, length, vocab_size = shape
    logits = 2 * torch.randn(shape, generator=generator, device=DEVICE)
    logits = ((2 * logits).round() / 2 if tied else logits).to(dtype)
    tokens = torch.randint(vocab_size, (batch, length), generator=generator, device=DEVICE)
    tokens[:, ::2] = logits[:, ::2].argmax(-1)  # likely tokens, for which coin two may disagree
    other = torch.randint(vocab_size, (batch, length), generator=generator, device=DEVICE)
    mask = torch.rand(batch, length, 3, generator=generator, device=DEVICE)
    values = {
        "model_input": torch.where(mask[..., 0] < 0.3, other, tokens),
        "revise": mask[..., 1] < 0.9,
        "inspect": mask[..., 2] < 0.4,
        "signal_t": 0.02,
        "signal_s": 0.6,
        "rng": CounterRNG(8200, torch.arange(batch, device=DEVICE) + 5),
        "call": 3,
    }
    return logits, case_of(tokens, vocab_size, **(values | changes))


def agree(logits: Tensor, case: Case, head=same) -> None:
    one, other = (step(each.BACKEND, logits, case, head) for each in (sparse, fused))
    assert torch.equal(one.tokens, other.tokens)
    assert torch.equal(one.top, other.top)
    torch.testing.assert_close(other.deficit, one.deficit, rtol=1e-6, atol=1e-12)
    if case.transition.against is not None:
        assert torch.equal(one.gain, other.gain)
    assert (one.tokens != case.transition.tokens).any()


@pytest.mark.parametrize(
    ("support", "dtype"),
    [*((support, torch.bfloat16) for support in SUPPORTS), ("full", torch.float32), ("top-p", torch.float64)],
)
def test_it_draws_what_sparse_draws(dtype: torch.dtype, support: str) -> None:
    agree(*drawn_case(1, (2, 8, 37), dtype, tied=dtype == torch.bfloat16, **SUPPORTS[support]))


@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_a_vocabulary_of_several_blocks(top_p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "BLOCK", 16)
    agree(*drawn_case(2, (2, 8, 83), tied=True, top_p=top_p))


METHODS = {
    "psi": transitions.psi(0.3, 0.6, 0.4),
    "coupled": transitions.coupled(0.3, 0.6, 0.5),
    "redraw": transitions.redraw(0.6),
    "all five": transitions.nested(0.3, 0.3, 0.1, 0.25, 0.2),
}


@pytest.mark.parametrize(("method", "top_p"), [(method, 0.7 if i % 2 else 1.0) for i, method in enumerate(METHODS)])
def test_every_route(method: str, top_p: float) -> None:
    logits, case = drawn_case(13, (2, 8, 37), tied=True, top_p=top_p, coins=METHODS[method])
    agree(logits, case)
    agree(logits, case.replace(against=None))


def test_every_support() -> None:
    for support in ({"top_k": 3}, {"min_p": 0.2}, {"top_k": 9, "min_p": 0.1, "top_p": 0.8}):
        agree(*drawn_case(14, (2, 8, 37), tied=True, **support))


@pytest.mark.parametrize(
    ("temperature", "dtype"),
    thinned([(0.5, torch.bfloat16), (1.3, torch.bfloat16), (1.0, torch.float32), (1.3, torch.float64)]),
)
def test_posteriors_and_temperatures(temperature: float, dtype: torch.dtype) -> None:
    """With and without top-p; the evidence is removed from a posterior first."""
    for top_p, convert in itertools.product((1.0, 0.8), (False, True)):
        changes = {"temperature": temperature, "top_p": top_p, "convert": convert, "signal_t": 0.3 if convert else 0.02}
        agree(*drawn_case(11, (2, 8, 37), dtype, tied=dtype == torch.bfloat16, **changes))


def test_chunks_and_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The final step, five rows of the head at a time, and logits whose rows are padded or transposed."""
    monkeypatch.setattr(fused, "CHUNK", 5 * 19)
    logits, case = drawn_case(4, (2, 8, 19), signal_t=0.4, signal_s=1.0)
    sizes = []

    def padded(rows: Tensor) -> Tensor:
        sizes.append(len(rows))
        return torch.nn.functional.pad(rows, (0, 13), value=100.0)[:, :19]  # the padding must not be read

    agree(logits, case, padded)
    assert max(sizes[len(sizes) // 2 :]) <= 5
    agree(logits, case, lambda rows: rows.T.contiguous().T)


def test_one_chunk_of_logits_is_held_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "CHUNK", 5 * 19)
    logits, case = drawn_case(4, (2, 8, 19))
    chunks: list[StorageWeakRef] = []

    class Ignored:
        """Replaces the kernel, because the interpreter keeps the arguments of a kernel."""

        def __getitem__(self, grid: tuple[int]):
            return lambda *arguments, **named: None

    monkeypatch.setattr(fused.kernels, "rows", Ignored())

    def head(rows: Tensor) -> Tensor:
        assert all(chunk.expired() for chunk in chunks)
        chunk = rows + 0
        chunks.append(StorageWeakRef(chunk.untyped_storage()))
        return chunk

    step(fused.BACKEND, logits, case, head)
    assert len(chunks) > 2


@pytest.mark.parametrize(("boundary", "kept"), [("released", {0, 1, 2}), ("paper", {0, 1})])
def test_an_exact_tie_at_the_edge_of_the_nucleus(boundary: str, kept: set[int]) -> None:
    """Four equal tokens and p = 1/2: the paper keeps two, the released code three; ties go to lower ids."""
    tokens = torch.full((4, 8), 3, device=DEVICE)
    case = case_of(tokens, 4, top_p=0.5, boundary=boundary, signal_t=1e-9, signal_s=1.0)
    drawn = step(fused.BACKEND, torch.zeros(4, 8, 4, device=DEVICE), case).tokens
    assert set(drawn.flatten().tolist()) == kept


def test_impossible_tokens() -> None:
    logits, case = drawn_case(6, (2, 8, 11), top_p=0.9)
    logits[..., ::2] = -torch.inf
    for temperature in (1.0, 0.5):
        agree(logits, case.replace(temperature=temperature))


@pytest.mark.parametrize("seed", [0, 8200, 2**31 + 7, 2**63 + 11, 2**64 - 1])
def test_the_uniforms_are_those_of_the_counter(seed: int) -> None:
    """Every position moves to a uniform token, which tells the bits that were used."""
    vocab_size = 1000
    rng = CounterRNG(seed, torch.tensor([0, 70000], device=DEVICE))
    tokens = torch.full((2, 6), vocab_size - 1, device=DEVICE)
    case = case_of(tokens, vocab_size, rng=rng, call=3, signal_t=1e-12, signal_s=1e-6, inspect=tokens < 0)
    flat = torch.zeros(12, vocab_size, device=DEVICE)
    moved = step(fused.BACKEND, tokens[..., None], case, lambda rows: flat[: len(rows)])
    coin, _ = rng.uniforms(3, torch.arange(6, device=DEVICE), Purpose.COINS)
    _, uniform = rng.uniforms(3, torch.arange(6, device=DEVICE), Purpose.TOKENS)
    assert ((coin >= 1e-6) & (coin < 1 - 1e-6)).all()
    assert torch.equal(moved.tokens, (uniform * vocab_size).long())


def test_samples_may_have_seeds_of_their_own() -> None:
    seeds = torch.tensor([0, -1, 8200, 2**62 + 11], device=DEVICE)
    rng = CounterRNG(seeds, torch.tensor([5, 6, 6, 0], device=DEVICE))
    for support in SUPPORTS.values():
        agree(*drawn_case(9, (4, 5, 19), rng=rng, **support))


def test_a_plan_names_the_needed_rows_and_fills_in_the_others() -> None:
    """The rows are those that the sparse backend computes, in order."""
    logits, case = drawn_case(8, (2, 8, 19))
    plan = fused.plan(*case)
    rows: list[Tensor] = []
    step(sparse.BACKEND, logits, case, lambda some: rows.append(some) or some)
    index = plan.needed()
    assert index.tolist() == sparse.plan(*case).needed().tolist()
    assert torch.equal(logits.flatten(0, 1)[index.long()], torch.cat(rows))
    assert plan.message.tolist() == [len(index), -1, -1]
    spared = torch.ones(logits.shape[:2].numel(), dtype=torch.bool, device=DEVICE)
    spared[index.long()] = False
    before = [part.flatten()[spared].clone() for part in plan.outcome]
    after = [part.flatten()[spared] for part in fused.advance(same, logits, plan)]
    assert all(map(torch.equal, before, after))
    assert torch.equal(before[0], case.transition.tokens.flatten()[spared])
    assert released.BACKEND.plan(*case).needed() is None

    nothing = torch.zeros_like(case.transition.revise)
    idle = case.replace(revise=nothing, inspect=nothing)
    assert len(fused.plan(*idle).needed()) == 0
    outcome = step(fused.BACKEND, logits, idle, lambda rows: pytest.fail("the head was called"))
    assert torch.equal(outcome.tokens, idle.transition.tokens)
    assert (outcome.deficit == torch.inf).all()
    assert (outcome.top == 0).all()


@pytest.mark.parametrize("spacing", [0, 1, 4])
def test_it_selects_what_the_selector_selects(spacing: int) -> None:
    """Deficits with many ties, count and budget of every kind, one limit for all samples or one for each. Some budgets
    are sums of deficits, where the order of additions decides: the kernel adds one by one, like torch on a CPU."""
    generator = torch.Generator(DEVICE).manual_seed(10)
    for length, digits in ((1, 1), (33, 1), (50, 3)):
        deficit = torch.rand(4, length, generator=generator, device=DEVICE, dtype=torch.float64).round(decimals=digits)
        eligible = torch.rand(4, length, generator=generator, device=DEVICE) < 0.7
        count = torch.tensor([0, 1, 5, length], device=DEVICE)
        budget = torch.tensor([1.0, 0.0, 0.55, torch.inf], dtype=torch.float64, device=DEVICE)
        for limits in ((count, budget), (length, budget), (count, 0.7), (3, 2.0)):
            on_cpu = (limit.cpu() if isinstance(limit, Tensor) else limit for limit in limits)
            expected = selection.select(deficit.cpu(), eligible.cpu(), *on_cpu, spacing)
            assert torch.equal(fused.select(deficit, eligible, *limits, spacing).cpu(), expected)


@pytest.mark.parametrize(
    "sampler",
    [CRS(nfe=4, spacing=1, late_top_p=0.8), CRS(nfe=4, temperature=0.8, horizon=1, final_step="sample")],
    ids=lambda sampler: sampler.caption,
)
def test_a_trajectory_equals_that_of_sparse(sampler: CRS) -> None:
    """Complete trajectories through plan, advance and select. Where there is a GPU, fused is the fastest backend."""
    assert (fastest(DEVICE) is fused.BACKEND) == (DEVICE == "cuda")
    model = Duo(trained_like(DuoShape(vocab_size=23, length=8, width=32, blocks=1, heads=2, hidden=32))).to(DEVICE)
    fixed, rng = torch.full((2, 8), -1, device=DEVICE), CounterRNG(1, torch.arange(2, device=DEVICE))
    both = (rollout(model, sampler, Inputs(fixed, rng, backend=each.BACKEND)) for each in (fused, sparse))
    for one, other in zip(*both, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert all(map(torch.equal, one.state.memory, other.state.memory))


def test_the_released_step_draws_from_the_same_distribution() -> None:
    """100,000 draws a case against the exact reverse distribution; a correct step fails with probability 1e-6."""
    torch.manual_seed(0)
    probs = torch.tensor([0.5, 0.2, 0.2, 0.1, 0.0], dtype=torch.float64)
    tokens = torch.ones(100, 1000, dtype=torch.long)
    for top_p in (1.0, 0.65):
        case = case_of(tokens, 5, seed=0, signal_s=0.7, top_p=top_p)
        outcome = step(released.BACKEND, probs.log().expand(100, 1000, 5), case)
        exact = process.reverse_probs(truncation.restrict(probs, top_p), torch.tensor(1), 0.4, 0.7)
        counts = outcome.tokens.flatten().bincount(minlength=5)
        statistic = ((counts - exact * 1e5) ** 2 / (exact * 1e5)).sum()
        assert float(torch.special.gammaincc(torch.tensor(2.0), statistic.float() / 2)) > 1e-6
        assert (outcome.top == 0).all()
        torch.testing.assert_close(outcome.deficit, torch.full(tokens.shape, 0.5, dtype=torch.float64))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("small", [0, 2**12])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float8"])
def test_sampling_never_waits_for_the_device(precision: str, small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Except after the last call, when non-finite logits are reported."""
    monkeypatch.setattr(duo_triton, "MAX_WHOLE", small)
    shape = DuoShape(vocab_size=1000, length=64, width=128, blocks=2, heads=2, hidden=128)
    model = Duo(trained_like(shape), precision=precision).to(DEVICE)
    fixed, rng = torch.full((4, 64), -1, device=DEVICE), CounterRNG(1, torch.arange(4, device=DEVICE))
    sampler = CRS(nfe=8)

    def all_calls() -> None:
        for _ in itertools.islice(rollout(model, sampler, Inputs(fixed, rng)), sampler.nfe):
            pass

    all_calls()
    torch.cuda.set_sync_debug_mode("error")
    try:
        all_calls()
    finally:
        torch.cuda.set_sync_debug_mode("default")
