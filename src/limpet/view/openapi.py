"""The OpenAPI description of the playground's API, made from the policy, the limits and the models at hand."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args

from limpet import policy as policies
from limpet.policy import Policy
from limpet.support import Boundary
from limpet.view.jobs import MOST_NAME, MOST_SEED, MOST_WHOLE, Limits
from limpet.view.trajectory import VERSION

EVENTS = "text/event-stream"
FILE = "application/x-limpet-trajectory"


def description(limits: Limits, models: list[str], version: str) -> dict[str, Any]:
    length = _whole(1, limits.length, "tokens in a sample; null for the model's own")
    place = {"position": _whole(0, limits.length - 1), "text": {"type": "string"}}
    ask = {
        "model": {"type": "string", "enum": models, "default": models[0]},
        "seed": _whole(0, MOST_SEED, "the same seed gives the same samples"),
        "length": {**length, "type": ["integer", "null"]},
        "prompt": {"type": "string", "default": "", "description": "text that every sample begins with"},
        "fixed": {
            "type": "array", "maxItems": limits.fixed, "default": [], "description": "words held at token positions",
            "items": _object(place, "position", "text"),
        },
        "score": {"type": "boolean", "default": True, "description": "score the texts under the judge"},
    }  # fmt: skip
    arms = {
        "type": "object", "minProperties": 1, "maxProperties": limits.arms, "additionalProperties": _ref("Policy"),
        "propertyNames": {"minLength": 1, "maxLength": MOST_NAME},
        "description": "policies by name; all share their randomness",
    }  # fmt: skip
    samples = {"policy": _ref("Policy"), "n": _whole(1, limits.samples, "how many samples")}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "limpet",
            "version": version,
            "description": "Sample uniform-state discrete diffusion language models, and watch the steps.",
        },
        "paths": {
            "/api/sample": _post(
                "sample", "Samples of a model under a policy", "SampleRequest", "Samples",
                "With `Accept: text/event-stream` the path of the first sample comes step by step: events `queued`, "
                f"`begin`, `step`, `end` or `error`. With `Accept: {FILE}` it comes as a trajectory file, version "
                f"{VERSION}.", {EVENTS: {"schema": {"type": "string"}}, FILE: {"schema": {"type": "string"}}},
            ),
            "/api/compare": _post(
                "compare", "One sample under each of several policies, on the same randomness", "CompareRequest",
                "Comparison", "With `Accept: text/event-stream` all paths come step by step.",
                {EVENTS: {"schema": {"type": "string"}}},
            ),
            "/api/models": _get("models", "The models at hand", _ref("Models")),
            "/api/openapi.json": _get("describe", "This description", {"type": "object"}),
            "/health": _get("health", "Whether the server answers", _object({"status": {"type": "string"}}, "status")),
            "/ready": _get(
                "ready", "Whether it would take a request now", _object({"status": {"type": "string"}}, "status"), "503"
            ),
        },
        "components": {
            "schemas": {
                "Policy": _policy(limits),
                "SampleRequest": _object({**ask, **samples}),
                "CompareRequest": _object({**ask, "arms": arms}),
                "Row": _object({
                    "text": {"type": ["string", "null"]}, "tokens": {"type": "array", "items": {"type": "integer"}},
                    "seed": {"type": "integer"}, "sample": {"type": "integer"}, "model": {"type": "string"},
                    "digest": {"type": "string"}, "nfe": {"type": "integer"}, "selected": {"type": "integer"},
                    "prefix": {"type": "integer"},
                    "policy": _ref("Policy"), "scores": _ref("Scores"),
                }, "text", "tokens", "seed", "sample", "model", "digest", "nfe", "selected", "prefix", "policy",
                    "scores"),
                "Scores": {
                    "type": "object", "additionalProperties": {"type": ["number", "string"]},
                    "description": "judge, nll (nats per token), perplexity, entropy, rep-4",
                },
                "Samples": _object({"samples": {"type": "array", "items": _ref("Row")}}, "samples"),
                "Comparison": _object(
                    {"arms": {"type": "object", "additionalProperties": _ref("Row")}}, "arms"
                ),
                "Models": _object({"models": {"type": "array", "items": _object({
                    "name": {"type": "string"}, "digest": {"type": "string"}, "vocab_size": {"type": "integer"},
                    "length": {"type": "integer"}, "any_length": {"type": "boolean"}, "text": {"type": "boolean"},
                    "scored_by": {"type": ["string", "null"]},
                })}}, "models"),
                "Error": _object({"error": {"type": "string"}}, "error"),
            }
        },
    }  # fmt: skip


def _whole(low: int, high: int, about: str = "") -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": high, **({"description": about} if about else {})}


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "additionalProperties": False,
        **({"required": list(required)} if required else {}),
    }  # fmt: skip


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _policy(limits: Limits) -> dict[str, Any]:
    """A schema for each of the policy's fields; their defaults are the policy's own."""
    or_none = {"type": ["integer", "null"], "minimum": 0, "maximum": MOST_WHOLE}
    mass = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
    schemas: dict[str, dict[str, Any]] = {
        "nfe": _whole(2, limits.steps),
        "warmup": {"type": "number", "minimum": 0, "maximum": 1},
        "horizon": or_none,
        "budget": {"type": "number", "minimum": 0, "maximum": MOST_WHOLE},
        "spacing": _whole(0, MOST_WHOLE),
        "count": or_none,
        "top_p": mass,
        "late_top_p": {**mass, "type": ["number", "null"]},
        "endpoint": {"enum": list(get_args(policies.Endpoint))},
        "grid": {"enum": list(get_args(policies.Grid))},
        "boundary": {"enum": list(get_args(Boundary))},
        "values": {"enum": [value for value in get_args(policies.Values) if value != "recorded"]},
        "value_top_p": mass,
        "write": {"enum": list(get_args(policies.Write))},
    }
    defaults = {field.name: field.default for field in fields(Policy)} | {"nfe": min(Policy.nfe, limits.steps)}
    return _object({name: {**schemas[name], "default": default} for name, default in defaults.items()})


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _get(operation: str, summary: str, schema: dict[str, Any], *others: str) -> dict[str, Any]:
    answers = {"200": {"description": "done", "content": _json(schema)}}
    answers |= {status: {"description": "not now", "content": _json(schema)} for status in others}
    return {"get": {"operationId": operation, "summary": summary, "responses": answers}}


def _post(operation: str, summary: str, request: str, answer: str, about: str, more: dict[str, Any]) -> dict[str, Any]:
    refusals = {
        "400": "not JSON", "408": "it did not arrive in time", "413": "too large", "415": "not application/json",
        "422": "a field to mend", "429": "the queue is full; Retry-After says when to come again",
    }  # fmt: skip
    return {
        "post": {
            "operationId": operation,
            "summary": summary,
            "description": about,
            "requestBody": {"required": True, "content": _json(_ref(request))},
            "responses": {
                "200": {"description": "done", "content": {**_json(_ref(answer)), **more}},
                **{status: {"description": why, "content": _json(_ref("Error"))} for status, why in refusals.items()},
            },
        }
    }
