"""The OpenAPI description of a service, whose events have the columns of its schema."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from .. import __version__
from ..online.data.conversion import HASHED, MAX_NUMBER
from ..online.data.kind import UNITS, Kind
from ..online.data.schema import Schema
from .config import Limits
from .request_batcher import MAX_ID_LENGTH

Json = dict[str, Any]

_ERRORS = {
    "400": "The body is not JSON, or has the wrong form.",
    "401": "The token is missing or wrong.",
    "403": "The request comes from a website, or has a wrong Host header.",
    "408": "The body did not arrive in time.",
    "413": "The body or the number of events is too large.",
    "422": "An event or label does not fit the schema; `details` name the columns. Nothing of the request was used.",
    "503": "The service cannot answer now; try again after the seconds of `Retry-After`.",
}


def describe(schema: Schema, limits: Limits, *, has_token: bool, has_probability: bool) -> Json:
    """Return the OpenAPI description of a service.

    Args:
        schema: the schema of the events, with an id.
        limits: the limits of a request.
        has_token: whether requests need a token.
        has_probability: whether predictions have a probability.
    """
    event = _event(schema)
    label: Json = {}
    if schema.target.comparison and not schema.target.compares_text:
        label = {"type": ["number", "boolean"]}
    elif not schema.target.comparison:
        limits_of_label = {"minimum": schema.lowest, "maximum": schema.highest}
        label = _value(Kind("number", accepts_booleans=True))
        label |= {name: value for name, value in limits_of_label.items() if math.isfinite(value)}
    labeled = {**event, "properties": {**event["properties"], schema.target.column: label}}
    labeled["required"] = [*event.get("required", []), schema.target.column]
    key = _id(schema.roles["id"][1])
    feedback = _object({"id": key, "label": label}, additionalProperties=False)
    prediction: Json = {"id": key, "score": {"type": "number"}}
    if has_probability:
        prediction["probability"] = {"type": "number", "minimum": 0, "maximum": 1}
    keys = {"type": "array", "items": key}
    predictions = {"type": "array", "items": _object(prediction)}
    predicted = {"model_version": {"type": "string"}, "predictions": predictions, "repeated": keys}
    accepted = {"accepted": {"type": "integer"}, "repeated": keys}
    schemas = {
        "Event": event,
        "LabeledEvent": labeled,
        "Feedback": feedback,
        "Predictions": _with_warnings(_object(predicted)),
        "Learned": _with_warnings(_object(predicted | accepted)),
        "Accepted": _object({**accepted, "unknown": keys}),
        "Rollback": _object({"version": {"type": "string"}}, additionalProperties=False),
        "Promotion": _object({"challenger": {"type": "string"}}, additionalProperties=False),
        "Error": _object(
            {
                "error": {"type": "string"},
                "details": {
                    "type": "array",
                    "items": _object(
                        {
                            "index": {"type": "integer"},
                            "column": {"type": ["string", "null"]},
                            "error": {"type": "string"},
                        }
                    ),
                },
            }
        ),
    }
    paths = {
        "/predict": _post("Predict events; they wait for their labels.", "Event", "Predictions", limits),
        "/learn": _post(
            "Learn events that have labels; the predictions are those before.", "LabeledEvent", "Learned", limits
        ),
        "/feedback": _post("Send the labels of events that were predicted.", "Feedback", "Accepted", limits),
        "/rollback": {
            "post": _operation(
                "Continue from an earlier version or tag.", "Rollback", _one("Rollback"), None, has_name=True
            )
        },
        "/promote": {
            "post": _operation(
                "Let a challenger become the champion.", "Promotion", _one("Promotion"), None, has_name=True
            )
        },
        "/versions": {"get": _get("The versions that a rollback can use.")},
        "/model": {"get": _get("The version in use, its age, and the schema.")},
        "/healthz": {"get": _get("Whether the process answers.", is_open=True)},
        "/readyz": {"get": _get("Whether predictions are possible.", is_open=True)},
        "/metrics": {"get": _get("Metrics for Prometheus.", content="text/plain")},
        "/status.json": {"get": _get("What the status page shows.")},
        "/": {"get": _get("The status page.", content="text/html")},
    }
    description: Json = {
        "openapi": "3.1.0",
        "info": {"title": "cadam serve", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if has_token:
        description["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        description["security"] = [{"token": []}]
    return description


def _event(schema: Schema) -> Json:
    """Describe an event. A column that may be missing, and the id, which is generated, are not required."""
    properties = {name: _value(kind) for name, kind in schema.kinds.items()}
    required = [name for name, kind in schema.kinds.items() if not kind.optional and "." not in name]
    for role, (name, kind) in schema.roles.items():
        properties.setdefault(name, _id(replace(kind, optional=True)) if role == "id" else _value(kind))
        if role == "user" and name not in required:
            required.append(name)
    return {"type": "object", "properties": properties, "required": required}


def _id(kind: Kind) -> Json:
    """Return the JSON schema of an id."""
    return {**_value(kind), **({"minLength": 1, "maxLength": MAX_ID_LENGTH} if kind.name == "text" else {})}


def _value(kind: Kind) -> Json:
    """Return the JSON schema of a value in a column of this kind."""
    if kind.length and kind.name not in ("clock", "words"):
        return {"type": ["array", "null"] if kind.optional else "array"}
    names = {
        "number": ["number", "boolean"] if kind.accepts_booleans else ["number"],
        "category": ["integer"],
        "integer": ["integer"],
        "text": ["string", "integer"],
        "words": ["string", "number", "boolean"],
        "time": ["number"] if kind.time_format in ("", *UNITS) else ["string"],
        **{name: ["integer", "string", "boolean"] for name in HASHED},
    }.get(kind.name)
    if names is None:
        return {}
    value: Json = {"type": [*names, "null"] if kind.optional else names}
    if kind.name == "category":
        value |= {"minimum": 0, "maximum": kind.size - 1 - kind.optional}
    if kind.name == "number":
        value |= {"minimum": -MAX_NUMBER, "maximum": MAX_NUMBER}
    return value


def _object(properties: Json, **further: Any) -> Json:
    return {"type": "object", "properties": properties, "required": list(properties), **further}


def _with_warnings(answer: Json) -> Json:
    """Add the warnings that an answer has if events have columns that the schema does not have."""
    return {
        **answer,
        "properties": {**answer["properties"], "warnings": {"type": "array", "items": {"type": "string"}}},
    }


def _one(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _post(summary: str, request: str, response: str, limits: Limits) -> Json:
    many = {"type": "array", "items": _one(request), "minItems": 1, "maxItems": limits.events}
    return {"post": _operation(summary, response, {"oneOf": [_one(request), many]}, response)}


def _operation(summary: str, name: str, body: Json, response: str | None, *, has_name: bool = False) -> Json:
    content = {"application/json": {"schema": {} if response is None else _one(response)}}
    error = {"application/json": {"schema": _one("Error")}}
    responses = {"200": {"description": "Done. What was sent is on disk.", "content": content}}
    errors = {**_ERRORS, **({"404": "Nothing has this name."} if has_name else {})}
    responses |= {status: {"description": text, "content": error} for status, text in errors.items()}
    return {
        "summary": summary,
        "operationId": name,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": responses,
    }


def _get(summary: str, content: str = "application/json", is_open: bool = False) -> Json:
    operation: Json = {
        "summary": summary,
        "responses": {
            status: {"description": text, "content": {content if status == "200" else "application/json": {}}}
            for status, text in {
                "200": "Done.",
                "401": _ERRORS["401"],
                "403": _ERRORS["403"],
                "503": _ERRORS["503"],
            }.items()
        },
    }
    return {**operation, "security": []} if is_open else operation
