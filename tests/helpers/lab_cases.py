"""Small studies for the laboratory's tests, and what a store holds."""

import math
from dataclasses import dataclass
from pathlib import Path

from limpet.experiments import Cell, Probe, Seen, Study
from limpet.experiments.contents import Page
from limpet.samplers import CRS, Native

BASE = CRS(nfe=6)
NATIVE = Native(nfe=6)


def nothing(results):
    return Page()


@dataclass(frozen=True)
class Settings:
    paths: int = 2
    text: str | None = None


def look(models, settings, shard, shards):
    """The mean token of some draws; and one thing that the first shard does not see, and no shard has a value for."""
    for model in models:
        tokens = model.draw(settings.paths, shards[shard])
        yield Seen(model.name, "mean token", {"t": 0.5, "p": 1}, float(tokens.double().mean()), "ids", tokens.numel())
        if shard:
            yield Seen(model.name, "late", {}, math.nan)


PROBE = Probe("look", ("exact:words", "exact:chain"), look, Settings())


def small(cells=None, shards=(1, 2), n=3, name="small", **fields):
    """Native, CRS, a short horizon, top-p, and two replays, on the source of words; and a probe."""
    arms = cells or {
        "native": (NATIVE, None),
        "CRS": (BASE, None),
        "short": (BASE.replace(horizon=1), None),
        "p.9": (NATIVE.replace(top_p=0.9), None),
        "second": (BASE.replace(values="second"), "CRS"),
        "final-only": (BASE.replace(values="recorded", write="output"), "CRS"),
    }
    made = tuple(Cell(arm, "exact:words", sampler, n, replay=replay) for arm, (sampler, replay) in arms.items())
    return Study(name, name, made if cells else (*made, PROBE), shards, nothing, **fields)


def contents(store: str | Path) -> dict[str, bytes]:
    """Every file of a store that results rest on, and anything left half-written."""
    root = Path(store)
    return {
        str(path.relative_to(root)): path.read_bytes()
        for part in ("units", "plans", "partial")
        for path in sorted((root / part).rglob("*"))
        if path.is_file()
    }
