"""The laboratory: a study expands to cells, (cell, shard) is a unit of work, and a store keeps every finished unit."""

from limpet.experiments.resources import Shelf
from limpet.experiments.results import Results, Row, collect
from limpet.experiments.runner import Progress, Summary, run, status
from limpet.experiments.store import Store
from limpet.experiments.study import Cell, Judging, Probe, Prompts, Seen, Study

__all__ = [
    "Cell", "Judging", "Probe", "Progress", "Prompts", "Results", "Row", "Seen", "Shelf", "Store", "Study", "Summary",
    "collect", "run", "status",
]  # fmt: skip
