"""The fused step and body against the plain ones: by Triton's interpreter where there is no GPU, else on the GPU.

The kernels are the same text either way. Equality with `steps/lazy.py` is exact here: no uniform of these seeds
falls within rounding of an edge."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path as File

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from backends import DEVICE, Case, case_of, same, step  # first: it says who runs the kernels

pytest.importorskip("triton")

from held import Held
from limpet import CRS, registry
from limpet.diffusion import process, selection, transitions, truncation
from limpet.diffusion.backends import Outcome, fastest, fused, released, sparse
from limpet.diffusion.rng import CounterRNG, Purpose
from limpet.models import duo_triton as fused_denoiser
from limpet.models import float8
from limpet.models.duo import AlignedHead, Duo, Network, Shape, in_float8, set_precision
from limpet.models.duo_triton import FusedBody
from limpet.samplers.context import generate, open_context

trained_like = registry.from_file(f"{File(__file__).parents[2] / 'tools/trained_like.py'}:trained_like")
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


def random_generator(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def drawn_case(
    seed: int, shape: tuple[int, int, int], dtype: torch.dtype = torch.float32, tied: bool = False, **changes
) -> tuple[Tensor, Case]:
    """Random logits, some of them equal if `tied`, and a step that revises most positions and inspects some."""
    generator = random_generator(seed)
    batch, length, vocab_size = shape
    logits = 2 * torch.randn(shape, generator=generator, device=DEVICE)
    logits = ((2 * logits).round() / 2 if tied else logits).to(dtype)
    tokens = torch.randint(vocab_size, (batch, length), generator=generator, device=DEVICE)
    tokens[:, ::2] = logits[:, ::2].argmax(
        -1
    )  # half are tokens that the distribution favours, where coin two has a say
    other = torch.randint(vocab_size, (batch, length), generator=generator, device=DEVICE)
    mask = torch.rand(batch, length, 3, generator=generator, device=DEVICE)
    values = {
        "seen": torch.where(mask[..., 0] < 0.3, other, tokens), "revise": mask[..., 1] < 0.9,
        "inspect": mask[..., 2] < 0.4, "signal_t": 0.02, "signal_s": 0.6,
        "stream": CounterRNG(8200, torch.arange(batch, device=DEVICE) + 5), "call": 3,
    }  # fmt: skip
    return logits, case_of(tokens, vocab_size, **(values | changes))


def agree(logits: Tensor, case: Case, head=same) -> None:
    one, other = (step(each.BACKEND, logits, case, head) for each in (sparse, fused))
    assert torch.equal(one.tokens, other.tokens)
    assert torch.equal(one.top, other.top)
    torch.testing.assert_close(other.deficit, one.deficit, rtol=1e-6, atol=1e-12)
    if case.transition.against is not None:
        assert torch.equal(one.gain, other.gain)
    assert (one.tokens != case.transition.tokens).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("top_p", "boundary"), [(1.0, "released"), (0.8, "released"), (0.8, "paper"), (0.05, "released")]
)
def test_it_is_lazy(dtype: torch.dtype, top_p: float, boundary: str) -> None:
    agree(*drawn_case(1, (2, 8, 37), dtype, tied=dtype == torch.bfloat16, top_p=top_p, boundary=boundary))


@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_it_is_lazy_with_a_vocabulary_of_several_blocks(top_p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "BLOCK", 16)
    agree(*drawn_case(2, (2, 8, 83), tied=True, top_p=top_p))


METHODS = {
    "psi": transitions.psi(0.3, 0.6, 0.4), "coupled": transitions.coupled(0.3, 0.6, 0.5), "redraw": transitions.redraw(0.6),
    "all five": transitions.nested(0.3, 0.3, 0.1, 0.25, 0.2),
}  # fmt: skip


@pytest.mark.parametrize("top_p", [1.0, 0.7])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_it_is_lazy_by_every_route(method: transitions.Coins, top_p: float) -> None:
    logits, case = drawn_case(13, (4, 16, 37), tied=True, top_p=top_p, coins=method)
    agree(logits, case)
    agree(logits, case.replace(against=None))


@pytest.mark.parametrize("cut", [{"top_k": 3}, {"min_p": 0.2}, {"top_k": 9, "min_p": 0.1, "top_p": 0.8}], ids=str)
def test_it_is_lazy_within_every_support(cut: dict[str, float]) -> None:
    agree(*drawn_case(14, (2, 8, 37), tied=True, **cut))


def test_it_is_lazy_for_a_model_that_predicts_posteriors() -> None:
    agree(*drawn_case(3, (2, 8, 19), convert=True, signal_t=0.3, top_p=0.9))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0.5, 0.8, 1.3])
def test_it_is_lazy_at_a_temperature(temperature: float, dtype: torch.dtype) -> None:
    """With and without top-p, and for a model that predicts posteriors, whose evidence is taken out first."""
    for top_p, convert in itertools.product((1.0, 0.8), (False, True)):
        agree(
            *drawn_case(
                11, (2, 8, 37), dtype, tied=dtype == torch.bfloat16, temperature=temperature, top_p=top_p,
                convert=convert, signal_t=0.3 if convert else 0.02,
            )
        )  # fmt: skip


def test_a_temperature_of_1_is_none() -> None:
    logits, case = drawn_case(12, (2, 8, 37), top_p=0.8)
    plainly, at_1, cool = (
        step(fused.BACKEND, logits, case.replace(**how)) for how in ({}, {"temperature": 1}, {"temperature": 0.8})
    )
    assert all(torch.equal(one, other) for one, other in zip(plainly, at_1, strict=True))
    looked = case.transition.inspect
    assert (cool.deficit[looked] < plainly.deficit[looked]).all()


def test_it_is_lazy_at_the_readout_and_with_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draw at signal 1, five rows of the head at a time, and logits whose rows are padded or transposed."""
    monkeypatch.setattr(fused, "CHUNK", 5 * 19)
    logits, case = drawn_case(4, (2, 8, 19), signal_t=0.4, signal_s=1.0)
    sizes = []

    def padded(rows: Tensor) -> Tensor:
        sizes.append(len(rows))
        return torch.nn.functional.pad(rows, (0, 13), value=100.0)[:, :19]  # whatever lies beyond must not be read

    agree(logits, case, padded)
    assert max(sizes[len(sizes) // 2 :]) <= 5
    agree(logits, case, lambda rows: rows.T.contiguous().T)


def test_one_chunk_of_logits_is_held_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "CHUNK", 5 * 19)
    logits, case = drawn_case(4, (2, 8, 19))
    given: list[StorageWeakRef] = []

    class Read:
        """In the kernel's place, as the interpreter keeps what it was given."""

        def __getitem__(self, grid: tuple[int]):
            return lambda *given, **named: None

    monkeypatch.setattr(fused.kernels, "rows", Read())

    def head(rows: Tensor) -> Tensor:
        assert all(chunk.expired() for chunk in given)
        made = rows + 0
        given.append(StorageWeakRef(made.untyped_storage()))
        return made

    step(fused.BACKEND, logits, case, head)
    assert len(given) > 2


@pytest.mark.parametrize(("boundary", "kept"), [("released", {0, 1, 2}), ("paper", {0, 1})])
def test_an_exact_tie_at_the_edge_of_the_nucleus(boundary: str, kept: set[int]) -> None:
    """Four equal tokens and p = 1/2: the paper keeps two, the released code three; ties go to lower ids."""
    shape = (4, 8)
    tokens = torch.full(shape, 3, device=DEVICE)
    case = case_of(tokens, 4, top_p=0.5, boundary=boundary, signal_t=1e-9, signal_s=1.0)
    drawn = step(fused.BACKEND, torch.zeros(*shape, 4, device=DEVICE), case).tokens
    assert set(drawn.flatten().tolist()) == kept


def test_impossible_tokens_are_never_drawn_and_never_looked_at_amiss() -> None:
    logits, case = drawn_case(6, (2, 8, 11), top_p=0.9)
    logits[..., ::2] = -torch.inf
    for temperature in (1.0, 0.5):
        agree(logits, case.replace(temperature=temperature))


@pytest.mark.parametrize("seed", [0, 8200, 2**31 + 7, 2**63 + 11, 2**64 - 1])
def test_the_uniforms_are_the_streams(seed: int) -> None:
    """Where every move is to a uniform token, tokens say which bits were used."""
    vocab_size = 1000
    rng = CounterRNG(seed, torch.tensor([0, 70000], device=DEVICE))
    tokens = torch.full((2, 6), vocab_size - 1, device=DEVICE)
    case = case_of(
        tokens, vocab_size, rng=rng, call=3, signal_t=1e-12, signal_s=1e-6, inspect=tokens < 0
    )  # fmt: skip
    moved = step(fused.BACKEND, tokens[..., None], case, lambda rows: torch.zeros(len(rows), vocab_size, device=DEVICE))
    coin, _ = rng.uniforms(3, torch.arange(6, device=DEVICE), Purpose.COINS)
    _, uniform = rng.uniforms(3, torch.arange(6, device=DEVICE), Purpose.TOKENS)
    moves = (coin >= 1e-6) & (coin < 1 - 1e-6)
    assert moves.all()
    assert torch.equal(moved.tokens, (uniform * vocab_size).long())


def test_a_plan_holds_what_needs_no_law() -> None:
    """The rows are those that lazy evaluates, in their order; what the others return is there before the body runs."""
    logits, case = drawn_case(8, (2, 8, 19))
    planned = fused.plan(*case)
    rows: list[Tensor] = []
    step(sparse.BACKEND, logits, case, lambda given: rows.append(given) or given)  # type: ignore[func-returns-value]
    index = planned.needed()
    assert torch.equal(logits.flatten(0, 1)[index.long()], torch.cat(rows))
    assert planned.told.tolist() == [len(index), -1, -1]
    spared = torch.ones(logits.shape[:2].numel(), dtype=torch.bool, device=DEVICE)
    spared[index.long()] = False
    before = [part.flatten()[spared].clone() for part in planned.outcome]
    after = [part.flatten()[spared] for part in fused.advance(same, logits, planned)]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert torch.equal(before[0], case.transition.tokens.flatten()[spared])


def test_where_no_row_is_needed_nothing_happens() -> None:
    logits, case = drawn_case(9, (2, 4, 7))
    none = torch.zeros_like(case.transition.revise)
    outcome: Outcome = step(
        fused.BACKEND, logits, case.replace(revise=none, inspect=none), lambda rows: pytest.fail("the head was asked")
    )
    assert torch.equal(outcome.tokens, case.transition.tokens)
    assert (outcome.deficit == torch.inf).all()
    assert (outcome.top == 0).all()


@pytest.mark.parametrize("spacing", [0, 1, 4])
def test_it_selects_as_the_selector_does(spacing: int) -> None:
    """Deficits with many ties, count and budget of every kind, one limit for all samples and one each. Some budgets
    are sums of deficits, where the order of adding decides: the kernel adds one by one, as torch does on a CPU."""
    generator = random_generator(10)
    for length, digits in ((1, 1), (33, 1), (50, 3)):
        deficit = torch.rand(4, length, generator=generator, device=DEVICE, dtype=torch.float64).round(decimals=digits)
        eligible = torch.rand(4, length, generator=generator, device=DEVICE) < 0.7
        count = torch.tensor([0, 1, 5, length], device=DEVICE)
        budget = torch.tensor([1.0, 0.0, 0.55, torch.inf], dtype=torch.float64, device=DEVICE)
        for limits in ((count, budget), (length, budget), (count, 0.7), (3, 2.0)):
            here = (limit.cpu() if isinstance(limit, Tensor) else limit for limit in limits)
            expected = selection.select(deficit.cpu(), eligible.cpu(), *here, spacing)
            assert torch.equal(fused.select(deficit, eligible, *limits, spacing).cpu(), expected)


@pytest.mark.parametrize("sampler", [
    CRS(nfe=4, spacing=1, late_top_p=0.8),
    CRS(nfe=4, spacing=1, temperature=0.8, horizon=1, final_step="sample"),
], ids=lambda sampler: sampler.caption)  # fmt: skip
def test_a_path_by_fused_steps_is_the_lazy_one(sampler: CRS) -> None:
    """A whole path through plan, advance and select; and it is what a path takes by itself where there is a GPU."""
    assert (fastest(DEVICE) is fused.BACKEND) == (DEVICE == "cuda")
    model = Duo(trained_like(Shape(vocab_size=23, length=8, width=32, blocks=1, heads=2, hidden=32))).to(DEVICE)
    fixed = torch.full((2, 8), -1, device=DEVICE)
    rng = CounterRNG(1, torch.arange(2, device=DEVICE))
    paths = [generate(sampler, open_context(model, rng, fixed, each.BACKEND)) for each in (fused, sparse)]
    for (one, _), (other, _) in zip(*paths, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(one.memory, other.memory, strict=True))


def test_the_released_step_draws_from_the_same_law() -> None:
    """100 000 draws a case against the exact reverse distribution; the chance that a right step fails is 1e-6 a case."""
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


def random_network(shape: Shape) -> Network:
    """Every parameter at random, so that no gate, shift or scale is idle."""
    network = Network(shape)
    generator = torch.Generator().manual_seed(1)
    for parameter in network.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return network.to(DEVICE)


@pytest.mark.parametrize("shape", [
    Shape(vocab_size=19, length=8, width=24, blocks=2, heads=2, cond=8, hidden=40),
    Shape(vocab_size=19, length=8, width=32, blocks=3, heads=4, cond=16, hidden=64),
])  # fmt: skip
def test_the_fused_body_is_the_body(shape: Shape) -> None:
    """Every sample has its own noise level; in bfloat16 it errs no more than the plain body does, whose sums and
    modulations are rounded more often (its own last rounding, which the plain body leaves to the head, allowed for)."""
    network = random_network(shape)
    tokens = torch.randint(shape.vocab_size, (3, 7), generator=random_generator(2), device=DEVICE)
    sigma = torch.tensor([0.02, 0.9, 4.0], device=DEVICE)
    with torch.no_grad():
        exact = network.body(tokens, sigma)
        torch.testing.assert_close(FusedBody(network)(tokens, sigma), exact, rtol=1e-5, atol=1e-5)
        set_precision(network, torch.bfloat16)
        plain = network.body(tokens, sigma)
        fused_body = FusedBody(network)(tokens, sigma)
    assert fused_body.dtype == torch.bfloat16
    errors = [(features - exact).square().mean().sqrt() for features in (fused_body, plain.bfloat16())]
    assert errors[0] < 1.2 * errors[1]


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_the_fused_body_can_be_asked_for_some_positions(
    blocks: int, precision: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where whole samples are left out, and from one block, which is the first and the last."""
    monkeypatch.setattr(fused_denoiser, "SMALL", 0)
    shape = Shape(vocab_size=19, length=8, width=32, blocks=blocks, heads=2, cond=8, hidden=40)
    network = random_network(shape)
    set_precision(network, precision)
    tokens = torch.randint(shape.vocab_size, (3, 7), generator=random_generator(2), device=DEVICE)
    sigma = torch.tensor([0.02, 0.9, 4.0], device=DEVICE)
    most = 1e-5 if precision == torch.float32 else 0.05
    with torch.no_grad():
        every = FusedBody(network)(tokens, sigma).flatten(0, 1)
        for some in ([0, 6, 7, 13, 20], list(range(21)), [9], [5, 20], []):
            index = torch.tensor(some, dtype=torch.int32, device=DEVICE)
            features = FusedBody(network)(tokens, sigma, lambda index=index: index)
            assert features.shape == (3, 7, 32)
            torch.testing.assert_close(features.flatten(0, 1)[some], every[some], rtol=most, atol=most)


@pytest.mark.parametrize("some", [False, True], ids=["everywhere", "index"])
@pytest.mark.parametrize("hidden", [1, 4])
def test_the_fused_body_lets_go_of_what_it_has_read(hidden: int, some: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 and in sizes of the residual stream, of a batch that is neither small nor replayed. At the attention
    there are the stream, queries, keys and values, what is mixed and its map, which makes six; with an index also the
    queries put where they belong, and no map yet, but what is picked, which makes seven. At the MLP there are the
    stream, the attention's update, a norm, and the hidden layer, on a CPU before and after its activation, which a GPU
    makes in one. Modulations and what is smaller take less than one more."""
    for name in ("SMALL", "REPLAYED"):
        monkeypatch.setattr(fused_denoiser, name, 0)
    shape = Shape(vocab_size=19, length=48, width=64, blocks=2, heads=2, cond=8, hidden=hidden * 64)
    body = FusedBody(random_network(shape))
    body._angles(48)  # kept for good
    tokens = torch.randint(shape.vocab_size, (1, 48), generator=random_generator(2), device=DEVICE)
    index = torch.arange(tokens.numel(), dtype=torch.int32, device=DEVICE) if some else None
    with torch.inference_mode(), Held(collect=DEVICE == "cpu") as held:
        body(tokens, torch.full((1,), 0.5, device=DEVICE), lambda: index)
    most = max(7 if some else 6, 3 + hidden * (2 if DEVICE == "cpu" else 1))
    assert most <= held.most / (tokens.numel() * shape.width * 4) < most + 1


@pytest.mark.filterwarnings("ignore:overflow")  # of an exponential whose inverse is then 0
def test_in_float8_it_holds_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bytes a feature, with products that take no more than their results, as hardware's do: four of the stream, two
    of the attention's update, one of a norm, and of a hidden layer four times as wide eight before its activation and
    four after it, which makes 19. Modulations, scales and angles have the rest."""

    def product(rows: float8.Scaled, weight: float8.Scaled, bias: Tensor | None = None) -> Tensor:
        return torch.zeros(len(rows.values), len(weight.values), dtype=torch.bfloat16, device=DEVICE)

    monkeypatch.setattr(float8, "multiply", product)
    for name in ("SMALL", "REPLAYED"):
        monkeypatch.setattr(fused_denoiser, name, 0)
    network = random_network(Shape(vocab_size=19, length=48, width=64, blocks=2, heads=2, cond=8, hidden=256))
    set_precision(network, torch.bfloat16)
    body = FusedBody(in_float8(network))
    tokens = torch.randint(19, (1, 48), generator=random_generator(2), device=DEVICE)
    index = torch.arange(tokens.numel(), dtype=torch.int32, device=DEVICE)
    for needed in (None, index):
        with torch.inference_mode(), Held(collect=DEVICE == "cpu") as held:
            body(tokens, torch.full((1,), 0.5, device=DEVICE), lambda needed=needed: needed)
        assert held.most <= 24 * tokens.numel() * 64


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_the_modulations_of_all_blocks_are_held_once(mode) -> None:
    with mode():
        network = random_network(Shape(vocab_size=19, length=8, width=24, blocks=3, heads=2, cond=8, hidden=40))
        before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
        body = FusedBody(network)
    maps = [block.adaLN_modulation for block in network.blocks] + [network.output_layer.adaLN_modulation]
    for name, whole in (("weight", body.weight), ("bias", body.bias)):
        parts = [getattr(one, name) for one in maps]
        assert torch.equal(torch.cat(parts), whole)
        assert {part.untyped_storage().data_ptr() for part in parts} == {whole.untyped_storage().data_ptr()}
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


@pytest.mark.parametrize("rows", [1, 4])
def test_an_embedding_in_bfloat16_is_what_it_is_in_float32(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that stores it so is held so: the stream that it opens is float32 all the same, however many positions
    are normed together."""
    monkeypatch.setattr(fused_denoiser, "ROWS", rows)
    network = random_network(Shape(vocab_size=19, length=8, width=32, blocks=2, heads=2, cond=8, hidden=40))
    set_precision(network, torch.bfloat16)
    tokens = torch.randint(19, (3, 8), generator=random_generator(2), device=DEVICE)
    sigma, features = torch.tensor([0.02, 0.9, 4.0], device=DEVICE), []
    for kind in (torch.bfloat16, torch.float32):
        network.vocab_embed.to(kind)
        with torch.no_grad():
            features.append((network.body(tokens, sigma), FusedBody(network)(tokens, sigma)))
    assert all(torch.equal(one, other) for one, other in zip(*features, strict=True))


@pytest.mark.filterwarnings("ignore:overflow")  # of an exponential whose inverse is then 0
@pytest.mark.parametrize("low", [False, True], ids=["bfloat16", "float8"])
def test_how_many_positions_are_normed_together_changes_nothing(low: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as divide a sample; each sample has its own modulation."""
    network = random_network(Shape(vocab_size=19, length=12, width=32, blocks=2, heads=2, cond=8, hidden=48))
    set_precision(network, torch.bfloat16)
    body = FusedBody(in_float8(network) if low else network)
    tokens = torch.randint(19, (3, 12), generator=random_generator(2), device=DEVICE)
    sigma = torch.tensor([0.02, 0.9, 4.0], device=DEVICE)
    with torch.no_grad():
        alone = body(tokens, sigma)
        for rows in (2, 4, 8):
            monkeypatch.setattr(fused_denoiser, "ROWS", rows)
            assert (body(tokens, sigma) - alone).norm() <= 0.01 * alone.norm()  # sums may be rounded in another order


def test_a_plan_says_which_positions_will_be_read() -> None:
    """Those where coin one moves and those inspected, as the lazy step reads them; none where there is nothing."""
    logits, case = drawn_case(9, (2, 8, 19))
    read = []
    step(sparse.BACKEND, _numbered(logits), case, lambda rows: (read.append(rows), rows[:, :19])[1])
    positions = torch.cat(read)[:, 19].long().tolist()
    assert positions == fused.plan(*case).needed().tolist() == sparse.plan(*case).needed().tolist()
    nothing = torch.zeros_like(case.transition.revise)
    assert len(fused.plan(*case.replace(revise=nothing, inspect=nothing)).needed()) == 0
    assert released.BACKEND.plan(*case).needed() is None


def _numbered(logits: Tensor) -> Tensor:
    """Features that are logits and, in one more column, their own flat position."""
    number = torch.arange(logits.shape[:2].numel(), device=logits.device).view(*logits.shape[:2], 1)
    return torch.cat([logits, number.to(logits.dtype)], -1)


def test_an_aligned_head_is_the_head() -> None:
    linear = torch.nn.Linear(16, 50, device=DEVICE)
    features = torch.randn(3, 5, 16, device=DEVICE)
    aligned = AlignedHead(linear)(features)
    assert aligned.shape == (3, 5, 50)
    assert aligned.stride(1) == 64
    torch.testing.assert_close(aligned, linear(features))


def test_an_aligned_head_leaves_one_weight_in_memory() -> None:
    linear = torch.nn.Linear(16, 50, device=DEVICE)
    before = linear.weight.detach().clone()
    with torch.inference_mode():
        head = AlignedHead(linear)
    assert linear.weight.data_ptr() == head.weight.data_ptr()
    assert not linear.weight.is_inference()
    assert (linear.weight == before).all()


@on_gpu
@pytest.mark.parametrize("batch", [1, 16, 40])
def test_a_model_says_the_same_on_a_gpu(batch: int) -> None:
    """Small batches are replayed as graphs, whole or up to the last block, from the second call on with other inputs;
    large ones are not. What one call returned the next leaves alone. The distributions of bfloat16 differ from float32's by a
    total variation of a few hundredths at most."""
    shape = Shape(vocab_size=300, length=512, width=64, blocks=2, heads=2, hidden=64)
    here = Duo(trained_like(shape))
    there = {name: Duo(trained_like(shape), precision=name).to(DEVICE) for name in ("float32", "bfloat16")}
    for t in (0.9, 0.1):
        tokens = torch.randint(300, (batch, 512), generator=torch.Generator().manual_seed(int(10 * t)))
        probs = here.logits(tokens, t).softmax(-1)
        for precision, most in (("float32", 1e-4), ("bfloat16", 0.05)):
            features = there[precision].body(tokens.to(DEVICE), t)
            there[precision].body(tokens.to(DEVICE).flip(0, 1), 0.5)
            other = there[precision].head(features).float().softmax(-1).cpu()
            assert (probs - other).abs().sum(-1).max() / 2 < most


@on_gpu
def test_a_capture_outlives_the_graphs_that_are_let_go_meanwhile() -> None:
    """A body holds its graphs in a circle, so that only the collector frees them, whenever it comes: it must not come
    while another is being captured, however much is made there."""
    network = random_network(Shape(vocab_size=19, length=8, width=32, blocks=2, heads=2, cond=8, hidden=40))
    tokens, sigma = torch.zeros(2, 8, dtype=torch.long, device=DEVICE), torch.ones(2, device=DEVICE)
    with torch.inference_mode():
        bodies = [FusedBody(network)]
        bodies[0](tokens, sigma)

        def function(tokens: Tensor, sigma: Tensor) -> tuple[Tensor]:
            if torch.cuda.is_current_stream_capturing():
                bodies.clear()
                assert len([[] for _ in range(10**6)]) == 10**6
            return (tokens + sigma[:, None],)

        assert (fused_denoiser.replayed(function, 1.0)(tokens, sigma)[0] == 1).all()
    assert gc.isenabled()


@on_gpu
@pytest.mark.parametrize("small", [0, 2**12])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float8"])
def test_a_path_hides_no_synchronisation(precision: str, small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_denoiser, "SMALL", small)
    shape = Shape(vocab_size=1000, length=64, width=128, blocks=2, heads=2, hidden=128)
    model = Duo(trained_like(shape), precision=precision).to(DEVICE)
    fixed = torch.full((4, 64), -1, device=DEVICE)
    sampler, rng = CRS(nfe=8), CounterRNG(1, torch.arange(4, device=DEVICE))

    def path() -> None:
        """Every call; what follows them, that all distributions were distributions, waits for the device by intent."""
        for _ in itertools.islice(generate(sampler, open_context(model, rng, fixed)), sampler.nfe):
            pass

    with torch.inference_mode():
        path()
        torch.cuda.set_sync_debug_mode("error")
        try:
            path()
        finally:
            torch.cuda.set_sync_debug_mode("default")
