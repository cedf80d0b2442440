"""What a request asks for, and the work that answers it; this knows neither JSON nor HTTP, nor who is waiting."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from limpet.errors import LimpetError
from limpet.evaluation import scoring, statistics
from limpet.evaluation.comparison import MEASURES
from limpet.evaluation.judges import Judge
from limpet.generation import sample, spelled
from limpet.models import Denoiser
from limpet.models.exact import Source
from limpet.recording.trajectory import Trajectory, follow
from limpet.samplers import Sampler

Tell = Callable[[str, Any], None]  # (kind of event, its data); called after every call, it raises when work must stop


@dataclass(frozen=True)
class Stock:
    """What the work needs, loaded."""

    models: Mapping[str, Denoiser]
    judge: Judge | None = None  # of the models whose true distribution is not known

    def judge_of(self, model: Denoiser) -> Judge | None:
        """Who scores a model's texts: its own true distribution where that is known, else the judge if it can read them."""
        judge = scoring.source_judge(model) or self.judge
        try:
            if judge is not None:
                scoring.way_for(judge, model)
            return judge
        except LimpetError:
            return None

    def facts(self) -> dict[str, dict[str, Any]]:
        """Of each model, what can be known without it."""
        return {
            name: {
                "name": name, "digest": model.digest, "vocab_size": model.vocab_size, "length": model.length,
                "any_length": not isinstance(model, Source), "text": model.tokenizer is not None,
                "scored_by": None if (judge := self.judge_of(model)) is None else judge.name,
            }
            for name, model in self.models.items()
        }  # fmt: skip


@dataclass(frozen=True)
class Request:
    """What is asked for, checked as far as it can be without its model."""

    model: str
    arms: dict[str, Sampler]
    written: dict[
        str, dict[str, Any]
    ]  # the arms as answers show them: where a sampler's file lies is nobody's business
    seed: int
    n: int
    length: int
    prompt: str
    fixed: list[tuple[int, str]]
    score: bool

    @property
    def size(self) -> int:
        """Calls times tokens: how long it takes, beside others."""
        return sum(sampler.nfe for sampler in self.arms.values()) * self.n * self.length


def rows(stock: Stock, request: Request, tell: Tell) -> dict[str, list[dict[str, Any]]]:
    """n samples under every arm, as `limpet sample` writes them, with their scores."""
    model, given = _opened(stock, request)
    made: dict[str, list[dict[str, Any]]] = {}
    for name, sampler in request.arms.items():
        out = sample(
            model, sampler, request.n, request.seed, request.length, None, given, None, lambda *_: tell("", None)
        )
        rows = zip(out.rows(), _scores(stock, request, out.tokens, out.prefix), strict=True)
        made[name] = [{**row, "sampler": request.written[name], "scores": scores} for row, scores in rows]
        tell("", None)
    return made


def paths(stock: Stock, request: Request, tell: Tell) -> list[Trajectory]:
    """One sample under every arm, told as it comes: begin, frame ..., end."""
    model, given = _opened(stock, request)
    made, walk = follow(model, request.arms, request.seed, 0, request.length, None, given)
    for path, written in zip(made, request.written.values(), strict=True):
        path.header = replace(path.header, sampler=written)
    tell("begin", {"arms": [path.header.about() for path in made]})
    for news in walk:
        parts = []
        for a, (path, words) in enumerate(zip(made, news, strict=True)):
            if words is not None:
                frame = base64.b64encode(path.header.pack(path.frames[-1])).decode()
                parts.append({"arm": a, "frame": frame, "words": words})
        tell("frame", {"arms": parts})
    prefix = next(i for i in range(request.length + 1) if i not in given)  # given tokens at the start
    scores = _scores(stock, request, np.stack([path.frames[-1].state for path in made]), prefix)
    for path, found in zip(made, scores, strict=True):
        path.scores = found
    tell("end", {"arms": [{"text": path.text, "scores": path.scores} for path in made]})
    return made


def _file(stock: Stock, request: Request, tell: Tell) -> bytes:
    """The path of one sample as a trajectory file."""
    return paths(stock, request, tell)[0].to_bytes()


def _events(stock: Stock, request: Request, tell: Tell) -> None:
    """All has been told when the paths are made."""
    paths(stock, request, tell)


WORKS: dict[str, Callable[[Stock, Request, Tell], Any]] = {"rows": rows, "file": _file, "events": _events}


def _opened(stock: Stock, request: Request) -> tuple[Denoiser, dict[int, int]]:
    """The model, and {position: token} of the prompt and the fixed words."""
    model = stock.models[request.model]
    texts = [(start, text) for start, text in [(0, request.prompt), *request.fixed] if text]
    return model, spelled(model, texts, request.length)


def _scores(stock: Stock, request: Request, tokens: Any, prefix: int) -> list[dict[str, Any]]:
    """Of each sample (n, L), what is known of it: who judged, how, over how many tokens; what was given is not
    counted."""
    model, n = stock.models[request.model], len(tokens)
    if not request.score or prefix == tokens.shape[1]:
        return [{} for _ in range(n)]
    columns: dict[str, list[Any]] = {}
    judge = stock.judge_of(model)
    if judge is not None:
        found = scoring.score(judge, model, tokens, prefix)
        for name in ("judge", "digest", "convention", "precision"):
            columns[name] = [getattr(found, name)] * n
        with np.errstate(over="ignore"):
            nll, perplexity = statistics.numbers(found.mean), statistics.numbers(np.exp(found.mean))
        columns |= {"counted": found.tokens.tolist(), "nll": nll, "perplexity": perplexity}
    columns |= scoring.diversity(tokens[:, prefix:], MEASURES)[0]
    return [{name: column[i] for name, column in columns.items() if column[i] is not None} for i in range(n)]
