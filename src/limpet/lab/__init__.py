"""The laboratory: a study expands to cells, (cell, shard) is a unit of work, and a store keeps every finished unit."""

from limpet.lab.results import Results, Row, collect
from limpet.lab.run import Progress, Summary, run, status
from limpet.lab.shelf import Shelf
from limpet.lab.store import Store
from limpet.lab.study import Cell, Judging, Probe, Prompts, Seen, Study

__all__ = [
    "Cell", "Judging", "Probe", "Progress", "Prompts", "Results", "Row", "Seen", "Shelf", "Store", "Study", "Summary",
    "collect", "run", "status",
]  # fmt: skip
