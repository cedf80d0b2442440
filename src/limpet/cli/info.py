"""`limpet info MODEL`: what a model is, where it came from, and what decides its output."""

from typing import Any

import tyro

from limpet.cli.common import DEFAULT_LOADING, Json, Loading, Model, show
from limpet.diffusion.process import EPS


def run(
    model: tyro.conf.Positional[Model],
    /,
    *,
    loading: Loading = DEFAULT_LOADING,
    json: Json = False,
) -> None:
    """Load a model and print its source, digest, sizes, noise schedule and tokenizer.

    $ limpet info mini
    $ limpet info s-sahoo/duo-distilled --json
    $ limpet info runs/duo.ckpt --weights raw
    """
    found = loading.load(model)
    about: dict[str, Any] = {
        "name": found.name,
        "digest": found.digest,
        "weights digest": getattr(found, "weights_digest", "none"),
        **found.info,
        "precision": found.precision,
        "vocab_size": found.vocab_size,
        "length": found.length,
        "device": str(found.device),
        "predicts": found.predicts,
        "schedule": found.schedule.name,
        "signal": {f"t = {t:g}": float(found.schedule.signal(t)) for t in (EPS, 0.5, 1.0)},
        "special": getattr(found.tokenizer, "special", {}),
        "text": found.tokenizer is not None,
        "checker": found.checker or "none",
        "prompt": found.prompt_layout.name if found.prompt_layout else "text or tokens",
    }
    show(json, about, (f"{key:<11} {_text(value)}" for key, value in about.items()))


def _text(value: object) -> str:
    parts = [f"{name} {_number(part)}" for name, part in value.items()] if isinstance(value, dict) else [value]
    return ", ".join(map(_number, parts)) or "none"


def _number(value: object) -> str:
    """A whole number with separators, a decimal with six digits, anything else as it is."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}" if isinstance(value, float) else str(value)
