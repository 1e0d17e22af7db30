"""The options of a generation, conversations with tools included, and its request message."""

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any, TypedDict, cast

from tandem.enum_words import CHAT_ROLES, GRAMMAR_KINDS, TOOL_CHOICE_MODES
from tandem.v1 import inference_pb2

# The types and ranges that the message can hold. The router checks which values make sense.
_KINDS: Mapping[str, type] = {
    **dict.fromkeys(("model", "request_id", "label", "cache_salt", "regex", "grammar"), str),
    **dict.fromkeys(
        ("n", "max_tokens", "min_tokens", "top_k", "seed", "logprobs", "priority", "stream_interval"), Integral
    ),
    **dict.fromkeys(("truncate_prompt_tokens", "prompt_logprobs"), Integral),
    **dict.fromkeys(("temperature", "top_p", "min_p", "slo_ttft_s", "slo_tpot_s"), Real),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), Real),
    **dict.fromkeys(("ignore_eos", "is_batch", "include_stop_str_in_output", "skip_special_tokens"), bool),
    **dict.fromkeys(("single_tool_call", "divides_answer"), bool),
}
_KIND_NAMES = {str: "a str", Integral: "an integer", Real: "a number", bool: "True or False"}
_RANGES = {
    "n": (1, 2**32 - 1),
    "max_tokens": (0, 2**32 - 1),
    "min_tokens": (0, 2**32 - 1),
    "top_k": (0, 2**32 - 1),
    "seed": (0, 2**64 - 1),
    "logprobs": (0, 2**32 - 1),
    "prompt_logprobs": (0, 2**32 - 1),
    "priority": (-(2**31), 2**31 - 1),
    "stream_interval": (0, 2**32 - 1),
    "truncate_prompt_tokens": (-1, 2**31 - 1),
}
_CALL_FORM = '{"id": str, "function": {"name": str, "arguments": JSON text}}'
_ROLES = {"developer": "system"}  # as over HTTP
_MESSAGE_KEYS = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning"}
Message = Mapping[str, Any]  # as OpenAI writes a message of a conversation


class GenerateOptions(TypedDict, total=False):
    """The options of `generate` besides the prompt. An option that is left out takes the model's default."""

    model: str
    request_id: str  # its name in logs and the ledger; no live request may have it; default: random
    label: str  # a name for logs, the ledger and listings that need not be unique
    n: int
    max_tokens: int
    min_tokens: int
    temperature: float  # 0 is greedy
    top_k: int
    top_p: float
    min_p: float
    seed: int
    presence_penalty: float  # against tokens that the output has
    frequency_penalty: float  # the same, for each time that it has them
    repetition_penalty: float  # above 1: makes tokens of the prompt and the output less likely
    logit_bias: Mapping[int, float]  # by token id
    allowed_token_ids: Sequence[int]  # no other token is drawn
    bad_words: Sequence[str]  # texts not to generate
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop_str_in_output: bool  # the text ends after the stop string or stop token, not before it
    skip_special_tokens: bool  # default: True; else the text has special tokens by their names
    truncate_prompt_tokens: int  # the number of last tokens to keep; -1: all that max_tokens leaves room for
    logprobs: int  # log-probabilities of the chosen token and of this many most likely tokens
    prompt_logprobs: int  # the same for the prompt's tokens, in Result.prompt_logprobs
    cache_salt: str  # only requests with the same salt share the KV of common prefixes
    priority: int  # lower values first, if the workers' scheduling policy uses priorities
    is_batch: bool  # the batch class: only uses capacity that no other request needs
    slo_ttft_s: float  # refused at once if its first token is predicted later than this
    slo_tpot_s: float  # the same for the mean time between tokens
    stream_interval: int  # tokens of a choice that come together, except at its beginning and its end
    # At most one of these: the text of each choice must match it.
    json_schema: Mapping[str, object] | str
    regex: str
    choice: Sequence[str]
    grammar: str  # Lark in llguidance's variant, or GBNF


class ChatOptions(TypedDict, total=False):
    """The options of `generate` for `messages`."""

    # {"type": "function", "function": {"name", "description", "parameters": JSON schema, "strict"}} each
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Sequence[str]  # "auto", "none", "required", or the names of the tools of which one is called
    single_tool_call: bool  # the answer has one call at most
    template_arguments: Mapping[str, Any]  # further values for the chat template
    divides_answer: bool  # deltas have `parts` also without tools, and choices reasoning


class AllOptions(GenerateOptions, ChatOptions, total=False):
    """The options of `generate`; those for conversations go with `messages`."""


def generate_request(
    prompt: str | None,
    token_ids: Sequence[int] | None,
    messages: Iterable[Message] | None,
    options: AllOptions,
) -> inference_pb2.GenerateRequest:
    """Return the request message. An option that is None counts as not given. Raises ValueError for a value that the
    message cannot hold, and TypeError for a value of the wrong type or an unknown option."""
    options = cast(AllOptions, {name: value for name, value in options.items() if value is not None})
    _check_prompt(prompt, token_ids, messages)
    _check_options(options, has_messages=messages is not None)
    with _only_text():
        return _request(prompt, token_ids, messages, options)


def _request(
    prompt: str | None,
    token_ids: Sequence[int] | None,
    messages: Iterable[Message] | None,
    options: AllOptions,
) -> inference_pb2.GenerateRequest:
    stop = options.get("stop", ())
    return inference_pb2.GenerateRequest(
        request_id=options.get("request_id") or secrets.token_hex(12),
        label=options.get("label", ""),
        model=options.get("model", ""),
        text=prompt,
        token_ids=token_ids_message(token_ids) if token_ids is not None else None,
        chat=chat_prompt(messages, options) if messages is not None else None,
        sampling=inference_pb2.SamplingParams(
            temperature=options.get("temperature"),
            top_k=options.get("top_k"),
            top_p=options.get("top_p"),
            min_p=options.get("min_p"),
            seed=options.get("seed"),
            presence_penalty=options.get("presence_penalty"),
            frequency_penalty=options.get("frequency_penalty"),
            repetition_penalty=options.get("repetition_penalty"),
            logit_bias=_biases(options.get("logit_bias", {})),
            allowed_token_ids=token_ids_message(options.get("allowed_token_ids", ()), "allowed_token_ids").ids,
            bad_words=options.get("bad_words", ()),
        ),
        stop=inference_pb2.StopConditions(
            max_tokens=options.get("max_tokens"),
            min_tokens=options.get("min_tokens", 0),
            ignore_eos=options.get("ignore_eos", False),
            stop=[stop] if isinstance(stop, str) else stop,
            include_stop_str_in_output=options.get("include_stop_str_in_output", False),
            stop_token_ids=token_ids_message(options.get("stop_token_ids", ()), "stop_token_ids").ids,
        ),
        n=options.get("n", 1),
        logprobs=options.get("logprobs"),
        prompt_logprobs=options.get("prompt_logprobs"),
        cache_salt=options.get("cache_salt", ""),
        priority=options.get("priority", 0),
        is_batch=options.get("is_batch", False),
        slo_ttft_s=options.get("slo_ttft_s"),
        slo_tpot_s=options.get("slo_tpot_s"),
        grammar=_grammar(options),
        stream_interval=options.get("stream_interval", 0),
        truncate_prompt_tokens=options.get("truncate_prompt_tokens"),
        skip_special_tokens=options.get("skip_special_tokens", True),
    )


def _grammar(options: GenerateOptions) -> inference_pb2.Grammar | None:
    """Return the constraint on the answer. Raises ValueError for more than one option, and TypeError."""
    given = [name for name in ("json_schema", "regex", "choice", "grammar") if options.get(name) is not None]
    if not given:
        return None
    if len(given) > 1:
        raise ValueError(f"an answer can match one grammar: give one of {' and '.join(given)}")
    value = options.get(given[0])
    if given == ["choice"] and isinstance(value, str):
        raise TypeError("choice must be a sequence of str")
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return inference_pb2.Grammar(kind=GRAMMAR_KINDS.number(given[0]), text=text)


def tokenize_request(text: str | None, messages: Iterable[Message] | None) -> inference_pb2.TokenizeRequest:
    """Return the request message. Raises ValueError and TypeError."""
    if (text is None) == (messages is None):
        raise ValueError("give exactly one of text and messages")
    if text is not None and not isinstance(text, str):
        raise TypeError(f"text must be a str, not {type(text).__name__}: pass a conversation as messages=[...]")
    with _only_text():
        chat = chat_prompt(messages, {}) if messages is not None else None
        return inference_pb2.TokenizeRequest(text=text, chat=chat)


@contextmanager
def _only_text() -> Iterator[None]:
    """Raise ValueError where a text in a message has no encoding in UTF-8."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise ValueError(f"a text must not have half of a surrogate pair: {error.object!r:.80}") from error


def token_ids_message(token_ids: Sequence[int], name: str = "token_ids") -> inference_pb2.TokenIds:
    """Return token ids as a message. Raises TypeError for a value that is not a sequence of integers, and ValueError
    for an integer that is not a token id."""
    try:
        return inference_pb2.TokenIds(ids=token_ids)
    except TypeError:
        raise TypeError(f"{name} must be a sequence of integers, such as [1, 2, 3]") from None
    except ValueError:
        raise ValueError(f"{name} must be integers from 0 to 2**32 - 1") from None


def _biases(logit_bias: Mapping[int, float]) -> Mapping[int, float]:
    """Return the biases. Raises TypeError for a value that is not a mapping from token ids to numbers, and ValueError
    for a key that is not a token id."""
    if not isinstance(logit_bias, Mapping) or not all(
        isinstance(token_id, Integral) and isinstance(bias, Real) for token_id, bias in logit_bias.items()
    ):
        raise TypeError("logit_bias must be a mapping from token ids to numbers, such as {7: -100}")
    token_ids_message(list(logit_bias), "the keys of logit_bias")
    return logit_bias


def _check_prompt(prompt: object, token_ids: object, messages: object) -> None:
    if sum(given is not None for given in (prompt, token_ids, messages)) != 1:
        raise ValueError("give exactly one of prompt, token_ids and messages")
    if prompt is not None and not isinstance(prompt, str):
        raise TypeError(
            f"prompt must be a str, not {type(prompt).__name__}: pass token ids as token_ids=[...] and a conversation"
            " as messages=[...]"
        )


def _check_options(options: AllOptions, *, has_messages: bool) -> None:
    unknown = sorted(set(options) - set(AllOptions.__annotations__))
    if not has_messages and (of_chats := sorted(set(options) & set(ChatOptions.__annotations__))):
        raise ValueError(f"{', '.join(of_chats)}: only with messages")
    if unknown:
        raise TypeError(f"unknown options: {', '.join(unknown)}")
    for name, kind in _KINDS.items():
        value = options.get(name)
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"{name} must be {_KIND_NAMES[kind]}, not {type(value).__name__}")
    stop, bad_words = options.get("stop", ()), options.get("bad_words", ())
    if not isinstance(stop, Sequence) or not all(isinstance(text, str) for text in stop):
        raise TypeError("stop must be a str or a sequence of str")
    if not isinstance(bad_words, list | tuple) or not all(isinstance(text, str) for text in bad_words):
        raise TypeError("bad_words must be a list of str")
    for name, (least, most) in _RANGES.items():
        value = options.get(name)
        if isinstance(value, Integral) and not least <= int(value) <= most:
            raise ValueError(f"{name} must be from {least} to {most}, not {value}")


# {"role": "system" | "developer" | "user" | "assistant" | "tool", "content": text}, and where it applies name,
# tool_calls, tool_call_id and reasoning. "developer" is "system". A call is {"id", "type": "function", "function":
# {"name", "arguments": JSON text}}.
def chat_prompt(messages: Iterable[Message], options: ChatOptions) -> inference_pb2.ChatPrompt:
    """Return the message. Raises ValueError for a value that it cannot hold."""
    choice, tools = options.get("tool_choice", ""), options.get("tools", ())
    is_word = isinstance(choice, str)
    if not isinstance(tools, Sequence):
        raise TypeError(f"tools must be a list of tools, not {type(tools).__name__}")
    if not isinstance(choice, Sequence):
        raise TypeError(f"tool_choice must be a str or a list of tools' names, not {choice!r:.80}")
    arguments = options.get("template_arguments")
    return inference_pb2.ChatPrompt(
        messages=[_message(message) for message in messages],
        tools=[_tool(tool) for tool in tools],
        tool_choice=TOOL_CHOICE_MODES.number(str(choice) if is_word else "required"),
        callable_tools=() if is_word else choice,
        single_tool_call=options.get("single_tool_call", False),
        template_arguments=json.dumps(arguments) if arguments else "",
        divides_answer=options.get("divides_answer", False),
    )


def _message(message: Message) -> inference_pb2.ChatMessage:
    if not isinstance(message, Mapping) or not {"role"} <= set(message) <= _MESSAGE_KEYS:
        raise ValueError(f'a message must be {{"role": ..., "content": ...}}, not {message!r:.80}')
    if not message.get("tool_calls") and message.get("content") is None:
        raise ValueError(f"a message needs content: {message!r:.80}")
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, Sequence) or not all(map(_is_call, calls)):
        raise ValueError(f"tool_calls must be a list of {_CALL_FORM}, not {calls!r:.80}")
    return inference_pb2.ChatMessage(
        role=CHAT_ROLES.number(_ROLES.get(role := _text(message, "role"), role)),
        content=_content(message.get("content")),
        name=_text(message, "name"),
        tool_calls=[
            inference_pb2.ToolCall(
                id=call["id"], name=call["function"]["name"], arguments=call["function"].get("arguments", "")
            )
            for call in calls
        ],
        tool_call_id=_text(message, "tool_call_id"),
        reasoning=_text(message, "reasoning"),
    )


def _text(message: Message, key: str) -> str:
    value = message.get(key) or ""
    if not isinstance(value, str):
        raise TypeError(f"{key} of a message must be a str, not {value!r:.80}")
    return value


def _content(content: object) -> str:
    """Return the text of a message's content. Parts of text are joined by newlines, as over HTTP."""
    if content is None or isinstance(content, str):
        return content or ""
    given = content if isinstance(content, list | tuple) else ()
    parts = [part for part in given if isinstance(part, Mapping) and part.get("type") == "text"]
    if not parts or len(parts) < len(given):
        form = '[{"type": "text", "text": ...}]'
        raise ValueError(f"content of a message must be a str or {form}, not {content!r:.80}")
    return "\n".join(_text(part, "text") for part in parts)


def _is_call(call: object) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        return False
    texts = (call.get("id"), function.get("name"), function.get("arguments", ""))
    return all(isinstance(text, str) for text in texts)


def _tool(tool: Mapping[str, Any]) -> inference_pb2.Tool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f'a tool must be {{"type": "function", "function": {{"name": ...}}}}, not {tool!r:.80}')
    parameters = function.get("parameters")
    return inference_pb2.Tool(
        name=function["name"],
        description=function.get("description") or "",
        parameters=json.dumps(parameters) if parameters is not None else "",
        strict=bool(function.get("strict")),
    )
