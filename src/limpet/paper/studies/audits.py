"""What audits share: their presets, their cells, and their rows as a table and as bars."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from textwrap import fill
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from limpet.evaluation import Estimate, paired
from limpet.experiments import (
    PAPER,
    SIDES,
    Entry,
    Finding,
    JudgeSpec,
    Panel,
    Probe,
    ProbeFunction,
    ProbeRow,
    PublishedValue,
    Results,
    Table,
    estimate_series,
    format_estimate,
    published_difference,
)
from limpet.files import Toml
from limpet.models.networks import Precision
from limpet.paper.studies.presets import HERE, paper_seeds
from limpet.paper.studies.published import parse_published
from limpet.paper.studies.trajectories import AuditSettings, ForwardSettings

PAPER_MODELS = "The paper's values are of Duo and Duo-distilled, at its own sizes."
HEAD = ("model", "quantity", "at", "here", "events", PAPER)

FILE = Toml(HERE / "audits.toml", "it comes with limpet")

S = TypeVar("S", bound=AuditSettings)


@dataclass(frozen=True)
class AuditPreset(Generic[S]):
    """The size of an audit: how much per seed, on which models, in which precision."""

    name: str
    settings: S
    precision: Precision = "float32"
    seeds: tuple[int, ...] = tuple(paper_seeds(4))
    models: tuple[str, ...] = ()
    judges: ClassVar[tuple[JudgeSpec, ...]] = ()  # nothing is scored


def presets(name: str, settings: type[S]) -> dict[str, AuditPreset[S]]:
    """The sizes of an audit from audits.toml. settings: its dataclass of settings."""
    own, found = FILE.content[name], {}
    for size, table in own["presets"].items():
        fields = {"name": size, "models": own["models"], **table}
        if "n_seeds" in fields:
            fields["seeds"] = paper_seeds(fields.pop("n_seeds"))
        fields["settings"] = FILE.build(settings, table["settings"], name, "presets", size, "settings")
        found[size] = FILE.build(AuditPreset, fields, name, "presets", size)
    return found


def checkpoint(model: str) -> str:
    """The checkpoint of the paper that a model is compared with; none for an exact source."""
    if model.startswith("exact:"):
        return ""
    return "Duo-distilled" if "distilled" in model else "Duo"


def probe_each(function: ProbeFunction) -> Callable[[AuditPreset[Any]], list[Probe]]:
    """The `cells` of an audit that looks at one model at a time: a probe for each model."""
    return lambda preset: [
        Probe(model, (model,), function, preset.settings, cost(preset.settings)) for model in preset.models
    ]


def cost(settings: AuditSettings) -> int:
    """Tokens through a network per seed, roughly: a trajectory has nfe calls, a forward state one."""
    calls = len(settings.times) if isinstance(settings, ForwardSettings) else settings.nfe
    return settings.n * calls * (settings.length or 1024)


def percent(hits: float | Tensor, total: float) -> tuple[float, str, int]:
    """The last fields of a `ProbeValue`: a share in percent, its unit, and its number of events; NaN of no events."""
    return 100 * float(hits) / total if total else math.nan, "%", int(total)


# What the paper claims


def models_beside(results: Results, which: str) -> list[str]:
    """The models of some results that are compared with one of the paper's checkpoints."""
    return [model for model in dict.fromkeys(row.model for row in results.rows()) if checkpoint(model) == which]


def paper_text(name: str, quantity: str, *at: Any) -> str:
    """What the paper prints of a quantity of an audit at some place, or nothing."""
    printed = FILE.content[name]["paper"].get(quantity, "")
    return str(printed.get(" ".join(map(str, at)), "") if isinstance(printed, dict) else printed)


def paper_value(name: str, quantity: str, **at: Any) -> PublishedValue | None:
    """The same as a number."""
    return parse_published(paper_text(name, quantity, *at.values()))


def findings(results: Results, preset: AuditPreset[Any], claim: Mapping[str, Any]) -> list[Finding]:
    """The findings that audits.toml defines for a claim, about the distilled model: the one that the paper traces."""
    found, name = [], results.study.name
    for rule in claim.get("findings", ()):
        quantity, minus = rule["quantity"], rule.get("minus")
        each = {key: getattr(preset.settings, field) for key, field in rule.get("each", {}).items()}
        for model, *values in product(models_beside(results, "Duo-distilled"), *each.values()):
            at = dict(zip(each, values, strict=True))
            estimate, paper = estimate_of(results, quantity, model, **at), paper_value(name, quantity, **at)
            if minus:
                estimate = paired(estimate.values, estimate_of(results, minus, model, **at).values)
                other = paper_value(name, minus, **at)
                paper = paper and other and published_difference(paper, other)
            caption = ", ".join(
                [f"{quantity} minus {minus}" if minus else quantity, *(f"{k}={v}" for k, v in at.items())]
            )
            found.append(SIDES[rule["side"]](caption, estimate, rule.get("bound", 0), paper))
    return found


# A table


def tables(results: Results, preset: Any) -> list[Table]:
    """One line for each row: its place, our value with its error, the number of events, and the paper's value."""
    name = results.study.name
    texts = FILE.content[name]

    def line(row: ProbeRow) -> tuple[Entry, ...]:
        at = ", ".join(f"{key} {value}" for key, value in row.at.items())
        value = with_error(row.estimate) + (f" {row.unit}" if row.unit else "")
        events = "" if row.events is None else f"{row.events:,}"
        compared = checkpoint(row.model) in texts.get("checkpoints", [checkpoint(row.model)])
        paper = paper_text(name, row.quantity, *row.at.values()) if compared else ""
        return tuple(map(Entry, (row.model, row.quantity, at, value, events, paper)))

    groups = tuple(tuple(map(line, rows)) for _, rows in groupby(results.rows(), lambda row: row.model))
    caption = texts["question"] if results.study.is_toy else f"{texts['question']} {PAPER_MODELS}"
    return [Table(name, caption, HEAD, groups, names=3)]


def with_error(estimate: Estimate) -> str:
    """41.79 ± 0.84: the error to two digits, the mean to the same place."""
    if not math.isfinite(estimate.mean):
        return "none"
    if not math.isfinite(estimate.se) or estimate.se == 0:
        return f"{estimate.mean:.4g}"
    return format_estimate(estimate, max(0, 1 - math.floor(math.log10(estimate.se))))


# A figure


def models_of(results: Results, quantity: str) -> list[str]:
    """The models that have a quantity."""
    return list(dict.fromkeys(row.model for row in results.find(quantity)))


def estimate_of(results: Results, quantity: str, model: str | None = None, **at: Any) -> Estimate:
    """The estimate of the only row of a quantity at some place."""
    (row,) = results.find(quantity, model, **at)
    return row.estimate


def bars(results: Results, quantities: Sequence[str], groups: Mapping[str, tuple[str, Mapping[str, Any]]]) -> Panel:
    """A panel with one bar for each quantity and group. groups: by caption, a model and a place."""
    places = range(len(quantities))
    series = [
        estimate_series(name, places, [estimate_of(results, quantity, model, **at) for quantity in quantities])
        for name, (model, at) in groups.items()
    ]
    captions = [fill(quantity, 48 // len(quantities), break_long_words=False) for quantity in quantities]
    return Panel("", "", "%", tuple(series), tuple(zip(places, captions, strict=True)), bars=True)
