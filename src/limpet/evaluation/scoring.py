"""From tokens to numbers, one way: who judges, how a sample is read, what is counted. All that scores, scores here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from limpet.errors import LimpetError
from limpet.evaluation.judges import CONVENTIONS, Judge, ScoreCache, Scores, SourceJudge, gen_nll
from limpet.evaluation.judges.base import Progress
from limpet.evaluation.metrics import METRICS, Metric, self_bleu
from limpet.evaluation.statistics import numbers
from limpet.generation import cut
from limpet.models import Denoiser, tokenizer_digest
from limpet.models.exact import Source

AUTO = "auto"  # the convention that judge and samples settle between them
WITHIN_PROMPT = "BLEU-4 against the other continuations of the prompt, method 1"


def source_judge(model: Denoiser) -> SourceJudge | None:
    """The model's own distribution as a judge, where it is known."""
    return SourceJudge(model) if isinstance(model, Source) else None


def judge_of(model: Denoiser, judge: Judge | None) -> Judge:
    """Who judges a model's samples: the judge given, else the model's own true distribution where that is known."""
    found = judge or source_judge(model)
    if found is None:
        raise LimpetError(
            f"the true distribution of {model.name} is not known: give a judge (judge=limpet.load_judge(...))"
        )
    return found


class Way(NamedTuple):
    """How a judge reads samples."""

    convention: str
    ids: bool  # it is given their ids; else their texts


def way(judge: Judge, tokenizer: str | None, text: bool, whose: str, wanted: str = AUTO) -> Way:
    """How a judge reads samples made with a tokenizer of this digest: as ids where its own tokenizer is that one,
    else as text where there is text. What is asked for is held to the same, but for ids of which it is not known whose
    they are: to ask for "ids" is then to vouch for them."""
    if wanted not in (AUTO, *CONVENTIONS):
        raise LimpetError(f"convention {wanted!r} is none of {', '.join((AUTO, *CONVENTIONS))}")
    own, by_source = tokenizer_digest(judge.tokenizer), isinstance(judge, SourceJudge)
    shared = tokenizer is not None and tokenizer in (own, judge.digest)
    vouched = wanted != AUTO and (tokenizer is None or own is None)
    readable = text and judge.tokenizer is not None
    possible = {
        "exact": by_source and (shared or vouched or readable),
        "ids": not by_source and (shared or vouched),
        "text": not by_source and readable,
        "released": not by_source and judge.tokenizer is not None and (shared or vouched or readable),
    }
    if wanted == AUTO:
        wanted = "exact" if by_source else "ids" if shared else "text"
    if not possible[wanted]:
        raise LimpetError(
            f"{judge.name} cannot score {whose} by the convention {wanted!r}: ids are read as ids only where both have "
            "one tokenizer, and anything else as text, for which both need a tokenizer; name another judge"
        )
    takes = CONVENTIONS[wanted].takes
    return Way(wanted, "text" not in takes or ("ids" in takes and (shared or not text)))


def way_for(judge: Judge, model: Denoiser, wanted: str = AUTO) -> Way:
    """How a judge reads a model's samples; a distribution reads its own model's ids, tokenizer or none."""
    made_by = model.digest if judge.digest == model.digest else tokenizer_digest(model.tokenizer)
    return way(judge, made_by, model.tokenizer is not None, model.name, wanted)


def score(
    judge: Judge, model: Denoiser, tokens: Any, prefix: int = 0, convention: str = AUTO,
    cache: ScoreCache | None = None, batch_size: int | None = None, progress: Progress | None = None,
) -> Scores:  # fmt: skip
    """What a judge says of a model's samples (n, L), their first `prefix` tokens given and not counted."""
    convention, by_ids = way_for(judge, model, convention)
    rows = [[int(token) for token in row] for row in tokens]
    parts: list[Any] = [(row[:prefix], row[prefix:]) for row in rows]
    if model.tokenizer is not None and not by_ids:
        parts = [cut(model.tokenizer.decode, row, prefix) for row in rows]
    before, own = zip(*parts, strict=True)
    return gen_nll(judge, own, convention, before if prefix else None, cache, batch_size, progress)


def features(judge: Judge, model: Denoiser, tokens: Any) -> NDArray[np.float32]:
    """(n, D) of a judge at the last token of each of a model's samples, or of real texts in its ids: for MAUVE."""
    rows = [[int(token) for token in row] for row in tokens]
    if not way_for(judge, model).ids and model.tokenizer is not None and judge.tokenizer is not None:
        rows = [judge.tokenizer.encode(model.tokenizer.decode(row)) for row in rows]
    return judge.features([row for row in rows if row])


def pieces(model: Denoiser, text: str, size: int) -> list[list[int]]:
    """A real text as a model's ids, in pieces of one size."""
    if model.tokenizer is None:
        raise LimpetError(f"{model.name} has no tokenizer, so its samples cannot be held against a text")
    ids = model.tokenizer.encode(text)
    return [ids[start : start + size] for start in range(0, len(ids) - size + 1, size)]


def rule(judge: Judge, convention: str) -> str:
    """The sentence that stands with every score: who judged, in what precision, and how it read."""
    return f"{judge.name} ({judge.digest[:12]}), {judge.precision}, {convention}: {CONVENTIONS[convention].rule}"


def _metrics(names: Sequence[str], groups: Sequence[str] | None) -> list[Metric]:
    """The named metrics; after prompts, a continuation's Self-BLEU is within its prompt's group, as in the paper."""
    chosen = [metric for metric in METRICS if metric.name in names]
    if groups is None:
        return chosen
    grouped = Metric("self-bleu", WITHIN_PROMPT, partial(self_bleu, smoothing="method-1", groups=groups))
    return [grouped if metric.name == "self-bleu" else metric for metric in chosen]


def conventions(names: Sequence[str], prompted: bool = False) -> dict[str, str]:
    """How each metric is taken."""
    return {metric.name: metric.convention for metric in _metrics(names, [] if prompted else None)}


def diversity(
    tokens: Any, names: Sequence[str], groups: Sequence[str] | None = None
) -> tuple[dict[str, list[float | None]], dict[str, float | None]]:
    """Columns with one value a sample, and values of the whole set, of one shard's generated tokens; `groups` names
    each sample's prompt."""
    columns: dict[str, list[float | None]] = {}
    sets: dict[str, float | None] = {}
    for metric in _metrics(names, groups):
        value = metric.function(tokens)
        if metric.over == "set":
            sets[metric.name] = numbers([value])[0]
        else:
            columns[metric.name] = numbers(value)
    return columns, sets
