"""Requests: pydantic models made from the samplers' parameters; assets/openapi.json describes the rest of the API."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, Union

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.json_schema import models_json_schema
from typing_extensions import TypeAliasType

import limpet
from limpet.errors import LimpetError, unknown_name
from limpet.generation import SEED
from limpet.recording.page import asset
from limpet.samplers import Param, Sampler, describe, params
from limpet.samplers.recommended import MANY_CALLS, SHARPNESS
from limpet.server.handlers import Request
from limpet.server.scheduler import Limits, Refusal

MAX_INTEGER = 2**31 - 1  # of a whole number in a parameter
MAX_NAME = 80  # characters in a sampler's name in a comparison
MAX_SEED = 2**53 - 1  # what every JSON reader keeps exactly
EVENTS = "text/event-stream"
FILE = "application/x-limpet-trajectory"


class Strict(BaseModel):
    """A model without conversions between types and without other fields."""

    model_config = ConfigDict(strict=True, extra="forbid")


class FixedText(Strict):
    position: int = Field(ge=0)
    text: str


@dataclass(frozen=True)
class Offer:
    """What requests can ask for."""

    models: Mapping[str, Mapping[str, Any]]  # facts of each, see `Resources.facts`
    available: Mapping[str, type[Sampler]]
    samplers: Mapping[str, Sampler]  # what is compared by default
    limits: Limits

    def describe(self, sampler: Sampler) -> dict[str, Any]:
        """A sampler under its name on this server, which does not show where its file is."""
        name = next(name for name, kind in self.available.items() if kind is type(sampler))
        return {**sampler.to_dict(), "sampler": name}


def request_models(offer: Offer) -> dict[str, type[BaseModel]]:
    """The model of each kind of request."""
    limits, names = offer.limits, tuple(offer.models)
    kinds: Any = tuple(_sampler_model(name, kind, limits.calls) for name, kind in offer.available.items())
    any_kind: Any = TypeAliasType("Sampler", Annotated[Union[kinds], Field(discriminator="sampler")])  # noqa: UP007
    sampler: Any = Annotated[any_kind, AfterValidator(partial(_build, offer))]
    defaults = {name: offer.describe(default) for name, default in offer.samplers.items()}
    length: Any = Annotated[int, Field(ge=1, le=limits.length)] | None
    common: dict[str, Any] = {
        "model": (Literal[names], names[0]),
        "seed": (int, Field(SEED, ge=0, le=MAX_SEED, description="the same seed gives the same samples")),
        "length": (length, Field(None, description="tokens in a sample; null for the model's default")),
        "prompt": (str, Field("", description="text that every sample begins with")),
        "fixed": (list[FixedText], Field([], max_length=limits.fixed, description="texts fixed at token positions")),
        "score": (bool, Field(True, description="whether the judge scores the samples")),
    }
    one: dict[str, Any] = {
        "sampler": (sampler, Field(list(defaults.values())[-1], validate_default=True)),
        "n": (int, Field(1, ge=1, le=limits.samples, description="number of samples")),
    }
    name: Any = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    several = Field(
        defaults, validate_default=True, min_length=1, max_length=limits.samplers,
        description="samplers by name; all use the same randomness",
    )  # fmt: skip
    return {
        "sample": create_model("SampleRequest", __base__=Strict, **common, **one),
        "compare": create_model("CompareRequest", __base__=Strict, **common, samplers=(dict[name, sampler], several)),
    }


def _sampler_model(name: str, kind: type[Sampler], max_calls: int) -> Any:
    """A sampler's parameters as fields; their names are aliases, so that a parameter may have any name."""
    fields: dict[str, Any] = {"sampler": (Literal[name], ...)}
    for param in params(kind).values():
        default = ... if param.default is None and not param.optional else param.default
        if param.name == "nfe":
            default = default if default is ... else min(default, max_calls)
            param = replace(param, high=max_calls if param.high is None else min(max_calls, param.high))
        about = Field(default, alias=param.name, description=param.help or None)
        fields[f"param_{param.name}"] = _value_type(param), about
    return create_model(name, __base__=Strict, __doc__=kind.__doc__, **fields)


def _value_type(param: Param) -> Any:
    low, high = param.low, param.high
    if param.kind is int:
        low = -MAX_INTEGER if low is None else low
        high = MAX_INTEGER if high is None else min(high, MAX_INTEGER)
    kind: Any = Literal[param.choices] if param.choices else param.kind
    if param.kind in (int, float):
        kind = Annotated[param.kind, Field(ge=low, le=high, gt=param.above)]
    return kind | None if param.optional else kind


def page_data(offer: Offer) -> dict[str, Any]:
    """What the playground's page must know."""
    return {
        "models": list(offer.models.values()),
        "version": limpet.__version__,
        "seed": SEED,
        "sharpness": SHARPNESS,
        "many_calls": MANY_CALLS,
        "limits": {**asdict(offer.limits), "seed": MAX_SEED},
        "samplers": {name: offer.describe(sampler) for name, sampler in offer.samplers.items()},
        "params": {
            name: [{**asdict(param), "kind": param.kind.__name__} for param in params(kind).values()]
            for name, kind in offer.available.items()
        },
        "descriptions": {name: describe(kind) for name, kind in offer.available.items()},
    }


# Reading a request


def read_json(body: bytes) -> Any:
    """A JSON document without NaN, infinity, overflowing numbers and lone surrogates."""

    def finite(text: str) -> float:
        if not math.isfinite(value := float(text)):
            raise ValueError(f"{text[:20]} is not a finite number")
        return value

    try:
        value = json.loads(body.decode("utf-8"), parse_constant=finite, parse_float=finite)
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise Refusal(422, "the request has half of a character (a lone surrogate): send whole ones") from error
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the request is not JSON in UTF-8 ({error}): send one JSON object") from error
    return value


def read(body: bytes, model: type[BaseModel], offer: Offer) -> Request:
    """A request with every field checked; an error says what to correct."""
    try:
        values = dict(model.model_validate(read_json(body)))
    except ValidationError as error:
        found = error.errors(include_url=False)
        first = next((one for one in found if one["type"] == "extra_forbidden"), found[0])  # perhaps misspelt
        raise LimpetError(_sentence(first, model, offer)) from error
    facts, sampler, samplers = offer.models[values["model"]], values.pop("sampler", None), values.pop("samplers", {})
    length = values.pop("length") or facts["length"]
    if length > offer.limits.length:
        raise LimpetError(f"{facts['name']} writes {length} tokens, and this server at most {offer.limits.length}")
    if not facts["any_length"] and length != facts["length"]:
        raise LimpetError(f"{facts['name']} writes {facts['length']} tokens, not {length}: leave length out")
    samplers = samplers or {sampler.caption: sampler}
    samplers = {name: one.clamped(length, facts["vocab_size"]) for name, one in samplers.items()}
    described = {name: offer.describe(one) for name, one in samplers.items()}
    fixed: dict[int, str] = {}
    for place in values.pop("fixed"):
        if place.position in fixed:
            raise LimpetError(f"position {place.position} is fixed twice: leave one of the texts out")
        fixed[place.position] = place.text
    return Request(**{"n": 1, **values, "samplers": samplers, "described": described, "length": length, "fixed": fixed})


def _build(offer: Offer, model: BaseModel) -> Sampler:
    """The sampler with these parameters; its class checks them together."""
    values = model.model_dump(by_alias=True)
    sampler = offer.available[values.pop("sampler")](**values)
    if sampler.nfe > offer.limits.calls:
        raise LimpetError(f"it asks for {sampler.nfe} calls, and this server makes at most {offer.limits.calls}")
    return sampler


def brief(value: Any) -> str:
    """A value, short enough for a sentence."""
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _sentence(error: Mapping[str, Any], model: type[BaseModel], offer: Offer) -> str:
    """One error of pydantic in plain words."""
    loc, value = error["loc"], error["input"]
    inside, where = (brief(".".join(map(str, part))).strip('"') or "the request" for part in (loc[:-1], loc))
    if error["type"] == "extra_forbidden":
        own: Any = FixedText.model_fields if loc[0] == "fixed" else model.model_fields
        is_param = loc[0] in ("sampler", "samplers") and len(loc) > 1
        known = params(offer.available[loc[-2]]) if is_param else own
        return str(unknown_name(f"{inside} has no field", brief(loc[-1]).strip('"'), known))
    if error["type"].startswith("union_tag"):
        return f"{where} names the sampler {brief(value.get('sampler'))}; here are {', '.join(offer.available)}"
    if error["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return f"{where} is {brief(value)}; it takes an object"
    if error["type"] == "value_error":  # of a sampler's own check
        return f"in {where}: {error['ctx']['error']}"
    message = error["msg"].replace("Input", "it", 1).replace("Dictionary", "it")
    return f"{where} is {brief(value)}; {message[0].lower()}{message[1:].replace(' after validation', '')}"


def openapi(models: Mapping[str, type[BaseModel]]) -> dict[str, Any]:
    """The description of the whole API, as OpenAPI 3.1."""
    document: dict[str, Any] = json.loads(asset("openapi.json", "limpet.server"))
    kinds: Any = [(model, "validation") for model in models.values()]
    _, requests = models_json_schema(kinds, ref_template="#/components/schemas/{model}")
    document["info"]["version"] = limpet.__version__
    document["components"]["schemas"] |= requests["$defs"]
    return document
