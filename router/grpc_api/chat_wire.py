"""Convert between the chats of tandem/v1/inference.proto and the router's own values, and divide answers to them."""

import json
from collections.abc import Mapping
from typing import Any

from cluster.errors import InvalidRequest
from router.request.divided_answers import ChatSettings, Division
from router.requests import ChatMessage, ChatOptions, ChatPrompt, GenerateRequest, Output, ToolCall
from router.text.tokenization import Tokenization
from router.tools.call_forms import CallableTool
from router.tools.constraint import ToolUse
from router.tools.formats import AnswerParser
from router.tools.pieces import Arguments, CallBegun, Content, Piece, Reasoning
from tandem.enum_words import CHAT_ROLES, TOOL_CHOICE_MODES
from tandem.v1 import inference_pb2

_AUTO, _NONE, _REQUIRED = "auto", "none", "required"


def chat_from_wire(chat: inference_pb2.ChatPrompt) -> ChatPrompt:
    """Return a conversation. Raises InvalidRequest for a message without a known role and for text that is no JSON."""
    shown = chat.tools if _mode(chat) != _NONE else ()
    messages = tuple(_message(message) for message in chat.messages)
    if not (chat.tools or chat.template_arguments):
        return ChatPrompt(messages)
    arguments = _object(chat.template_arguments, "chat.template_arguments")
    return ChatPrompt(messages, ChatOptions(tools=tuple(map(_template_tool, shown)), arguments=arguments))


def tool_use_from_wire(chat: inference_pb2.ChatPrompt) -> ToolUse | None:
    """Return what an answer may do with the tools; None if it may call none. Raises InvalidRequest."""
    mode = _mode(chat)
    if mode == _NONE or (mode == _AUTO and not chat.tools):
        return None
    tools = {tool.name: CallableTool(tool.name, _parameters(tool), tool.strict) for tool in chat.tools}
    names = list(dict.fromkeys(chat.callable_tools)) or list(tools)
    if unknown := [name for name in names if name not in tools]:
        raise InvalidRequest(f"chat.callable_tools: there is no tool {unknown[0]!r}", param="chat.callable_tools")
    if not names:
        raise InvalidRequest("chat.tool_choice: a call is required, but there are no tools", param="chat.tool_choice")
    return ToolUse(
        tuple(tools[name] for name in names),
        must_call=mode == _REQUIRED,
        is_parallel=not chat.single_tool_call,
        is_named=mode == _REQUIRED and len(chat.callable_tools) == 1,
    )


class AnswerParts:
    """Divides the text of one request's answers. A resumed request continues where its client's text ends."""

    def __init__(self, division: Division, request: GenerateRequest, tokenization: Tokenization) -> None:
        self._division = division
        self._parsers: dict[int, AnswerParser] = {}
        for choice, has in enumerate(request.resume_from or ()):
            stream = tokenization.text_stream((), 0, skips_special_tokens=request.skip_special_tokens)
            text = stream.push(has.token_ids).text + stream.flush()
            self._parser(choice).push(text[: has.num_characters])

    @staticmethod
    def asked_for(
        chat: inference_pb2.ChatPrompt, request: GenerateRequest, chats: ChatSettings, tokenization: Tokenization
    ) -> "tuple[GenerateRequest, AnswerParts | None]":
        """Return the request with its grammar, and the division of its answers; None if it asks for none. Raises
        InvalidRequest."""
        prompt = request.prompt
        if not isinstance(prompt, ChatPrompt):
            return request, None
        use = tool_use_from_wire(chat)
        if use is None and not chat.divides_answer and request.grammar is None:
            return request, None
        request = chats.constrained(request, use, tokenization)
        if use is None and not chat.divides_answer:
            return request, None
        division = chats.division(prompt, use, tokenization, request.request_id)
        return request, AnswerParts(division, request, tokenization)

    def add_to(self, message: inference_pb2.GenerateResponse, output: Output) -> None:
        """Add the parts of an output to its message."""
        for delta, delta_message in zip(output.deltas, message.deltas, strict=True):
            parser = self._parser(delta.choice)
            pieces = parser.push(delta.text)
            if delta.finish_reason is not None:
                pieces += parser.end()
            wanted = self._division.wanted(pieces)
            delta_message.parts.extend(self._part(piece, delta.choice, output.request_id) for piece in wanted)

    def _parser(self, choice: int) -> AnswerParser:
        if choice not in self._parsers:
            self._parsers[choice] = self._division.new_parser()
        return self._parsers[choice]

    def _part(self, piece: Piece, choice: int, request_id: str) -> inference_pb2.AnswerPart:
        message = inference_pb2.AnswerPart
        match piece:
            case Content(text):
                return message(content=text)
            case Reasoning(text):
                return message(reasoning=text)
            case CallBegun(index, name):
                call_id = self._division.call_id(choice, index, answer_id=request_id)
                return message(call=message.CallBegin(index=index, id=call_id, name=name))
            case Arguments(index, text):
                return message(arguments=message.CallArguments(index=index, text=text))


def _message(message: inference_pb2.ChatMessage) -> ChatMessage:
    return ChatMessage(
        _role(message.role),
        message.content,
        message.name,
        tuple(ToolCall(call.id, call.name, call.arguments) for call in message.tool_calls),
        message.tool_call_id,
        message.reasoning,
    )


def _role(number: int) -> str:
    try:
        role = CHAT_ROLES.word(number)
    except ValueError as error:
        raise InvalidRequest(f"chat: role: {error}", param="chat") from None
    if not role:
        words = ", ".join(CHAT_ROLES.words)
        raise InvalidRequest(f"chat: a message has no role: set one of {words}", param="chat")
    return role


def _mode(chat: inference_pb2.ChatPrompt) -> str:
    try:
        return TOOL_CHOICE_MODES.word(chat.tool_choice) or _AUTO
    except ValueError as error:
        raise InvalidRequest(f"chat.tool_choice: {error}", param="chat.tool_choice") from None


def _template_tool(tool: inference_pb2.Tool) -> dict[str, Any]:
    """Return a tool as chat templates read it."""
    function: dict[str, Any] = {"name": tool.name}
    function |= {"description": tool.description} if tool.description else {}
    function |= {"parameters": _parameters(tool)} if tool.parameters else {}
    return {"type": "function", "function": function}


def _parameters(tool: inference_pb2.Tool) -> Mapping[str, Any]:
    return _object(tool.parameters, "chat.tools.parameters")


def _object(text: str, field: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{field} is not valid JSON: {error}", param=field) from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"{field} must be a JSON object", param=field)
    return value
