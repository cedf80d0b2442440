"""One file per command of the command line; this one holds what they share: where words, progress and JSON go."""

from __future__ import annotations

import json
import sys
import time
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

from limpet.errors import LimpetError
from limpet.evaluation.judges import BUILTIN, Judge, has_builtin, load_judge
from limpet.models import Denoiser
from limpet.models.duo import Precision
from limpet.models.loading import load
from limpet.samplers import Sampler, available, params, parse

# Results. A pipe has no width of its own, and a table must not be cut to fit one.
out = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)
err = Console(stderr=True, highlight=False)  # progress and remarks

DEFAULT_MODEL = "mini"

# Options of many commands, with their words
MODEL = "built-in name, folder, file, owner/name on the hub, exact:NAME, a package's model, or ./my.py:factory"
Model = Annotated[str, tyro.conf.arg(help=MODEL)]
Device = Annotated[str | None, tyro.conf.arg(help="cpu, cuda, ...; a GPU where there is one")]
Weights = Annotated[
    Literal["ema", "raw"], tyro.conf.arg(help="of a training checkpoint: its running average, or its own weights")
]
Revision = Annotated[str | None, tyro.conf.arg(help="of a model on the hub: a commit, branch or tag")]
Length = Annotated[int | None, tyro.conf.arg(help="tokens in a sample; the model's own unless told")]
On = Literal["local", "processes", "ray"]  # where work is done
Json = Annotated[bool, tyro.conf.arg(help="print one JSON document")]


@dataclass(frozen=True)
class Runs:
    """Where networks run, and in what: options of many commands. As they come, they are those of `limpet.load`, so that
    a command and Python draw the same."""

    device: Device = None
    precision: Precision | Literal["auto"] = "float32"
    """what the network runs in; auto is bfloat16 where the device has it, float8 is for Duo networks alone"""

    @property
    def resolved(self) -> Precision:
        """What "auto" means: bfloat16 where the device computes in it, float32 elsewhere."""
        if self.precision != "auto":
            return self.precision
        gpu = torch.cuda.is_available() if self.device is None else self.device.startswith("cuda")
        native = torch.cuda.is_bf16_supported() if gpu else native_bfloat16()
        return "bfloat16" if native else "float32"

    def judge(self, name: str) -> Judge | None:
        """A judge by name; "none" is nobody, and "auto" the built-in one where it is. Beside a model in float8 it runs
        in bfloat16."""
        name = name if name != "auto" else BUILTIN if has_builtin() else "none"
        precision = "bfloat16" if self.resolved == "float8" else self.resolved
        return None if name == "none" else load_judge(name, self.device, precision)


@dataclass(frozen=True)
class Where(Runs):
    """And which of a model's weights: options of every command that names a model."""

    weights: Weights = "ema"
    revision: Revision = None

    @property
    def which(self) -> dict[str, str]:
        """What was told of the weights, as `load` takes it; not every family has two kinds of them."""
        told = {"weights": self.weights if self.weights != "ema" else None, "revision": self.revision}
        return {name: value for name, value in told.items() if value is not None}

    def load(self, model: str) -> Denoiser:
        return load(model, device=self.device, precision=self.resolved, **self.which)


# Their options stand among the command's own.
Running = Annotated[Runs, tyro.conf.arg(name="")]
Somewhere = Annotated[Where, tyro.conf.arg(name="")]
HERE, ANYWHERE = Where(), Runs()


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
    """Every sampler with its parameters as they come; `limpet samplers` has their words."""
    lines = ["a sampler and its parameters, of which `limpet samplers` says more:"]
    for name, kind in available().items():
        values = {param.name: param.default for param in params(kind).values() if param.name != "nfe"}
        lines.append(" ".join([name, *(f"{param}={value}" for param, value in values.items())]))
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
            out.print(part, markup=False, soft_wrap=not out.is_terminal)  # a pipe's reader cuts lines where it likes


@contextmanager
def progress(what: str = "", total: float | None = None, **fields: Any) -> Iterator[Callable[..., None]]:
    """How far it is, on standard error: what, how much, details, time left. Gives rich's `update`.

    In a terminal that is a bar, which goes away when done; elsewhere a line for whatever was described, an arm for
    one, and the time that it took."""
    if not err.is_terminal:
        with _lines(what) as tell:
            yield tell
        return
    columns = "{task.description}", BarColumn(), "{task.completed}/{task.total}", "{task.fields[detail]}"
    with Progress(*columns, TimeRemainingColumn(), console=err, transient=True) as bar:
        yield partial(bar.update, bar.add_task(what, total=total, **{"detail": "", **fields}))


@contextmanager
def _lines(what: str) -> Iterator[Callable[..., None]]:
    begun = time.monotonic()

    def tell(description: str | None = None, **_: Any) -> None:
        nonlocal what, begun
        if description not in (None, what):
            done()
            what, begun = str(description), time.monotonic()

    def done() -> None:
        if what:
            err.print(f"{what}: {time.monotonic() - begun:.1f} s", markup=False, soft_wrap=True)

    yield tell
    done()
