"""The bodies of Anthropic's Messages API, their conversion to a chat, and for OpenAPI the bodies of its responses."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, FailFast, Field, WithJsonSchema

from cluster.errors import InvalidRequest
from cluster.messages import Grammar, GrammarKind
from router.http.bodies.messages import MAX_MESSAGES, MAX_TOOLS, CacheControl, TemplateArguments
from router.http.bodies.openapi_bodies import Body
from router.http.bodies.strict_body import NeutralValues, StrictBody
from router.http.errors import json_bytes
from router.request.validation import MAX_CACHE_SALT_CHARACTERS, MAX_STOP_STRING_CHARACTERS, MAX_STOP_STRINGS
from router.requests import (
    ChatMessage,
    ChatOptions,
    ChatPrompt,
    GenerateRequest,
    SamplingParams,
    StopConditions,
    ToolCall,
)
from router.tools.call_forms import CallableTool
from router.tools.constraint import ToolUse

_MAX_BLOCKS = 2048
_NO_EFFECT: Any = Field(None, description="accepted; changes nothing")
# Claude Code begins its system prompt with a line for Anthropic's accounting, which is not meant for a model.
_ACCOUNTING = "x-anthropic-billing-header:"


class _Block(StrictBody):
    cache_control: CacheControl | None = _NO_EFFECT


class TextBlock(_Block):
    asks_for_nothing: ClassVar[NeutralValues] = {"citations": ([],)}

    type: Literal["text"]
    text: str


class ThinkingBlock(StrictBody):
    type: Literal["thinking"]
    thinking: str
    signature: str = Field("", description="accepted; changes nothing")


class RedactedThinkingBlock(StrictBody):
    """A block of redacted reasoning. It is accepted and changes nothing, because only Anthropic can read it."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(_Block):
    asks_for_nothing: ClassVar[NeutralValues] = {"caller": ({"type": "direct"},), "toolset_name": ()}

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


def _as_blocks(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


_Texts = Annotated[
    list[TextBlock],
    Field(max_length=_MAX_BLOCKS),
    FailFast(),
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock]),
]


class ToolResultBlock(_Block):
    asks_for_nothing: ClassVar[NeutralValues] = {"toolset_name": ()}

    type: Literal["tool_result"]
    tool_use_id: str
    content: _Texts = Field([])
    is_error: bool = Field(default=False, description="accepted; the content says so to the model")


class SystemTurn(StrictBody):
    """Instructions in the middle of a conversation."""

    role: Literal["system"]
    content: _Texts

    def values(self) -> list[ChatMessage]:
        return [ChatMessage("system", _text(self.content))]


class UserTurn(StrictBody):
    role: Literal["user"]
    content: Annotated[
        list[Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]],
        Field(max_length=_MAX_BLOCKS),
        FailFast(),
        BeforeValidator(
            _as_blocks,
            json_schema_input_type=str | list[Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]],
        ),
    ]

    def values(self) -> list[ChatMessage]:
        """Return one message per result of a tool, and one of the text."""
        results = [block for block in self.content if isinstance(block, ToolResultBlock)]
        texts = [block for block in self.content if isinstance(block, TextBlock)]
        values = [ChatMessage("tool", _text(block.content), tool_call_id=block.tool_use_id) for block in results]
        return [*values, ChatMessage("user", _text(texts))] if texts or not results else values


_AssistantBlock = Annotated[
    TextBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock, Field(discriminator="type")
]


class AssistantTurn(StrictBody):
    role: Literal["assistant"]
    content: Annotated[
        list[_AssistantBlock],
        Field(max_length=_MAX_BLOCKS),
        FailFast(),
        BeforeValidator(_as_blocks, json_schema_input_type=str | list[_AssistantBlock]),
    ]

    def values(self) -> list[ChatMessage]:
        text = _text([block for block in self.content if isinstance(block, TextBlock)])
        thinking = "\n".join(block.thinking for block in self.content if isinstance(block, ThinkingBlock))
        calls = [
            ToolCall(block.id, block.name, json_bytes(block.input).decode())
            for block in self.content
            if isinstance(block, ToolUseBlock)
        ]
        return [ChatMessage("assistant", text, tool_calls=tuple(calls), reasoning=thinking)]


class ToolDefinition(StrictBody):
    asks_for_nothing: ClassVar[NeutralValues] = {"allowed_callers": (["direct"],)}

    type: Literal["custom"] = "custom"
    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str = ""
    input_schema: dict[str, Any]
    strict: bool = Field(default=False, description="true: the input of its calls follows its schema")
    cache_control: CacheControl | None = _NO_EFFECT
    defer_loading: bool | None = Field(None, description="accepted; the model is shown every tool from the beginning")
    eager_input_streaming: bool | None = Field(None, description="accepted; the input of calls is always streamed")
    input_examples: list[dict[str, Any]] | None = _NO_EFFECT

    def value(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": function}


class ToolChoice(StrictBody):
    type: Literal["auto", "none", "any", "tool"] = Field(
        description="none: the model is shown no tools; any: it calls at least one; tool: it calls the named one"
    )
    name: str = Field("", description="name of the tool to call, with the type tool")
    disable_parallel_tool_use: bool = Field(default=False, description="true: the answer makes at most one call")


_AUTO = ToolChoice(type="auto", name="", disable_parallel_tool_use=False)


class Thinking(StrictBody):
    asks_for_nothing: ClassVar[NeutralValues] = {"block_binding": ()}

    type: Literal["enabled", "disabled", "adaptive"] = Field(
        description="sets enable_thinking of the chat template, which is false for disabled"
    )
    budget_tokens: int | None = _NO_EFFECT
    display: Literal["summarized", "omitted", "updates"] | None = Field(
        None, description="omitted: the answer has no thinking; otherwise it has all of it"
    )


class OutputFormat(StrictBody):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema", description="JSON schema of the answer")


class OutputConfig(StrictBody):
    asks_for_nothing: ClassVar[NeutralValues] = {"task_budget": ()}

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="reasoning_effort of the chat template, with enable_thinking unless thinking is disabled"
    )
    format: OutputFormat | None = None

    def grammar(self) -> Grammar | None:
        return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(self.format.schema_)) if self.format is not None else None


class Metadata(StrictBody):
    user_id: str | None = _NO_EFFECT


_Turn = Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]


class CountTokensRequest(StrictBody):
    """The body of /v1/messages/count_tokens. A last message of the assistant is continued."""

    asks_for_nothing: ClassVar[NeutralValues] = {
        # Nothing is removed from a conversation; Claude Code asks for that by name.
        "context_management": ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
        "billing_policy": (),
        "compaction": (),
        "mcp_servers": ([],),
        "speed": ("standard",),
    }

    model: str = ""
    messages: Annotated[list[_Turn], FailFast()] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: _Texts = Field([])
    tools: Annotated[list[ToolDefinition], FailFast()] = Field([], max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: TemplateArguments = Field({}, description="further values for the chat template")
    cache_control: CacheControl | None = _NO_EFFECT
    user_profile_id: str | None = _NO_EFFECT
    workspace_id: str | None = _NO_EFFECT

    @property
    def chat(self) -> ChatPrompt:
        shown = [block for block in self.system if block.text and not block.text.startswith(_ACCOUNTING)]
        system = [ChatMessage("system", _text(shown))] if shown else []
        messages = [*system, *(value for message in self.messages for value in message.values())]
        continues = messages[-1].role == "assistant" and not messages[-1].tool_calls
        options = ChatOptions(
            tools=tuple(tool.value() for tool in self.tools) if self.shows_tools else (),
            arguments=self._template_arguments(),
            continue_final_message=continues,
        )
        return ChatPrompt(tuple(messages), options)

    def _template_arguments(self) -> dict[str, Any]:
        effort = self.output_config.effort if self.output_config is not None else None
        given: dict[str, Any] = {"reasoning_effort": effort, "enable_thinking": True} if effort is not None else {}
        thinks = {"enable_thinking": self.thinking.type != "disabled"} if self.thinking is not None else {}
        return given | thinks | self.chat_template_kwargs

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"

    @property
    def shows_tools(self) -> bool:
        return self.tool_choice is None or self.tool_choice.type != "none"

    @property
    def tool_use(self) -> ToolUse | None:
        """Return the use that the answer may make of the tools; None if it may call none. Raises InvalidRequest."""
        choice = self.tool_choice or _AUTO
        if choice.type == "none" or (choice.type == "auto" and not self.tools):
            return None
        is_named = choice.type == "tool"
        tools = [tool for tool in self.tools if not is_named or tool.name == choice.name]
        if not tools:
            named = f"with the name {choice.name!r}" if is_named else "to call"
            raise InvalidRequest(f"tool_choice: the request has no tool {named}", param="tool_choice")
        return ToolUse(
            tuple(CallableTool(tool.name, tool.input_schema, tool.strict) for tool in tools),
            must_call=choice.type != "auto",
            is_parallel=not choice.disable_parallel_tool_use,
            is_named=is_named,
        )


class MessagesRequest(CountTokensRequest):
    """The body of /v1/messages."""

    asks_for_nothing: ClassVar[NeutralValues] = {
        **CountTokensRequest.asks_for_nothing,
        "container": (),
        "diagnostics": (),
        "inference_geo": ("global",),
        "fallback_credit_token": (),
        "fallbacks": ([],),
        "thread": (),
        "watermarking": (False,),
        "kv_transfer_params": ({},),
        "ec_transfer_params": ({},),
        "vllm_xargs": ({},),
    }

    max_tokens: int = Field(ge=1, description="maximum output tokens; the context may leave room for fewer")
    stream: bool = False
    temperature: float | None = Field(None, json_schema_extra={"minimum": 0, "maximum": 2})
    top_p: float | None = Field(None, json_schema_extra={"exclusiveMinimum": 0, "maximum": 1})
    top_k: int | None = Field(None, json_schema_extra={"minimum": -1, "maximum": (1 << 32) - 1})
    stop_sequences: Annotated[
        list[str],
        FailFast(),
        WithJsonSchema(
            {
                "type": "array",
                "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_STRING_CHARACTERS},
                "maxItems": MAX_STOP_STRINGS,
            }
        ),
    ] = Field([], max_length=4096)
    metadata: Metadata | None = _NO_EFFECT
    service_tier: Literal["auto", "standard_only"] | None = _NO_EFFECT
    cache_salt: str = Field(
        "",
        description="prompts share KV with those of the same salt only",
        json_schema_extra={"maxLength": MAX_CACHE_SALT_CHARACTERS},
    )
    return_mm_kwargs: bool | None = _NO_EFFECT
    mm_payload: Literal["tensors", "none"] | None = _NO_EFFECT

    def request(self, label: str) -> GenerateRequest:
        grammar = self.output_config.grammar() if self.output_config is not None else None
        top_k = 0 if self.top_k == -1 else self.top_k
        return GenerateRequest(
            prompt=self.chat,
            label=label,
            model=self.model,
            sampling=SamplingParams(temperature=self.temperature, top_k=top_k, top_p=self.top_p),
            stop=StopConditions(default_max_tokens=self.max_tokens, stop=tuple(self.stop_sequences)),
            cache_salt=self.cache_salt,
            grammar=grammar,
            grammar_field="output_config" if grammar is not None else "",
        )


def _text(blocks: Sequence[TextBlock]) -> str:
    return "\n".join(block.text for block in blocks)


class AnthropicErrorDetail(Body):
    type: str
    message: str = Field(description="what is wrong, and what to change")


class AnthropicError(Body):
    type: Literal["error"]
    error: AnthropicErrorDetail


class ContentBlock(Body):
    type: Literal["text", "thinking", "tool_use"]
    text: str | None = Field(None, description="in a block of type text")
    thinking: str | None = Field(None, description="in a block of type thinking, which --reasoning-parser enables")
    signature: str | None = Field(None, description="in a block of type thinking; always empty")
    id: str | None = Field(None, description="in a block of type tool_use")
    name: str | None = Field(None, description="in a block of type tool_use")
    input: dict[str, Any] | None = Field(None, description="in a block of type tool_use")


class MessageUsage(Body):
    input_tokens: int = Field(description="prompt tokens that were computed")
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int = Field(description="prompt tokens whose KV was in a prefix cache")


class Message(Body):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(Body):
    """An event of a stream; `type` says which of the fields it has."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
        "error",
    ]
    message: dict[str, Any] | None = None
    index: int | None = None
    content_block: ContentBlock | None = None
    delta: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None
    error: AnthropicErrorDetail | None = None


class TokenCount(Body):
    input_tokens: int
