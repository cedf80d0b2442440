"""What a server offers, what a request asks of it, and the work that answers; it knows neither JSON nor HTTP."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from limpet import scoring, stats
from limpet.compare import MEASURES
from limpet.denoisers import Denoiser
from limpet.denoisers.exact import Source
from limpet.errors import LimpetError
from limpet.judges import Judge
from limpet.samplers import Sampler
from limpet.samples import sample
from limpet.view.queue import Limits, Tell
from limpet.view.trajectory import Trajectory, follow


@dataclass(frozen=True)
class Offer:
    """All that can be asked for."""

    models: Mapping[str, Denoiser]
    judge: Judge | None  # of the models whose true law is not known
    samplers: Mapping[str, type[Sampler]]
    arms: Mapping[str, Sampler]  # what is compared unless told
    limits: Limits

    def written(self, sampler: Sampler) -> dict[str, Any]:
        """A sampler under the name that it has here: where its file lies is nobody's business."""
        name = next(name for name, kind in self.samplers.items() if kind is type(sampler))
        return {**sampler.to_dict(), "sampler": name}

    def judge_of(self, model: Denoiser) -> Judge | None:
        """Who scores a model's texts: its own true law where that is known, else the judge if it can read them."""
        judge = scoring.true_law(model) or self.judge
        try:
            if judge is not None:
                scoring.way_for(judge, model)
            return judge
        except LimpetError:
            return None


@dataclass(frozen=True)
class Request:
    """What is asked for, checked as far as it can be without its model."""

    model: str
    arms: dict[str, Sampler]
    seed: int
    n: int
    length: int | None
    prompt: str
    fixed: list[tuple[int, str]]
    score: bool


def rows(offer: Offer, request: Request, tell: Tell) -> dict[str, list[dict[str, Any]]]:
    """n samples under every arm, as `limpet sample` writes them, with their scores."""
    model, length, given = _opened(offer, request)
    made: dict[str, list[dict[str, Any]]] = {}
    for name, sampler in request.arms.items():
        out = sample(model, sampler, request.n, request.seed, length, None, given, None, lambda *_: tell("", None))
        rows = zip(out.rows(), _scores(offer, request, out.tokens, out.prefix), strict=True)
        made[name] = [{**row, "sampler": offer.written(sampler), "scores": scores} for row, scores in rows]
        tell("", None)
    return made


def paths(offer: Offer, request: Request, tell: Tell) -> list[Trajectory]:
    """One sample under every arm, told as it comes: begin, frame ..., end."""
    model, length, given = _opened(offer, request)
    made, walk = follow(model, request.arms, request.seed, 0, length, None, given)
    for path, sampler in zip(made, request.arms.values(), strict=True):
        path.header = replace(path.header, sampler=offer.written(sampler))
    tell("begin", {"arms": [path.header.about() for path in made]})
    for news in walk:
        parts = []
        for a, (path, words) in enumerate(zip(made, news, strict=True)):
            if words is not None:
                frame = base64.b64encode(path.header.pack(path.frames[-1])).decode()
                parts.append({"arm": a, "frame": frame, "words": words})
        tell("frame", {"arms": parts})
    prefix = next(i for i in range(length + 1) if i not in given)  # given tokens at the start
    scores = _scores(offer, request, np.stack([path.frames[-1].state for path in made]), prefix)
    for path, found in zip(made, scores, strict=True):
        path.scores = found
    tell("end", {"arms": [{"text": path.text, "scores": path.scores} for path in made]})
    return made


def _opened(offer: Offer, request: Request) -> tuple[Denoiser, int, dict[int, int]]:
    """The model, the length, and {position: token} of the prompt and the fixed words."""
    model = offer.models[request.model]
    length = request.length or model.length
    if length > offer.limits.length:
        raise LimpetError(f"{request.model} writes {length} tokens, and this server at most {offer.limits.length}")
    if isinstance(model, Source) and length != model.length:
        raise LimpetError(f"{model.name} writes {model.length} tokens, not {length}: leave length out")
    texts = [(start, text) for start, text in [(0, request.prompt), *request.fixed] if text]
    if texts and model.tokenizer is None:
        raise LimpetError(f"{model.name} has no tokenizer, so it takes no prompt and no fixed words")
    given: dict[int, int] = {}
    for start, text in texts:
        assert model.tokenizer is not None
        ids, shown = model.tokenizer.encode(text), ascii(text if len(text) <= 40 else text[:37] + "...")
        if start + len(ids) > length:
            raise LimpetError(
                f"{shown} takes {len(ids)} tokens from position {start}, past the {length} of the sequence: "
                "shorten it or raise length"
            )
        for position, token in enumerate(ids, start):
            if position in given:
                raise LimpetError(f"position {position} is given twice: move {shown}")
            given[position] = token
    return model, length, given


def _scores(offer: Offer, request: Request, tokens: Any, prefix: int) -> list[dict[str, Any]]:
    """Of each sample (n, L), what is known of it: who judged, how, over how many tokens; what was given is not
    counted."""
    model, n = offer.models[request.model], len(tokens)
    if not request.score or prefix == tokens.shape[1]:
        return [{} for _ in range(n)]
    columns: dict[str, list[Any]] = {}
    judge = offer.judge_of(model)
    if judge is not None:
        found = scoring.score(judge, model, tokens, prefix)
        for name in ("judge", "digest", "convention", "precision"):
            columns[name] = [getattr(found, name)] * n
        with np.errstate(over="ignore"):
            nll, perplexity = stats.numbers(found.mean), stats.numbers(np.exp(found.mean))
        columns |= {"counted": found.tokens.tolist(), "nll": nll, "perplexity": perplexity}
    columns |= scoring.diversity(tokens[:, prefix:], MEASURES)[0]
    return [{name: column[i] for name, column in columns.items() if column[i] is not None} for i in range(n)]
