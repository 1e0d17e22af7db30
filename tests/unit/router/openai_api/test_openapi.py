"""The OpenAPI document: what the server sends is what it declares."""

import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from cluster.errors import BuffersFull, DeadlineExceeded, NoWorkers
from router.http.bodies.openapi import numbers_up_to
from router.text.tokenization import Tokenization
from tests.unit.router.openai_api.endpoint import USER, Endpoint, check_stream, endpoint

_COMPLETION: tuple[str, dict[str, Any]] = ("/v1/completions", {"prompt": "x", "logprobs": 2})
_CHAT: tuple[str, dict[str, Any]] = ("/v1/chat/completions", {"messages": USER, "logprobs": True, "top_logprobs": 2})
_ALL = {"n": 2, "return_token_ids": True}


def _validate(value: object, schema: dict[str, Any], document: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(schema | {"components": document["components"]}).validate(value)


def _content(document: dict[str, Any], path: str, status: int, media_type: str) -> dict[str, Any]:
    operation = document["paths"][path].get("get") or document["paths"][path]["post"]
    content: dict[str, Any] = operation["responses"][str(status)]["content"][media_type]
    return content


def _references(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for inner in value.values():
            yield from _references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _references(inner)


@pytest.fixture(scope="module")
def document(shared: Endpoint) -> dict[str, Any]:
    fetched: dict[str, Any] = shared.http.get("/openapi.json").json()
    return fetched


def test_every_reference_of_the_document_exists(document: dict[str, Any]) -> None:
    schemas = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert set(_references(document)) <= schemas


@pytest.mark.parametrize(("path", "body"), [_COMPLETION, _CHAT])
@pytest.mark.parametrize("more", [{}, _ALL])
def test_whole_answers_and_events_are_as_declared(
    shared: Endpoint, document: dict[str, Any], path: str, body: dict[str, Any], more: dict[str, Any]
) -> None:
    body |= more
    _validate(body, _request_schema(document, path), document)
    answer = shared.post(path, body)
    _validate(answer.json(), _content(document, path, 200, "application/json")["schema"], document)
    options = {"include_usage": True, "continuous_usage_stats": True}
    for stream_options in ({}, options):
        answer = shared.post(path, body | {"stream": True, "stream_options": stream_options})
        check_stream(path, answer.text, document)


def _request_schema(document: dict[str, Any], path: str) -> dict[str, Any]:
    schema: dict[str, Any] = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return schema


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/demo_model", "/health", "/ready", "/ping", "/version"])
def test_answers_to_get_are_as_declared(shared: Endpoint, document: dict[str, Any], path: str) -> None:
    declared = path.replace("demo_model", "{name}")
    schema = _content(document, declared, 200, "application/json")["schema"]
    _validate(shared.http.get(path).json(), schema, document)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (DeadlineExceeded("late"), 408),
        (BuffersFull("full", retry_after_s=1), 429),
        (ValueError("a bug"), 500),
        (NoWorkers("none"), 503),
    ],
)
def test_refusals_are_as_declared(demo: Tokenization, error: Exception, status: int) -> None:
    with endpoint(demo, error=error) as running:
        document = running.http.get("/openapi.json").json()
        for path, body in (_COMPLETION, _CHAT):
            answer = running.post(path, body)
            assert answer.status_code == status
            _validate(answer.json(), _content(document, path, status, "application/json")["schema"], document)


def test_the_api_key_is_declared_where_it_is_needed(demo: Tokenization, document: dict[str, Any]) -> None:
    assert "securitySchemes" not in document["components"]
    with endpoint(demo, api_key="secret") as running:
        declared = running.http.get("/openapi.json", headers={"authorization": "Bearer secret"}).json()
        answer = running.post(*_COMPLETION)
        _validate(answer.json(), _content(declared, _COMPLETION[0], 401, "application/json")["schema"], declared)
    assert declared["components"]["securitySchemes"] == {
        "api key": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    guarded = {path for path, item in declared["paths"].items() if all("security" in op for op in item.values())}
    open_paths = {"/health", "/ready", "/ping"}
    assert guarded == set(declared["paths"]) - open_paths


@pytest.mark.parametrize("most", [0, 7, 9, 10, 99, 100, 1023, 1024])
def test_the_pattern_of_numbers_fits_exactly_those_up_to_the_most(most: int) -> None:
    pattern = re.compile(numbers_up_to(most))
    assert [n for n in range(most + 200) if pattern.fullmatch(str(n))] == list(range(most + 1))
    assert not any(pattern.fullmatch(text) for text in ("", "00", "01", "-1", "1e1"))
