"""Float8 products against the format, transcribed, kernels against plain functions, predictions against bfloat16's."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from backends import DEVICE  # first: it says who runs the kernels
from limpet import LimpetError, load, load_judge, registry
from limpet.cli import main
from limpet.models import float8
from limpet.models.duo import Duo, DuoNetwork, DuoShape, Linear, in_float8, set_precision
from limpet.models.model_files import BUILTIN_FOLDER
from limpet.training.data import encode, read_documents
from model_cases import features

trained_like = registry.from_file(f"{Path(__file__).parents[2] / 'tools/trained_like.py'}:trained_like")
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
BLOCKS = ("attn_qkv", "mlp.0", "mlp.2")


def grid() -> np.ndarray:
    """Every finite number from 0 up: 4 bits of exponent, biased by 7, and 3 of mantissa; the last code is nan."""
    subnormal = [m / 8 * 2.0**-6 for m in range(8)]
    return np.array([*subnormal, *((1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8))][:-1])


def rounded(x: np.ndarray) -> np.ndarray:
    """The nearest number of the grid, at a tie the one whose last bit is 0."""
    values, size = grid(), np.abs(x.astype(np.float64))
    above = np.searchsorted(values, size).clip(1, len(values) - 1)
    low, high = values[above - 1], values[above]
    up = (high - size < size - low) | ((high - size == size - low) & (above % 2 == 0))
    return np.sign(x) * np.where(up, high, low)


def transcribed(x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Values and scales of rows, each operation rounded to float32 where it stands."""
    rows = x.numpy().astype(np.float32)
    most = np.abs(rows).max(-1, keepdims=True).clip(np.float32(1e-12))
    return rounded(rows * (np.float32(448) / most)), most / np.float32(448)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(st.lists(st.floats(-(2.0**40), 2.0**40, width=32), min_size=1, max_size=20))
def test_rows_are_rounded_as_the_format_says(row: list[float]) -> None:
    x = torch.tensor([row])
    values, scales = transcribed(x)
    found = float8.quantise(x)
    assert np.array_equal(found.values.double().numpy(), values)
    assert np.array_equal(found.scales.numpy(), scales)


def test_every_tie_is_rounded_to_even() -> None:
    values = grid()
    ties = torch.from_numpy(np.concatenate([(values[1:] + values[:-1]) / 2, values])).float()
    found = float8.quantise(ties[None])
    assert found.scales == 1
    assert np.array_equal(found.values[0].double().numpy(), rounded(ties.numpy()))


def test_a_product_is_the_transcribed_one() -> None:
    """Values that are multiples of 1/2 up to 448, so that no sum rounds: what is left is the rounding of the result."""
    x, weight = (
        torch.randint(-896, 897, size, generator=torch.Generator().manual_seed(1)) / 2 for size in ((9, 32), (16, 32))
    )
    x[:, 0] = weight[:, 0] = 448
    bias = drawn(16).bfloat16()
    (a, a_scales), (b, b_scales) = transcribed(x * 2.0**-5), transcribed(weight * 2.0**3)
    exact = torch.from_numpy(a @ b.T * a_scales * b_scales.T)
    linear = torch.nn.Linear(32, 16)
    linear.weight.data, linear.bias.data = weight * 2.0**3, bias.float()
    found = float8.Float8Linear(linear.to(DEVICE))((x * 2.0**-5).to(DEVICE)).cpu()
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, (exact.float() + bias.float()).bfloat16())


@pytest.mark.parametrize("spread", [0.0, 2.0])
def test_a_product_errs_no_more_than_its_factors(spread: float) -> None:
    """Each factor by 1/16 of itself, or by half a step of the least numbers; the result by 1/256. On the whole, where
    factors are normal, by 3.7 hundredths."""
    x, weight = (drawn(64, 256, seed=seed) * torch.exp(spread * drawn(64, 256, seed=seed + 2)) for seed in (1, 2))
    exact = x.double() @ weight.double().T
    found = float8.multiply(float8.quantise(x), float8.quantise(weight)).double()
    bounds = [part.double().abs() / 16 + float8.quantise(part).scales.double() * 2.0**-10 for part in (x, weight)]
    (dx, dw), (x, weight) = bounds, (x.double().abs(), weight.double().abs())
    most = x @ dw.T + dx @ weight.T + dx @ dw.T
    assert ((found - exact).abs() <= most + (exact.abs() + most) / 256).all()
    if not spread:
        assert 0.034 < (found - exact).norm() / exact.norm() < 0.040


def test_rows_of_nothing_and_of_no_number() -> None:
    x = torch.tensor([[0.0, 0.0], [torch.nan, 1.0], [torch.inf, 1.0]])
    found = float8.multiply(float8.quantise(x), float8.quantise(torch.ones(3, 2)))
    assert (found[0] == 0).all()
    assert found[1:].isnan().all()


def test_a_part_of_a_product_is_a_part_of_it() -> None:
    for linear in (Linear(32, 48).bfloat16(), Linear(32, 48, bias=False).bfloat16()):
        x = drawn(2, 5, 32)
        for whole in (linear, float8.Float8Linear(linear)):
            parts = [whole.part(x, slice(16)), whole.part(x, slice(16, None))]
            torch.testing.assert_close(torch.cat(parts, -1), whole(x), rtol=1e-2, atol=1e-2)


def test_the_scale_of_a_gelu_is_large_enough() -> None:
    """Also where all are below 0, and it loses nothing of rows that are small throughout."""
    x = torch.cat([drawn(8, 64) * scale for scale in (1e-3, 0.1, 1, 10)] + [-drawn(4, 64).abs()])
    exact = torch.nn.functional.gelu(x.double(), approximate="tanh")
    found = float8.gelu(x)
    assert not found.values.float().isnan().any()
    error = (found.values.double() * found.scales - exact).abs()
    assert (error <= exact.abs() / 15 + found.scales.double() * 2.0**-9).all()
    assert (found.scales[:8] < 1e-3 / 2).all()  # the least step is then 1e-6


# The network


def random_network(shape: DuoShape) -> DuoNetwork:
    """Every parameter at random, so that no gate, shift or scale is idle."""
    network = DuoNetwork(shape)
    generator = torch.Generator().manual_seed(1)
    for parameter in network.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return network.to(DEVICE)


SHAPE = DuoShape(vocab_size=19, length=8, width=32, blocks=3, heads=2, cond=16, hidden=48)
TOKENS = torch.randint(19, (3, 7), generator=torch.Generator().manual_seed(2)).to(DEVICE)
SIGMA = torch.tensor([0.02, 0.9, 4.0], device=DEVICE)


def test_which_products_are_in_float8() -> None:
    """Those of each block but attention's output. The network that they were made of stays as it was."""
    network = random_network(SHAPE)
    set_precision(network, torch.bfloat16)
    twin = in_float8(network)
    found = {name for name, module in twin.named_modules() if isinstance(module, float8.Float8Linear)}
    assert found == {f"blocks.{block}.{name}" for block in range(3) for name in BLOCKS}
    kept = dict(network.named_parameters())
    assert all(parameter is kept[name] for name, parameter in twin.named_parameters())
    assert set(kept) - {name for name, _ in twin.named_parameters()} == {
        f"{name}.{part}" for name in found for part in ("weight", "bias") if f"{name}.{part}" in kept
    }
    assert not any(isinstance(module, float8.Float8Linear) for module in network.modules())


def test_a_model_in_float8() -> None:
    """It differs from bfloat16 by as much as the format says, and in its digest."""
    models = {name: Duo(random_network(SHAPE).cpu(), precision=name) for name in ("float32", "bfloat16", "float8")}
    exact, low, lower = (features(model, TOKENS.cpu(), 0.5) for model in models.values())
    errors = [float((values - exact).norm() / exact.norm()) for values in (low, lower)]
    assert errors[0] < 0.01 < errors[1] < 0.2
    assert len({model.digest for model in models.values()}) == 3
    assert models["float8"].precision == "float8"
    assert models["float8"].logits(TOKENS.cpu(), 0.5).dtype == torch.float32


def test_it_saves_and_loads_as_itself(tmp_path: Path) -> None:
    model = Duo(random_network(SHAPE).cpu(), precision="float8")
    model.save(tmp_path)
    again = load(tmp_path, device="cpu", precision="float8")
    assert again.digest == model.digest
    assert torch.equal(again.logits(TOKENS.cpu(), 0.5), model.logits(TOKENS.cpu(), 0.5))
    assert load(tmp_path, device="cpu", precision="bfloat16").digest != model.digest


def test_what_has_no_float8_says_so() -> None:
    with pytest.raises(LimpetError, match="precision is one of float32, bfloat16, not 'float8'"):
        load_judge(device="cpu", precision="float8")


def test_the_command_line_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tyro")
    call = ["sample", "--model", "mini", "--device", "cpu", "--n", "1", "--nfe", "2", "--length", "16", "--json"]
    texts = []
    for precision in ("float8", "bfloat16"):
        assert main.main([*call, "--precision", precision]) == 0
        texts.append(capsys.readouterr().out)
        assert f'"precision": "{precision}"' in texts[-1].replace('":"', '": "')


@pytest.mark.parametrize("name", ["mini", "mini-distilled"])
def test_predictions_stay_near_those_of_bfloat16(name: str) -> None:
    """Two pieces of held-out text under four levels of noise: mean total variation at most .03, and no argmax that has
    much less probability."""
    low, lower = (load(name, device="cpu", precision=precision) for precision in ("bfloat16", "float8"))
    ids = encode(
        tokenizers.Tokenizer.from_file(str(BUILTIN_FOLDER / "tokenizer.json")),
        [read_documents([BUILTIN_FOLDER / "heldout.txt.xz"])[0][:4000]],
    )
    clean = torch.from_numpy(ids[: 2 * low.length].astype("int64")).view(2, -1)
    generator = torch.Generator().manual_seed(3)
    for t in (0.9, 0.6, 0.3, 0.05):
        noise = torch.randint(low.vocab_size, clean.shape, generator=generator)
        noisy = torch.where(torch.rand(clean.shape, generator=generator) < float(low.schedule.signal(t)), clean, noise)
        one, other = (model.logits(noisy, t).double().softmax(-1) for model in (low, lower))
        assert 0.005 < (one - other).abs().sum(-1).mean() / 2 <= 0.03
        missed = one.amax(-1) - one.gather(-1, other.argmax(-1, keepdim=True))[..., 0]
        assert missed.mean() < 2e-3


# The kernels


@pytest.fixture
def rounds_to_even(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter rounds by dropping bits and loses carries; a GPU rounds as torch does."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    convert = interpreter._convert_float
    bits = {"fp8e4nv": (float8.DTYPE, torch.uint8), "bf16": (torch.bfloat16, torch.uint16)}

    def converted(values: np.ndarray, source: object, target: object, mode: object) -> np.ndarray:
        if str(source) != "fp32" or str(target) not in bits:
            return convert(values, source, target, mode)
        kind, stored = bits[str(target)]
        return torch.from_numpy(values.copy()).to(kind).view(stored).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", converted)


@pytest.mark.filterwarnings("ignore:overflow")  # of an exponential whose inverse is then 0
def test_the_gelu_kernel_is_the_gelu(rounds_to_even: None) -> None:
    """In a row of several pieces, and one that ends within a piece; an exponential may round a few values otherwise."""
    from limpet.models.duo_triton import _gelu

    for hidden in (48, 2048, 1500):
        x = (3 * drawn(4, hidden)).bfloat16().to(DEVICE)
        one, other = _gelu(x), float8.gelu(x)
        torch.testing.assert_close(one.scales, other.scales, rtol=1e-6, atol=0)
        differ = one.values.view(torch.uint8) != other.values.view(torch.uint8)
        assert differ.float().mean() < 1e-3
        torch.testing.assert_close(one.values.float(), other.values.float(), rtol=0.13, atol=2.0**-9)


@pytest.mark.filterwarnings("ignore:overflow")  # of an exponential whose inverse is then 0
@pytest.mark.parametrize("blocks", [pytest.param(1, marks=pytest.mark.long), 3])
def test_the_fused_backbone_is_the_backbone(blocks: int, rounds_to_even: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also at some positions, and of some samples; what rounds otherwise is far less than what float8 rounds."""
    from limpet.models import duo_triton

    monkeypatch.setattr(duo_triton, "MAX_WHOLE", 0)
    network = random_network(DuoShape(**{**vars(SHAPE), "blocks": blocks}))
    with torch.no_grad():
        exact = network.backbone(TOKENS, SIGMA)
        set_precision(network, torch.bfloat16)
        twin = in_float8(network)
        low, plain, found = (
            network.backbone(TOKENS, SIGMA),
            twin.backbone(TOKENS, SIGMA),
            duo_triton.FusedBackbone(twin)(TOKENS, SIGMA),
        )
        assert found.dtype == torch.bfloat16
        errors = [(values - exact).norm() for values in (low, found, plain)]
        assert 2 * errors[0] < errors[1] < 1.2 * errors[2]
        assert (found - plain).norm() < 0.6 * errors[2]
        for some in ([0, 6, 7, 13, 20], [9], [5, 20], []):
            index = torch.tensor(some, dtype=torch.int32, device=DEVICE)
            values = duo_triton.FusedBackbone(twin)(TOKENS, SIGMA, lambda index=index: index)
            apart = (values.flatten(0, 1)[some] - found.flatten(0, 1)[some]).norm()
            assert apart <= 0.5 * errors[2]


def small_tile() -> NamedTuple:
    from limpet.models.float8_kernels import TILE, Tile

    return TILE if DEVICE == "cuda" else Tile(16, 64, 32, 4, 2)


def test_no_output_exceeds_its_bound() -> None:
    """Which a row reaches that is as large as it can be throughout and points where the longest output does."""
    for bias in (True, False):
        linear = torch.nn.Linear(48, 32, bias=bias)
        linear.weight.data[5] = 0.5 * drawn(48).sign()
        x = torch.cat([drawn(9, 48) * torch.exp(2 * drawn(9, 1)), 3 * linear.weight.data[5:6]])
        product = float8.Float8Linear(linear)
        rows = float8.quantise(x)
        (reach, offset), found = product.bound, product(rows).float().abs()
        assert (found <= (rows.scales * reach + offset) * (1 + 2.0**-8)).all()  # the result is rounded to bfloat16
        if not bias:
            assert found[9, 5] > 0.99 * rows.scales[9] * reach


@pytest.mark.filterwarnings("ignore:overflow")  # of an exponential whose inverse is then 0
@pytest.mark.parametrize("rows", [5, 37])
def test_a_product_that_takes_its_gelu(rows: int, rounds_to_even: None) -> None:
    """As near to the exact one as float8 allows. A product and a kernel after it are nearer by a fifth or a quarter:
    they make a row's largest value, which weighs most, 448, where float8 is finest. Rows are no multiple of a tile's,
    and some are large and some small."""
    from limpet.models import duo_triton, float8_kernels

    linear = torch.nn.Linear(128, 256)
    linear.weight.data, linear.bias.data = 0.1 * drawn(256, 128), 0.3 * drawn(256, seed=1)
    product = float8.Float8Linear(linear.to(DEVICE))
    x = float8.quantise((drawn(rows, 128) * torch.exp(drawn(rows, 1, seed=2))).to(DEVICE))
    one, other = float8_kernels.activated(x, product, small_tile()), duo_triton._gelu(product(x))
    factors = [part.values.double() * part.scales.double() for part in (x, product.weight)]
    sums = factors[0] @ factors[1].T + product.bias.double()
    exact = torch.nn.functional.gelu(sums, approximate="tanh")
    found, both = (part.values.double() * part.scales.double() for part in (one, other))
    summed = 0 if DEVICE == "cpu" else 2.0**-10 * factors[0].abs() @ factors[1].abs().T  # matrix units keep 13 bits
    assert ((found - exact).abs() <= exact.abs() / 15 + one.scales.double() * 2.0**-9 + summed).all()
    errors = [((part - exact).norm(dim=-1) / exact.norm(dim=-1)).mean() for part in (found, both)]
    assert 0.65 < errors[1] / errors[0] < 1
    assert errors[0] < 0.03


def test_a_product_that_rotates(rounds_to_even: None) -> None:
    """Rounded once, where a product and a kernel after it round twice; three samples of seven positions are no multiple
    of a tile's rows."""
    from limpet.models import duo_triton, float8_kernels

    network = random_network(DuoShape(vocab_size=19, length=8, width=128, blocks=1, heads=2, cond=16, hidden=128))
    set_precision(network, torch.bfloat16)
    body = duo_triton.FusedBackbone(in_float8(network))
    product = body.blocks[0].attn_qkv
    x = float8.quantise(drawn(21, 128).to(DEVICE))
    found = float8_kernels.rotated(x, product, *body._angles(7), small_tile())
    both = product(x)
    assert torch.equal(found[:, 256:], both[:, 256:]) or DEVICE == "cuda"  # sums may be in another order there
    body._rotate(both[:, :256], 7)
    torch.testing.assert_close(found, both, rtol=2.0**-6, atol=2.0**-6 * float(both.abs().max()))
    assert (found - both).norm() < 4e-3 * both.norm()


@pytest.mark.filterwarnings("ignore:overflow")  # of an exponential whose inverse is then 0
def test_the_backbone_with_joined_products_is_the_backbone(rounds_to_even: None) -> None:
    """Another scale of the same numbers, so another rounding, which is no larger."""
    from limpet.models import duo_triton, float8_kernels

    shape = DuoShape(vocab_size=19, length=8, width=128, blocks=2, heads=2, cond=16, hidden=256)
    assert float8_kernels.divides(float8_kernels.TILE, shape)
    network = random_network(shape)
    with torch.no_grad():
        exact = network.backbone(TOKENS, SIGMA)
        set_precision(network, torch.bfloat16)
        errors = []
        for joined in (False, True):
            body = duo_triton.FusedBackbone(in_float8(network))
            body.joined = joined
            errors.append((body(TOKENS, SIGMA) - exact).norm())
    assert 0.5 * errors[0] < errors[1] < 1.2 * errors[0]


def test_which_shapes_have_joined_products() -> None:
    """The released one, and none whose tiles would mix what is rotated with what is not, or end within a head."""
    from limpet.models.float8_kernels import TILE, divides

    assert divides(TILE, DuoShape())
    for change in ({"width": 704, "heads": 11}, {"hidden": 3000}, {"heads": 4}):
        assert not divides(TILE, DuoShape(**{**vars(DuoShape()), **change}))


@on_gpu
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("batch", [1, 16, 40])
def test_a_model_says_the_same_on_a_gpu(batch: int, width: int) -> None:
    """Replayed whole, replayed up to the last block, and not replayed; with joined products, if wide enough. What is
    computed in another order rounds to another float8 number now and then: far less than float8 itself changes."""
    shape = DuoShape(vocab_size=300, length=512, width=width, blocks=2, heads=2, hidden=width)
    here, there = (Duo(trained_like(shape), precision="float8").to(place) for place in ("cpu", DEVICE))
    for t in (0.9, 0.1):
        tokens = torch.randint(300, (batch, 512), generator=torch.Generator().manual_seed(int(10 * t)))
        one, other = (model.logits(tokens.to(model.device), t).softmax(-1).cpu() for model in (here, there))
        assert (one - other).abs().sum(-1).mean() / 2 < 0.02


@on_gpu
def test_the_hardware_multiplies_as_we_do() -> None:
    """Sums in the matrix units keep fewer bits than float32's: far less than what bfloat16 drops on the whole."""
    device = torch.zeros(1, device=DEVICE).device
    if not float8.in_hardware(device):
        pytest.skip("this GPU has no such product")
    for rows, inner, outputs in ((1, 768, 2304), (37, 768, 3072), (1000, 3072, 768), (64, 16, 16)):
        x, weight = (float8.quantise(drawn(size, inner, seed=size)) for size in (rows, outputs))
        bias = drawn(outputs).bfloat16()
        here = float8.multiply(x, weight, bias).double()
        parts = [float8.Float8Rows(*(part.to(device) for part in each)) for each in (x, weight)]
        there = float8.multiply(*parts, bias.to(device)).cpu().double()
        assert (here - there).norm() < 3e-3 * here.norm()
