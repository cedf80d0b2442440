"""The laboratory: a study expands to cells, (cell, shard) is a unit of work, and a store keeps every finished unit."""

from limpet.lab.bench import Bench
from limpet.lab.results import Results, collect
from limpet.lab.run import Progress, Summary, run, status
from limpet.lab.store import Store
from limpet.lab.study import Cell, Judging, Prompts, Study

__all__ = [
    "Bench",
    "Cell",
    "Judging",
    "Progress",
    "Prompts",
    "Results",
    "Store",
    "Study",
    "Summary",
    "collect",
    "run",
    "status",
]
