"""Models: the interface of one, how one is loaded, and a file for each family of networks."""

from limpet.models.denoiser import (
    Cache,
    Canvas,
    CleanTokens,
    Denoiser,
    ModelInput,
    Rows,
    Tokenizer,
    WrappedDenoiser,
    all_rows,
    check_model,
    tokenizer_digest,
)
from limpet.models.prompt_layouts import PromptLayout

__all__ = [
    "Cache",
    "Canvas",
    "CleanTokens",
    "Denoiser",
    "ModelInput",
    "PromptLayout",
    "Rows",
    "Tokenizer",
    "WrappedDenoiser",
    "all_rows",
    "check_model",
    "tokenizer_digest",
]
