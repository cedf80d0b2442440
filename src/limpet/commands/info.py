"""`limpet info MODEL`: what was loaded, from where, and what decides its output."""

from __future__ import annotations

from typing import Any, Literal

import tyro

from limpet.commands import IN_FLOAT32, Somewhere, out, print_json
from limpet.denoisers import Denoiser
from limpet.denoisers.catalog import load
from limpet.engine.process import EPS


def describe(model: Denoiser) -> dict[str, Any]:
    """Everything worth knowing about a model before trusting a number that came from it."""
    return {
        "name": model.name,
        "digest": model.digest,
        **model.info,
        "precision": model.precision,
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
    revision: str | None = None,
    where: Somewhere = IN_FLOAT32,
    json: bool = False,
) -> None:
    """Load a model and say what it is: where it came from, its digest, sizes, noise schedule and tokenizer.

    $ limpet info mini
    $ limpet info s-sahoo/duo-distilled --json
    $ limpet info runs/duo.ckpt --weights raw

    Args:
        model: built-in name, folder, file, owner/name on the hub, exact:NAME, a package's model, or ./my.py:factory
        weights: of a training checkpoint, its running average or its own weights
        revision: a commit, branch or tag on the hub
        json: print one JSON document
    """
    options = {} if weights == "ema" else {"weights": weights}  # not every family has two
    about = describe(load(model, device=where.device, precision=where.resolved, revision=revision, **options))
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
