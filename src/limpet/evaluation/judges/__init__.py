"""Judges: causal language models that score generated text, loaded by name."""

from __future__ import annotations

from pathlib import Path

import torch

from limpet.errors import LimpetError
from limpet.evaluation.judges.base import Judge
from limpet.evaluation.judges.exact import SourceJudge
from limpet.evaluation.judges.likelihood import CONVENTIONS, ScoreCache, Scores, gen_nll
from limpet.models import exact_sources
from limpet.models.duo import dtype_of
from limpet.models.model_files import MINIS, read_config, usable_device, whole_builtin

BUILTIN = "mini-judge"


def has_builtin() -> bool:
    """Whether the built-in judge came with this installation."""
    return (MINIS / BUILTIN / "config.json").is_file()


def load_judge(name: str = BUILTIN, device: str | torch.device | None = None, precision: str = "float32") -> Judge:
    """The built-in "mini-judge", a folder, any causal language model that transformers knows ("gpt2-large"), or an
    exact source by name, whose true distribution then judges.

    It runs on the GPU if there is one, unless told where. In bfloat16 it is another judge: its digest differs."""
    from limpet.evaluation.judges import causal, hub

    dtype = dtype_of(precision)
    if name.startswith("exact:"):
        return SourceJudge(exact_sources.source(name))
    place = usable_device(device)
    folder = whole_builtin(name) if name == BUILTIN else Path(name).expanduser()
    if read_config(folder).get("model_type") == "causal":
        return causal.load(name, folder, place, dtype)
    if name == BUILTIN:
        raise LimpetError(f"the built-in judge in {folder} is damaged: install limpet again, or name another judge")
    return hub.load(name, place, dtype)


__all__ = [
    "BUILTIN", "CONVENTIONS", "Judge", "ScoreCache", "Scores", "SourceJudge", "gen_nll", "has_builtin", "load_judge",
]  # fmt: skip
