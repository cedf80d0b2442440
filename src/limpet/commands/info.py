"""`limpet info MODEL`: what was loaded, from where, and what decides its output."""

from __future__ import annotations

from typing import Any, Literal

import tyro

from limpet.commands import out, print_json
from limpet.denoisers import Denoiser
from limpet.denoisers.catalog import load
from limpet.denoisers.duo import Duo
from limpet.process import EPS


def describe(model: Denoiser) -> dict[str, Any]:
    """Everything worth knowing about a model before trusting a number that came from it."""
    told: dict[str, str] = getattr(model, "info", {})
    about: dict[str, Any] = {"name": model.name, "digest": model.digest, **told}
    if isinstance(model, Duo):
        sizes = [parameter.numel() for parameter in model.network.parameters()]
        about |= {
            "parameters": sum(sizes),
            "tensors": len(sizes),
            "shape": model.network.shape.to_dict(),
            "precision": model.precision,
        }
    return about | {
        "vocab_size": model.vocab_size,
        "length": model.length,
        "device": str(model.device),
        "predicts": model.predicts,
        "schedule": model.schedule.name,
        "signal": {f"t = {t:g}": float(model.schedule.signal(t)) for t in (EPS, 0.5, 1.0)},
        "special": getattr(model.tokenizer, "special", {}),
        "text": model.tokenizer is not None,
    }


def run(
    model: tyro.conf.Positional[str],
    /,
    *,
    weights: Literal["ema", "raw"] = "ema",
    precision: Literal["float32", "bfloat16"] = "float32",
    revision: str | None = None,
    device: str | None = None,
    json: bool = False,
) -> None:
    """Load a model and say what it is: where it came from, its digest, sizes, noise schedule and tokenizer.

    $ limpet info mini
    $ limpet info s-sahoo/duo-distilled --json
    $ limpet info runs/duo.ckpt --weights raw

    Args:
        model: a built-in name, a folder, a .safetensors or .ckpt file, owner/name on the hub, or an exact source
        weights: of a training checkpoint, its running average or its own weights
        precision: what the blocks run in; the digest covers the weights as they are run
        revision: a commit, branch or tag on the hub
        device: where to put it; a GPU where there is one, unless told
        json: print one JSON document
    """
    about = describe(load(model, device=device, precision=precision, weights=weights, revision=revision))
    if json:
        print_json(about)
        return
    for key, value in about.items():
        parts = [f"{name} {_number(part)}" for name, part in value.items()] if isinstance(value, dict) else [value]
        out.print(f"{key:<11} {', '.join(map(_number, parts)) or 'none'}", markup=False)


def _number(value: object) -> str:
    """A count with its thousands apart, a measure with six digits, anything else as it is."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}" if isinstance(value, float) else str(value)
