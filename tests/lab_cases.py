"""Small studies for the laboratory's tests, and what a store holds."""

from pathlib import Path

from limpet.lab import Cell, Study
from limpet.lab.page import Page
from limpet.policy import Policy

BASE = Policy(nfe=6)


def nothing(results):
    return Page()


def small(cells=None, shards=(1, 2), n=3, name="small", **fields):
    """Native, CRS, a short horizon, top-p, and two replays, on the source of words."""
    arms = cells or {
        "native": (BASE.but(horizon=0), None),
        "CRS": (BASE, None),
        "short": (BASE.but(horizon=1), None),
        "p.9": (BASE.but(horizon=0, top_p=0.9), None),
        "second": (BASE.but(values="second"), "CRS"),
        "final-only": (BASE.but(values="recorded", write="output"), "CRS"),
    }
    made = tuple(Cell(arm, "exact:words", policy, n, replay=replay) for arm, (policy, replay) in arms.items())
    return Study(name, name, made, shards, nothing, **fields)


def contents(store: str | Path) -> dict[str, bytes]:
    """Every file of a store that results rest on, and anything left half-written."""
    root = Path(store)
    return {
        str(path.relative_to(root)): path.read_bytes()
        for part in ("units", "plans", "partial")
        for path in sorted((root / part).rglob("*"))
        if path.is_file()
    }
