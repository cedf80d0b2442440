"""What the commands share: options, progress on standard error, results on standard output."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeRemainingColumn

from limpet.cli.streams import print_json
from limpet.errors import LimpetError
from limpet.evaluation.judges import BUILTIN as BUILTIN_JUDGE
from limpet.evaluation.judges import Judge, has_builtin, load_judge
from limpet.files import read_prompts, read_text
from limpet.models import Denoiser
from limpet.models.loading import load
from limpet.models.networks import Precision
from limpet.samplers import Sampler, choose_sampler, named_samplers
from limpet.samplers.recommended import SHARPNESS

# Results. A pipe has no width of its own, and a table must not be cut to fit one.
out = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)
err = Console(stderr=True, highlight=False)  # progress and remarks

DEFAULT_MODEL = "mini"

# Options of many commands
UNSET = tyro.conf.arg(help_behavior_hint="")  # of an option whose default is that it is left out: help prints none
Model = Annotated[
    str,
    tyro.conf.arg(help="built-in name, folder, file, owner/name on the hub, exact:NAME or ./my.py:factory"),
]  # fmt: skip
Device = Annotated[str | None, tyro.conf.arg(help="cpu, cuda, ... (default: a GPU if there is one)"), UNSET]
Weights = Annotated[Literal["ema", "raw"], tyro.conf.arg(help="a checkpoint's averaged or raw weights")]
Revision = Annotated[str | None, tyro.conf.arg(help="of a model on the hub: a commit, branch or tag"), UNSET]
Length = Annotated[int | None, tyro.conf.arg(help="tokens in a sample (default: the model's)")]
Json = Annotated[bool, tyro.conf.arg(help="print one JSON document")]


@dataclass(frozen=True)
class RunOptions:
    """Where networks run, and in which precision. The defaults are those of `limpet.load`, so that a command and
    Python draw the same samples."""

    device: Device = None
    precision: Precision | Literal["auto"] = "float32"
    """of the network; auto: bfloat16 where the device has it; float8: Duo networks"""

    @property
    def resolved(self) -> Precision:
        """The precision, with "auto" resolved: bfloat16 where the device computes in it, float32 elsewhere."""
        if self.precision != "auto":
            return self.precision
        gpu = torch.cuda.is_available() if self.device is None else self.device.startswith("cuda")
        native = torch.cuda.is_bf16_supported() if gpu else has_native_bfloat16()
        return "bfloat16" if native else "float32"

    def judge(self, name: str) -> Judge | None:
        """A judge by name; "none" is no judge, and "auto" the built-in one where it is installed. Beside a model in
        float8 a judge runs in bfloat16."""
        name = name if name != "auto" else BUILTIN_JUDGE if has_builtin() else "none"
        precision = "bfloat16" if self.resolved == "float8" else self.resolved
        return None if name == "none" else load_judge(name, self.device, precision)


@dataclass(frozen=True)
class LoadOptions(RunOptions):
    """Also which of a model's weights to load: options of every command that names a model."""

    weights: Weights = "ema"
    revision: Revision = None

    @property
    def weight_options(self) -> dict[str, str]:
        """The options about weights that differ from their defaults; not every family has both kinds of weights."""
        options = {"weights": self.weights if self.weights != "ema" else None, "revision": self.revision}
        return {name: value for name, value in options.items() if value is not None}

    def load(self, model: str) -> Denoiser:
        """A model by name."""
        return load(model, device=self.device, precision=self.resolved, **self.weight_options)


# Their options stand among the command's own.
Running = Annotated[RunOptions, tyro.conf.arg(name="")]
Loading = Annotated[LoadOptions, tyro.conf.arg(name="")]
DEFAULT_LOADING, DEFAULT_RUNNING = LoadOptions(), RunOptions()

SAMPLER_HELP = (
    'a sampler and its parameters, such as "crs nfe=16", ./file.py:Name of your own, or a file of `limpet tune`; '
    "`limpet samplers` lists them"
)
SamplerText = Annotated[str | None, tyro.conf.arg(help=SAMPLER_HELP + " (default: the one that --sharpness chooses)")]
SamplerTexts = Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(help=SAMPLER_HELP)]
Sharpness = Annotated[
    float | None,
    tyro.conf.arg(help=f"chooses the sampler: 0 is diverse, 1 is sharp (default: {SHARPNESS:g})"),
]


def has_native_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 matrices itself."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def captioned_sampler(
    sampler: str | None, nfe: int | None, sharpness: float | None, model: Denoiser | None = None
) -> tuple[str, Sampler]:
    """The caption and the sampler that a command asks for. Where it names none, standard error says which is
    recommended for the model, by its own dial if it has one; before a model is loaded, the general dial chooses."""
    if sampler is None or sharpness is not None:
        chosen = choose_sampler(sampler, nfe, sharpness, model)
        if model is not None:
            print_recommended(chosen, sharpness)
        return chosen.caption, chosen
    return next(iter(named_samplers([sampler], nfe).items()))


def print_recommended(chosen: Sampler, sharpness: float | None) -> None:
    """Say on standard error which sampler a sharpness has chosen."""
    shown = SHARPNESS if sharpness is None else sharpness
    about = f"sharpness {shown:g}, {chosen.nfe} network calls: {chosen.caption}"
    err.print(about, style="dim", markup=False, soft_wrap=True)


def show(as_json: bool, document: Any, parts: Iterable[Any]) -> None:
    """Print a result on standard output: as one JSON document, or as lines and tables."""
    if as_json:
        print_json(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    else:
        for part in parts:
            out.print(part, markup=False, soft_wrap=not out.is_terminal)  # a pipe's reader wraps lines itself


def prompt_texts(model: Denoiser, prompt: str | None, prompts: str | None) -> tuple[str, ...]:
    """The prompts of a command: one, those of a file, or none.

    For a model with a prompt layout, such as a sudoku, one prompt may also be the path of the file that holds it."""
    if prompt is not None and prompts is not None:
        raise LimpetError("both prompt and prompts are given: put the prompt into the file, or leave one out")
    if prompts is not None:
        return tuple(read_prompts(prompts))
    if prompt is None:
        return ()
    if model.prompt_layout is not None and os.path.isfile(path := os.path.expanduser(prompt)):
        return (read_text(path, "name a file with one prompt"),)
    return (prompt,)


def readable(model: Denoiser, text: str) -> str:
    """The text of a sample, to be read by people: for a model with a prompt layout, as the layout prints it."""
    return text if model.prompt_layout is None else model.prompt_layout.display(text)


@contextmanager
def progress(what: str = "", total: float | None = None, **fields: Any) -> Iterator[Callable[..., None]]:
    """Report progress on standard error: what is done, how much, details, time left. Yields rich's `update`.

    In a terminal that is a bar, which disappears when done; elsewhere one line for each description, with the time
    that it took."""
    if not err.is_terminal:
        with _progress_lines(what) as update:
            yield update
        return
    columns = "{task.description}", BarColumn(), "{task.completed}/{task.total}", "{task.fields[detail]}"
    with Progress(*columns, TimeRemainingColumn(), console=err, transient=True) as bar:
        yield partial(bar.update, bar.add_task(what, total=total, **{"detail": "", **fields}))


@contextmanager
def samplers_progress(total: int) -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """Report progress over samplers that run one after the other. total: the network calls of all their samples.

    Yields what `limpet.compare` takes as `progress`."""
    with progress(total=total) as update:

        def report_for(name: str) -> Callable[[int, int], None]:
            before = 0

            def report(done: int, total: int) -> None:
                nonlocal before
                update(description=name, advance=done - before if done > before else done)
                before = done

            return report

        yield report_for


@contextmanager
def _progress_lines(what: str) -> Iterator[Callable[..., None]]:
    start = time.monotonic()

    def update(description: str | None = None, **_: Any) -> None:
        nonlocal what, start
        if description not in (None, what):
            finish()
            what, start = str(description), time.monotonic()

    def finish() -> None:
        if what:
            err.print(f"{what}: {time.monotonic() - start:.1f} s", markup=False, soft_wrap=True)

    yield update
    finish()
