"""The messages and tools of a chat, as OpenAI defines them."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, FailFast, Field, WithJsonSchema

from router.http.bodies.strict_body import NeutralValues, StrictBody
from router.requests import ChatMessage, ToolCall

MAX_MESSAGES = 2048
MAX_TOOLS = 128
_MAX_NAME_CHARACTERS = 128


class TextPart(StrictBody):
    type: Literal["text"]
    text: str


_CONTENT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": TextPart.model_json_schema(), "maxItems": MAX_MESSAGES},
    ]
}
_Content = Annotated[
    list[TextPart],
    Field(max_length=MAX_MESSAGES),
    FailFast(),
    BeforeValidator(lambda v: [TextPart(type="text", text=v)] if isinstance(v, str) else v),
    WithJsonSchema(_CONTENT_SCHEMA),
]


def _text(content: list[TextPart]) -> str:
    return "\n".join(part.text for part in content)


class _Message(StrictBody):
    """One message. `content` may be a list of text parts, which are joined by newlines."""

    content: _Content
    name: str = Field("", description="of the participant or tool; given to the chat template")


class SystemMessage(_Message):
    role: Literal["system", "developer"]

    def value(self) -> ChatMessage:
        return ChatMessage("system", _text(self.content), self.name)


class UserMessage(_Message):
    role: Literal["user"]

    def value(self) -> ChatMessage:
        return ChatMessage("user", _text(self.content), self.name)


class ToolMessage(_Message):
    """The result of a call that the assistant made."""

    role: Literal["tool"]
    tool_call_id: str

    def value(self) -> ChatMessage:
        return ChatMessage("tool", _text(self.content), self.name, tool_call_id=self.tool_call_id)


class CalledFunction(StrictBody):
    name: str
    arguments: str = Field("", description="JSON text of an object")


class AssistantToolCall(StrictBody):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(_Message):
    """An earlier answer: its text, and the tools that it called."""

    asks_for_nothing: ClassVar[NeutralValues] = {
        "refusal": ("",),
        "audio": (),
        "annotations": ([],),
        "function_call": (),
    }

    role: Literal["assistant"]
    content: _Content = Field([])
    tool_calls: Annotated[list[AssistantToolCall], FailFast()] = Field([], max_length=MAX_TOOLS)
    reasoning_content: str = Field("", description="given to the chat template")
    reasoning: str = Field("", description="another name of reasoning_content")

    def value(self) -> ChatMessage:
        calls = tuple(ToolCall(call.id, call.function.name, call.function.arguments) for call in self.tool_calls)
        reasoning = self.reasoning_content or self.reasoning
        return ChatMessage("assistant", _text(self.content), self.name, calls, reasoning=reasoning)


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Function(StrictBody):
    name: Annotated[str, Field(min_length=1, max_length=_MAX_NAME_CHARACTERS)]
    description: str = ""
    parameters: dict[str, Any] = Field({}, description="the JSON schema of its arguments")
    strict: bool = Field(default=False, description="accepted; changes nothing")


class Tool(StrictBody):
    type: Literal["function"]
    function: Function

    def value(self) -> dict[str, Any]:
        """Return the tool as chat templates read it: what the client set."""
        function = self.function.model_dump(include={"name", "description", "parameters"}, exclude_unset=True)
        return {"type": "function", "function": function}
