"""How often a selected label is wrong on exact forward states, against noise: proposition 2 in practice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from limpet.compare import SHARDS
from limpet.denoisers import Denoiser
from limpet.lab.page import Figure, Panel, series
from limpet.lab.results import Results
from limpet.lab.study import Seen
from limpet.studies import paths
from limpet.studies.audit import Preset, beside, each, models_of, one, presets, tabled
from limpet.studies.selection import count_of, view

TITLE = "Risk of a selected label against noise"
ASKS = "How often a selected label is wrong on exact forward states, against noise."
MODELS = ("mini", "mini-distilled", "exact:words", "exact:chain")


@dataclass(frozen=True, kw_only=True)
class Settings(paths.Forward):
    times: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.67, 0.8, 0.9)


PRESETS = presets(
    Preset("smoke", Settings(paths=1, length=64, times=(0.2, 0.5, 0.8)), "bfloat16", SHARDS[:2], MODELS),
    Preset("mini", Settings(paths=16), models=MODELS),
    Preset("paper", Settings(paths=16, count=25), models=MODELS),
)

# The paper says in words that selected-label error falls steadily with noise, and gives its range for 0.2 <= t <= 0.7.
PAPER = {
    (model, "selected error", t): "within 3.5 to 8.1"
    for model in ("Duo", "Duo-distilled")
    for t in (0.2, 0.4, 0.5, 0.6, 0.67, 0.7)
}

CONVENTIONS = {
    "error": "argmax tokens of the leave-one-out law that are not the clean token, over all positions of the text",
    "deficit": "mean of 1 - max law over all positions: an exact source's Bayes risk, a checkpoint's own belief",
    "selected error": "the same over the positions selected: least deficit first, spacing 4, no budget",
    "selected deficit": "the law's own belief there",
    "selected error, rise": "against the next lower time, along the same forward paths, points, paired by shard",
}


def look(models: Sequence[Denoiser], settings: Settings, shard: int, shards: tuple[int, ...]) -> Iterator[Seen]:
    for model in models:
        clean = paths.clean_texts(model, settings, shard, shards)
        inside, count = paths.within(model, clean), count_of(settings, clean.shape[1])
        everywhere, selected = int(inside.sum()), count * settings.paths
        before = None
        for t, noisy in zip(
            settings.times, paths.forward_states(clean, settings.times, model, shards[shard]), strict=True
        ):
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


cells, tables = each(look), tabled(ASKS, beside(PAPER))


def figures(results: Results, preset: Preset[Settings]) -> Iterator[Figure]:
    """Error and belief over all positions, and over the selected ones."""

    def panel(title: str, prefix: str) -> Panel:
        lines = (
            series(f"{model}, {measure}", preset.settings.times,
                   [one(results, prefix + measure, model, t=t) for t in preset.settings.times],
                   style=i, open=measure == "deficit")
            for i, model in enumerate(models_of(results, "error"))
            for measure in ("error", "deficit")
        )  # fmt: skip
        return Panel(title, "t", "%", tuple(lines))

    caption = "Labels that are wrong, and what their own law believes (hollow), against time."
    yield Figure("risk", caption, (panel("all positions", ""), panel("selected positions", "selected ")))
