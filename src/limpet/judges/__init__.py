"""Judges: causal language models that score generated text, loaded by name."""

from __future__ import annotations

from pathlib import Path

import torch

from limpet.denoisers.duo import PRECISIONS
from limpet.denoisers.files import MINIS, whole_builtin
from limpet.errors import LimpetError
from limpet.judges.judge import Judge
from limpet.judges.scores import CONVENTIONS, ScoreCache, Scores, gen_nll

BUILTIN = "mini-judge"


def has_builtin() -> bool:
    """Whether the built-in judge came with this installation."""
    return (MINIS / BUILTIN / "config.json").is_file()


def load_judge(name: str = BUILTIN, device: str | torch.device | None = None, precision: str = "float32") -> Judge:
    """The built-in "mini-judge", a folder, or any causal language model that transformers knows ("gpt2-large").

    It runs on the GPU if there is one, unless told where. In bfloat16 it is another judge: its digest differs."""
    from limpet.judges import builtin, hub

    if precision not in PRECISIONS:
        raise LimpetError(f"precision {precision!r} is none of {', '.join(PRECISIONS)}")
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    folder = whole_builtin(name) if name == BUILTIN else Path(name)
    if builtin.is_builtin(folder):
        return builtin.load(name, folder, place, PRECISIONS[precision])
    if name == BUILTIN:
        raise LimpetError(f"the built-in judge in {folder} is damaged: install limpet again, or name another judge")
    return hub.load(name, place, PRECISIONS[precision])


__all__ = ["BUILTIN", "CONVENTIONS", "Judge", "ScoreCache", "Scores", "gen_nll", "has_builtin", "load_judge"]
