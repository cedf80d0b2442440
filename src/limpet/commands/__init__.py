"""One file per command of the command line; this one holds what they share: where words, progress and JSON go."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeRemainingColumn

from limpet.denoisers import Denoiser
from limpet.denoisers.catalog import load
from limpet.errors import LimpetError
from limpet.judges import BUILTIN, Judge, has_builtin, load_judge
from limpet.samplers import Sampler, available, knobs, parse

# Results. A pipe has no width of its own, and a table must not be cut to fit one.
out = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)
err = Console(stderr=True, highlight=False)  # progress and remarks

DEFAULT_MODEL = "mini"

# Options of many commands, with their words
MODEL = "built-in name, folder, file, owner/name on the hub, exact:NAME, a package's model, or ./my.py:factory"
Model = Annotated[str, tyro.conf.arg(help=MODEL)]
Device = Annotated[str | None, tyro.conf.arg(help="cpu, cuda, ...; a GPU where there is one")]
Length = Annotated[int | None, tyro.conf.arg(help="tokens in a sample; the model's own unless told")]
Json = Annotated[bool, tyro.conf.arg(help="print one JSON document")]


@dataclass(frozen=True)
class Where:
    """Where networks run, and in what: options of many commands."""

    device: Device = None
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """what the network runs in; auto is bfloat16 where the device has it"""

    @property
    def resolved(self) -> Literal["float32", "bfloat16"]:
        """What "auto" means: bfloat16 where the device computes in it, float32 elsewhere."""
        if self.precision != "auto":
            return self.precision
        gpu = torch.cuda.is_available() if self.device is None else self.device.startswith("cuda")
        native = torch.cuda.is_bf16_supported() if gpu else native_bfloat16()
        return "bfloat16" if native else "float32"

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
    return "\n\n".join([*lines, "./file.py:Name is one of your own, file.toml one that `limpet tune` wrote"])


ARM_HELP = _arm_help()
Arms = Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(help=ARM_HELP)]


def native_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 matrices itself."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def show(as_json: bool, document: Any, shown: Iterable[Any]) -> None:
    """What was found, on standard output: as one JSON document, or line by line and table by table."""
    if as_json:
        json.dump(document, sys.stdout, indent=2, ensure_ascii=False, allow_nan=False)
        sys.stdout.write("\n")
    else:
        for part in shown:
            out.print(part, markup=False)


@contextmanager
def progress(what: str = "", total: float | None = None, **fields: Any) -> Iterator[Callable[..., None]]:
    """A bar on standard error: what, how far, details, time left; it goes away when done. Gives rich's `update`."""
    columns = "{task.description}", BarColumn(), "{task.completed}/{task.total}", "{task.fields[detail]}"
    with Progress(*columns, TimeRemainingColumn(), console=err, transient=True) as bar:
        yield partial(bar.update, bar.add_task(what, total=total, **{"detail": "", **fields}))
