"""The OpenAI endpoint: which requests are refused; every refusal names the necessary change."""

import json
import re
import socket
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer

from router.text.tokenization import Tokenization
from tests.unit.router.openai_api.endpoint import USER, Endpoint, endpoint, refused
from tests.unit.router.text.small_tokenizers import byte_level

_IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("length_penalty", 0.5),
        ("use_beam_search", True),
        ("best_of", 2),
        ("made_up", None),
        ("timeout", 3),
    ],
)
def test_an_unsupported_field_is_refused_by_name(shared: Endpoint, field: str, value: object) -> None:
    answer = shared.post("/v1/completions", {"prompt": "x", field: value})
    refused(answer, 400, "unsupported_field", field, f"'{field}'")


@pytest.mark.parametrize("tier", ["priority", "scale", "fast", True])
def test_an_unknown_service_tier_is_refused_with_the_known_tiers(shared: Endpoint, tier: object) -> None:
    answer = shared.post("/v1/completions", {"prompt": "x", "service_tier": tier})
    refused(answer, 400, "invalid_request", "service_tier", "'auto'", "'default'", "'flex'")


def test_the_openai_client_receives_the_name_of_the_refused_field(shared: Endpoint) -> None:
    modalities: Any = ["text", "audio"]
    with pytest.raises(openai.BadRequestError) as raised:
        shared.client.chat.completions.create(model="", messages=USER, modalities=modalities)
    assert (raised.value.param, raised.value.code, raised.value.type) == (
        "modalities",
        "unsupported_field",
        "invalid_request_error",
    )


def test_tools_are_refused_with_the_flag_that_is_missing(shared: Endpoint) -> None:
    body = {"messages": USER, "tools": [{"type": "function", "function": {"name": "f"}}]}
    answer = shared.post("/v1/chat/completions", body)
    refused(answer, 400, "invalid_request", "tools", "--tool-call-parser", "tool_choice none")
    assert shared.post("/v1/chat/completions", body | {"tool_choice": "none"}).status_code == 200


_FORCED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("choice", "param", "words"),
    [
        ("required", "tool_choice", "has no tools"),
        (_FORCED, "tool_choice", "has the name 'f'"),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [_FORCED]}},
            "tool_choice",
            "the name 'f'",
        ),
        ("always", "tool_choice", "one of none, auto, required"),
        ({"type": "custom"}, "tool_choice.type", "'function'"),
        ({"type": "function"}, "tool_choice.function.function", "required"),
    ],
)
def test_a_choice_that_the_tools_do_not_allow_is_refused_by_name(
    shared: Endpoint, choice: object, param: str, words: str
) -> None:
    body = {"messages": USER, "tool_choice": choice}
    refused(shared.post("/v1/chat/completions", body), 400, "invalid_request", param, words)


def test_a_template_of_a_request_is_refused_with_the_flag_that_allows_it(shared: Endpoint) -> None:
    answer = shared.post("/v1/chat/completions", {"messages": USER, "chat_template": "x"})
    refused(answer, 400, "invalid_request", "chat_template", "--trust-request-chat-template on")
    answer = shared.post("/v1/chat/completions", {"messages": USER, "chat_template_kwargs": {"tools": 1}})
    refused(answer, 400, "invalid_request", "chat_template_kwargs", "tools cannot be set here")


def test_unsupported_fields_with_neutral_values_are_accepted(shared: Endpoint) -> None:
    nothing: dict[str, Any] = {
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "tools": [],
        "store": False,
        "service_tier": "auto",
        "temperature": None,
        "stop": None,
        "stream_options": None,
        "audio": None,
    }
    assert shared.post("/v1/chat/completions", {"messages": USER} | nothing).status_code == 200


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        (_IMAGE, "messages[0].content[0].type"),
        ({"role": "user", "content": "x", "tool_calls": []}, "messages[0].tool_calls"),
        ({"role": "user", "content": "x", "name": 7}, "messages[0].name"),
        ({"role": "assistant", "content": "x", "tool_calls": [1]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"id": "1", "function": {}}]}, "messages[0].tool_calls[0].function.name"),
    ],
)
def test_messages_that_cannot_be_rendered_are_refused_with_their_position(
    shared: Endpoint, message: object, param: str
) -> None:
    answer = shared.post("/v1/chat/completions", {"messages": [message]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("completions", {}, "prompt: Field required"),
        ("chat/completions", {"messages": [{"role": "robot", "content": "x"}]}, "'assistant', 'tool', not 'robot'"),
        ("chat/completions", {"messages": [_IMAGE]}, "messages[0].content[0].type: must be 'text', not 'image_url'"),
        (
            "chat/completions",
            {"messages": USER, "tools": [{"type": "custom", "custom": {"name": "x"}}]},
            "tools[0].type: must be 'function', not 'custom'",
        ),
        (
            "chat/completions",
            {"messages": USER, "response_format": {"type": "structural_tag", "format": {}}},
            "response_format.type: must be 'text', 'json_object' or 'json_schema', not 'structural_tag'",
        ),
        (
            "chat/completions",
            {"messages": USER, "response_format": {"type": "json_schema"}},
            "response_format.json_schema: the type json_schema needs it",
        ),
        (
            "chat/completions",
            {"messages": USER, "response_format": {"type": "json_object", "json_schema": {"schema": {}}}},
            "response_format.json_schema: the type json_object has none",
        ),
        ("completions", {"prompt": []}, "prompt: must be a string"),
        ("completions", {"prompt": [1, "a"]}, "prompt: must be a string"),
        ("completions", {"prompt": ["a"] * 129}, "at most 128"),
        ("completions", {"prompt": ""}, "prompt is empty"),
        ("completions", {"prompt": [1024]}, "token id 1024"),
        ("completions", {"prompt": [-1]}, "token id -1"),
        ("completions", {"prompt": [1, 10**30]}, f"token id {10**30}"),
        ("completions", {"prompt": [1, -(10**30)]}, f"token id -{10**30}"),
        ("completions", {"prompt": [1, True]}, "prompt: must be a string"),
        ("completions", {"prompt": [1, 1.5]}, "prompt: must be a string"),
        ("completions", {"prompt": [[1, 2.0], [True]]}, "prompt: must be a string"),
        ("completions", {"prompt": "x", "temperature": 3}, "temperature must be from 0 to 2, not 3"),
        ("completions", {"prompt": "x", "temperature": float("nan")}, "temperature must be from 0 to 2"),
        ("completions", {"prompt": "x", "top_p": 0}, "top_p"),
        ("completions", {"prompt": "x", "min_p": 2}, "min_p"),
        ("completions", {"prompt": "x", "logit_bias": {"x": 1}}, "logit_bias: 'x' is not a token id"),
        ("completions", {"prompt": "x", "logit_bias": {"9": 101}}, "logit_bias of token 9 must be from -100 to 100"),
        ("completions", {"prompt": "x", "presence_penalty": 3}, "presence_penalty must be from -2 to 2, not 3"),
        ("completions", {"prompt": "x", "allowed_token_ids": []}, "allowed_token_ids: List should have at least 1"),
        ("completions", {"prompt": "x", "bad_words": [""]}, "each of bad_words must have 1 to 256 characters"),
        ("completions", {"prompt": "x", "prompt_logprobs": -1}, "prompt_logprobs must be from 0 to 20, not -1"),
        ("completions", {"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs must be from 0 to 20, not 21"),
        ("completions", {"prompt": "x", "n": 0}, "n must be"),
        ("completions", {"prompt": "x", "n": True}, "n: Input should be a valid integer"),
        ("completions", {"prompt": "x", "max_tokens": -1}, "max_tokens must be at least 1"),
        ("completions", {"prompt": "x", "max_tokens": 0, "min_tokens": 1}, "max_tokens must be at least 1"),
        ("chat/completions", {"messages": USER, "max_tokens": 0}, "max_tokens must be at least 1"),
        ("completions", {"prompt": "x", "max_tokens": "9"}, "max_tokens: Input should be a valid integer"),
        ("completions", {"prompt": "x", "seed": "1"}, "seed"),
        ("completions", {"prompt": "x", "logprobs": 99}, "logprobs must be from 0 to 20"),
        ("completions", {"prompt": "x", "stop": [""]}, "stop string must not be empty"),
        ("completions", {"prompt": "x", "stop": 5}, "stop: Input should be a valid list"),
        ("completions", {"prompt": "x", "stream_options": {"x": 1}, "stream": True}, "stream_options.x"),
        ("chat/completions", {"messages": []}, "messages: List should have at least 1 item"),
        ("chat/completions", {"messages": USER, "top_logprobs": 2}, "top_logprobs needs logprobs"),
        ("chat/completions", {"messages": USER, "max_tokens": 1, "max_completion_tokens": 2}, "give one of them"),
    ],
)
def test_wrong_values_are_refused_with_the_necessary_change(
    shared: Endpoint, path: str, body: dict[str, Any], words: str
) -> None:
    answer = shared.post(f"/v1/{path}", body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert re.split(r"[.\[]", answer.json()["error"]["param"])[0] in {"prompt", *body}


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(shared: Endpoint) -> None:
    answer = shared.post("/v1/completions", {"prompt": [5] * 2000, "max_tokens": 1})
    refused(answer, 400, "context_length_exceeded", "prompt", "2000", "1024")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b"", "must be a JSON object"),
        (b'"x"', "must be a JSON object"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 50_000, "parsing the body"),
    ],
)
def test_a_malformed_body_is_a_clear_error(shared: Endpoint, content: bytes, words: str) -> None:
    answer = shared.post("/v1/completions", content)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_half_a_surrogate_pair_is_a_clear_error(shared: Endpoint) -> None:
    refused(shared.post("/v1/completions", b'{"prompt": "ab\\ud800"}'), 400, "invalid_request", None, "surrogate")
    refused(shared.post("/v1/completions", b'{"prompt": "x", "model": "\\ud800"}'), 404, "unknown_model", "model")
    message = b'"max_tokens": 2, "messages": [{"role": "user", "content": "x"}]'
    for path, body in (("completions", b'"prompt": "x"'), ("messages", message)):
        answer = shared.post(f"/v1/{path}", b"{" + body + b', "cache_salt": "\\udfff"}')
        assert answer.status_code == 400 and "cache_salt has half of a surrogate" in answer.text


def test_an_oversized_body_is_refused_before_all_of_it_has_arrived(shared: Endpoint) -> None:
    url = httpx.URL(shared.url)
    with socket.create_connection((url.host, url.port or 0), timeout=10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        connection.sendall(b"Content-Length: 10000000000\r\n\r\n" + b"x" * 100_001)
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_a_body_just_past_the_limit_is_refused_with_the_limit(shared: Endpoint) -> None:
    answer = shared.post("/v1/completions", {"prompt": "x" * 100_000})
    refused(answer, 413, "request_entity_too_large", None, "100000 bytes")


def test_an_unknown_model_is_not_found(shared: Endpoint) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        shared.client.completions.create(model="gpt-9", prompt="x")
    assert raised.value.code == "unknown_model"


def test_a_misspelt_field_is_refused_with_the_name_that_is_close(shared: Endpoint) -> None:
    for name, words in (("max_token", "did you mean max_tokens?"), ("best_off", "leave it out"), ("suffix", "leave")):
        answer = shared.post("/v1/completions", {"prompt": "x", name: 3})
        refused(answer, 400, "unsupported_field", name, words)
    assert "did you mean" not in answer.json()["error"]["message"]


def test_errors_for_unknown_paths_and_methods_have_the_openai_shape(shared: Endpoint) -> None:
    refused(shared.http.get("/v1/nothing"), 404, "not_found", None)
    for path in ("/v1/nothing", "/docs", "/redoc"):  # pages of FastAPI load scripts from another site
        assert "/openapi.json" in shared.http.get(path).json()["error"]["message"], "it says where to look"
    assert shared.http.get("/openapi.json").status_code == 200
    refused(shared.http.get("/v1/completions"), 405, "method_not_allowed", None, "GET", "POST")
    assert shared.http.put("/ping").headers["allow"] == "GET, HEAD, POST"


def test_a_bad_request_id_is_refused(shared: Endpoint) -> None:
    refused(
        shared.post("/v1/completions", {"prompt": "x"}, **{"x-request-id": "a" * 200}), 400, "invalid_request", None
    )


def test_every_request_without_the_api_key_is_refused(demo: Tokenization) -> None:
    with endpoint(demo, api_key="secret") as running:
        for client in (running.client, running.client_with("sécret")):
            with pytest.raises((openai.AuthenticationError, UnicodeEncodeError)):
                client.models.list()
        refused(running.post("/v1/completions", b"{"), 401, "unauthenticated", None, "API key")
        assert running.client_with("secret").models.list().data
        for named in ("bearer secret", "BEARER  secret"):
            assert running.http.get("/v1/models", headers={"authorization": named}).status_code == 200
    assert running.pipeline.seen == []


def test_a_missing_chat_template_is_a_named_error(tmp_path: Path) -> None:
    with endpoint(Tokenization.load(str(bare_model(tmp_path, byte_level())))) as running:
        answer = running.post("/v1/chat/completions", {"messages": USER})
    refused(answer, 400, "no_chat_template", None, "chat template")


def test_a_model_without_a_tokenizer_serves_token_ids(tmp_path: Path) -> None:
    with endpoint(Tokenization.load(str(bare_model(tmp_path)))) as running:
        body = {"prompt": [3, 4], "return_token_ids": True, "logprobs": 1, "max_tokens": 2}
        choice = running.post("/v1/completions", body).json()["choices"][0]
        assert (choice["text"], choice["token_ids"]) == ("", [7, 8])
        assert choice["logprobs"]["tokens"] == ["token_id:7", "token_id:8"]
        refused(running.post("/v1/completions", {"prompt": "x"}), 400, "no_tokenizer", None, "token ids")
        refused(running.post("/v1/completions", {"prompt": [3], "stop": "x"}), 400, "no_tokenizer", "stop")


def bare_model(folder: Path, tokenizer: Tokenizer | None = None) -> Path:
    config = {"vocab_size": 300, "max_position_embeddings": 128, "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"model": "", "prompt": ' + b"[" * 2000 + b"]" * 2000 + b"}", "JSON"),
        (b'{"model": "", "prompt": "x", "stop": [' + b'"y",' * 5000 + b'"y"]}', "4096"),
        (b'{"model": "", "prompt": "x", "stop_token_ids": [' + b"1," * 2000 + b"1]}", "1024"),
        (b'{"prompt": "x",' + b",".join(b'"f%d": 1' % i for i in range(200)) + b"}", "201 fields"),
        (b'{"model": "", "prompt": [' + b'"x",' * 128 + b'"x"]}', "129 prompts"),
    ],
)
def test_too_many_content_parts_are_refused_with_their_number(shared: Endpoint, body: bytes, said: str) -> None:
    answer = shared.post("/v1/completions", body)
    assert answer.status_code == 400, answer.text
    if said != "JSON":
        assert said in answer.json()["error"]["message"]


def test_too_many_messages_are_refused_with_their_number(shared: Endpoint) -> None:
    answer = shared.post("/v1/chat/completions", b'{"model": "", "messages": [' + b"{}," * 3000 + b"{}]}")
    assert answer.status_code == 400
    assert len(answer.content) < 2000


def test_a_body_declared_too_large_is_refused_before_any_of_it_is_sent(shared: Endpoint) -> None:
    url = httpx.URL(shared.url)
    with socket.create_connection((url.host, url.port or 0), timeout=20) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        connection.sendall(head + b"content-length: 100001\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("name", ["x-slo-ttft-ms", "x-slo-tpot-ms"])
@pytest.mark.parametrize("value", ["0", "-1", "soon", "inf", "nan", "1e999", ""])
def test_a_latency_target_that_is_no_positive_number_is_refused_by_its_header(
    shared: Endpoint, name: str, value: str
) -> None:
    answer = shared.post("/v1/completions", {"prompt": "x"}, **{name: value})
    refused(answer, 400, "invalid_request", name, name)


_DEEP = b'{"prompt": ' + b"[" * 90_000 + b"]" * 9_000 + b"}"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"prompt": "x", "messages": 7}',
        b'{"prompt": "x", "temperature": "hot"}',
        b'{"prompt": "x", "n": 0}',
        b'{"prompt": "\xff"}',
        b'{"prompt": [[1], "a"]}',
        b'{"messages": [{"role": "user"}]}',
        b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": -1}',
        b'{"prompt": "x", "model": "another"}',
        _DEEP,
        b'"' + b"x" * 100_001 + b'"',
    ],
)
def test_a_refusal_is_the_same_on_the_short_path_and_by_the_framework(
    shared: Endpoint, path: str, content: bytes
) -> None:
    named = {"x-request-id": "same"}
    short = shared.post(path, content, **named)
    framework = shared.post(path, content, **named, **{"x-tandem-ledger": "0"})  # a wish: not on the short path
    assert short.status_code >= 400
    assert (short.status_code, short.content, short.headers["content-type"]) == (
        framework.status_code,
        framework.content,
        framework.headers["content-type"],
    )


def test_both_ways_to_an_endpoint_give_the_same_answer_under_one_route(demo: Tokenization) -> None:
    with endpoint(demo) as running:
        body = {"messages": USER, "seed": 7, "request_id": "same"}
        answers = [running.post("/v1/chat/completions", body, **more).json() for more in ({}, {"x-tandem-ledger": "0"})]
        for answer in answers:
            del answer["created"]
        assert answers[0] == answers[1]
        counted = running.telemetry.by_labels("tandem_http_responses_total")  # the last one perhaps not yet
        assert set(counted) == {("/v1/chat/completions", "200")}
