"""How often a selected label is wrong on exact forward states, against noise: proposition 2 in practice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from limpet.denoisers import Denoiser
from limpet.lab.claims import above, not_below
from limpet.lab.page import Panel, series
from limpet.lab.results import Results
from limpet.lab.study import Seen
from limpet.stats import paired
from limpet.studies import paths
from limpet.studies.audit import Preset, beside, each, models_of, one, presets
from limpet.studies.published import Claims
from limpet.studies.selection import count_of, view

PRESETS = presets("risk", paths.Forward)


def look(models: Sequence[Denoiser], settings: paths.Forward, shard: int, shards: tuple[int, ...]) -> Iterator[Seen]:
    for model in models:
        clean = paths.clean_texts(model, settings, shard, shards)
        inside, count = paths.within(model, clean), count_of(settings, clean.shape[1])
        everywhere, selected = int(inside.sum()), count * settings.paths
        before = None
        states = paths.forward_states(clean, settings.times, model, shards[shard])
        for t, noisy in zip(settings.times, states, strict=True):
            top, deficit, chosen = view(model, noisy, t, inside, count, settings.spacing)
            wrong = (top != clean).double()
            found = {"error": wrong[inside], "deficit": deficit[inside],
                     "selected error": wrong[chosen], "selected deficit": deficit[chosen]}  # fmt: skip
            values = {quantity: float(100 * of.mean()) for quantity, of in found.items()}
            for quantity, value in values.items():
                events = selected if quantity.startswith("selected") else everywhere
                yield Seen(model.name, quantity, {"t": t}, value, "%", events)
            if before is not None:
                rise = values["selected error"] - before
                yield Seen(model.name, "selected error, rise", {"t": t}, rise, "%", selected)
            before = values["selected error"]


cells = each(look)


def claims(results: Results, preset: Preset[paths.Forward]) -> Claims:
    """Of both checkpoints: from the first time to the last it rises, and no step between two goes back."""
    times, found = preset.settings.times, []
    for model in (*beside(results, "Duo"), *beside(results, "Duo-distilled")):
        first, last = (one(results, "selected error", model, t=t).values for t in (times[0], times[-1]))
        found.append(above(f"selected error, t={times[-1]:g} less t={times[0]:g}, {model}", paired(last, first)))
        for t in times[1:]:
            rise = one(results, "selected error, rise", model, t=t)
            found.append(not_below(f"selected error, rise to t={t:g}, {model}", rise))
    return {"falls": found}


def panels(results: Results, preset: Preset[paths.Forward]) -> Iterator[Panel]:
    """Error and belief over all positions, and over the selected ones."""
    for title, prefix in (("all positions", ""), ("selected positions", "selected ")):
        lines = [
            series(f"{model}, {measure}", preset.settings.times,
                   [one(results, prefix + measure, model, t=t) for t in preset.settings.times],
                   style=i, open=measure == "deficit")
            for i, model in enumerate(models_of(results, "error"))
            for measure in ("error", "deficit")
        ]  # fmt: skip
        yield Panel(title, "t", "%", lines)
