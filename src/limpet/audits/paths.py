"""What audits share: paths that can be looked into, laws at chosen positions, clean texts and their forward states."""

from __future__ import annotations

import lzma
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from limpet import process, sampler, samples
from limpet.denoisers import Denoiser
from limpet.denoisers.exact import Source
from limpet.denoisers.files import MINIS
from limpet.errors import LimpetError
from limpet.judges import Judge, gen_nll
from limpet.metrics import entropy
from limpet.policy import Policy
from limpet.sampler import Run, State
from limpet.samples import Selection
from limpet.streams import Purpose, Stream, uniform_token
from limpet.training.data import Stream as Text

CHUNK = 2**24  # weights of laws held at once

QUALITY = {
    "perplexity": "exp of a shard's mean NLL: under the judge, every id but the first; under an exact source's own law",
    "entropy": "unigram, each sequence its own, nats",
}


@dataclass(frozen=True)
class Models:
    """What an audit is done on, and what it may need besides."""

    denoisers: tuple[Denoiser, ...]
    judge: Judge | None = None  # scores the texts of models whose true law is not known
    text: str | None = None  # clean text, documents between blank lines; the held-out sample unless given

    def digests(self) -> dict[str, str]:
        return {model.name: model.digest for model in self.denoisers}


def prepared(
    model: Denoiser, policy: Policy, seed: int, paths: int, length: int | None = None,
    replay: Selection | None = None, trace: bool = False,
) -> Run:  # fmt: skip
    """A run of one shard, nothing fixed; an exact source keeps its own length."""
    length = model.length if length is None or isinstance(model, Source) else length
    stream = Stream(seed, torch.arange(paths, device=model.device))
    fixed = torch.full((paths, length), -1, device=model.device)
    return samples.prepare(model, policy, stream, fixed, replay=replay, trace=trace)


def states(run: Run, state: State | None = None) -> Iterator[State]:
    """The state that each call of the denoiser looks at, the readout's last."""
    state = sampler.begin(run) if state is None else state
    yield state
    while state.step < run.policy.nfe - 1:
        state, _ = sampler.step(run, state)
        yield state


def before(run: Run, step: int) -> State:
    """The state that call number `step` looks at: where arms that agree so far part."""
    return next(state for state in states(run) if state.step == step)


def finished(run: Run, state: State | None = None) -> State:
    """The end of a path, from the start or from a state where it parted from another."""
    *_, (end, _) = sampler.generate(run, state)
    return end


def recorded(state: State) -> Selection:
    """What a path selected and stored, to be replayed."""
    return Selection(state.selected_at, state.labels)


def log_law(model: Denoiser, features: Tensor, seen: Tensor, t: float) -> Tensor:
    """(..., D) features of the input tokens `seen` (...) -> (..., V) float64: the log law, leave-one-out whatever the
    model predicts."""
    logits = model.head(features).double()
    if model.predicts == "posterior":
        logits = process.leave_one_out_logits(logits, seen, float(model.schedule.signal(t)))
    return logits.log_softmax(-1)


def labels(model: Denoiser, inputs: Tensor, t: float) -> tuple[Tensor, Tensor]:
    """(B, L) twice: the argmax of the law at every position and its deficit, a few sequences at a time."""
    top, deficit = [], []
    for few in torch.split(inputs.to(model.device), max(1, CHUNK // (inputs.shape[1] * model.vocab_size))):
        largest, label = log_law(model, model.body(few, t), few, t).max(-1)
        top.append(label.cpu())
        deficit.append(-torch.expm1(largest).cpu())
    return torch.cat(top), torch.cat(deficit)


def spread(count: int, wanted: int) -> list[int]:
    """At most `wanted` of the numbers below `count`, from the first to the last, evenly spaced."""
    if count <= wanted:
        return list(range(count))
    return [round(place) for place in np.linspace(0, count - 1, wanted).tolist()]


def quality(models: Models, model: Denoiser, shards: Sequence[Tensor]) -> dict[str, np.ndarray]:
    """What the judge says of each shard's tokens, nats per token, and their entropy: (shards,) each."""
    if models.judge is not None and not isinstance(model, Source):
        nll = [float(gen_nll(models.judge, tokens.tolist()).by_shard([0] * len(tokens))[0]) for tokens in shards]
    elif isinstance(model, Source):
        nll = [-float(model.log_prob(tokens).mean()) / tokens.shape[1] for tokens in shards]
    else:
        raise LimpetError(f"the true law of {model.name} is not known: give a judge for its texts")
    return {
        "nll": np.array(nll),
        "perplexity": np.exp(nll),
        "entropy": np.array([np.mean(entropy(tokens)) for tokens in shards]),
    }


def heldout() -> str:
    """Pages from the books that the built-in models' training held out for validation."""
    return lzma.decompress((MINIS / "heldout.txt.xz").read_bytes()).decode()


def clean_texts(models: Models, model: Denoiser, shards: Sequence[int], n: int, length: int | None) -> list[Tensor]:
    """(n, L) clean sequences for each shard: drawn from an exact source, or cut from held-out text.

    Text is cut as for training, between two end tokens; every shard has pages from all over it."""
    if isinstance(model, Source):
        return [model.draw(n, seed) for seed in shards]
    length = length or model.length
    end = getattr(model.tokenizer, "special", {}).get("eos")
    if model.tokenizer is None or end is None:
        raise LimpetError(f"{model.name} has no tokenizer with an end-of-text token, so no text can be cut for it")
    text = heldout() if models.text is None else models.text
    documents = [document.strip("\n") for document in text.split("\n\n") if document.strip()]
    ids = [token for document in documents for token in (*model.tokenizer.encode(document), end)]
    stream = Text(torch.tensor(ids), len(text.encode()), end)
    count, wanted = stream.count(length), n * len(shards)
    if count < wanted:
        raise LimpetError(f"the text fills {count} sequences of {length} tokens, and {wanted} are asked for: give more")
    rows = stream.rows(torch.tensor(spread(count, wanted)), length)
    return [rows[i :: len(shards)] for i in range(len(shards))]


def within(model: Denoiser, clean: Tensor) -> Tensor:
    """(B, L) bool: where a clean sequence holds text, not an end token that it was cut at, which any model knows."""
    inside = torch.ones_like(clean, dtype=torch.bool)
    if not isinstance(model, Source):
        inside[:, [0, -1]] = False
    return inside


def forward_states(clean: Tensor, times: Sequence[float], model: Denoiser, seed: int) -> list[Tensor]:
    """One exact forward path of each sequence: its noisy tokens at rising times, each from the one before."""
    stream, state, signal = Stream(seed, torch.arange(len(clean))), clean, 1.0
    made = []
    for step, t in enumerate(times):
        keep, fresh = stream.uniforms(step, torch.arange(clean.shape[1]), Purpose.NOISE)
        here = float(model.schedule.signal(t))
        state = torch.where(keep < here / signal, state, uniform_token(fresh, model.vocab_size))
        signal = here
        made.append(state)
    return made
