"""`limpet sample`: draw texts from a model."""

import re
import time
from collections.abc import Sequence
from pathlib import Path

import tyro

from limpet.cli.common import (
    DEFAULT_LOADING,
    DEFAULT_MODEL,
    Length,
    Loading,
    Model,
    SamplerText,
    Sharpness,
    captioned_sampler,
    err,
    progress,
    prompt_texts,
    readable,
)
from limpet.cli.common import out as printer
from limpet.cli.streams import print_json
from limpet.errors import LimpetError
from limpet.files import SEPARATOR, write_file
from limpet.generation import SEED, Samples, fixed_ids, reply, sample
from limpet.models import Canvas, Denoiser
from limpet.recording import trajectory
from limpet.samplers import Sampler
from limpet.samplers.recommended import NFE

MAX_DIGITS = 18  # of a position or an id


def run(
    model: Model = DEFAULT_MODEL,
    sampler: SamplerText = None,
    nfe: int = NFE,
    sharpness: Sharpness = None,
    prompt: str | None = None,
    prompts: str | None = None,
    fix: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    n: int = 4,
    length: Length = None,
    seed: int = SEED,
    batch_size: int | None = None,
    loading: Loading = DEFAULT_LOADING,
    record: Path | None = None,
    out: Path | None = None,
    force: bool = False,
    json: bool = False,
) -> int:
    """Draw texts from a model. `limpet bulk` draws many, into a folder, resumably.

    $ limpet sample --n 2 --nfe 16 --sharpness .5
    $ limpet sample --model s-sahoo/duo-distilled --prompt "The sea" --device cuda
    $ limpet sample --model google/diffusiongemma-26B-A4B-it \\
        --prompt "Why is the sky blue?" --precision bfloat16
    $ limpet sample --sampler "crs budget=.25" --fix "12= sea" --fix "20= the sand"
    $ limpet sample --sampler "native top_p=.9" --json > samples.jsonl
    $ limpet sample --n 1 --record crs.limpet
    $ limpet sample --model sudoku --prompt puzzle.txt --n 1

    Args:
        nfe: network calls for each sample, where the sampler does not set its own
        prompt: text that every sample begins with; a chat model replies to it; for sudoku, the puzzle as 81 digits
            (for sudoku-6x6, 36) with . or 0 for a blank, or a file that holds it
        prompts: a file of prompts, --n samples of each: one on each line, or JSON lines with "prompt" or "text"
        fix: POSITION=WORDS, such as "12= sea": text that stands from that token on; digits are ids (12=345,6) unless
            they are in double quotes; can be repeated
        n: how many samples
        seed: the same seed gives the same samples, whatever the batch size, up to a network's rounding
        batch_size: samples computed at once
        record: also write the trajectory of the first sample to this file, for `limpet watch` and `limpet view`
        out: also write the samples to this file, as JSON lines
        force: overwrite a file that exists
        json: print JSON lines, one for each sample, instead of texts
    """
    captioned_sampler(sampler, nfe, sharpness)  # before the model is loaded
    words = parse_fixes(fix)
    for file in (out, record):
        _check_writable(file, force)
    denoiser = loading.load(model)
    caption, chosen = captioned_sampler(sampler, nfe, sharpness, denoiser)
    texts = prompt_texts(denoiser, prompt, prompts)
    is_chat = isinstance(denoiser, Canvas) and bool(texts)
    if is_chat and (prompts is not None or fix or record is not None):
        raise LimpetError(
            f"{denoiser.name} replies to one prompt, in canvases: leave out --prompts, --fix and --record"
        )
    fixed = fixed_ids(denoiser, words.items(), length or denoiser.length)
    each = [text for text in texts for _ in range(n)] or None
    samples = _draw(denoiser, caption, chosen, texts, each, n, seed, length, fixed, batch_size)
    lines = samples.lines()
    if out is not None:
        try:
            write_file(out, lines)
        except LimpetError:
            print_json(lines)  # they took time: they are not lost with the disk
            raise
        err.print(f"wrote {len(samples)} samples to {out}", markup=False)
    if record is not None:
        recorded = trajectory.record(denoiser, chosen, seed, 0, length, each and each[0], fixed)
        recorded.save(record)
        err.print(f"wrote the trajectory of sample 0 to {record}", markup=False)
        if recorded.frames[-1].tokens.tolist() != samples.tokens[0].tolist():  # rounding in a batch of another size
            err.print("its text differs from sample 0 here; --n 1 --precision float32 gives the same", markup=False)
    if json:
        print_json(lines)
        return 0
    print_texts(denoiser, samples)
    return 0


def print_texts(denoiser: Denoiser, samples: Samples) -> None:
    """Print the texts of samples, in a pipe with a form feed after each: `limpet score` knows it."""
    for text, one in zip(texts_of(samples), samples, strict=True):
        err.rule(f"sample {one.index} · seed {samples.seed} · {samples.nfe} calls · {one.committed} committed")
        printer.print(readable(denoiser, text), markup=False)
        if not printer.is_terminal:
            print(SEPARATOR)


def _draw(
    denoiser: Denoiser,
    caption: str,
    sampler: Sampler,
    prompts: Sequence[str],
    each: list[str] | None,
    n: int,
    seed: int,
    length: int | None,
    fixed: dict[int, int],
    batch_size: int | None,
) -> Samples:
    """n samples for each prompt, or n replies of a chat model, with progress on standard error."""
    count = len(each) if each else n
    tokens, start = (length or denoiser.length) * count, time.monotonic()
    with progress(f"{denoiser.name}, {caption}", count * sampler.nfe) as update:

        def report(done: int, total: int) -> None:
            rate = tokens * done / total / (time.monotonic() - start)
            update(completed=done, detail=f"{rate:,.0f} tokens/s")

        if isinstance(denoiser, Canvas) and prompts:
            return reply(denoiser, sampler, n, seed, length, prompts[0], batch_size, report)
        return sample(denoiser, sampler, count, seed, length, each, fixed, batch_size, report)


def texts_of(samples: Samples) -> list[str]:
    """The texts of samples, or their ids where the model has no tokenizer."""
    return [one.text if one.text is not None else str(one.tokens) for one in samples]


def parse_fixes(texts: Sequence[str]) -> dict[int, str | list[int]]:
    """What each `--fix` says of its position: words, or ids."""
    found: dict[int, str | list[int]] = {}
    for text in texts:
        position, _, words = text.partition("=")
        if not re.fullmatch(rf"\d{{1,{MAX_DIGITS}}}", position, re.ASCII) or not words:
            raise LimpetError(
                f'fix is {text[:40]!r}; it takes POSITION=WORDS, such as "12= sea", or POSITION=IDS, such as 12=345,6'
            )
        if int(position) in found:
            raise LimpetError(f"position {position} is fixed twice: leave one out")
        if re.fullmatch(r"\d+(,\d+)*", words, re.ASCII):
            ids = words.split(",")
            if len(longest := max(ids, key=len)) > MAX_DIGITS:
                raise LimpetError(f"fix gives position {position} an id of {len(longest)} digits, and no vocabulary is "
                                  "so large: separate ids by commas, or put text into double quotes")  # fmt: skip
            found[int(position)] = [int(token) for token in ids]
        else:
            is_quoted = re.fullmatch(r'"\d+(,\d+)*"', words, re.ASCII)
            found[int(position)] = words[1:-1] if is_quoted else words
    return found


def _check_writable(file: Path | None, force: bool) -> None:
    """Raise if a file cannot be created, or holds the result of another run."""
    if file is None:
        return
    try:
        is_filled = file.is_file() and file.stat().st_size > 0
    except OSError as error:  # such as a name that is too long
        raise LimpetError(f"{file} cannot be written ({error.strerror}): name another file") from error
    if not file.absolute().parent.is_dir():
        raise LimpetError(f"{file} cannot be written: the folder {file.absolute().parent} does not exist")
    if is_filled and not force:
        raise LimpetError(f"{file} exists: name another file, or overwrite it with --force")
