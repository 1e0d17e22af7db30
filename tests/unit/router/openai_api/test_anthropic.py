"""Anthropic's Messages API over a real server; only the workers' tokens are scripted."""

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from cluster.errors import NoWorkers, WorkerLost
from router.request.divided_answers import ChatSettings
from router.requests import ChatMessage, ChatPrompt, ToolCall
from router.text.tokenization import Tokenization
from router.tools.formats import AnswerFormat
from tests.unit.router.openai_api.endpoint import SCRIPT, USER, Endpoint, check_stream, endpoint

_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
_DIVIDED = "<think>\nWhere?\n</think>\n\nI look.\n" + _CALL
_TOOLS = [{"name": "get_weather", "input_schema": {"type": "object"}}]
_BODY: dict[str, Any] = {"model": "demo_model", "max_tokens": 200, "messages": USER}


@pytest.fixture(scope="module")
def tools(demo: Tokenization) -> Iterator[Endpoint]:
    with endpoint(demo, chats=ChatSettings(AnswerFormat.named("hermes", "qwen3")), script=_DIVIDED) as running:
        yield running


def _events(text: str) -> list[dict[str, Any]]:
    events = [event.split("\ndata: ") for event in text.split("\n\n")[:-1]]
    values: list[dict[str, Any]] = [json.loads(data) for _, data in events]
    assert [name.removeprefix("event: ") for name, _ in events] == [value["type"] for value in values]
    return values


def _collected(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a client assembles from the events."""
    first, *middle, last, stop = events
    assert (first["type"], last["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    message: dict[str, Any] = first["message"] | {"content": []} | last["delta"] | {"usage": last["usage"]}
    is_open, arguments = False, ""
    for event in middle:
        if event["type"] == "content_block_start":
            assert not is_open
            is_open, arguments = True, ""
            message["content"].append(event["content_block"])
        assert event["index"] == len(message["content"]) - 1
        block = message["content"][-1]
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            name = {"text_delta": "text", "thinking_delta": "thinking"}.get(delta["type"])
            if name is not None:
                block[name] += delta[name]
            else:
                arguments += delta["partial_json"]
        if event["type"] == "content_block_stop":
            is_open = False
            if block["type"] == "tool_use":
                block["input"] = json.loads(arguments)
    assert not is_open
    return message


def test_a_message_is_the_same_whole_and_streamed(tools: Endpoint) -> None:
    body, headers = _BODY | {"tools": _TOOLS}, {"x-request-id": "same"}
    whole = tools.post("/v1/messages", body, **headers).json()
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use"]
    assert whole["content"][0]["thinking"] == "Where?"
    assert whole["content"][1]["text"] == "I look."
    assert whole["content"][2]["input"] == {"city": "Paris"}
    assert (whole["stop_reason"], whole["id"]) == ("tool_use", "msg_same")
    streamed = tools.post("/v1/messages", body | {"stream": True}, **headers)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    events = _events(streamed.text)
    assert _collected(events) == whole
    usage = whole["usage"]
    total = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert events[0]["message"]["usage"]["input_tokens"] == total
    document = tools.http.get("/openapi.json").json()
    declared = document["paths"]["/v1/messages"]["post"]["responses"]["200"]["content"]
    schemas = {"components": document["components"]}
    jsonschema.validate(whole, declared["application/json"]["schema"] | schemas)
    check_stream("/v1/messages", streamed.text, document)


@pytest.mark.parametrize(
    ("sent", "stop_reason", "stop_sequence"),
    [
        ({}, "end_turn", None),
        ({"max_tokens": 2}, "max_tokens", None),
        ({"stop_sequences": [" fox"]}, "stop_sequence", " fox"),
    ],
)
def test_the_reason_of_the_end_is_named(
    shared: Endpoint, sent: dict[str, Any], stop_reason: str, stop_sequence: str | None
) -> None:
    for stream in (False, True):
        answer = shared.post("/v1/messages", _BODY | sent | {"stream": stream})
        message = _collected(_events(answer.text)) if stream else answer.json()
        assert (message["stop_reason"], message["stop_sequence"]) == (stop_reason, stop_sequence)
        assert SCRIPT.startswith(message["content"][0]["text"])


def test_a_conversation_with_tools_becomes_a_chat(tools: Endpoint) -> None:
    use = {"type": "tool_use", "id": "1", "name": "get_weather", "input": {"city": "Paris"}}
    thinking = {"type": "thinking", "thinking": "Where?", "signature": "x"}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "warm"}]}
    text = {"type": "text", "text": "And?", "cache_control": {"type": "ephemeral"}}
    messages = [*USER, {"role": "assistant", "content": [thinking, use]}, {"role": "user", "content": [result, text]}]
    body = _BODY | {"messages": messages, "system": "Be brief.", "tools": _TOOLS, "thinking": {"type": "disabled"}}
    assert tools.post("/v1/messages", body).status_code == 200
    prompt = tools.pipeline.seen[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages == (
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "hello"),
        ChatMessage(
            "assistant", "", tool_calls=(ToolCall("1", "get_weather", '{"city":"Paris"}'),), reasoning="Where?"
        ),
        ChatMessage("tool", "warm", tool_call_id="1"),
        ChatMessage("user", "And?"),
    )
    assert prompt.options.arguments == {"enable_thinking": False}
    assert prompt.options.tools[0]["function"]["name"] == "get_weather"
    assert not prompt.options.continue_final_message


def test_a_request_of_claude_code_is_served(tools: Endpoint) -> None:
    """The fields are those that Claude Code 2.1.197 sends, with shorter texts. The line for Anthropic's accounting is
    left out of the prompt: it changes with Claude Code's version, and no cached prompt would have it."""
    kept = {"type": "ephemeral"}
    told = ["x-anthropic-billing-header: cc_version=2.1.197.476;", "You are an agent.", "Be brief."]
    question = [{"type": "text", "text": "<system-reminder>"}, {"type": "text", "text": "hi", "cache_control": kept}]
    body = {
        "model": "demo_model",
        "messages": [{"role": "user", "content": question}, {"role": "system", "content": "There are agents."}],
        "system": [{"type": "text", "text": text, "cache_control": kept} for text in told],
        "tools": [_TOOLS[0] | {"description": "Weather.", "eager_input_streaming": True, "defer_loading": True}],
        "metadata": {"user_id": "me"},
        "max_tokens": 32_000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }
    answer = tools.post("/v1/messages?beta=true", body, **{"anthropic-beta": "claude-code-20250219,effort-2025-11-24"})
    assert [block["type"] for block in _collected(_events(answer.text))["content"]] == ["thinking", "text", "tool_use"]
    prompt = tools.pipeline.seen[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages == (
        ChatMessage("system", "You are an agent.\nBe brief."),
        ChatMessage("user", "<system-reminder>\nhi"),
        ChatMessage("system", "There are agents."),
    )
    assert prompt.options.arguments == {"reasoning_effort": "high", "enable_thinking": True}
    schema = tools.http.get("/openapi.json").json()
    declared = schema["paths"]["/v1/messages"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    jsonschema.validate(body, declared | {"components": schema["components"]})


@pytest.mark.parametrize(
    ("sent", "arguments"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"enable_thinking": True}),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low", "enable_thinking": True}),
        (
            {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}},
            {"reasoning_effort": "low", "enable_thinking": False},
        ),
        (
            {"thinking": {"type": "adaptive"}, "chat_template_kwargs": {"enable_thinking": False}},
            {"enable_thinking": False},
        ),
    ],
)
def test_thinking_and_effort_are_given_to_the_chat_template(
    shared: Endpoint, sent: dict[str, Any], arguments: dict[str, object]
) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        body = _BODY | sent if path == "/v1/messages" else {"model": "demo_model", "messages": USER} | sent
        assert shared.post(path, body).status_code == 200
    prompt = shared.pipeline.seen[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.options.arguments == arguments


@pytest.mark.parametrize("stream", [False, True])
def test_omitted_thinking_is_left_out_of_the_answer(tools: Endpoint, stream: bool) -> None:
    thinking = {"thinking": {"type": "adaptive", "display": "omitted"}, "stream": stream}
    answer = tools.post("/v1/messages", _BODY | {"tools": _TOOLS} | thinking)
    message = _collected(_events(answer.text)) if stream else answer.json()
    assert [block["type"] for block in message["content"]] == ["text", "tool_use"]


def test_an_empty_system_prompt_is_none_and_a_top_k_of_minus_1_is_all(shared: Endpoint) -> None:
    """Templates that take no system message would refuse an empty one."""
    for system in ("", [{"type": "text", "text": ""}]):
        assert shared.post("/v1/messages", _BODY | {"system": system, "top_k": -1}).status_code == 200
        request = shared.pipeline.seen[-1]
        assert isinstance(request.prompt, ChatPrompt)
        assert (request.prompt.messages, request.sampling.top_k) == ((ChatMessage("user", "hello"),), 0)


def test_an_output_format_is_a_grammar(shared: Endpoint) -> None:
    schema = {"type": "object", "properties": {"people": {"type": "integer"}}}
    config = {"format": {"type": "json_schema", "schema": schema}}
    assert shared.post("/v1/messages", _BODY | {"output_config": config}).status_code == 200
    request = shared.pipeline.seen[-1]
    assert request.grammar is not None
    assert (json.loads(request.grammar.text), request.grammar_field) == (schema, "output_config")


def test_a_last_message_of_the_assistant_is_continued_and_counted(shared: Endpoint) -> None:
    messages = [*USER, {"role": "assistant", "content": "It is"}]
    assert shared.post("/v1/messages", _BODY | {"messages": messages}).status_code == 200
    prompt = shared.pipeline.seen[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.options.continue_final_message
    count = shared.post("/v1/messages/count_tokens", {"model": "demo_model", "messages": messages}).json()
    usage = shared.post("/v1/messages", _BODY | {"messages": messages}).json()["usage"]
    assert count["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_forced_call_is_drawn_under_a_grammar(tools: Endpoint, choice: dict[str, str]) -> None:
    answer = tools.post("/v1/messages", _BODY | {"tools": _TOOLS, "tool_choice": choice}).json()
    assert answer["stop_reason"] == "tool_use"
    request = tools.pipeline.seen[-1]
    assert request.grammar is not None and "get_weather" in request.grammar.text
    assert request.grammar_field == "tools"


@pytest.mark.parametrize(
    ("sent", "status", "kind", "words"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens: Field required"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"temperature": 5}, 400, "invalid_request_error", "temperature"),
        ({"made_up": 1}, 400, "invalid_request_error", "'made_up'"),
        ({"context_management": {"edits": [{"type": "compact"}]}}, 400, "invalid_request_error", "context_management"),
        ({"chat_template_kwargs": {"tools": []}}, 400, "invalid_request_error", "chat_template_kwargs"),
        (
            {"tool_choice": {"type": "any"}},
            400,
            "invalid_request_error",
            "tool_choice: the request has no tool to call",
        ),
        ({"tool_choice": {"type": "tool", "name": "f"}}, 400, "invalid_request_error", "with the name 'f'"),
        ({"tools": _TOOLS}, 400, "invalid_request_error", "--tool-call-parser"),
        ({"model": "claude"}, 404, "not_found_error", "claude"),
    ],
)
def test_refusals_have_anthropics_shape(
    shared: Endpoint, sent: dict[str, Any], status: int, kind: str, words: str
) -> None:
    answer = shared.post("/v1/messages", _BODY | sent)
    assert (answer.status_code, answer.json()["type"], answer.json()["error"]["type"]) == (status, "error", kind)
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_refused_as_agents_that_shorten_their_conversation_expect(
    shared: Endpoint, stream: bool
) -> None:
    asked = {"model": _BODY["model"], "messages": [{"role": "user", "content": "import os\n" * 1_100}]}
    num_tokens = shared.post("/v1/messages/count_tokens", asked).json()["input_tokens"]
    answer = shared.post("/v1/messages", _BODY | asked | {"stream": stream})
    message = f"prompt is too long: {num_tokens} tokens > 1023 maximum"
    assert answer.status_code == 400
    assert answer.json() == {"type": "error", "error": {"type": "invalid_request_error", "message": message}}


def test_the_tokens_of_a_prompt_that_is_far_too_long_are_estimated(shared: Endpoint) -> None:
    asked = {"model": _BODY["model"], "messages": [{"role": "user", "content": "import os\n" * 8_000}]}
    num_tokens = shared.post("/v1/messages/count_tokens", asked).json()["input_tokens"]
    message = shared.post("/v1/messages", _BODY | asked).json()["error"]["message"]
    found = re.fullmatch(r"prompt is too long: (\d+) tokens > 1023 maximum", message)
    assert found is not None and int(found[1]) == pytest.approx(num_tokens, rel=0.01)


def test_failures_have_anthropics_shape(demo: Tokenization) -> None:
    with endpoint(demo, error=NoWorkers("none are there")) as running:
        answer = running.post("/v1/messages", _BODY)
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "overloaded_error")
    with endpoint(demo, error=WorkerLost("it is gone"), error_after=3) as running:
        events = _events(running.post("/v1/messages", _BODY | {"stream": True}).text)
    assert events[-1] == {"type": "error", "error": {"type": "overloaded_error", "message": "it is gone"}}


def test_every_answer_has_the_header_that_anthropics_clients_read_its_id_from(shared: Endpoint) -> None:
    for body in (_BODY, _BODY | {"stream": True}, {}):
        answer = shared.post("/v1/messages", body, **{"x-request-id": "mine"})
        assert answer.headers["request-id"] == answer.headers["x-request-id"] == "mine"
    assert "request-id" not in shared.http.get("/health").headers


def test_the_key_may_come_as_anthropics_clients_send_it(demo: Tokenization) -> None:
    with endpoint(demo, api_key="secret") as running:
        assert running.post("/v1/messages", _BODY, **{"x-api-key": "secret"}).status_code == 200
        for headers in ({}, {"x-api-key": "other"}):
            answer = running.post("/v1/messages", _BODY, **headers)
            assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")


def test_more_tokens_than_the_context_leaves_are_no_error(shared: Endpoint) -> None:
    answer = shared.post("/v1/messages", _BODY | {"max_tokens": 32_000})
    assert (answer.status_code, answer.json()["stop_reason"]) == (200, "end_turn")
