"""The fields that an OpenAI client may send, and their meaning here.

No field is ignored: a field that Tandem does not support is refused by name, unless it is null or requests the default
behaviour. The pipeline, which gRPC shares, checks the ranges.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, FailFast, Field, PlainValidator, WithJsonSchema, field_validator

from cluster.errors import InvalidRequest
from router.http.bodies.generation_fields import LogitFields, StreamOptions, StructuredOutputFields
from router.http.bodies.messages import MAX_MESSAGES, Message, TemplateArguments, ToolFields
from router.http.bodies.openapi import TOKEN_IDS
from router.http.bodies.strict_body import EMPTY, NeutralValues, StrictBody, whole
from router.http.openai_responses import PromptFields, PromptNames
from router.request.validation import (
    MAX_CACHE_SALT_CHARACTERS,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_REQUEST_ID_CHARACTERS,
    MAX_STOP_STRING_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_STREAM_INTERVAL,
)
from router.requests import (
    ChatOptions,
    ChatPrompt,
    GenerateRequest,
    Prompt,
    StopConditions,
    TextPrompt,
    TokenPrompt,
)
from router.text.tokenization import Tokenization

MAX_PROMPTS = 128
MAX_DOCUMENTS = 1024
_MAX_LISTED = 4096
# Fields of OpenAI's and vLLM's published protocols that Tandem does not have, with the values (besides null) that ask
# for nothing.
_ASKS_FOR_NOTHING: NeutralValues = {
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "watermarking": (False,),
    "spaces_between_special_tokens": (True,),
    "truncation_side": ("left",),
    "logprob_token_ids": (),
    "thinking_token_budget": (-1,),
    "routed_experts_prompt_start": (0,),
    "return_token_offsets": (False,),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "vllm_xargs": ({},),
    "repetition_detection": (),
    "return_weight_versions": (False,),
}
_COMPLETION_ASKS_FOR_NOTHING: NeutralValues = {
    **_ASKS_FOR_NOTHING,
    "suffix": ("",),
    "best_of": (1,),
    "prompt_embeds": (),
    "add_special_tokens": (True,),
}
_CHAT_ASKS_FOR_NOTHING: NeutralValues = {
    **_ASKS_FOR_NOTHING,
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "verbosity": ("medium",),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "add_special_tokens": (False,),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "return_prompt_text": (False,),
    "moderation": (),
}


def _range(minimum: float | None = None, maximum: float | None = None) -> dict[str, Any]:
    """Return the range of a number for the JSON schema. The pipeline checks it, with a message that says more."""
    return {name: value for name, value in (("minimum", minimum), ("maximum", maximum)) if value is not None}


def _one_or_more(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _prompts(value: object) -> list[Prompt]:
    """Accept a string, a list of strings, token ids, or lists of token ids. A pydantic union would report every token
    of an invalid list."""
    if isinstance(value, str):
        return [TextPrompt(value)]
    if isinstance(value, list) and value:
        if _are_ids(value):
            return [TokenPrompt(tuple(value))]
        items = whole(value)
        assert isinstance(items, list)
        if _are_ids(items):
            return [TokenPrompt(tuple(items))]
        if all(isinstance(item, str) for item in items):
            return _bounded([TextPrompt(item) for item in items])
        if all(isinstance(item, list) and _are_ids(item) for item in items):
            return _bounded([TokenPrompt(tuple(item)) for item in items])
    raise ValueError("must be a string, a list of strings, a list of token ids, or a list of lists of token ids")


def _are_ids(items: list[Any]) -> bool:
    """Return whether all items are integers, which booleans are not."""
    return list(map(type, items)).count(int) == len(items)


def _bounded(prompts: list[Prompt]) -> list[Prompt]:
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(f"holds {len(prompts)} prompts; at most {MAX_PROMPTS} fit one request")
    return prompts


_TOKEN_IDS = {"title": TOKEN_IDS, "type": "array", "items": {"type": "integer", "minimum": 0}}
_PROMPT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": MAX_PROMPTS},
        _TOKEN_IDS | {"minItems": 1},
        {"type": "array", "items": _TOKEN_IDS | {"minItems": 1}, "minItems": 1, "maxItems": MAX_PROMPTS},
    ]
}
_STOP_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "minLength": 1, "maxLength": MAX_STOP_STRING_CHARACTERS},
        {
            "type": "array",
            "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_STRING_CHARACTERS},
            "maxItems": MAX_STOP_STRINGS,
        },
    ]
}
_NO_EFFECT: Any = Field(None, description="accepted; changes nothing")


class PromptCacheOptions(StrictBody):
    """How prompts are cached. It changes nothing: common prefixes of prompts are always cached."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m"] | None = None


class _Request(LogitFields, StructuredOutputFields):
    """The fields of both endpoints. Unset sampling fields default to the model's generation_config.json."""

    default_max_tokens: ClassVar[int | None] = None

    model: str = Field("", description="name of the model, as /v1/models lists it; empty: the served model")
    n: int = Field(1, description="continuations of each prompt", json_schema_extra=_range(1, MAX_CHOICES))
    stream: bool = False
    stream_options: StreamOptions = Field(StreamOptions(), description="has an effect only with stream")
    max_tokens: int | None = Field(None, json_schema_extra=_range(1))
    temperature: float | None = Field(None, description="from 0, which is greedy, to 2", json_schema_extra=_range(0, 2))
    top_p: float | None = Field(
        None,
        description="total probability of the tokens kept",
        json_schema_extra={"exclusiveMinimum": 0, "maximum": 1},
    )
    seed: int | None = Field(None, description="same seed, same prompt, same tokens; counts modulo 2**64")
    stop: Annotated[
        list[str],
        Field(max_length=_MAX_LISTED),
        FailFast(),
        BeforeValidator(_one_or_more),
        WithJsonSchema(_STOP_SCHEMA),
    ] = Field(EMPTY, description="a string or up to 16 strings; the text ends before the first that occurs")
    service_tier: Literal["auto", "default", "flex"] = Field(
        "auto", description="flex: uses only capacity that no other request needs"
    )
    # Fields that vLLM's clients send beyond OpenAI's.
    top_k: int | None = Field(
        None,
        description="number of most likely tokens to draw from; 0, -1: all",
        json_schema_extra=_range(-1, (1 << 32) - 1),
    )
    min_p: float | None = Field(
        None, description="minimum probability, as a share of the highest", json_schema_extra=_range(0, 1)
    )
    min_tokens: int = Field(0, description="minimum output tokens", json_schema_extra=_range(0))
    ignore_eos: bool = Field(False, description="true: generation continues after the end-of-sequence token")
    stop_token_ids: Annotated[
        list[int],
        Field(max_length=_MAX_LISTED),
        FailFast(),
        WithJsonSchema(_TOKEN_IDS | {"maxItems": MAX_STOP_TOKEN_IDS}),
    ] = Field(EMPTY, description="tokens that end the output, as the end-of-sequence token does")
    cache_salt: str = Field(
        "",
        description="prompts share KV with those of the same salt only",
        json_schema_extra={"maxLength": MAX_CACHE_SALT_CHARACTERS},
    )
    priority: int = Field(
        0,
        description="lower values are served first, if the workers' scheduling policy uses priorities",
        json_schema_extra=_range(-(1 << 31), (1 << 31) - 1),
    )
    stream_interval: int = Field(
        1,
        description="tokens that a stream sends together, except at the beginning and the end of a choice",
        json_schema_extra=_range(1, MAX_STREAM_INTERVAL),
    )
    include_stop_str_in_output: bool = Field(False, description="true: the text keeps its stop string or stop token")
    skip_special_tokens: bool = Field(True, description="false: the text has special tokens by their names")
    truncate_prompt_tokens: int | None = Field(
        None,
        description="keeps this many last tokens of the prompt; -1: as many as fit the context beside max_tokens",
        json_schema_extra=_range(-1) | {"not": {"const": 0}},
    )
    prompt_logprobs: int | None = Field(
        None,
        description="log-probabilities of the prompt's tokens and of this many likeliest ones",
        json_schema_extra=_range(0, MAX_LOGPROBS),
    )
    echo: bool = Field(False, description="true: the text begins with the prompt or the continued message")
    return_token_ids: bool = Field(False, description="true: choices have token_ids, and prompts prompt_token_ids")
    return_tokens_as_token_ids: bool = Field(False, description="true: logprobs name tokens by id: token_id:7")
    request_id: str = Field(
        "",
        description="name of the request in the response's id and in logs; replaces the header x-request-id",
        json_schema_extra={"maxLength": MAX_REQUEST_ID_CHARACTERS, "pattern": "^[ -~]*$"},
    )
    # Fields that are accepted and change nothing.
    user: str | None = _NO_EFFECT
    safety_identifier: str | None = _NO_EFFECT
    prompt_cache_key: str | None = _NO_EFFECT
    prompt_cache_retention: str | None = _NO_EFFECT
    session_id: str | None = _NO_EFFECT
    metadata: dict[str, str] | None = _NO_EFFECT
    store: Literal[False] | None = _NO_EFFECT
    return_mm_kwargs: bool | None = _NO_EFFECT
    mm_payload: Literal["tensors", "none"] | None = _NO_EFFECT

    @field_validator("request_id")
    @classmethod
    def _request_id_is_a_header(cls, value: str) -> str:
        if len(value) > MAX_REQUEST_ID_CHARACTERS or not (value.isascii() and (not value or value.isprintable())):
            raise ValueError(f"must be at most {MAX_REQUEST_ID_CHARACTERS} printable ASCII characters")
        return value

    def prompt_fields(self, tokenization: Tokenization, *, is_chat: bool) -> PromptFields | None:
        """Return what the response says about its prompts, if it does."""
        if self.num_prompt_logprobs is None and not self.return_token_ids:
            return None
        names = PromptNames(tokenization, as_ids=self.return_tokens_as_token_ids)
        return PromptFields(names, self.prompt_logprobs, self.return_token_ids, n=self.n, is_of_body=is_chat)

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Return how many of the most likely tokens the response needs with their log-probabilities at each position of
        a prompt; None: it needs no log-probabilities of the prompt."""
        return self.prompt_logprobs

    def request(self, prompt: Prompt, label: str, *, max_tokens: int | None, logprobs: int | None) -> GenerateRequest:
        """Return the request for the pipeline. The router chooses its request id. Raises InvalidGrammar."""
        grammar, grammar_field = self.grammar()
        return GenerateRequest(
            prompt=prompt,
            label=label,
            model=self.model,
            sampling=self.sampling_params(
                temperature=self.temperature,
                top_k=0 if self.top_k == -1 else self.top_k,
                top_p=self.top_p,
                min_p=self.min_p,
                seed=None if self.seed is None else self.seed % (1 << 64),
            ),
            stop=StopConditions(
                max_tokens=max_tokens,
                default_max_tokens=self.default_max_tokens,
                min_tokens=self.min_tokens,
                ignore_eos=self.ignore_eos,
                stop=tuple(self.stop),
                stop_token_ids=tuple(self.stop_token_ids),
                include_stop_str_in_output=self.include_stop_str_in_output,
            ),
            n=self.n,
            logprobs=logprobs,
            prompt_logprobs=self.num_prompt_logprobs,
            cache_salt=self.cache_salt,
            priority=self.priority,
            is_batch=self.service_tier == "flex",
            stream_interval=self.stream_interval,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            skip_special_tokens=self.skip_special_tokens,
            grammar=grammar,
            grammar_field=grammar_field,
        )


class CompletionRequest(_Request):
    """The body of /v1/completions. Choices are numbered over all prompts: prompt i has i * n to i * n + n - 1."""

    asks_for_nothing = _COMPLETION_ASKS_FOR_NOTHING
    reads_numbers = frozenset({"prompt"})
    default_max_tokens = 16  # OpenAI's own

    max_tokens: int | None = Field(None, description="0: nothing is generated", json_schema_extra=_range(0))
    prompt: Annotated[list[Prompt], PlainValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
    logprobs: int | None = Field(
        None,
        description="log-probabilities of each token and of this many likeliest ones",
        json_schema_extra=_range(0, MAX_LOGPROBS),
    )

    @property
    def num_prompt_logprobs(self) -> int | None:
        wanted = self.prompt_logprobs, self.logprobs if self.echo else None
        return max((number for number in wanted if number is not None), default=None)

    def echoes(self) -> dict[int, Prompt]:
        """Return the prompt of each choice whose text begins with it."""
        n = min(self.n, MAX_CHOICES) if self.echo else 0  # a larger n is refused later
        return {i * n + k: prompt for i, prompt in enumerate(self.prompt) for k in range(n)}

    def requests(self, label: str) -> list[GenerateRequest]:
        """Return one request per prompt; each label of several has the number of its prompt. Raises InvalidGrammar."""
        labels = [label] if len(self.prompt) == 1 else [f"{label}-{i}" for i in range(len(self.prompt))]
        max_tokens = 1 if self.max_tokens == 0 and not self.min_tokens else self.max_tokens  # openai_stream.PromptsOnly
        return [
            self.request(prompt, one_label, max_tokens=max_tokens, logprobs=self.logprobs)
            for prompt, one_label in zip(self.prompt, labels, strict=True)
        ]


class ChatCompletionRequest(_Request, ToolFields):
    """The body of /v1/chat/completions."""

    asks_for_nothing = _CHAT_ASKS_FOR_NOTHING
    rules: ClassVar[Mapping[str, Any]] = {
        "if": {"required": ["top_logprobs"], "properties": {"top_logprobs": {"type": "integer", "minimum": 1}}},
        "then": {"required": ["logprobs"], "properties": {"logprobs": {"const": True}}},
    }

    messages: Annotated[list[Message], FailFast()] = Field(min_length=1, max_length=MAX_MESSAGES)
    prompt_cache_options: PromptCacheOptions | None = _NO_EFFECT
    max_completion_tokens: int | None = Field(
        None, description="the newer name of max_tokens", json_schema_extra=_range(1)
    )
    logprobs: bool = False
    top_logprobs: int | None = Field(
        None, description="from 0 to 20; above 0 it needs logprobs", json_schema_extra=_range(0, MAX_LOGPROBS)
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="given to the chat template, with enable_thinking, which is false for none"
    )
    include_reasoning: bool = Field(default=True, description="false: the reasoning is left out of the answer")
    documents: list[dict[str, str]] = Field(EMPTY, description="given to the chat template", max_length=MAX_DOCUMENTS)
    chat_template: str | None = Field(None, description="replaces the model's own, where routers permit it")
    chat_template_kwargs: TemplateArguments = Field({}, description="further values for the chat template")
    add_generation_prompt: bool = Field(default=True, description="true: the prompt ends where an answer begins")
    continue_final_message: bool = Field(default=False, description="true: the answer continues the last message")

    @property
    def chat(self) -> ChatPrompt:
        """Return the conversation with the arguments of the chat template."""
        arguments = self.chat_template_kwargs
        if self.reasoning_effort is not None:
            thinks = {"enable_thinking": self.reasoning_effort != "none"}
            arguments = {"reasoning_effort": self.reasoning_effort} | thinks | arguments
        options = ChatOptions(
            tools=tuple(tool.value() for tool in self.tools if self.tool_choice.type != "none"),
            documents=tuple(self.documents),
            template=self.chat_template,
            arguments=arguments,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
        )
        return ChatPrompt(tuple(message.value() for message in self.messages), options)

    def continued(self) -> str:
        """Return the assistant's message that the answer continues, if there is one."""
        last = self.messages[-1].value()
        return last.content if self.echo and last.role == "assistant" else ""

    def requests(self, label: str) -> list[GenerateRequest]:
        """Return the single request. Raises InvalidRequest for fields that contradict each other."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequest(
                "max_tokens and max_completion_tokens mean the same; give one of them", param="max_tokens"
            )
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return [self.request(self.chat, label, max_tokens=max_tokens, logprobs=logprobs)]
