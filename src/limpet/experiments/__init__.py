"""Experiments: a study consists of cells and seeds; each cell under each seed is a unit of work; a store keeps every
finished unit."""

from limpet.experiments.claims import (
    SIDES,
    Claim,
    Finding,
    PublishedValue,
    above,
    below,
    between,
    equivalent,
    not_above,
    not_below,
    published_difference,
    within,
)
from limpet.experiments.executors import Executor, local, on_ray, processes
from limpet.experiments.model_cache import ModelCache, provenance
from limpet.experiments.report_content import (
    PAPER,
    Contrast,
    Entry,
    Figure,
    Panel,
    Point,
    ReportContent,
    ScatterPlot,
    Series,
    Table,
    estimate_series,
    format_estimate,
    format_signed,
)
from limpet.experiments.results import ProbeRow, Results, collect
from limpet.experiments.runner import RunProgress, RunSummary, run, status
from limpet.experiments.store import Store
from limpet.experiments.study import (
    DIVERSITY_METRICS,
    Cell,
    JudgeSpec,
    Probe,
    ProbeFunction,
    ProbeValue,
    Prompts,
    Study,
)
from limpet.experiments.units import Plan, SamplingUnit, resolve

__all__ = [
    "DIVERSITY_METRICS", "PAPER", "SIDES", "Cell", "Claim", "Contrast", "Entry", "Executor", "Figure", "Finding",
    "JudgeSpec", "ModelCache", "Panel", "Plan", "Point", "Probe", "ProbeFunction", "ProbeRow", "ProbeValue",
    "Prompts", "PublishedValue", "ReportContent", "Results", "RunProgress", "RunSummary", "SamplingUnit",
    "ScatterPlot", "Series", "Store", "Study", "Table", "above", "below", "between", "collect", "equivalent",
    "estimate_series", "format_estimate", "format_signed", "local", "not_above", "not_below", "on_ray", "processes",
    "provenance", "published_difference", "resolve", "run", "status", "within",
]  # fmt: skip
