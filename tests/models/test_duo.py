"""The Duo network against its literal transcription, and against itself: compiled, batched, saved and loaded."""

import pytest
import torch

from duo_transcription import forward
from limpet import conformance
from limpet.diffusion.process import SCHEDULES
from limpet.errors import LimpetError
from limpet.models import networks
from limpet.models.duo import Duo, DuoNetwork, DuoShape
from limpet.models.loading import load
from limpet.models.networks import Linear, pad_rows
from limpet.models.tensor_files import read_tensors
from model_cases import TINY, features, random_network, random_tokens

TIMES = torch.tensor([1.0, 0.5, 0.1, 1e-5], dtype=torch.float64)

RELEASED = (
    ["vocab_embed.embedding", "sigma_map.mlp.0.weight", "sigma_map.mlp.0.bias"]
    + ["sigma_map.mlp.2.weight", "sigma_map.mlp.2.bias"]
    + [
        f"blocks.{i}.{part}"
        for i in range(12)
        for part in (
            "norm1.weight",
            "attn_qkv.weight",
            "attn_out.weight",
            "norm2.weight",
            "mlp.0.weight",
            "mlp.0.bias",
            "mlp.2.weight",
            "mlp.2.bias",
            "adaLN_modulation.weight",
            "adaLN_modulation.bias",
        )
    ]
    + ["output_layer.norm_final.weight", "output_layer.linear.weight", "output_layer.linear.bias"]
    + ["output_layer.adaLN_modulation.weight", "output_layer.adaLN_modulation.bias"]
)


def transcribed(network, tokens, times, low=torch.float32):
    parameters = {name: parameter.detach() for name, parameter in network.named_parameters()}
    sigmas = -(1 - 0.999 * times).log()
    rows = [
        forward(parameters, row, sigma, network.shape.heads, low) for row, sigma in zip(tokens, sigmas, strict=True)
    ]
    return torch.stack(rows)


def test_the_released_names_order_and_size():
    with torch.device("meta"):
        network = DuoNetwork(DuoShape())
    names = [name for name, _ in network.named_parameters()]
    assert names == RELEASED
    assert len(names) == 130
    assert sum(parameter.numel() for parameter in network.parameters()) == 169_627_218
    assert sum(parameter.numel() for parameter in network.blocks[0].parameters()) == 7_677_696
    assert set(network.state_dict()) - set(names) == {"rotary_emb.inv_freq"}


def test_a_new_network_predicts_a_uniform_distribution():
    logits = Duo(DuoNetwork(TINY)).logits(random_tokens(), 0.5)
    assert logits.abs().max() == 0


def test_float32_agrees_with_the_transcription():
    network = random_network()
    tokens = random_tokens()
    ours = Duo(network).logits(tokens, TIMES)
    theirs = transcribed(network, tokens, TIMES)
    assert theirs.std() > 0.5
    assert (ours - theirs).abs().max() < 1e-5


def test_every_parameter_matters():
    """The transcription would not notice a parameter that neither of them uses."""
    network = random_network()
    logits = network(random_tokens(), torch.tensor([6.9, 0.7, 0.1, 1e-5]))
    logits.square().sum().backward()
    assert all(parameter.grad.abs().max() > 1e-4 for parameter in network.parameters())


def test_bfloat16_agrees_with_the_transcription():
    network = random_network()
    tokens = random_tokens()
    ours = Duo(network, precision="bfloat16").logits(tokens, TIMES)
    theirs = transcribed(network, tokens, TIMES, torch.bfloat16).float()
    exact = transcribed(network, tokens, TIMES)
    scale = exact.abs().max()
    assert (ours - theirs).abs().max() < 2e-2 * scale
    assert (ours - exact).abs().max() < 5e-2 * scale
    assert (ours - exact).abs().max() > 1e-3 * scale  # it did run in bfloat16


def test_bfloat16_leaves_the_residual_stream_alone():
    model = Duo(random_network(), precision="bfloat16")
    calls = {}
    for name, module in model.network.named_modules():
        module.register_forward_hook(lambda module, args, out, name=name: calls.update({name: (args[0], out)}))
    values = features(model, random_tokens(), 0.5)
    logits = model.head(values)
    assert values.dtype == torch.float32
    assert logits.dtype == torch.bfloat16
    assert model.logits(random_tokens(), 0.5).dtype == torch.float32
    dtypes = {name: (value.dtype, out.dtype) for name, (value, out) in calls.items() if name.startswith("blocks.0")}
    assert dtypes["blocks.0"] == (torch.float32, torch.float32)
    assert dtypes["blocks.0.norm1"] == (torch.float32, torch.float32)
    assert dtypes["blocks.0.attn_qkv"] == (torch.float32, torch.bfloat16)
    assert dtypes["blocks.0.mlp"][1] == torch.bfloat16
    kinds = {name: parameter.dtype for name, parameter in model.network.named_parameters()}
    assert kinds["vocab_embed.embedding"] == kinds["sigma_map.mlp.0.weight"] == kinds["blocks.1.norm2.weight"]
    assert kinds["vocab_embed.embedding"] == torch.float32


def test_an_embedding_is_held_as_it_is_stored_where_that_is_the_precision(tmp_path):
    """In bfloat16 from a file of bfloat16: half the memory, the same numbers. A float32 one is not rounded."""
    model, logits = Duo(random_network()), {}
    for storage in ("float32", "bfloat16"):
        model.save(tmp_path / storage, storage)
        again = load(tmp_path / storage, device="cpu", precision="bfloat16")
        assert str(again.network.vocab_embed.embedding.dtype) == f"torch.{storage}"
        logits[storage] = again.logits(random_tokens(), 0.5)
    again.network.vocab_embed.float()
    assert torch.equal(again.logits(random_tokens(), 0.5), logits["bfloat16"])
    assert not torch.equal(logits["float32"], logits["bfloat16"])
    whole = load(tmp_path / "bfloat16", device="cpu")
    assert whole.network.vocab_embed.embedding.dtype == torch.float32


def test_bfloat16_rounds_a_copy():
    network = random_network()
    before = {name: parameter.clone() for name, parameter in network.named_parameters()}
    Duo(network, precision="bfloat16")
    assert all(torch.equal(before[name], parameter) for name, parameter in network.named_parameters())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_batch_agrees_with_its_rows(precision):
    model = Duo(random_network(), precision=precision)
    tokens = random_tokens()
    together = model.logits(tokens, TIMES)
    alone = torch.cat([model.logits(row[None], float(t)) for row, t in zip(tokens, TIMES, strict=True)])
    tolerance = 1e-5 if precision == "float32" else 2e-2 * float(alone.abs().max())
    assert (together - alone).abs().max() < tolerance


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float8"])
@pytest.mark.parametrize("some", [[0, 6, 7, 13, 47], [9], [40, 41], list(range(48)), []])
def test_the_backbone_of_some_positions_is_some_of_the_backbone(precision, some):
    """Every sample has its own time. Rows may round as another number of rows does."""
    model = Duo(random_network(), precision=precision)
    every = features(model, random_tokens(), TIMES)
    values = features(model, random_tokens(), TIMES, lambda: torch.tensor(some, dtype=torch.int32))
    assert values.shape == every.shape
    most = 1e-5 if precision == "float32" else 2e-2
    torch.testing.assert_close(values.flatten(0, 1)[some], every.flatten(0, 1)[some], rtol=most, atol=most)


def test_the_last_block_computes_queries_only_where_they_are_needed(monkeypatch):
    """Every sample gets as many as the one that needs most, here three, padded to 16."""
    sizes, attention = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        "limpet.models.networks.F.scaled_dot_product_attention",
        lambda q, k, v, **more: sizes.append((q.shape[2], k.shape[2])) or attention(q, k, v, **more),
    )
    tokens = random_tokens().repeat(1, 4)
    length = tokens.shape[1]
    rows = torch.tensor([0, 3, length - 1, length + 2])
    random_network().backbone(tokens, torch.full((len(tokens),), 0.5), lambda: rows)
    assert sizes == [(length, length)] * (len(sizes) - 1) + [(16, length)]


def test_the_device_can_be_assigned():
    """What was prepared for the old device is computed anew."""
    model = Duo(random_network())
    before = model.logits(random_tokens(), 0.5)
    model.device = torch.device("meta")
    assert model.device.type == model.network.output_layer.linear.weight.device.type == "meta"
    again = Duo(random_network())
    again.device = torch.device("cpu")
    assert torch.equal(again.logits(random_tokens(), 0.5), before)


def test_saving_and_loading_is_bit_identical(tmp_path):
    model = Duo(random_network(), schedule=SCHEDULES["cosine"], predicts="posterior")
    model.save(tmp_path)
    again = load(tmp_path, device="cpu")
    assert again.network.shape == TINY
    assert again.digest == model.digest
    assert (again.schedule.name, again.predicts, again.length) == ("cosine", "posterior", 12)
    before, after = model.network.state_dict(), again.network.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(model.logits(random_tokens(), 0.5), again.logits(random_tokens(), 0.5))


@pytest.mark.parametrize("storage", ["bfloat16", "int8"])
def test_small_storages_are_small_close_and_stable(tmp_path, storage):
    model = Duo(random_network())
    for kind in ("float32", storage):
        model.save(tmp_path / kind, storage=kind)
    assert set(read_tensors(tmp_path / storage / "model.safetensors")) >= {"backbone.vocab_embed.embedding"}
    sizes = [(tmp_path / kind / "model.safetensors").stat().st_size for kind in ("float32", storage)]
    assert sizes[1] < 0.65 * sizes[0]
    once = load(tmp_path / storage, device="cpu")
    difference = (once.logits(random_tokens(), 0.5) - model.logits(random_tokens(), 0.5)).abs().max()
    assert 0 < difference < 0.3
    once.save(tmp_path / "again", storage=storage)
    assert load(tmp_path / "again", device="cpu").digest == once.digest


def test_a_bfloat16_model_saves_and_loads_as_itself(tmp_path):
    model = Duo(random_network(), precision="bfloat16")
    model.save(tmp_path)
    again = load(tmp_path, device="cpu", precision="bfloat16")
    assert again.digest == model.digest


def test_the_digest_tells_apart_what_decides_the_output():
    base = Duo(random_network())
    twin = Duo(random_network())
    wider_heads = Duo(random_network(DuoShape(**{**vars(TINY), "heads": 4})))
    others = [
        Duo(random_network(seed=1)),
        Duo(random_network(), precision="bfloat16"),
        Duo(random_network(), predicts="posterior"),
        Duo(random_network(), schedule=SCHEDULES["cosine"]),
        wider_heads,
    ]
    assert base.digest == twin.digest
    assert len({base.digest, *(other.digest for other in others)}) == 6
    assert len(base.digest) == 64


def test_a_wrong_option_is_one_sentence(tmp_path):
    with pytest.raises(LimpetError, match="precision is one of float32, bfloat16, float8, not 'half'"):
        Duo(random_network(), precision="half")
    with pytest.raises(LimpetError, match="storage is one of float32, bfloat16, int8, not 'int4'"):
        Duo(random_network()).save(tmp_path, storage="int4")
    (tmp_path / "file").write_text("")
    with pytest.raises(LimpetError, match="could not be written"):
        Duo(random_network()).save(tmp_path / "file")


def test_linear_runs_in_its_own_precision():
    layer = Linear(4, 3).to(torch.bfloat16)
    assert layer(torch.ones(2, 4)).dtype == torch.bfloat16


def test_few_numbers_of_rows_reach_the_matrix_products():
    """A CPU keeps a kernel for each: what is added is at most a quarter from 64 rows on, and changes no row."""
    sizes = {rows: len(pad_rows(torch.ones(rows, 1, dtype=torch.bfloat16))) for rows in range(1, 4097)}
    assert len(set(sizes.values())) == 28
    assert all(rows <= size < rows + max(16, rows / 4) for rows, size in sizes.items())
    linear = Linear(6, 5).bfloat16()
    for rows in (0, 1, 16, 17, 100):
        x = torch.randn(2, rows, 6, generator=torch.Generator().manual_seed(rows))
        plain = torch.nn.functional.linear(x.bfloat16(), linear.weight, linear.bias)
        torch.testing.assert_close(linear(x), plain, atol=0.02, rtol=0.01)
        assert linear(x).shape == plain.shape


@pytest.mark.parametrize("groups", [6, 2])  # heads of keys; with fewer than queries, the products are not used
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_beside_a_cache_is_attention(dtype, groups, monkeypatch):
    """Packed queries of three samples, one of which has none; with products in several pieces."""
    monkeypatch.setattr(networks, "SCORES", 6 * 40 * 4)
    random = torch.Generator().manual_seed(0)
    counts, samples = [9, 0, 13], torch.tensor([0] * 9 + [2] * 13)
    q = torch.randn(22, 6, 16, generator=random).to(dtype)
    k, v = torch.randn(2, 3, groups, 40, 16, generator=random).to(dtype).unbind(0)
    mixed = networks.attend_beside_cache(q, k, v, samples)
    exact = networks.attend_packed(q.double(), k.double(), v.double(), samples)
    assert mixed.dtype == dtype
    torch.testing.assert_close(mixed.double(), exact, rtol=0, atol=0.02 if dtype == torch.bfloat16 else 1e-5)
    last = networks.attend_beside_cache(q[9:], k[2:], v[2:], torch.zeros(counts[2], dtype=torch.long))
    assert mixed[9:].equal(last)  # whatever else is in the batch


def test_a_product_with_gelu_is_rounded_once():
    linear, random = Linear(48, 64), torch.Generator().manual_seed(0)
    x = torch.randn(5, 48, generator=random)
    assert linear.with_gelu(x).equal(torch.nn.functional.gelu(linear(x), approximate="tanh"))
    low = Linear(48, 64).to(torch.bfloat16)
    low.load_state_dict(linear.state_dict())
    exact = torch.nn.functional.gelu(
        torch.nn.functional.linear(x.bfloat16().double(), low.weight.double(), low.bias.double()), approximate="tanh"
    )
    found = low.with_gelu(x)
    assert (found.dtype, found.shape) == (torch.bfloat16, (5, 64))
    torch.testing.assert_close(found.double(), exact, rtol=0.005, atol=1e-4)


def test_a_cache_in_bfloat16_passes_the_check():
    results = conformance.model_rows(Duo(random_network(), precision="bfloat16"))
    (beside,) = (one for one in results if one.what == "some positions beside a cache")
    assert beside.ok
