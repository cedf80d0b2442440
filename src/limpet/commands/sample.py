"""`limpet sample`: texts from a model under a sampler."""

from __future__ import annotations

import json as jsonlib
import time
from pathlib import Path
from typing import Annotated

import tyro

from limpet.canvases import reply
from limpet.commands import ARM_HELP, DEFAULT_MODEL, HERE, Length, Model, Somewhere, arms, err, out, progress
from limpet.denoisers import Canvas
from limpet.engine.path import Info, State
from limpet.errors import LimpetError
from limpet.files import write_whole
from limpet.samples import sample
from limpet.view import trajectory


def run(
    model: Model = DEFAULT_MODEL,
    arm: Annotated[str, tyro.conf.arg(help=ARM_HELP)] = "crs",
    nfe: int = 64,
    prompt: str | None = None,
    n: int = 4,
    length: Length = None,
    seed: int = 8200,
    batch_size: int | None = None,
    where: Somewhere = HERE,
    record: Path | None = None,
    out_file: Annotated[Path | None, tyro.conf.arg(name="out")] = None,
    json: bool = False,
) -> None:
    """Sample texts, with CRS unless told otherwise.

    $ limpet sample --n 2 --nfe 32
    $ limpet sample --model s-sahoo/duo-distilled --prompt "The sea" --length 1024 --device cuda
    $ limpet sample --model google/diffusiongemma-26B-A4B-it --prompt "Why is the sky blue?" --precision bfloat16
    $ limpet sample --arm "crs nfe=32 budget=.25"
    $ limpet sample --arm "native top_p=.9" --json > samples.jsonl
    $ limpet sample --n 1 --record crs.limpet

    Args:
        nfe: network calls for one sample, unless the arm says otherwise
        prompt: text that every sample begins with; a model that replies to what is said replies to it
        n: how many samples
        seed: the same seed gives the same samples, whatever the batch size
        batch_size: samples computed at once
        record: also write the path of the first sample here, for `limpet watch` and `limpet view`
        out_file: also write the samples here as JSON lines
        json: print JSON lines, one a sample, instead of texts
    """
    ((name, sampler),) = arms([arm], nfe).items()
    denoiser = where.load(model)
    for file in (out_file, record):
        if file is not None and not file.absolute().parent.is_dir():
            raise LimpetError(f"{file} cannot be written: the folder {file.absolute().parent} does not exist")
    if record is not None and prompt is not None and isinstance(denoiser, Canvas):
        raise LimpetError(f"{denoiser.name} replies in canvases, and a record has room for one: leave out --record")
    tokens = (length or denoiser.length) * n
    begun = time.monotonic()
    with progress(f"{denoiser.name}, {name}", n * sampler.nfe) as tell:

        def watch(state: State, info: Info, done: int, total: int) -> None:
            rate = tokens * done / total / (time.monotonic() - begun)
            selected = info.marks.get("selected")
            count = "" if selected is None else f" · {selected.float().mean(0).sum():.0f} selected"
            tell(completed=done, detail=f"call {info.call + 1}/{sampler.nfe}{count} · {rate:,.0f} tokens/s")

        if isinstance(denoiser, Canvas) and prompt is not None:
            samples = reply(denoiser, sampler, n, seed, length, prompt, batch_size, watch)
        else:
            samples = sample(denoiser, sampler, n, seed, length, prompt, batch_size=batch_size, progress=watch)
    lines = [jsonlib.dumps(row, ensure_ascii=False) for row in samples.rows()]
    if out_file is not None:
        try:
            write_whole(out_file, "\n".join(lines) + "\n")
        except LimpetError:
            print("\n".join(lines))  # they took time: they are not lost with the disk
            raise
        err.print(f"wrote {n} samples to {out_file}", markup=False)
    if record is not None:
        path = trajectory.record(denoiser, sampler, seed, 0, length, prompt)
        path.save(record)
        err.print(f"wrote the path of sample 0 to {record}", markup=False)
        if path.frames[-1].state.tolist() != samples.tokens[0].tolist():  # rounding, in a batch of another size
            err.print("its text differs from sample 0 here; --n 1 --precision float32 gives the same", markup=False)
    if json:
        print("\n".join(lines))
    elif out_file is None:
        texts = samples.texts if denoiser.tokenizer else [str(ids) for ids in samples.tokens.tolist()]
        for i, text in enumerate(texts):
            err.rule(f"sample {i} · seed {seed} · {samples.nfe} calls · {int(samples.selected[i])} selected")
            out.print(text, markup=False)
