"""The OpenAI-compatible API: reading of requests, and the form of answers, streams and errors."""

from __future__ import annotations

import hmac
import json
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
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
ROLES = ("system", "developer", "user", "assistant")
NEUTRAL: dict[str, tuple[Any, ...]] = {  # what other engines do; a request may say that it does not want it
    "best_of": (1,), "echo": (False,), "logprobs": (False,), "top_logprobs": (0,), "frequency_penalty": (0,),
    "presence_penalty": (0,), "logit_bias": ({},), "tools": ([],), "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},), "parallel_tool_calls": (True, False), "modalities": (["text"],),
}  # fmt: skip
IGNORED = ("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key")
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}

Check = Callable[[Any], bool]  # whether a field takes a value


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


def _whole(low: int, high: float = float("inf")) -> Check:
    return lambda value: type(value) is int and low <= value <= high


def _a(*kinds: type) -> Check:
    return lambda value: type(value) in kinds


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str) or _is_ids(value):
        return True
    return isinstance(value, list) and (all(isinstance(one, str) for one in value) or all(map(_is_ids, value)))


def _is_stop(value: Any) -> bool:
    texts = [value] if isinstance(value, str) else value
    return isinstance(texts, list) and len(texts) <= MAX_STOPS and all(isinstance(one, str) and one for one in texts)


def _is_message(value: Any) -> bool:
    parts = value.get("content") if isinstance(value, dict) and value.get("role") in ROLES else None
    if isinstance(parts, list):
        return all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts)
    return isinstance(parts, str)


COUNT = "a whole number from 1", _whole(1)
COMMON: dict[str, tuple[str, Check]] = {  # field -> what it takes; null means the default
    "model": ("the name of a model", _a(str)),
    "n": COUNT,
    "seed": (f"a whole number from 0 to {MAX_SEED}", _whole(0, MAX_SEED)),
    "max_tokens": COUNT,
    "stop": (f"a text, or at most {MAX_STOPS} texts, none of them empty", _is_stop),
    "temperature": ("a number", _a(int, float)),
    "top_p": ("a number", _a(int, float)),
    "stream": ("true or false", _a(bool)),
    "stream_options": ("an object", _a(dict)),
    "sampler": ("a sampler's name, or an object", _a(str, dict)),  # limpet's own, as those below
    "nfe": ("a whole number from 2", _whole(2)),
    "sharpness": ("a number from 0 to 1", lambda value: _a(int, float)(value) and 0 <= value <= 1),
    "steps": ("true or false", _a(bool)),
}
FIELDS = {
    "completion": COMMON | {
        "prompt": ("a text, texts, token ids, or lists of them", _is_prompt), "suffix": ("a text", _a(str))
    },
    "chat": COMMON | {
        "messages": (
            f"a list of messages, each with content and a role of {', '.join(ROLES)}",
            lambda value: isinstance(value, list) and bool(value) and all(map(_is_message, value)),
        ),
        "max_completion_tokens": COUNT,
    },
}  # fmt: skip


def read(body: bytes, kind: str, offer: Offer) -> tuple[dict[str, Any], TextRequest]:
    """The fields of a request for a completion or a chat, and the work that they ask for. An error names the field."""
    values, own, limits = read_json(body), {}, offer.limits
    if not isinstance(values, dict):
        raise ApiError(f"the request is {brief(values)}; it takes an object")
    for name, value in values.items():
        if name in NEUTRAL and not (value is None or value in NEUTRAL[name]):
            raise ApiError(f"{name} is not supported here: leave it out", name, "unsupported_parameter")
        if name not in FIELDS[kind].keys() | NEUTRAL.keys() | {*IGNORED}:
            shown = brief(name).strip('"')
            sentence = str(unknown_name("the request has no field", shown, FIELDS[kind]))
            raise ApiError(sentence, shown, "unknown_parameter")
        if name in FIELDS[kind] and value is not None:
            takes, accepts = FIELDS[kind][name]
            if not accepts(value):
                raise ApiError(f"{name} is {brief(value)}; it takes {takes}", name)
            own[name] = value
    model = own.setdefault("model", next(iter(offer.models)))
    if model not in offer.models:
        raise unknown_model(model, offer)
    if kind == "chat" and not offer.models[model]["is_canvas"]:
        raise ApiError(f"{model} has no chat template: use /v1/completions", "model", "model_not_supported")
    if kind == "chat" and "messages" not in own:
        raise ApiError("the request has no messages: give at least one", "messages")
    prompts, n = _prompts(own), own.get("n", 1)
    if n * len(prompts) > limits.samples:
        raise ApiError(f"this asks for {n * len(prompts)} samples, and this server draws at most {limits.samples}", "n")
    sampler, nfe = _sampler(own, offer), own.get("nfe", min(CALLS, limits.calls))
    if sampler is not None and "sharpness" in own:
        raise ApiError("sharpness chooses the sampler: leave it out, or sampler, temperature and top_p", "sharpness")
    if (calls := nfe if sampler is None else sampler.nfe) > limits.calls:
        raise ApiError(f"this asks for {calls} calls, and this server makes at most {limits.calls}", "nfe")
    return own, TextRequest(
        model=model, prompts=prompts, suffix=own.get("suffix", ""), sampler=sampler,
        described=None if sampler is None else offer.describe(sampler), nfe=nfe, n=n,
        seed=own.get("seed", secrets.randbelow(MAX_SEED + 1)), limit=limits.length,
        max_tokens=own.get("max_completion_tokens", own.get("max_tokens")),
        sharpness=own.get("sharpness"), steps=own.get("stream", False) and own.get("steps", False),
    )  # fmt: skip


def _prompts(own: Mapping[str, Any]) -> tuple[Any, ...]:
    """What is completed: texts, ids, or a chat."""
    if "messages" in own:
        contents = [
            one["content"] if isinstance(one["content"], str) else "".join(part["text"] for part in one["content"])
            for one in own["messages"]
        ]
        pairs = zip(own["messages"], contents, strict=True)
        return (tuple({"role": one["role"], "content": content} for one, content in pairs),)
    prompt = own.get("prompt", "")
    several = [prompt] if isinstance(prompt, str) or _is_ids(prompt) else prompt
    return tuple(tuple(one) if isinstance(one, list) else one for one in several)


def _sampler(own: Mapping[str, Any], offer: Offer) -> Sampler | None:
    """The sampler that a request names, by a text such as "crs budget=.25" or an object; None for the default."""
    named = own.get("sampler", {})
    changes = {name: own[name] for name in ("nfe", "temperature", "top_p") if name in own}
    if not named and changes.keys() <= {"nfe"}:
        return None
    name, *settings = (named.split() or [""]) if isinstance(named, str) else [named.get("sampler", "native")]
    if not isinstance(name, str) or name not in offer.available:
        raise ApiError(f"there is no sampler {brief(name)}; here are {', '.join(offer.available)}", "sampler")
    kind, values = offer.available[name], {"nfe": min(CALLS, offer.limits.calls)}
    values |= {key: value for key, value in named.items() if key != "sampler"} if isinstance(named, dict) else {}
    try:
        for param, text in assigned(kind, name, settings, "sampler", "after its name come parameters such as nfe=16"):
            values[param.name] = param.read(text)
        check_names(kind, values := values | changes, name)
        return kind(**values)
    except LimpetError as error:
        raise ApiError(str(error), "sampler") from error


def unknown_model(name: str, offer: Offer) -> ApiError:
    """The error for a model that is not served."""
    sentence = f"the model {brief(name)} is not served here; these are: {', '.join(offer.models)}"
    return ApiError(sentence, "model", "model_not_found", 404)


# Answers


@dataclass(frozen=True)
class Answers:
    """The answers to one request: its completion, or the chunks of a stream."""

    fields: Mapping[str, Any]  # of the request
    request: TextRequest
    digest: str  # of the model
    metrics: Metrics
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def is_chat(self) -> bool:
        return "messages" in self.fields

    def cut(self, text: str) -> tuple[str, bool]:
        """A text up to the first stop, and whether there is one."""
        ends = [place for stop in self.stops if (place := text.find(stop)) >= 0]
        return (text[: min(ends)], True) if ends else (text, False)

    @property
    def stops(self) -> list[str]:
        stop = self.fields.get("stop", [])
        return [stop] if isinstance(stop, str) else stop

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
            "model": self.request.model, "system_fingerprint": self.digest[:16], "choices": choices, **more,
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
            text, is_stopped = self.cut(choice["text"])
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
            _, is_stopped = self.cut(choice["text"])
            if delta := self._final(index, choice["text"], sent, is_last=True):
                yield _data(self._document(True, [self._choice(index, delta, None, "delta")]))
            reason = "stop" if is_stopped else choice["finish_reason"]
            yield _data(self._document(True, [self._choice(index, "", reason, "delta")]))
        about = self._about(result)
        if not self.fields.get("stream_options", {}).get("include_usage"):
            del about["usage"]
        yield _data(self._document(True, [], **about))
        yield "data: [DONE]\n\n"

    def _final(self, index: int, text: str, sent: dict[int, int], is_last: bool) -> str:
        """What of a text can be sent now: no later token changes it, and it begins no stop."""
        text, is_stopped = self.cut(text)
        if not (is_last or is_stopped):
            text = text[: len(text) - max(map(len, self.stops), default=1) + 1].rstrip("\ufffd")
        start = sent.get(index, 0)
        sent[index] = max(start, len(text))
        return text[start:]


def _data(document: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(document, ensure_ascii=True, allow_nan=False)}\n\n"


def models(facts: Mapping[str, Mapping[str, Any]], created: int) -> dict[str, Any]:
    """The list of models."""
    listed = [{"id": name, "object": "model", "created": created, "owned_by": "limpet"} for name in facts]
    return {"object": "list", "data": listed}
