"""Audits: what the paper measures inside a trajectory, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from limpet.audits import endpoint, hidden, risk, selection, singleton, storage, temperature, values
from limpet.audits.figures import panels
from limpet.audits.paths import Models
from limpet.audits.result import Preset, Progress, Result, Row
from limpet.errors import LimpetError

CHECKPOINTS = ("mini", "mini-distilled")
ORACLES = ("exact:words", "exact:chain")


@dataclass(frozen=True)
class Audit:
    """One audit: what it is called, what it asks, how much of it can be done, and on which models unless told."""

    name: str
    title: str
    asks: str
    presets: Mapping[str, Any]
    function: Callable[[Models, Any, Progress], Result]
    draw: Callable[[Result, Sequence[Any]], None]
    panels: int
    judged: bool = False  # whether it scores texts
    models: tuple[str, ...] = CHECKPOINTS

    def __call__(self, models: Models, preset: str | Preset, progress: Progress = lambda done, total: None) -> Result:
        """Do the audit under a preset of its own, by name, or under one that the caller has changed."""
        if isinstance(preset, str):
            if preset not in self.presets:
                raise LimpetError(f"audit {self.name} has no preset {preset!r}; it has {', '.join(self.presets)}")
            preset = self.presets[preset]
        return self.function(models, preset, progress)

    def figure(self, result: Result) -> Any:
        """A matplotlib figure of a result."""
        drawing, axes = panels(self.panels, self.title)
        self.draw(result, axes)
        return drawing


def _audit(module: ModuleType, **more: Any) -> Audit:
    name = module.__name__.rpartition(".")[2]
    parts = module.TITLE, module.ASKS, module.PRESETS, module.audit, module.figure, module.PANELS
    return Audit(name, *parts, **more)


AUDITS = {
    audit.name: audit
    for audit in (
        _audit(singleton),
        _audit(endpoint, judged=True),
        _audit(selection),
        _audit(temperature),
        _audit(values, judged=True),
        _audit(hidden),
        _audit(storage, judged=True),
        _audit(risk, models=(*CHECKPOINTS, *ORACLES)),
    )
}

__all__ = ["AUDITS", "Audit", "Models", "Preset", "Progress", "Result", "Row"]
