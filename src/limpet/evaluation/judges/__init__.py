"""Judges: causal language models, or known distributions, that score generated text; loaded by name."""

import os
from collections.abc import Iterable
from pathlib import Path

import torch

from limpet.errors import LimpetError, warn
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
from limpet.models import Denoiser, exact_sources, tokenizer_digest
from limpet.models.exact import Source
from limpet.models.model_files import BUILTIN_FOLDER, builtin_folder, read_config, usable_device
from limpet.models.networks import dtype_of
from limpet.models.tokenizers import read_tokenizer

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

    if not isinstance(name, str | os.PathLike):
        raise LimpetError(f"a judge is named by a text such as {BUILTIN}, not {name!r}")
    name = os.fspath(name)
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


def default_judge(model: Denoiser, device: str | torch.device | None = None) -> Judge | None:
    """The judge of a model's samples where none is named: its true distribution where that is known, none where the
    model has a checker, the built-in judge where it reads the same tokens, and else none, with a warning."""
    own = source_judge(model)
    if own is not None or model.checker is not None:
        return own
    if builtin_fits([tokenizer_digest(model.tokenizer)]):
        return load_judge(BUILTIN, device)
    warn(f"no judge is known to fit {model.name}, so its samples get no perplexity: name a judge to have one")
    return None


def as_judge(judge: Judge | str) -> Judge:
    """A judge as it is, or the one of a name."""
    return judge if isinstance(judge, Judge) else load_judge(judge)


def builtin_fits(tokenizers: Iterable[str | None]) -> bool:
    """Whether the built-in judge was trained on texts of these tokenizers: it knows no other texts.

    tokenizers: the digest of each, None where it is unknown."""
    known = set(tokenizers)
    return known != {None} and has_builtin() and known == {tokenizer_digest(read_tokenizer(BUILTIN_FOLDER / BUILTIN))}


__all__ = [
    "AUTO", "BUILTIN", "CONVENTIONS", "Judge", "JudgeScores", "ScoreCache", "SourceJudge", "as_judge", "builtin_fits",
    "default_judge", "describe", "has_builtin", "load_judge", "prompt_ids", "score_samples", "source_judge",
]  # fmt: skip
