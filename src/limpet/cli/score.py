"""`limpet score FILE...`: every metric for texts made by anyone, and paired contrasts between files."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from textwrap import fill
from typing import Any, Literal, NamedTuple

import numpy as np
import tyro
from numpy.typing import NDArray
from rich import box
from rich.table import Table

from limpet.cli.common import ANYWHERE, Json, Running, out, progress, show
from limpet.errors import LimpetError
from limpet.evaluation import scoring, statistics
from limpet.evaluation.judges import Judge, ScoreCache, Scores, gen_nll
from limpet.evaluation.judges.base import Progress
from limpet.evaluation.judges.likelihood import boundary
from limpet.evaluation.metrics import METRICS, mauve
from limpet.files import json_row, read_text
from limpet.models import tokenizer_digest

Floats = NDArray[np.float64]
Statistic = Callable[[Floats], float]
LEVEL = 0.95  # of every bootstrap interval
NAMES = tuple(metric.name for metric in METRICS)


# What is in a file


class Sample(NamedTuple):
    """One text as a file gives it, as ids, as text or as both; what it was told to begin with stands apart."""

    ids: tuple[list[int], list[int]] | None
    text: tuple[str, str] | None
    shard: int | str = 0
    place: int | None = None  # its number under the seed
    tokenizer: str | None = None  # the digest of what made its ids

    @property
    def prompt(self) -> list[int] | str:
        return (self.ids or self.text or ("",))[0]


def read_samples(path: str, separator: str = "\n") -> list[Sample]:
    """The samples of a JSON Lines file or of a plain text, in order of shard and place."""
    what, shards = "give a UTF-8 text or JSON Lines file", sorted(Path(path).glob("shard-*.jsonl"))
    content = "".join(read_text(shard, what) for shard in shards) if shards else read_text(path, what)
    if content.lstrip().startswith("{") and not path.endswith(".txt"):
        lines = enumerate(content.split("\n"), 1)
        samples = [_parse(line, f"line {number} of {path}") for number, line in lines if line.strip()]
    else:
        samples = [Sample(None, ("", part.strip("\r\n"))) for part in content.split(separator) if part.strip()]
    if not samples:
        raise LimpetError(f"{path} holds no text: give a file with a text, or a JSON object with one, on each line")
    if len({type(sample.shard) for sample in samples}) > 1:
        raise LimpetError(f"{path} has seeds of two kinds, numbers and texts: use one")
    return sorted(samples, key=lambda sample: (sample.shard, sample.place or 0))  # stable: else as they stand


def _parse(line: str, where: str) -> Sample:
    row = json_row(line, where)
    row = row if isinstance(row, dict) else {}
    text, ids, prefix, begins = (row.get(name) for name in ("text", "tokens", "prefix", "prefix_text"))
    prefix = prefix or 0
    shard, place, tokenizer = row.get("seed", 0), row.get("sample"), row.get("tokenizer")
    is_ids = isinstance(ids, list) and all(type(i) is int and 0 <= i < 2**31 for i in ids)
    if text is ids is None or not isinstance(text, str | None) or not (is_ids or ids is None):
        raise LimpetError(f'{where} is no sample: it needs "text", a string, or "tokens", a list of ids, or both')
    if not isinstance(shard, int | str) or type(place) not in (int, type(None)):
        raise LimpetError(f'{where} has a "seed" or "sample" that is no number: mend it or leave it out')
    if not isinstance(tokenizer, str | None):
        raise LimpetError(f'{where} has a "tokenizer" that is no digest: mend it or leave it out')
    if isinstance(prefix, str) and text is not None and text.startswith(prefix):
        return Sample(None, (prefix, text[len(prefix) :]), shard, place, tokenizer)
    if type(prefix) is not int or not 0 <= prefix <= len(ids or ()):
        raise LimpetError(f'{where} has a "prefix" that is neither a count of its ids nor how its text begins')
    cut = None if ids is None else (ids[:prefix], ids[prefix:])
    if text is None or (prefix and begins is None):
        return Sample(cut, None, shard, place, tokenizer)
    begins = begins or ""
    if not isinstance(begins, str) or not text.startswith(begins):
        raise LimpetError(f'{where} has a "prefix_text" that is not how its text begins: mend it or leave it out')
    return Sample(cut, (begins, text[len(begins) :]), shard, place, tokenizer)


# How it is read


class Plan(NamedTuple):
    """How all files of one call are read, so that they can be compared."""

    judge: Judge | None = None
    convention: str = scoring.AUTO
    own: bool = False  # metrics count the files' own ids
    by_ids: bool = False  # the judge is given them too; else texts
    batch_size: int | None = None
    cache: ScoreCache | None = None

    @property
    def ids(self) -> str:
        """Whose ids metrics count."""
        if self.own:
            return "the file's ids"
        return f"{self.judge.name}'s ids" if self.judge and self.judge.tokenizer else "words between spaces"


def plan_for(samples: Sequence[Sample], judge: Judge | None, wanted: str, *how: Any) -> Plan:
    own, text = (all(sample[i] is not None for sample in samples) for i in (0, 1))
    if not own and not text:
        raise LimpetError("some samples have ids, or a prefix counted in ids, and others text alone: give one for all")
    if judge is None:
        return Plan(own=own)
    if wanted == "ids" and not own:
        raise LimpetError('the convention "ids" needs "tokens" in every sample of every file: use "text"')
    # Whose ids they are: a foreign tokenizer's if any row names one, nobody's if a row names none.
    digests, ours = {sample.tokenizer if own else None for sample in samples}, tokenizer_digest(judge.tokenizer)
    foreign = sorted(digest for digest in digests if digest not in (None, ours))
    made_by = foreign[0] if foreign else None if None in digests else ours
    if wanted == scoring.AUTO and not text and made_by is None:
        raise LimpetError(
            'a sample has ids alone, or a prefix counted in ids, and no "tokenizer" that says whose they are: give '
            f"both as text, or vouch with --convention ids that they are {judge.name}'s"
        )
    convention, by_ids = scoring.way(judge, made_by, text, "these files", wanted)
    return Plan(judge, convention, own, own and by_ids, *how)


def lay_out(samples: Sequence[Sample], own: bool, judge: Judge | None) -> list[tuple[list[int], list[int]]]:
    """The ids that were given, and those after them that metrics count: the files' own, else the judge's of the texts,
    else a number for each word."""
    if own:
        return [sample.ids or ([], []) for sample in samples]
    cuts, number = [], dict[str, int]()
    for prefix, rest in (sample.text or ("", "") for sample in samples):
        if judge is not None and judge.tokenizer is not None:
            ids = judge.tokenizer.encode(prefix + rest)
            cut = boundary(judge.tokenizer, ids, prefix)
        else:
            ids = [number.setdefault(word, len(number)) for word in [*prefix.split(), *rest.split()]]
            cut = len(prefix.split())
        cuts.append((ids[:cut], ids[cut:]))
    return cuts


# From samples to rows


def _ratio(values: Floats) -> float:
    """Nats per counted id, pooled."""
    total = values[:, 1].sum()
    return float(values[:, 0].sum() / total) if total else math.nan


STATISTICS: dict[str, Statistic] = {  # of a shard's samples; else their mean
    "gen-nll": _ratio,
    "gen-ppl": lambda values: math.exp(_ratio(values)),
}


class Row(NamedTuple):
    """One metric: what there is of each shard (or k-means seed), and the statistic that makes a value of it."""

    metric: str
    convention: str
    parts: list[Floats]  # (n, ...) each, or () where no value belongs to one sample
    statistic: Statistic = statistics.mean
    sampled: bool = True  # one value a sample, so that a bootstrap can draw them
    over: str = "shards"

    def less(self, other: Row) -> Row:
        """What it is more than another file's, over paired shards and paired samples."""
        pairs = [np.stack(pair, -1) for pair in zip(self.parts, other.parts, strict=True)]
        return self._replace(
            parts=pairs, statistic=lambda pair: self.statistic(pair[..., 0]) - self.statistic(pair[..., 1])
        )

    def to_dict(self) -> dict[str, Any]:
        """With the interval of a bootstrap over the samples, each within its shard."""
        drawn = None
        if self.sampled and not all(np.isnan(part).all() for part in self.parts):
            shards = [shard for shard, part in enumerate(self.parts) for _ in part]
            low, high, *_ = statistics.bootstrap(np.concatenate(self.parts), self.statistic, shards, LEVEL)
            drawn = dict(zip(("low", "high", "level"), statistics.numbers([low, high, LEVEL]), strict=True))
        about = {"metric": self.metric, "convention": self.convention, "over": self.over, "bootstrap": drawn}
        estimate = statistics.mean_se([self.statistic(part) for part in self.parts]).to_dict()
        return {**about, "mean": estimate["mean"], "se": estimate["se"], "values": estimate["shards"]}


class Result(NamedTuple):
    """Everything there is to say of one file."""

    path: str
    samples: list[Sample]
    rows: list[Row]
    scores: list[Scores]  # one a shard

    @property
    def shards(self) -> Counter[int | str]:
        """Every shard, with the number of its samples."""
        return Counter(sample.shard for sample in self.samples)


def score(path: str, samples: list[Sample], plan: Plan, real: list[Sample], tell: Progress) -> Result:
    """A file shard by shard: neither a set nor a sample's references reach across shards, and a judge reads in the
    same batches as `limpet compare` gives it."""
    judge, rules = plan.judge, conventions(samples, plan)
    prompted = "self-bleu-prefix" in rules
    shards: list[dict[str, Floats]] = []
    scores = []
    for _, members in groupby(samples, lambda sample: sample.shard):
        shard = list(members)
        cuts = lay_out(shard, plan.own, judge)
        ids = [rest for _, rest in cuts]
        columns, sets = scoring.diversity(ids, NAMES)
        if prompted:
            prompts = [str(sample.prompt) for sample in shard]
            columns["self-bleu-prefix"] = scoring.diversity(ids, ["self-bleu"], prompts)[0]["self-bleu"]
        values = {name: np.array(value, dtype=np.float64) for name, value in {**columns, **sets}.items()}
        if judge is not None:
            before, own = zip(*(cuts if plan.by_ids else [sample.text for sample in shard]), strict=True)
            prefixes = before if prompted else None
            found = gen_nll(judge, own, plan.convention, prefixes, plan.cache, plan.batch_size, tell)
            values["gen-nll"] = values["gen-ppl"] = np.stack([found.nll, found.tokens], -1)
            values["dropped"] = found.dropped.astype(np.float64)
            values["ends"] = np.array([sum(i == judge.eos for i in row) for row in ids], dtype=np.float64)
            scores.append(found)
        shards.append(values)
    rows = [
        Row(
            name,
            rule,
            [shard[name] for shard in shards],
            STATISTICS.get(name, statistics.mean),
            shards[0][name].ndim > 0,
        )
        for name, rule in rules.items()
    ]
    if real and judge is not None:
        rows.append(_mauve(samples, real, plan, judge))
    return Result(path, samples, rows, scores)


def conventions(samples: list[Sample], plan: Plan) -> dict[str, str]:
    """The rows of a file, and how each is taken."""
    rules = scoring.conventions(NAMES)
    if any(sample.prompt for sample in samples):
        rules["self-bleu-prefix"] = scoring.WITHIN_PROMPT
    if (judge := plan.judge) is None:
        return rules
    if judge.eos is not None and (plan.by_ids or not plan.own):  # metrics count the judge's ids
        rules["ends"] = f"how often a sample holds id {judge.eos}"
    rule = scoring.rule(judge, plan.convention)
    likelihood = {"gen-nll": f"nats an id; {rule}", "gen-ppl": f"exp of a shard's gen-nll; {rule}"}
    if plan.convention == "ids":
        likelihood["dropped"] = "[PAD] ids of a sample left out of gen-nll"
    return {**likelihood, **rules}


def _mauve(samples: list[Sample], real: list[Sample], plan: Plan, judge: Judge) -> Row:
    """All shards together against real texts, each as ids where its ids are the judge's."""
    wanted = plan.convention if all(sample.ids for sample in real) else scoring.AUTO
    read = [lay_out(samples, plan.by_ids, judge), lay_out(real, plan_for(real, judge, wanted).by_ids, judge)]
    ours, theirs = (judge.features([ids for _, ids in cuts if ids], plan.batch_size) for cuts in read)
    values = list(mauve(ours, theirs))
    rule = f"all shards together, over {len(values)} k-means seeds, features of {judge.name} at the last id"
    return Row("mauve", rule, values, sampled=False, over="k-means seeds")


# The command


def why_unpaired(a: Result, b: Result) -> str | None:
    """Why two files have no paired contrast, if they have none."""
    if a.shards != b.shards:
        shapes = [f"{len(one.shards)} shards, {len(one.samples)} samples" for one in (a, b)]
        asked = "the files need the same seeds, with as many samples each"
        return f"no paired contrast: {asked}, but have {' and '.join(shapes)}"
    places = [[sample.place for sample in result.samples] for result in (a, b)]
    alike = places[0] == places[1] or None in places[0] + places[1]
    return None if alike else 'no paired contrast: the files number their samples ("sample") differently'


def _contrast_document(a: Result, b: Result) -> dict[str, Any]:
    """b - a for every metric of both."""
    reason, first = why_unpaired(a, b), {row.metric: row for row in a.rows if row.over == "shards"}
    both = [row.less(first[row.metric]) for row in b.rows if row.metric in first and not reason]
    return {"a": a.path, "b": b.path, "unpaired": reason, "rows": [row.to_dict() for row in both]}


def _file_document(result: Result, plan: Plan) -> dict[str, Any]:
    judge = plan.judge and {
        **{name: getattr(plan.judge, name) for name in ("name", "digest", "precision", "context")},
        "convention": plan.convention,
        "counted": int(sum(scores.tokens.sum() for scores in result.scores)),
        "longer_than_context": sum(scores.long for scores in result.scores),
    }
    about = {"file": result.path, "samples": len(result.samples), "shards": sorted(result.shards), "ids": plan.ids}
    return {**about, "judge": judge, "rows": [row.to_dict() for row in result.rows]}


def _shown(document: dict[str, Any], width: int) -> Iterator[Table | str]:
    """What the terminal shows: a table a file and a contrast, then under a number each how rows were taken."""
    notes: dict[str, int] = {}  # conventions, in the order in which they came
    for file in document["files"]:
        by, judge = "no judge", file["judge"]
        if judge:
            by = f"judge {judge['name']} ({judge['digest'][:12]}), {judge['precision']}, {judge['counted']} ids counted"
        about = f"{file['file']}: {file['samples']} samples, {len(file['shards'])} shards, {file['ids']}, {by}"
        yield _table(about, file["rows"], notes)
        if judge and judge["longer_than_context"]:
            many, most = judge["longer_than_context"], judge["context"]
            yield fill(f"{many} samples exceed the judge's context of {most} ids: read in overlapping windows", width)
    for contrast in document["contrasts"]:
        about = f"{contrast['b']} - {contrast['a']}, paired"
        yield (
            fill(f"{about}: {contrast['unpaired']}", width)
            if contrast["unpaired"]
            else _table(about, contrast["rows"], notes)
        )
    yield f"mean ± standard error over shards, and a {LEVEL:.0%} bootstrap over samples"
    yield from (fill(f"{i} {rule}", width, subsequent_indent="  ") for rule, i in notes.items())


def _table(about: str, rows: Sequence[dict[str, Any]], notes: dict[str, int]) -> Table:
    view = Table(title=about, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("metric", "mean", "interval", "note"):
        view.add_column(head, justify="left" if head == "metric" else "right", no_wrap=True)
    for row in rows:
        drawn = row["bootstrap"] or {"low": None, "high": None}
        values = (row["mean"], row["se"], drawn["low"], drawn["high"])
        mean, se, low, high = ("-" if value is None else f"{value:.4f}" for value in values)
        note = notes.setdefault(row["convention"], len(notes) + 1)
        error = "" if row["se"] is None else f" ± {se}"
        view.add_row(row["metric"], mean + error, f"{low} to {high}" if row["bootstrap"] else "", str(note))
    return view


def run(
    files: tyro.conf.Positional[tuple[str, ...]],
    /,
    *,
    judge: str = "auto",
    convention: Literal["auto", "ids", "text", "released", "exact"] = "auto",
    reference: str | None = None,
    where: Running = ANYWHERE,
    batch_size: int | None = None,
    cache: Path | None = None,
    separator: str = "\n",
    json: Json = False,
) -> None:
    """Score texts made by anyone: likelihood under a judge, entropy, Dist-4, Rep-4, Self-BLEU, conventions named.

    A file holds a text on each line, or JSON Lines with "text" or "tokens", and maybe "seed", "sample", "prefix" and
    "tokenizer", the digest of what made its ids, and "prefix_text", for a judge of another tokenizer: what `limpet
    sample` writes, into a file or a folder. Each seed is a shard, and errors are over shards; the interval beside is a
    bootstrap over samples. With more files, each also has its values less the first file's, paired by shard and sample.

    $ limpet score samples.jsonl
    $ limpet score native.jsonl crs.jsonl --json
    $ limpet score stories.txt --judge gpt2-large --convention released
    $ limpet score words.jsonl --judge exact:words
    $ limpet score samples.jsonl --judge none

    Args:
        files: texts, JSON Lines, or folders that `limpet sample --out` filled; - reads standard input
        judge: mini-judge, a folder, a causal language model on the hub, exact:NAME (the true distribution of a source), or
            none; auto is mini-judge where it is
        convention: how a sample is read; auto takes ids where the files' "tokenizer" is the judge's own, else text;
            to ask for ids where the files name no tokenizer is to vouch that they are the judge's
        reference: a file of real texts, for MAUVE
        batch_size: sequences that the judge reads at once; by their length unless told
        cache: a folder that keeps the judge's scores
        separator: what stands between the texts of a plain text file
    """
    if not files:
        raise LimpetError("there is nothing to score: name one or more files")
    everything = [read_samples(path, separator) for path in files]
    real = read_samples(reference, separator) if reference else []
    reader = where.judge(judge)
    if real and reader is None:
        raise LimpetError("MAUVE compares a judge's features: name a judge")
    kept = None if cache is None else ScoreCache(cache)
    plan = plan_for([one for samples in everything for one in samples], reader, convention, batch_size, kept)
    results = []
    with progress(visible=reader is not None) as tell:
        for path, samples in zip(files, everything, strict=True):
            tell(description=f"{reader and reader.name} reads {path}")
            results.append(score(path, samples, plan, real, lambda done, total: tell(completed=done, total=total)))
    document = {
        "files": [_file_document(result, plan) for result in results],
        "contrasts": [_contrast_document(results[0], result) for result in results[1:]],
    }
    show(json, document, _shown(document, out.width))
