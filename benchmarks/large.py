"""Two large models with random weights, written in parts, loaded and sampled on one GPU: memory, and time a call.

    python benchmarks/large.py --out benchmarks/results/large.json

A Duo of 1.7B parameters in its blocks and a Sumi of the size called 7B, both in bfloat16: eight calls of native
sampling, CRS and Mend beside as many compiled forwards of the same network, head and all. What a path costs does not
depend on what the weights are, but for the share of head rows, which stands beside; so all blocks have the same. The
Duo's forward is compiled whole, the Sumi's a layer at a time, as limpet runs it. Every model is written to --out as
soon as it is measured, and a model and batch that are there are not measured again. `--tiny` is the same on a CPU, to
see that it runs."""

from __future__ import annotations

import argparse
import gc
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from limpet import load, speed
from limpet.denoisers import Denoiser, duo, sumi, timeless
from limpet.denoisers.files import INDEX
from limpet.samplers import CRS, Mend, Native, Sampler
from trained_like import trained_like

PLACE = "cuda" if torch.cuda.is_available() else "cpu"
PART = 4 * 2**30  # bytes of a file of weights
NFE = 8
SAMPLERS: dict[str, Sampler] = {"native": Native(), "CRS": CRS(), "Mend": Mend()}

State = dict[str, Tensor]


def a_duo(tiny: bool) -> tuple[State, dict[str, Any]]:
    shape = duo.Shape(131072, 1024, 2176, 28, 17, 128, 8704)
    if tiny:
        shape = duo.Shape(300, 32, 64, 3, 2, 16, 128)
    with torch.device(PLACE):
        network = trained_like(replace(shape, blocks=1))
    sizes = dict(zip(duo.RELEASED, astuple(shape), strict=True))
    return repeated(network, "backbone.", shape.blocks), {"model_type": "duo", "causal": False, **sizes}


def a_sumi(tiny: bool) -> tuple[State, dict[str, Any]]:
    shape = sumi.Shape(100278, 2048, 4096, 36, 32, 14336, 8)
    if tiny:
        shape = sumi.Shape(300, 32, 64, 3, 4, 128, 2)
    torch.manual_seed(0)
    with torch.device(PLACE):
        network = sumi.Network(replace(shape, blocks=1))
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
    return repeated(network, "", shape.blocks), config


class Model(NamedTuple):
    make: Callable[[bool], tuple[State, dict[str, Any]]]  # its tensors and its config.json
    batch: int


MODELS = {"Duo 1.7B": Model(a_duo, 16), "Sumi 7B": Model(a_sumi, 4)}


def repeated(network: nn.Module, prefix: str, blocks: int) -> State:
    """The tensors of a network of one block as those of many that are alike, every matrix in bfloat16."""
    state: State = {}
    for name, tensor in network.state_dict().items():
        stored = tensor.detach().to(torch.bfloat16 if tensor.dim() == 2 else tensor.dtype)
        numbers = range(blocks if re.match(r"(blocks|layers)\.0\.", name) else 1)
        state |= {prefix + name.replace(".0.", f".{i}.", 1): stored for i in numbers}
    return state


def write(state: State, config: dict[str, Any], folder: Path) -> float:
    """A model in parts as on the hub; returns its GiB."""
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
    (folder / "config.json").write_text(json.dumps(config))
    return total / 2**30


def forward_of(model: Denoiser) -> speed.Forward:
    """The network as it stands, body and head at every position, compiled where there is a GPU."""
    network: Any = model.network  # type: ignore[attr-defined]
    whole = isinstance(network, duo.Network)
    read = network if whole else lambda x: network.head(network.norm(x))
    through = timeless.everywhere
    if PLACE == "cuda":
        read, through = torch.compile(read, dynamic=False), timeless.compiled()
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


def measured(make: Callable[[bool], tuple[State, dict[str, Any]]], batch: int, tiny: bool) -> dict[str, Any]:
    seconds: dict[str, float] = {}
    folder = Path(tempfile.mkdtemp())
    try:
        with timed("writing", seconds):
            stored = write(*make(tiny), folder)
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
        costs = speed.side_by_side(model, bare, NFE, batch, 3, samplers=SAMPLERS)  # type: ignore[arg-type]
    found["costs"] = {name: asdict(cost) if cost else None for name, cost in costs.items()}
    for name, cost in costs.items():
        beyond = f", peak {cost.peak_gib / held - 1:+.1%} of the weights" if cost and cost.peak_gib else ""
        print(f"  {name}: " + (f"{cost.ratio:.3f} of bare{beyond}" if cost else "does not fit"), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/large.json"))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batch", type=int, help="samples at once, if not each model's own number")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see that it runs")
    options = parser.parse_args()
    found: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    found |= {"device": torch.cuda.get_device_name() if PLACE == "cuda" else PLACE, "nfe": NFE}
    for name in options.models:
        make, batch = MODELS[name]
        batch = options.batch or batch
        case = f"{name}, batch {batch}"
        if case in found:
            continue
        print(case, flush=True)
        found[case] = measured(make, batch, options.tiny)
        options.out.write_text(json.dumps(found, indent=1) + "\n")
        torch.compiler.reset()  # which else holds the model
        gc.collect()


if __name__ == "__main__":
    main()
