"""Two large models with random weights, written in parts, loaded and sampled on one GPU: memory, and time a call.

    python benchmarks/large.py --out benchmarks/results/large.json

A Duo of 1.7B parameters in its blocks and a Sumi of 7B, both in bfloat16: eight calls of native sampling, CRS and Mend
beside as many compiled forwards of the same network, head and all. What a path costs does not depend on what the
weights are, but for the share of head rows, which stands beside. `--tiny` is the same on a CPU, to see that it runs."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from limpet import load, speed
from limpet.denoisers import Denoiser, duo, sumi
from limpet.samplers import CRS, Mend, Native, Sampler
from trained_like import trained_like

PART = 4 * 2**30  # bytes of a file of weights
NFE = 8
SAMPLERS: dict[str, Sampler] = {"native": Native(), "CRS": CRS(), "Mend": Mend()}


def write(network: nn.Module, config: dict[str, Any], prefix: str, folder: Path) -> float:
    """A network in parts as on the hub, every matrix in bfloat16; returns its GiB."""
    parts: list[dict[str, Tensor]] = [{}]
    for name, tensor in network.state_dict().items():
        stored = tensor.detach().to("cpu", torch.bfloat16 if tensor.dim() == 2 else tensor.dtype).contiguous()
        if sum(one.nbytes for one in parts[-1].values()) + stored.nbytes > PART:
            parts.append({})
        parts[-1][f"{prefix}{name}"] = stored
    where, total = {}, 0
    for i, part in enumerate(parts, 1):
        file = f"model-{i:05}-of-{len(parts):05}.safetensors"
        save_file(part, folder / file)
        where |= dict.fromkeys(part, file)
        total += sum(one.nbytes for one in part.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    return total / 2**30


def a_duo(tiny: bool, folder: Path) -> float:
    shape = duo.Shape(131072, 1024, 2176, 28, 17, 128, 8704)
    if tiny:
        shape = duo.Shape(300, 32, 64, 2, 2, 16, 128)
    with torch.device(PLACE):
        network = trained_like(shape)
    return write(network, duo.Duo(network).config(), "backbone.", folder)


def a_sumi(tiny: bool, folder: Path) -> float:
    shape = sumi.Shape(100278, 2048, 4096, 36, 32, 14336, 8)
    if tiny:
        shape = sumi.Shape(300, 32, 64, 2, 4, 128, 2)
    torch.manual_seed(0)
    with torch.device(PLACE):
        network = sumi.Network(shape)
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
    return write(network, config, "", folder)


def forward_of(model: Denoiser) -> Callable[[Tensor, Tensor], Tensor]:
    """The network as it stands, body and head at every position."""
    network: Any = model.network  # type: ignore[attr-defined]
    if isinstance(network, duo.Network):
        return network

    def forward(tokens: Tensor, sigma: Tensor) -> Tensor:
        x, rotation = network.embed_tokens(tokens).float(), network.rotary_emb(tokens.shape[1])
        for layer in network.layers:
            x = layer(x, rotation, None, None)
        logits: Tensor = network.head(network.norm(x))
        return logits

    return forward


def measured(make: Callable[[bool, Path], float], batch: int, tiny: bool) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp())
    try:
        stored = make(tiny, folder)
        if PLACE == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        model = load(str(folder), device=PLACE, precision="bfloat16")
        seconds = time.perf_counter() - begun
    finally:
        shutil.rmtree(folder)
    found: dict[str, Any] = {
        "parameters": model.info["parameters"], "shape": model.info["shape"], "stored GiB": stored,
        "loading seconds": seconds, "batch": batch,
    }  # fmt: skip
    held = sum(parameter.nbytes for parameter in model.network.parameters()) / 2**30  # type: ignore[attr-defined]
    found["weights GiB"] = held
    if PLACE == "cuda":
        found["peak while loading GiB"] = torch.cuda.max_memory_allocated() / 2**30
    bare = torch.compile(forward_of(model), dynamic=False) if PLACE == "cuda" else forward_of(model)
    costs = speed.side_by_side(model, bare, NFE, batch, 3, samplers=SAMPLERS)  # type: ignore[arg-type]
    found["costs"] = {name: asdict(cost) if cost else None for name, cost in costs.items()}
    return found


PLACE = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/large.json"))
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see that it runs")
    options = parser.parse_args()
    found: dict[str, Any] = {"device": torch.cuda.get_device_name() if PLACE == "cuda" else PLACE, "nfe": NFE}
    for name, make, batch in (("Duo 1.7B", a_duo, 16), ("Sumi 7B", a_sumi, 4)):
        found[name] = measured(make, batch, options.tiny)
        options.out.write_text(json.dumps(found, indent=1) + "\n")
        ratios = {arm: round(cost["ratio"], 3) for arm, cost in found[name]["costs"].items() if cost}
        peaks = {arm: cost["peak_gib"] for arm, cost in found[name]["costs"].items() if cost}
        print(name, {key: value for key, value in found[name].items() if key != "costs"}, ratios, peaks, flush=True)


if __name__ == "__main__":
    main()
