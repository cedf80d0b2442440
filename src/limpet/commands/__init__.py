"""One file per command of the command line; this one holds what they share: where words, progress and JSON go."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from limpet.denoisers import Denoiser
from limpet.denoisers.catalog import load
from limpet.errors import LimpetError
from limpet.judges import BUILTIN, Judge, has_builtin, load_judge
from limpet.samplers import Sampler, available, knobs, parse

# Results. A pipe has no width of its own, and a table must not be cut to fit one.
out = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)
err = Console(stderr=True, highlight=False)  # progress and remarks

DEFAULT_MODEL = "mini"
Precision = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True)
class Where:
    """Where networks run, and in what: options of many commands."""

    device: str | None = None
    """cpu, cuda, ...; a GPU where there is one"""
    precision: Precision = "auto"
    """what the network runs in; auto is bfloat16 where the device has it"""

    @property
    def resolved(self) -> Literal["float32", "bfloat16"]:
        return precision_on(self.device, self.precision)

    def load(self, model: str) -> Denoiser:
        return load(model, device=self.device, precision=self.resolved)

    def judge(self, name: str) -> Judge | None:
        """A judge by name; "none" is nobody, and "auto" the built-in one where it is."""
        name = name if name != "auto" else BUILTIN if has_builtin() else "none"
        return None if name == "none" else load_judge(name, self.device, self.resolved)


Somewhere = Annotated[Where, tyro.conf.arg(name="")]  # its options stand among the command's own
HERE, IN_FLOAT32 = Where(), Where(precision="float32")


def arms(texts: Sequence[str], nfe: int | None = None) -> dict[str, Sampler]:
    """The samplers that `--arm` names, each by its own words alone; `nfe` is for those that say no number of calls."""
    parsed = [(text, *parse(text, nfe=nfe)) for text in texts]
    often = Counter(name for _, name, _ in parsed)
    found: dict[str, tuple[str, Sampler]] = {}
    for text, name, sampler in parsed:
        name = name if often[name] == 1 else f"{name} nfe={sampler.nfe}"
        if name in found:
            raise LimpetError(
                f"the arms {found[name][0]!r} and {text!r} are both {name!r}: change one, or call it something, as in "
                f'"other: {text.partition(": ")[2] or text}"'
            )
        found[name] = text, sampler
    return {name: sampler for name, (_, sampler) in found.items()}


def _arm_help() -> str:
    """Every sampler with its knobs as they come; `limpet samplers` has their words."""
    lines = ["a sampler and its knobs, of which `limpet samplers` says more:"]
    for name, kind in available().items():
        values = {knob.name: knob.default for knob in knobs(kind).values() if knob.name != "nfe"}
        lines.append(" ".join([name, *(f"{knob}={value}" for knob, value in values.items())]))
    return "\n\n".join([*lines, "./file.py:Name is one of your own"])


ARM_HELP = _arm_help()


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
