"""`limpet bulk`: draw many samples into a folder of parts, resumably."""

import time
from dataclasses import asdict
from typing import Annotated, Literal

import tyro

from limpet.cli.common import (
    DEFAULT_LOADING,
    DEFAULT_MODEL,
    Json,
    Length,
    Loading,
    Model,
    SamplerText,
    Sharpness,
    captioned_sampler,
    err,
    progress,
    show,
)
from limpet.cli.sample import parse_fixes
from limpet.cli.study import DEFAULT_EXECUTING, Executing, clock, print_summary, resumable
from limpet.errors import LimpetError
from limpet.experiments import RunProgress, Store, bulk
from limpet.experiments.bulk import BulkRequest
from limpet.files import read_prompts
from limpet.generation import SEED
from limpet.samplers.recommended import NFE

QUIET = 30.0  # seconds between two lines of progress where there is no terminal for a bar


def run(
    folder: Annotated[str, tyro.conf.Positional],
    /,
    model: Model = DEFAULT_MODEL,
    sampler: SamplerText = None,
    nfe: int = NFE,
    sharpness: Sharpness = None,
    n: int = 1000,
    prompt: str | None = None,
    prompts: str | None = None,
    fix: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    length: Length = None,
    seed: int = SEED,
    batch_size: int | None = None,
    format: Literal["jsonl", "parquet"] = "jsonl",
    part_size: int | None = None,
    executing: Executing = DEFAULT_EXECUTING,
    loading: Loading = DEFAULT_LOADING,
    force: bool = False,
    verify: bool = False,
    json: Json = False,
) -> int:
    """Draw many samples into a folder. Each part of it appears whole or not at all.

    The same command resumes a run. Several on one folder share the work.

    $ limpet bulk samples --n 1000000 --on processes --workers 8
    $ limpet bulk samples --sampler "mend nfe=16" --n 2000 --format parquet
    $ limpet bulk s3://bucket/samples --n 16 --prompts prompts.jsonl --on ray
    $ limpet bulk samples --verify

    Args:
        folder: a folder, or any address that fsspec knows
        nfe: network calls, where the sampler does not set its own
        n: samples, for each prompt
        prompt: text that every sample begins with
        prompts: a file of prompts: lines, or JSON lines with "prompt" or "text"
        fix: POSITION=WORDS, as for `limpet sample`
        seed: the same seed gives the same samples
        batch_size: samples computed at once
        format: of the parts
        part_size: samples in one (default: by number)
        force: replace the samples of another request in the folder
        verify: check the checksum of every part; nothing is sampled
    """
    if verify:
        return _verify(folder, json)
    captioned_sampler(sampler, nfe, sharpness)  # before the model is loaded
    if prompt is not None and prompts is not None:
        raise LimpetError("both prompt and prompts are given: put the prompt into the file, or leave one out")
    texts = tuple(read_prompts(prompts) if prompts is not None else [prompt] if prompt is not None else ())
    fixed = parse_fixes(fix)
    models, store = executing.models(loading), Store(folder)
    _, chosen = captioned_sampler(sampler, nfe, sharpness, models.model(model))
    request = BulkRequest(model, chosen, n, seed, length, texts, fixed, format, part_size, batch_size)
    executor, threads = executing.executor(loading.device, models)
    begun = printed = time.monotonic()
    with progress(f"{model} into {folder}") as update, resumable("part"):

        def on_progress(now: RunProgress) -> None:
            nonlocal printed
            if now.event is not None and now.event.error is not None:
                err.print(f"{now.event.unit.name} failed: {now.event.error}", style="red", markup=False)
            left = "" if now.seconds_left is None else f" · {clock(now.seconds_left)} left"
            detail = f"samples · {now.rate:,.1f}/s{left}"
            update(completed=now.done, total=now.total, detail=detail)
            if not err.is_terminal and time.monotonic() - printed > QUIET:
                printed = time.monotonic()
                err.print(f"{now.done:,} of {now.total:,} {detail}", markup=False)

        summary = bulk.generate(request, store, executor, models, threads=threads, force=force, on_progress=on_progress)
    print_summary(store.path, "parts", summary, begun, ": run the same command again")
    show(json, asdict(summary), ())
    return int(bool(summary.failed))


def _verify(folder: str, json: bool) -> int:
    """Whether every part that was asked for is there and whole."""
    samples, parts, damaged = 0, 0, dict[str, str]()
    with progress(f"reading {folder}") as update:
        for part in bulk.verify(Store(folder)):
            parts += 1
            update(completed=parts, detail="parts")
            if part.damage:
                damaged[part.name] = part.damage
            else:
                samples += part.samples
    lines = [f"{name}: {damage}" for name, damage in damaged.items()]
    lines.append(f"{folder}: {samples:,} samples in {parts - len(damaged)} of {parts} parts are as they were written")
    lines += ["the command that wrote them computes the others again"] if damaged else []
    show(json, {"folder": folder, "samples": samples, "parts": parts, "damaged": damaged}, lines)
    return int(bool(damaged))
