"""The paper's tables and figures as studies: one small file each, `study(preset) -> Study`."""

from __future__ import annotations

import importlib
from typing import cast

from limpet.errors import LimpetError
from limpet.lab.study import Study
from limpet.studies.presets import PRESETS, Preset, preset, sized

STUDIES = {
    "nfe-scaling": "GenPPL and entropy over network calls: tables 2 and 3, figure 2 a-b",
    "frontier": "top-p against CRS budgets at equal calls: table 5, figure 2 c-d",
    "endpoint": "ancestral or argmax at the last call, on the same paths: table 4",
    "warmup": "selection that starts later, by how long labels stay visible: tables 6 and 7, figure 3",
    "factorial": "late top-p by visibility: table 8",
    "interaction": "what visibility gains as support shrinks: figure 4",
    "prefix": "continuations of fixed prefixes: table 9 and its contrasts",
    "storage": "labels copied to the output or also shown to the denoiser: figure 5",
    "values": "other tokens at the selected positions: appendix E.2",
    "matched": "CRS against top-p at equal entropy, Dist-4, Rep-4 or Self-BLEU: appendix E.4",
}


def study(name: str, size: Preset) -> Study:
    """A study of the paper by name, at a preset's size."""
    if name not in STUDIES:
        raise LimpetError(f"there is no study {name!r}; there are {', '.join(STUDIES)}, or give a .toml file")
    module = importlib.import_module(f"limpet.studies.{name.replace('-', '_')}")
    return cast(Study, module.study(size))


__all__ = ["PRESETS", "STUDIES", "Preset", "preset", "sized", "study"]
