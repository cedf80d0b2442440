"""From a unit's tokens to its rows: what the judges say of each sample, and its diversity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from limpet.denoisers import Denoiser
from limpet.denoisers.exact import Source
from limpet.errors import LimpetError
from limpet.judges import Judge, gen_nll
from limpet.metrics import METRICS, Metric, self_bleu

TRUE_LAW = "true law"
PROMPTED = "BLEU-4 against the other continuations of the prompt, method 1"


def _metrics(names: Sequence[str], groups: Sequence[str] | None, prompted: bool) -> list[Metric]:
    """The named metrics; after prompts, a continuation's Self-BLEU is within its prompt's group, as in the paper."""
    chosen = [metric for metric in METRICS if metric.name in names]
    if not prompted:
        return chosen
    grouped = Metric("self-bleu", PROMPTED, partial(self_bleu, smoothing="method-1", groups=groups))
    return [grouped if metric.name == "self-bleu" else metric for metric in chosen]


def conventions(names: Sequence[str], prompted: bool) -> dict[str, str]:
    """How each metric is taken."""
    return {metric.name: metric.convention for metric in _metrics(names, None, prompted)}


def measure(
    tokens: Tensor, prefixes: Sequence[Sequence[int]] | None, model: Denoiser,
    judges: Sequence[tuple[Judge, str]], names: Sequence[str],
) -> tuple[dict[str, list[float | None]], dict[str, float | None]]:  # fmt: skip
    """Columns with one value a sample, and values of the whole set. Prefixes are given, not measured."""
    start = len(prefixes[0]) if prefixes else 0
    own = tokens[:, start:]
    columns: dict[str, list[float | None]] = {}
    for i, (judge, convention) in enumerate(judges):
        samples: list[Any] = own.tolist()
        before: list[Any] | None = None if prefixes is None else [list(prefix) for prefix in prefixes]
        if convention == "text":
            samples, before = _texts(model, samples), None if before is None else _texts(model, before)
        scores = gen_nll(judge, samples, convention, before)
        # By number, not by name: one judge may go by two names, and the unit is the same.
        columns[f"nll:{i}"] = _numbers(scores.nll)
        columns[f"tokens:{i}"] = _numbers(scores.tokens)
        columns[f"dropped:{i}"] = _numbers(scores.dropped)
    if not judges:
        columns["nll:0"] = _numbers(_true_nll(model, tokens, start))
        columns["tokens:0"] = [float(own.shape[1])] * len(own)
    sets: dict[str, float | None] = {}
    groups = None if prefixes is None else [",".join(map(str, prefix)) for prefix in prefixes]
    for metric in _metrics(names, groups, prefixes is not None):
        value = metric.function(own)
        if metric.over == "set":
            sets[metric.name] = _numbers([value])[0]
        else:
            columns[metric.name] = _numbers(value)
    return columns, sets


def _true_nll(model: Denoiser, tokens: Tensor, start: int) -> Tensor:
    """-ln of the samples' true probability, given their first `start` tokens."""
    if not isinstance(model, Source):
        raise LimpetError(f"the true law of {model.name} is not known: give a judge")
    before = model.log_prob(tokens[:, :start]) if start else torch.zeros(len(tokens), dtype=torch.float64)
    return before - model.log_prob(tokens)


def _texts(model: Denoiser, ids: Sequence[list[int]]) -> list[str]:
    if model.tokenizer is None:
        raise LimpetError(f"{model.name} has no tokenizer, so no judge can read its samples as text")
    return [model.tokenizer.decode(row) for row in ids]


def _numbers(values: Any) -> list[float | None]:
    """Plain numbers for JSON, None where there is none."""
    return [float(value) if math.isfinite(value) else None for value in np.asarray(values, dtype=np.float64).tolist()]
