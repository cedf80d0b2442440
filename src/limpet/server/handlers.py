"""What a request asks for, and the work that answers it; this module knows neither HTTP nor who is waiting."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from limpet.errors import LimpetError
from limpet.evaluation import Checker, Judge, SampleSet, convention_for, evaluate, find_checker, source_judge
from limpet.evaluation.checkers.sudoku import puzzles
from limpet.evaluation.comparison import METRICS
from limpet.evaluation.judges import builtin_fits
from limpet.generation import sample
from limpet.models import Canvas, Denoiser, tokenizer_digest
from limpet.models.exact import Source
from limpet.models.prompt_layouts import SudokuLayout
from limpet.recording.trajectory import FIXED, Trajectory, follow
from limpet.samplers import Sampler, params, recommended
from limpet.samplers.recommended import MANY_CALLS

PROMPTS = ("The sea", "Once upon a time", '"Where are you going?"')  # examples of the page for models of English
LETTERS = ("moon tide ", "([{")  # for sources of letters and of brackets
PUZZLES = {"sudoku": (40, 32), "sudoku-6x6": (20, 14)}  # layout -> clues of its examples
SHORT = 96  # tokens that the page asks of a model of text, so that several texts fit on a screen
DIAL_STOPS = 20  # steps of the page's dial from sharpness 0 to 1
ABOUT_JUDGE = ("digest", "convention", "precision")
LIKELIHOOD = ("counted", "nll", "perplexity")
Report = Callable[[str, Any], None]  # (event, data), after every network call; raises when work must stop


@dataclass(frozen=True)
class Resources:
    """The loaded models and the judge."""

    models: Mapping[str, Denoiser]
    judge: Judge | None = None  # of models whose true distribution is not known
    any_text: bool = True  # whether the judge was asked for by name; else it reads only texts of its own tokens

    def judge_of(self, model: Denoiser) -> Judge | None:
        """The judge of a model's texts: its true distribution where that is known, else the one that can read them."""
        judge = source_judge(model) or self.judge
        if judge is self.judge and not self.any_text and not builtin_fits([tokenizer_digest(model.tokenizer)]):
            return None
        try:
            if judge is not None:
                convention_for(judge, model)
            return judge
        except LimpetError:
            return None

    def facts(self) -> dict[str, dict[str, Any]]:
        """What the page and the checks of a request must know of each model."""
        return {
            name: {
                "name": name, "digest": model.digest, "vocab_size": model.vocab_size, "length": model.length,
                "any_length": not isinstance(model, Source), "has_text": model.tokenizer is not None,
                "is_canvas": isinstance(model, Canvas),
                "judge": None if (judge := self.judge_of(model)) is None else judge.name,
                "page_length": page_length(model), "examples": examples(model),
                "dial": dial(model, MANY_CALLS), "dial_of_few_calls": dial(model, MANY_CALLS - 1),
            }
            for name, model in self.models.items()
        }  # fmt: skip


def page_length(model: Denoiser) -> int:
    """The tokens of a sample that the page asks for at first."""
    is_text = model.checker is None and not isinstance(model, Source | Canvas)
    return min(model.length, SHORT) if is_text else model.length


def examples(model: Denoiser) -> list[list[str]]:
    """Example prompts of a model, each with what the page calls it: puzzles for sudoku, none for molecules."""
    layout = model.prompt_layout
    if isinstance(layout, SudokuLayout):
        return [[f"{clues} clues", puzzles(1, clues, size=layout.board)[0]] for clues in PUZZLES.get(layout.name, ())]
    if isinstance(model, Source):
        return [[text, text] for text in LETTERS if _can_write(model, text)][:1]
    return [] if model.checker else [[text, text] for text in PROMPTS if _can_write(model, text)]


def _can_write(model: Denoiser, text: str) -> bool:
    try:
        return model.tokenizer is not None and model.tokenizer.decode(model.tokenizer.encode(text)) == text
    except LimpetError:
        return False


def dial(model: Denoiser, nfe: int) -> list[dict[str, Any]]:
    """The recommended sampler at sharpness 0, 1/20, ..., 1: what differs from its defaults, without the calls."""
    stops = [recommended(nfe, stop / DIAL_STOPS, model) for stop in range(DIAL_STOPS + 1)]
    defaults = [{name: param.default for name, param in params(type(one)).items()} for one in stops]
    return [
        {name: value for name, value in one.to_dict().items() if name != "nfe" and value != default.get(name, ...)}
        for one, default in zip(stops, defaults, strict=True)
    ]


@dataclass(frozen=True)
class Request:
    """A request, checked as far as possible without its model."""

    model: str
    samplers: dict[str, Sampler]
    described: dict[str, dict[str, Any]]  # the samplers as answers show them, without the path of a sampler's file
    seed: int
    n: int
    length: int
    prompt: str
    fixed: dict[int, str]  # texts by the position of their first token
    score: bool


def samples(resources: Resources, request: Request, report: Report) -> dict[str, list[dict[str, Any]]]:
    """n samples under every sampler, as `limpet sample --json` writes them, with their scores."""
    answers: dict[str, list[dict[str, Any]]] = {}
    for name, sampler in request.samplers.items():
        out = sample(
            resources.models[request.model], sampler, request.n, request.seed, request.length,
            request.prompt or None, request.fixed, progress=lambda *_: report("", None),
        )  # fmt: skip
        records = zip(out, _scores(resources, request, out.tokens, out.prompt_length), strict=True)
        answers[name] = [
            {**one.to_dict(), "sampler": request.described[name], "scores": scores} for one, scores in records
        ]
        report("", None)
    return answers


def trajectories(resources: Resources, request: Request, report: Report) -> list[Trajectory]:
    """One sample under every sampler, call by call: the events begin, frame (many) and end."""
    model = resources.models[request.model]
    arguments = request.seed, 0, request.length, request.prompt or None, request.fixed
    recorded, steps = follow(model, request.samplers, *arguments)
    for trajectory, described in zip(recorded, request.described.values(), strict=True):
        trajectory.header = replace(trajectory.header, sampler=described)
    report("begin", {"trajectories": [one.header.to_dict() for one in recorded]})
    for step in steps:
        parts = []
        for index, (trajectory, texts) in enumerate(zip(recorded, step, strict=True)):
            if texts is not None:
                frame = base64.b64encode(trajectory.header.pack(trajectory.frames[-1])).decode()
                parts.append({"index": index, "frame": frame, "token_texts": texts})
        report("frame", {"trajectories": parts})
    is_fixed = recorded[0].header.mask(recorded[0].frames[-1], FIXED)
    tokens = np.stack([one.frames[-1].tokens for one in recorded])
    scores = _scores(resources, request, tokens, int(is_fixed.cumprod().sum()))
    for trajectory, found in zip(recorded, scores, strict=True):
        trajectory.scores = found
    ends = [{"text": one.text, "scores": one.scores, "drawing": one.drawing} for one in recorded]
    report("end", {"trajectories": ends})
    return recorded


def trajectory_file(resources: Resources, request: Request, report: Report) -> bytes:
    """One sample as a trajectory file."""
    return trajectories(resources, request, report)[0].to_bytes()


def trajectory_events(resources: Resources, request: Request, report: Report) -> None:
    """The events alone."""
    trajectories(resources, request, report)


def _scores(resources: Resources, request: Request, tokens: Any, prompt_length: int) -> list[dict[str, Any]]:
    """What is known of each sample (n, L): the checker's values, the judge, how it read, its numbers.

    The judge and the metrics leave out the prompt."""
    model, n = resources.models[request.model], len(tokens)
    if not request.score or prompt_length == tokens.shape[1]:
        return [{} for _ in range(n)]
    read = SampleSet.from_tokens(model, tokens, prompt_length)
    scores = evaluate(read, resources.judge_of(model), METRICS, checker=_checker(model.checker))
    checks = [name for name in scores.measures if name not in (*LIKELIHOOD, *METRICS, "dropped", "ends")]
    judge = scores.judge
    about = {} if judge is None else {"judge": judge["name"], **{name: judge[name] for name in ABOUT_JUDGE}}

    def values(row: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
        return {name: row[name] for name in names if row.get(name) is not None}

    return [values(row, checks) | about | values(row, (*LIKELIHOOD, *METRICS)) for row in scores.sample_rows()]


@cache
def _checker(name: str | None) -> Checker | None:
    """A model's checker, kept between requests; none where what it needs is not installed."""
    try:
        return None if name is None else find_checker(name)
    except LimpetError:
        return None
