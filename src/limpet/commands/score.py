"""`limpet score FILE...`: every metric for texts made by anyone, and paired contrasts between files."""

from __future__ import annotations

import json as json_module
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import tyro
from numpy.typing import NDArray

from limpet import stats
from limpet.commands import out, print_json, progress_bar
from limpet.errors import LimpetError
from limpet.judges import BUILTIN, CONVENTIONS, Judge, ScoreCache, Scores, gen_nll, has_builtin, load_judge
from limpet.judges.judge import Progress
from limpet.judges.scores import boundary
from limpet.metrics import METRICS, count, mauve, self_bleu

Floats = NDArray[np.float64]
LEVEL = 0.95  # of every bootstrap interval


# What is in a file


class Sample(NamedTuple):
    """One text as a file gives it; `prefix` is what it was told to begin with, in ids or as text."""

    text: str | None
    tokens: list[int] | None = None
    shard: int | str = 0
    place: int | None = None  # its number under the seed
    prefix: int | str = 0


def read_samples(path: str, separator: str = "\n") -> list[Sample]:
    """The samples of a JSON Lines file or of a plain text, in order of shard and place."""
    try:
        content = (sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LimpetError(f"{path} cannot be read ({error}): give a UTF-8 text or JSON Lines file") from error
    if content.lstrip().startswith("{") and not path.endswith(".txt"):
        lines = enumerate(content.split("\n"), 1)
        samples = [_parse(line, f"line {number} of {path}") for number, line in lines if line.strip()]
    else:
        samples = [Sample(part.strip("\r\n")) for part in content.split(separator) if part.strip()]
    if not samples:
        raise LimpetError(f"{path} holds no text: give a file with a text, or a JSON object with one, on each line")
    if len({type(sample.shard) for sample in samples}) > 1:
        raise LimpetError(f"{path} has seeds of two kinds, numbers and texts: use one")
    return sorted(samples, key=lambda sample: (sample.shard, sample.place or 0))  # stable: else as they stand


def _parse(line: str, where: str) -> Sample:
    try:
        row = json_module.loads(line)
    except (ValueError, RecursionError) as error:
        raise LimpetError(
            f"{where} is not JSON ({error}): write one object on each line, or end its name in .txt"
        ) from error
    row = row if isinstance(row, dict) else {}
    sample = Sample(row.get("text"), row.get("tokens"), row.get("seed", 0), row.get("sample"), row.get("prefix") or 0)
    is_text = isinstance(sample.text, str)
    is_ids = isinstance(sample.tokens, list) and all(type(i) is int and 0 <= i < 2**31 for i in sample.tokens)
    if not (is_text or is_ids) or not (is_text or sample.text is None) or not (is_ids or sample.tokens is None):
        raise LimpetError(f'{where} is no sample: it needs "text", a string, or "tokens", a list of ids, or both')
    if not isinstance(sample.shard, int | str) or type(sample.place) not in (int, type(None)):
        raise LimpetError(f'{where} has a "seed" or "sample" that is no number: mend it or leave it out')
    if isinstance(sample.prefix, str):
        fits = is_text and row["text"].startswith(sample.prefix)
    else:
        fits = type(sample.prefix) is int and 0 <= sample.prefix <= len(sample.tokens or ())
    if not fits:
        raise LimpetError(f'{where} has a "prefix" that is neither a count of its ids nor how its text begins')
    return sample


# What is counted, and what the judge reads


class Material(NamedTuple):
    """A file laid out: all lists run over its samples; what a sample was given to begin with stands apart."""

    samples: list[Sample]
    ids: list[list[int]]  # what metrics count: the generated part
    given: list[list[int]]
    source: str  # whose ids these are

    @property
    def shards(self) -> list[int | str]:
        return [sample.shard for sample in self.samples]

    @property
    def prefixed(self) -> bool:
        return any(sample.prefix for sample in self.samples)


def has_ids(samples: Sequence[Sample]) -> bool:
    """Whether metrics can count the files' own ids."""
    return all(sample.tokens is not None and isinstance(sample.prefix, int) for sample in samples)


def shares_ids(judge: Judge, samples: Sequence[Sample]) -> bool:
    """Whether the files' ids are the judge's: all in its range, [PAD] aside, and written out as the files' texts."""
    for sample in samples:
        if any(token > judge.vocab_size for token in sample.tokens or ()):
            return False
        if sample.text is not None and judge.tokenizer is not None:
            kept = [token for token in sample.tokens or () if token < judge.vocab_size]
            if judge.tokenizer.decode(kept) != sample.text:
                return False
    return has_ids(samples)


def _text(sample: Sample) -> tuple[str, str]:
    """Prefix and the rest, as text."""
    if sample.text is None:
        raise LimpetError("a sample has ids alone where text is read: give its text, or a judge that shares its ids")
    if isinstance(sample.prefix, int):
        if sample.prefix:
            raise LimpetError("a prefix is counted in ids that are not this judge's: give the prefix as text")
        return "", sample.text
    return sample.prefix, sample.text[len(sample.prefix) :]


def lay_out(samples: list[Sample], own: bool, judge: Judge | None) -> Material:
    """The ids that metrics count: the files' own, else the judge's of the texts, else a number for each word."""
    tokenizer = judge.tokenizer if judge else None
    if own:
        cuts = [(sample.tokens or [], int(sample.prefix)) for sample in samples]
        source = "the file's ids"
    elif tokenizer is not None and judge is not None:
        texts = [_text(sample) for sample in samples]
        encoded = [tokenizer.encode(prefix + rest) for prefix, rest in texts]
        cuts = [(ids, boundary(tokenizer, ids, prefix)) for ids, (prefix, _) in zip(encoded, texts, strict=True)]
        source = f"{judge.name}'s ids"
    else:
        number: dict[str, int] = {}
        cuts = []
        for prefix, rest in map(_text, samples):
            before, after = prefix.split(), rest.split()
            cuts.append(([number.setdefault(word, len(number)) for word in before + after], len(before)))
        source = "words between spaces"
    return Material(samples, [ids[k:] for ids, k in cuts], [ids[:k] for ids, k in cuts], source)


# From material to rows


def _mean(values: Floats) -> float:
    held = values[~np.isnan(values)]
    return float(held.mean()) if held.size else math.nan


@dataclass(frozen=True, eq=False)
class Row:
    """One metric of one file: a value for each shard (or k-means seed), and what a bootstrap draws from."""

    metric: str
    convention: str
    estimate: stats.Estimate
    samples: Floats | None = None  # (n, columns); None where no value belongs to one sample
    statistic: Callable[[Floats], float] = _mean
    over: str = "shards"


def _ratio(values: Floats) -> float:
    count = values[:, 1].sum()
    return float(values[:, 0].sum() / count) if count else math.nan


def _perplexity(values: Floats) -> float:
    return math.exp(_ratio(values))


def judge_rows(material: Material, scores: Scores) -> list[Row]:
    """GenNLL and GenPPL: a shard's is pooled over its ids, GenPPL is each shard's exponential."""
    nll = scores.by_shard(material.shards)
    columns = np.stack([scores.nll, scores.tokens], -1)
    rule = f"{scores.judge}, {scores.convention}: {CONVENTIONS[scores.convention].rule}"
    rows = [
        Row("gen-nll", f"nats an id; {rule}", stats.mean_se(nll), columns, _ratio),
        Row("gen-ppl", f"exp of a shard's gen-nll; {rule}", stats.mean_se(np.exp(nll)), columns, _perplexity),
    ]
    if scores.convention == "ids":
        dropped = scores.dropped.astype(np.float64)
        rows.append(_each("dropped", "[PAD] ids of a sample left out of gen-nll", material, dropped))
    return rows


def metric_rows(material: Material, special: int | None) -> list[Row]:
    """Every metric, shard by shard: neither a set nor a sample's references reach across shards."""
    shard = np.unique(np.asarray(material.shards), return_inverse=True)[1]
    members = [np.flatnonzero(shard == label) for label in range(shard.max() + 1)]
    ids = [[material.ids[i] for i in part] for part in members]
    rows = []
    for metric in METRICS:
        values = [metric.function(part) for part in ids]
        if metric.over == "set":
            rows.append(Row(metric.name, metric.convention, stats.mean_se(values)))
        else:
            rows.append(_each(metric.name, metric.convention, material, _scatter(members, values)))
    if material.prefixed:
        groups = [[str((material.given[i], material.samples[i].prefix)) for i in part] for part in members]
        scores = [self_bleu(part, "method-1", group) for part, group in zip(ids, groups, strict=True)]
        rule = "BLEU-4 against the other samples of the same prefix in the shard, method 1"
        rows.append(_each("self-bleu-prefix", rule, material, _scatter(members, scores)))
    if special is not None:
        rows.append(_each("ends", f"how often a sample holds id {special}", material, count(material.ids, [special])))
    return rows


def _scatter(members: list[NDArray[np.int64]], values: list[Floats]) -> Floats:
    out = np.empty(sum(map(len, members)))
    for part, value in zip(members, values, strict=True):
        out[part] = value
    return out


def _each(name: str, convention: str, material: Material, samples: Floats) -> Row:
    return Row(name, convention, stats.mean_se(stats.by_shard(samples, material.shards)), samples)


def mauve_row(judge: Judge, generated: list[list[int]], real: list[list[int]], batch_size: int | None) -> Row:
    ours, theirs = (judge.features([ids for ids in part if ids], batch_size) for part in (generated, real))
    values = mauve(ours, theirs)
    rule = f"all shards together, over {len(values)} k-means seeds, features of {judge.name} at the last id"
    return Row("mauve", rule, stats.mean_se(values), over="k-means seeds")


def contrast_rows(a: list[Row], b: list[Row]) -> list[Row]:
    """b - a for every metric of both, over paired shards and paired samples."""
    first = {row.metric: row for row in a if row.over == "shards"}
    rows = []
    for row in b:
        if (other := first.get(row.metric)) is None:
            continue
        samples = None
        if row.samples is not None and other.samples is not None:
            samples = np.stack([row.samples, other.samples], 1)
        statistic = _difference(row.statistic)
        difference = stats.paired(row.estimate.values, other.estimate.values)
        rows.append(Row(row.metric, row.convention, difference, samples, statistic))
    return rows


def _difference(statistic: Callable[[Floats], float]) -> Callable[[Floats], float]:
    return lambda pairs: statistic(pairs[:, 0]) - statistic(pairs[:, 1])


# From files to results


class Plan(NamedTuple):
    """How all files of one call are read, so that they can be compared."""

    judge: Judge | None
    convention: str
    own: bool  # metrics count the files' own ids
    shared: bool  # and these are the judge's
    batch_size: int | None
    cache: ScoreCache | None

    @property
    def by_ids(self) -> bool:
        """Whether the judge is given ids; else texts."""
        return self.convention == "ids" or (self.convention == "released" and self.shared)


class Result(NamedTuple):
    path: str
    material: Material
    rows: list[Row]
    long: int  # samples longer than the judge's context


def plan_for(
    samples: list[Sample], judge: Judge | None, convention: str, batch_size: int | None, cache: Path | None
) -> Plan:
    own = has_ids(samples)
    shared = judge is not None and own and shares_ids(judge, samples)
    if convention == "auto":
        convention = "ids" if shared else "text"
    if judge and convention == "ids" and not own:
        raise LimpetError('the convention "ids" needs "tokens" in every sample of every file: use "text"')
    return Plan(judge, convention, own, shared, batch_size, None if cache is None else ScoreCache(cache))


def score(path: str, samples: list[Sample], plan: Plan, real: list[Sample], progress: Progress) -> Result:
    """Everything there is to say of one file."""
    judge, material = plan.judge, lay_out(samples, plan.own, plan.judge)
    if judge is None:
        return Result(path, material, metric_rows(material, None), 0)
    texts = None if plan.by_ids else [_text(sample) for sample in samples]
    scored: list[Any] = material.ids if texts is None else [rest for _, rest in texts]
    before: list[Any] = material.given if texts is None else [prefix for prefix, _ in texts]
    prefixes = before if material.prefixed else None
    scores = gen_nll(judge, scored, plan.convention, prefixes, plan.cache, plan.batch_size, progress)
    judge_counts = plan.shared or not plan.own  # the ids that metrics count are the judge's
    rows = judge_rows(material, scores) + metric_rows(material, judge.eos if judge_counts else None)
    if real:
        ours = material if judge_counts else lay_out(samples, False, judge)
        theirs = lay_out(real, plan.by_ids and has_ids(real), judge)
        rows.append(mauve_row(judge, ours.ids, theirs.ids, plan.batch_size))
    return Result(path, material, rows, scores.long)


def why_unpaired(a: Material, b: Material) -> str | None:
    """Why two files have no paired contrast, if they have none."""
    counts = [Counter(material.shards) for material in (a, b)]
    shapes = [f"{len(count)} shards, {sum(count.values())} samples" for count in counts]
    if counts[0] == counts[1]:
        places = [[sample.place for sample in material.samples] for material in (a, b)]
        alike = places[0] == places[1] or None in places[0] + places[1]
        return None if alike else 'no paired contrast: the files number their samples ("sample") differently'
    return (
        f"no paired contrast: the files need the same seeds, with as many samples each, but have {' and '.join(shapes)}"
    )


# The command


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _row_document(row: Row, shards: Sequence[Any]) -> dict[str, Any]:
    interval = None
    if row.samples is not None and not np.isnan(row.samples).all():
        interval = stats.bootstrap(row.samples, row.statistic, shards, LEVEL)
    return {
        "metric": row.metric,
        "convention": row.convention,
        "mean": _finite(row.estimate.mean),
        "se": _finite(row.estimate.se),
        "over": row.over,
        "values": [_finite(value) for value in row.estimate.values.tolist()],
        "bootstrap": interval and {"low": _finite(interval.low), "high": _finite(interval.high), "level": LEVEL},
    }


def _file_document(result: Result, plan: Plan) -> dict[str, Any]:
    shards = result.material.shards
    judge = plan.judge and {
        "name": plan.judge.name,
        "digest": plan.judge.digest,
        "context": plan.judge.context,
        "convention": plan.convention,
        "longer_than_context": result.long,
    }
    return {
        "file": result.path,
        "samples": len(shards),
        "shards": sorted(set(shards)),
        "ids": result.material.source,
        "judge": judge,
        "rows": [_row_document(row, shards) for row in result.rows],
    }


def _contrast_document(a: Result, b: Result) -> dict[str, Any]:
    reason = why_unpaired(a.material, b.material)
    rows = [] if reason else contrast_rows(a.rows, b.rows)
    shards = b.material.shards
    return {"a": a.path, "b": b.path, "unpaired": reason, "rows": [_row_document(row, shards) for row in rows]}


def _print_rows(rows: list[dict[str, Any]]) -> None:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.4f}"

    for row in rows:
        drawn = row["bootstrap"]
        interval = f"[{number(drawn['low'])}, {number(drawn['high'])}]" if drawn else ""
        value = f"{number(row['mean']):>10} ± {number(row['se']):<8}"
        out.print(f"  {row['metric']:<17}{value} {interval:<21} {row['convention']}", markup=False)


def _print(document: dict[str, Any]) -> None:
    for file in document["files"]:
        judge = file["judge"]
        by = f"judge {judge['name']} ({judge['digest'][:12]})" if judge else "no judge"
        shards = len(file["shards"])
        out.print(f"{file['file']}: {file['samples']} samples, {shards} shards, {file['ids']}, {by}", markup=False)
        _print_rows(file["rows"])
        if judge and judge["longer_than_context"]:
            out.print(
                f"  {judge['longer_than_context']} samples exceed the judge's context of {judge['context']} ids: they "
                "were read in overlapping windows",
                markup=False,
            )
    for contrast in document["contrasts"]:
        out.print(f"{contrast['b']} - {contrast['a']}, paired", markup=False)
        if contrast["unpaired"]:
            out.print(f"  {contrast['unpaired']}", markup=False)
        _print_rows(contrast["rows"])
    out.print(f"mean ± standard error over shards [{LEVEL:.0%} bootstrap over samples]", markup=False)


def run(
    files: tyro.conf.Positional[tuple[str, ...]],
    /,
    *,
    judge: str = "auto",
    convention: Literal["auto", "ids", "text", "released"] = "auto",
    reference: str | None = None,
    precision: Literal["float32", "bfloat16"] = "float32",
    device: str | None = None,
    batch_size: int | None = None,
    cache: Path | None = None,
    separator: str = "\n",
    json: bool = False,
) -> None:
    """Score texts made by anyone: likelihood under a judge, entropy, Dist-4, Rep-4, Self-BLEU, conventions named.

    A file holds a text on each line, or JSON Lines with "text" or "tokens", and maybe "seed", "sample" and "prefix":
    what `limpet sample` writes. Each seed is a shard, and errors are over shards; the interval beside is a bootstrap
    over samples. With more files, each also has its values minus the first file's, paired by shard and sample.

    $ limpet score samples.jsonl
    $ limpet score native.jsonl crs.jsonl --json
    $ limpet score stories.txt --judge gpt2-large --convention released
    $ limpet score samples.jsonl --judge none

    Args:
        files: texts or JSON Lines; - reads standard input
        judge: mini-judge, a folder, a causal language model on the hub, or none; auto is mini-judge where it is
        convention: how a sample is read; auto takes ids where judge and files share them, else text
        reference: a file of real texts, for MAUVE
        precision: what the judge runs in
        device: where to put the judge; a GPU where there is one, unless told
        batch_size: sequences that the judge reads at once; by their length unless told
        cache: a folder that keeps the judge's scores
        separator: what stands between the texts of a plain text file
        json: print one JSON document
    """
    if not files:
        raise LimpetError("there is nothing to score: name one or more files")
    everything = [read_samples(path, separator) for path in files]
    real = read_samples(reference, separator) if reference else []
    name = judge if judge != "auto" else BUILTIN if has_builtin() else "none"
    if real and name == "none":
        raise LimpetError("MAUVE compares a judge's features: name a judge")
    reader = None if name == "none" else load_judge(name, device, precision)
    plan = plan_for([sample for samples in everything for sample in samples], reader, convention, batch_size, cache)
    results = []
    with progress_bar() as bar:
        for path, samples in zip(files, everything, strict=True):
            task = bar.add_task(f"{name} reads {path}", total=None, detail="", visible=reader is not None)
            update = partial(_advance, bar, task)
            results.append(score(path, samples, plan, real, update))
    document = {
        "files": [_file_document(result, plan) for result in results],
        "contrasts": [_contrast_document(results[0], result) for result in results[1:]],
    }
    if json:
        print_json(document)
    else:
        _print(document)


def _advance(bar: Any, task: Any, done: int, total: int) -> None:
    bar.update(task, completed=done, total=total)
