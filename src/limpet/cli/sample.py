"""`limpet sample`: texts from a model under a sampler, a few at once or a million in shards."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from limpet.canvases import reply
from limpet.cli.common import ARM_HELP, DEFAULT_MODEL, HERE, Length, Model, On, Somewhere, arms, err, progress
from limpet.cli.common import out as printer
from limpet.errors import LimpetError
from limpet.files import read_prompts, write_whole
from limpet.generation import sample, spelled
from limpet.models import Canvas
from limpet.recording import trajectory
from limpet.samplers.context import State, StepInfo


def run(
    model: Model = DEFAULT_MODEL,
    arm: Annotated[str, tyro.conf.arg(help=ARM_HELP)] = "crs",
    nfe: int = 64,
    prompt: str | None = None,
    prompts: str | None = None,
    fix: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    n: int = 4,
    length: Length = None,
    seed: int = 8200,
    batch_size: int | None = None,
    where: Somewhere = HERE,
    record: Path | None = None,
    out: str | None = None,
    format: Literal["jsonl", "parquet"] = "jsonl",
    per_shard: int | None = None,
    on: On = "local",
    workers: int | None = None,
    address: str | None = None,
    threads: int | None = None,
    verify: str | None = None,
    json: bool = False,
) -> int:
    """Sample texts, with CRS unless told otherwise; into a folder, as many as you like, in shards.

    A folder's shards appear whole or not at all. Stopped at any moment, the same command goes on; so does a second one
    beside it, and one with a larger --n.

    $ limpet sample --n 2 --nfe 32
    $ limpet sample --model s-sahoo/duo-distilled --prompt "The sea" --device cuda
    $ limpet sample --model google/diffusiongemma-26B-A4B-it \\
        --prompt "Why is the sky blue?" --precision bfloat16
    $ limpet sample --arm "crs budget=.25" --fix "12= sea" --fix "20= the sand"
    $ limpet sample --arm "native top_p=.9" --json > samples.jsonl
    $ limpet sample --n 1 --record crs.limpet
    $ limpet sample --n 1000000 --out samples --on processes --workers 8
    $ limpet sample --n 16 --prompts prompts.jsonl --out s3://bucket/made --on ray
    $ limpet sample --verify samples

    Args:
        nfe: network calls for one sample, unless the arm says otherwise
        prompt: text that every sample begins with; a model that replies to what is said replies to it
        prompts: a file of prompts, --n samples of each: one a line, or JSON lines with "prompt" or "text"
        fix: POSITION=WORDS, words that stand from that token on, 12= sea say; digits are ids (12=345,6) unless they
            stand in double quotes; several times for several
        n: how many samples
        seed: the same seed gives the same samples, whatever the batch size
        batch_size: samples computed at once
        record: also write the path of the first sample here, for `limpet watch` and `limpet view`
        out: also write the samples here as JSON lines, if it is a file (it ends in .jsonl, say); else it is a
            folder, or any address that fsspec knows, of shards alone
        format: of a folder's shards
        per_shard: samples in each of them; by their number unless told
        on: in this process, in processes (one a GPU, or as many as --workers), or on a Ray cluster; for a folder
        workers: how many; as many as there are devices unless told
        address: of a running Ray cluster; one is started here unless told
        threads: of torch in each worker on the CPU
        verify: read every shard of this folder against its seal, and sample nothing
        json: print JSON lines, one a sample, instead of texts; of a folder, one document of what was done
    """
    if verify is not None:
        from limpet.cli import bulk

        return bulk.verify(verify, json)
    ((name, sampler),) = arms([arm], nfe).items()
    if prompt is not None and prompts is not None:
        raise LimpetError("both prompt and prompts are given: put the prompt into the file, or leave one out")
    given = tuple(read_prompts(prompts) if prompts is not None else [prompt] if prompt is not None else ())
    words = fixes(fix)
    if out is not None and _is_folder(out):
        if record is not None:
            raise LimpetError(f"record writes one path, and {out} is a folder of shards: leave one out")
        from limpet.cli import bulk

        order = bulk.Order(model, sampler, n, seed, length, given, words, format, per_shard, batch_size)
        return bulk.make(order, out, where, on, workers, address, threads, json)
    if on != "local" or format != "jsonl" or per_shard is not None:
        raise LimpetError("on, format and per-shard are for shards in a folder: name one with --out, without an ending")
    denoiser = where.load(model)
    for file in (out, record):
        if file is not None and not Path(file).absolute().parent.is_dir():
            raise LimpetError(f"{file} cannot be written: the folder {Path(file).absolute().parent} does not exist")
    replies = isinstance(denoiser, Canvas) and bool(given)
    if replies and (prompts is not None or fix or record is not None):
        raise LimpetError(
            f"{denoiser.name} replies to one prompt, in canvases: leave out --prompts, --fix and --record"
        )
    prefix = [one for one in given for _ in range(n)] or None
    total, fixed = n * max(1, len(given)), spelled(denoiser, words.items(), length or denoiser.length)
    tokens = (length or denoiser.length) * total
    begun = time.monotonic()
    with progress(f"{denoiser.name}, {name}", total * sampler.nfe) as tell:

        def watch(state: State, info: StepInfo, done: int, whole: int) -> None:
            rate = tokens * done / whole / (time.monotonic() - begun)
            committed = info.marks.get("committed")
            count = "" if committed is None else f" · {committed.float().mean(0).sum():.0f} committed"
            tell(completed=done, detail=f"call {info.call + 1}/{sampler.nfe}{count} · {rate:,.0f} tokens/s")

        if isinstance(denoiser, Canvas) and given:
            samples = reply(denoiser, sampler, n, seed, length, given[0], batch_size, watch)
        else:
            samples = sample(denoiser, sampler, total, seed, length, prefix, fixed, batch_size, watch)
    lines = samples.lines()
    if out is not None:
        try:
            write_whole(out, lines)
        except LimpetError:
            print(lines, end="")  # they took time: they are not lost with the disk
            raise
        err.print(f"wrote {total} samples to {out}", markup=False)
    if record is not None:
        path = trajectory.record(denoiser, sampler, seed, 0, length, prefix and prefix[0], fixed)
        path.save(record)
        err.print(f"wrote the path of sample 0 to {record}", markup=False)
        if path.frames[-1].state.tolist() != samples.tokens[0].tolist():  # rounding, in a batch of another size
            err.print("its text differs from sample 0 here; --n 1 --precision float32 gives the same", markup=False)
    if json:
        print(lines, end="")
    else:
        texts = samples.texts if denoiser.tokenizer else [str(ids) for ids in samples.tokens.tolist()]
        for i, text in enumerate(texts):
            err.rule(f"sample {i} · seed {seed} · {samples.nfe} calls · {int(samples.committed[i])} committed")
            printer.print(text, markup=False)
    return 0


def fixes(texts: Sequence[str]) -> dict[int, str | list[int]]:
    """What `--fix` says of each position: words, or ids."""
    found: dict[int, str | list[int]] = {}
    for text in texts:
        position, _, words = text.partition("=")
        if not re.fullmatch(r"\d+", position, re.ASCII) or not words:
            raise LimpetError(f'fix is {text!r}; it takes POSITION=WORDS, say "12= sea", or POSITION=IDS, say 12=345,6')
        if int(position) in found:
            raise LimpetError(f"position {position} is fixed twice: leave one out")
        if re.fullmatch(r"\d+(,\d+)*", words, re.ASCII):
            found[int(position)] = [int(token) for token in words.split(",")]
        else:
            quoted = re.fullmatch(r'"\d+(,\d+)*"', words, re.ASCII)
            found[int(position)] = words[1:-1] if quoted else words
    return found


def _is_folder(path: str) -> bool:
    """What has no ending or is a folder already: pipes and devices have none either, but are there."""
    if "://" in path or path.endswith("/") or os.path.isdir(path):
        return True
    return not os.path.exists(path) and not Path(path).suffix
