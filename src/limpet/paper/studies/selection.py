"""How two checkpoints differ in what they select, on the same forward states (appendix D.3)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from limpet.diffusion.selection import select
from limpet.errors import LimpetError
from limpet.evaluation import Estimate
from limpet.experiments import (
    Finding,
    Panel,
    Probe,
    ProbeValue,
    Results,
    Series,
    above,
    between,
    estimate_series,
    within,
)
from limpet.models import Denoiser
from limpet.paper.studies import audits
from limpet.paper.studies.audits import estimate_of
from limpet.paper.studies.published import Claims
from limpet.paper.studies.trajectories import ForwardSettings, clean_texts, forward_states, predictions, text_positions
from limpet.samplers import CRS


@dataclass(frozen=True, kw_only=True)
class SelectionSettings(ForwardSettings):
    times: tuple[float, ...] = (0.2, 0.4, 0.5, 0.6, 0.67, 0.7)
    bins: int = 10  # of the reliability curve


PRESETS = audits.presets("selection", SelectionSettings)


def cells(preset: audits.AuditPreset[SelectionSettings]) -> list[Probe]:
    if len(preset.models) != 2:
        raise LimpetError(f"this audit compares two checkpoints, and was given {len(preset.models)}: name two")
    return [Probe("both", preset.models, audit, preset.settings, 2 * audits.cost(preset.settings))]


def audit(
    models: Sequence[Denoiser], settings: SelectionSettings, index: int, seeds: tuple[int, ...]
) -> Iterator[ProbeValue]:
    a, b = models
    if a.vocab_size != b.vocab_size or a.schedule != b.schedule:
        raise LimpetError(f"{a.name} and {b.name} have no states in common: name two models of one vocabulary")
    clean = clean_texts(a, settings, index, seeds)
    inside, count = text_positions(a, clean), commit_count(settings, clean.shape[1])
    names = {"first": a.name, "second": b.name, "": f"{a.name} and {b.name}"}
    hits, total = np.zeros((2, settings.bins)), np.zeros((2, settings.bins))
    states = forward_states(clean, settings.times, a, seeds[index])
    for t, noisy in zip(settings.times, states, strict=True):
        views = [model_view(model, noisy, t, inside, count, settings.spacing) for model in models]
        for (quantity, view), value in compared(views[0], views[1], clean).items():
            unit = "" if quantity == "Jaccard" else "%"
            yield ProbeValue(names[view], quantity, {"t": t}, value, unit, count * settings.n)
        for i, (top, deficit, _) in enumerate(views):
            place = ((1 - deficit[inside]) * settings.bins).long().clamp(0, settings.bins - 1).numpy()
            hits[i] += np.bincount(place, (top == clean)[inside].double().numpy(), settings.bins)
            total[i] += np.bincount(place, minlength=settings.bins)
    for i, model in enumerate(models):
        for k in range(settings.bins):
            at = {"confidence": round((k + 0.5) / settings.bins, 4)}
            yield ProbeValue(model.name, "reliability", at, *audits.percent(hits[i, k], total[i, k]))


def commit_count(settings: ForwardSettings, length: int) -> int:
    """How many positions are committed: by default as many as one call of CRS may commit (25 of 1024 at 64 calls)."""
    return settings.count or -(-length // (settings.nfe - 1 - CRS(nfe=settings.nfe).warmup_calls))


class ModelView(NamedTuple):
    """What one checkpoint predicts and selects on some states: (B, L) each."""

    top: Tensor
    deficit: Tensor
    chosen: Tensor


def model_view(model: Denoiser, noisy: Tensor, t: float, eligible: Tensor, count: int, spacing: int) -> ModelView:
    """Predictions at every position, and the `count` positions with the lowest deficit, more than `spacing` apart."""
    top, deficit = predictions(model, noisy, t)
    return ModelView(top, deficit, select(deficit, eligible, count, math.inf, spacing))


def compared(first: ModelView, second: ModelView, clean: Tensor) -> dict[tuple[str, str], float]:
    """(quantity, view) -> its value at one time; the view is "first", "second", or "" for the pair."""

    def share(holds: Tensor, where: Tensor) -> float:
        return float(100 * holds[where].double().mean())

    found: dict[tuple[str, str], float] = {}
    for name, own, other in (("first", first, second), ("second", second, first)):
        found["self accuracy", name] = share(own.top == clean, own.chosen)
        found["self error", name] = 100 - found["self accuracy", name]
        found["confidence", name] = share(1 - own.deficit, own.chosen)
        found["cross accuracy", name] = share(own.top == clean, other.chosen)
        accuracy = [share(view.top == clean, own.chosen) for view in (first, second)]
        found["fixed-position accuracy, difference", name] = accuracy[1] - accuracy[0]
        found["argmax agreement", name] = share(first.top == second.top, own.chosen)
    found["self accuracy, difference", ""] = found["self accuracy", "second"] - found["self accuracy", "first"]
    both, either = (first.chosen & second.chosen).sum(-1), (first.chosen | second.chosen).sum(-1)
    found["Jaccard", ""] = float((both / either).mean())
    return found


def claims(results: Results, preset: audits.AuditPreset[SelectionSettings]) -> Claims:
    """Claims about the pair, at every time."""
    found: dict[str, list[Finding]] = {key: [] for key in ("overlap", "agree", "accurate", "selects", "overconfident")}
    same, apart = "argmax agreement", "fixed-position accuracy, difference"
    paper = {
        quantity: audits.paper_value("selection", quantity)
        for quantity in ("Jaccard", "self accuracy, difference", same, apart, "self error")
    }
    for t in preset.settings.times:
        jaccard, difference = (estimate_of(results, name, t=t) for name in ("Jaccard", "self accuracy, difference"))
        found["overlap"].append(between(f"Jaccard, t={t:g}", jaccard, 0.25, 0.75, paper["Jaccard"]))
        name = f"self accuracy, second minus first, t={t:g}"
        found["selects"].append(above(name, difference, 0, paper["self accuracy, difference"]))
        for model in preset.models:
            where = f"where {model} selects, t={t:g}"
            agreement, accuracy = (estimate_of(results, quantity, model, t=t) for quantity in (same, apart))
            found["agree"].append(above(f"{same} {where}", agreement, 99, paper[same]))
            found["accurate"].append(within(f"{apart} {where}", accuracy, 0.5, paper[apart]))
            error, sure = (estimate_of(results, name, model, t=t) for name in ("self error", "confidence"))
            # The paper's confidence is nearly 100, so its error is also its excess of confidence over accuracy.
            excess, name = (
                Estimate(error.values - (100 - sure.values)),
                f"error minus (100 - confidence), {model}, t={t:g}",
            )
            found["overconfident"].append(above(name, excess, 0, paper["self error"]))
    return found


def panels(results: Results, preset: audits.AuditPreset[SelectionSettings]) -> Iterator[Panel]:
    """The error of what each selects, overlap and agreement against time, and the reliability curves."""
    models, times = audits.models_of(results, "self error"), preset.settings.times
    jaccard = [Estimate(100 * estimate_of(results, "Jaccard", t=t).values) for t in times]
    errors, overlap, curves = [], [estimate_series("Jaccard", times, jaccard)], []
    for model in models:
        errors.append(estimate_series(model, times, [estimate_of(results, "self error", model, t=t) for t in times]))
        agreement = [estimate_of(results, "argmax agreement", model, t=t) for t in times]
        overlap.append(estimate_series(f"agreement where {model} selects", times, agreement))
        bins = [row for row in results.find("reliability", model) if math.isfinite(row.estimate.mean)]
        centres = [100 * row.at["confidence"] for row in bins]
        curves.append(estimate_series(model, centres, [row.estimate for row in bins]))
    curves.append(Series("perfectly calibrated", (0, 100), (0, 100)))
    yield Panel("error of committed tokens", "t", "%", errors)
    yield Panel("overlap and agreement", "t", "%", overlap)
    yield Panel("reliability, all positions", "confidence, %", "accuracy, %", curves)
