"""Every denoiser by name: exact sources, built-in models, files, the hub."""

from __future__ import annotations

import os
from typing import Any

from limpet.denoisers import Denoiser, files, sources


def load(name: str | os.PathLike[str], **options: Any) -> Denoiser:
    """A model by name: "mini" or another built-in one, "exact:words" or another source whose law is known, a folder,
    a .safetensors or .ckpt file, or "owner/name" on the hub.

    Options are those of `limpet.denoisers.files.load`: device, precision, weights, revision. An exact source
    computes in float64 on the CPU whatever they say."""
    text = os.fspath(name)
    return sources.source(text) if text.startswith("exact:") else files.load(name, **options)
