"""`compare`: several samplers with the same random numbers, evaluated alike, with errors over seeds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from limpet.errors import LimpetError, import_extra, unknown_name
from limpet.evaluation import statistics
from limpet.evaluation.checkers import Checker, find_checker
from limpet.evaluation.controls import control_sets, reference_set
from limpet.evaluation.judges import Judge, SourceJudge, as_judge, default_judge
from limpet.evaluation.metrics import METRICS as ALL_METRICS
from limpet.evaluation.sample_sets import SampleSet
from limpet.evaluation.scores import NLL, NOVELTY, PERPLEXITY, Scores, evaluate
from limpet.evaluation.statistics import Estimate
from limpet.evaluation.tables import ResultTable
from limpet.generation import SEEDS, Progress, Prompt, Samples, sample
from limpet.models import Denoiser, check_model
from limpet.samplers import Sampler, choose_sampler, named_samplers
from limpet.samplers.recommended import SHARPNESS, check_not_both

SAMPLERS = ("native", "native top_p=0.9", "native top_p=0.7", "crs", "mend")  # compared by default
NFE = 16  # default network calls: few enough that samplers differ
N = 4  # default samples of each seed
METRICS = ("entropy", "rep-4")
MAUVE, MAUVE_SAMPLES = "mauve", 64  # the fewest samples of a sampler that MAUVE is taken of
COLUMNS = 4  # of numbers in a table; `to_dict` has all
HEADS = {
    PERPLEXITY: "GenPPL (lower is better)",
    NLL: "true NLL (nats/token, lower is better)",
    "entropy": "entropy (nats, higher is more diverse)",
    "rep-4": "rep-4 (lower is less repetitive)",
    NOVELTY: "novelty-8 (higher is less copied)",
    MAUVE: "MAUVE (higher is better; ± over k-means seeds)",
}


@dataclass(frozen=True, eq=False)
class SamplerScores:
    """One sampler of a comparison: its samples of each seed, and their scores."""

    name: str
    sampler: Sampler
    samples: list[Samples]  # one a seed
    scores: Scores

    @property
    def nfe(self) -> int:
        """Network calls for each sample."""
        return self.samples[0].nfe

    @property
    def committed(self) -> float:
        """Mean number of committed positions of a sample."""
        return float(np.mean([part.committed.float().mean() for part in self.samples]))

    @property
    def head_rows(self) -> float:
        """Rows of the head that were computed, as a fraction of nfe x free positions."""
        return float(np.mean([part.head_rows for part in self.samples]))

    def to_dict(self) -> dict[str, Any]:
        """The sampler's parameters, its costs and its measures, for JSON."""
        about = {"name": self.name, "sampler": self.sampler.to_dict(), "nfe": self.nfe, "committed": self.committed}
        measures = {name: self.scores.estimate(name).to_dict() for name in self.scores.measures}
        if self.scores.mauve is not None:
            measures[MAUVE] = statistics.mean_se(self.scores.mauve).to_dict()
        return {**about, "head_rows": self.head_rows, "counted": self.scores.counted, "measures": measures}


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """Samplers that started from the same noise with the same random numbers; printing shows a table."""

    model: str
    digest: str
    precision: str
    length: int
    seeds: tuple[int, ...]
    samples_per_seed: int
    samplers: list[SamplerScores]
    data: Scores | None  # of samples from the true distribution, if that is the judge
    metrics: tuple[str, ...] = METRICS  # shown beside the likelihood
    controls: Mapping[str, Scores] = field(default_factory=dict)  # by name; see `limpet.evaluation.controls`

    @property
    def judge(self) -> dict[str, Any]:
        """Name, digest, precision and context of the judge, its convention, and the rule as a sentence; empty where
        samples were checked and not judged."""
        return self.samplers[0].scores.judge or {}

    @property
    def conventions(self) -> dict[str, str]:
        """How each measure is taken."""
        return {name: measure.convention for name, measure in self.samplers[0].scores.measures.items()}

    def delta_nll(self, one: SamplerScores | Scores) -> Estimate:
        """The NLL of a sampler, or of scores, minus that of the first sampler, paired by seed; lower is better."""
        scores = one if isinstance(one, Scores) else one.scores
        return statistics.paired(scores.nll, self.samplers[0].scores.nll)

    @cached_property
    def row_names(self) -> list[str]:
        """The samplers' names, with the network calls where they differ, and the final step where it is not a draw."""
        calls = {one.nfe for one in self.samplers}
        names = []
        for one in self.samplers:
            final_step = getattr(one.sampler, "final_step", "sample")
            facts = [f"nfe={one.nfe}"] * (len(calls) > 1) + [f"final_step={final_step}"] * (final_step != "sample")
            names.append(", ".join([one.name, *(fact for fact in facts if fact not in one.name)]))
        return names

    @property
    def caption(self) -> str:
        """What was compared, and who judged it and how."""
        counted, calls = [one.scores.counted for one in self.samplers], {one.nfe for one in self.samplers}
        counts = " to ".join(f"{count:,}" for count in sorted({min(counted), max(counted)}))
        prompt = self.samplers[0].samples[0].prompt_length
        not_counted = f", the first {prompt} tokens are the prompt and not counted" if prompt else ""
        nfe = f", {calls.pop()} network calls" if len(calls) == 1 else ""
        judge, judged, paired = self.judge, "", ""
        if judge:
            judged = (
                f"judge: {judge['name']} ({judge['digest'][:12]}) in {judge['precision']}, convention "
                f"{judge['convention']}, {counts} tokens counted per sampler\n"
            )
            paired = "; delta NLL is paired by seed"
        return (
            f"{self.model} in {self.precision}: {len(self.seeds)} seeds x {self.samples_per_seed} samples of "
            f"{self.length} tokens{nfe}{not_counted}\n{judged}mean ± standard error over seeds{paired}"
        )

    def table(self) -> ResultTable:
        """One row a sampler: mean and standard error over seeds of a checker's values, then of GenPPL (or the true
        NLL), delta NLL, entropy and rep-4, at most four columns; more only if more metrics were asked for. The last
        rows are the controls, and the true distribution, if that is the judge."""
        likelihood = NLL if self.judge.get("convention") == "exact" else PERPLEXITY
        shown = [name for name in self.conventions if name not in (NLL, PERPLEXITY, "dropped", "ends", *self.metrics)]
        is_judged = self.judge and any(np.isfinite(one.scores.nll).all() for one in self.samplers)
        shown += [likelihood, "", *self.metrics] if is_judged else self.metrics  # "" is delta NLL
        shown = shown[: COLUMNS if self.metrics == METRICS else None]
        delta = f"delta NLL against {self.samplers[0].name} (nats/token, lower is better)"
        head = ["sampler", *(HEADS.get(key, key) if key else delta for key in shown)]
        scored = [(name, one.scores) for name, one in zip(self.row_names, self.samplers, strict=True)]
        scored += [*self.controls.items(), *([("true distribution", self.data)] if self.data is not None else [])]
        rows = []
        for name, scores in scored:
            has_delta = is_judged and scores not in (self.samplers[0].scores, self.data)
            delta_nll = f"{self.delta_nll(scores):.4f}" if has_delta else ""
            rows.append([name, *(_number(scores, key) if key else delta_nll for key in shown)])
        return ResultTable(self.caption, head, rows)

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def to_dict(self) -> dict[str, Any]:
        """Every number, for JSON; for each measure its mean, standard error and values of the seeds."""
        about = {name: getattr(self, name) for name in ("model", "digest", "precision", "length")}
        controls = {name: scores.to_dict() for name, scores in self.controls.items()}
        return {
            **about,
            "seeds": list(self.seeds),
            "samples_per_seed": self.samples_per_seed,
            "judge": self.judge or None,
            "conventions": self.conventions,
            "samplers": [
                {**one.to_dict(), **({"delta_nll": self.delta_nll(one).to_dict()} if self.judge else {})}
                for one in self.samplers
            ],
            **({"controls": controls} if controls else {}),
            "data": self.data and self.data.to_dict(),
        }

    def to_pandas(self) -> Any:
        """A data frame with one row for each sampler and seed."""
        rows = []
        for one in self.samplers:
            values = dict(one.scores.values)
            if self.judge:
                values["delta_nll"] = self.delta_nll(one).values
            rows += [
                {"sampler": one.name, "nfe": one.nfe, "seed": seed, **{name: v[i] for name, v in values.items()}}
                for i, seed in enumerate(self.seeds)
            ]
        return import_extra("pandas", "notebook").DataFrame(rows)

    def plot(self, axes: Any = None) -> Any:
        """Draw NLL (lower is better) against entropy, one point a sampler, with standard errors.

        axes: of matplotlib, to draw into (default: new ones). Returns the axes. The extra `figures` has matplotlib."""
        if axes is None:
            axes = import_extra("matplotlib.pyplot", "figures").subplots()[1]
        for name, one in zip(self.row_names, self.samplers, strict=True):
            x, y = one.scores.estimate("entropy"), one.scores.estimate(NLL)
            errors = np.nan_to_num([x.se, y.se])  # a single seed has no error
            axes.errorbar(x.mean, y.mean, xerr=errors[0], yerr=errors[1], fmt="o", label=name)
        axes.set(xlabel="entropy (nats)", ylabel="NLL (nats/token, lower is better)", title=self.caption.split("\n")[0])
        axes.legend()
        return axes


def compared_samplers(
    samplers: Mapping[str, Sampler | str] | Sequence[Sampler | str] | Sampler | str | None,
    nfe: int | None = NFE,
    sharpness: float | None = None,
    model: Denoiser | None = None,
) -> dict[str, Sampler]:
    """The samplers of a comparison by name. By default the recommended one at a sharpness stands beside `SAMPLERS`."""
    check_not_both(samplers, sharpness)
    if samplers is not None:
        return named_samplers(samplers, nfe)
    name = f"sharpness={SHARPNESS if sharpness is None else sharpness:g}"
    chosen = choose_sampler(None, NFE if nfe is None else nfe, sharpness, model)
    return {**named_samplers(SAMPLERS, nfe), name: chosen}


def _number(scores: Scores, name: str) -> str:
    if name == MAUVE and scores.mauve is not None:
        return f"{statistics.mean_se(scores.mauve):.4f}"
    return f"{scores.estimate(name):.{2 if name == PERPLEXITY else 4}f}" if name in scores.measures else ""


def compare(
    model: Denoiser,
    samplers: Sampler | str | Mapping[str, Sampler | str] | Sequence[Sampler | str] | None = None,
    nfe: int | None = NFE,
    n: int = N,
    seeds: Sequence[int] = SEEDS,
    length: int | None = None,
    prompt: Prompt | None = None,
    batch_size: int | None = None,
    judge: Judge | str | None = None,
    progress: bool | Callable[[str], Progress] = False,
    checker: Checker | str | None = None,
    metrics: Sequence[str] | None = None,
    controls: bool = False,
    sharpness: float | None = None,
) -> Comparison:
    """Sample a model with several samplers on the same random numbers, and evaluate the samples.

    Args:
        model: the model.
        samplers: a list or a mapping by name of samplers or texts such as "crs nfe=8" (default: native, native with
            top-p .9 and .7, CRS, Mend, and the recommended sampler). The first is what the others are compared with.
        nfe: network calls of the samplers that are given as text without their own.
        n: samples of each seed.
        seeds: standard errors are over them.
        length: tokens in a sample (default: the model's length).
        prompt: what every sample begins with; it is not counted.
        batch_size: samples that are computed at once (default: by the device).
        judge: a judge or its name (default: the model's own true distribution, where it is known; none, if the model
            has a checker; mini-judge, if it reads the model's tokens; else none, with a warning).
        progress: True for a bar, or a function that returns, for a sampler's name, what is called after every network
            call with (calls done, calls in all).
        checker: a checker or its name (default: the model's own, if it names one).
        metrics: names of `METRICS`, "novelty-8" or "mauve", shown beside the likelihood and entropy (default: rep-4,
            with controls novelty-8). The last two compare samples with real texts: held-out prose, or draws of an
            exact source.
        controls: whether to add three rows of texts that no model made, at the entropy of the first sampler. A metric
            that ranks one of them above a sampler is fooled.
        sharpness: of the recommended sampler, from 0 (diverse) to 1 (sharp), in place of samplers (default: .25).

    Returns:
        `Comparison`: the scores and samples of each sampler.
    """
    check_model(model)
    chosen = compared_samplers(samplers, nfe, sharpness, model)
    if isinstance(seeds, str) or not isinstance(seeds, Sequence):
        raise LimpetError(f"seeds is {seeds!r}; it takes a list of whole numbers, such as [8200, 8210]")
    if not chosen or not seeds:
        raise LimpetError("a comparison needs at least one sampler and one seed")
    if len(set(seeds)) < len(seeds):
        raise LimpetError(f"the seeds are {', '.join(map(str, seeds))}: each counts once, so give different ones")
    chosen_metrics = _metrics(metrics, controls, n * len(seeds))
    checker = checker or model.checker
    checker = find_checker(checker) if isinstance(checker, str) else checker
    judge = default_judge(model, model.device) if judge is None else as_judge(judge)
    size = length or model.length
    real = reference_set(model, size) if {MAUVE, NOVELTY} & {*chosen_metrics} else None

    def score(samples: list[Samples] | list[SampleSet]) -> Scores:
        return evaluate(
            samples,
            judge,
            [name for name in chosen_metrics if name in ALL_METRICS],
            checker=checker,
            reference=real if MAUVE in chosen_metrics else None,
            known=[ids for _, ids in real.ids or ()] if real and NOVELTY in chosen_metrics else None,
        )

    done = []
    for name, sampler in chosen.items():
        report = progress(name) if callable(progress) else progress
        parts = [sample(model, sampler, n, seed, length, prompt, None, batch_size, report) for seed in seeds]
        done.append(SamplerScores(name, sampler, parts, score(parts)))
    data = None
    if isinstance(judge, SourceJudge) and judge.digest == model.digest and not parts[0].prompt_length:
        drawn = [SampleSet.from_tokens(model, judge.source.draw(n, seed), 0, seed) for seed in seeds]
        data = score(drawn)
    size = done[0].samples[0].tokens.shape[1]
    scored = {}
    if controls:
        if parts[0].prompt_length:
            raise LimpetError("controls have no prompt: leave the prompt out, or the controls")
        wanted = done[0].scores.estimate("entropy").mean
        scored = {name: score(sets) for name, sets in control_sets(model, judge, n, seeds, size, wanted).items()}
    return Comparison(
        model.name, model.digest, model.precision, size, tuple(seeds), n, done, data, chosen_metrics, scored
    )


def _metrics(named: Sequence[str] | None, controls: bool, samples: int) -> tuple[str, ...]:
    """The metrics of a comparison: entropy, and those that were asked for."""
    if named is None:
        return ("entropy", NOVELTY) if controls else METRICS
    known = [*ALL_METRICS, NOVELTY, MAUVE]
    for name in named:
        if name not in known:
            raise unknown_name("there is no metric", name, known)
    if MAUVE in named and samples < MAUVE_SAMPLES:
        raise LimpetError(
            f"mauve compares distributions: it takes at least {MAUVE_SAMPLES} samples of each sampler, not {samples}; "
            "give more samples or more seeds"
        )
    return ("entropy", *dict.fromkeys(name for name in named if name != "entropy"))
