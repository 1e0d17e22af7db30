"""The fields that an OpenAI client may send, and their meaning here.

No field is ignored: a field that Tandem does not support is refused by name, unless it is null or asks for the default
behaviour. The pipeline, which gRPC shares, checks the ranges.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)

from cluster.errors import InvalidRequest
from router.requests import (
    ChatMessage,
    ChatPrompt,
    GenerateRequest,
    Prompt,
    SamplingParams,
    StopConditions,
    TextPrompt,
    TokenPrompt,
)

MAX_PROMPTS = 128
MAX_MESSAGES = 2048
_MAX_FIELDS = 128  # of one object; checking a million would block the event loop
_MAX_LISTED = 4096

# Fields of other servers that Tandem does not have, with the values (besides null) that ask for nothing.
_ASKS_FOR_NOTHING: Mapping[str, tuple[object, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "store": (False,),
    "metadata": ({},),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (),
    "use_beam_search": (False,),
    "length_penalty": (1,),
}
_MESSAGE_ASKS_FOR_NOTHING: Mapping[str, tuple[object, ...]] = {
    "name": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
    "function_call": (),
    "tool_calls": ([],),
    "tool_call_id": (),
}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    asks_for_nothing: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        if len(data) > _MAX_FIELDS:
            raise ValueError(f"an object has {len(data)} fields; at most {_MAX_FIELDS} are looked at")
        return {name: value for name, value in data.items() if not cls._is_nothing(name, value)}

    @classmethod
    def _is_nothing(cls, name: object, value: object) -> bool:
        if name in cls.model_fields:
            return value is None
        neutral = cls.asks_for_nothing.get(name) if isinstance(name, str) else None
        # `True == 1` in Python: a boolean is nothing only where a boolean is named.
        return neutral is not None and (value is None or any(value == n and type(value) in _alike(n) for n in neutral))


def _alike(neutral: object) -> tuple[type, ...]:
    return (int, float) if type(neutral) is int else (type(neutral),)


def _one_or_more(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _prompts(value: object) -> list[Prompt]:
    """Accept a string, a list of strings, token ids, or lists of token ids. A pydantic union would report every token
    of an invalid list."""
    if isinstance(value, str):
        return [TextPrompt(value)]
    if isinstance(value, list) and value:
        if all(type(item) is int for item in value):
            return [TokenPrompt(tuple(value))]
        if all(isinstance(item, str) for item in value):
            return _bounded([TextPrompt(item) for item in value])
        if all(isinstance(item, list) and all(type(token) is int for token in item) for item in value):
            return _bounded([TokenPrompt(tuple(item)) for item in value])
    raise ValueError("must be a string, a list of strings, a list of token ids, or a list of lists of token ids")


def _bounded(prompts: list[Prompt]) -> list[Prompt]:
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(f"holds {len(prompts)} prompts; at most {MAX_PROMPTS} fit one request")
    return prompts


_PROMPT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ]
}


class StreamOptions(_Strict):
    include_usage: bool = False


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class Message(_Strict):
    """One message of a chat. `content` may be a list of text parts, which are joined by newlines."""

    asks_for_nothing = _MESSAGE_ASKS_FOR_NOTHING

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        list[TextPart],
        Field(max_length=MAX_MESSAGES),
        FailFast(),
        BeforeValidator(lambda v: [TextPart(type="text", text=v)] if isinstance(v, str) else v),
    ]

    def value(self) -> ChatMessage:
        role = "system" if self.role == "developer" else self.role
        return ChatMessage(role, "\n".join(part.text for part in self.content))


class SloHeaders(BaseModel):
    """The latency targets of a request, in headers: bodies stay as OpenAI defines them."""

    x_slo_ttft_ms: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="refuse the request at once if its first token is predicted later than this many milliseconds",
    )
    x_slo_tpot_ms: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="the same for the mean time between the tokens of a choice"
    )

    def apply(self, requests: Sequence[GenerateRequest]) -> list[GenerateRequest]:
        ttft_s, tpot_s = (None if ms is None else ms / 1000 for ms in (self.x_slo_ttft_ms, self.x_slo_tpot_ms))
        return [replace(request, slo_ttft_s=ttft_s, slo_tpot_s=tpot_s) for request in requests]


class _Request(_Strict):
    """The fields of both endpoints. Unset sampling fields default to the model's generation_config.json."""

    asks_for_nothing = _ASKS_FOR_NOTHING
    default_max_tokens: ClassVar[int | None] = None

    model: str = Field("", description="the name that /v1/models lists; empty: that one")
    n: int = Field(1, description="continuations of each prompt")
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: int | None = None
    temperature: float | None = Field(None, description="0 is greedy; up to 2")
    top_p: float | None = Field(None, description="above 0, at most 1")
    seed: int | None = Field(None, description="same seed, same prompt, same tokens")
    stop: Annotated[list[str], Field(max_length=_MAX_LISTED), FailFast(), BeforeValidator(_one_or_more)] = Field(
        [], description="a string, or up to 16"
    )
    user: str | None = Field(None, description="accepted; changes nothing")
    service_tier: Literal["auto", "default", "flex"] = Field(
        "auto", description="flex: uses only capacity that no other request needs"
    )
    # Fields that vLLM's clients send beyond OpenAI's.
    top_k: int | None = Field(None, description="0 or -1 keeps all tokens")
    min_p: float | None = Field(None, description="drops tokens less likely than this share of the likeliest")
    min_tokens: int = Field(0, description="no end before this many tokens")
    ignore_eos: bool = Field(False, description="go on past the model's own end")
    stop_token_ids: Annotated[list[int], FailFast()] = Field(
        [], description="token ids that end the text like EOS", max_length=_MAX_LISTED
    )
    cache_salt: str = Field("", description="prompts share KV with those of the same salt only")
    priority: int = Field(0, description="lower goes first, if the workers' scheduling policy uses priorities")
    return_token_ids: bool = Field(False, description="adds token_ids to every choice")

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options.include_usage and not self.stream:
            raise ValueError("stream_options needs stream")
        return self

    def request(self, prompt: Prompt, label: str, *, max_tokens: int | None, logprobs: int | None) -> GenerateRequest:
        """Return the request for the pipeline. The router chooses its request id."""
        return GenerateRequest(
            prompt=prompt,
            label=label,
            model=self.model,
            sampling=SamplingParams(
                temperature=self.temperature,
                top_k=0 if self.top_k == -1 else self.top_k,
                top_p=self.top_p,
                min_p=self.min_p,
                seed=self.seed,
            ),
            stop=StopConditions(
                max_tokens=max_tokens,
                default_max_tokens=self.default_max_tokens,
                min_tokens=self.min_tokens,
                ignore_eos=self.ignore_eos,
                stop=tuple(self.stop),
                stop_token_ids=tuple(self.stop_token_ids),
            ),
            n=self.n,
            logprobs=logprobs,
            cache_salt=self.cache_salt,
            priority=self.priority,
            is_batch=self.service_tier == "flex",
        )


class CompletionRequest(_Request):
    """The body of /v1/completions. Choices are numbered over all prompts: prompt i has i * n to i * n + n - 1."""

    default_max_tokens = 16  # OpenAI's own

    prompt: Annotated[list[Prompt], PlainValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
    logprobs: int | None = Field(None, description="log-probabilities of each token and of this many likeliest ones")

    def requests(self, label: str) -> list[GenerateRequest]:
        """Return one request per prompt. With several prompts each label gets the number of its prompt appended."""
        labels = [label] if len(self.prompt) == 1 else [f"{label}-{i}" for i in range(len(self.prompt))]
        return [
            self.request(prompt, one_label, max_tokens=self.max_tokens, logprobs=self.logprobs)
            for prompt, one_label in zip(self.prompt, labels, strict=True)
        ]


class ChatCompletionRequest(_Request):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], FailFast()] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, description="the newer name of max_tokens")
    logprobs: bool = False
    top_logprobs: int | None = Field(None, description="needs logprobs; up to 20")

    def requests(self, label: str) -> list[GenerateRequest]:
        """Return the single request. Raises InvalidRequest for fields that contradict each other."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequest("max_tokens and max_completion_tokens mean the same; give one of them")
        prompt = ChatPrompt(tuple(message.value() for message in self.messages))
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return [self.request(prompt, label, max_tokens=max_tokens, logprobs=logprobs)]
