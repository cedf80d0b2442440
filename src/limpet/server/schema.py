"""How requests are written: pydantic models made from the samplers' parameters; assets/openapi.json describes the rest."""

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

from limpet.errors import LimpetError, unknown
from limpet.recording.page import asset
from limpet.samplers import Param, Sampler, params, words
from limpet.server.handlers import Request
from limpet.server.scheduler import Limits, Refusal

MOST_WHOLE = 2**31 - 1  # of a whole number in a parameter
MOST_NAME = 80  # characters in an arm's name
MOST_SEED = 2**53 - 1  # of a seed: what every JSON reader keeps exactly
EVENTS = "text/event-stream"
FILE = "application/x-limpet-trajectory"

Shape = type[BaseModel]


class Strict(BaseModel):
    """Every value of its own kind, and no field but those named."""

    model_config = ConfigDict(strict=True, extra="forbid")


class Place(Strict):
    position: int = Field(ge=0)
    text: str


@dataclass(frozen=True)
class Offer:
    """All that can be asked for."""

    models: Mapping[str, Mapping[str, Any]]  # facts of each, as `Stock.facts` has them
    samplers: Mapping[str, type[Sampler]]
    arms: Mapping[str, Sampler]  # what is compared unless told
    limits: Limits

    def written(self, sampler: Sampler) -> dict[str, Any]:
        """A sampler under the name that it has here: where its file lies is nobody's business."""
        name = next(name for name, kind in self.samplers.items() if kind is type(sampler))
        return {**sampler.to_dict(), "sampler": name}


def shapes(offer: Offer) -> dict[str, Shape]:
    """What this server reads, by the route's name."""
    limits, names = offer.limits, tuple(offer.models)
    kinds: Any = tuple(_sampler(name, kind, limits.calls) for name, kind in offer.samplers.items())
    written: Any = TypeAliasType("Sampler", Annotated[Union[kinds], Field(discriminator="sampler")])  # noqa: UP007
    arm: Any = Annotated[written, AfterValidator(partial(_built, offer))]
    arms = {name: offer.written(sampler) for name, sampler in offer.arms.items()}
    common: dict[str, Any] = {
        "model": (Literal[names], names[0]),
        "seed": (int, Field(8200, ge=0, le=MOST_SEED, description="the same seed gives the same samples")),
        "length": (Annotated[int, Field(ge=1, le=limits.length)] | None,
                   Field(None, description="tokens in a sample; null for the model's own")),
        "prompt": (str, Field("", description="text that every sample begins with")),
        "fixed": (list[Place], Field([], max_length=limits.fixed, description="words held at token positions")),
        "score": (bool, Field(True, description="score the texts under the judge")),
    }  # fmt: skip
    sample: dict[str, Any] = {
        "arm": (arm, Field(list(arms.values())[-1], validate_default=True)),
        "n": (int, Field(1, ge=1, le=limits.samples, description="how many samples")),
    }
    compare: dict[str, Any] = {
        "arms": (dict[Annotated[str, Field(min_length=1, max_length=MOST_NAME)], arm],
                 Field(arms, validate_default=True, min_length=1, max_length=limits.arms,
                       description="samplers by name; all share their randomness")),
    }  # fmt: skip
    return {
        "sample": create_model("SampleRequest", __base__=Strict, **common, **sample),
        "compare": create_model("CompareRequest", __base__=Strict, **common, **compare),
    }


def _sampler(name: str, kind: type[Sampler], calls: int) -> Any:
    """A sampler's parameters as fields. Their names are aliases, so that a parameter may have any."""
    fields: dict[str, Any] = {"sampler": (Literal[name], ...)}
    for param in params(kind).values():
        default = ... if param.default is None and not param.optional else param.default
        if param.name == "nfe":
            default = default if default is ... else min(default, calls)
            param = replace(param, high=calls if param.high is None else min(calls, param.high))
        fields[f"knob_{param.name}"] = _kind(param), Field(default, alias=param.name, description=param.words or None)
    return create_model(name, __base__=Strict, __doc__=kind.__doc__, **fields)


def _kind(param: Param) -> Any:
    """The type of a parameter's values."""
    low, high, most = param.low, param.high, MOST_WHOLE
    if param.kind is int:
        low, high = -most if low is None else low, most if high is None else min(high, most)
    kind: Any = Literal[param.choices] if param.choices else param.kind
    if param.kind in (int, float):
        kind = Annotated[param.kind, Field(ge=low, le=high, gt=param.above)]
    return kind | None if param.optional else kind


def about(offer: Offer, version: str) -> dict[str, Any]:
    """What the playground's page must know."""
    return {
        "models": list(offer.models.values()), "version": version,
        "limits": {**asdict(offer.limits), "seed": MOST_SEED},
        "arms": {name: offer.written(sampler) for name, sampler in offer.arms.items()},
        "samplers": {name: [{**asdict(param), "kind": param.kind.__name__} for param in params(kind).values()]
                     for name, kind in offer.samplers.items()},
        "words": {name: words(kind) for name, kind in offer.samplers.items()},
    }  # fmt: skip


# Reading a request


def read_json(body: bytes) -> Any:
    """A JSON document without NaN, infinities, numbers too large to be kept, or halves of characters."""

    def number(text: str) -> float:
        if not math.isfinite(value := float(text)):
            raise ValueError(f"{text[:20]} is no number that it can hold")
        return value

    try:
        value = json.loads(body.decode("utf-8"), parse_constant=number, parse_float=number)
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise Refusal(422, "the request holds half a character (a lone surrogate): send whole ones") from error
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the request is not JSON in UTF-8 ({error}): send one JSON object") from error
    return value


def read(body: bytes, shape: Shape, offer: Offer) -> Request:
    """A request, every field checked; an error says what to mend."""
    try:
        values = dict(shape.model_validate(read_json(body)))
    except ValidationError as error:
        found = error.errors(include_url=False)
        first = next((one for one in found if one["type"] == "extra_forbidden"), found[0])  # perhaps misspelt
        raise LimpetError(_sentence(first, shape, offer)) from error
    model, arm, arms = offer.models[values["model"]], values.pop("arm", None), values.pop("arms", {})
    length = values.pop("length") or model["length"]
    if length > offer.limits.length:
        raise LimpetError(f"{model['name']} writes {length} tokens, and this server at most {offer.limits.length}")
    if not model["any_length"] and length != model["length"]:
        raise LimpetError(f"{model['name']} writes {model['length']} tokens, not {length}: leave length out")
    arms = {name: one.fitted(length, model["vocab_size"]) for name, one in (arms or {arm.caption: arm}).items()}
    written = {name: offer.written(one) for name, one in arms.items()}
    fixed = [(place.position, place.text) for place in values.pop("fixed")]
    return Request(**{"n": 1, **values, "arms": arms, "written": written, "length": length, "fixed": fixed})


def _built(offer: Offer, arm: BaseModel) -> Sampler:
    """The sampler of these parameters, which has its own check of what they are together."""
    params = arm.model_dump(by_alias=True)
    sampler = offer.samplers[params.pop("sampler")](**params)
    if sampler.nfe > offer.limits.calls:
        raise LimpetError(f"it asks for {sampler.nfe} calls, and this server makes at most {offer.limits.calls}")
    return sampler


def _brief(value: Any) -> str:
    """What was given, short enough for a sentence."""
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _sentence(error: Mapping[str, Any], shape: Shape, offer: Offer) -> str:
    """The first thing to mend."""
    loc, given = error["loc"], error["input"]
    inside, where = (_brief(".".join(map(str, part))).strip('"') or "the request" for part in (loc[:-1], loc))
    if error["type"] == "extra_forbidden":
        here: Any = Place.model_fields if loc[0] == "fixed" else shape.model_fields
        known = params(offer.samplers[loc[-2]]) if loc[0] in ("arm", "arms") and len(loc) > 1 else here
        return str(unknown(f"{inside} has no field", _brief(loc[-1]).strip('"'), known))
    if error["type"].startswith("union_tag"):
        return f"{where} names the sampler {_brief(given.get('sampler'))}; here are {', '.join(offer.samplers)}"
    if error["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return f"{where} is {_brief(given)}; it takes an object"
    if error["type"] == "value_error":  # a sampler's own
        return f"in {where}: {error['ctx']['error']}"
    what = error["msg"].replace("Input", "it", 1).replace("Dictionary", "it")
    return f"{where} is {_brief(given)}; {what[0].lower()}{what[1:].replace(' after validation', '')}"


def description(shapes: Mapping[str, Shape], version: str) -> dict[str, Any]:
    """The whole API, as OpenAPI 3.1."""
    document: dict[str, Any] = json.loads(asset("openapi.json", "limpet.server"))
    kinds: Any = [(shape, "validation") for shape in shapes.values()]
    _, read = models_json_schema(kinds, ref_template="#/components/schemas/{model}")
    document["info"]["version"] = version
    document["components"]["schemas"] |= read["$defs"]
    return document
