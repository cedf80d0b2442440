"""Models: what a sampler asks of one, how one is loaded, and a file for each family of networks."""

from limpet.models.denoiser import (
    Canvas,
    Denoiser,
    Needed,
    Tokenizer,
    ToldClean,
    Wrapped,
    check_model,
    tokenizer_digest,
)

__all__ = ["Canvas", "Denoiser", "Needed", "Tokenizer", "ToldClean", "Wrapped", "check_model", "tokenizer_digest"]
