"""Small studies for tests of experiments, and the files of a store."""

import math
from dataclasses import dataclass
from pathlib import Path

from limpet.experiments import Cell, Probe, ProbeValue, ReportContent, Study
from limpet.samplers import CRS, Native

BASE = CRS(nfe=6)
NATIVE = Native(nfe=6, final_step="argmax")


def no_report(results):
    return ReportContent()


@dataclass(frozen=True)
class Settings:
    draws: int = 2
    text: str | None = None


def measure(models, settings, index, seeds):
    """The mean token of some draws, and a quantity that the first seed does not have and that has no value."""
    for model in models:
        tokens = model.draw(settings.draws, seeds[index])
        mean = float(tokens.double().mean())
        yield ProbeValue(model.name, "mean token", {"t": 0.5, "p": 1}, mean, "ids", tokens.numel())
        if index:
            yield ProbeValue(model.name, "late", {}, math.nan)


PROBE = Probe("probe", ("exact:words", "exact:chain"), measure, Settings())


def small_study(samplers=None, seeds=(1, 2), n=3, name="small", **fields):
    """Native, CRS, a short horizon, top-p and two replays on the source of words; and a probe."""
    chosen = samplers or {
        "native": (NATIVE, None),
        "CRS": (BASE, None),
        "short": (BASE.replace(horizon=1), None),
        "p.9": (NATIVE.replace(top_p=0.9), None),
        "second": (BASE.replace(values="second"), "CRS"),
        "final-only": (BASE.replace(values="recorded", write="output"), "CRS"),
    }
    cells = [Cell(name, "exact:words", sampler, n, replay=replay) for name, (sampler, replay) in chosen.items()]
    return Study(name, name, tuple(cells if samplers else [*cells, PROBE]), seeds, no_report, **fields)


def result_files(store: str | Path) -> dict[str, bytes]:
    """Every file of a store that results rest on, and everything left half-written."""
    root = Path(store)
    return {
        str(path.relative_to(root)): path.read_bytes()
        for part in ("units", "plans", "partial", "leases")
        for path in sorted((root / part).rglob("*"))
        if path.is_file()
    }
