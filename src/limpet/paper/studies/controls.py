"""Texts that no model made, as rows of a study: a measure that ranks one of them above a sampler is fooled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from limpet.evaluation import (
    METRICS,
    NLL,
    PERPLEXITY,
    control_sets,
    evaluate,
    find_checker,
    load_judge,
    reference_set,
    source_judge,
)
from limpet.experiments import DIVERSITY_METRICS, Entry, Probe, ProbeValue, Table, format_estimate
from limpet.models import Denoiser
from limpet.paper.studies.published import PaperResults

UNITS = {NLL: "nats/token", "entropy": "nats"}


@dataclass(frozen=True)
class ControlSettings:
    """How many controls of each kind a seed has, how long, and who judges them."""

    n: int
    length: int | None  # default: the model's own
    judge: str | None  # by name; by default the model's own distribution, where it is known
    metrics: tuple[str, ...]


def controls(
    model: str, n: int, length: int | None = None, judge: str | None = None, metrics: Sequence[str] = DIVERSITY_METRICS
) -> Probe:
    """The controls of a model, which take no network call of it.

    judge: by name; None for the model's own distribution, where it is known. metrics: names of `METRICS`."""
    settings = ControlSettings(n, length, judge, tuple(metrics))
    return Probe(f"controls of {model}", (model,), measure, settings, 3 * n * (length or 1024))


def measure(
    models: Sequence[Denoiser], settings: ControlSettings, index: int, seeds: tuple[int, ...]
) -> Iterator[ProbeValue]:
    """Every measure of each control, at the entropy of real texts."""
    for model in models:
        length = settings.length or model.length
        judge = source_judge(model) if settings.judge is None else load_judge(settings.judge, model.device)
        checker = None if model.checker is None else find_checker(model.checker)
        real = [ids for _, ids in reference_set(model, length).ids or ()]
        wanted = float(np.mean(METRICS["entropy"].function(real)))
        for name, sets in control_sets(model, judge, settings.n, seeds[index : index + 1], length, wanted).items():
            scores = evaluate(sets, judge, settings.metrics, checker=checker)
            for what, (value,) in scores.values.items():
                if what != PERPLEXITY and np.isfinite(value):
                    yield ProbeValue(model.name, what, {"control": name}, float(value), UNITS.get(what, ""))


def control_table(results: PaperResults) -> Iterator[Table]:
    """One row for each control, one column for each measure; none where the study measured none."""
    rows = [row for row in results.rows() if "control" in row.at]
    kinds = dict.fromkeys((row.model, row.at["control"]) for row in rows)
    measures = dict.fromkeys(row.quantity for row in rows)
    known = {(row.model, row.at["control"], row.quantity): row.estimate for row in rows}

    def entry(model: str, control: str, name: str) -> Entry:
        found = known.get((model, control, name))
        return Entry("" if found is None else format_estimate(found, 4))

    if rows:
        lines = ((Entry(model), Entry(name), *(entry(model, name, one) for one in measures)) for model, name in kinds)
        yield results.table("controls", [lines], *measures)
