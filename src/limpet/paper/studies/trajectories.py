"""What audits read: trajectories, predictions at chosen positions, clean texts and their forward states."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from limpet.diffusion.rng import CounterRNG
from limpet.errors import LimpetError
from limpet.evaluation import heldout_text
from limpet.files import documents, read_text
from limpet.generation import Inputs, context_of
from limpet.models import Denoiser
from limpet.models.exact import Source, forward_path
from limpet.samplers import Context, State

CHUNK = 2**24  # probabilities held at once


@dataclass(frozen=True, kw_only=True)
class AuditSettings:
    """How much an audit does per seed. Every audit adds its own fields."""

    n: int  # trajectories, or clean texts
    nfe: int = 64
    length: int | None = None  # tokens, for a model that leaves the length open


@dataclass(frozen=True, kw_only=True)
class ForwardSettings(AuditSettings):
    """The same for audits of forward states of clean text, where positions are committed once."""

    times: tuple[float, ...]
    count: int | None = None  # positions committed; None for as many as a call of CRS with this nfe selects
    spacing: int = 4
    text: str | None = None  # a file of clean text, documents as for training; None for the held-out pages


# Trajectories


def audit_inputs(model: Denoiser, settings: AuditSettings, seed: int, trace: bool = False) -> Inputs:
    """The inputs of one seed, nothing fixed; an exact source keeps its own length."""
    length = model.length if settings.length is None or isinstance(model, Source) else settings.length
    rng = CounterRNG(seed, torch.arange(settings.n, device=model.device))
    return Inputs(torch.full((settings.n, length), -1, device=model.device), rng, trace=trace)


def evenly_spaced(count: int, wanted: int) -> list[int]:
    """At most `wanted` of the numbers below `count`, from the first to the last."""
    if count <= wanted:
        return list(range(count))
    return [round(place) for place in np.linspace(0, count - 1, wanted).tolist()]


# Predictions


def read_log_probs(
    ctx: Context, state: State, model_input: Tensor, t: float, rows: Tensor, clean: Tensor | None = None
) -> Tensor:
    """(R, V) float64 leave-one-out log-probabilities at rows (R, 2) of samples and positions, from one network call.

    state: before the call. model_input: (B, L) what the network is given. clean: (B, L) bool, its positions without
    noise (default: the fixed ones)."""
    with torch.inference_mode():
        (features,) = ctx.call(state, model_input, t, clean=clean)
        return torch.cat([logits.double().log_softmax(-1) for _, logits in ctx.log_probs(features, rows)])


def predict_samples(
    model: Denoiser, inputs: Inputs, state: State, samples: Tensor, model_input: Tensor, t: float,
    positions: Tensor, clean: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """(R, V) the same for rows of their own: row r is of sample `samples[r]` of a batch, which is given the tokens
    `model_input[r]` and is read at `positions[r]`; `clean` is (R, L)."""
    ctx = context_of(model, Inputs(inputs.fixed[samples], CounterRNG(0, samples), backend=inputs.backend))
    previous = state.previous and state.previous._replace(values=state.previous.values[samples])
    before = State(state.call, state.tokens[samples], previous=previous)
    rows = torch.stack([torch.arange(len(samples), device=samples.device), positions], -1)
    return read_log_probs(ctx, before, model_input, t, rows, clean)


def predictions(model: Denoiser, tokens: Tensor, t: float) -> tuple[Tensor, Tensor]:
    """(B, L) twice: the argmax of the leave-one-out prediction at every position of some states, and its deficit."""
    top, deficit = [], []
    for few in torch.split(tokens.to(model.device), max(1, CHUNK // (tokens.shape[1] * model.vocab_size))):
        fixed = torch.full_like(few, -1)
        ctx = context_of(model, Inputs(fixed, CounterRNG(0, torch.arange(len(few), device=few.device))))
        rows = torch.ones_like(few).nonzero()
        largest, token = read_log_probs(ctx, State(0, few), few, t, rows).max(-1)
        top.append(token.view_as(few).cpu())
        deficit.append(-torch.expm1(largest).view_as(few).cpu())
    return torch.cat(top), torch.cat(deficit)


# Clean texts


def clean_texts(model: Denoiser, settings: ForwardSettings, index: int, seeds: Sequence[int]) -> Tensor:
    """(n, L) clean sequences for one seed: drawn from an exact source, or cut from held-out text.

    Text is cut as for training, between two end tokens. Every seed has pages from all parts of it. index: which of the
    seeds."""
    if isinstance(model, Source):
        return model.draw(settings.n, seeds[index])
    end = getattr(model.tokenizer, "special", {}).get("eos")
    if model.tokenizer is None or end is None:
        raise LimpetError(f"{model.name} has no tokenizer with an end-of-text token, so no text can be cut for it")
    name = settings.text or "heldout.txt"
    content = heldout_text() if settings.text is None else read_text(name, "name a UTF-8 text file")
    ids = torch.tensor(
        [token for document in documents(content, name) for token in (*model.tokenizer.encode(document), end)]
    )
    length = settings.length or model.length
    count, wanted = len(ids) // (length - 2), settings.n * len(seeds)
    if count < wanted:
        raise LimpetError(f"the text fills {count} sequences of {length} tokens; {wanted} are needed: give more text")
    chunks = ids[: count * (length - 2)].view(count, length - 2)
    own = evenly_spaced(count, wanted)[index :: len(seeds)]
    return torch.nn.functional.pad(chunks[own], (1, 1), value=end)


def text_positions(model: Denoiser, clean: Tensor) -> Tensor:
    """(B, L) bool: positions of the text itself, without the end tokens at which it was cut, which any model knows."""
    inside = torch.ones_like(clean, dtype=torch.bool)
    if not isinstance(model, Source):
        inside[:, [0, -1]] = False
    return inside


def forward_states(clean: Tensor, times: Sequence[float], model: Denoiser, seed: int) -> list[Tensor]:
    """One forward trajectory of each sequence: its noisy tokens at rising times, each drawn from those before."""
    return forward_path(clean, [float(model.schedule.signal(t)) for t in times], model.vocab_size, seed)
