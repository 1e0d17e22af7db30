"""The OpenAPI document: every status, body, stream, header and security scheme of the HTTP API.

FastAPI derives the requests from the routes. This module adds the statuses of errors, the events of streams, the API
key, and the sizes of the served model.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from router.http.bodies.openapi_bodies import ErrorBody, Responses
from router.http.errors import is_anthropic
from router.text.model_files import ModelInfo

_MEANINGS = {
    HTTPStatus.BAD_REQUEST: "the request must change; the message says how",
    HTTPStatus.UNAUTHORIZED: "the API key is missing or wrong",
    HTTPStatus.FORBIDDEN: "the API key does not allow it",
    HTTPStatus.NOT_FOUND: "there is no such model",
    HTTPStatus.REQUEST_TIMEOUT: "the request's deadline passed",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "the body is too large",
    HTTPStatus.TOO_MANY_REQUESTS: "overload: try again after Retry-After",
    HTTPStatus.INTERNAL_SERVER_ERROR: "a fault of Tandem; its log has it under the request's id",
    HTTPStatus.SERVICE_UNAVAILABLE: "no worker can serve the request now",
}
# The titles of lists of token ids in schemas of requests: those of a prompt, and others.
TOKEN_IDS, ANY_TOKEN_IDS = "Token ids", "Any token ids"
Json = dict[str, Any]
_REFERENCE = "#/components/schemas/{model}"
_API_KEY, _HEADER = "api key", "x-api-key"
INFERENCE_PREFIXES = ("/v1/", "/tokenize", "/detokenize")
GENERATION_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/messages"})
HEALTH_PATHS = frozenset({"/health", "/ping", "/ready"})  # they need no key
_REQUEST_ID = {
    "x-request-id": {"description": "names the request in logs", "schema": {"type": "string"}, "required": True}
}


def refusals(*statuses: int, body: type[BaseModel] = ErrorBody) -> Responses:
    """Return the documentation of refusals with these statuses."""
    return {int(status): {"model": body, "description": _MEANINGS[HTTPStatus(status)]} for status in statuses}


def answers(body: type[BaseModel], *statuses: int) -> Responses:
    """Return the documentation of answers with this body; without `statuses`, of one with status 200."""
    return {status: {"model": body, "description": HTTPStatus(status).phrase} for status in statuses or (200,)}


def generation_responses(
    whole: type[BaseModel], *events: type[BaseModel], last: str = "", error: type[BaseModel] = ErrorBody
) -> Responses:
    """Return the documentation of a generation's responses. `events`: the objects that `data` of a stream's events
    holds as JSON. `last`: the text of the last event that is not JSON, if a stream has one."""
    objects = [{"$ref": _REFERENCE.format(model=event.__name__)} for event in events]
    data: list[Json] = [{"contentMediaType": "application/json", "contentSchema": {"anyOf": objects}}]
    if last:
        data.insert(0, {"const": last})
    event = {"type": "object", "properties": {"data": {"type": "string", "anyOf": data}}, "required": ["data"]}
    stream = {"itemSchema": event | {"description": "a server-sent event"}}  # OpenAPI 3.2: of one event
    answer = {"model": whole, "description": "the answer", "content": {"text/event-stream": stream}}
    return {200: answer} | refusals(400, 404, 408, 413, 429, 500, 503, body=error)


def complete_document(
    app: FastAPI,
    model: ModelInfo,
    *,
    events: Sequence[type[BaseModel]],
    asks_for_key: bool,
    takes_templates: bool,
    takes_tools: bool,
) -> None:
    """Replace the document that FastAPI makes of the routes by the complete one. It is made at the first call.
    `events`: the events of streams."""

    @cache
    def openapi() -> dict[str, Any]:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes, description=app.description)
        for path, operation in _operations(document):
            operation["responses"].pop("422", None)  # FastAPI's; Tandem refuses with 400
            if asks_for_key and path not in HEALTH_PATHS:
                _guard(operation, document, path)
            for parameter in operation.get("parameters", ()):
                _never_null(parameter)
            for response in operation["responses"].values():
                response.setdefault("headers", {}).update(_REQUEST_ID)
        _write_whole_numbers(document)
        schemas = document["components"]["schemas"]
        schemas.update(_schemas(events))
        _limit_to_model(schemas, model)
        for name, is_taken, nothing in (("chat_template", takes_templates, None), ("tools", takes_tools, [])):
            if not is_taken:
                _leave_out(schemas, name, nothing)
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way


def _schemas(bodies: Sequence[type[BaseModel]]) -> dict[str, Any]:
    _, schema = models_json_schema([(body, "serialization") for body in bodies], ref_template=_REFERENCE)
    schemas: dict[str, Any] = schema["$defs"]
    return schemas


def _operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, item in document["paths"].items():
        for operation in item.values():
            yield path, operation


def _write_whole_numbers(value: object) -> None:
    """Write the bounds of integers as integers: FastAPI writes 1.0, which is refused if a client sends it."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name in ("minimum", "maximum") and isinstance(inner, float) and inner.is_integer():
                value[name] = int(inner)
            else:
                _write_whole_numbers(inner)
    elif isinstance(value, list):
        for inner in value:
            _write_whole_numbers(inner)


def _never_null(parameter: dict[str, Any]) -> None:
    """Remove null from the types of parameters: a parameter is text, which is left out and never null."""
    alternatives = parameter["schema"].pop("anyOf", ())
    for alternative in alternatives:
        if alternative != {"type": "null"}:
            parameter["schema"].update(alternative)


def _guard(operation: dict[str, Any], document: dict[str, Any], path: str) -> None:
    schemes = document["components"].setdefault("securitySchemes", {})
    schemes[_API_KEY] = {"type": "http", "scheme": "bearer"}
    schemes[_HEADER] = {"type": "apiKey", "in": "header", "name": _HEADER}
    operation["security"] = [{_API_KEY: []}, {_HEADER: []}]
    body = "AnthropicError" if is_anthropic(path) else ErrorBody.__name__
    for status, refusal in refusals(401, 403).items():
        operation["responses"][str(status)] = {
            "description": refusal["description"],
            "content": {"application/json": {"schema": {"$ref": _REFERENCE.format(model=body)}}},
        }


def _limit_to_model(schemas: dict[str, Any], model: ModelInfo) -> None:
    """Set the name of the model, the largest token id and the longest prompt in tokens."""
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for schema in schemas.values():
        for token_ids in _token_id_lists(schema):
            token_ids["items"] = token_ids["items"] | {"maximum": model.vocab_size - 1}
            if token_ids["title"] == TOKEN_IDS:
                token_ids.setdefault("maxItems", model.max_model_len - 1)
        properties = schema.get("properties", {})
        if "truncate_prompt_tokens" in properties:
            properties["truncate_prompt_tokens"]["maximum"] = model.max_model_len
        for alternative in properties.get("logit_bias", {}).get("anyOf", ()):
            if "propertyNames" in alternative:
                alternative["propertyNames"] = {"pattern": numbers_up_to(model.vocab_size - 1)}
        if "model" in properties and schema.get("additionalProperties") is False and "id" not in properties:
            properties["model"] = {"enum": [None, "", model.name]} | {
                name: value for name, value in properties["model"].items() if name == "description"
            }


def numbers_up_to(most: int) -> str:
    """Return a pattern of the decimal numbers from 0 to `most`, without leading zeros."""
    digits = str(most)
    shorter = [f"[1-9][0-9]{{{length - 1}}}" for length in range(2, len(digits))]
    ends = []
    for place, digit in enumerate(digits):
        least, rest = int(place == 0 and len(digits) > 1), len(digits) - place - 1
        if int(digit) > least:
            ends.append(f"{digits[:place]}[{least}-{int(digit) - 1}][0-9]{{{rest}}}")
    return f"^({'|'.join(['[0-9]'] * (len(digits) > 1) + shorter + ends + [digits])})$"


def _leave_out(schemas: dict[str, Any], name: str, nothing: object) -> None:
    """Declare that this router accepts no value of a field but the one without effect."""
    for schema in schemas.values():
        if "messages" in schema.get("properties", {}) and name in schema["properties"]:
            schema["properties"][name] = {"enum": [None] if nothing is None else [None, nothing]}


def _token_id_lists(schema: object) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        if schema.get("type") == "array" and schema.get("title") in (TOKEN_IDS, ANY_TOKEN_IDS):
            yield schema
        for inner in schema.values():
            yield from _token_id_lists(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from _token_id_lists(inner)
