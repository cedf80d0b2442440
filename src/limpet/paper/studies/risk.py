"""How often a committed label is wrong on exact forward states, against noise: proposition 2 in practice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from limpet.evaluation.statistics import paired
from limpet.experiments.claims import above, not_below
from limpet.experiments.contents import Panel, series
from limpet.experiments.results import Results
from limpet.experiments.study import Seen
from limpet.models import Denoiser
from limpet.paper.studies import trajectories
from limpet.paper.studies.audits import Preset, beside, each, models_of, one, presets
from limpet.paper.studies.published import Claims
from limpet.paper.studies.selection import count_of, view

PRESETS = presets("risk", trajectories.Forward)


def look(
    models: Sequence[Denoiser], settings: trajectories.Forward, shard: int, shards: tuple[int, ...]
) -> Iterator[Seen]:
    for model in models:
        clean = trajectories.clean_texts(model, settings, shard, shards)
        inside, count = trajectories.within(model, clean), count_of(settings, clean.shape[1])
        everywhere, committed = int(inside.sum()), count * settings.paths
        before = None
        states = trajectories.forward_states(clean, settings.times, model, shards[shard])
        for t, noisy in zip(settings.times, states, strict=True):
            top, deficit, chosen = view(model, noisy, t, inside, count, settings.spacing)
            wrong = (top != clean).double()
            found = {"error": wrong[inside], "deficit": deficit[inside],
                     "committed error": wrong[chosen], "committed deficit": deficit[chosen]}  # fmt: skip
            values = {quantity: float(100 * of.mean()) for quantity, of in found.items()}
            for quantity, value in values.items():
                events = committed if quantity.startswith("committed") else everywhere
                yield Seen(model.name, quantity, {"t": t}, value, "%", events)
            if before is not None:
                rise = values["committed error"] - before
                yield Seen(model.name, "committed error, rise", {"t": t}, rise, "%", committed)
            before = values["committed error"]


cells = each(look)


def claims(results: Results, preset: Preset[trajectories.Forward]) -> Claims:
    """Of both checkpoints: from the first time to the last it rises, and no step between two goes back."""
    times, found = preset.settings.times, []
    for model in (*beside(results, "Duo"), *beside(results, "Duo-distilled")):
        first, last = (one(results, "committed error", model, t=t).values for t in (times[0], times[-1]))
        found.append(above(f"committed error, t={times[-1]:g} less t={times[0]:g}, {model}", paired(last, first)))
        for t in times[1:]:
            rise = one(results, "committed error, rise", model, t=t)
            found.append(not_below(f"committed error, rise to t={t:g}, {model}", rise))
    return {"falls": found}


def panels(results: Results, preset: Preset[trajectories.Forward]) -> Iterator[Panel]:
    """Error and belief over all positions, and over the committed ones."""
    for title, prefix in (("all positions", ""), ("committed positions", "committed ")):
        lines = [
            series(f"{model}, {measure}", preset.settings.times,
                   [one(results, prefix + measure, model, t=t) for t in preset.settings.times],
                   style=i, open=measure == "deficit")
            for i, model in enumerate(models_of(results, "error"))
            for measure in ("error", "deficit")
        ]  # fmt: skip
        yield Panel(title, "t", "%", lines)
