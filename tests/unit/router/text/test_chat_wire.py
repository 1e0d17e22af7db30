"""Chats with tools over gRPC: the client library's requests, and its results from divided answers, resumed at any
token.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from cluster.errors import InvalidRequest
from cluster.messages import FinishReason
from router.grpc_api.inference_wire import (
    AnswerParts,
    chat_from_wire,
    generate_request_from_wire,
    output_to_wire,
    tool_use_from_wire,
)
from router.request.divided_answers import ChatSettings
from router.requests import ChatMessage, ChoiceDelta, Output, ToolCall
from router.text.tokenization import Tokenization
from router.tools.call_forms import CallableTool
from router.tools.formats import AnswerFormat
from tandem.options import ChatOptions, chat_prompt, generate_request
from tandem.progress import Assembly
from tandem.results import Choice
from tandem.results import ToolCall as ClientCall
from tandem.v1 import inference_pb2

_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
_TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": _SCHEMA}},
    {"type": "function", "function": {"name": "stop", "strict": True}},
]
_QUESTION = [{"role": "user", "content": "How is the weather?"}]
_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
_SCRIPT = f"<think>\nWhere?\n</think>\n\nI look.\n{_CALL}\n{_CALL.replace('Paris', 'Röme')}"
_CHATS = ChatSettings(AnswerFormat.named("hermes", "qwen3"))


@pytest.fixture(scope="module")
def demo() -> Tokenization:
    return Tokenization.load("examples/demo_model")


def _messages(request: inference_pb2.GenerateRequest, demo: Tokenization) -> list[inference_pb2.GenerateResponse]:
    """Return the responses of a router that generates the rest of the script after the client's tokens, one per
    token.
    """
    asked, parts = AnswerParts.asked_for(request.chat, generate_request_from_wire(request, 1.0), _CHATS, demo)
    assert parts is not None
    token_ids, stream = demo.encode(_SCRIPT), demo.text_stream((), 0)
    has = asked.resume_from[0] if asked.resume_from else None
    messages, num_characters = [], 0
    for index, token_id in enumerate(token_ids):
        text = stream.push([token_id]).text
        is_last = index == len(token_ids) - 1
        text += stream.flush() if is_last else ""
        num_characters += len(text)
        if has is not None and index < len(has.token_ids):
            continue
        delta = ChoiceDelta(0, index, (token_id,), text, finish_reason=FinishReason.STOP if is_last else None)
        messages.append(output_to_wire(Output("r", (delta,))))
        parts.add_to(messages[-1], Output("r", (delta,)))
    return messages


def _request(**options: Any) -> inference_pb2.GenerateRequest:
    given: Any = {"request_id": "r", "tools": _TOOLS, **options}
    return generate_request(None, None, _QUESTION, given)


def _received(assembly: Assembly, messages: Sequence[inference_pb2.GenerateResponse]) -> None:
    for message in messages:
        assembly.add(message)


def _choice(assembly: Assembly) -> Choice:
    assembly.add(inference_pb2.GenerateResponse(summary=inference_pb2.Summary()))
    return assembly.result().choices[0]


def test_an_answer_is_divided_the_same_wherever_it_is_resumed(demo: Tokenization) -> None:
    request, assembly = _request(), Assembly("r")
    whole = _messages(request, demo)
    _received(assembly, whole)
    choice = _choice(assembly)
    assert (choice.content, choice.reasoning) == ("I look.", "Where?")
    calls = choice.tool_calls
    assert [(call.name, call.arguments) for call in calls] == [
        ("weather", '{"city": "Paris"}'),
        ("weather", '{"city": "Röme"}'),
    ]
    assert len({call.id for call in calls}) == 2
    for num_received in range(len(whole)):
        resumed = Assembly("r")
        resumed.add(inference_pb2.GenerateResponse(accepted=inference_pb2.AcceptedRequest(acceptance=b"a")))
        _received(resumed, whole[:num_received])
        again = _request()
        again.resume_from.CopyFrom(resumed.resume_from(1, 1))
        _received(resumed, _messages(again, demo))
        other = _choice(resumed)
        assert (other.text, other.content, other.reasoning) == (choice.text, choice.content, choice.reasoning)
        assert other.tool_calls == calls


def test_a_conversation_with_calls_and_results_becomes_a_chat() -> None:
    call = ClientCall("1", "weather", "{}")
    messages: Any = [
        *_QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call.message()], "reasoning": "Where?"},
        {"role": "tool", "content": "warm", "tool_call_id": "1", "name": "weather"},
    ]
    options: ChatOptions = {"tools": _TOOLS, "template_arguments": {"enable_thinking": False}}
    chat = chat_from_wire(chat_prompt(messages, options))
    assert chat.messages[1:] == (
        ChatMessage("assistant", "", tool_calls=(ToolCall("1", "weather", "{}"),), reasoning="Where?"),
        ChatMessage("tool", "warm", "weather", tool_call_id="1"),
    )
    assert chat.options.tools == (_TOOLS[0], {"type": "function", "function": {"name": "stop"}})
    assert chat.options.arguments == {"enable_thinking": False}


def test_the_choice_of_tools_is_that_of_the_client() -> None:
    weather, stop = CallableTool("weather", _SCHEMA), CallableTool("stop", {}, is_strict=True)
    choices: list[tuple[ChatOptions, Any]] = [
        ({}, ((weather, stop), False, False)),
        ({"tool_choice": "required", "single_tool_call": True}, ((weather, stop), True, False)),
        ({"tool_choice": ["stop"]}, ((stop,), True, True)),
        ({"tool_choice": ["stop", "weather"]}, ((stop, weather), True, False)),
    ]
    for options, expected in choices:
        options["tools"] = _TOOLS
        use = tool_use_from_wire(chat_prompt(_QUESTION, options))
        assert use is not None and (use.tools, use.must_call, use.is_named) == expected
        assert use.is_parallel is not options.get("single_tool_call", False)
    assert tool_use_from_wire(chat_prompt(_QUESTION, {"tools": _TOOLS, "tool_choice": "none"})) is None
    assert tool_use_from_wire(chat_prompt(_QUESTION, {})) is None


def test_a_forced_call_has_a_grammar_and_other_chats_none(demo: Tokenization) -> None:
    for choice, is_forced in (("required", True), (["stop"], True), ("none", False)):
        request = _request(tool_choice=choice)
        wire = generate_request_from_wire(request, 1.0)
        asked, parts = AnswerParts.asked_for(request.chat, wire, _CHATS, demo)
        assert (asked.grammar is not None, parts is not None) == (is_forced, is_forced)
        assert is_forced or asked == replace(wire)


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"tool_choice": ["other"]}, "chat.callable_tools", "no tool 'other'"),
        ({"tool_choice": "required", "tools": []}, "chat.tool_choice", "there are no tools"),
    ],
)
def test_a_choice_that_the_tools_do_not_allow_is_refused(options: Any, param: str, words: str) -> None:
    given: Any = {"tools": _TOOLS, **options}
    with pytest.raises(InvalidRequest, match=words) as refused:
        tool_use_from_wire(chat_prompt(_QUESTION, given))
    assert refused.value.param == param


def test_text_that_is_no_json_and_unknown_enums_are_refused() -> None:
    chat = chat_prompt(_QUESTION, {"tools": _TOOLS})
    chat.tools[0].parameters = "{"
    with pytest.raises(InvalidRequest, match=r"chat\.tools\.parameters is not valid JSON"):
        chat_from_wire(chat)
    chat.tools[0].parameters = "[]"
    with pytest.raises(InvalidRequest, match="must be a JSON object"):
        chat_from_wire(chat)
    with pytest.raises(InvalidRequest, match=r"chat\.tool_choice: 9"):
        tool_use_from_wire(inference_pb2.ChatPrompt(tool_choice=9))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("messages", "options", "words"),
    [
        ([{"role": "user"}], {}, "needs content"),
        ([{"role": "user", "content": "x", "colour": "red"}], {}, "a message must be"),
        (_QUESTION, {"tools": [{"name": "f"}]}, "a tool must be"),
        (_QUESTION, {"tools": _TOOLS, "tool_choice": "always"}, "'always' is not a valid ToolChoiceMode"),
    ],
)
def test_a_value_that_no_message_can_hold_is_refused_by_the_client(messages: Any, options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        chat_prompt(messages, options)


def test_options_of_conversations_need_messages() -> None:
    with pytest.raises(ValueError, match="tools: only with messages"):
        generate_request("x", None, None, {"tools": _TOOLS})
