"""`evaluate`, the only code that turns samples into numbers, and `Scores`, which holds them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from limpet.errors import LimpetError, import_extra, unknown_name
from limpet.evaluation import statistics
from limpet.evaluation.checkers import Checker, find_checker
from limpet.evaluation.judges import AUTO, Judge, JudgeScores, ScoreCache, as_judge, describe, score_samples
from limpet.evaluation.judges.base import Progress
from limpet.evaluation.metrics import METRICS, mauve, novelty, pack
from limpet.evaluation.sample_sets import ReadingMode, SampleSet, reading_mode, sample_sets, tokenised
from limpet.evaluation.statistics import Estimate, Floats, GeometricMean, Interval
from limpet.evaluation.tables import ResultTable
from limpet.generation import Samples

LEVEL = 0.95  # of bootstrap intervals
NLL, PERPLEXITY, NOVELTY = "nll", "perplexity", "novelty-8"


def _nll(sums: Floats) -> float:
    """Nats per counted token of samples (n, 2): the NLL of each and how many of its tokens count."""
    nll, counted = np.ascontiguousarray(sums.T)
    return float(nll.sum() / counted.sum()) if counted.any() else math.nan


def _perplexity(sums: Floats) -> float:
    with np.errstate(over="ignore"):
        return float(np.exp(_nll(sums)))


@dataclass(frozen=True, eq=False)
class Measure:
    """One number about samples: how it is taken, and for each seed the array that it is computed from."""

    convention: str
    parts: tuple[Floats, ...]  # per seed: (n, ...) one row a sample, or () for a number of the whole set
    statistic: Callable[[Floats], float] = statistics.mean  # of a part
    of_set: bool = False  # the number belongs to the whole set and not to single samples

    @cached_property
    def values(self) -> Floats:
        """(seeds,)"""
        return np.array([self.statistic(part) for part in self.parts])

    @property
    def estimate(self) -> Estimate:
        """Mean and standard error over seeds."""
        return (GeometricMean if self.statistic is _perplexity else Estimate)(self.values)

    @property
    def interval(self) -> Interval | None:
        """A bootstrap interval over the samples, each drawn within its seed; None for a number of the whole set."""
        if self.of_set or all(np.isnan(part).all() for part in self.parts):
            return None
        seeds = [seed for seed, part in enumerate(self.parts) for _ in part]
        return statistics.bootstrap(np.concatenate(self.parts), self.statistic, seeds, LEVEL)

    def minus(self, other: Measure) -> Measure:
        """The difference from another measure, paired by seed and by sample."""
        pairs = tuple(np.stack(pair, -1) for pair in zip(self.parts, other.parts, strict=True))
        function = self.statistic
        return replace(self, parts=pairs, statistic=lambda pair: function(pair[..., 0]) - function(pair[..., 1]))

    def to_dict(self, intervals: bool = False) -> dict[str, Any]:
        document = {"convention": self.convention, **self.estimate.to_dict()}
        if not intervals:
            return document
        if (interval := self.interval) is None:
            return {**document, "bootstrap": None}
        low, high = statistics.numbers(interval)
        return {**document, "bootstrap": {"low": low, "high": high, "level": LEVEL}}


@dataclass(frozen=True, eq=False, repr=False)
class Scores:
    """What `evaluate` returns: for each measure one value per seed, with the values of the single samples behind it.

    `values["entropy"]` has the values of the seeds, `estimate("entropy")` their mean and standard error, and
    `columns()["entropy"]` those of the single samples of a seed. Printing shows a table."""

    name: str
    sets: tuple[SampleSet, ...]  # one a seed
    measures: dict[str, Measure]  # a checker's first, then the likelihood, then the metrics
    judge: dict[str, Any] | None  # name, digest, precision, context, convention, rule
    judged: tuple[JudgeScores, ...]  # one a seed; empty without a judge
    counted_ids: str  # which ids the metrics count
    mauve: Floats | None = None  # one value for each k-means seed, of all samples together

    @property
    def seeds(self) -> tuple[int | str, ...]:
        return tuple(one.seed for one in self.sets)

    @property
    def values(self) -> dict[str, Floats]:
        """The values of each measure, one a seed."""
        return {name: measure.values for name, measure in self.measures.items()}

    @property
    def nll(self) -> Floats:
        """(seeds,) nats per counted token: the GenNLL of each seed."""
        return self._measure(NLL).values

    @property
    def perplexity(self) -> Floats:
        """(seeds,) exp of `nll`."""
        return self._measure(PERPLEXITY).values

    @property
    def counted(self) -> int:
        """Tokens that the likelihood is taken over."""
        return int(sum(one.tokens.sum() for one in self.judged))

    def _measure(self, name: str) -> Measure:
        if name not in self.measures:
            raise unknown_name("these scores have no measure", name, self.measures)
        return self.measures[name]

    def estimate(self, name: str) -> Estimate:
        """Mean and standard error over seeds of a measure. Perplexity is the exponential of the mean NLL."""
        return self._measure(name).estimate

    def columns(self, i: int = 0) -> dict[str, Floats]:
        """The values of the single samples of the i-th seed, (n,) each; the NLL of a sample is per counted token."""
        columns = {}
        for name, measure in self.measures.items():
            if name == NLL:
                columns[name] = self.judged[i].mean
            elif name == PERPLEXITY:
                with np.errstate(over="ignore"):
                    columns[name] = np.exp(self.judged[i].mean)
            elif not measure.of_set:
                columns[name] = measure.parts[i]
        return columns

    def set_values(self, i: int = 0) -> dict[str, float]:
        """The values that belong to the whole set of samples of the i-th seed."""
        return {name: float(measure.parts[i]) for name, measure in self.measures.items() if measure.of_set}

    def sample_rows(self) -> list[dict[str, Any]]:
        """One dict a sample: its seed, its number, and its value of every measure, None where it has none."""
        rows = []
        for i, one in enumerate(self.sets):
            columns = {name: statistics.numbers(column) for name, column in self.columns(i).items()}
            if self.judged:
                columns["counted"] = self.judged[i].tokens.tolist()
            for j, number in enumerate(one.numbers):
                rows.append({"seed": one.seed, "sample": number, **{name: at[j] for name, at in columns.items()}})
        return rows

    def difference(self, other: Scores) -> dict[str, Measure]:
        """Each measure minus that of other scores, paired by seed and sample; an error if they cannot be paired.

        Perplexity is left out: the difference of NLL compares the same quantity."""
        mine, theirs = ({s.seed: len(s) for s in scores.sets} for scores in (self, other))
        if mine != theirs:
            shapes = " and ".join(f"{len(sizes)} seeds, {sum(sizes.values())} samples" for sizes in (theirs, mine))
            raise LimpetError(f"a paired difference needs the same seeds with as many samples each, but has {shapes}")
        numbers = [[list(one.numbers) for one in scores.sets] for scores in (self, other)]
        if numbers[0] != numbers[1] and not any(None in part for parts in numbers for part in parts):
            raise LimpetError('a paired difference needs the same samples, but their numbers ("sample") differ')
        shared = [name for name in self.measures if name in other.measures and name != PERPLEXITY]
        return {name: self.measures[name].minus(other.measures[name]) for name in shared}

    @property
    def caption(self) -> str:
        """What was evaluated, and by which judge."""
        seeds = f"{len(self.sets)} seed{'s' * (len(self.sets) > 1)}"
        sizes = f"{seeds}, {sum(map(len, self.sets))} samples"
        judge = "none" if self.judge is None else f"{self.judge['rule']}; {self.counted:,} tokens counted"
        return f"{self.name}: {sizes}; metrics count {self.counted_ids}\njudge: {judge}"

    def table(self, intervals: bool = False) -> ResultTable:
        """One row a measure: mean and standard error over seeds, and with `intervals` a bootstrap over samples."""
        table = measures_table(self.caption, self.measures, intervals)
        if self.mauve is not None:
            row = ["mauve (error over k-means seeds)", f"{statistics.mean_se(self.mauve):.4f}"]
            table.rows.append([*row, ""][: len(table.head)])
        return table

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def to_dict(self, intervals: bool = False) -> dict[str, Any]:
        """Every number and how it was taken, for JSON; `intervals` adds bootstrap intervals over samples."""
        judge = self.judge and {
            **self.judge,
            "counted": self.counted,
            "longer_than_context": sum(one.long for one in self.judged),
        }
        return {
            "name": self.name,
            "seeds": list(self.seeds),
            "samples": sum(map(len, self.sets)),
            "ids": self.counted_ids,
            "judge": judge,
            "measures": {name: measure.to_dict(intervals) for name, measure in self.measures.items()},
            **({} if self.mauve is None else {"mauve": statistics.mean_se(self.mauve).to_dict()}),
        }

    def to_pandas(self) -> Any:
        """A data frame with one row a sample (see `sample_rows`)."""
        return import_extra("pandas", "notebook").DataFrame(self.sample_rows())


def measures_table(caption: str, measures: Mapping[str, Measure], intervals: bool = False) -> ResultTable:
    """One row a measure: mean and standard error over seeds, and with `intervals` a bootstrap over samples."""
    head = ["measure", "mean ± standard error", *([f"{LEVEL:.0%} interval over samples"] if intervals else [])]
    rows = []
    for name, measure in measures.items():
        row = [name, f"{measure.estimate:.4f}"]
        if intervals:
            interval = measure.interval
            row.append("" if interval is None else f"{interval.low:.4f} to {interval.high:.4f}")
        rows.append(row)
    return ResultTable(caption, head, rows)


def evaluate(
    samples: Samples | SampleSet | Sequence[Samples] | Sequence[SampleSet] | Sequence[str],
    judge: Judge | str | None = None,
    metrics: Iterable[str] = tuple(METRICS),
    *,
    checker: Checker | str | None = None,
    convention: str = AUTO,
    reference: Any = None,
    mauve_starts: int = 5,
    known: Sequence[Sequence[int]] | None = None,
    cache: ScoreCache | None = None,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> Scores:
    """Turn samples into numbers. Prompts are never counted.

    Args:
        samples: what `limpet.sample` returned, a list of such (one per seed), or a list of texts.
        judge: a judge or its name, for the likelihood (default: none).
        metrics: names of `METRICS` (default: all).
        checker: a checker or its name; its values come first.
        convention: how the judge reads the samples: "auto" (ids if they belong to the judge's tokenizer, else text),
            "ids", "text", "released" or "exact".
        reference: real texts, samples, or their `features`, to compare all samples with by MAUVE.
        mauve_starts: k-means starts for each k-means seed of MAUVE.
        known: ids of real texts, in the ids that the metrics count, for the measure "novelty-8": the share of a
            sample's 8-grams that none of them has.
        cache: where the judge's scores are kept.
        batch_size: sequences that the judge reads at once (default: by their length).
        progress: called with (windows read, windows in all) as the judge reads the samples of a seed.

    Returns:
        `Scores`: values per sample and per seed, with mean and standard error over seeds.
    """
    sets, names = sample_sets(samples), [metrics] if isinstance(metrics, str) else list(metrics)
    if unknown_names := [name for name in names if name not in METRICS]:
        raise unknown_name("there is no metric", unknown_names[0], METRICS)
    judge = None if judge is None else as_judge(judge)
    mode = None if judge is None else reading_mode(judge, sets, convention)
    checks = {} if checker is None else _check(sets, find_checker(checker) if isinstance(checker, str) else checker)
    measures: dict[str, Measure] = {}
    judged: list[JudgeScores] = []
    about = None
    if judge is not None and mode is not None:
        judged = [_judge(judge, mode, one, cache, batch_size, progress) for one in sets]
        about = {name: getattr(judge, name) for name in ("name", "digest", "precision", "context")}
        about |= {"convention": mode.convention, "rule": describe(judge, mode.convention)}
        measures = _likelihood(judged)
    own_ids = all(one.ids is not None for one in sets)
    pairs = [one.ids or [] if own_ids else tokenised(one, judge) for one in sets]
    ids = [[rest for _, rest in part] for part in pairs]
    if judge is not None and (not own_ids or (mode is not None and mode.as_ids)):  # they are the judge's ids
        measures |= _ends(ids, judge)
    measures |= _measure(sets, ids, names)
    if known is not None:
        rule = "share of the 8-grams of a sample that the reference text does not have"
        measures[NOVELTY] = Measure(rule, tuple(novelty(part, known) for part in ids))
    if clash := [name for name in checks if name in measures]:
        raise LimpetError(f"the checker and limpet both have a measure {clash[0]!r}: rename the checker's")
    return Scores(
        name=sets[0].name,
        sets=tuple(sets),
        measures=checks | measures,
        judge=about,
        judged=tuple(judged),
        counted_ids=_counted_ids(own_ids, judge),
        mauve=None if reference is None else _mauve(judge, mode, sets, reference, convention, mauve_starts, batch_size),
    )


def _counted_ids(own_ids: bool, judge: Judge | None) -> str:
    if own_ids:
        return "the samples' own ids"
    return f"{judge.name}'s ids" if judge is not None and judge.tokenizer is not None else "words between spaces"


def _check(sets: Sequence[SampleSet], checker: Checker) -> dict[str, Measure]:
    """The values of a checker: those of single texts, then those of whole sets."""
    rules: Mapping[str, str] = getattr(checker, "conventions", {})
    check_set: Callable[[list[str]], Mapping[str, float]] = getattr(checker, "check_set", lambda texts: {})
    checked: list[list[Mapping[str, bool | float]]] = []
    of_sets: list[Mapping[str, float]] = []
    for one in sets:
        if one.texts is None:
            raise LimpetError(f"a checker reads text, and {one.name} has no tokenizer")
        texts = [prompt + rest for prompt, rest in one.texts]
        checked.append([checker.check(text) for text in texts])
        of_sets.append(check_set(texts))
    measures = {}
    for name in dict.fromkeys(name for part in checked for values in part for name in values):
        parts = tuple(np.array([values.get(name, math.nan) for values in part], dtype=float) for part in checked)
        measures[name] = Measure(rules.get(name, "by the checker"), parts)
    for name in of_sets[0]:
        parts = tuple(np.array(values.get(name, math.nan), dtype=float) for values in of_sets)
        measures[name] = Measure(rules.get(name, "by the checker"), parts, of_set=True)
    return measures


def _judge(
    judge: Judge, mode: ReadingMode, samples: SampleSet, cache: ScoreCache | None, batch_size: int | None,
    progress: Progress | None,
) -> JudgeScores:  # fmt: skip
    pairs: Sequence[tuple[Any, Any]] = (samples.ids if mode.as_ids else samples.texts) or []
    prompts, rest = zip(*pairs, strict=True)
    has_prompt = any(map(len, prompts))
    return score_samples(judge, rest, mode.convention, prompts if has_prompt else None, cache, batch_size, progress)


def _likelihood(judged: Sequence[JudgeScores]) -> dict[str, Measure]:
    sums = tuple(np.stack([one.nll, one.tokens], -1) for one in judged)
    measures = {
        NLL: Measure("nats per counted token, pooled over the samples of a seed", sums, _nll),
        PERPLEXITY: Measure("exp of the mean NLL", sums, _perplexity),
    }
    if judged[0].convention == "ids":
        dropped = tuple(one.dropped.astype(float) for one in judged)
        measures["dropped"] = Measure("[PAD] ids of a sample that the likelihood leaves out", dropped)
    return measures


def _ends(ids: Sequence[list[list[int]]], judge: Judge) -> dict[str, Measure]:
    if judge.eos is None:
        return {}
    parts = tuple(np.array([row.count(judge.eos) for row in part], dtype=float) for part in ids)
    return {"ends": Measure(f"occurrences of the end-of-text id {judge.eos} in a sample", parts)}


def _measure(sets: Sequence[SampleSet], ids: Sequence[list[list[int]]], names: Sequence[str]) -> dict[str, Measure]:
    """The metrics of generated ids; those within a prompt only if there are prompts."""
    packed = [pack(part) for part in ids]
    prompted = any(prompt for one in sets for prompt in one.prompts)
    measures = {}
    for name in names:
        metric = METRICS[name]
        if metric.by_prompt and not prompted:
            continue
        parts = [
            metric.function(part, **({"groups": one.prompts} if metric.by_prompt else {}))
            for one, part in zip(sets, packed, strict=True)
        ]
        values = tuple(np.asarray(part, dtype=float) for part in parts)
        measures[name] = Measure(metric.convention, values, of_set=metric.of_set)
    return measures


def features(judge: Judge, samples: Any, batch_size: int | None = None, convention: str = AUTO) -> NDArray[np.float32]:
    """(n, D) features of a judge at the last token of each sample, for MAUVE; samples without tokens are left out."""
    sets = sample_sets(samples)
    as_ids = reading_mode(judge, sets, convention).as_ids
    ids = [rest for one in sets for _, rest in ((one.ids or []) if as_ids else tokenised(one, judge)) if rest]
    return judge.features(ids, batch_size)


def _mauve(
    judge: Judge | None, mode: ReadingMode | None, sets: Sequence[SampleSet], reference: Any, convention: str,
    starts: int, batch_size: int | None,
) -> Floats:  # fmt: skip
    if judge is None or mode is None:
        raise LimpetError("MAUVE compares features of a judge: name a judge")
    if not isinstance(reference, np.ndarray):
        real = sample_sets(reference)
        wanted = convention if all(one.ids is not None for one in real) else AUTO
        reference = features(judge, real, batch_size, wanted)
    return mauve(features(judge, sets, batch_size, mode.convention), reference, starts=starts)
