"""Two large models with random weights, written in parts, loaded and sampled on one GPU: memory, and time a call.

    python benchmarks/large.py --floor
    python benchmarks/large.py --page docs/speed.md

A Duo of 1.7B parameters in its blocks and a Sumi of the size called 7B, both in bfloat16: eight calls of native
sampling, CRS and Mend beside as many compiled forwards of the same network with its head. The cost of sampling depends
on the weights only through the share of head rows, which is given; so all blocks have the same weights. The
Duo's forward is compiled whole, the Sumi's a layer at a time, as limpet runs it. Every model is written to --out as
soon as it is measured, and a model and batch that are there are not measured again. `--floor` then measures what no
sampler can leave out, the products and the attention with nothing between them, beside bare forwards and CRS. `--tiny`
is the same on a CPU, to see that it runs. `--page` fills a page from --out, and measures nothing."""

from __future__ import annotations

import argparse
import gc
import json
import math
import re
import shutil
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from blocks import put
from limpet import load
from limpet.diffusion.process import clipped_snr
from limpet.experiments import speed
from limpet.models import Denoiser, duo, networks, sumi, time_agnostic
from limpet.models.model_files import INDEX
from limpet.samplers import CRS, Mend, Native, Sampler
from trained_like import trained_like

PLACE = "cuda" if torch.cuda.is_available() else "cpu"
PART = 4 * 2**30  # bytes of a file of weights
NFE = 8
RUNS = 3
SAMPLERS: dict[str, Sampler] = {"native": Native(), "CRS": CRS(), "Mend": Mend()}
FLOOR = "products and attention alone"
FLOOR_RUNS = 2
ATTENTION = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}

State = dict[str, Tensor]


class RandomModel(NamedTuple):
    network: Any  # with random weights, of one block
    shape: Any  # of the model, with all its blocks, which are alike
    prefix: str  # of its tensors in files
    config: dict[str, Any]


def random_duo(tiny: bool) -> RandomModel:
    shape = duo.DuoShape(131072, 1024, 2176, 28, 17, 128, 8704)
    if tiny:
        shape = duo.DuoShape(300, 32, 64, 3, 2, 16, 128)
    with torch.device(PLACE):
        network = trained_like(replace(shape, blocks=1))
    sizes = dict(zip(duo.RELEASED, astuple(shape), strict=False))
    return RandomModel(network, shape, "backbone.", {"model_type": "duo", "causal": False, **sizes})


def random_sumi(tiny: bool) -> RandomModel:
    shape = sumi.SumiShape(100278, 2048, 4096, 36, 32, 14336, 8)
    if tiny:
        shape = sumi.SumiShape(300, 32, 64, 3, 4, 128, 2)
    torch.manual_seed(0)
    with torch.device(PLACE):
        network = sumi.SumiNetwork(replace(shape, blocks=1))
    for name, parameter in network.named_parameters():
        if parameter.dim() == 2:  # unit features, so that logits have a standard deviation of about 3
            nn.init.normal_(parameter, std=(3.0 if name.startswith("lm_head") else 1.0) / parameter.shape[1] ** 0.5)
        else:
            nn.init.ones_(parameter)
    config = {
        "model_type": "sumi", "num_attention_heads": shape.heads, "num_key_value_heads": shape.groups,
        "max_position_embeddings": shape.length, "rms_norm_eps": shape.eps, "rope_theta": shape.base,
        "hidden_act": "silu", "tie_word_embeddings": False,
    }  # fmt: skip
    return RandomModel(network, shape, "", config)


def duo_at_once(random: RandomModel) -> Denoiser:
    """The model with no files between, every block the same module."""
    network, network.shape = random.network, random.shape
    network.blocks = nn.ModuleList([*network.blocks] * random.shape.blocks)
    networks.set_precision(network, torch.bfloat16)
    network.vocab_embed.to(torch.bfloat16)
    return duo.Duo(network, precision="bfloat16")


def sumi_at_once(random: RandomModel) -> Denoiser:
    """The same of a Sumi."""
    network, network.shape = random.network, random.shape
    network.layers = nn.ModuleList([*network.layers] * random.shape.blocks)
    networks.set_precision(network, torch.bfloat16)
    return time_agnostic.TimeAgnostic(network, schedule=clipped_snr(), precision="bfloat16")


class Model(NamedTuple):
    make: Callable[[bool], RandomModel]
    at_once: Callable[[RandomModel], Denoiser]
    batch: int
    gates: int  # matrices of an MLP beside the one into it and the one out of it


MODELS = {"Duo 1.7B": Model(random_duo, duo_at_once, 16, 0), "Sumi 7B": Model(random_sumi, sumi_at_once, 4, 1)}


def repeated(random: RandomModel) -> State:
    """The tensors of the whole model, every matrix in bfloat16."""
    state: State = {}
    for name, tensor in random.network.state_dict().items():
        stored = tensor.detach().to(torch.bfloat16 if tensor.dim() == 2 else tensor.dtype)
        numbers = range(random.shape.blocks if re.match(r"(blocks|layers)\.0\.", name) else 1)
        state |= {random.prefix + name.replace(".0.", f".{i}.", 1): stored for i in numbers}
    return state


def write(random: RandomModel, folder: Path) -> float:
    """A model in parts as on the hub; returns its GiB."""
    state = repeated(random)
    parts: list[list[str]] = [[]]
    size = 0
    for name, tensor in state.items():
        size += tensor.nbytes
        if size > PART and parts[-1]:
            parts.append([])
            size = tensor.nbytes
        parts[-1].append(name)
    files = [f"model-{i:05}-of-{len(parts):05}.safetensors" for i in range(1, len(parts) + 1)]
    for file, names in zip(files, parts, strict=True):
        save_file({name: state[name].to("cpu", copy=True).contiguous() for name in names}, folder / file)
    total = sum(tensor.nbytes for tensor in state.values())
    where = {name: file for file, names in zip(files, parts, strict=True) for name in names}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}))
    (folder / "config.json").write_text(json.dumps(random.config))
    return total / 2**30


def forward_of(model: Denoiser) -> speed.Forward:
    """The network, backbone and head at every position, compiled where there is a GPU."""
    network: Any = model.network  # type: ignore[attr-defined]
    whole = isinstance(network, duo.DuoNetwork)
    read = network if whole else lambda x: network.head(network.norm(x))
    through = time_agnostic.run_layer
    if PLACE == "cuda":
        read, through = torch.compile(read, dynamic=False), time_agnostic.compiled_layer()
    if whole:
        return read  # type: ignore[no-any-return]

    def forward(tokens: Tensor, sigma: Tensor) -> Tensor:
        x, rotation = network.embed_tokens(tokens).float(), network.rotary_emb(tokens.shape[1])
        for layer in network.layers:
            x = through(layer, x, rotation, None)
        logits: Tensor = read(x)
        return logits

    return forward


@contextmanager
def timed(stage: str, seconds: dict[str, float]) -> Iterator[None]:
    begun = time.perf_counter()
    yield
    seconds[stage] = time.perf_counter() - begun
    print(f"{stage}: {seconds[stage]:.1f} s", flush=True)


def measured(make: Callable[[bool], RandomModel], batch: int, tiny: bool) -> dict[str, Any]:
    seconds: dict[str, float] = {}
    folder = Path(tempfile.mkdtemp())
    try:
        with timed("writing", seconds):
            stored = write(make(tiny), folder)
        if PLACE == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        with timed("loading", seconds):
            model = load(str(folder), device=PLACE, precision="bfloat16")
    finally:
        shutil.rmtree(folder)
    held = sum(parameter.nbytes for parameter in model.network.parameters()) / 2**30  # type: ignore[attr-defined]
    found: dict[str, Any] = {
        "parameters": model.info["parameters"], "shape": model.info["shape"], "batch": batch, "stored GiB": stored,
        "weights GiB": held, "seconds": seconds,
    }  # fmt: skip
    if PLACE == "cuda":
        found["peak while loading GiB"] = torch.cuda.max_memory_allocated() / 2**30
    bare = forward_of(model)
    with timed("measuring", seconds):
        costs = speed.side_by_side(model, bare, NFE, batch, RUNS, samplers=SAMPLERS)  # type: ignore[arg-type]
    found["costs"] = {name: asdict(cost) if cost else None for name, cost in costs.items()}
    for name, cost in costs.items():
        beyond = f", peak {cost.peak_gib / held - 1:+.1%} of the weights" if cost and cost.peak_gib else ""
        print(f"  {name}: " + (f"{cost.ratio:.3f} of bare{beyond}" if cost else "does not fit"), flush=True)
    return found


# -- what no sampler can leave out -------------------------------------------------------------------------------------


class Products(NamedTuple):
    """The sizes of a model's matrix products and attention."""

    width: int
    narrow: int  # of all keys, and of all values
    head_width: int
    length: int
    blocks: int
    into: int  # an MLP, gates and all
    hidden: int
    vocab_size: int

    def work(self, share: float) -> float:
        """Multiplications for each position, if a share of them needs a prediction: the head and all of the last block
        but its keys and values run only there."""
        keys = 2 * self.width * self.narrow
        rest = self.width * (2 * self.width + self.into + self.hidden + 2 * self.length)
        return self.blocks * (keys + rest) - (1 - share) * rest + share * self.head()

    def head(self) -> int:
        return self.width * self.vocab_size


def products_of(shape: Mapping[str, Any], gates: int) -> Products:
    """Of a shape as --out has it: without groups of heads, each head has keys of its own."""
    head_width = shape["width"] // shape["heads"]
    narrow = head_width * shape.get("groups", shape["heads"])
    into = (1 + gates) * shape["hidden"]
    return Products(
        shape["width"], narrow, head_width, shape["length"], shape["blocks"], into, shape["hidden"], shape["vocab_size"]
    )


def normal(*size: int) -> Tensor:
    """Standard normal numbers: a chip draws less power, and runs faster, on zeros."""
    return torch.randn(size, device=PLACE, dtype=torch.bfloat16)


def attention_of(few: int, q: Tensor, k: Tensor, v: Tensor) -> Callable[[int], Tensor]:
    """Plain attention of so many queries of each sample, by the kernel of torch's that is fastest with all of them and
    takes a few, too."""
    grouped, every = q.shape[1] != k.shape[1], q.shape[2]

    def by(name: str) -> Callable[[int], Tensor]:
        def attend(queries: int) -> Tensor:
            with sdpa_kernel(ATTENTION[name]):
                return F.scaled_dot_product_attention(q[:, :, :queries], k, v, enable_gqa=grouped)

        return attend

    def calls(name: str) -> speed.TimedCalls:
        return lambda nfe: (float(by(name)(every).shape[2]) / every for _ in range(nfe))

    taken = {}
    for name in ATTENTION:
        with suppress(RuntimeError):  # it is not there, or not for this shape
            by(name)(few), by(name)(every)
            taken[name] = calls(name)
    costs = speed.measure(taken, NFE, 1, RUNS, q.device)
    quickest = min(taken, key=lambda name: cost.seconds if (cost := costs[name]) else math.inf)
    print(f"attention by {quickest}", flush=True)
    return by(quickest)


def floor(sizes: Products, batch: int, share: float) -> speed.TimedCalls:
    """Calls of nothing but a model's matrix products and attention: no norms, rotations, activations or sums. Maps of
    the same input are one product. All blocks have the same weights and inputs, which no cache can hold."""
    width, length, queries = sizes.width, sizes.length, int(share * sizes.length)
    matrices = {
        "queries, keys and values": (width + 2 * sizes.narrow, width), "out": (width, width),
        "into": (sizes.into, width), "down": (width, sizes.hidden),
        "head": (sizes.vocab_size + -sizes.vocab_size % networks.ALIGNMENT, width),
    }  # fmt: skip
    qkv, out, into, down, head = (normal(*size) for size in matrices.values())
    features, inner = normal(batch * length, width), normal(batch * length, sizes.hidden)
    attend = attention_of(queries, *(
        normal(batch, length, part // sizes.head_width, sizes.head_width).transpose(1, 2)
        for part in (width, sizes.narrow, sizes.narrow)
    ))  # fmt: skip

    def after(queries: int) -> None:
        """A block from its attention on, at that many positions of each sample."""
        attend(queries)
        F.linear(features[: batch * queries], out)
        F.linear(features[: batch * queries], into)
        F.linear(inner[: batch * queries], down)

    def calls(nfe: int) -> Iterator[float]:
        for _ in range(nfe):
            for _ in range(sizes.blocks - 1):
                F.linear(features, qkv)
                after(length)
            F.linear(features, qkv[width:])
            F.linear(features[: batch * queries], qkv[:width])
            after(queries)
            F.linear(features[: batch * queries], head)
            yield queries / length

    return calls


def floored(model: Model, batch: int, tiny: bool, share: float) -> dict[str, Any]:
    """Bare forwards, CRS, and the floor at CRS's share of head rows, alternately."""
    seconds: dict[str, float] = {}
    with timed("building", seconds):
        random = model.make(tiny)
        denoiser = model.at_once(random)
    with timed("measuring", seconds):
        contenders = {
            "bare": speed.forwards(denoiser, forward_of(denoiser), batch),  # type: ignore[arg-type]
            "CRS": speed.generation(denoiser, CRS(), batch),
            FLOOR: floor(products_of(asdict(random.shape), model.gates), batch, share),
        }
        costs = speed.measure(contenders, NFE, batch * denoiser.length, FLOOR_RUNS, denoiser.device)
    found: dict[str, Any] = {"seconds": seconds, "costs": {}}
    for name, cost in costs.items():
        assert cost is not None, f"{name} does not fit in memory"
        found["costs"][name] = {key: value for key, value in asdict(cost).items() if key != "peak_gib"}  # blocks shared
        print(f"  {name}: {cost.ratio:.3f} of bare", flush=True)
    return found


# -- the page ----------------------------------------------------------------------------------------------------------


def page(found: dict[str, Any]) -> str:
    """What docs/speed.md says of large models."""
    cases = {name: found[case] for name, case in cases_of(found).items()}
    lines = [
        f"| {found['nfe']} calls | batch | weights, GiB | peak, GiB | beyond the weights | "
        + " | ".join(f"{name}, of bare" for name in SAMPLERS) + " |",
        "|---|---|---|---|---|" + "---|" * len(SAMPLERS),
    ]  # fmt: skip
    for name, case in cases.items():
        ratios = " | ".join(f"{case['costs'][sampler]['ratio']:.3f}" for sampler in SAMPLERS)
        size = f"{case['weights GiB']:.1f} | {peak_of(case):.1f} | {beyond(case):.1%}"
        lines.append(f"| {name} | {case['batch']} | {size} | {ratios} |")

    def each(of: Callable[[Products, dict[str, Any]], str]) -> str:
        about = ((products_of(case["shape"], MODELS[name].gates), case["costs"]) for name, case in cases.items())
        return " and ".join(of(sizes, costs) for sizes, costs in about)

    heads = each(lambda sizes, _: f"{sizes.head() / sizes.work(1):.1%}")
    rows = each(lambda _, costs: f"{costs['CRS']['head_rows']:.0%}")
    left = each(lambda sizes, costs: short(sizes.work(costs["CRS"]["head_rows"]) / sizes.work(1)))
    own = each(lambda _, costs: short(costs["own forward"]["ratio"]))
    crs = each(lambda _, costs: short(costs["CRS"]["ratio"]))
    text = (
        f"Where the work lies tells why. The head is {heads} of all multiplications; CRS needs {rows} of its rows, and "
        f"of the last block's, which leaves {left} of the work. limpet's own backbone and head at every position take "
        f"{own} of bare forwards. Both together are CRS's {crs}: of a large network with a small head, a sampler can "
        f"leave out little."
    )
    floors = {name: found["floor"][case]["costs"] for name, case in cases_of(found.get("floor", {})).items()}
    if floors:
        beside = ", ".join(
            f"{short(costs[FLOOR]['ratio'])} of bare for the {name}, where CRS took {short(costs['CRS']['ratio'])}"
            for name, costs in floors.items()
        )
        text += (
            " What it cannot was measured alternately with both: the same products and plain attention by torch's "
            "fastest kernels, at CRS's rows, with no norm, rotation, activation or sum between them. They take "
            f"{beside}. No sampler with as many head rows goes below that in bfloat16, and what lies between is all "
            "that a faster backbone could save."
        )
    return "\n".join([*lines, "", textwrap.fill(text, 120, break_on_hyphens=False)])


def cases_of(found: Mapping[str, Any]) -> dict[str, str]:
    """Which cases were measured, by model; the last of a model's, if there are several batches."""
    return {name: case for case in found for name in MODELS if case.startswith(f"{name}, batch ")}


def peak_of(case: dict[str, Any]) -> float:
    """The most that any sampler allocated, weights included."""
    return max(case["costs"][name]["peak_gib"] for name in SAMPLERS)


def beyond(case: dict[str, Any]) -> float:
    """The same beyond the weights, as a share of them."""
    return peak_of(case) / case["weights GiB"] - 1


def short(ratio: float) -> str:
    return f"{ratio:.3f}".removeprefix("0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/large.json"))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batch", type=int, help="samples at once, if not each model's own number")
    parser.add_argument("--floor", action="store_true", help="also what no sampler can leave out")
    parser.add_argument("--page", type=Path, help="fill this page from --out, and measure nothing")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see that it runs")
    options = parser.parse_args()
    found: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    if options.page is not None:
        put(options.page, "large", page(found))
        return
    found |= {"device": torch.cuda.get_device_name() if PLACE == "cuda" else PLACE, "nfe": NFE}

    def section(where: dict[str, Any], case: str, measure: Callable[..., dict[str, Any]], *arguments: Any) -> None:
        if case in where:
            return
        print(case, flush=True)
        where[case] = measure(*arguments)
        options.out.write_text(json.dumps(found, indent=1) + "\n")
        torch.compiler.reset()  # which else holds the model
        gc.collect()

    for name in options.models:
        model = MODELS[name]
        batch = options.batch or model.batch
        case = f"{name}, batch {batch}"
        section(found, case, measured, model.make, batch, options.tiny)
        if options.floor:
            share = found[case]["costs"]["CRS"]["head_rows"]
            section(found.setdefault("floor", {}), case, floored, model, batch, options.tiny, share)


if __name__ == "__main__":
    main()
