"""Where a call's time goes on a GPU, kernel by kernel, and what float8 products change: times, distributions, texts.

    python benchmarks/body.py --out benchmarks/results/body.json
    python benchmarks/body.py --out benchmarks/results/float8-products.json --only "one product"
    TRITON_INTERPRET=1 python benchmarks/body.py --tiny --out /tmp/body.json

It needs torch, Triton and the package's own source beside it; nothing is downloaded. Every result is written as soon
as it is there, a part that fails does not stop the others, and what --out has is not measured again. --tiny runs all
of it on a CPU, at sizes whose times mean nothing."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from measuring import ON_GPU, ResultFile, milliseconds

import limpet
from blocks import put
from limpet.evaluation import statistics as estimates
from limpet.experiments import speed
from limpet.models import ModelInput, duo_triton, float8, float8_kernels
from limpet.models.duo import Duo, DuoNetwork, DuoShape, in_float8
from limpet.models.duo_triton import FusedBackbone
from limpet.models.float8_kernels import TILE, Tile
from limpet.samplers import CRS, Mend, Native, Sampler
from trained_like import trained_like

PLACE = torch.device("cuda" if ON_GPU else "cpu")
BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
NORMS = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 4), (4, 4), (4, 8), (8, 8))  # positions together, warps
WARPS = (1, 2, 4, 8)
TILES = (TILE, Tile(128, 128, 128, 8, 3), Tile(128, 256, 128, 8, 3))
IN_A_ROW = 8  # joined products launched one after the other, as in a backbone, so that only one launch is not hidden
MAX_RELEASED = 16  # batch size up to which the released functions, with several float64 distributions, are timed
RELEASED_CALLS = 8
FLOAT8_PRODUCTS = ("queries, keys, values", "MLP up", "MLP down")


def settle() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def rate(
    function: Callable[[], object], flop: float = 0, traffic: float = 0, in_a_row: int = 1
) -> dict[str, Any]:  # fmt: skip
    """Milliseconds of one of some in a row, and what that makes of its operations or bytes; or why it does not run."""

    def several() -> None:
        for _ in range(in_a_row):
            function()

    try:
        ms = milliseconds(several) / in_a_row
    except Exception as error:  # of a library, a compiler or a driver
        return {"refused": f"{type(error).__name__}: {error}"[:200]}
    return (
        {"ms": ms} | ({"TFLOP/s": flop / ms / 1e9} if flop else {}) | ({"GB/s": traffic / ms / 1e6} if traffic else {})
    )


def profile(function: Callable[[], object]) -> list[dict[str, Any]]:
    """One call by kernel, the longest first."""
    for _ in range(2):
        function()
    settle()
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if ON_GPU else activity.CPU]) as watched:
        function()
        settle()
    taken = {
        event.key: (event.count, event.self_device_time_total if ON_GPU else event.self_cpu_time_total)
        for event in watched.key_averages()
    }
    total = sum(micro for _, micro in taken.values())
    longest = sorted(taken.items(), key=lambda item: -item[1][1])
    return [
        {"kernel": name[:160], "calls": count, "ms": micro / 1000, "share": micro / total}
        for name, (count, micro) in longest
        if micro > total / 1000
    ]


def attention(shape: DuoShape, batch: int) -> dict[str, Any]:
    """Each backend on queries, keys and values side by side, as the backbone passes them; on separate ones; and on
    copies, the copying included. Also whether the result can be read as rows without a copy."""
    heads, length, width = shape.heads, shape.length, shape.width
    packed = torch.randn(batch, length, 3 * width, device=PLACE).bfloat16()
    flop = 4 * batch * length * length * width

    def side_by_side() -> tuple[Tensor, ...]:
        return packed.unflatten(-1, (3, heads, -1)).transpose(1, 3).unbind(2)

    apart = tuple(part.contiguous() for part in side_by_side())
    found: dict[str, Any] = {}
    for name, backend in BACKENDS.items():

        def attend(parts: tuple[Tensor, ...], backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*parts)

        found[name] = {
            "side by side": rate(lambda attend=attend: attend(side_by_side()), flop),
            "separate": rate(lambda attend=attend: attend(apart), flop),
            "keep": rate(lambda attend=attend: attend(tuple(part.contiguous() for part in side_by_side())), flop),
        }
        if "refused" not in found[name]["side by side"]:
            mixed = attend(side_by_side()).transpose(1, 2)
            found[name]["rows without a copy"] = mixed.flatten(2).data_ptr() == mixed.data_ptr()
    q, kv = packed[..., :width], packed[..., width:]
    found["as the backbone calls it"] = rate(lambda: duo_triton._attended(q, kv, heads), flop)
    index = torch.randperm(batch * length, device=PLACE)[: batch * length // 6].sort().values.int()
    few = q.flatten(0, 1).index_select(0, index)
    found["from a sixth of the positions"] = rate(lambda: duo_triton._attended(few, kv, heads, index), flop / 6)
    return found


def products(shape: DuoShape, batch: int) -> dict[str, Any]:
    """Each matrix product of a block, and heads of as many rows as native and CRS paths need."""
    rows, width, hidden = batch * shape.length, shape.width, shape.hidden
    head = -(-shape.vocab_size // 64) * 64
    sizes = {
        "queries, keys, values": (rows, width, 3 * width), "attention's output": (rows, width, width),
        "MLP up": (rows, width, hidden), "MLP down": (rows, hidden, width),
        "head, 8% of the rows": (int(0.08 * rows), width, head),
        "head, 41% of the rows": (int(0.41 * rows), width, head),
    }  # fmt: skip
    found: dict[str, Any] = {}
    for name, (count, inner, outputs) in sizes.items():
        x, weight = (torch.randn(size, inner, device=PLACE).bfloat16() for size in (count, outputs))
        bias, flop = torch.zeros(outputs, device=PLACE).bfloat16(), 2 * count * inner * outputs
        low, matrix = float8.quantise(x), float8.quantise(weight)
        kept = float8.multiply(low, matrix, bias)

        def scaled(
            fast: bool, low: float8.Float8Rows = low, matrix: float8.Float8Rows = matrix, bias: Tensor = bias
        ) -> Tensor:
            return torch._scaled_mm(
                low.values, matrix.values.t(), scale_a=low.scales, scale_b=matrix.scales.t(), bias=bias,
                out_dtype=torch.bfloat16, use_fast_accum=fast,
            )  # fmt: skip

        exact = F.linear(x[:256].float(), weight.float())
        found[name] = {
            "bfloat16": rate(lambda x=x, weight=weight: F.linear(x, weight), flop),
            "bfloat16, bias": rate(lambda x=x, weight=weight, bias=bias: F.linear(x, weight, bias), flop),
            "float8": rate(lambda: scaled(True), flop),
            "float8, sums in float32": rate(lambda: scaled(False), flop),
            "float8 error": float((kept[:256].float() - exact).norm() / exact.norm()),
        }
        if name == "MLP up":
            activated = rate(
                lambda x=x, weight=weight, bias=bias: torch._addmm_activation(bias, x, weight.t(), use_gelu=True), flop
            )
            found[name]["bfloat16, bias and GELU"] = activated
    found["float8 in hardware"] = float8.in_hardware(PLACE)
    return found


def between(model: Duo, batch: int) -> dict[str, Any]:
    """What stands between the products, by bytes that must travel: sums with norms, rotations, GELUs to float8."""
    shape = model.network.shape
    rows, width, hidden = batch * shape.length, shape.width, shape.hidden
    backbone, block = FusedBackbone(model.network), model.network.blocks[0]
    x = torch.randn(batch, shape.length, width, device=PLACE)
    first, second = (torch.randn_like(x).bfloat16() for _ in range(2))
    shift, scale, gate = (torch.randn(batch, 8, width, device=PLACE).bfloat16()[:, 3] for _ in range(3))
    rooms = {"bfloat16": torch.empty_like(first), "float8": FusedBackbone(in_float8(model.network))._empty_rows(x)}
    found: dict[str, Any] = {}
    before = duo_triton.ROWS, duo_triton.WARPS
    for (name, room), (together, warps) in itertools.product(rooms.items(), NORMS):
        duo_triton.ROWS, duo_triton.WARPS = together, warps
        size = 2 if name == "bfloat16" else 1
        for updates, store in (([(gate, first), (gate, second)], True), ([(gate, first)], False)):
            traffic = rows * width * (4 + 2 * len(updates) + 4 * store + size)
            found[f"norm to {name}, {len(updates)} updates, {together} together, {warps} warps"] = rate(
                lambda room=room, updates=updates, store=store: duo_triton._normed(
                    x, updates, block.norm1, shift, scale, room, store=store
                ),
                traffic=traffic,
            )
    packed = torch.randn(batch, shape.length, 3 * width, device=PLACE).bfloat16()
    large = torch.randn(rows, hidden, device=PLACE).bfloat16()
    for warps in WARPS:
        duo_triton.WARPS = warps
        found[f"rotation, {warps} warps"] = rate(
            lambda: backbone._rotate(packed[..., : 2 * width], shape.length), traffic=rows * 2 * width * 4
        )
        found[f"GELU to float8, {warps} warps"] = rate(lambda: duo_triton._gelu(large), traffic=rows * hidden * 3)
    duo_triton.ROWS, duo_triton.WARPS = before
    found["copy"] = rate(large.clone, traffic=rows * hidden * 4)
    return found


def joined(model: Duo, batch: int, tiles: tuple[Tile, ...]) -> dict[str, Any]:
    """Float8 products that rotate their result or take its GELU beside a product and a kernel after it, and how far the
    results are apart."""
    shape, backbone = model.network.shape, FusedBackbone(in_float8(model.network))
    backbone.joined, block = False, backbone.blocks[0]
    normed = float8.quantise(torch.randn(batch, shape.length, shape.width, device=PLACE))
    rows, angles = duo_triton._rows(normed, None), backbone._angles(shape.length)
    found: dict[str, Any] = {}

    def beside(what: str, outputs: int, both: Callable[[], Any], one: Callable[[Tile], Any]) -> None:
        exact, flop = plain(both()), 2 * batch * shape.length * shape.width * outputs
        found[f"product, {what}"] = rate(both, flop, in_a_row=IN_A_ROW)
        for tile in tiles:
            name = f"{what} in the product, {', '.join(map(str, tile))}"
            found[name] = rate(lambda tile=tile: one(tile), flop, in_a_row=IN_A_ROW)
            if "refused" not in found[name]:
                found[name]["apart"] = float((plain(one(tile)) - exact).norm() / exact.norm())

    qkv, first = block.attn_qkv, block.mlp[0]
    beside(
        "rotation", 3 * shape.width, lambda: backbone._qkv(block, normed).flatten(0, 1),
        lambda tile: float8_kernels.rotated(rows, qkv, *angles, tile),
    )  # fmt: skip
    beside(
        "GELU", shape.hidden, lambda: backbone._hidden(block, normed),
        lambda tile: float8_kernels.activated(rows, first, tile),
    )  # fmt: skip
    return found


def plain(result: Tensor | float8.Float8Rows) -> Tensor:
    return result.values.float() * result.scales if isinstance(result, float8.Float8Rows) else result.float()


def distribution_changes(pairs: dict[str, Duo], inputs: list[tuple[float, Tensor]]) -> dict[str, float]:
    """Mean total variation between the distributions of bfloat16 and of another precision, and how much of an argmax's
    probability the other's argmax misses."""
    found, base = {}, pairs["bfloat16"]
    for (name, model), (t, tokens) in itertools.product(pairs.items(), inputs):
        if model is base:
            continue
        one, other = (each.logits(tokens, t).float().softmax(-1) for each in (base, model))
        found[f"{name} distribution variation t {t}"] = float((one - other).abs().sum(-1).mean() / 2)
        chosen = one.gather(-1, other.argmax(-1, keepdim=True))[..., 0]
        found[f"{name} argmax misses t {t}"] = float((one.amax(-1) - chosen).mean())
        found[f"{name} argmax differs t {t}"] = float((one.argmax(-1) != other.argmax(-1)).float().mean())
    return found


def one_product(network: DuoNetwork, kind: str) -> DuoNetwork:
    """The network with products of one kind in float8."""
    twin = in_float8(network)
    for block, plain in zip(twin.blocks, network.blocks, strict=True):
        qkv, up, down = ((block if kind == each else plain) for each in FLOAT8_PRODUCTS)
        block.attn_qkv = qkv.attn_qkv
        block.mlp = torch.nn.Sequential(up.mlp[0], plain.mlp[1], down.mlp[2])
    return twin


def changes_by_product(network: DuoNetwork, inputs: list[tuple[float, Tensor]]) -> dict[str, float]:
    """What each kind of product changes by itself, and all together. The backbone on a GPU has all or none."""
    pairs = {kind: Duo(one_product(network, kind), precision="bfloat16") for kind in FLOAT8_PRODUCTS}
    whole = {"bfloat16": Duo(network, precision="bfloat16"), "all": Duo(network, precision="float8")}
    return distribution_changes({**whole, **pairs}, inputs)


def builtin_changes(name: str, n: int, nfe: int) -> dict[str, float]:
    """On its own texts under noise."""
    pairs = {each: limpet.load(name, device=PLACE, precision=each) for each in ("bfloat16", "float8", "float32")}
    base = pairs["bfloat16"]
    clean = limpet.sample(base, Mend(nfe=nfe), n=n, seed=1).tokens.to(PLACE)
    generator, inputs = torch.Generator(PLACE).manual_seed(3), []
    for t in (0.9, 0.7, 0.5, 0.3, 0.1, 0.02):
        noise = torch.randint(base.vocab_size, clean.shape, generator=generator, device=PLACE)
        keep = torch.rand(clean.shape, generator=generator, device=PLACE) < float(base.schedule.signal(t))
        inputs.append((t, torch.where(keep, clean, noise)))
    return distribution_changes(pairs, inputs)


def texts(name: str, n: int, nfe: int) -> dict[str, Any]:
    """NLL and entropy of texts in both precisions under four seeds, and the difference paired by seed."""
    judge, found = limpet.load_judge(device=PLACE), {}
    samplers: dict[str, Sampler | str] = {"native": Native(nfe=nfe), "CRS": CRS(nfe=nfe), "Mend": Mend(nfe=nfe)}
    low, lower = (
        limpet.compare(limpet.load(name, device=PLACE, precision=each), samplers, n=n, judge=judge).samplers
        for each in ("bfloat16", "float8")
    )
    for one, other in zip(low, lower, strict=True):
        pairs = {measure: (one.scores.values[measure], other.scores.values[measure]) for measure in ("nll", "entropy")}
        found[one.name] = {
            what: {
                "bfloat16": estimates.mean_se(mine).to_dict(), "float8": estimates.mean_se(theirs).to_dict(),
                "difference": estimates.paired(theirs, mine).to_dict(),
            }
            for what, (mine, theirs) in pairs.items()
        }  # fmt: skip
    return found


def times(models: dict[str, Duo], batch: int, nfe: int, runs: int) -> dict[str, Any]:
    """Generations in both precisions, alternately with compiled bare forwards in bfloat16. Small batches are timed
    beside the released functions around these forwards."""
    low, small = models["bfloat16"], batch <= MAX_RELEASED
    bare = torch.compile(low.network, dynamic=False) if ON_GPU else low.network
    samplers: dict[str, Sampler] = {"native": Native()}
    samplers |= {"top-p .9": Native(top_p=0.9)} if small else {"CRS": CRS(), "Mend": Mend()}
    contenders = {"bare": speed.forwards(low, bare, batch)}
    for (precision, model), (name, sampler) in itertools.product(models.items(), samplers.items()):
        contenders[f"{precision} {name}"] = speed.generation(model, sampler, batch)
    costs = speed.measure(contenders, nfe, batch * low.length, runs, PLACE)
    found: dict[str, Any] = {name: cost and per_call(cost, nfe) for name, cost in costs.items()}
    if small:  # all calls of the released functions take the same time, so a few are enough
        released = {"bare": contenders["bare"], **speed.released_generations(low, bare, batch, samplers)}
        theirs = speed.measure(released, RELEASED_CALLS, batch * low.length, 1, PLACE)
        found |= {name: cost and per_call(cost, RELEASED_CALLS) for name, cost in theirs.items() if name != "bare"}
        for precision, name in itertools.product(models, samplers):
            one, other = found[f"released {name}"], found[f"{precision} {name}"]
            if one and other:
                found[f"released {name} / {precision}"] = one["ms a call"] / other["ms a call"]
    return found


def per_call(cost: speed.CallCost, nfe: int) -> dict[str, Any]:
    return asdict(cost) | {"calls": nfe, "ms a call": 1000 * cost.seconds / nfe}


# -- page -------------------------------------------------------------------------------------------------------------

KINDS = {
    "attention": ("sdpa", "flash", "fmha"), "sums, gates, norms": ("_norm_kernel",), "rotation": ("_rotate_kernel",),
    "GELU": ("_gelu_kernel",), "matrix products": ("nvjet", "gemm", "cutlass", "_kernel"),
}  # fmt: skip
READ = {"native": "moved", "CRS": "inspected", "Mend": "inspected"}  # what is mostly done with a prediction
STREAM, TURNED = 22, 8  # bytes of a feature that a block's two norms move, and its rotation, in bfloat16


def kinds(kernels: list[dict[str, Any]]) -> dict[str, float]:
    """Milliseconds of a profile by what is done; a kernel is of the first kind that its name tells."""
    found = dict.fromkeys([*KINDS, "rest"], 0.0)
    for one in kernels:
        named = (kind for kind, names in KINDS.items() if any(name in one["kernel"] for name in names))
        found[next(named, "rest")] += one["ms"]
    return found


def least(found: dict[str, Any], precision: str, rows: float) -> float:
    """Milliseconds of a call at batch 64 if its products and its attention took what each takes by itself, a head and a
    last block of only these rows, and what must travel between them went at the speed of a copy."""
    shape, low = DuoShape(), precision == "float8"
    product = {name: one for name, one in found["products"].items() if isinstance(one, dict)}
    qkv, up, down = (product[name] for name in ("queries, keys, values", "MLP up", "MLP down"))
    mlp = up["float8"]["ms"] + down["float8"]["ms"]
    if not low:
        mlp = up["bfloat16, bias and GELU"]["ms"] + down["bfloat16, bias"]["ms"]
    after = product["attention's output"]["bfloat16"]["ms"] + mlp
    whole, before = shape.blocks - 1, qkv[precision]["ms"]
    mixed = found["attention"]["as the backbone calls it"]["ms"] * whole
    mixed += found["attention"]["from a sixth of the positions"]["ms"]
    head = product["head, 41% of the rows"]["bfloat16"]["ms"] / 0.41
    between = shape.blocks * 64 * shape.length * shape.width * (STREAM - 2 * low + TURNED * (not low))
    copied = between / found["between"]["copy"]["GB/s"] / 1e6
    return (whole + rows) * after + (whole + (2 + rows) / 3) * before + mixed + rows * head + copied


def spent(found: dict[str, Any]) -> Iterator[str]:
    """A backbone's time by kind of kernel, in every precision that was profiled."""
    profiles = {name.removeprefix("profile "): kinds(one) for name, one in found.items() if name.startswith("profile")}
    yield f"| a backbone at batch 64, ms by profile | {' | '.join(profiles)} |"
    yield "|---|" + "---|" * len(profiles)
    for kind in [*KINDS, "rest"]:
        yield f"| {kind} | {' | '.join(f'{one[kind]:.1f}' for one in profiles.values())} |"


def paths(found: dict[str, Any], parts: dict[str, float]) -> Iterator[str]:
    """Each path beside bare forwards in the same run, and beside the least that its arithmetic takes."""
    times = found["times batch 64 nfe 64"]
    bare = times["bare"]["ms a call"]
    yield "| batch 64, 64 calls | head rows | of bare | the least | with distributions read |"
    yield "|---|---|---|---|---|"
    for name, one in times.items():
        precision, _, sampler = name.partition(" ")
        rows = one["head_rows"]
        start = f"| {name} | {rows:.2f} | {min(one['ratios']):.3f} |"
        if sampler in READ:
            floor = least(found, precision, rows)
            yield f"{start} {floor / bare:.2f} | {(floor + rows * reading(parts, READ[sampler])) / bare:.2f} |"
        elif name != "bare":  # a candidate
            yield f"{start} | |"


def reading(parts: dict[str, float], how: str) -> float:
    """Milliseconds for the predictions of all positions at batch 64, from benchmarks/gpu.py's time for some of them."""
    return parts[f"rows {how}, 2048 8 64"] * 64 * DuoShape().length / 5248


def alone(found: dict[str, Any]) -> str:
    attention, between = found["attention"], found["between"]
    mixed, flash = (attention["as the backbone calls it"]["TFLOP/s"], attention["flash"]["side by side"]["TFLOP/s"])
    rates = [one["bfloat16"]["TFLOP/s"] for one in found["products"].values() if isinstance(one, dict)]
    norms = [f"norm to bfloat16, {n} updates, {duo_triton.ROWS} together, {duo_triton.WARPS} warps" for n in (1, 2)]
    slow, fast = sorted(between[name]["GB/s"] / 1000 for name in norms)
    return (
        f"The fastest of the runs. In two passes a kernel rotates or takes GELU after its product; joined, in "
        f"bfloat16, was tried and not kept. By themselves, bfloat16 products of these shapes run at {min(rates):.0f} "
        f"to {max(rates):.0f} TFLOP/s, attention at {mixed:.0f} by cuDNN ({flash:.0f} by the FlashAttention that torch "
        f"has), the norms' kernel at {slow:.1f} to {fast:.1f} TB/s where a copy runs at "
        f"{between['copy']['GB/s'] / 1000:.1f}. The least is what a call would take if every product and all "
        f"attention ran as fast as alone, and all that travels between them at the speed of a copy: less takes other "
        f"arithmetic. The last column adds the kernel that reads distributions, as in the table of parts above. "
        f"Mend also compares distributions with its committed tokens and draws from a nucleus, which were not timed by "
        f"themselves."
    )


def beside_released(found: dict[str, Any]) -> str:
    times = found["times batch 16 nfe 64"]
    times_as_long = ", and ".join(
        f"{times[f'released native / {precision}']:.1f} and {times[f'released top-p .9 / {precision}']:.1f} times as "
        f"long as ours in {precision}"
        for precision in ("bfloat16", "float8")
    )
    return f"At batch 16 and 64 calls the released functions, at p = 1 and p = .9, take {times_as_long}."


def by_product(alone: dict[str, float]) -> str:
    """What of a distribution's change each kind of product makes."""
    most: dict[str, float] = {}
    for name, value in alone.items():
        kind, probs, _ = name.partition(" distribution variation")
        if probs:
            most[kind] = max(most.get(kind, 0.0), value)
    together = most.pop("all")
    least, largest = min(most.values()), max(most.values())
    return (
        f"There each kind of product by itself, the others in bfloat16, moves distributions by {least:.2f} to "
        f"{largest:.2f}, and all together by {together:.2f} (emulated on a CPU): whichever of them is "
        f"kept in float8, distributions move by more than .03."
    )


def changed(found: dict[str, Any], apart: dict[str, float]) -> str:
    """What float8 does to distributions and to texts."""
    distributions = {
        name.removeprefix("distributions "): max(
            v for what, v in one.items() if what.startswith("float8 ") and "variation" in what
        )
        for name, one in found.items()
        if name.startswith("distributions")
    }
    texts = {name.removeprefix("texts "): one for name, one in found.items() if name.startswith("texts")}
    samplers = [sampler for one in texts.values() for sampler in one.values()]
    moved = {
        measure: max((one[measure]["difference"] for one in samplers), key=lambda change: abs(change["mean"]))
        for measure in samplers[0]
    }
    nll, entropy = (f"{one['mean']:+.3f} ± {one['se']:.3f}" for one in (moved["nll"], moved["entropy"]))
    within = " and ".join(f"{errors(own):.1f} errors on `{model}`" for model, own in texts.items())
    return (
        f"A distribution in float8 differs from bfloat16's by a total variation, on average, of at most "
        f"{distributions['mini']:.3f} on `mini` and {distributions['mini-distilled']:.3f} on `mini-distilled`, on "
        f"their own texts under noise, and of {distributions['released shape']:.2f} with random weights of the "
        f"released size, which amplify every error. "
        f"{by_product(apart)} Of 4 x 256 texts each by native sampling, CRS and Mend, NLL and entropy are bfloat16's "
        f"within {within}; paired, on the same randomness, they move by up to {nll} and {entropy} nats."
    )


def errors(samplers: dict[str, Any]) -> float:
    """How many errors of a difference of independent texts the two precisions are apart at most."""
    return max(
        abs(one["difference"]["mean"]) / math.hypot(one["bfloat16"]["se"], one["float8"]["se"])
        for sampler in samplers.values()
        for one in sampler.values()
    )


def page(found: dict[str, Any], parts: dict[str, float], apart: dict[str, float]) -> str:
    """The text of docs/speed.md about the backbone and float8; `apart` has the changes by each kind of product."""
    parts_of_text = (alone(found), beside_released(found), changed(found, apart))
    words = (textwrap.fill(one, 120, break_on_hyphens=False) for one in parts_of_text)
    return "\n".join([*spent(found), "", *paths(found, parts), "", "\n\n".join(words)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/body.json"))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=[], help="parts whose names begin so")
    parser.add_argument("--page", type=Path, help="fill this page from --out and --parts, and measure nothing")
    parser.add_argument("--parts", type=Path, default=Path("benchmarks/results/h200.json"), help="written by gpu.py")
    parser.add_argument(
        "--products", type=Path, default=Path("benchmarks/results/float8-products.json"), help="likewise"
    )
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU, whose times mean nothing")
    options = parser.parse_args()
    if options.page is not None:
        files = options.out, options.parts, options.products
        found, other, apart = (json.loads(path.read_text(encoding="utf-8")) for path in files)
        put(options.page, "body", page(found, other["parts"], apart["one product"]))
        return
    results = ResultFile(options.out)
    results.values |= {"device": torch.cuda.get_device_name() if ON_GPU else "cpu", "torch": torch.__version__}

    def section(name: str, function: Callable[..., Any], *arguments: Any) -> None:
        if not options.only or any(name.startswith(each) for each in options.only):
            with torch.inference_mode():
                results.measure(name, function, *arguments)

    tiny = DuoShape(vocab_size=300, length=16, width=64, blocks=2, heads=4, cond=16, hidden=128)
    shape, batch = (tiny, 2) if options.tiny else (DuoShape(), options.batch)
    n, texts_n, nfe = (2, 2, 2) if options.tiny else (16, 256, 64)
    network = trained_like(shape).to(PLACE)
    models = {name: Duo(network, precision=name) for name in ("bfloat16", "float8")}
    tokens = torch.randint(shape.vocab_size, (batch, shape.length), device=PLACE)
    index = torch.randperm(tokens.numel(), device=PLACE)[: tokens.numel() // 6].sort().values.int()
    for name, model in models.items():
        section(f"profile {name}", profile, lambda model=model: model.backbone(ModelInput(tokens, 0.4)))
        section(f"backbone {name}", rate, lambda model=model: model.backbone(ModelInput(tokens, 0.4)))
        section(
            f"backbone {name}, a sixth",
            rate,
            lambda model=model: model.backbone(ModelInput(tokens, 0.4, lambda: index)),
        )
    section("attention", attention, shape, batch)
    section("products", products, shape, batch)
    section("joined", joined, models["bfloat16"], batch, (Tile(16, 64, 32, 4, 2),) if options.tiny else TILES)
    section("between", between, models["bfloat16"], batch)
    noisy = [(t, tokens[:2]) for t in (0.9, 0.5, 0.1)]
    section("distributions released shape", distribution_changes, models, noisy)
    if not ON_GPU:
        section("one product", changes_by_product, network, noisy)
    for name in ("mini", "mini-distilled"):
        section(f"distributions {name}", builtin_changes, name, n, nfe)
    section(f"times batch {batch} nfe {nfe}", times, models, batch, nfe, options.runs)
    for name in ("mini", "mini-distilled"):
        section(f"texts {name}", texts, name, texts_n, nfe)


if __name__ == "__main__":
    main()
