"""One file per command of the command line; this one holds what they share: where words, progress and JSON go."""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

# Results. A pipe has no width of its own, and a table must not be cut to fit one.
out = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)
err = Console(stderr=True, highlight=False)  # progress and remarks

DEFAULT_MODEL = "mini"
Precision = Literal["auto", "float32", "bfloat16"]


def precision_on(device: str | None, precision: Precision) -> Literal["float32", "bfloat16"]:
    """What "auto" means: bfloat16 where the device computes in it, float32 elsewhere."""
    if precision != "auto":
        return precision
    gpu = torch.cuda.is_available() if device is None else device.startswith("cuda")
    native = torch.cuda.is_bf16_supported() if gpu else native_bfloat16()
    return "bfloat16" if native else "float32"


def native_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 matrices itself."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def print_json(value: Any) -> None:
    """One JSON document on standard output, nothing else."""
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False, allow_nan=False)
    sys.stdout.write("\n")


def progress_bar() -> Progress:
    """A bar on standard error: what, how far, details, time left; it goes away when done."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[detail]}"),
        TimeRemainingColumn(),
        console=err,
        transient=True,
    )
