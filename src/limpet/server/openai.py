"""The OpenAI-compatible API: reading of requests, and the form of answers, streams and errors."""

from __future__ import annotations

import hmac
import json
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from limpet.errors import LimpetError, unknown_name
from limpet.samplers import Sampler
from limpet.samplers.names import assigned
from limpet.samplers.params import check_names
from limpet.server.completions import TextRequest
from limpet.server.metrics import Metrics
from limpet.server.scheduler import Refusal, RequestJob
from limpet.server.schema import MAX_SEED, Offer, brief, read_json

CALLS = 64  # default network calls
MAX_STOPS = 4
MAX_PROMPTS = 64
ROLES = ("system", "developer", "user", "assistant")
NEUTRAL: dict[str, tuple[Any, ...]] = {  # what other engines do; a request may say that it does not want it
    "best_of": (1,), "echo": (False,), "logprobs": (False,), "top_logprobs": (0,), "frequency_penalty": (0,),
    "presence_penalty": (0,), "logit_bias": ({},), "tools": ([],), "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},), "parallel_tool_calls": (True, False), "modalities": (["text"],),
}  # fmt: skip
IGNORED = ("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key")
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Refusal):
    """A refusal that names the parameter that is wrong, and a code that programs can read."""

    def __init__(self, sentence: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(status, sentence, {"WWW-Authenticate": "Bearer"} if status == 401 else None)
        self.param, self.code = param, code


def error_body(error: LimpetError, status: int) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}


def check_key(key: str | None, header: str) -> None:
    """Raise unless an Authorization header holds the key, if there is one. The comparison takes constant time."""
    scheme, _, credentials = header.partition(" ")
    if key is not None and not (
        hmac.compare_digest(credentials.strip().encode("latin-1", "replace"), key.encode())
        and scheme.lower() == "bearer"
    ):
        raise ApiError(
            "the API key is missing or wrong: send it as Authorization: Bearer KEY", None, "invalid_api_key", 401
        )


# Requests


def _is_whole(low: int, high: float = float("inf")) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value <= high


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


def _is_prompts(value: Any) -> bool:
    several = isinstance(value, list) and len(value) <= MAX_PROMPTS
    return several and (all(isinstance(one, str) for one in value) or all(map(_is_ids, value)))


def _is_stop(value: Any) -> bool:
    texts = [value] if isinstance(value, str) else value
    return isinstance(texts, list) and len(texts) <= MAX_STOPS and all(isinstance(one, str) and one for one in texts)


def _is_message(value: Any) -> bool:
    parts = value.get("content") if isinstance(value, dict) else None
    content = isinstance(parts, str) or (
        isinstance(parts, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts)
    )
    return content and value.get("role") in ROLES


def takes(default: Any, what: str, accepts: Callable[[Any], bool]) -> Any:
    """A field of a request: its default, what it takes, and whether it takes a value. null means the default."""
    return field(default_factory=lambda: default, metadata={"takes": what, "accepts": accepts})


@dataclass(frozen=True)
class Body:
    """The fields of every request. Those after `stream_options` are limpet's own."""

    model: str = takes("", "the name of a model", lambda value: isinstance(value, str))
    n: int = takes(1, "a whole number from 1", _is_whole(1))
    seed: int | None = takes(None, f"a whole number from 0 to {MAX_SEED}", _is_whole(0, MAX_SEED))
    max_tokens: int | None = takes(None, "a whole number from 1", _is_whole(1))
    stop: Any = takes(None, f"a text, or at most {MAX_STOPS} texts, none of them empty", _is_stop)
    temperature: float | None = takes(None, "a number", _is_number)
    top_p: float | None = takes(None, "a number", _is_number)
    stream: bool = takes(False, "true or false", lambda value: type(value) is bool)
    stream_options: dict[str, Any] = takes({}, "an object", lambda value: isinstance(value, dict))
    sampler: Any = takes(None, "a sampler's name, or an object", lambda value: isinstance(value, str | dict))
    nfe: int | None = takes(None, "a whole number from 2", _is_whole(2))
    steps: bool = takes(False, "true or false", lambda value: type(value) is bool)

    suffix = ""

    @property
    def prompts(self) -> tuple[Any, ...]:
        """What is completed: texts, ids, or a chat."""
        raise NotImplementedError

    @property
    def stops(self) -> list[str]:
        """The texts that end a completion."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


@dataclass(frozen=True)
class CompletionBody(Body):
    """A request for `/v1/completions`."""

    prompt: Any = takes(
        "", "a text, texts, token ids, or lists of them", lambda v: isinstance(v, str) or _is_ids(v) or _is_prompts(v)
    )
    suffix: str = takes("", "a text", lambda value: isinstance(value, str))

    @property
    def prompts(self) -> tuple[Any, ...]:
        """One prompt, or several."""
        several = [self.prompt] if isinstance(self.prompt, str) or _is_ids(self.prompt) else self.prompt
        return tuple(tuple(one) if isinstance(one, list) else one for one in several or [""])


@dataclass(frozen=True)
class ChatBody(Body):
    """A request for `/v1/chat/completions`."""

    messages: Any = takes(
        None, f"a list of messages, each with content and a role of {', '.join(ROLES)}",
        lambda value: isinstance(value, list) and bool(value) and all(map(_is_message, value)),
    )  # fmt: skip
    max_completion_tokens: int | None = takes(None, "a whole number from 1", _is_whole(1))

    @property
    def prompts(self) -> tuple[Any, ...]:
        """The chat."""

        def text(content: Any) -> str:
            return content if isinstance(content, str) else "".join(part["text"] for part in content)

        return (tuple({"role": one["role"], "content": text(one["content"])} for one in self.messages),)


def read(body: bytes, kind: type[Body], offer: Offer) -> tuple[Any, TextRequest]:
    """The fields of a request and the work that they ask for. An error names the field."""
    values = read_json(body)
    if not isinstance(values, dict):
        raise ApiError(f"the request is {brief(values)}; it takes an object")
    known = {one.name: one.metadata for one in fields(kind)}
    own = {}
    for name, value in values.items():
        if name in NEUTRAL and (value is None or value in NEUTRAL[name]):
            continue
        if name in NEUTRAL:
            raise ApiError(f"{name} is not supported here: leave it out", name, "unsupported_parameter")
        if name in known and value is not None:
            if not known[name]["accepts"](value):
                raise ApiError(f"{name} is {brief(value)}; it takes {known[name]['takes']}", name)
            own[name] = value
        elif name not in known and name not in IGNORED:
            raise ApiError(
                str(unknown_name("the request has no field", name, known)), brief(name).strip('"'), "unknown_parameter"
            )
    found = kind(**own)
    model = found.model or next(iter(offer.models))
    if model not in offer.models:
        raise unknown_model(model, offer)
    if isinstance(found, ChatBody) and not offer.models[model]["is_canvas"]:
        raise ApiError(f"{model} has no chat template: use /v1/completions", "model", "model_not_supported")
    if isinstance(found, ChatBody) and found.messages is None:
        raise ApiError("the request has no messages: give at least one", "messages")
    if found.n * len(found.prompts) > offer.limits.samples:
        raise ApiError(f"this asks for {found.n * len(found.prompts)} samples; {offer.limits.samples} is the most", "n")
    sampler = _sampler(found, offer)
    nfe = min(CALLS, offer.limits.calls) if found.nfe is None else found.nfe
    if (nfe if sampler is None else sampler.nfe) > offer.limits.calls:
        raise ApiError(f"this asks for {nfe} network calls; {offer.limits.calls} is the most", "nfe")
    return replace(found, model=model), TextRequest(
        model=model, prompts=found.prompts, suffix=found.suffix, sampler=sampler,
        described=None if sampler is None else offer.describe(sampler), nfe=nfe, n=found.n,
        seed=secrets.randbelow(MAX_SEED + 1) if found.seed is None else found.seed,
        max_tokens=getattr(found, "max_completion_tokens", None) or found.max_tokens, limit=offer.limits.length,
        steps=found.stream and found.steps,
    )  # fmt: skip


def unknown_model(name: str, offer: Offer) -> ApiError:
    """The error for a model that is not served."""
    sentence = f"the model {brief(name)} is not served here; these are: {', '.join(offer.models)}"
    return ApiError(sentence, "model", "model_not_found", 404)


def _sampler(body: Body, offer: Offer) -> Sampler | None:
    """The sampler that a request names, by a text such as "crs budget=.25" or an object; None for the default."""
    named = body.sampler or {}
    changes = {"nfe": body.nfe, "temperature": body.temperature, "top_p": body.top_p}
    changes = {name: value for name, value in changes.items() if value is not None}
    if not named and changes.keys() <= {"nfe"}:
        return None
    name, *settings = named.split() or [""] if isinstance(named, str) else [named.get("sampler", "native")]
    if not isinstance(name, str) or name not in offer.available:
        raise ApiError(f"there is no sampler {brief(name)}; here are {', '.join(offer.available)}", "sampler")
    kind = offer.available[name]
    own = {key: value for key, value in named.items() if key != "sampler"} if isinstance(named, dict) else {}
    try:
        for param, text in assigned(kind, name, settings, "sampler", "after its name come parameters such as nfe=16"):
            own[param.name] = param.read(text)
        check_names(kind, own := {"nfe": min(CALLS, offer.limits.calls), **own, **changes}, name)
        return kind(**own)
    except LimpetError as error:
        raise ApiError(str(error), "sampler") from error


# Answers


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """A text up to the first of the stops, and whether there was one."""
    ends = [place for stop in stops if (place := text.find(stop)) >= 0]
    return (text[: min(ends)], True) if ends else (text, False)


@dataclass(frozen=True)
class Answers:
    """The answers to one request: its completion, or the chunks of a stream."""

    body: Any
    request: TextRequest
    digest: str  # of the model
    metrics: Metrics
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def is_chat(self) -> bool:
        return isinstance(self.body, ChatBody)

    def _document(self, is_chunk: bool, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        kind = (
            "chat.completion.chunk"
            if self.is_chat and is_chunk
            else "chat.completion"
            if self.is_chat
            else "text_completion"
        )
        return {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.id}", "object": kind, "created": self.created,
            "model": self.body.model, "system_fingerprint": self.digest[:16], "choices": choices, **more,
        }  # fmt: skip

    def _choice(self, index: int, text: str, reason: str | None, part: str) -> dict[str, Any]:
        content = {part: {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
        return {"index": index, **content, "logprobs": None, "finish_reason": reason}

    def _about(self, result: Mapping[str, Any]) -> dict[str, Any]:
        written = sum(choice["tokens"] for choice in result["choices"])
        prompt = result["prompt_tokens"]
        self.metrics.add("limpet_prompt_tokens_total", prompt)
        self.metrics.add("limpet_completion_tokens_total", written)
        return {
            "usage": {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written},
            "limpet": {"sampler": result["sampler"], "nfe": result["nfe"], "seed": self.request.seed},
        }

    def whole(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request that is no stream."""
        choices = []
        for index, choice in enumerate(result["choices"]):
            text, is_stopped = cut(choice["text"], self.body.stops)
            choices.append(self._choice(index, text, "stop" if is_stopped else choice["finish_reason"], "message"))
        return self._document(False, choices, **self._about(result))

    async def chunks(self, job: RequestJob, event: tuple[str, Any] | None) -> AsyncIterator[str]:
        """The stream: text that is final, as it becomes known, and `[DONE]`. event: the first of the job."""
        sent: dict[int, int] = {}
        while event is not None:
            kind, data = event
            if kind == "text":
                if delta := self._final(data["index"], data["text"], sent, is_last=False):
                    yield _data(self._document(True, [self._choice(data["index"], delta, None, "delta")]))
            else:  # the text after a network call, which later calls may change
                yield _data(self._document(True, [self._choice(data["index"], "", None, "delta")], limpet=data))
            event = await job.events.get()
        error = job.future.exception()
        if error is not None:
            known = error if isinstance(error, LimpetError) else LimpetError("the request was stopped")
            yield _data(error_body(known, getattr(error, "status", 400)))
            return
        result = job.future.result()
        for index, choice in enumerate(result["choices"]):
            _, is_stopped = cut(choice["text"], self.body.stops)
            if delta := self._final(index, choice["text"], sent, is_last=True):
                yield _data(self._document(True, [self._choice(index, delta, None, "delta")]))
            reason = "stop" if is_stopped else choice["finish_reason"]
            yield _data(self._document(True, [self._choice(index, "", reason, "delta")]))
        about = self._about(result)
        if not self.body.stream_options.get("include_usage"):
            del about["usage"]
        yield _data(self._document(True, [], **about))
        yield "data: [DONE]\n\n"

    def _final(self, index: int, text: str, sent: dict[int, int], is_last: bool) -> str:
        """What of a text can be sent now: no later token changes it, and it begins no stop."""
        text, is_stopped = cut(text, self.body.stops)
        if not (is_last or is_stopped):
            text = text[: len(text) - max(map(len, self.body.stops), default=1) + 1].rstrip("\ufffd")
        start = sent.get(index, 0)
        sent[index] = max(start, len(text))
        return text[start:]


def _data(document: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(document, ensure_ascii=True, allow_nan=False)}\n\n"


def models(facts: Mapping[str, Mapping[str, Any]], created: int) -> dict[str, Any]:
    """The list of models."""
    listed = [{"id": name, "object": "model", "created": created, "owned_by": "limpet"} for name in facts]
    return {"object": "list", "data": listed}
