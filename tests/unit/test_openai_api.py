"""The OpenAI endpoint, asked by the real `openai` package over a real server; only the workers' tokens are scripted."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from tokenizers import Tokenizer

from cluster.errors import (
    DeadlineExceeded,
    Draining,
    InternalError,
    NoWorkers,
    QueueFull,
    SlowClient,
    TandemError,
    WorkerLost,
)
from cluster.telemetry import Telemetry
from router.openai_api import build_app
from router.requests import ChatMessage, ChatPrompt, TextPrompt, TokenPrompt
from router.tokenization import Tokenization
from tests.unit.scripted_pipeline import ScriptedPipeline, served
from tests.unit.small_tokenizers import byte_level

DEMO_MODEL = Path(__file__).parents[2] / "examples" / "demo_model"
SCRIPT = "The quick brown fox."
USER: Any = [{"role": "user", "content": "hello"}]


class Endpoint:
    """A served app, its scripted pipeline, and clients for it."""

    def __init__(self, url: str, pipeline: ScriptedPipeline, telemetry: Telemetry) -> None:
        self.url = url
        self.pipeline = pipeline
        self.telemetry = telemetry
        # One without certificates to load: that would take longer than most tests.
        self.http = httpx.Client(transport=httpx.HTTPTransport(verify=False), base_url=url, timeout=20)
        self.client = self.client_with("sk-test")

    def client_with(self, api_key: str) -> openai.OpenAI:
        http = openai.DefaultHttpxClient(verify=False)
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, http_client=http)

    def post(self, path: str, content: object, **headers: str) -> httpx.Response:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        return self.http.post(path, content=body, headers={"content-type": "application/json"} | headers)


@contextmanager
def endpoint(
    tokenization: Tokenization, *, ready: bool = True, api_key: str = "", **behaviour: Any
) -> Iterator[Endpoint]:
    pipeline, telemetry = ScriptedPipeline(tokenization, **behaviour), Telemetry()
    app = build_app(
        pipeline=pipeline,
        tokenization=tokenization,
        telemetry=telemetry,
        ready=lambda: ready,
        api_key=api_key,
        max_message_bytes=100_000,
    )
    with served(app) as url:
        running = Endpoint(url, pipeline, telemetry)
        with running.http, running.client:
            yield running


@pytest.fixture(scope="module")
def demo() -> Tokenization:
    return Tokenization.load(str(DEMO_MODEL))


@pytest.fixture(scope="module")
def shared(demo: Tokenization) -> Iterator[Endpoint]:
    """For tests that neither fail, hold nor count."""
    with endpoint(demo) as running:
        yield running


# What is answered


def test_a_completion_carries_text_reason_and_usage(shared: Endpoint) -> None:
    answer = shared.client.completions.create(model="demo_model", prompt="def f", max_tokens=64)
    assert answer.choices[0].text == SCRIPT
    assert (answer.object, answer.model, answer.choices[0].finish_reason) == ("text_completion", "demo_model", "stop")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 2
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


def test_a_chat_completion_carries_a_message(shared: Endpoint) -> None:
    answer = shared.client.chat.completions.create(model="demo_model", messages=USER)
    assert (answer.choices[0].message.role, answer.choices[0].message.content) == ("assistant", SCRIPT)
    assert (answer.object, answer.choices[0].finish_reason) == ("chat.completion", "stop")
    assert answer.id.startswith("chatcmpl-")


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_a_stream_adds_up_to_the_whole_answer(shared: Endpoint, kind: str) -> None:
    parts: list[Any]
    if kind == "chat":
        parts = list(shared.client.chat.completions.create(model="", messages=USER, stream=True, n=2))
        texts = [(part.choices[0].index, part.choices[0].delta.content or "") for part in parts]
        assert [part.choices[0].delta.role for part in parts].count("assistant") == 2
        assert {part.object for part in parts} == {"chat.completion.chunk"}
    else:
        parts = list(shared.client.completions.create(model="", prompt="x", stream=True, n=2, max_tokens=64))
        texts = [(part.choices[0].index, part.choices[0].text) for part in parts]
    assert "".join(text for index, text in texts if index == 0) == SCRIPT
    assert "".join(text for index, text in texts if index == 1) == SCRIPT[::-1]
    reasons = [
        (part.choices[0].index, part.choices[0].finish_reason) for part in parts if part.choices[0].finish_reason
    ]
    assert sorted(reasons) == [(0, "stop"), (1, "stop")]
    assert len({part.id for part in parts}) == 1
    assert all(part.usage is None for part in parts)


def test_usage_comes_last_when_a_stream_asks_for_it(shared: Endpoint) -> None:
    options: Any = {"include_usage": True}
    create = shared.client.completions.create
    parts: list[Any] = list(create(model="", prompt=["a", "b"], stream=True, stream_options=options))
    assert parts[-1].choices == []
    assert parts[-1].usage.prompt_tokens == 2
    assert parts[-1].usage.completion_tokens == 24
    assert all(part.usage is None for part in parts[:-1])


def test_events_are_framed_as_server_sent_events(shared: Endpoint) -> None:
    answer = shared.post("/v1/completions", {"prompt": "x", "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(event.removeprefix("data: "))["object"] == "text_completion" for event in events[:-2])


async def test_the_async_client_streams(shared: Endpoint) -> None:
    async with openai.AsyncOpenAI(base_url=shared.url + "/v1", api_key="sk-test", max_retries=0) as client:
        stream = await client.chat.completions.create(model="", messages=USER, stream=True)
        assert "".join([part.choices[0].delta.content or "" async for part in stream]) == SCRIPT


def test_prompts_come_as_text_tokens_or_lists_of_either(shared: Endpoint) -> None:
    create, seen = shared.client.completions.create, shared.pipeline.seen
    create(model="", prompt="ab")
    create(model="", prompt=[5, 6])
    assert [request.prompt for request in seen[-2:]] == [TextPrompt("ab"), TokenPrompt((5, 6))]
    answer = create(model="", prompt=["ab", "cd"], n=2, max_tokens=64)
    assert sorted(request.prompt.text for request in seen[-2:] if isinstance(request.prompt, TextPrompt)) == [
        "ab",
        "cd",
    ]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [SCRIPT, SCRIPT[::-1]] * 2
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(len(shared.pipeline._tokens(i)) - 200 for i in (0, 1)) * 2
    create(model="", prompt=[[5, 6], [7]])
    assert {request.prompt for request in seen[-2:]} == {TokenPrompt((5, 6)), TokenPrompt((7,))}
    assert len({request.request_id for request in seen}) == len(seen)


def test_sampling_and_stop_fields_arrive(shared: Endpoint) -> None:
    extensions = {"top_k": 5, "min_p": 0.1, "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [9]}
    extensions |= {"cache_salt": "tenant", "priority": -3}
    shared.client.completions.create(
        model="demo_model",
        prompt="x",
        temperature=0.5,
        top_p=0.9,
        seed=7,
        stop=["\n"],
        max_tokens=9,
        extra_body=extensions,
    )
    request = shared.pipeline.seen[-1]
    sampling, stop = request.sampling, request.stop
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.top_k, sampling.min_p) == (
        0.5,
        0.9,
        7,
        5,
        0.1,
    )
    assert (stop.max_tokens, stop.min_tokens, stop.ignore_eos) == (9, 2, True)
    assert (stop.stop, stop.stop_token_ids) == (("\n",), (9,))
    assert (request.cache_salt, request.priority, request.is_batch) == ("tenant", -3, False)


@pytest.mark.parametrize(("tier", "is_batch"), [("flex", True), ("default", False), ("auto", False)])
def test_the_flex_tier_is_the_batch_class(
    shared: Endpoint, tier: Literal["flex", "default", "auto"], is_batch: bool
) -> None:
    shared.client.chat.completions.create(model="", messages=USER, service_tier=tier)
    request = shared.pipeline.seen[-1]
    assert (request.is_batch, request.priority) == (is_batch, 0)


def test_what_is_not_said_is_left_to_the_model(shared: Endpoint) -> None:
    shared.client.chat.completions.create(model="", messages=USER, user="me", extra_body={"top_k": -1})
    request = shared.pipeline.seen[-1]
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.seed) == (None, None, None)
    assert request.sampling.top_k == 0
    assert (request.stop.max_tokens, request.logprobs, request.n) == (None, None, 1)


def test_completions_without_max_tokens_get_sixteen_or_what_fits(shared: Endpoint) -> None:
    answer = shared.client.completions.create(model="", prompt="x", extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (16, "length")
    answer = shared.client.completions.create(model="", prompt=[5] * 1020, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_length_ends_a_chat(shared: Endpoint, field: str) -> None:
    limit: Any = {field: 2}
    answer = shared.client.chat.completions.create(model="", messages=USER, **limit)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (2, "length")


@pytest.mark.parametrize("stop", ["brown", ["zebra", "brown", " fox", "."]])
def test_stop_strings_cut_the_text(shared: Endpoint, stop: str | list[str]) -> None:
    answer = shared.client.completions.create(model="", prompt="x", stop=stop, max_tokens=64)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("The quick ", "stop")


def test_text_parts_are_joined_and_developers_are_the_system(shared: Endpoint) -> None:
    parts: Any = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages: Any = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    shared.client.chat.completions.create(model="", messages=messages)
    expected = ChatPrompt((ChatMessage("system", "be brief"), ChatMessage("user", "one\ntwo")))
    assert shared.pipeline.seen[-1].prompt == expected


def test_an_answer_can_be_sent_back_as_it_came(shared: Endpoint) -> None:
    answer = shared.client.chat.completions.create(model="", messages=USER)
    history: Any = [*USER, answer.choices[0].message.model_dump(), *USER]
    shared.client.chat.completions.create(model="", messages=history)
    prompt = shared.pipeline.seen[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[1] == ChatMessage("assistant", SCRIPT)


def test_chat_logprobs_name_each_token_and_its_rivals(shared: Endpoint) -> None:
    answer = shared.client.chat.completions.create(
        model="",
        messages=USER,
        logprobs=True,
        top_logprobs=2,
        max_tokens=3,
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert "".join(token.token for token in content) == answer.choices[0].message.content
    assert content[0].bytes == list(b"The")
    assert [(len(token.top_logprobs), token.logprob) for token in content] == [(2, -0.5)] * 3


def test_completion_logprobs_say_where_each_token_begins(shared: Endpoint) -> None:
    answer = shared.client.completions.create(model="", prompt="x", logprobs=2, max_tokens=5)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert logprobs.top_logprobs is not None
    begins = [len("".join(logprobs.tokens[:i])) for i in range(5)]
    assert logprobs.text_offset == begins
    assert logprobs.token_logprobs == [-0.5] * 5
    assert all(token in rivals for token, rivals in zip(logprobs.tokens, logprobs.top_logprobs, strict=True))


def test_streamed_logprobs_equal_the_whole_ones(shared: Endpoint) -> None:
    ask: dict[str, Any] = {"model": "", "prompt": "x", "logprobs": 1, "max_tokens": 6, "n": 2}
    whole = shared.client.completions.create(**ask)
    offsets: dict[int, list[int]] = {0: [], 1: []}
    for part in shared.client.completions.create(**ask, stream=True):
        if part.choices[0].logprobs:
            offsets[part.choices[0].index] += part.choices[0].logprobs.text_offset
    assert [choice.logprobs.text_offset for choice in whole.choices] == [offsets[0], offsets[1]]


def test_tokens_of_half_a_character_are_named_by_their_bytes(demo: Tokenization) -> None:
    with endpoint(demo, script="€") as running:
        answer = running.client.completions.create(model="", prompt="x", logprobs=0)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "<|endoftext|>"]
    assert logprobs.text_offset == [0, 0, 0, 1]
    assert answer.choices[0].text == "€"


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_come_back_when_asked_for(shared: Endpoint, stream: bool) -> None:
    body = {"prompt": "x", "max_tokens": 3, "return_token_ids": True, "stream": stream}
    answer = shared.post("/v1/completions", body)
    if stream:
        events = [json.loads(line[6:]) for line in answer.text.split("\n\n")[:-2]]
        token_ids = [token_id for event in events for token_id in event["choices"][0]["token_ids"]]
    else:
        token_ids = answer.json()["choices"][0]["token_ids"]
    assert token_ids == shared.pipeline._tokens(0)[:3]


def test_models_are_listed_and_found(shared: Endpoint) -> None:
    assert [model.id for model in shared.client.models.list()] == ["demo_model"]
    assert shared.client.models.retrieve("demo_model").owned_by == "tandem"
    with pytest.raises(openai.NotFoundError, match="no model 'gpt'"):
        shared.client.models.retrieve("gpt")


def test_operators_see_health_readiness_figures_and_the_api_page(demo: Tokenization) -> None:
    with endpoint(demo, ready=False, api_key="secret") as running:
        assert running.http.get("/health").json() == {"status": "alive"}
        assert running.http.get("/ready").status_code == 503
        assert "tandem_http_responses_total" in running.http.get("/metrics").text
        paths = running.http.get("/openapi.json").json()["paths"]
        assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/ready", "/metrics"} <= set(paths)
        assert running.http.get("/docs").status_code == 200
    assert running.telemetry.value("tandem_http_responses_total", route="/ready", status="503") == 1


def test_a_ready_router_says_so(shared: Endpoint) -> None:
    assert shared.http.get("/ready").status_code == 200


def test_the_request_id_goes_in_and_comes_out(shared: Endpoint) -> None:
    answer = shared.post("/v1/completions", {"prompt": "x"}, **{"x-request-id": "trace-7"})
    assert answer.headers["x-request-id"] == "trace-7"
    assert answer.json()["id"] == "cmpl-trace-7"
    assert shared.pipeline.seen[-1].request_id == "trace-7"
    assert shared.http.get("/health").headers["x-request-id"]


# What is refused


def refused(answer: httpx.Response, status: int, code: str, param: str | None, *words: str) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param), error
    assert all(word in error["message"] for word in words), error
    assert "Traceback" not in answer.text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 0.5),
        ("frequency_penalty", True),
        ("logit_bias", {"5": 1}),
        ("response_format", {"type": "json_object"}),
        ("echo", True),
        ("best_of", 1),
        ("made_up", None),
        ("timeout", 3),
    ],
)
def test_a_field_that_does_nothing_here_is_refused_by_name(shared: Endpoint, field: str, value: object) -> None:
    answer = shared.post("/v1/completions", {"prompt": "x", field: value})
    refused(answer, 400, "unsupported_field", field, f"'{field}'")


@pytest.mark.parametrize("tier", ["priority", "scale", "fast", True])
def test_a_service_tier_that_is_not_here_is_refused_with_those_that_are(shared: Endpoint, tier: object) -> None:
    answer = shared.post("/v1/completions", {"prompt": "x", "service_tier": tier})
    refused(answer, 400, "invalid_request", "service_tier", "'auto'", "'default'", "'flex'")


def test_the_client_of_openai_sees_which_field_it_was(shared: Endpoint) -> None:
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    with pytest.raises(openai.BadRequestError) as raised:
        shared.client.chat.completions.create(model="", messages=USER, tools=tools)
    assert (raised.value.param, raised.value.code, raised.value.type) == (
        "tools",
        "unsupported_field",
        "invalid_request_error",
    )


def test_fields_that_ask_for_nothing_are_taken(shared: Endpoint) -> None:
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
        ({"role": "tool", "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0].image_url"),
        ({"role": "user", "content": "x", "name": "bob"}, "messages[0].name"),
        ({"role": "assistant", "content": "x", "tool_calls": [1]}, "messages[0].tool_calls"),
    ],
)
def test_messages_that_cannot_be_rendered_are_refused_by_place(shared: Endpoint, message: object, param: str) -> None:
    answer = shared.post("/v1/chat/completions", {"messages": [message]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("completions", {}, "prompt: Field required"),
        ("completions", {"prompt": []}, "prompt: must be a string"),
        ("completions", {"prompt": [1, "a"]}, "prompt: must be a string"),
        ("completions", {"prompt": ["a"] * 129}, "at most 128"),
        ("completions", {"prompt": ""}, "prompt is empty"),
        ("completions", {"prompt": [1024]}, "token id 1024"),
        ("completions", {"prompt": [-1]}, "token id -1"),
        ("completions", {"prompt": "x", "temperature": 3}, "temperature must be from 0 to 2, not 3"),
        ("completions", {"prompt": "x", "temperature": float("nan")}, "temperature must be from 0 to 2"),
        ("completions", {"prompt": "x", "top_p": 0}, "top_p"),
        ("completions", {"prompt": "x", "min_p": 2}, "min_p"),
        ("completions", {"prompt": "x", "n": 0}, "n must be"),
        ("completions", {"prompt": "x", "n": True}, "n: Input should be a valid integer"),
        ("completions", {"prompt": "x", "max_tokens": 0}, "max_tokens must be at least 1"),
        ("completions", {"prompt": "x", "max_tokens": "9"}, "max_tokens: Input should be a valid integer"),
        ("completions", {"prompt": "x", "seed": -1}, "seed"),
        ("completions", {"prompt": "x", "logprobs": 99}, "logprobs must be from 0 to 20"),
        ("completions", {"prompt": "x", "stop": [""]}, "stop string must not be empty"),
        ("completions", {"prompt": "x", "stop": 5}, "stop: Input should be a valid list"),
        ("completions", {"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options needs stream"),
        ("completions", {"prompt": "x", "stream_options": {"x": 1}, "stream": True}, "stream_options.x"),
        ("chat/completions", {"messages": []}, "messages: List should have at least 1 item"),
        ("chat/completions", {"messages": USER, "top_logprobs": 2}, "top_logprobs needs logprobs"),
        ("chat/completions", {"messages": USER, "max_tokens": 1, "max_completion_tokens": 2}, "give one of them"),
    ],
)
def test_wrong_values_are_refused_with_what_to_change(shared: Endpoint, path: str, body: object, words: str) -> None:
    answer = shared.post(f"/v1/{path}", body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_a_prompt_past_the_context_tells_both_numbers(shared: Endpoint) -> None:
    answer = shared.post("/v1/completions", {"prompt": [5] * 2000, "max_tokens": 1})
    refused(answer, 400, "prompt_too_long", None, "2000", "1024")


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
    refused(shared.post("/v1/completions", b'{"prompt": "x", "model": "\\ud800"}'), 404, "unknown_model", None)


def test_an_oversized_body_is_refused_before_it_has_come(shared: Endpoint) -> None:
    url = httpx.URL(shared.url)
    with socket.create_connection((url.host, url.port or 0), timeout=10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        connection.sendall(b"Content-Length: 10000000000\r\n\r\n" + b"x" * 100_001)
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_a_body_just_past_the_limit_is_told_the_limit(shared: Endpoint) -> None:
    answer = shared.post("/v1/completions", {"prompt": "x" * 100_000})
    refused(answer, 413, "request_entity_too_large", None, "100000 bytes")


def test_an_unknown_model_is_not_found(shared: Endpoint) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        shared.client.completions.create(model="gpt-9", prompt="x")
    assert raised.value.code == "unknown_model"


def test_unknown_paths_and_methods_keep_the_shape(shared: Endpoint) -> None:
    refused(shared.http.get("/v1/nothing"), 404, "not_found", None)
    assert "/docs" in shared.http.get("/v1/nothing").json()["error"]["message"], "it says where to look"
    assert shared.http.get("/docs").status_code == 200
    refused(shared.http.get("/v1/completions"), 405, "method_not_allowed", None)


def test_a_bad_request_id_is_refused(shared: Endpoint) -> None:
    refused(
        shared.post("/v1/completions", {"prompt": "x"}, **{"x-request-id": "a" * 200}), 400, "invalid_request", None
    )


def test_without_the_key_nothing_is_answered(demo: Tokenization) -> None:
    with endpoint(demo, api_key="secret") as running:
        for client in (running.client, running.client_with("sécret")):
            with pytest.raises((openai.AuthenticationError, UnicodeEncodeError)):
                client.models.list()
        refused(running.post("/v1/completions", b"{"), 401, "unauthenticated", None, "API key")
        assert running.client_with("secret").models.list().data
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
        refused(running.post("/v1/completions", {"prompt": [3], "stop": "x"}), 400, "no_tokenizer", None)


def bare_model(folder: Path, tokenizer: Tokenizer | None = None) -> Path:
    config = {"vocab_size": 300, "max_position_embeddings": 128, "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    return folder


# What goes wrong


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (QueueFull("the queue is full", retry_after_s=2.2), 429, openai.RateLimitError),
        (NoWorkers("no decode worker"), 503, openai.InternalServerError),
        (Draining("leaving"), 503, openai.InternalServerError),
        (DeadlineExceeded("ran out in prefill"), 408, openai.APIStatusError),
        (InternalError("ours"), 500, openai.InternalServerError),
    ],
)
def test_an_early_failure_has_its_own_status(
    demo: Tokenization, error: TandemError, status: int, kind: type[openai.APIStatusError], stream: bool
) -> None:
    with endpoint(demo, error=error) as running, pytest.raises(kind) as raised:
        running.client.completions.create(model="", prompt="x", stream=stream)
    assert (raised.value.status_code, raised.value.code) == (status, error.reason)
    told = "3" if status == 429 else "1" if isinstance(error, Draining) else None
    assert raised.value.response.headers.get("retry-after") == told


def test_a_failure_in_mid_stream_is_an_error_event(demo: Tokenization) -> None:
    with endpoint(demo, error=WorkerLost("both pools are gone"), error_after=2) as running:
        stream = running.client.completions.create(model="", prompt="x", stream=True)
        text = next(stream).choices[0].text + next(stream).choices[0].text
        with pytest.raises(openai.APIError, match="both pools are gone") as raised:
            next(stream)
        raw = running.post("/v1/completions", {"prompt": "x", "stream": True}).text
    assert text == "The "
    assert raised.value.code == "worker_lost"
    assert "event: error\ndata: " in raw
    assert "[DONE]" not in raw


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_our_own_fault_shows_no_trace_and_is_logged_with_the_id(
    demo: Tokenization, caplog: pytest.LogCaptureFixture, after: int, stream: bool
) -> None:
    with endpoint(demo, error=ZeroDivisionError("secret detail"), error_after=after) as running:
        answer = running.post("/v1/completions", {"prompt": "x", "stream": stream}, **{"x-request-id": "r-7"})
    assert answer.status_code == (200 if stream and after else 500)
    assert "internal error; the router's log has it under request id r-7" in answer.text
    assert "ZeroDivision" not in answer.text
    assert "secret" not in answer.text
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]


def test_one_failing_prompt_ends_the_batch(demo: Tokenization) -> None:
    with endpoint(demo, error=SlowClient("too slow"), error_after=1) as running, pytest.raises(openai.RateLimitError):
        running.client.completions.create(model="", prompt=["a", "b", "c"])


# Who leaves


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["x", ["x", "y"]])
@pytest.mark.parametrize("hold_after", [0, 3])
def test_a_client_that_leaves_ends_its_request(
    demo: Tokenization, stream: bool, prompt: str | list[str], hold_after: int
) -> None:
    async def leave(url: str, holding: threading.Event) -> None:
        async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(verify=False)) as client:
            body = {"prompt": prompt, "stream": stream}
            asking = asyncio.create_task(client.post(url + "/v1/completions", json=body, timeout=30))
            assert await asyncio.to_thread(holding.wait, 10), "the pipeline never held"
            assert not asking.done()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    with endpoint(demo, hold_after=hold_after) as running:
        asyncio.run(leave(running.url, running.pipeline.holding))
        assert running.pipeline.closed.wait(10), "the generator lived on"


def test_a_stream_closed_by_its_reader_ends_the_request(demo: Tokenization) -> None:
    with endpoint(demo, hold_after=2) as running:
        stream = running.client.completions.create(model="", prompt="x", stream=True)
        assert next(iter(stream)).choices[0].text == "The"
        stream.close()
        assert running.pipeline.closed.wait(10), "the generator lived on"


# What is too much


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
def test_many_parts_are_refused_by_their_number(shared: Endpoint, body: bytes, said: str) -> None:
    answer = shared.post("/v1/completions", body)
    assert answer.status_code == 400, answer.text
    if said != "JSON":
        assert said in answer.json()["error"]["message"]


def test_many_messages_are_refused_by_their_number(shared: Endpoint) -> None:
    answer = shared.post("/v1/chat/completions", b'{"model": "", "messages": [' + b"{}," * 3000 + b"{}]}")
    assert answer.status_code == 400
    assert len(answer.content) < 2000


def test_a_body_that_is_declared_too_large_is_refused_before_it_is_sent(shared: Endpoint) -> None:
    url = httpx.URL(shared.url)
    with socket.create_connection((url.host, url.port or 0), timeout=20) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        connection.sendall(head + b"content-length: 100001\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")
