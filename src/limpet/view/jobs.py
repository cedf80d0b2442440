"""What a request to the playground asks for, checked field by field, and the work that answers it."""

from __future__ import annotations

import base64
import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import numpy as np
from torch import Tensor

from limpet import metrics
from limpet.denoisers import Denoiser
from limpet.denoisers.exact import Source
from limpet.errors import LimpetError
from limpet.judges import Judge, gen_nll
from limpet.policy import Policy
from limpet.sampler import Info, State
from limpet.samples import sample
from limpet.view.desk import Refusal, Tell
from limpet.view.trajectory import FORMAT, VERSION, Frame, Trajectory, Words, follow, name_of

MOST_WHOLE = 2**31 - 1  # of a whole number in a policy
MOST_SEED = 2**53 - 1  # of a seed: what every JSON reader keeps exactly
MOST_NAME = 80  # characters in an arm's name


@dataclass(frozen=True)
class Limits:
    """What one request, and all of them together, may take."""

    length: int = 1024
    """Tokens in a sample."""
    steps: int = 256
    """Network calls for a sample."""
    samples: int = 16
    """Samples in a request."""
    arms: int = 4
    """Arms in a comparison."""
    fixed: int = 64
    """Places where words are fixed."""
    body: int = 65536
    """Bytes in a request."""
    queue: int = 16
    """Requests that wait."""
    workers: int = 1
    """Requests that run at once."""
    seconds: float = 120.0
    """How long a request may run."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not math.isfinite(value) or value < 0 or (value == 0 and name != "queue"):
                raise LimpetError(f"the limit on {name} is {value}; it takes a number above 0")
        if self.steps < 2:
            raise LimpetError("the limit on steps is 1; a sample takes at least 2 calls, a step and a readout")


@dataclass(frozen=True)
class Ask:
    """A request, checked as far as it can be without its model."""

    model: str
    arms: dict[str, Policy]
    seed: int
    n: int
    length: int | None
    prompt: str
    fixed: tuple[tuple[int, str], ...]
    score: bool


# Reading a request


def read_json(body: bytes) -> Any:
    """A JSON document without NaN, infinities or numbers too large to be kept."""

    def refuse(constant: str) -> NoReturn:
        raise Refusal(400, f"the request holds {constant}, which is no JSON number: leave it out")

    def number(text: str) -> float:
        if not math.isfinite(value := float(text)):
            refuse(text)
        return value

    try:
        return json.loads(body.decode("utf-8"), parse_constant=refuse, parse_float=number)
    except UnicodeDecodeError as error:
        raise Refusal(400, f"the request is not UTF-8 (byte {error.start}): encode it as UTF-8") from error
    except Refusal:
        raise
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the request is not JSON ({error}): send one JSON object") from error


def parse(body: bytes, kind: str, limits: Limits, models: Mapping[str, Denoiser], default: str) -> Ask:
    """A request to /api/sample or /api/compare, every field checked; Refusal says what to mend."""
    values = read_json(body)
    if not isinstance(values, dict):
        raise Refusal(422, f"the request is a JSON {_kind(values)}: send an object")
    known = ["model", "seed", "length", "prompt", "fixed", "score"]
    known += ["policy", "n"] if kind == "sample" else ["arms"]
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known)}"
            raise Refusal(422, f"there is no field {_brief(name)}; {hint}")
    model = values.get("model", default)
    if not isinstance(model, str) or model not in models:
        raise Refusal(422, f"model is {_brief(model)}; here are {', '.join(models)}")
    if kind == "sample":
        policy = _policy(values.get("policy", {}), "policy", limits)
        arms = {name_of(policy): policy}
    else:
        arms = _arms(values.get("arms"), limits)
    return Ask(
        model=model,
        arms=arms,
        seed=_whole(values, "seed", 8200, 0, MOST_SEED),
        n=_whole(values, "n", 1, 1, limits.samples) if kind == "sample" else 1,
        length=None if values.get("length") is None else _whole(values, "length", 1, 1, limits.length),
        prompt=_text(values.get("prompt", ""), "prompt"),
        fixed=_fixed(values.get("fixed", []), limits),
        score=_flag(values, "score", True),
    )


def _kind(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _brief(value: Any) -> str:
    """What was given, short enough for a sentence."""
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _whole(values: dict[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = values.get(name, default)
    if type(value) is not int or not low <= value <= high:
        raise Refusal(422, f"{name} is {_brief(value)}; it takes a whole number from {low} to {high}")
    return value


def _flag(values: dict[str, Any], name: str, default: bool) -> bool:
    value = values.get(name, default)
    if not isinstance(value, bool):
        raise Refusal(422, f"{name} is {_brief(value)}; it takes true or false")
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise Refusal(422, f"{name} is a JSON {_kind(value)}; it takes text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise Refusal(422, f"{name} holds half a character (a lone surrogate) at place {error.start}") from error
    return value


def _policy(values: Any, name: str, limits: Limits) -> Policy:
    if not isinstance(values, dict):
        raise Refusal(422, f"{name} is a JSON {_kind(values)}; it takes an object with fields of a policy")
    for field, value in values.items():
        if isinstance(value, int) and abs(value) > MOST_WHOLE:
            raise Refusal(
                422, f"{name} field {_brief(field)} is {_brief(value)}; whole numbers here end at {MOST_WHOLE}"
            )
    try:
        policy = Policy.from_dict({"nfe": min(Policy.nfe, limits.steps), **values})
    except LimpetError as error:
        raise Refusal(422, f"in {name}: {error}") from error
    if policy.nfe > limits.steps:
        raise Refusal(422, f"{name} asks for {policy.nfe} calls; this server makes at most {limits.steps} a sample")
    if policy.values == "recorded":
        raise Refusal(422, f'{name} has values "recorded", which replays a run; use one of the others here')
    return policy


def _arms(values: Any, limits: Limits) -> dict[str, Policy]:
    if values is None:
        crs = Policy(nfe=min(16, limits.steps))
        return {"native": crs.but(horizon=0), "CRS": crs}
    if not isinstance(values, dict) or not 1 <= len(values) <= limits.arms:
        raise Refusal(422, f"arms takes an object with 1 to {limits.arms} policies by name")
    for name in values:
        if not 1 <= len(_text(name, "an arm's name")) <= MOST_NAME:
            raise Refusal(422, f"an arm's name has {len(name)} characters; it takes 1 to {MOST_NAME}")
    return {name: _policy(policy, f"arm {_brief(name)}", limits) for name, policy in values.items()}


def _fixed(values: Any, limits: Limits) -> tuple[tuple[int, str], ...]:
    if not isinstance(values, list) or len(values) > limits.fixed:
        raise Refusal(422, f"fixed takes an array of at most {limits.fixed} objects with position and text")
    places = []
    for value in values:
        if not isinstance(value, dict) or set(value) != {"position", "text"}:
            raise Refusal(422, f"fixed holds {_brief(value)}; each takes an object with position and text")
        position = _whole(value, "position", 0, 0, limits.length - 1)
        places.append((position, _text(value["text"], "a fixed text")))
    return tuple(places)


# Answering it


def given_ids(model: Denoiser, ask: Ask, length: int) -> dict[int, int]:
    """{position: token} of the prompt and the fixed words."""
    if isinstance(model, Source) and length != model.length:
        raise Refusal(422, f"{model.name} writes {model.length} tokens, not {length}: leave length out")
    texts = [(0, ask.prompt), *ask.fixed]
    if any(text for _, text in texts) and model.tokenizer is None:
        raise Refusal(422, f"{model.name} has no tokenizer, so it takes no prompt and no fixed words")
    given: dict[int, int] = {}
    for start, text in texts:
        ids = model.tokenizer.encode(text) if text and model.tokenizer is not None else []
        if start + len(ids) > length:
            raise Refusal(
                422, f"{_brief(text)} takes {len(ids)} tokens from position {start}, past the {length} of the "
                "sequence: shorten it or raise length",
            )  # fmt: skip
        for position, token in enumerate(ids, start):
            if position in given:
                raise Refusal(422, f"position {position} is given twice: move {_brief(text)}")
            given[position] = token
    return given


class Bench:
    """The models, the judge, and what can be made with them; its methods run in a worker's thread."""

    def __init__(self, models: Mapping[str, Denoiser], judge: Judge | None, limits: Limits) -> None:
        self.models, self.judge, self.limits = models, judge, limits

    def about(self) -> list[dict[str, Any]]:
        return [
            {
                "name": name, "digest": model.digest, "vocab_size": model.vocab_size, "length": model.length,
                "any_length": not isinstance(model, Source), "text": model.tokenizer is not None,
                "scored_by": "true law" if isinstance(model, Source) else self.judge.name if self.judge else None,
            }
            for name, model in self.models.items()
        ]  # fmt: skip

    def _opened(self, ask: Ask) -> tuple[Denoiser, int, dict[int, int]]:
        model = self.models[ask.model]
        length = ask.length or model.length
        if length > self.limits.length:
            raise Refusal(422, f"{ask.model} writes {length} tokens, and this server at most {self.limits.length}")
        return model, length, given_ids(model, ask, length)

    def rows(self, ask: Ask, tell: Tell) -> dict[str, list[dict[str, Any]]]:
        """n samples under every arm, as `limpet sample` writes them, with their scores."""
        model, length, given = self._opened(ask)

        def watch(state: State, info: Info, done: int, total: int) -> None:
            tell("", None)

        made = {}
        for name, policy in ask.arms.items():
            samples = sample(model, policy, ask.n, ask.seed, length, None, None, watch, fixed=given)
            made[name] = [
                {**row, "scores": self._scores(ask, model, tokens, given)}
                for row, tokens in zip(samples.rows(), samples.tokens, strict=True)
            ]
            tell("", None)
        return made

    def path(self, ask: Ask, tell: Tell) -> list[Trajectory]:
        """One sample under every arm, told step by step: begin, step ..., end."""
        model, length, given = self._opened(ask)
        headers, steps = follow(model, ask.arms, ask.seed, 0, length, None, given)
        tell("begin", {"arms": [{"format": FORMAT, "version": VERSION, **asdict(header)} for header in headers]})
        words = [Words(model.tokenizer) for _ in headers]
        frames: list[list[Frame]] = [[] for _ in headers]
        for r, together in enumerate(steps):
            parts = []
            for a, frame in enumerate(together):
                if frame is not None:
                    frames[a].append(frame)
                    packed = base64.b64encode(headers[a].pack(frame)).decode()
                    parts.append({"arm": a, "frame": packed, "words": words[a].of(frame)})
            tell("step", {"step": r, "arms": parts})
        paths = []
        for header, word, path in zip(headers, words, frames, strict=True):
            output = path[-1].state
            scores = self._scores(ask, model, output, given)
            paths.append(Trajectory(header, path, word.told, word.text(output), scores))
        tell("end", {"arms": [{"text": path.text, "scores": path.scores} for path in paths]})
        return paths

    def _scores(self, ask: Ask, model: Denoiser, tokens: Any, given: Mapping[int, int]) -> dict[str, Any]:
        if not ask.score:
            return {}
        ids = [int(token) for token in tokens]
        prompt = next(i for i in range(len(ids) + 1) if i not in given)  # given tokens at the start
        found = score(model, self.judge, ids, prompt)
        return {name: value for name, value in found.items() if isinstance(value, str) or math.isfinite(value)}


def score(model: Denoiser, judge: Judge | None, ids: list[int], prompt: int) -> dict[str, Any]:
    """What the judge, or the model's own law where it is known, says of one output; the prompt is not counted."""
    measures = {
        metric.name: float(np.mean(metric.function([ids])))
        for metric in metrics.METRICS if metric.name in ("entropy", "rep-4")
    }  # fmt: skip
    if isinstance(model, Source):
        nll = -float(model.log_prob(Tensor([ids]).long())[0]) / len(ids)
        return {"judge": "the true law", "nll": nll, "perplexity": _exp(nll), **measures}
    if judge is None or prompt == len(ids):
        return measures
    if shares_ids(model, judge, ids):
        found = gen_nll(judge, [ids[prompt:]], "ids", [ids[:prompt]])
    elif model.tokenizer is not None:
        parts = model.tokenizer.decode(ids[:prompt]), model.tokenizer.decode(ids[prompt:])
        found = gen_nll(judge, [parts[1]], "text", [parts[0]])
    else:
        return measures
    nll = float(found.mean[0])
    return {"judge": judge.name, "nll": nll, "perplexity": _exp(nll), **measures}


def shares_ids(model: Denoiser, judge: Judge, ids: list[int]) -> bool:
    """Whether judge and model read these ids as the same words."""
    ours, theirs = model.tokenizer, judge.tokenizer
    if ours is None or theirs is None or model.vocab_size != judge.vocab_size:
        return False
    return all(ours.decode([token]) == theirs.decode([token]) for token in set(ids))


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
