"""How two checkpoints differ in what they select, on the same exact forward states (appendix D.3)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from limpet.diffusion import selection
from limpet.errors import LimpetError
from limpet.evaluation.statistics import Estimate
from limpet.experiments.claims import Finding, above, between, within
from limpet.experiments.contents import Panel, Series, series
from limpet.experiments.results import Results
from limpet.experiments.study import Probe, Seen
from limpet.models import Denoiser
from limpet.paper.studies import trajectories
from limpet.paper.studies.audits import Preset, cost, figure, models_of, one, percent, presets
from limpet.paper.studies.published import Claims
from limpet.samplers import CRS


@dataclass(frozen=True, kw_only=True)
class Settings(trajectories.Forward):
    times: tuple[float, ...] = (0.2, 0.4, 0.5, 0.6, 0.67, 0.7)
    bins: int = 10  # of the reliability curve


PRESETS = presets("selection", Settings)


def cells(preset: Preset[Settings]) -> list[Probe]:
    if len(preset.models) != 2:
        raise LimpetError(f"this audit compares two checkpoints, and was given {len(preset.models)}: name two")
    return [Probe("both", preset.models, look, preset.settings, 2 * cost(preset.settings))]


def look(models: Sequence[Denoiser], settings: Settings, shard: int, shards: tuple[int, ...]) -> Iterator[Seen]:
    a, b = models
    if a.vocab_size != b.vocab_size or a.schedule != b.schedule:
        raise LimpetError(f"{a.name} and {b.name} have no states in common: name two models of one vocabulary")
    clean = trajectories.clean_texts(a, settings, shard, shards)
    inside, count = trajectories.within(a, clean), count_of(settings, clean.shape[1])
    names = {"first": a.name, "second": b.name, "": f"{a.name} and {b.name}"}
    hits, of = np.zeros((2, settings.bins)), np.zeros((2, settings.bins))
    for t, noisy in zip(
        settings.times, trajectories.forward_states(clean, settings.times, a, shards[shard]), strict=True
    ):
        views = [view(model, noisy, t, inside, count, settings.spacing) for model in models]
        for (quantity, whose), value in compared(views[0], views[1], clean).items():
            unit = "" if quantity == "Jaccard" else "%"
            yield Seen(names[whose], quantity, {"t": t}, value, unit, count * settings.paths)
        for i, (top, deficit, _) in enumerate(views):
            place = ((1 - deficit[inside]) * settings.bins).long().clamp(0, settings.bins - 1).numpy()
            hits[i] += np.bincount(place, (top == clean)[inside].double().numpy(), settings.bins)
            of[i] += np.bincount(place, minlength=settings.bins)
    for i, model in enumerate(models):
        for k in range(settings.bins):
            centre = round((k + 0.5) / settings.bins, 4)
            yield Seen(model.name, "reliability", {"confidence": centre}, *percent(hits[i, k], of[i, k]))


def count_of(settings: trajectories.Forward, length: int) -> int:
    """How many positions are committed: the paper's 25 of 1024 is what one call of CRS may select of 64."""
    return settings.count or -(-length // (settings.nfe - 1 - CRS(nfe=settings.nfe).warmup_calls))


class View(NamedTuple):
    """What one checkpoint makes of some states: (B, L) each."""

    top: Tensor
    deficit: Tensor
    chosen: Tensor


def view(model: Denoiser, noisy: Tensor, t: float, eligible: Tensor, count: int, spacing: int) -> View:
    top, deficit = trajectories.tops(model, noisy, t)
    return View(top, deficit, selection.select(deficit, eligible, count, math.inf, spacing))


def compared(first: View, second: View, clean: Tensor) -> dict[tuple[str, str], float]:
    """(quantity, of whom) -> one shard's figure at one time; "first", "second", or "" for the pair."""

    def share(holds: Tensor, where: Tensor) -> float:
        return float(100 * holds[where].double().mean())

    found: dict[tuple[str, str], float] = {}
    for name, own, other in (("first", first, second), ("second", second, first)):
        found["self accuracy", name] = share(own.top == clean, own.chosen)
        found["self error", name] = 100 - found["self accuracy", name]
        found["confidence", name] = share(1 - own.deficit, own.chosen)
        found["cross accuracy", name] = share(own.top == clean, other.chosen)
        found["fixed-position accuracy, difference", name] = (
            share(second.top == clean, own.chosen) - share(first.top == clean, own.chosen)
        )  # fmt: skip
        found["argmax agreement", name] = share(first.top == second.top, own.chosen)
    found["self accuracy, difference", ""] = found["self accuracy", "second"] - found["self accuracy", "first"]
    both, either = (first.chosen & second.chosen).sum(-1), (first.chosen | second.chosen).sum(-1)
    found["Jaccard", ""] = float((both / either).mean())
    return found


def claims(results: Results, preset: Preset[Settings]) -> Claims:
    """Of the pair, at every time."""
    found: dict[str, list[Finding]] = {key: [] for key in ("overlap", "agree", "accurate", "selects", "overconfident")}
    for t in preset.settings.times:
        jaccard, gain = one(results, "Jaccard", t=t), one(results, "self accuracy, difference", t=t)
        found["overlap"].append(between(f"Jaccard, t={t:g}", jaccard, 0.25, 0.75, figure("selection", "Jaccard")))
        paper = figure("selection", "self accuracy, difference")
        found["selects"].append(above(f"self accuracy, second less first, t={t:g}", gain, 0, paper))
        for model in preset.models:
            where = f"where {model} selects, t={t:g}"
            same, apart = "argmax agreement", "fixed-position accuracy, difference"
            paper = figure("selection", same)
            found["agree"].append(above(f"{same} {where}", one(results, same, model, t=t), 99, paper))
            paper = figure("selection", apart)
            found["accurate"].append(within(f"{apart} {where}", one(results, apart, model, t=t), 0.5, paper))
            error, sure = (one(results, quantity, model, t=t) for quantity in ("self error", "confidence"))
            # The paper's confidence is nearly 100: its error is what it is overconfident by.
            excess, paper = Estimate(error.values - (100 - sure.values)), figure("selection", "self error")
            found["overconfident"].append(above(f"error less 100 - confidence, {model}, t={t:g}", excess, 0, paper))
    return found


def panels(results: Results, preset: Preset[Settings]) -> Iterator[Panel]:
    """Error of what each selects, overlap and agreement against time, and the reliability curves."""
    models, times = models_of(results, "self error"), preset.settings.times
    jaccard = [Estimate(100 * one(results, "Jaccard", t=t).values) for t in times]
    errors, overlap, curves = [], [series("Jaccard", times, jaccard)], []
    for model in models:
        errors.append(series(model, times, [one(results, "self error", model, t=t) for t in times]))
        agreement = [one(results, "argmax agreement", model, t=t) for t in times]
        overlap.append(series(f"agreement where {model} selects", times, agreement))
        bins = [row for row in results.of("reliability", model) if math.isfinite(row.estimate.mean)]
        curves.append(series(model, [100 * row.at["confidence"] for row in bins], [row.estimate for row in bins]))
    curves.append(Series("as sure as right", (0, 100), (0, 100)))
    yield Panel("wrong labels among the committed", "t", "%", errors)
    yield Panel("overlap and agreement", "t", "%", overlap)
    yield Panel("reliability, all positions", "confidence, %", "accuracy, %", curves)
