"""Judges: causal language models, or known distributions, that score generated text; loaded by name."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from limpet.errors import LimpetError
from limpet.evaluation.judges.base import Judge
from limpet.evaluation.judges.exact import SourceJudge
from limpet.evaluation.judges.likelihood import (
    CONVENTIONS,
    JudgeScores,
    ScoreCache,
    describe,
    prompt_ids,
    score_samples,
)
from limpet.models import Denoiser, exact_sources
from limpet.models.exact import Source
from limpet.models.model_files import BUILTIN_FOLDER, builtin_folder, read_config, usable_device
from limpet.models.networks import dtype_of

BUILTIN = "mini-judge"
AUTO = "auto"  # the convention that follows from the judge and the samples


def has_builtin() -> bool:
    """Whether the built-in judge is part of this installation."""
    return (BUILTIN_FOLDER / BUILTIN / "config.json").is_file()


def load_judge(name: str = BUILTIN, device: str | torch.device | None = None, precision: str = "float32") -> Judge:
    """Load a judge by name.

    name: "mini-judge" (built in), a folder, any causal language model that transformers knows ("gpt2-large"), or an
    exact source ("exact:words"), whose true distribution then scores the texts.
    device: where it runs (default: the GPU if there is one).
    precision: "float32" or "bfloat16". The same weights in bfloat16 are another judge, with another digest."""
    from limpet.evaluation.judges import causal, hub

    dtype = dtype_of(precision)
    if name.startswith("exact:"):
        return SourceJudge(exact_sources.source(name))
    place = usable_device(device)
    folder = builtin_folder(name) if name == BUILTIN else Path(os.path.expanduser(name))
    if read_config(folder).get("model_type") == "causal":
        return causal.load(name, folder, place, dtype)
    if name == BUILTIN:
        raise LimpetError(f"the built-in judge in {folder} is damaged: install limpet again, or name another judge")
    return hub.load(name, place, dtype)


def source_judge(model: Denoiser) -> SourceJudge | None:
    """The model's own distribution as a judge, or None if it is not known."""
    return SourceJudge(model) if isinstance(model, Source) else None


def judge_for(model: Denoiser, judge: Judge | str | None = None) -> Judge:
    """The judge of a model's samples: the given one, by name or loaded, or else the model's own true distribution."""
    found = load_judge(judge) if isinstance(judge, str) else judge or source_judge(model)
    if found is None:
        raise LimpetError(
            f"the true distribution of {model.name} is not known: give a judge (judge=limpet.load_judge(...))"
        )
    return found


__all__ = [
    "AUTO", "BUILTIN", "CONVENTIONS", "Judge", "JudgeScores", "ScoreCache", "SourceJudge", "describe", "has_builtin",
    "judge_for", "load_judge", "prompt_ids", "score_samples", "source_judge",
]  # fmt: skip
