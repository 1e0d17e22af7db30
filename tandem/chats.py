"""Conversations with tools, as OpenAI writes them, and their message."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from tandem.enum_words import CHAT_ROLES, TOOL_CHOICE_MODES
from tandem.v1 import inference_pb2

# {"role": "system" | "user" | "assistant" | "tool", "content": text}, and where it applies name, tool_calls,
# tool_call_id and reasoning. A call is {"id", "type": "function", "function": {"name", "arguments": JSON text}}.
Message = Mapping[str, Any]
_KEYS = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning"}


class ChatOptions(TypedDict, total=False):
    """The options of `generate` for `messages`."""

    # {"type": "function", "function": {"name", "description", "parameters": JSON schema, "strict"}} each
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Sequence[str]  # "auto", "none", "required", or the names of the tools of which one is called
    single_tool_call: bool  # the answer has one call at most
    template_arguments: Mapping[str, Any]  # more values for the chat template
    divides_answer: bool  # deltas have `parts` also without tools, and choices reasoning


def chat_prompt(messages: Iterable[Message], options: ChatOptions) -> inference_pb2.ChatPrompt:
    """Return the message. Raises ValueError for what it cannot hold."""
    choice = options.get("tool_choice", "")
    is_word = isinstance(choice, str)
    arguments = options.get("template_arguments")
    return inference_pb2.ChatPrompt(
        messages=[_message(message) for message in messages],
        tools=[_tool(tool) for tool in options.get("tools", ())],
        tool_choice=TOOL_CHOICE_MODES.number(str(choice) if is_word else "required"),
        callable_tools=() if is_word else choice,
        single_tool_call=options.get("single_tool_call", False),
        template_arguments=json.dumps(arguments) if arguments else "",
        divides_answer=options.get("divides_answer", False),
    )


def _message(message: Message) -> inference_pb2.ChatMessage:
    if not isinstance(message, Mapping) or not {"role"} <= set(message) <= _KEYS:
        raise ValueError(f'a message must be {{"role": ..., "content": ...}}, not {message!r:.80}')
    if not message.get("tool_calls") and message.get("content") is None:
        raise ValueError(f"a message needs content: {message!r:.80}")
    calls = [
        inference_pb2.ToolCall(
            id=call["id"], name=call["function"]["name"], arguments=call["function"].get("arguments", "")
        )
        for call in message.get("tool_calls") or ()
    ]
    return inference_pb2.ChatMessage(
        role=CHAT_ROLES.number(message["role"]),
        content=message.get("content") or "",
        name=message.get("name") or "",
        tool_calls=calls,
        tool_call_id=message.get("tool_call_id") or "",
        reasoning=message.get("reasoning") or "",
    )


def _tool(tool: Mapping[str, Any]) -> inference_pb2.Tool:
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f'a tool must be {{"type": "function", "function": {{"name": ...}}}}, not {tool!r:.80}')
    parameters = function.get("parameters")
    return inference_pb2.Tool(
        name=function["name"],
        description=function.get("description") or "",
        parameters=json.dumps(parameters) if parameters is not None else "",
        strict=bool(function.get("strict")),
    )
