"""The bodies of the OpenAI-compatible responses, for the OpenAPI document alone.

openai_responses.py builds the responses; the tests compare every response with these classes.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorDetail(Body):
    message: str = Field(description="what is wrong, and what to change")
    type: str
    param: str | None = Field(description="the field that must change")
    code: str = Field(description="the stable reason, the same over gRPC and in metrics")


class ErrorBody(Body):
    error: ErrorDetail


class CachedTokens(Body):
    cached_tokens: int = Field(description="prompt tokens whose KV was in a prefix cache")


class UsageBody(Body):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class PhaseBody(Body):
    name: str
    duration_s: float


class LedgerBody(Body):
    phases: list[PhaseBody] = Field(description="consecutive phases of the request, which sum to wall_s")
    wall_s: float
    ttft_s: float
    members: list[str]
    transport: str
    kv_bytes: int
    reasons: list[str]


Ledgers = Annotated[
    list[LedgerBody] | None, Field(description="present with the header x-tandem-ledger: 1; one ledger per prompt")
]


class PromptTokenBody(Body):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = Annotated[
    list[dict[str, PromptTokenBody] | None] | None,
    Field(description="present with prompt_logprobs: by token id, for each position but the first; in a stream, once"),
]


PromptTokenIds = Annotated[
    list[int] | None, Field(description="present with return_token_ids: the prompt's tokens; in a stream, once")
]


class CompletionLogprobs(Body):
    tokens: list[str]
    token_logprobs: list[float | None] = Field(description="null for the first token of an echoed prompt")
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Body):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = Field(description="the stop string or stop token of the request that ended it")
    token_ids: list[int] | None = Field(None, description="present with return_token_ids")
    prompt_token_ids: PromptTokenIds = None
    prompt_logprobs: PromptLogprobs = None


class Completion(Body):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody
    ledger: Ledgers = None


class CompletionChunk(Body):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice] = Field(description="empty in the chunk that stream_options.include_usage adds")
    usage: UsageBody | None = Field(None, description="present with stream_options.include_usage")
    ledger: Ledgers = None


class TokenLogprob(Body):
    token: str
    logprob: float
    bytes: list[int] | None


class PositionLogprobs(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Body):
    content: list[PositionLogprobs]
    refusal: None


class CalledFunctionBody(Body):
    name: str
    arguments: str = Field(description="JSON text, as the model wrote it")


class ToolCallBody(Body):
    id: str
    type: Literal["function"]
    function: CalledFunctionBody


class AnswerMessage(Body):
    role: Literal["assistant"]
    content: str | None = Field(description="null in an answer that consists of tool calls")
    refusal: None
    reasoning_content: str | None = Field(None, description="present if the router runs with --reasoning-parser")
    reasoning: str | None = Field(None, description="the same as reasoning_content")
    tool_calls: list[ToolCallBody] | None = Field(None, description="present if the answer calls tools")


class ChatChoice(Body):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | None = Field(description="the stop string or stop token of the request that ended it")
    token_ids: list[int] | None = Field(None, description="present with return_token_ids")


class ChatCompletion(Body):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_token_ids: PromptTokenIds = None
    prompt_logprobs: PromptLogprobs = None
    ledger: Ledgers = None


class FunctionDelta(Body):
    name: str | None = None
    arguments: str


class ToolCallDelta(Body):
    index: int
    id: str | None = Field(None, description="present in the first delta of a call, with its type and name")
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(Body):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Body):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | None = Field(description="the stop string or stop token of the request that ended it")
    token_ids: list[int] | None = Field(None, description="present with return_token_ids")


class ChatCompletionChunk(Body):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice] = Field(description="empty in the chunk that stream_options.include_usage adds")
    usage: UsageBody | None = Field(None, description="present with stream_options.include_usage")
    prompt_token_ids: PromptTokenIds = None
    prompt_logprobs: PromptLogprobs = None
    ledger: Ledgers = None


class Model(Body):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    type: Literal["model"]
    display_name: str
    created_at: str = Field(description="the same as `created`, in RFC 3339's form")


class ModelList(Body):
    object: Literal["list"]
    data: list[Model]
    has_more: Literal[False]
    first_id: str
    last_id: str


class Version(Body):
    version: str


class Tokens(Body):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = Field(description="present with return_token_strs")


class Text(Body):
    prompt: str


class Status(Body):
    status: str


Responses = dict[int | str, dict[str, Any]]
