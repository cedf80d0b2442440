"""The Triton backbone of Duo against the plain one: by Triton's interpreter where there is no GPU, else on the GPU."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor

from backends import DEVICE  # first: it decides who runs the kernels

pytest.importorskip("triton")

from held import Held
from limpet import registry
from limpet.models import Cache, ModelInput, duo_triton, float8
from limpet.models.duo import Duo, DuoNetwork, DuoShape, in_float8
from limpet.models.duo_triton import FusedBackbone
from limpet.models.networks import AlignedHead, set_precision

trained_like = registry.from_file(f"{Path(__file__).parents[2] / 'tools/trained_like.py'}:trained_like")
POSITIONS = 32 if DEVICE == "cpu" else 48  # where memory is counted
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


def random_generator(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def random_network(shape: DuoShape) -> DuoNetwork:
    """Every parameter at random, so that no gate, shift or scale is idle."""
    network = DuoNetwork(shape)
    generator = torch.Generator().manual_seed(1)
    for parameter in network.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return network.to(DEVICE)


def test_the_fused_backbone_keeps_and_reads_what_the_plain_one_does() -> None:
    """A full call, and then some positions of other tokens beside its keys and values, most of them of one sample."""
    shape = DuoShape(vocab_size=19, length=8, width=32, blocks=3, heads=4, cond=16, hidden=64)
    network = random_network(shape)
    tokens = torch.randint(shape.vocab_size, (3, 8), generator=random_generator(2), device=DEVICE)
    index, found = torch.tensor([1, 8, 9, 12, 15, 23], device=DEVICE), []
    for backbone in (network.backbone, FusedBackbone(network)):
        with torch.no_grad():
            full, some = Cache(None, (), []), Cache(index, (), [])
            parts = [backbone(tokens, torch.tensor([0.02, 0.9, 4.0], device=DEVICE), cache=full)]
            some = some._replace(before=tuple(full.after))
            changed = tokens.flatten().index_copy(0, index, tokens.flatten()[index].flip(0)).view_as(tokens)
            rows = backbone(changed, torch.tensor([0.7], device=DEVICE), lambda: index, some)
        found.append([*parts, rows.flatten(0, 1)[index], *full.after, *some.after])
    assert len(found[0]) == 2 + 2 * shape.blocks
    for plain, fused in zip(*found, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [
    DuoShape(vocab_size=19, length=8, width=24, blocks=2, heads=2, cond=8, hidden=40),
    DuoShape(vocab_size=19, length=8, width=32, blocks=3, heads=4, cond=16, hidden=64),
])  # fmt: skip
def test_the_fused_backbone_is_the_plain_one(shape: DuoShape) -> None:
    """Every sample has its own noise level. In bfloat16 its error is at most that of the plain backbone, whose sums and
    modulations are rounded more often. The plain backbone leaves its last rounding to the head."""
    network = random_network(shape)
    tokens = torch.randint(shape.vocab_size, (3, 7), generator=random_generator(2), device=DEVICE)
    sigma = torch.tensor([0.02, 0.9, 4.0], device=DEVICE)
    with torch.no_grad():
        exact = network.backbone(tokens, sigma)
        torch.testing.assert_close(FusedBackbone(network)(tokens, sigma), exact, rtol=1e-5, atol=1e-5)
        set_precision(network, torch.bfloat16)
        plain = network.backbone(tokens, sigma)
        fused = FusedBackbone(network)(tokens, sigma)
    assert fused.dtype == torch.bfloat16
    errors = [(features - exact).square().mean().sqrt() for features in (fused, plain.bfloat16())]
    assert errors[0] < 1.2 * errors[1]


@pytest.mark.parametrize(("blocks", "precision"), [(1, torch.float32), (2, torch.bfloat16)])
def test_the_fused_backbone_computes_some_positions(
    blocks: int, precision: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if whole samples are left out, and with one block, which is both the first and the last."""
    monkeypatch.setattr(duo_triton, "MAX_WHOLE", 0)
    shape = DuoShape(vocab_size=19, length=8, width=32, blocks=blocks, heads=2, cond=8, hidden=40)
    network = random_network(shape)
    set_precision(network, precision)
    tokens = torch.randint(shape.vocab_size, (3, 7), generator=random_generator(2), device=DEVICE)
    sigma = torch.tensor([0.02, 0.9, 4.0], device=DEVICE)
    most = 1e-5 if precision == torch.float32 else 0.05
    with torch.no_grad():
        every = FusedBackbone(network)(tokens, sigma).flatten(0, 1)
        for some in ([0, 6, 7, 13, 20], list(range(21)), [9], []):
            index = torch.tensor(some, dtype=torch.int32, device=DEVICE)
            features = FusedBackbone(network)(tokens, sigma, lambda index=index: index)
            assert features.shape == (3, 7, 32)
            torch.testing.assert_close(features.flatten(0, 1)[some], every[some], rtol=most, atol=most)


@pytest.mark.parametrize(("hidden", "some"), [(1, False), (1, True), (4, True)])
def test_the_fused_backbone_frees_what_it_has_read(hidden: int, some: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, in sizes of the residual stream, for a batch that is neither small nor captured. At the attention:
    the stream, queries, keys, values, the attended values and their map, which makes six. With an index also the
    scattered queries, and the picked rows instead of the map, which makes seven. At the MLP: the stream, the update of
    the attention, a norm, and the hidden layer, on a CPU before and after its activation (a GPU fuses them).
    Modulations and smaller tensors take less than one more."""
    for name in ("MAX_WHOLE", "MAX_GRAPH"):
        monkeypatch.setattr(duo_triton, name, 0)
    shape = DuoShape(vocab_size=19, length=POSITIONS, width=64, blocks=2, heads=2, cond=8, hidden=hidden * 64)
    body = FusedBackbone(random_network(shape))
    body._angles(POSITIONS)  # cached
    tokens = torch.randint(shape.vocab_size, (1, POSITIONS), generator=random_generator(2), device=DEVICE)
    index = torch.arange(tokens.numel(), dtype=torch.int32, device=DEVICE) if some else None
    with torch.inference_mode(), Held(collect=DEVICE == "cpu") as held:
        body(tokens, torch.full((1,), 0.5, device=DEVICE), lambda: index)
    most = max(7 if some else 6, 3 + hidden * (2 if DEVICE == "cpu" else 1))
    assert most <= held.most / (tokens.numel() * shape.width * 4) < most + 1


@pytest.mark.filterwarnings("ignore:overflow")  # of an exponential whose inverse is then 0
def test_float8_takes_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bytes per feature, with products that allocate only their results, like the hardware's: four for the stream,
    two for the update of the attention, one for a norm, and for a hidden layer four times as wide eight before its
    activation and four after it, which makes 19. Modulations, scales and angles take the rest."""

    def product(rows: float8.Float8Rows, weight: float8.Float8Rows, bias: Tensor | None = None) -> Tensor:
        return torch.zeros(len(rows.values), len(weight.values), dtype=torch.bfloat16, device=DEVICE)

    monkeypatch.setattr(float8, "multiply", product)
    for name in ("MAX_WHOLE", "MAX_GRAPH"):
        monkeypatch.setattr(duo_triton, name, 0)
    network = random_network(DuoShape(vocab_size=19, length=POSITIONS, width=64, blocks=2, heads=2, cond=8, hidden=256))
    set_precision(network, torch.bfloat16)
    body = FusedBackbone(in_float8(network))
    tokens = torch.randint(19, (1, POSITIONS), generator=random_generator(2), device=DEVICE)
    index = torch.arange(tokens.numel(), dtype=torch.int32, device=DEVICE)
    for rows in (None, index):
        with torch.inference_mode(), Held(collect=DEVICE == "cpu") as held:
            body(tokens, torch.full((1,), 0.5, device=DEVICE), lambda rows=rows: rows)
        assert held.most <= 24 * tokens.numel() * 64


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_the_modulations_of_all_blocks_are_held_once(mode) -> None:
    with mode():
        network = random_network(DuoShape(vocab_size=19, length=8, width=24, blocks=3, heads=2, cond=8, hidden=40))
        before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
        body = FusedBackbone(network)
    maps = [block.adaLN_modulation for block in network.blocks] + [network.output_layer.adaLN_modulation]
    for name, whole in (("weight", body.weight), ("bias", body.bias)):
        parts = [getattr(one, name) for one in maps]
        assert torch.equal(torch.cat(parts), whole)
        assert {part.untyped_storage().data_ptr() for part in parts} == {whole.untyped_storage().data_ptr()}
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


@pytest.mark.parametrize("rows", [1, 4])
def test_an_embedding_in_bfloat16_is_what_it_is_in_float32(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file may store the embedding in bfloat16. The residual stream is float32 all the same, however many positions
    are normalised together."""
    monkeypatch.setattr(duo_triton, "ROWS", rows)
    network = random_network(DuoShape(vocab_size=19, length=8, width=32, blocks=2, heads=2, cond=8, hidden=40))
    set_precision(network, torch.bfloat16)
    tokens = torch.randint(19, (3, 8), generator=random_generator(2), device=DEVICE)
    sigma, features = torch.tensor([0.02, 0.9, 4.0], device=DEVICE), []
    for kind in (torch.bfloat16, torch.float32):
        network.vocab_embed.to(kind)
        with torch.no_grad():
            features.append((network.backbone(tokens, sigma), FusedBackbone(network)(tokens, sigma)))
    assert all(torch.equal(one, other) for one, other in zip(*features, strict=True))


@pytest.mark.filterwarnings("ignore:overflow")  # of an exponential whose inverse is then 0
@pytest.mark.parametrize("low", [False, True], ids=["bfloat16", "float8"])
def test_how_many_positions_are_normalised_together_changes_nothing(low: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number divides a sample, because each sample has its own modulation."""
    network = random_network(DuoShape(vocab_size=19, length=12, width=32, blocks=2, heads=2, cond=8, hidden=48))
    set_precision(network, torch.bfloat16)
    body = FusedBackbone(in_float8(network) if low else network)
    tokens = torch.randint(19, (3, 12), generator=random_generator(2), device=DEVICE)
    sigma = torch.tensor([0.02, 0.9, 4.0], device=DEVICE)
    with torch.no_grad():
        alone = body(tokens, sigma)
        for rows in (4,):
            monkeypatch.setattr(duo_triton, "ROWS", rows)
            assert (body(tokens, sigma) - alone).norm() <= 0.01 * alone.norm()  # sums may be rounded in another order


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
def test_a_model_predicts_the_same_on_a_gpu(batch: int) -> None:
    """Small batches are replayed as graphs, complete or up to the last block, from the second call on with other
    inputs; large ones are not. A call does not overwrite the result of the one before. Distributions in bfloat16
    differ from float32 by a total variation of a few hundredths at most."""
    shape = DuoShape(vocab_size=300, length=512, width=64, blocks=2, heads=2, hidden=64)
    here = Duo(trained_like(shape))
    there = {name: Duo(trained_like(shape), precision=name).to(DEVICE) for name in ("float32", "bfloat16")}
    for t in (0.9, 0.1):
        tokens = torch.randint(300, (batch, 512), generator=torch.Generator().manual_seed(int(10 * t)))
        probs = here.logits(tokens, t).softmax(-1)
        for precision, most in (("float32", 1e-4), ("bfloat16", 0.05)):
            features = there[precision].backbone(ModelInput(tokens.to(DEVICE), t))
            there[precision].backbone(ModelInput(tokens.to(DEVICE).flip(0, 1), 0.5))
            other = there[precision].head(features).float().softmax(-1).cpu()
            assert (probs - other).abs().sum(-1).max() / 2 < most


@on_gpu
def test_a_capture_outlives_graphs_that_are_freed_meanwhile() -> None:
    """A backbone and its graphs form a reference cycle, so only the garbage collector frees them. It must not run
    while another graph is being captured, however many objects are allocated there."""
    network = random_network(DuoShape(vocab_size=19, length=8, width=32, blocks=2, heads=2, cond=8, hidden=40))
    tokens, sigma = torch.zeros(2, 8, dtype=torch.long, device=DEVICE), torch.ones(2, device=DEVICE)
    with torch.inference_mode():
        bodies = [FusedBackbone(network)]
        bodies[0](tokens, sigma)

        def function(tokens: Tensor, sigma: Tensor) -> tuple[Tensor]:
            if torch.cuda.is_current_stream_capturing():
                bodies.clear()
                assert len([[] for _ in range(10**6)]) == 10**6
            return (tokens + sigma[:, None],)

        assert (duo_triton.replayed(function, 1.0)(tokens, sigma)[0] == 1).all()
    assert gc.isenabled()
