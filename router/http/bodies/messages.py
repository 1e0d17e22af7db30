"""The messages and tools of a chat, as OpenAI defines them."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, FailFast, Field, WithJsonSchema

from cluster.errors import InvalidRequest
from router.http.bodies.strict_body import NeutralValues, StrictBody
from router.requests import ChatMessage, ToolCall
from router.text.chat_template import NAMED_TOKENS
from router.tools.call_forms import CallableTool
from router.tools.constraint import ToolUse

MAX_MESSAGES = 2048
MAX_TOOLS = 128
_MAX_NAME_CHARACTERS = 128
# Variables of a chat template whose values come from other fields of the body or from the model's files.
_TEMPLATE_FIELDS: tuple[str, ...] = ("messages", "tools", "documents", "chat_template", "add_generation_prompt")
_TEMPLATE_FIELDS += ("continue_final_message", "strftime_now", "tokenize", *NAMED_TOKENS)


def _leaves_fields_alone(value: dict[str, Any]) -> dict[str, Any]:
    if taken := sorted(set(value) & set(_TEMPLATE_FIELDS)):
        raise ValueError(f"{', '.join(taken)} cannot be set here: use the field of that name, where there is one")
    return value


TemplateArguments = Annotated[
    dict[str, Any],
    AfterValidator(_leaves_fields_alone),
    WithJsonSchema({"type": "object", "propertyNames": {"not": {"enum": [*_TEMPLATE_FIELDS]}}}),
]


class CacheControl(StrictBody):
    """A client's wish that the prompt is cached up to here. It is accepted and changes nothing: common prefixes of
    prompts are cached without it.
    """

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class CacheBreakpoint(StrictBody):
    """The same wish as OpenAI's clients send it."""

    mode: Literal["explicit"]
    ttl: Literal["30m", "12h"] | None = None


class TextPart(StrictBody):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = Field(None, description="accepted; changes nothing")
    prompt_cache_breakpoint: CacheBreakpoint | None = Field(None, description="accepted; changes nothing")


_Content = Annotated[
    list[TextPart],
    Field(max_length=MAX_MESSAGES),
    FailFast(),
    BeforeValidator(
        lambda v: [TextPart(type="text", text=v)] if isinstance(v, str) else v,
        json_schema_input_type=str | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES)],
    ),
]


def _text(content: list[TextPart]) -> str:
    return "\n".join(part.text for part in content)


# Fields that vLLM takes in every message and hands to templates of single models.
_OF_VLLM: NeutralValues = {"tools": ([],), "task": ()}


class _Message(StrictBody):
    """A message. `content` may be a list of text parts, which are joined by newlines."""

    asks_for_nothing: ClassVar[NeutralValues] = _OF_VLLM

    content: _Content
    name: str = Field("", description="name of the participant or tool; given to the chat template")


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


# What the package `openai` adds to the answers that its methods `parse` and `stream` return, and programs send back.
_OF_OPENAI: Any = Field(None, description="accepted; changes nothing")


class CalledFunction(StrictBody):
    name: str
    arguments: str = Field("", description="JSON text of an object")
    parsed_arguments: Any = _OF_OPENAI


class AssistantToolCall(StrictBody):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = _OF_OPENAI


class AssistantMessage(_Message):
    """An earlier answer: its text, and the tools that it called."""

    asks_for_nothing: ClassVar[NeutralValues] = {
        **_OF_VLLM,
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
    parsed: Any = _OF_OPENAI

    def value(self) -> ChatMessage:
        calls = tuple(ToolCall(call.id, call.function.name, call.function.arguments) for call in self.tool_calls)
        reasoning = self.reasoning_content or self.reasoning
        return ChatMessage("assistant", _text(self.content), self.name, calls, reasoning=reasoning)


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Function(StrictBody):
    asks_for_nothing: ClassVar[NeutralValues] = {"defer_loading": (False,)}

    name: Annotated[str, Field(min_length=1, max_length=_MAX_NAME_CHARACTERS)]
    description: str = ""
    parameters: dict[str, Any] = Field({}, description="the JSON schema of its arguments")
    strict: bool = Field(default=False, description="true: the arguments of its calls follow its schema")

    def callable(self) -> CallableTool:
        return CallableTool(self.name, self.parameters, self.strict)


class Tool(StrictBody):
    asks_for_nothing: ClassVar[NeutralValues] = {"defer_loading": (False,)}

    type: Literal["function"]
    function: Function
    cache_control: CacheControl | None = Field(None, description="accepted; changes nothing")

    def value(self) -> dict[str, Any]:
        """Return the tool as chat templates read it: what the client set."""
        function = self.function.model_dump(include={"name", "description", "parameters"}, exclude_unset=True)
        return {"type": "function", "function": function}


class WordChoice(StrictBody):
    """The choice of tools by a word. `none`: the model is shown no tools. `required`: it calls at least one."""

    type: Literal["none", "auto", "required"]


class FunctionName(StrictBody):
    name: str


class NamedTool(StrictBody):
    """The model calls this tool once."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(StrictBody):
    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedToolsChoice(StrictBody):
    """The model is shown all tools, and calls only these."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _as_object(value: object) -> object:
    if isinstance(value, str) and value not in _CHOICE_WORDS:
        raise ValueError(f"must be one of {', '.join(_CHOICE_WORDS)}, or an object")
    return {"type": value} if isinstance(value, str) else value


_CHOICE_WORDS = ("none", "auto", "required")
_Choice = Annotated[WordChoice | NamedTool | AllowedToolsChoice, Field(discriminator="type")]
ToolChoice = Annotated[
    _Choice,
    BeforeValidator(
        _as_object, json_schema_input_type=Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice
    ),
]


class ToolFields(StrictBody):
    """The fields of a chat that say which tools its answer may call."""

    tools: Annotated[list[Tool], FailFast()] = Field(
        [], description="tools that the model may call", max_length=MAX_TOOLS
    )
    tool_choice: ToolChoice = Field(
        WordChoice(type="auto"), description="none, auto, required, or an object that names the tools"
    )
    parallel_tool_calls: bool = Field(default=True, description="false: the answer makes at most one call")

    @property
    def tool_use(self) -> ToolUse | None:
        """Return the use that the answer may make of the tools; None if it may call none. Raises InvalidRequest for a
        choice that the tools do not allow."""
        choice = self.tool_choice
        word = choice.allowed_tools.mode if isinstance(choice, AllowedToolsChoice) else choice.type
        if choice.type == "none" or (choice.type == "auto" and not self.tools):
            return None
        tools = {tool.function.name: tool.function.callable() for tool in self.tools}
        names = list(tools)
        if isinstance(choice, NamedTool):
            names = [choice.function.name]
        elif isinstance(choice, AllowedToolsChoice):
            names = [tool.function.name for tool in choice.allowed_tools.tools]
        if unknown := [name for name in names if name not in tools]:
            raise InvalidRequest(
                f"tool_choice: no tool of the request has the name {unknown[0]!r}", param="tool_choice"
            )
        if not tools:
            raise InvalidRequest("tool_choice: a call is required, but the request has no tools", param="tool_choice")
        return ToolUse(
            tuple(tools[name] for name in dict.fromkeys(names)),
            must_call=word != "auto",
            is_parallel=self.parallel_tool_calls,
            is_named=isinstance(choice, NamedTool),
        )
