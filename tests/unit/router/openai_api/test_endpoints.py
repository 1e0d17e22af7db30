"""Endpoints beside generation, and options of requests in headers."""

import gzip
import json
from datetime import datetime
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.http.openai_api import read_json
from router.requests import TokenPrompt
from router.text.tokenization import Tokenization
from tests.examples import num_examples
from tests.unit.router.http.scripted_pipeline import LEDGER
from tests.unit.router.openai_api.endpoint import SCRIPT, USER, Endpoint, endpoint, refused


def test_the_list_of_models_may_end_with_a_slash(shared: Endpoint) -> None:
    assert shared.http.get("/v1/models/").json() == shared.http.get("/v1/models").json()


def test_models_have_the_fields_of_anthropics_list_too(shared: Endpoint) -> None:
    page = shared.http.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    (model,) = page["data"]
    assert (model["type"], model["id"], model["display_name"]) == ("model", "demo_model", "demo_model")
    assert datetime.fromisoformat(model["created_at"]).timestamp() == model["created"]
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "demo_model", "demo_model")
    assert shared.http.get("/v1/models/demo_model").json() == model


def test_a_compressed_body_is_refused_by_its_encoding(shared: Endpoint) -> None:
    compressed = gzip.compress(b'{"prompt": "x"}')
    answer = shared.post("/v1/completions", compressed, **{"content-encoding": "gzip"})
    refused(answer, 400, "invalid_request", None, "content-encoding gzip", "uncompressed")
    answer = shared.post("/v1/completions", {"prompt": "x"}, **{"content-encoding": "Identity"})
    assert answer.status_code == 200


def test_a_text_becomes_tokens_and_the_tokens_the_text(shared: Endpoint, demo: Tokenization) -> None:
    answer = shared.post("/tokenize", {"prompt": "def f(x):", "return_token_strs": True}).json()
    assert tuple(answer["tokens"]) == demo.encode("def f(x):")
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 1024
    assert "".join(answer["token_strs"]) == "def f(x):"
    assert shared.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "def f(x):"}


def test_messages_become_the_tokens_that_a_chat_has(shared: Endpoint) -> None:
    answer = shared.post("/tokenize", {"messages": USER}).json()
    chat = shared.client.chat.completions.create(model="", messages=USER)
    assert chat.usage is not None
    assert answer["count"] == chat.usage.prompt_tokens
    shorter = shared.post("/tokenize", {"messages": USER, "add_generation_prompt": False}).json()
    assert shorter["tokens"] == answer["tokens"][: shorter["count"]]
    assert shorter["count"] < answer["count"]


def test_tokens_are_refused_with_the_field_that_must_change(shared: Endpoint) -> None:
    for body in ({}, {"prompt": "x", "messages": USER}):
        refused(shared.post("/tokenize", body), 400, "invalid_request", None, "exactly one of prompt and messages")
    refused(shared.post("/tokenize", {"text": "x"}), 400, "unsupported_field", "text")
    refused(shared.post("/tokenize", {"prompt": "x", "model": "gpt-9"}), 404, "unknown_model", "model")
    refused(shared.post("/detokenize", {"tokens": [1024]}), 400, "invalid_request", None, "0 to 1023")
    refused(shared.post("/detokenize", {}), 400, "invalid_request", "tokens")
    refused(shared.post("/detokenize", {"tokens": [1.5]}), 400, "invalid_request", "tokens[0]")


def test_a_whole_number_with_a_decimal_point_is_an_integer_as_json_schema_has_it(shared: Endpoint) -> None:
    texts = [shared.post("/detokenize", {"tokens": tokens}).json() for tokens in ([5, 6], [5.0, 6.0])]
    assert texts[0] == texts[1]
    body = b'{"prompt": [5.0, 6], "max_tokens": 3.0, "stop_token_ids": [7.0], "temperature": 1.0}'
    assert shared.post("/v1/completions", body).status_code == 200
    request = shared.pipeline.seen[-1]
    assert isinstance(request.prompt, TokenPrompt) and request.prompt.token_ids == (5, 6)
    assert (request.stop.max_tokens, request.stop.stop_token_ids) == (3, (7,))
    assert shared.post("/v1/completions", b'{"prompt": [[5.0, 6], [7]], "max_tokens": 3}').status_code == 200
    assert [request.prompt for request in shared.pipeline.seen[-2:]] == [TokenPrompt((5, 6)), TokenPrompt((7,))]
    message = b'{"max_tokens": 2.0, "messages": [{"role": "user", "content": "x"}]}'
    assert shared.post("/v1/messages", message).status_code == 200


def test_tokens_need_the_api_key(demo: Tokenization) -> None:
    with endpoint(demo, api_key="secret") as running:
        refused(running.post("/tokenize", {"prompt": "x"}), 401, "unauthenticated", None)
        refused(running.post("/detokenize", {"tokens": [5]}), 401, "unauthenticated", None)
        refused(running.http.get("/version"), 401, "unauthenticated", None)


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping", "/version", "/metrics", "/v1/models"])
def test_head_has_the_status_and_headers_of_get_without_a_body(shared: Endpoint, path: str) -> None:
    get, head = shared.http.get(path), shared.http.head(path)
    assert (head.status_code, head.content) == (get.status_code, b"")
    assert head.headers["content-type"] == get.headers["content-type"]


def test_ping_and_version_are_answered(shared: Endpoint) -> None:
    assert shared.http.get("/ping").json() == shared.post("/ping", b"").json() == {"status": "alive"}
    assert set(shared.http.get("/version").json()) == {"version"}


def test_a_request_sets_its_deadline_in_a_header(shared: Endpoint) -> None:
    shared.client.completions.create(model="", prompt=["a", "b"], extra_headers={"x-request-timeout-ms": "2500"})
    assert [request.timeout_s for request in shared.pipeline.seen[-2:]] == [2.5, 2.5]
    for wrong in ("0", "1e300"):
        answer = shared.post("/v1/completions", {"prompt": "x"}, **{"x-request-timeout-ms": wrong})
        refused(answer, 400, "invalid_request", "x-request-timeout-ms")


def test_requests_of_every_endpoint_have_the_address_of_their_host(shared: Endpoint) -> None:
    shared.client.completions.create(model="", prompt="a")
    shared.client.chat.completions.create(model="", messages=USER)
    shared.post("/v1/messages", {"model": "", "max_tokens": 8, "messages": USER})
    assert [request.address for request in shared.pipeline.seen[-3:]] == ["127.0.0.1"] * 3


_LEDGER = {
    "phases": [{"name": "prefill", "duration_s": 0.25}, {"name": "decode", "duration_s": 0.5}],
    "wall_s": LEDGER.wall_s,
    "ttft_s": LEDGER.ttft_s,
    "members": list(LEDGER.members),
    "transport": LEDGER.transport,
    "kv_bytes": LEDGER.kv_bytes,
    "reasons": list(LEDGER.reasons),
}


def test_the_ledger_of_each_prompt_comes_when_it_is_asked_for(shared: Endpoint) -> None:
    headers = {"x-tandem-ledger": "1"}
    body: dict[str, Any] = {"prompt": ["a", "b"]}
    assert shared.post("/v1/completions", body, **headers).json()["ledger"] == [_LEDGER, _LEDGER]
    assert "ledger" not in shared.post("/v1/completions", body).json()
    create = shared.client.chat.completions.create
    parts: list[Any] = list(create(model="", messages=USER, stream=True, extra_headers=headers))
    assert parts[-1].choices == []
    assert parts[-1].model_extra["ledger"] == [_LEDGER]
    assert all("ledger" not in (part.model_extra or {}) for part in parts[:-1])


def test_a_stream_without_a_token_sends_comments(demo: Tokenization) -> None:
    with endpoint(demo, signs_of_life=2) as running:
        answer = running.post("/v1/completions", {"prompt": "x", "stream": True, "max_tokens": 64})
        assert answer.text.startswith(": waiting\n\n: waiting\n\ndata: ")
        parts = running.client.completions.create(model="", prompt="x", stream=True, max_tokens=64)
        assert "".join(part.choices[0].text for part in parts) == SCRIPT
        assert running.post("/v1/completions", {"prompt": "x", "max_tokens": 64}).json()["choices"][0]["text"] == SCRIPT
    assert set(running.pipeline.keepalive_intervals_s) == {15.0, None}


def test_pages_of_allowed_origins_may_use_the_api(demo: Tokenization, shared: Endpoint) -> None:
    asks = {"origin": "https://page.example", "access-control-request-method": "POST"}
    with endpoint(demo, api_key="secret", allowed_origins=["https://page.example"]) as running:
        allowed = running.http.options("/v1/completions", headers=asks)
        other = running.http.options("/v1/completions", headers=asks | {"origin": "https://other.example"})
        refusal = running.http.post("/v1/completions", headers={"origin": "https://page.example"})
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "https://page.example")
    assert "access-control-allow-origin" not in other.headers
    assert (refusal.status_code, refusal.headers["access-control-allow-origin"]) == (401, "https://page.example")
    assert "access-control-allow-origin" not in shared.http.options("/v1/completions", headers=asks).headers


_PIECES = (
    *(
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b'"a":',
        b"[1,",
        b"1]",
        b" ",
        b"\n",
        b"\xff",
        b"\xef\xbb\xbf",
        b"\0",
        b"true",
    ),
    *(b"null", b"NaN", b"-NaN", b"-Infinity", b"1e400", b"-0", b"-0.0", b"01", b"1.", b".5", b"1E5", b"1e-400"),
    *(b"9" * 30, b"-" + b"9" * 5000, b"1" * 400 + b".0", b"0.12345678901234567891", b"2.2250738585072011e-308"),
    *(b'"', b'"a"', b'"\n"', b'"\\x"', b'"\\u0000"', b'"\\ud83d\\ude00"', b'"\\ud800"', b'"\xed\xa0\x80"'),
    b"[" * 300,
)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("ab"), inner),
)
_BODIES = st.lists(st.sampled_from(_PIECES), max_size=8).map(b"".join) | st.builds(
    lambda value, ascii: json.dumps(value, ensure_ascii=ascii).encode("utf-8", "surrogatepass"), _VALUES, st.booleans()
)


@given(_BODIES)
@example(b'{"a": 1, "b": 2, "a": 3}')
@example(b"[[1, -0, 0.0, 1e400, -1e400], NaN]")
@settings(max_examples=num_examples(suite=100, search=300))
def test_the_short_path_reads_nothing_else_from_a_body_than_the_framework(body: bytes) -> None:
    try:
        read = read_json(body)
    except ValueError:
        return
    assert repr(read) == repr(json.loads(body))
