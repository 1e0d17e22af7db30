"""The bodies of Anthropic's responses, for the OpenAPI document alone."""

from typing import Any, Literal

from pydantic import Field

from router.http.bodies.openapi_bodies import Body


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
