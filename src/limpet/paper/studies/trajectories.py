"""What audits look at: paths that can be seen into, distributions at chosen positions, clean texts and their forward states."""

from __future__ import annotations

import lzma
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from limpet.diffusion import process
from limpet.diffusion.rng import CounterRNG
from limpet.errors import LimpetError
from limpet.files import documents, read_text
from limpet.models import Denoiser
from limpet.models.exact import Source, forward_path
from limpet.models.model_files import MINIS
from limpet.samplers import Sampler
from limpet.samplers.context import Context, State, open_context, stepped

CHUNK = 2**24  # weights of distributions held at once


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much an audit looks at in a shard; every audit adds what it alone asks for."""

    paths: int  # paths, or clean texts
    nfe: int = 64
    length: int | None = None  # tokens in a path, where the model leaves a choice


@dataclass(frozen=True, kw_only=True)
class Forward(Settings):
    """The same for audits of exact forward states of clean text, where positions are committed once."""

    times: tuple[float, ...]
    count: int | None = None  # positions committed; None for what a call of CRS with this nfe selects
    spacing: int = 4
    text: str | None = None  # a file of clean text, documents as for training; held-out pages unless given


# Paths


def opened(model: Denoiser, settings: Settings, seed: int, trace: bool = False) -> Context:
    """The paths of one shard, nothing fixed; an exact source keeps its own length."""
    length = model.length if settings.length is None or isinstance(model, Source) else settings.length
    rng = CounterRNG(seed, torch.arange(settings.paths, device=model.device))
    return open_context(model, rng, torch.full((settings.paths, length), -1, device=model.device), trace=trace)


def states(sampler: Sampler, ctx: Context) -> Iterator[State]:
    """The state that each call of the denoiser looks at, the final step's last."""
    state = sampler.begin(ctx)
    yield state
    while state.call < sampler.nfe - 1:
        state, _ = stepped(sampler, ctx, state)
        yield state
    ctx.check_finite()


def spread(count: int, wanted: int) -> list[int]:
    """At most `wanted` of the numbers below `count`, from the first to the last, evenly spaced."""
    if count <= wanted:
        return list(range(count))
    return [round(place) for place in np.linspace(0, count - 1, wanted).tolist()]


# Distributions


def log_probs(model: Denoiser, features: Tensor, seen: Tensor, t: float) -> Tensor:
    """(..., D) features of the input tokens `seen` (...) -> (..., V) float64: the log-probabilities, leave-one-out whatever the
    model predicts."""
    logits = model.head(features).double()
    if model.predicts == "posterior":
        logits = process.leave_one_out_logits(logits, seen, float(model.schedule.signal(t)))
    return logits.log_softmax(-1)


def tops(model: Denoiser, inputs: Tensor, t: float) -> tuple[Tensor, Tensor]:
    """(B, L) twice: the argmax of the distribution at every position and its deficit, a few sequences at a time."""
    top, deficit = [], []
    for few in torch.split(inputs.to(model.device), max(1, CHUNK // (inputs.shape[1] * model.vocab_size))):
        largest, token = log_probs(model, model.body(few, t), few, t).max(-1)
        top.append(token.cpu())
        deficit.append(-torch.expm1(largest).cpu())
    return torch.cat(top), torch.cat(deficit)


# Clean texts


def heldout() -> str:
    """Pages from the books that the built-in models' training held out for validation."""
    return lzma.decompress((MINIS / "heldout.txt.xz").read_bytes()).decode()


def clean_texts(model: Denoiser, settings: Forward, shard: int, shards: Sequence[int]) -> Tensor:
    """(paths, L) clean sequences of one shard: drawn from an exact source, or cut from held-out text.

    Text is cut as for training, between two end tokens; every shard has pages from all over it."""
    if isinstance(model, Source):
        return model.draw(settings.paths, shards[shard])
    end = getattr(model.tokenizer, "special", {}).get("eos")
    if model.tokenizer is None or end is None:
        raise LimpetError(f"{model.name} has no tokenizer with an end-of-text token, so no text can be cut for it")
    name = settings.text or "heldout.txt"
    found = documents(heldout() if settings.text is None else read_text(name, "name a UTF-8 text file"), name)
    ids = torch.tensor([token for document in found for token in (*model.tokenizer.encode(document), end)])
    length = settings.length or model.length
    count, wanted = len(ids) // (length - 2), settings.paths * len(shards)
    if count < wanted:
        raise LimpetError(f"the text fills {count} sequences of {length} tokens, and {wanted} are asked for: give more")
    chunks = ids[: count * (length - 2)].view(count, length - 2)
    own = spread(count, wanted)[shard :: len(shards)]
    return torch.nn.functional.pad(chunks[own], (1, 1), value=end)


def within(model: Denoiser, clean: Tensor) -> Tensor:
    """(B, L) bool: where a clean sequence holds text, not an end token that it was cut at, which any model knows."""
    inside = torch.ones_like(clean, dtype=torch.bool)
    if not isinstance(model, Source):
        inside[:, [0, -1]] = False
    return inside


def forward_states(clean: Tensor, times: Sequence[float], model: Denoiser, seed: int) -> list[Tensor]:
    """One exact forward path of each sequence: its noisy tokens at rising times, each from the one before."""
    return forward_path(clean, [float(model.schedule.signal(t)) for t in times], model.vocab_size, seed)
