"""Chats with tools and reasoning, with the real `openai` package: what a template is given and what clients get."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from router.request.divided_answers import ChatSettings
from router.requests import ChatMessage, ChatPrompt, ToolCall
from router.text.tokenization import Tokenization
from router.tools.formats import AnswerFormat
from tests.unit.router.openai_api.endpoint import USER, Endpoint, endpoint

_PARIS = '{"city": "Paris"}'
_CALL = '<tool_call>\n{"name": "get_weather", "arguments": ' + _PARIS + "}\n</tool_call>"
_SCRIPT = "<think>\nWhere?\n</think>\n\nI look.\n" + _CALL + "\n" + _CALL.replace("Paris", "Rome")
WEATHER: Any = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


@pytest.fixture(scope="module")
def tools(demo: Tokenization) -> Iterator[Endpoint]:
    chats = ChatSettings(AnswerFormat.named("hermes", "qwen3"), trusts_templates=True)
    with endpoint(demo, chats=chats, script=_SCRIPT) as running:
        yield running


def _expected(message: Any) -> None:
    assert message.content == "I look."
    assert message.model_extra["reasoning_content"] == message.model_extra["reasoning"] == "Where?"
    assert [call.function.name for call in message.tool_calls] == ["get_weather"] * 2
    assert [json.loads(call.function.arguments)["city"] for call in message.tool_calls] == ["Paris", "Rome"]
    assert len({call.id for call in message.tool_calls}) == 2


def test_a_whole_answer_has_reasoning_content_and_calls(tools: Endpoint) -> None:
    answer = tools.client.chat.completions.create(model="", messages=USER, tools=[WEATHER])
    assert answer.choices[0].finish_reason == "tool_calls"
    _expected(answer.choices[0].message)


def test_a_stream_has_the_same_parts_and_ids_as_a_whole_answer(tools: Endpoint) -> None:
    extra = {"request_id": "same"}
    whole = tools.client.chat.completions.create(model="", messages=USER, tools=[WEATHER], extra_body=extra)
    parts = tools.client.chat.completions.create(
        model="", messages=USER, tools=[WEATHER], stream=True, extra_body=extra
    )
    deltas = [part.choices[0].delta for part in parts]
    assert "".join(delta.content or "" for delta in deltas) == "I look."
    assert "".join((delta.model_extra or {}).get("reasoning_content", "") for delta in deltas) == "Where?"
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    for index, call in enumerate(whole.choices[0].message.tool_calls or ()):
        own = [part for part in calls if part.index == index]
        assert call.type == "function"
        assert [part.id for part in own if part.id] == [call.id]
        assert (
            "".join((part.function.arguments if part.function else "") or "" for part in own) == call.function.arguments
        )
    assert len(calls) > 6, "arguments come in parts"


def test_the_helper_of_the_openai_package_collects_a_stream(tools: Endpoint) -> None:
    with tools.client.chat.completions.stream(model="", messages=USER, tools=[WEATHER]) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].finish_reason == "tool_calls"
    assert [call.function.name for call in final.choices[0].message.tool_calls or ()] == ["get_weather"] * 2


@pytest.mark.parametrize("method", ["create", "parse", "stream"])
def test_an_answer_is_sent_back_as_the_openai_package_returned_it(tools: Endpoint, method: str) -> None:
    """The package adds fields of its own to the answers that it has parsed."""
    strict: Any = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    completions, asked = tools.client.chat.completions, {"model": "", "messages": USER, "tools": [strict]}
    if method == "stream":
        with completions.stream(**asked) as stream:
            message: Any = stream.get_final_completion().choices[0].message
    else:
        message = getattr(completions, method)(**asked).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "warm"} for call in message.tool_calls]
    for answer in (message, message.model_dump() | {"parsed": {"city": "Paris"}}):
        completions.create(**asked | {"messages": [*USER, answer, *results]})
        prompt = tools.pipeline.seen[-1].prompt
        assert isinstance(prompt, ChatPrompt)
        calls = tuple(ToolCall(call.id, "get_weather", call.function.arguments) for call in message.tool_calls)
        assert prompt.messages[1] == ChatMessage("assistant", "I look.", tool_calls=calls, reasoning="Where?")


def test_only_the_first_call_is_returned_without_parallel_calls(tools: Endpoint) -> None:
    for stream in (False, True):
        answer: Any = tools.client.chat.completions.create(
            model="", messages=USER, tools=[WEATHER], parallel_tool_calls=False, stream=stream
        )
        if stream:
            calls = [call.index for part in answer for call in part.choices[0].delta.tool_calls or ()]
            assert set(calls) == {0}
        else:
            assert len(answer.choices[0].message.tool_calls) == 1


_NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize(
    ("choice", "ends"),
    [
        ("required", "tool_calls"),
        (_NAMED, "stop"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [_NAMED]}}, "tool_calls"),
    ],
)
def test_a_forced_call_is_drawn_under_a_grammar(tools: Endpoint, choice: Any, ends: str) -> None:
    for stream in (False, True):
        body = {"messages": USER, "tools": [WEATHER], "tool_choice": choice, "stream": stream, "request_id": "same"}
        answer = tools.post("/v1/chat/completions", body)
        assert f'"finish_reason":"{ends}"' in answer.text
        request = tools.pipeline.seen[-1]
        assert request.grammar is not None and "get_weather" in request.grammar.text
        assert request.grammar_field == "tools"
        assert isinstance(request.prompt, ChatPrompt) and request.prompt.options.tools == (WEATHER,)


def test_calls_of_a_strict_tool_and_an_answer_in_a_format_are_drawn_under_a_grammar(tools: Endpoint) -> None:
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    formatted = {"response_format": {"type": "json_object"}}
    for sent, field in (({"tools": [strict]}, "tools"), (formatted, "response_format")):
        assert tools.post("/v1/chat/completions", {"messages": USER} | sent).status_code == 200
        request = tools.pipeline.seen[-1]
        assert request.grammar is not None and request.grammar_field == field
        assert "</think>" in request.grammar.text, "reasoning comes before it"
    assert tools.post("/v1/chat/completions", {"messages": USER, "tools": [WEATHER]}).status_code == 200
    assert tools.pipeline.seen[-1].grammar is None


@pytest.mark.parametrize("sent", [{}, {"tools": [WEATHER], "tool_choice": "none"}])
def test_without_callable_tools_calls_are_text(tools: Endpoint, sent: dict[str, Any]) -> None:
    answer = tools.client.chat.completions.create(model="", messages=USER, extra_body=sent)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content == _SCRIPT.partition("</think>\n\n")[2]


def test_reasoning_may_be_left_out(tools: Endpoint) -> None:
    answer = tools.post("/v1/chat/completions", {"messages": USER, "include_reasoning": False}).json()
    assert set(answer["choices"][0]["message"]) == {"role", "content", "refusal"}


def test_logprobs_and_token_ids_of_all_tokens_come_with_the_parts(tools: Endpoint) -> None:
    body = {"messages": USER, "tools": [WEATHER], "logprobs": True, "return_token_ids": True, "stream": True}
    events = tools.post("/v1/chat/completions", body).text.split("\n\n")[:-2]
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    ids = [token_id for choice in choices for token_id in choice.get("token_ids", ())]
    positions = [position for choice in choices if choice["logprobs"] for position in choice["logprobs"]["content"]]
    assert len(ids) == len(positions) == len(tools.pipeline._tokens(0)) - 200


def test_a_conversation_with_calls_and_results_reaches_the_template(tools: Endpoint) -> None:
    call: Any = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": _PARIS}}
    messages = [*USER, {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "Where?"}]
    messages += [{"role": "tool", "tool_call_id": "1", "content": "warm", "name": "get_weather"}]
    body = {"messages": messages, "tools": [WEATHER], "reasoning_effort": "low", "documents": [{"text": "d"}]}
    assert tools.post("/v1/chat/completions", body).status_code == 200
    prompt = tools.pipeline.seen[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[1:] == (
        ChatMessage("assistant", "", "", (ToolCall("1", "get_weather", _PARIS),), reasoning="Where?"),
        ChatMessage("tool", "warm", "get_weather", tool_call_id="1"),
    )
    assert prompt.options.tools == (WEATHER,)
    assert prompt.options.arguments == {"reasoning_effort": "low", "enable_thinking": True}
    assert prompt.options.documents == ({"text": "d"},)


def test_a_template_of_the_request_is_used_where_the_router_trusts_it(tools: Endpoint, demo: Tokenization) -> None:
    template = "{{ messages[0].content }}|{{ flavour }}|{% if add_generation_prompt %}A{% endif %}"
    body = {"messages": USER, "chat_template": template, "chat_template_kwargs": {"flavour": "salt"}}
    for more, expected in (({}, "hello|salt|A"), ({"add_generation_prompt": False}, "hello|salt|")):
        answer = tools.post("/v1/chat/completions", body | more).json()
        assert answer["usage"]["prompt_tokens"] == len(demo.encode(expected))
    answer = tools.post("/v1/chat/completions", body | {"chat_template": "{% if"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
