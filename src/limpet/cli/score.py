"""`limpet score FILE...`: every measure of texts of any origin, and paired differences between files."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from textwrap import fill
from typing import Any, Literal, NamedTuple

import tyro
from rich.table import Table

from limpet.cli.common import DEFAULT_RUNNING, Json, Running, err, out, progress, show
from limpet.cli.compare import rich_table
from limpet.errors import LimpetError
from limpet.evaluation import Measure, SampleSet, ScoreCache, Scores, evaluate
from limpet.evaluation.checkers import find_checker
from limpet.evaluation.judges import BUILTIN, builtin_fits
from limpet.evaluation.sample_sets import reading_mode, sample_sets
from limpet.evaluation.scores import measures_table
from limpet.files import SEPARATOR, json_row, read_text


class FileSample(NamedTuple):
    """One sample of a file, as ids, as text or as both, each split into the prompt and the rest."""

    ids: tuple[list[int], list[int]] | None
    text: tuple[str, str] | None
    seed: int | str = 0
    number: int | None = None  # under the seed
    tokenizer: str | None = None  # digest of the tokenizer of the ids


def read_samples(path: str, separator: str | None = None) -> list[SampleSet]:
    """The samples of a JSON Lines file, of a folder of such files, or of a plain text, one set a seed.

    separator: of the texts of a plain text (default: a form feed where there is one, else the end of a line)."""
    what, parts = "give a UTF-8 text or JSON Lines file", sorted(Path(path).glob("*.jsonl"))
    content = "".join(read_text(part, what) for part in parts) if parts else read_text(path, what)
    if content.lstrip().startswith("{") and not path.endswith(".txt"):
        lines = enumerate(content.split("\n"), 1)
        samples = [_parse(line, f"line {number} of {path}") for number, line in lines if line.strip()]
    else:
        texts = content.split(separator or (SEPARATOR if SEPARATOR in content else "\n"))
        samples = [FileSample(None, ("", part.strip("\r\n"))) for part in texts if part.strip()]
    if not samples:
        raise LimpetError(f"{path} holds no text: give a file with a text, or a JSON object with one, on each line")
    if len({type(sample.seed) for sample in samples}) > 1:
        raise LimpetError(f"{path} has seeds of two kinds, numbers and texts: use one")
    samples.sort(key=lambda sample: (sample.seed, sample.number or 0))  # stable: else in the order of the file
    return [_set(path, list(members)) for _, members in groupby(samples, attrgetter("seed"))]


def _set(path: str, samples: Sequence[FileSample]) -> SampleSet:
    """The samples of one seed; ids, or texts, only if all samples have them."""
    ids = [sample.ids for sample in samples if sample.ids is not None]
    texts = [sample.text for sample in samples if sample.text is not None]
    return SampleSet(
        ids=ids if len(ids) == len(samples) else None,
        stored_texts=texts if len(texts) == len(samples) else None,
        seed=samples[0].seed,
        numbers=[sample.number for sample in samples],
        name=path,
        tokenizers=frozenset(sample.tokenizer for sample in samples),
    )


def _parse(line: str, where: str) -> FileSample:
    """A sample from a line of JSON."""
    row = json_row(line, where)
    row = row if isinstance(row, dict) else {}
    text, ids, prompt, length = (row.get(name) for name in ("text", "tokens", "prompt", "prompt_length"))
    seed, number, tokenizer = row.get("seed", 0), row.get("sample"), row.get("tokenizer")
    is_ids = isinstance(ids, list) and all(type(i) is int and 0 <= i < 2**31 for i in ids)
    if text is ids is None or not isinstance(text, str | None) or not (is_ids or ids is None):
        raise LimpetError(f'{where} is not a sample: it needs "text", a string, or "tokens", a list of ids, or both')
    if not isinstance(seed, int | str) or type(number) not in (int, type(None)):
        raise LimpetError(f'{where} has a "seed" or "sample" that is not a number: correct it or leave it out')
    if not isinstance(tokenizer, str | None):
        raise LimpetError(f'{where} has a "tokenizer" that is not a digest: correct it or leave it out')
    if "prefix" in row:
        raise LimpetError(
            f'{where} has a "prefix", as limpet 0.2 wrote it: call it "prompt_length", or "prompt" if text'
        )
    if type(length) not in (int, type(None)) or not 0 <= (length or 0) <= len(ids or ()):
        raise LimpetError(f'{where} has a "prompt_length" that is not a number of its "tokens"')
    if prompt is not None and not (isinstance(prompt, str) and isinstance(text, str) and text.startswith(prompt)):
        raise LimpetError(f'{where} has a "prompt" that is not how its "text" begins: correct it or leave it out')
    split_ids = None if ids is None or (prompt and length is None) else (ids[: length or 0], ids[length or 0 :])
    split = None if text is None or (length and prompt is None) else (prompt or "", text[len(prompt or "") :])
    return FileSample(split_ids, split, seed, number, tokenizer)


def _parts(
    files: Sequence[Scores], differences: Sequence[Mapping[str, Measure] | str], width: int
) -> Iterator[Table | str]:
    """A table for each file and each difference, then how each measure is taken."""
    for scores in files:
        yield rich_table(scores.table(intervals=True), width)
        if many := sum(one.long for one in scores.judged):
            context = scores.judge and scores.judge["context"]
            yield fill(
                f"{many} samples exceed the judge's context of {context} ids: read in overlapping windows", width
            )
    for scores, difference in zip(files[1:], differences, strict=True):
        caption = f"{scores.name} minus {files[0].name}, paired by seed and sample"
        if isinstance(difference, str):
            yield fill(f"{caption}: not available, because {difference}", width)
        else:
            yield rich_table(measures_table(caption, difference, intervals=True), width)
    conventions = {name: measure.convention for scores in files for name, measure in scores.measures.items()}
    yield from (fill(f"{name}: {rule}", width, subsequent_indent="  ") for name, rule in conventions.items())


def run(
    files: tyro.conf.Positional[tuple[str, ...]],
    /,
    *,
    judge: str = "auto",
    convention: Literal["auto", "ids", "text", "released", "exact"] = "auto",
    checker: str | None = None,
    reference: str | None = None,
    where: Running = DEFAULT_RUNNING,
    batch_size: int | None = None,
    cache: Path | None = None,
    separator: str | None = None,
    json: Json = False,
) -> None:
    """Score texts of any origin: likelihood under a judge, entropy, Dist-4, Rep-4, Self-BLEU.

    A file holds what `limpet sample` printed, a text on each line, or JSON Lines with "text" or "tokens". Optional
    fields are "seed", "sample" (the number under the seed), "prompt" (the text that the sample begins with),
    "prompt_length" (the same as a number of tokens) and "tokenizer" (the digest of the tokenizer of the tokens);
    `limpet sample --json` writes all of them. Standard errors are over seeds. The interval beside is a bootstrap over
    samples. Each further file also gets its difference from the first one, paired by seed and sample.

    $ limpet score samples.jsonl
    $ limpet score native.jsonl crs.jsonl --json
    $ limpet score stories.txt --judge gpt2-large --convention released
    $ limpet score words.jsonl --judge exact:words
    $ limpet score samples.jsonl --judge none

    Args:
        files: texts, JSON Lines files, or folders of JSON Lines files; - reads standard input
        judge: mini-judge, a folder, a causal language model on the hub, exact:NAME (the true distribution of a
            source), or none; auto is mini-judge for samples of the models that share its tokens, else none
        convention: how the judge reads a sample; auto reads ids if "tokenizer" is the judge's own, else text; "ids"
            for a file without "tokenizer" states that its ids are the judge's
        checker: a checker of texts, by name or as ./file.py:Name; its values come first
        reference: a file of real texts, for MAUVE
        batch_size: sequences that the judge reads at once (default: by their length)
        cache: a folder that keeps the judge's scores
        separator: between the texts of a plain text file (default: the form feed that `limpet sample` writes into a
            pipe, or else the end of a line)
    """
    if not files:
        raise LimpetError("there is nothing to score: name one or more files")
    sets = [read_samples(path, separator) for path in files]
    real = read_samples(reference, separator) if reference else None
    all_sets = sample_sets([one for part in sets for one in part])
    if judge == "auto":
        fits = builtin_fits(digest for one in all_sets for digest in one.tokenizers)
        judge = BUILTIN if fits else "none"
        if not fits:
            err.print("no judge is known to fit these texts: name one with --judge for a perplexity", soft_wrap=True)
    reader = where.judge(judge)
    if real and reader is None:
        raise LimpetError("MAUVE compares features of a judge: name a judge")
    if not all(one.ids is not None for one in all_sets):  # all files are read alike, so that they can be compared
        sets = [[replace(one, ids=None) for one in part] for part in sets]
    if reader is not None:
        convention = reading_mode(reader, all_sets, convention).convention  # type: ignore[assignment]
    options: dict[str, Any] = {
        "checker": checker and find_checker(checker),
        "convention": convention,
        "reference": real,
        "cache": None if cache is None else ScoreCache(cache),
        "batch_size": batch_size,
    }
    results = []
    with progress(visible=reader is not None) as tell:
        for path, part in zip(files, sets, strict=True):
            tell(description=f"{reader.name} reads {path}" if reader else f"measuring {path}")
            advance = lambda done, total: tell(completed=done, total=total)  # noqa: E731
            results.append(evaluate(part, reader, progress=advance, **options))
    differences: list[dict[str, Measure] | str] = []
    for scores in results[1:]:
        try:
            differences.append(scores.difference(results[0]))
        except LimpetError as error:
            differences.append(str(error))
    document = {
        "files": [scores.to_dict(intervals=True) for scores in results],
        "differences": [
            {
                "of": scores.name,
                "from": results[0].name,
                "unpaired": difference if isinstance(difference, str) else None,
                "measures": {}
                if isinstance(difference, str)
                else {name: measure.to_dict(True) for name, measure in difference.items()},
            }
            for scores, difference in zip(results[1:], differences, strict=True)
        ],
    }
    show(json, document, _parts(results, differences, out.width))
