"""Renders a conversation as the prompt that the model's own chat template defines."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cluster.errors import ConfigError, InvalidRequest
from router.requests import NO_CHAT_OPTIONS, ChatMessage, ChatOptions

_EPOCH = datetime(1970, 1, 1)  # of UTC, without a zone: `%z` is empty as in the library that templates are made for
_END_OF_CONTENT = "\ue000end of content\ue001"  # stands at the end of a message that the model continues
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """A compiled Jinja chat template, which may be used from several threads.

    Templates come with the model and are not trusted: they run in an immutable sandbox with plain values and no loader.
    A resumed request is rendered again, perhaps on another day and in another time zone, and must give the same prompt.
    Therefore the time is an argument, the time zone is UTC, and nothing in a template is random.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile the template. Raises ConfigError if it is not valid Jinja."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        del environment.filters["random"], environment.globals["lipsum"]
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError, ValueError) as error:  # ValueError: a number of 5,000 digits
            raise ConfigError(f"the model's chat template is not valid Jinja: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self, messages: Sequence[ChatMessage], rendered_at_us: int, options: ChatOptions = NO_CHAT_OPTIONS
    ) -> str:
        """Return the prompt, ready for the assistant's turn. `rendered_at_us`: the present for the template, in
        microseconds since 1970. Raises InvalidRequest if the template refuses the messages."""
        if not options.continue_final_message:
            return self._render(messages, rendered_at_us, options, options.add_generation_prompt)
        last = replace(messages[-1], content=messages[-1].content + _END_OF_CONTENT)
        text = self._render([*messages[:-1], last], rendered_at_us, options, add_generation_prompt=False)
        before, end, _ = text.rpartition(_END_OF_CONTENT)
        if not end:
            raise InvalidRequest("continue_final_message: the model's chat template leaves out the last message")
        return before

    def generation_prompt(self, options: ChatOptions) -> str:
        """Return how a prompt ends with these options; empty if the template refuses a plain conversation."""
        try:
            return self._render([ChatMessage("user", "x")], 0, options, options.add_generation_prompt)
        except InvalidRequest:
            return ""

    def _render(
        self, messages: Sequence[ChatMessage], rendered_at_us: int, options: ChatOptions, add_generation_prompt: bool
    ) -> str:
        """Render the messages in their order, or if the template refuses that, with all system messages joined at the
        beginning: some templates take them there only."""
        try:
            return self._render_in_order(messages, rendered_at_us, options, add_generation_prompt)
        except InvalidRequest:
            continues_system = options.continue_final_message and messages[-1].role == "system"
            if continues_system or all(message.role != "system" for message in messages[1:]):
                raise
        return self._render_in_order(_system_first(messages), rendered_at_us, options, add_generation_prompt)

    def _render_in_order(
        self, messages: Sequence[ChatMessage], rendered_at_us: int, options: ChatOptions, add_generation_prompt: bool
    ) -> str:
        try:
            return self._template.render(
                {
                    **self._special_tokens,
                    **options.arguments,
                    "messages": [_values(message) for message in messages],
                    "tools": list(options.tools) or None,
                    "documents": list(options.documents) or None,
                    "add_generation_prompt": add_generation_prompt,
                    "strftime_now": partial(_strftime, rendered_at_us),
                }
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the model's chat template refuses these messages: {error.message}") from error
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError) as error:
            raise InvalidRequest(f"the model's chat template fails on these messages: {error}") from error


def _system_first(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    system = [message for message in messages if message.role == "system"]
    joined = replace(system[0], content="\n".join(message.content for message in system))
    return [joined, *(message for message in messages if message.role != "system")]


def _values(message: ChatMessage) -> dict[str, Any]:
    """Return a message as templates read it. Absent parts are not defined."""
    values: dict[str, Any] = {"role": message.role, "content": message.content}
    for name in ("name", "tool_call_id"):
        if getattr(message, name):
            values[name] = getattr(message, name)
    if message.reasoning:
        values["reasoning_content"] = values["reasoning"] = message.reasoning
    if message.tool_calls:
        values["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _object(call.arguments)}}
            for call in message.tool_calls
        ]
    return values


def _object(text: str) -> object:
    """Parse the arguments of a call, which templates write as JSON themselves. A text that is no JSON object stays as
    it is.
    """
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def read_chat_template(folder: Path, tokenizer_config: Mapping[str, object]) -> ChatTemplate | None:
    """Read chat_template.jinja, or `chat_template` of tokenizer_config.json: one template, or a list with one named
    default."""
    source: object = tokenizer_config.get("chat_template")
    if isinstance(source, list):
        named = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
        source = named.get("default")
    template_file = folder / "chat_template.jinja"
    if template_file.is_file():
        source = template_file.read_text(encoding="utf-8")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ConfigError(f"{folder}/tokenizer_config.json: chat_template must be text")
    return ChatTemplate(source, special_tokens(tokenizer_config))


def special_tokens(tokenizer_config: Mapping[str, object]) -> dict[str, str]:
    """Return the special tokens that tokenizer_config.json names, by their names in templates."""
    tokens: dict[str, str] = {}
    for name in NAMED_TOKENS:
        token = tokenizer_config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            tokens[name] = token
    return tokens


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's tokens for training; rendering ignores it."""

    tags = {"generation"}  # noqa: RUF012  # as jinja declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime(at_us: int, text_format: str) -> str:
    """Format a time in UTC. `%s` is replaced here, because the C library takes it in the time zone of the process."""
    seconds = str(at_us // 1_000_000)
    text_format = re.sub("%(.)", lambda found: seconds if found[1] == "s" else found[0], text_format)
    return (_EPOCH + timedelta(microseconds=at_us)).strftime(text_format)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode as JSON. Jinja's own filter escapes HTML, which a prompt must not have."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
